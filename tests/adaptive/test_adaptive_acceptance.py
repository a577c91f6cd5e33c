"""The model of acceptance: what rounds of any tier say of every position, within bounds whatever is observed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.adaptive import (
    BatchView,
    CostTable,
    GoodputPolicy,
    RoundStats,
)
from jaxspec.adaptive.acceptance import AcceptanceModel
from jaxspec.tier import PLAIN, Tier


def test_prior_and_extrapolation():
    model = AcceptanceModel(3, [1, 2, 64], half_life=60, prior_rate=0.8)
    assert model.rates(1) == (0.8, 0.8, 0.8)
    assert model.tokens(Tier(2), 1) == pytest.approx(1 + 0.8 + 0.64)
    for _ in range(50):
        model.observe(RoundStats(Tier(1), 4, 1, (1, 0, 0, 0)))
    rates = model.rates(1)
    assert rates[0] == pytest.approx(0.25, abs=0.05)
    assert rates[1] == pytest.approx(rates[0]) and rates[2] == pytest.approx(rates[0])
    assert model.rates(64) == pytest.approx(rates, abs=0.05)


def test_counts_positions_that_were_reached():
    # 2 rows: one accepts both, one fails at once. Position 1: 1 of 2; position 2: 1 of 1; each on top of its start.
    model = AcceptanceModel(2, [1], half_life=1e9, prior_rate=0.8)
    model.observe(RoundStats(Tier(2), 2, 1, (2, 0)))
    first = (1 + 2 * 0.8) / (2 + 2)
    assert model.rates(1) == pytest.approx((first, (1 + 2 * first) / (1 + 2)))


@pytest.mark.parametrize("seed", range(8))
def test_rates_never_exceed_one_when_acceptance_swings(seed):
    """Rounding took them 1e-14 above, and the breadth of a tree then made a complex number of what was left of 1."""
    tiers, buckets, chance = [PLAIN, Tier(1), Tier(3), Tier(3, 2, 7)], (1, 2, 4), random.Random(seed)
    cost = CostTable({(t, b): 1 + 0.1 * t.depth for t in tiers for b in buckets})
    policy = GoodputPolicy(tiers, cost)
    for i in range(400):
        tier, bucket = chance.choice(tiers[1:]), chance.choice(buckets)
        rows = chance.randint(1, bucket)
        policy.observe(RoundStats(tier, rows, bucket, (0 if i // 40 % 2 else tier.depth,) * rows))
        assert policy.select(BatchView(rows, bucket)) in tiers
        assert all(policy.expected_tokens(t, bucket) <= 1 + t.depth + 1e-9 for t in tiers)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([PLAIN, Tier(1), Tier(3), Tier(5), Tier(3, 4, 16)]),
            st.sampled_from([1, 4]),
            st.lists(st.integers(0, 9), max_size=5),
            st.sampled_from([0.0, 1e-9, 1.0, 1e9]),
        ),
        max_size=40,
    )
)
def test_any_feedback_keeps_rates_in_range_and_choices_legal(rounds):
    tiers = [PLAIN, Tier(1), Tier(3), Tier(3, 4, 16)]
    cost = CostTable({(t, b): 1 + 0.2 * t.depth for t in tiers for b in (1, 4)})
    policy, twin = (GoodputPolicy(tiers, cost) for _ in range(2))
    for tier, bucket, accepted, seconds in rounds:
        stats = RoundStats(tier, len(accepted), bucket, tuple(min(a, tier.depth) for a in accepted), seconds)
        view = BatchView(bucket, bucket)
        chosen = policy.select(view)
        assert chosen in policy.tiers
        assert chosen == twin.select(view)
        for one in (policy, twin):
            one.observe(stats)
        assert all(1 <= policy.expected_tokens(t, bucket) <= 1 + t.depth + 1e-9 for t in tiers)
