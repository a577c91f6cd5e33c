"""Requests that ask for a time per token: how far they lag, what their drafts weigh, and rounds that end in time."""

from __future__ import annotations

import pytest
from mixed import Table, h200, mixed

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.goodput import GoodputPolicy
from jaxspec.adaptive.objectives import need, weights
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.config import SpeculationConfig
from jaxspec.request import Request, SamplingParams
from jaxspec.tier import PLAIN, Tier, as_choice


def test_need_counts_what_was_promised_by_the_end_of_the_round():
    # 0.4 s after the first token at 50 ms a token 8 were promised, and a round of 50 ms promises one more.
    assert need(0.4, 8, 0.05, 0.05) == pytest.approx(1)
    assert need(0.4, 5, 0.05, 0.05) == pytest.approx(4)
    assert need(0.4, 20, 0.05, 0.05) == pytest.approx(-11)


def test_those_that_lag_weigh_more_up_to_what_a_round_brings():
    assert weights([None, -11.0, 1.0, 2.5, 400.0], 4) == [1.0, 1.0, 1.0, 2.5, 5.0]


def test_a_round_takes_as_long_as_what_it_brings_allows():
    tiers = [Tier(d) for d in (0, 1, 2, 4, 6)]
    one = GoodputPolicy(tiers, CostTable({(tier, 64): h200(tier, 64) for tier in tiers}))
    Table(64).play(one, mixed(64, share=1.0), 100)
    choose = lambda tpot=None: as_choice(one.select(BatchView(64, 64, tpot=tpot))).tier
    usual = choose()
    assert usual.depth >= 4
    # It is longer than one plain round, and no tier has less time per token than the best one.
    assert h200(usual, 64) > 8.5e-3 > h200(usual, 64) / one.expected_tokens(usual, 64)
    assert [choose(tpot) for tpot in (1.0, 8.5e-3)] == [usual] * 2


def test_the_poorer_half_sets_the_pace():
    tiers = [Tier(d) for d in (0, 2)]
    one = GoodputPolicy(tiers, CostTable({(tier, 64): h200(tier, 64) for tier in tiers}))
    for _ in range(40):
        one.select(BatchView(64, 64))
        one.observe(RoundStats(Tier(2), 64, 64, (2,) * 32 + (0,) * 32, rows=tuple(range(64))))
    choose = lambda tpot=None: as_choice(one.select(BatchView(64, 64, tpot=tpot))).tier
    # On average they would have it in time; half of them would not.
    assert choose() == Tier(2) and h200(Tier(2), 64) / one.expected_tokens(Tier(2), 64) < 7e-3
    assert [choose(tpot) for tpot in (1.0, 7e-3, 1e-6)] == [Tier(2), PLAIN, PLAIN]


def test_what_is_refused():
    with pytest.raises(ValueError, match="tpot must be a positive number of seconds, got 0"):
        Request("r", [1], SamplingParams(), seed=0, tpot=0)
    with pytest.raises(ValueError, match="tpot must be a positive number of seconds, got 'soon'"):
        Request("r", [1], SamplingParams(), seed=0, tpot="soon")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"objective must be one of \('cumulative', 'step'\), got 'soon'"):
        SpeculationConfig(objective="soon")
