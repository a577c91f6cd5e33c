"""Costs as estimates: how a timed round moves them, and what it says of tiers that did not run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.adaptive.arms import whole
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.estimate import CostEstimate
from jaxspec.tier import PLAIN, Tier

TIERS = [Tier(d) for d in range(6)]
RIGHT = [1.0, 1.45, 1.6, 1.8, 2.05, 2.4]


def estimate(row: list[float], buckets: tuple[int, ...] = (1,), **options: bool) -> CostEstimate:
    cost = CostTable({(t, b): s for b in buckets for t, s in zip(TIERS, row, strict=True)})
    return CostEstimate(whole(TIERS), buckets, cost, **options)


def test_a_timed_round_moves_a_wrong_cost_at_once_and_its_family_with_it():
    cost = estimate([1.0, *(2 * s for s in RIGHT[1:])])
    cost.observe(PLAIN, 1, 1.0)
    before = cost.seconds(Tier(5), 1)
    assert cost.news(3, 0, 1) > 0.5
    cost.observe(Tier(3), 1, RIGHT[3])
    assert cost.seconds(Tier(3), 1) == pytest.approx(RIGHT[3], rel=0.1)
    assert cost.seconds(Tier(5), 1) < 0.75 * before
    assert cost.seconds(PLAIN, 1) == pytest.approx(1.0, rel=0.1)
    assert cost.news(3, 0, 1) < 0.25 and cost.news(5, 0, 1) > cost.news(3, 0, 1)


def test_what_slows_everything_cancels_between_tiers():
    cost = estimate(RIGHT, (1, 8))
    for _ in range(100):
        cost.observe(PLAIN, 1, 1.3)
        cost.observe(Tier(1), 1, 1.3 * RIGHT[1])
    assert cost.seconds(PLAIN, 1) == pytest.approx(1.3, rel=0.01)
    for tier, seconds in zip(TIERS, RIGHT, strict=True):
        # Also for tiers that did not run, and most of it for a bucket that did not.
        assert cost.seconds(tier, 1) == pytest.approx(1.3 * seconds, rel=0.03)
        assert cost.seconds(tier, 8) == pytest.approx(1.3 * seconds, rel=0.1)


def test_longer_contexts_cost_every_round_as_many_seconds():
    table = CostTable({(t, 16): s for t, s in zip(TIERS, RIGHT, strict=True)}, context=200, growth=1e-4)
    cost, short = CostEstimate(whole(TIERS), (16,), table), 16 * 100
    plain, chain = (cost.seconds(t, 16, context=short) for t in (PLAIN, Tier(3)))
    assert (plain, chain) == (pytest.approx(1.0 - 0.16), pytest.approx(1.8 - 0.16))
    assert cost.seconds(Tier(3), 16) == cost.seconds(Tier(3), 16, context=16 * 200) == pytest.approx(1.8)
    for _ in range(20):  # a slow machine, at short contexts: nothing but that is learnt
        cost.observe(PLAIN, 16, 1.5 * plain, context=short)
        cost.observe(Tier(3), 16, 1.5 * chain, context=short)
    for tier, seconds in zip(TIERS, RIGHT, strict=True):
        assert cost.seconds(tier, 16) == pytest.approx(1.5 * seconds, rel=0.02)
    assert cost.seconds(PLAIN, 16, context=0) > 0.1  # a line does not end below nothing
    cost.learn(PLAIN, 16, 1.0)
    assert cost.observe_with(Tier(3), 16, 1.5 * chain + 0.7, 0.7, 0.1, context=short)[0] == pytest.approx(0.7, rel=0.1)


def test_a_plain_round_after_drafts_is_taken_for_a_slow_one():
    fair, fooled = estimate(RIGHT), estimate(RIGHT)
    for _ in range(5):
        for cost, told in ((fair, True), (fooled, False)):
            for _ in range(3):
                cost.observe(Tier(2), 1, 1.6)
            cost.observe(PLAIN, 1, 1.4, after_drafts=told)
            cost.observe(PLAIN, 1, 1.0)
    assert fair.seconds(PLAIN, 1) == pytest.approx(1.0, rel=0.04)
    assert fooled.seconds(PLAIN, 1) > 1.1
    fair.observe(PLAIN, 1, 0.8, after_drafts=True)
    assert fair.seconds(PLAIN, 1) < 0.97  # what is quicker is believed


def test_a_slow_round_of_a_settled_tier_does_little_and_a_lasting_change_is_followed():
    cost = estimate(RIGHT)
    for _ in range(50):
        cost.observe(Tier(3), 1, 1.8)
    assert cost.observe(Tier(3), 1, 18.0)
    assert cost.seconds(Tier(3), 1) == pytest.approx(1.8, rel=0.15)
    for _ in range(10):
        cost.observe(Tier(3), 1, 3.6)
    assert cost.seconds(Tier(3), 1) == pytest.approx(3.6, rel=0.05)
    assert cost.seconds(Tier(2), 1) == pytest.approx(3.2, rel=0.15)  # other work slows all


def test_a_first_round_that_was_disturbed_is_corrected_by_the_next():
    cost = estimate(RIGHT)
    cost.observe(PLAIN, 1, 1.0)
    assert cost.observe(Tier(5), 1, 5 * 2.4)
    assert cost.news(5, 0, 1) > 0.4
    assert not cost.observe(Tier(5), 1, 2.4)
    assert cost.seconds(Tier(5), 1) == pytest.approx(2.4, rel=0.25)


def test_deeper_chains_are_not_cheaper_and_odd_entries_are_doubted():
    cost = estimate([3.0, *RIGHT[1:]])
    assert cost.seconds(PLAIN, 1) <= cost.seconds(Tier(1), 1) <= cost.seconds(Tier(2), 1)
    odd, fair = estimate([*RIGHT[:4], 3 * RIGHT[4], RIGHT[5]]), estimate(RIGHT)
    for one in (odd, fair):
        one.observe(PLAIN, 1, 1.0)
    assert odd.news(4, 0, 1) > 1.2 * fair.news(4, 0, 1)


def test_chains_on_a_line_are_believed_and_of_three_that_are_on_none_each_is_doubted():
    straight, bent = estimate([1.0, 1.4, 1.6, 1.8, 2.0, 2.2]), estimate([1.0, 1.4, 2.4, 1.8, 2.9, 2.2])
    for one in (straight, bent):
        one.observe(PLAIN, 1, 1.0)
        one.observe(Tier(1), 1, 1.4)
    assert straight.news(3, 1, 1) < 0.2 < bent.news(3, 1, 1)

    tiers = [PLAIN, Tier(1), Tier(2), Tier(4)]
    cost = CostTable({(t, 1): s for t, s in zip(tiers, (1.0, 1.45, 1.6, 3 * 2.05), strict=True)})
    three = CostEstimate(whole(tiers), (1,), cost)
    for _ in range(30):
        for tier, seconds in ((PLAIN, 1.0), (Tier(1), 1.45), (Tier(2), 1.6)):
            three.observe(tier, 1, seconds)
    assert three.news(3, 2, 1) > 0.3  # the others fit, and this one may be wrong all the same


def test_new_measurements_move_what_rounds_did_not_tell():
    cost = estimate([1.0, *(2 * s for s in RIGHT[1:])])
    for tier, seconds in zip(TIERS[1:], RIGHT[1:], strict=True):
        cost.learn(tier, 1, seconds)
    assert [cost.seconds(t, 1) for t in TIERS] == pytest.approx(RIGHT)
    for _ in range(50):
        cost.observe(Tier(3), 1, 1.8)
    cost.learn(Tier(3), 1, 18.0)
    assert cost.seconds(Tier(3), 1) < 9
    cost.observe(Tier(3), 1, 1.8)
    assert cost.seconds(Tier(3), 1) == pytest.approx(1.8, rel=0.2)


def test_without_corrections_and_without_costs():
    frozen = estimate(RIGHT, enabled=False)
    assert not frozen.observe(PLAIN, 1, 2.0)
    assert frozen.seconds(PLAIN, 1) == pytest.approx(1.0) and frozen.news(3, 0, 1) == 0
    cost = CostEstimate(whole(TIERS), (1, 2), CostTable({(PLAIN, 1): 1.0}))
    assert cost.knows(PLAIN, 1) and not cost.knows(PLAIN, 2) and not cost.knows(Tier(9), 1)
    cost.observe(Tier(3), 1, 1.0)
    with pytest.raises(ValueError, match="chain-3 in bucket 1"):
        cost.seconds(Tier(3), 1)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        cost.observe(PLAIN, 1, seconds)
    assert cost.seconds(PLAIN, 1) == 1.0
    cost.learn(Tier(3), 1, 2.0)
    assert cost.seconds(Tier(3), 1) == 2.0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 4]), st.floats(1e-6, 1e4), st.booleans()), max_size=80)
)
def test_any_seconds_leave_a_covariance(rounds):
    cost = estimate(RIGHT, (1, 4))
    for tier, bucket, seconds, measured in rounds:
        (cost.learn if measured else cost.observe)(Tier(tier), bucket, seconds)
    for bucket in (1, 4):
        for i, tier in enumerate(TIERS):
            assert 0 < cost.seconds(tier, bucket) < math.inf
            for j in range(6):
                assert cost.news(i, j, bucket) >= 0
            assert cost._blocks[bucket].cov[i][i] > 0
