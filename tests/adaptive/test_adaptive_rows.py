"""Requests of one batch that accept unlike each other: who they are, and what a choice makes of the batch in time."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from jaxspec.adaptive import CostTable, GoodputPolicy, RoundStats, StaticPolicy, TierPolicy
from jaxspec.adaptive.policy import PLACE, BatchView
from jaxspec.adaptive.rows import Rows
from jaxspec.tier import PLAIN, Tier, as_choice


def observed(rates: list[float], rounds: int, rows: Rows | None = None, first: int = 0, depth: int = 4) -> Rows:
    """Rounds of requests in places 0, 1, ... of whom so many had these places before."""
    rows, chance = rows or Rows(), np.random.default_rng(0)
    numbers = [place + ((first + place) << PLACE) for place in range(len(rates))]
    for _ in range(rounds):
        run = np.asarray([min(depth, int(chance.geometric(1 - rate)) - 1) for rate in rates])
        rows.observe(numbers, run, np.minimum(run + 1, depth))
    return rows


def test_halves_are_told_apart_where_they_differ():
    low, high = observed([0.85, 0.4] * 16, 400).halves
    assert low == pytest.approx(0.4, abs=0.06) and high == pytest.approx(0.85, abs=0.06)
    low, high = observed([0.7] * 32, 400).halves
    assert low == pytest.approx(high, abs=0.03)
    assert observed([0.9, 0.1], 50).halves == (0.5, 0.5)  # two say nothing


def test_who_takes_a_place_starts_anew_and_places_may_be_many():
    rows = observed([0.9, 0.1] * 40, 240)
    assert rows.better([place + (place << PLACE) for place in range(80)]).tolist() == [True, False] * 40
    observed([0.1, 0.9] * 40, 160, rows, first=1)
    assert rows.better(range(80)).tolist() == [False, True] * 40
    assert not rows.better([5000]).any()


def serve(policy: TierPolicy, rounds: int = 1200, places: int = 32, tells: bool = True) -> float:
    """Tokens a second of the last third: requests of 60 tokens that end and give their places to the next.

    Drafts of every other request are right at 0.95, of the rest at 0.2.
    """
    chance, numbers, left = random.Random(0), list(range(places)), [60] * places
    rates, tokens, seconds = [(0.95, 0.2)[i % 2] for i in range(places)], 0, 0.0
    for n in range(rounds):
        tier, accepted = as_choice(policy.select(BatchView(places, places))).tier, []
        for i, rate in enumerate(rates):
            count = 0
            while count < tier.depth and chance.random() < rate:
                count += 1
            accepted.append(count)
            left[i] -= count + 1
        policy.observe(RoundStats(tier, places, places, tuple(accepted), rows=tuple(numbers) if tells else ()))
        for i in range(places):
            if left[i] <= 0:
                left[i], numbers[i], rates[i] = 60, numbers[i] + (1 << PLACE), chance.choice((0.95, 0.2))
        if n >= 2 * rounds // 3:
            tokens, seconds = tokens + sum(accepted) + places, seconds + SECONDS[tier.depth]
    return tokens / seconds


SECONDS = {0: 1.0, 1: 1.25, 5: 2.0}


def test_easy_requests_do_not_decide_for_all():
    """They are done sooner, so what the batch at hand promises of deep drafts is not what a server keeps."""
    tiers = [Tier(d) for d in SECONDS]
    costs = CostTable({(tier, 32): SECONDS[tier.depth] for tier in tiers})
    best = max(serve(StaticPolicy(tier)) for tier in tiers)
    told, untold = (serve(GoodputPolicy(tiers, costs), tells=tells) for tells in (True, False))
    assert told >= 0.98 * best and told > 1.02 * untold


def test_numbers_in_recordings():
    stats = RoundStats(Tier(2), 1, 1, (1,), rows=(3 + (7 << PLACE),))
    assert RoundStats.from_json(stats.to_json()) == stats
    assert "rows" not in json.loads(RoundStats(PLAIN, 1, 1, (0,)).to_json())
