"""Budgets over a batch: calibrated confidences, the best shape, who gets it, and AdaSpec's rules beside it."""

from __future__ import annotations

import itertools
import math
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.adaptive import adaspec
from jaxspec.adaptive.budget import best_budget, spend
from jaxspec.adaptive.calibration import Calibration, calibration_error, chance_error
from jaxspec.adaptive.linear import LinearCost, fit
from jaxspec.adaptive.policy import DraftLabels

# ------------------------------------------------------------------ calibration


def truth(confidence: float, position: int, slope: float = 0.6, level: float = -0.4) -> float:
    """A drafter that is too sure of itself, and more so deeper."""
    return 1 / (1 + math.exp(-(slope * math.log(confidence / (1 - confidence)) + level - 0.3 * position)))


Row = tuple[list[float], int, int]


def labels(rows: list[Row]) -> DraftLabels:
    """Of chains, given confidences, how many were verified and how many are right; the next one is wrong."""
    flags, sure, nodes = ([], [], []), array("f"), len(rows[0][0])
    for confidences, verified, length in rows:
        sure.extend(confidences)
        for i in range(nodes):
            known = i <= min(verified, length)
            for flag, value in zip(flags, (i < verified, known, known and i < length), strict=True):
                flag.append(value)
    return DraftLabels(nodes, sure, bytes([*range(1, nodes + 1)] * len(rows)), *map(bytes, flags))


def play(model: Calibration, rounds: int, seed: int, verify: float = 0.0, explore: float = 1.0, level: float = -0.4):
    """Rounds of 4 requests whose drafts are verified as long as survival exceeds `verify`, or all of them."""
    chance, depth = random.Random(seed), 4
    predicted: list[float] = []
    outcomes: list[bool] = []
    for _ in range(rounds):
        rows: list[Row] = []
        for _ in range(4):
            confidences = [chance.betavariate(2, 1) * 0.98 + 0.01 for _ in range(depth)]
            survivals = model.survivals(confidences)
            verified = depth if chance.random() < explore else sum(s > verify for s in survivals)
            hits = [chance.random() < truth(c, i, level=level) for i, c in enumerate(confidences)]
            length = next((i for i, hit in enumerate(hits) if not hit), depth)
            predicted += survivals
            outcomes += [i < length for i in range(depth)]
            rows.append((confidences, verified, length))
        model.observe(labels(rows))
    return predicted, outcomes


@pytest.mark.parametrize("explore", [1.0, 0.1])
def test_survival_is_calibrated_also_where_unsure_drafts_are_rarely_verified(explore):
    model = Calibration(4)
    before = calibration_error(*play(Calibration(4), 1, 0))
    play(model, 400, 1, verify=0.4, explore=explore)
    after = calibration_error(*play(model, 1500, 2, verify=0.4, explore=explore))
    assert after <= 0.02 < before


def test_calibration_follows_a_change_within_forty_rounds():
    after = truth(0.9, 0, level=-2.0)
    model = Calibration(4)
    play(model, 500, 0)
    assert model.rates([0.9])[0] > after + 0.25
    play(model, 40, 1, level=-2.0)
    assert model.rates([0.9])[0] == pytest.approx(after, abs=0.06)


def test_what_was_not_verified_is_not_counted_as_refused():
    censored, refused = Calibration(3), Calibration(3)
    for _ in range(100):
        # Of the second the parent was not verified; of the other second the target's token is known.
        censored.observe(DraftLabels(3, array("f", [0.8] * 3), b"\1\2\3", b"\1\0\0", b"\1\0\0", b"\1\0\0"))
        refused.observe(labels([([0.8, 0.8, 0.8], 3, 1)]))
    # Of it counts but that the drafts before it are all right.
    assert 0.8 < censored.rates([0.8] * 3)[1] < 0.9 < censored.rates([0.8] * 3)[0]
    assert refused.rates([0.8] * 3)[1] < 0.1
    # Behind a refused draft nothing is known either, but that half of the others are refused.
    assert 0.65 < refused.rates([0.8] * 3)[2] < 0.8


