"""Several rounds of one dispatch: decided once, learnt together."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from jaxspec.adaptive import BatchView, CostTable, GoodputPolicy, RoundStats
from jaxspec.adaptive.policy import replay
from jaxspec.tier import PLAIN, Tier, as_choice

CHAINS = [Tier(d) for d in (0, 1, 3, 5)]
#: Seconds by depth, such as a GPU's with a small model.
SECONDS = {0: 1.0, 1: 1.05, 3: 1.12, 5: 1.25}


def policy(buckets: Sequence[int] = (1, 8)) -> GoodputPolicy:
    return GoodputPolicy(CHAINS, CostTable({(t, b): SECONDS[t.depth] for t in CHAINS for b in buckets}))


def accepted(chance: random.Random, rate: float, depth: int) -> int:
    return next((i for i in range(depth) if chance.random() >= rate), depth)


def rounds(tier: Tier, told: Sequence[Sequence[int]], seconds: float = 0.0, **more: float) -> list[RoundStats]:
    """Those of a dispatch."""
    batch = len(told[0])
    return [
        RoundStats(tier, batch, batch, tuple(one), seconds, dispatched=len(told), rows=tuple(range(batch)), **more)
        for one in told
    ]


def test_rounds_of_a_dispatch_tell_as_much_as_single_ones():
    alone, together, chance = policy(), policy(), random.Random(0)
    for _ in range(60):
        dispatch = rounds(Tier(3), [[accepted(chance, 0.7, 3) for _ in range(8)] for _ in range(4)], 1.3)
        alone.select(BatchView(8, 8))
        together.select(BatchView(8, 8, rounds=4))
        for one in dispatch:
            alone.observe(dataclasses.replace(one, dispatched=1))
            together.observe(one)
    for tier in CHAINS:
        assert together.expected_tokens(tier, 8) == pytest.approx(alone.expected_tokens(tier, 8), rel=0.05)
    assert together.seconds(Tier(3), 8) == pytest.approx(1.3, rel=0.02)


def test_a_dispatch_of_which_rounds_are_missing_tells_nothing():
    one, clean = policy(), policy()
    for round_ in (*rounds(Tier(3), [[0], [0], [0], [0]], 9.0)[:3], *rounds(Tier(1), [[0]] * 4, 9.0)[:2]):
        one.observe(round_)
    for told in (one, clean):
        for round_ in rounds(Tier(1), [[1], [1]], 1.05):
            told.observe(round_)
    for tier in CHAINS:
        assert one.expected_tokens(tier, 1) == clean.expected_tokens(tier, 1)
        assert one.seconds(tier, 1) == clean.seconds(tier, 1)


@pytest.mark.parametrize(
    ("rate", "batch", "best"), [(0.8, 1, 5), (0.55, 1, 3), (0.03, 1, 0), (0.7, 8, 5), (0.03, 8, 0)]
)
def test_little_is_lost_on_finding_out(rate: float, batch: int, best: int):
    """Of 200 rounds, against the best tier; probes run as many rounds as the others."""
    lost = []
    for seed in range(6):
        one, chance, late = policy(), random.Random(seed), list[list[RoundStats]]()
        gained = spent = 0.0
        for _ in range(50):
            tier = as_choice(one.select(BatchView(batch, batch, rounds=4))).tier
            told = [[accepted(chance, rate, tier.depth) for _ in range(batch)] for _ in range(4)]
            seconds = SECONDS[tier.depth] * chance.lognormvariate(0, 0.03)
            # In expectation, so that luck neither wins nor loses.
            gained += 4 * sum(rate**i for i in range(tier.depth + 1))
            spent += 4 * SECONDS[tier.depth]
            late.append(rounds(tier, told, seconds))
            if len(late) > 1:
                for round_ in late.pop(0):
                    one.observe(round_)
        lost.append(1 - gained / spent * SECONDS[best] / sum(rate**i for i in range(best + 1)))
    assert min(lost) >= 0, "which is best"
    assert sum(lost) / len(lost) < 0.03, lost


def test_what_drafting_again_takes_is_learnt_from_its_share_of_a_dispatch():
    """The pass lasts three plain rounds, each of four rounds is told a quarter of it."""
    one = policy()
    for _ in range(30):
        for tier in (Tier(3), PLAIN, PLAIN):
            for round_ in rounds(tier, [[0]] * 4, SECONDS[tier.depth]):
                one.observe(round_)
        for round_ in rounds(Tier(3), [[0]] * 4, entered=SECONDS[3] + 3 / 4):
            one.observe(round_)
    assert one._entry.plain_rounds(1)[0] == pytest.approx(3, rel=0.25)


def test_a_replay_asks_once_for_all_rounds_of_a_dispatch():
    one, chance, heard, chosen = policy(), random.Random(0), list[RoundStats](), list[Tier]()
    for _ in range(60):
        tier = as_choice(one.select(BatchView(1, 1, rounds=4))).tier
        told = rounds(tier, [[accepted(chance, 0.6, tier.depth)] for _ in range(4)], SECONDS[tier.depth])
        for round_ in told:
            one.observe(round_)
        heard, chosen = heard + told, chosen + [tier] * 4
    assert len(set(chosen)) > 1
    assert list(replay(policy(), [stats.to_json() for stats in heard])) == chosen


@pytest.mark.parametrize("ratio", [0.85, 1.0])
def test_looks_at_plain_decoding_do_not_make_it_seem_cheaper(ratio: float):
    """A slow first round after drafts is one of four: what they take together is nearly what they take."""
    found = []
    for seed in range(5):
        one, chance = policy(), random.Random(seed)
        for turn in range(300):
            one.select(BatchView(8, 8, rounds=4))
            tier = PLAIN if turn % 6 == 5 else Tier(3)
            told = [[accepted(chance, 0.6, tier.depth) for _ in range(8)] for _ in range(4)]
            seconds = (ratio if tier == PLAIN else SECONDS[3]) * chance.lognormvariate(0, 0.08)
            for round_ in rounds(tier, told, seconds):
                one.observe(round_)
        found.append(one.seconds(PLAIN, 8) / one.seconds(Tier(3), 8))
    assert sum(found) / len(found) == pytest.approx(ratio / SECONDS[3], rel=0.035)
