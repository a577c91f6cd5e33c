"""The controller, the recorder, the static policy, and replay without JAX."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspec
from jaxspec.adaptive import (
    AdaptiveController,
    AdaptiveSpeculativeParams,
    BatchView,
    EmaPolicy,
    Recorder,
    RoundStats,
    StaticPolicy,
    replay,
)
from jaxspec.tier import PLAIN, Choice, Tier

EAGER = {"1": {"candidate_steps": [0, 1, 3], "ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}}
VIEW = BatchView(1, 1)


def eager_policy() -> EmaPolicy:
    return EmaPolicy(AdaptiveSpeculativeParams(EAGER))


def test_static_policy():
    policy = StaticPolicy(Tier(3))
    assert policy.tiers == (Tier(3),)
    policy.observe(RoundStats(Tier(3), 1, 1, (0,)))
    assert policy.select(VIEW) == Tier(3)
    assert policy.buckets_for(Tier(3), (1, 8)) == (1, 8)
    assert policy.buckets_for(PLAIN, (1, 8)) == ()


def test_select_gives_the_tier_and_its_state():
    states = {Tier(k): object() for k in (0, 1, 3, 5)}
    controller = AdaptiveController(eager_policy(), states)
    assert controller.select(VIEW) == (Choice(Tier(1)), states[Tier(1)], 1)
    controller.observe(RoundStats(Tier(1), 1, 1, (1,)))
    assert controller.select(VIEW) == (Choice(Tier(3)), states[Tier(3)], 1)


class Said:
    """A policy that says what it was told to, and counts how often it was asked."""

    tiers = (PLAIN, Tier(1))

    def __init__(self, *said: Tier) -> None:
        self.said, self.asked = said, 0

    def select(self, view: BatchView) -> Tier:
        self.asked += 1
        return self.said[self.asked - 1]

    def observe(self, stats: RoundStats) -> None: ...

    def learn(self, tier: Tier, bucket: int, seconds: float) -> None: ...

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        return buckets


def test_the_policy_is_asked_once_for_all_rounds_of_a_dispatch():
    one, several = Tier(1), dataclasses.replace(VIEW, rounds=3)
    policy = Said(one, PLAIN, one)
    controller = AdaptiveController(policy, {PLAIN: 0, one: 1})
    chosen = [controller.select(view)[::2] for view in (several, several, VIEW)]
    assert chosen == [(Choice(one), 3), (Choice(PLAIN), 3), (Choice(one), 1)]
    assert controller.rounds_by_tier == {PLAIN: 3, one: 4} and controller.switches == 2


def test_what_cannot_be_repeated_runs_once():
    policy = Said(Tier(1), Tier(1))
    controller = AdaptiveController(policy, {PLAIN: 0, Tier(1): 1})
    refused: list[Choice] = []
    assert controller.select(dataclasses.replace(VIEW, rounds=4), lambda choice: bool(refused.append(choice)))[2] == 1
    assert refused == [Choice(Tier(1))]


def test_counts_rounds_and_switches():
    controller = AdaptiveController(eager_policy(), {Tier(k): k for k in (0, 1, 3)})
    # 1 accepted of 1 climbs to 3; none accepted falls to 0; a plain round climbs to 1, its average still 0.
    for accepted in (1, 0, 0, 0):
        tier = controller.select(VIEW)[0].tier
        controller.observe(RoundStats(tier, 1, 1, (accepted,)))
    assert controller.rounds_by_tier == {PLAIN: 1, Tier(1): 2, Tier(3): 1}
    assert controller.switches == 3
    fresh = AdaptiveController(eager_policy(), {Tier(k): k for k in (0, 1, 3)})
    assert (fresh.switches, fresh.rounds_by_tier) == (0, {PLAIN: 0, Tier(1): 0, Tier(3): 0})


def test_policy_needs_a_state_for_every_tier():
    with pytest.raises(ValueError, match=r"\['chain-3'\].*\['off', 'chain-1'\]"):
        AdaptiveController(eager_policy(), {PLAIN: 0, Tier(1): 1})


def test_policy_that_leaves_its_tiers_is_found_out():
    policy = StaticPolicy(Tier(1))
    controller = AdaptiveController(policy, {Tier(1): 1})
    policy.tier = Tier(2)
    with pytest.raises(ValueError, match=r"selected tier chain-2.*\['chain-1'\]"):
        controller.select(VIEW)
    assert controller.rounds_by_tier == {Tier(1): 0}


def record(path: Path) -> list[Tier]:
    """Runs a policy whose feedback is current, and returns what it chose."""
    chosen = []
    with Recorder(path) as recorder:
        controller = AdaptiveController(eager_policy(), {Tier(k): k for k in (0, 1, 3)}, recorder)
        for accepted in (1, 3, 2, 0, 0, 1, 3):
            tier = controller.select(VIEW)[0].tier
            chosen.append(tier)
            controller.observe(RoundStats(tier, 1, 1, (min(accepted, tier.depth),), 0.25, 17))
    return chosen


def test_replay_repeats_the_recorded_choices(tmp_path):
    chosen = record(tmp_path / "rounds.jsonl")
    assert len(set(chosen)) == 3
    with (tmp_path / "rounds.jsonl").open() as lines:
        assert list(replay(eager_policy(), lines)) == chosen


def test_recorder_writes_each_round_at_once(tmp_path):
    stats = RoundStats(Tier(3, 2, 8), 2, 4, (1, 3), 0.5, 99)
    recorder = Recorder(tmp_path / "rounds.jsonl")
    recorder.write(stats)
    assert [RoundStats.from_json(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()] == [stats]
    recorder.close()
    recorder.close()


def test_replay_does_not_import_jax(tmp_path):
    chosen = record(tmp_path / "rounds.jsonl")
    script = f"""
import sys
import jaxspec.adaptive as adaptive
policies = [
    adaptive.EmaPolicy(adaptive.AdaptiveSpeculativeParams({EAGER!r})),
    adaptive.GoodputPolicy(
        [adaptive.policy.Tier(k) for k in (1, 3)],
        adaptive.CostTable({{(adaptive.policy.Tier(k), 1): 1 + k / 10 for k in (0, 1, 3)}}),
    ),
]
for policy in policies:
    with open({str(tmp_path / "rounds.jsonl")!r}) as lines:
        print(*(tier.depth for tier in adaptive.replay(policy, lines)))
assert "jax" not in sys.modules
"""
    root = Path(jaxspec.__path__[0]).parent
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    ema, goodput = result.stdout.splitlines()
    assert ema == " ".join(str(tier.depth) for tier in chosen)
    assert len(goodput.split()) == len(chosen)