@given(st.lists(st.tuples(st.lists(st.floats(allow_nan=True), min_size=3, max_size=3), st.integers(0, 3)), max_size=60))
def test_any_confidences_leave_probabilities(rows):
    model = Calibration(3)
    for confidences, accepted in rows:
        model.observe(labels([(confidences, 3, accepted)]))
        alive = model.survivals(confidences)
        assert all(0 <= b <= a <= 1 for a, b in itertools.pairwise([1.0, *alive]))
    rising = [model.rates([c])[0] for c in (0.1, 0.5, 0.9)]
    assert rising == sorted(rising)


def test_few_drafts_look_badly_calibrated_by_chance():
    chance = random.Random(0)
    for count in (100, 4000):
        predicted = [chance.random() for _ in range(count)]
        errors = [calibration_error(predicted, [chance.random() < p for p in predicted]) for _ in range(40)]
        assert sum(errors) / 40 == pytest.approx(chance_error(predicted), rel=0.15)
    with pytest.raises(ValueError, match="got none"):
        chance_error([])


def test_malformed_calibration():
    with pytest.raises(ValueError, match="at least 1, got 0 and 10"):
        Calibration(0, 10)
    with pytest.raises(ValueError, match="got 1 and 0"):
        calibration_error([], [True])


# ------------------------------------------------------------------ the budget

CHAINS = st.lists(
    st.lists(st.floats(0.01, 1), max_size=4).map(lambda c: list(itertools.accumulate(c, lambda a, b: a * b))),
    min_size=1, max_size=4,
)  # fmt: skip


@given(CHAINS, st.integers(0, 20))
def test_the_likeliest_drafts_are_verified_and_their_ancestors_with_them(survivals, drafts):
    lengths = spend(survivals, drafts)
    assert sum(lengths) == min(drafts, sum(map(len, survivals)))
    chosen = sum(s for chain, n in zip(survivals, lengths, strict=True) for s in chain[:n])
    assert chosen == pytest.approx(sum(sorted((s for c in survivals for s in c), reverse=True)[:drafts]))


def test_ties_go_by_depth_and_then_by_row():
    assert spend([[0.5, 0.5], [0.5], [0.9]], 3) == [1, 1, 1]
    assert spend([[0.5, 0.5], [0.5]], 2) == [1, 1]
    assert spend([[], [0.2]], 5) == [0, 1]


@given(CHAINS, st.dictionaries(st.integers(4, 24), st.floats(0.1, 10), min_size=1, max_size=5))
def test_the_budget_is_the_best_of_all_shapes(survivals, seconds):
    best = best_budget(survivals, seconds)
    rows = len(survivals)
    for tokens, takes in seconds.items():
        lengths = spend(survivals, tokens - rows)
        expected = rows + sum(s for chain, n in zip(survivals, lengths, strict=True) for s in chain[:n])
        assert best.goodput >= expected / takes * (1 - 1e-9)
        if tokens == best.tokens:
            assert best.expected == pytest.approx(expected) and best.drafts == sum(lengths)


def test_a_staircase_is_looked_at_behind_its_next_step_and_an_objective_bounds_it():
    survivals = [[0.9, 0.8, 0.7], [0.1]]
    seconds = {2: 1.0, 3: 1.6, 6: 1.7}
    assert best_budget(survivals, seconds).tokens == 6
    assert best_budget(survivals, seconds, longest=1.65).tokens == 2
    late = best_budget(survivals, {2: 1.2, 3: 1.1, 6: 1.7}, longest=1.0)
    assert (late.tokens, late.goodput) == (3, -1.0)
    with pytest.raises(ValueError, match=r"each of 2 requests, only \[1\] tokens"):
        best_budget(survivals, {1: 1.0})


# ------------------------------------------------------------------ AdaSpec


