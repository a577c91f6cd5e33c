"""Requests that ask for a time per token: how far they lag, what their drafts weigh, and rounds that end in time."""

from __future__ import annotations

import pytest
from mixed import Table, h200, mixed

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.goodput import GoodputPolicy
from jaxspec.adaptive.objectives import need, weights
from jaxspec.adaptive.policy import BatchView
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


def test_no_round_is_longer_than_the_most_urgent_request_asks():
    tiers = [Tier(d) for d in (0, 1, 2, 4, 6)]
    one = GoodputPolicy(tiers, CostTable({(tier, 64): h200(tier, 64) for tier in tiers}))
    Table(64).play(one, mixed(64, share=1.0), 100)
    usual = as_choice(one.select(BatchView(64, 64))).tier
    assert usual.depth >= 4
    asked = [as_choice(one.select(BatchView(64, 64, tpot=tpot))).tier for tpot in (1.0, 8.5e-3, 7e-3, 1e-6)]
    assert asked == [usual, Tier(1), PLAIN, PLAIN]
    assert as_choice(one.select(BatchView(64, 64))).tier == usual


def test_what_is_refused():
    with pytest.raises(ValueError, match="tpot must be a positive number of seconds, got 0"):
        Request("r", [1], SamplingParams(), seed=0, tpot=0)
    with pytest.raises(ValueError, match=r"objective must be one of \('cumulative', 'step'\), got 'soon'"):
        SpeculationConfig(objective="soon")
