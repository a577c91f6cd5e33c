"""Tiers that only look up: told apart from chains in names, files and acceptance, and chosen while text repeats."""

from __future__ import annotations

import json

import pytest

from jaxspec.adaptive.acceptance import AcceptanceModel
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.goodput import GoodputPolicy
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import PLAIN, Tier, parse_tier

LOOK_UP, CHAIN = Tier(8, lookup=True), Tier(4)


def test_names_and_rows_lead_back():
    assert LOOK_UP.name == "suffix-8" and parse_tier("suffix-8") == LOOK_UP != Tier(8) and LOOK_UP.is_chain
    assert Tier(*json.loads(json.dumps(LOOK_UP.row))) == LOOK_UP and CHAIN.row == [4, 1, 5]
    stats = RoundStats(LOOK_UP, 1, 1, (3,), 0.5, 9)
    assert RoundStats.from_json(stats.to_json()) == stats
    cost = CostTable({(PLAIN, 1): 1.0, (Tier(8), 1): 2.0, (LOOK_UP, 1): 1.5})
    assert CostTable.from_json(cost.to_json()) == cost
    for fields in ({"depth": 0}, {"depth": 3, "topk": 2, "num_nodes": 5}):
        with pytest.raises(ValueError, match="a lookup tier is a chain"):
            Tier(**fields, lookup=True)


def test_look_ups_tell_nothing_of_a_drafter_and_the_drafter_little_of_them():
    model = AcceptanceModel(8, [1], half_life=60, prior_rate=0.8)
    unknown, rates = model.tokens(LOOK_UP, 1), model.rates(1)
    assert 1 < unknown < model.tokens(Tier(8), 1)
    for _ in range(20):
        model.observe(RoundStats(LOOK_UP, 1, 1, (8,)))
    assert model.tokens(LOOK_UP, 1) > 7 and model.rates(1) == rates
    for _ in range(600):
        model.observe(RoundStats(CHAIN, 1, 1, (2,)))
    assert model.tokens(LOOK_UP, 1) < 3


def test_look_ups_run_while_the_text_repeats():
    """A hybrid chain accepts 2 of 4, and all where the text repeats; then a look-up accepts 8 at less cost."""
    seconds = {PLAIN: 1.0, CHAIN: 1.4, LOOK_UP: 1.2}
    policy = GoodputPolicy([CHAIN, LOOK_UP], CostTable({(tier, 1): s for tier, s in seconds.items()}))
    chosen: list[Tier] = []
    for number in range(1200):
        repeats = 400 <= number < 800
        tier = policy.select(BatchView(1, 1))
        chosen.append(tier)
        accepted = {PLAIN: 0, CHAIN: 4 if repeats else 2, LOOK_UP: 8 if repeats else 0}[tier]
        policy.observe(RoundStats(tier, 1, 1, (accepted,), seconds[tier]))
    prose, edits, again = chosen[100:400], chosen[500:800], chosen[900:]
    assert prose.count(CHAIN) > 285 and again.count(CHAIN) > 285
    assert edits.count(LOOK_UP) > 285