def test_the_linear_model_is_recovered_with_its_error():
    samples = [(c, t, 2e-6 * c + 3e-5 * t + 4e-3) for c in (0, 500, 4000) for t in (1, 8, 64)]
    model = fit(samples)
    assert (model.per_context, model.per_token, model.fixed) == pytest.approx((2e-6, 3e-5, 4e-3))
    assert model.r2 == pytest.approx(1) and model.worst < 1e-6
    stairs = fit([(c, t, s * (1.5 if t > 8 else 1)) for c, t, s in samples])
    assert 0 < stairs.r2 < 1 and stairs.worst > 0.02


def test_the_linear_model_leaves_out_what_does_not_vary_or_would_be_negative():
    assert fit([(0, t, 1 + t) for t in (1, 2, 4)]).per_context == 0
    falling = fit([(c, t, 5 - c / 10 + t) for c in (0, 10) for t in (1, 2)])
    assert falling.per_context == 0 and falling.per_token == pytest.approx(1)
    alone = fit([(10, 4, 2.0)])
    assert (alone.fixed, alone.r2, alone.worst) == (2.0, 1.0, 0.0)
    for samples in ([], [(1, 1, 0.0)], [(1, 1, math.nan)]):
        with pytest.raises(ValueError, match="positive finite seconds"):
            fit(samples)


def test_passes_of_draft_and_target():
    model = LinearCost(1.0, 10.0, 100.0, 1.0, 0.0)
    # Contexts of 5 tokens over 2 requests: passes behind 5 and 7 of them.
    assert model.drafting(5, 2, 2) == (5 + 20 + 100) + (7 + 20 + 100)
    assert model.verifying(5, 2, 6) == 5 + 80 + 100
    assert model.verifying(6, 2, 6, expanded=True) == 24 + 80 + 100


def staged(rates: list[list[float]]):
    asked: list[int] = []

    def step(depth: int) -> list[float]:
        asked.append(depth)
        return [row[depth - 1] for row in rates]

    return step, asked


def test_the_drafter_predicts_executes_and_corrects():
    seconds = lambda depth, drafts: 1.0 + 0.2 * depth + 0.02 * drafts
    # The third pass is hoped for and disappoints; it stays, and is the last.
    step, asked = staged([[0.9, 0.9, 0.1, 0.9], [0.9, 0.9, 0.1, 0.9]])
    prior = adaspec.Prior(0.9)
    survivals = adaspec.draft(2, step, prior, 4, seconds)
    assert asked == [1, 2, 3]
    assert survivals[0] == pytest.approx([0.9, 0.81, 0.081])
    assert prior.mean < 0.9
    assert adaspec.draft(2, step, adaspec.Prior(0.1), 4, seconds) == [[], []]
    assert asked == [1, 2, 3]
    # An objective that no further pass keeps ends it too.
    assert len(adaspec.draft(2, step, adaspec.Prior(0.9), 4, seconds, longest=1.3)[0]) == 1


def test_the_verifier_drops_the_least_likely_while_that_gains():
    survivals = [[0.9, 0.8], [0.3, 0.05]]
    assert adaspec.verify(survivals, 2, lambda depth, drafts: 1 + 0.3 * drafts) == [2, 0]
    assert adaspec.verify(survivals, 2, lambda depth, drafts: 1 + 0.01 * drafts) == [2, 2]
    assert adaspec.verify(survivals, 2, lambda depth, drafts: 1 + 0.01 * drafts, longest=1.015) == [1, 0]
    # On a staircase the paper's loop stops at the first step; a look at every shape does not.
    stairs = {4: 1.0, 6: 2.0}
    assert adaspec.verify(survivals, 2, lambda depth, drafts: stairs[4 if drafts <= 2 else 6]) == [2, 2]
    assert best_budget(survivals, stairs).tokens == 4


@pytest.mark.parametrize(("start", "keep"), [(0.0, 1.0), (1.5, 1.0), (0.5, 0.0)])
def test_malformed_priors(start, keep):
    with pytest.raises(ValueError, match=f"got {start} and {keep}"):
        adaspec.Prior(start, keep)
