"""The default policy under budgets: batches of unlike rows, what their labels teach, and what may go wrong."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections import Counter

import numpy as np
import pytest
from mixed import Crowd, Fixed, Played, Table, best_fixed, h200, mixed, survivals

from jaxspec.adaptive.arms import Arm
from jaxspec.adaptive.calibration import calibration_error
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.goodput import GoodputPolicy
from jaxspec.adaptive.policy import BatchView, DraftLabels, RoundStats, replay
from jaxspec.adaptive.yields import Yields, guess
from jaxspec.config import SpeculationConfig
from jaxspec.tier import PLAIN, Choice, Tier

DEEP = Tier(6)
TIERS = [PLAIN, Tier(1), Tier(2), Tier(4), DEEP]
PACKED = [Arm(DEEP, 2.5), Arm(DEEP, 4.0)]


@functools.cache
def costs(*buckets: int) -> CostTable:
    rounds = [(tier, b, None) for tier in TIERS for b in buckets]
    rounds += [(arm.tier, b, arm.tokens(b)) for arm in PACKED for b in buckets]
    return CostTable({key: h200(*key) for key in rounds})


def policy(*buckets: int) -> GoodputPolicy:
    return GoodputPolicy(TIERS, costs(*buckets), buckets=buckets, packed=PACKED)


@functools.cache
def played(batch: int, share: float) -> tuple[Played, float]:
    """400 rounds of a batch, the share of whose rows is good; and the best tier's goodput."""
    crowd = mixed(batch, share=share)
    return Table(batch, noise=0.02).play(policy(batch), crowd, 400), best_fixed(batch, crowd, TIERS, rounds=100)


# ------------------------------------------------------------------ what it is for


@pytest.mark.parametrize(("batch", "gain"), [(16, 1.0), (32, 1.06), (64, 1.06), (128, 1.08), (256, 1.09)])
def test_gains_on_mixed_batches_over_the_best_tier(batch, gain):
    """Learning included; costs as measured on an H200, where packing gains next to nothing at batch 16."""
    run, best = played(batch, 0.5)
    assert run.goodput() >= gain * best
    assert run.switches(100) <= 3


@pytest.mark.parametrize(("batch", "share"), [(16, 0.0), (16, 1.0), (64, 0.0), (256, 1.0)])
def test_loses_nothing_where_rows_are_alike(batch, share):
    run, best = played(batch, share)
    assert run.goodput(100) >= 0.985 * best


def test_drops_the_budget_and_the_drafts_when_the_rows_change():
    table, one = Table(64, noise=0.02), policy(64)
    table.play(one, mixed(64), 150)
    hopeless, good = Crowd([0.02] * 64), mixed(64, share=1.0)
    run = table.play(one, hopeless, 40)
    assert sum(choice.tier == PLAIN for choice in run.choices[20:]) >= 15
    table.play(one, mixed(64), 300)
    run = table.play(one, good, 60)
    assert run.goodput(20) >= 0.97 * best_fixed(64, good, TIERS, rounds=50)


# ------------------------------------------------------------------ what it learns


def test_survival_is_calibrated_from_rounds_that_budgets_cut():
    one, crowd = policy(64), mixed(64)
    Table(64).play(one, crowd, 150)
    p, confidence = Crowd(list(crowd.rates) * 30).draft(np.random.default_rng(9), 6)
    told = one.select(BatchView(64, 64))
    assert isinstance(told, Choice) and told.tokens is not None and told.calibration
    believed = survivals(told, confidence)
    hits = np.random.default_rng(8).random(p.shape) < p
    outcomes = np.cumprod(hits, axis=1).astype(bool)
    bold = survivals(Choice(DEEP), confidence)
    error = calibration_error(believed.ravel().tolist(), outcomes.ravel().tolist())
    assert error <= 0.04 < calibration_error(bold.ravel().tolist(), outcomes.ravel().tolist())


def labels(rows: list[list[tuple[float, bool, bool, bool]]]) -> DraftLabels:
    """Of (confidence, verified, known, right)."""
    flat = [node for row in rows for node in row]
    flags = (bytes(node[i] for node in flat) for i in (1, 2, 3))
    depths = bytes([*range(1, len(rows[0]) + 1)] * len(rows))
    return DraftLabels(len(rows[0]), array("f", [node[0] for node in flat]), depths, *flags)


def test_what_a_budget_cut_off_is_expected_and_the_rest_counted():
    yields = Yields([Arm(Tier(2), 1.0)], [2])
    cut = [(0.5, True, True, True), (0.5, False, True, True)]  # what follows was accepted, though nobody drafted on it
    lost = [(0.5, True, True, False), (0.5, True, False, False)]
    unseen = [(0.5, False, True, True), (0.5, False, False, False)]
    assert yields.observe(labels([cut, lost]), 2, 2) == [2.0, 1.0, 1.0]
    fresh = Yields([Arm(Tier(2), 1.0)], [1])
    assert fresh.observe(labels([unseen]), 2, 1) == [1.0, 1.0, 0.5]
    assert fresh.share(0, 1) == pytest.approx(0.5 / 0.75)


def test_shares_are_guessed_between_blindness_and_foresight():
    alive = [0.8, 0.6, 0.4]
    assert guess(alive, 1.5, 0.0) == pytest.approx(1.1 / 1.8)
    assert guess(alive, 1.5, 1.0) == pytest.approx(1.5 / 1.8)
    assert guess(alive, 9.0, 0.5) == guess([0.0], 1.0, 0.5) == 1.0


