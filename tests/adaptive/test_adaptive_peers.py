"""Policies of others on packed rounds: AdaSpec and its ablations, the survival budget, the threshold, SpecInfer*."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest
from mixed import Crowd, Played, Table, best_fixed, h200, mixed

from jaxspec.adaptive import registry
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import Room
from jaxspec.adaptive.policy import BatchView, DraftLabels, RoundStats, TierPolicy, replay
from jaxspec.adaptive.threshold import refit
from jaxspec.config import SpeculationConfig
from jaxspec.tier import PLAIN, Choice, Tier, as_choice

STEPS, BUDGETS = (0, 1, 2, 4, 6), (1.0, 2.5, 4.0)
NAMES = ("adaspec", "adaspec-drafter", "adaspec-verifier", "survival", "threshold", "specinfer")
HOPELESS = Crowd([0.05] * 32)


def policy(name: str, bucket: int, costs: bool = True, **fields: Any) -> TierPolicy:
    config, room = SpeculationConfig(policy=name, **fields), Room((bucket,), STEPS, BUDGETS)
    kind = config.policy_kind
    rounds = {(tier, bucket, None) for tier in (PLAIN, *kind.reachable(config, room))}
    rounds |= {(*pair, tokens) for pair, counts in kind.budgets(config, room).items() for tokens in counts}
    return kind.build(config, room, CostTable({key: h200(*key) for key in rounds} if costs else {}))


def play(name: str, crowd: Crowd, rounds: int = 120) -> Played:
    batch = len(crowd.rates)
    return Table(batch, noise=0.02).play(policy(name, batch), crowd, rounds)


def test_what_each_makes_of_a_mixed_batch():
    crowd = mixed(64)
    best = best_fixed(64, crowd, [Tier(d) for d in STEPS], rounds=60)
    gained = {name: play(name, crowd).goodput(40) / best for name in NAMES}
    assert min(gained["survival"], gained["adaspec-verifier"]) > 1.05 > gained["adaspec"] > 0.95
    assert gained["adaspec-drafter"] > gained["threshold"] > gained["specinfer"]


def test_only_adaspecs_drafter_stops_where_drafts_do_not_pay():
    last = {name: play(name, HOPELESS).choices[-1] for name in NAMES}
    assert last["adaspec"] == last["adaspec-drafter"] == Choice(PLAIN)
    assert last["survival"].tokens == last["adaspec-verifier"].tokens == 64
    assert last["specinfer"] == Choice(Tier(8))


def test_the_survival_budget_verifies_everything_first_and_calibrates():
    run = play("survival", mixed(32))
    assert {choice.tokens for choice in run.choices[:30]} == {32 * 7}
    assert {choice.tier for choice in run.choices} == {Tier(6)} and run.choices[-1].calibration
    assert run.choices[-1].tokens in (112, 160)


@pytest.mark.parametrize("name", ["adaspec", "adaspec-verifier", "survival"])
def test_an_objective_bounds_the_round(name):
    """AdaSpec's rule: a request that accepts nothing has its token in time. Plain decoding takes 6.96 ms here."""
    one, crowd, table = policy(name, 64), mixed(64, share=1.0), Table(64)
    table.play(one, crowd, 60)
    free = as_choice(one.select(BatchView(64, 64)))
    bound = as_choice(one.select(BatchView(64, 64, tpot=h200(free.tier, 64, free.tokens) - 5e-4)))
    longest = h200(free.tier, 64, free.tokens)
    assert longest > 9e-3 and h200(bound.tier, 64, bound.tokens) <= longest - 5e-4


def test_the_threshold_stops_where_the_drafter_is_unsure_and_is_fitted():
    labels = [(0.9, True)] * 30 + [(0.7, False)] * 20 + [(0.8, True)] * 2
    assert refit(labels, 0.4) == 0.8
    assert refit([(0.5, True)], 0.4) == 0.4
    one = policy("threshold", 4)
    assert one.select(BatchView(4, 4)) == Choice(Tier(6), 28)
    sure = array("f", [0.9, 0.6, 0.3, 0.9, 0.9, 0.9] * 4)
    told = DraftLabels(6, sure, bytes(range(1, 7)) * 4, b"\1" * 24, b"\0" * 24, b"\0" * 24)
    one.observe(RoundStats(Tier(6), 4, 4, (0,) * 4, tokens=28, drafts=told))
    # The draft that is not sure enough is the last one made; of the depths 1, 2, 4 and 6 the next one below.
    assert one.select(BatchView(4, 4)) == Choice(Tier(2), 12)


@pytest.mark.parametrize("name", NAMES)
def test_they_replay_and_wait_for_costs(name):
    heard: list[RoundStats] = []
    one = policy(name, 32)
    observe = one.observe
    one.observe = lambda stats: (heard.append(stats), observe(stats))[1]
    run = Table(32, late=0, noise=0.02).play(one, mixed(32), 40)
    again = list(replay(policy(name, 32), [stats.to_json() for stats in heard]))
    assert again == [choice.tier for choice in run.choices]
    fresh = policy(name, 32, costs=False)
    assert fresh.select(BatchView(3, 32)) == (Tier(8) if name == "specinfer" else PLAIN)
    fresh.learn(Tier(6), 32, 1.0, 32 * 7)
    assert fresh.buckets_for(Tier(3), (32,)) == ()
    spoilt = [
        dataclasses.replace(s, drafts=s.drafts and dataclasses.replace(s.drafts, confidence=array("f", nans)))
        for s in heard
        for nans in [[float("nan")] * (len(s.drafts.confidence) if s.drafts else 0)]
    ]
    for stats in spoilt:
        one.observe(stats)
        assert as_choice(one.select(BatchView(32, 32))).tier in one.tiers


def test_what_they_refuse():
    assert set(NAMES) <= set(registry.names())
    for name in set(NAMES) - {"specinfer"}:
        for fields, words in (
            ({"verification": "rejection"}, f"policy '{name}' needs 'coupled' verification"),
            ({"candidate_steps": (0,)}, rf"policy '{name}' needs a depth, got candidate_steps \(0,\)"),
            ({"depth": 3}, "is a static tier's"),
        ):
            with pytest.raises(ValueError, match=words):
                SpeculationConfig(policy=name, **fields)
    for name in ("threshold", "adaspec-drafter"):
        with pytest.raises(ValueError, match=f"candidate_budgets belongs to .* policy, got policy '{name}'"):
            SpeculationConfig(policy=name, candidate_budgets=(1.0,))
    with pytest.raises(ValueError, match="drafts a chain, got"):
        SpeculationConfig(policy="specinfer", topk=2)
    with pytest.raises(ValueError, match="drafts chains only"):
        policy("survival", 4, topk=2)