@pytest.mark.parametrize("spoilt", [0.0, float("nan"), 1.0])
def test_confidences_that_tell_nothing_cost_little(spoilt):
    one, table, crowd = policy(32), Table(32, noise=0.02), mixed(32)
    observe = one.observe

    def spoil(stats: RoundStats) -> None:
        if stats.drafts is not None:
            told = dataclasses.replace(stats.drafts, confidence=array("f", [spoilt] * len(stats.drafts.confidence)))
            stats = dataclasses.replace(stats, drafts=told)
        observe(stats)

    one.observe = spoil
    run = table.play(one, crowd, 300)
    assert run.goodput(100) >= 0.95 * best_fixed(32, crowd, TIERS, rounds=50)


# ------------------------------------------------------------------ rules of the house


def test_packed_rounds_replay():
    heard: list[RoundStats] = []
    one = policy(32)
    observe = one.observe
    one.observe = lambda stats: (heard.append(stats), observe(stats))[1]
    run = Table(32, late=0, noise=0.02).play(one, mixed(32), 120)
    assert any(stats.drafts for stats in heard)
    again = list(replay(policy(32), [stats.to_json() for stats in heard]))
    assert again == [choice.tier for choice in run.choices]


def test_packed_rounds_come_when_their_cost_does():
    one = GoodputPolicy(TIERS, CostTable({(t, 32): h200(t, 32) for t in TIERS}), buckets=(32,), packed=PACKED)
    table, crowd = Table(32, noise=0.02), mixed(32)
    assert all(choice.tokens is None for choice in table.play(one, crowd, 60).choices)
    for arm in PACKED:
        one.learn(DEEP, 32, h200(DEEP, 32, arm.tokens(32)), arm.tokens(32))
    assert sum(choice.tokens is not None for choice in table.play(one, crowd, 200).choices) > 100


def test_a_packed_cost_that_is_wrong_is_mended():
    """Of each budget whose rounds have run, as each has in one of the runs: it was said to take twice as long."""
    wrong = {key: s * (2.0 if key[2] else 1.0) for key, s in costs(64).rounds.items()}
    found, crowd, mended = [], mixed(64), set()
    for seed in range(2):
        one = GoodputPolicy(TIERS, CostTable(wrong), buckets=(64,), packed=PACKED)
        table = Table(64, noise=0.02, seed=seed)
        runs = [table.play(one, crowd, 150) for _ in range(2)]
        found.append(runs[1].goodput())
        ran = Counter(choice.tokens for run in runs for choice in run.choices)
        for arm in PACKED:
            if ran[arm.tokens(64)] >= 5:
                key = DEEP, 64, arm.tokens(64)
                assert one.seconds(*key) == pytest.approx(h200(*key), rel=0.1), (seed, arm, ran)
                mended.add(arm)
    assert sum(found) / 2 >= 1.03 * best_fixed(64, crowd, TIERS, rounds=50)
    assert mended == set(PACKED)


def test_which_budgets_are_compiled():
    def budgets(**fields: object) -> dict[tuple[Tier, int], tuple[int, ...]]:
        from jaxspec.adaptive.kind import Room

        config = SpeculationConfig.of(fields)
        return config.policy_kind.budgets(config, Room((1, 4, 8, 16), (0, 1, 3), (1.0, 2.0)))

    assert budgets() == {(Tier(3), 8): (16, 24), (Tier(3), 16): (32, 48)}
    assert budgets(candidate_budgets=()) == budgets(verification="rejection") == {}
    assert budgets(candidate_steps=[1]) == {}
    # Each with the shallowest chain that is a draft deeper, or the deepest of all.
    chosen = budgets(candidate_steps=[1, 2, 3, 5, 7], candidate_budgets=[1, 1.5, 4, 6.5])
    found = {(tier.depth, n / 4 - 1) for (tier, bucket), many in chosen.items() for n in many if bucket == 4}
    assert found == {(2, 1), (3, 1.5), (5, 4), (7, 6.5)}
    assert budgets(candidate_budgets=[1, 7]) == {(Tier(3), b): (2 * b,) for b in (1, 4, 8, 16)}
    for fields, words in (
        ({"candidate_budgets": [0]}, "candidate_budgets must be a positive number of tokens a request, got 0"),
        ({"candidate_budgets": [1], "verification": "rejection"}, "need 'coupled' verification"),
        ({"candidate_budgets": [1], "depth": 3}, "belongs to the adaptive or .* policy, got policy 'static'"),
    ):
        with pytest.raises(ValueError, match=words):
            SpeculationConfig.of(fields)
    with pytest.raises(ValueError, match="a packed arm drafts as one of"):
        GoodputPolicy([Tier(2)], CostTable({}), buckets=(1,), packed=[Arm(Tier(3), 1.0)])


def test_fixed_budgets_stand_between_the_tiers():
    """Of the room itself: what is verified is what the device would take."""
    crowd = mixed(32)
    kept = [Table(32).play(Fixed(Choice(DEEP, tokens)), crowd, 30) for tokens in (32, 80, 32 * 7)]
    gained = [sum(run.tokens) for run in kept]
    assert gained[0] == 30 * 32 and gained[0] < gained[1] < gained[2]
