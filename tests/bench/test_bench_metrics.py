"""Every published number against values computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from jaxspec.bench.offline import metrics
from jaxspec.bench.offline.metrics import Completion, Round, Run


def make_round(
    tier: str, depth: int, seconds: float | None, tokens: int, accepted: tuple[int, ...], kind: str = "code"
) -> Round:
    return Round(tier, depth, len(accepted), kind, seconds, tokens, accepted)


def make_run(mode: str, rounds: list[Round], repeat: int = 0, token_ids: tuple[int, ...] = (5, 6, 7, 8)) -> Run:
    completion = Completion(("code", 0), 0.5, ((0.2, 2), (0.1, 1)), token_ids)
    return Run("code", 1, mode, repeat, 9.0, tuple(rounds), (completion,))


def steady(mode: str, speed: float, repeat: int = 0, depth: int = 0) -> Run:
    """A run of exactly `speed` tokens a second, end to end and steadily."""
    run = make_run(mode, [make_round(mode, depth, 1 / speed, 1, (0,))] * metrics.STEADY_ROUNDS, repeat)
    return dataclasses.replace(run, seconds=4 / speed)


def test_end_to_end_is_all_tokens_over_all_seconds():
    assert metrics.end_to_end(make_run("plain", [])) == 4 / 9


def test_steady_rounds_have_every_place_in_use_and_a_time():
    rounds = [
        make_round("chain-1", 1, 100.0, 1, (0,)),  # one of two places: the batch is filling
        make_round("chain-1", 1, None, 4, (1, 1)),  # after a prefill: tokens without a time
        make_round("chain-1", 1, 0.5, 4, (1, 1)),
        make_round("chain-1", 1, 0.5, 3, (1, 1)),  # one token past a request's end was dropped
        make_round("chain-1", 1, 0.4, 0, (0, 0)),  # both requests had ended
    ]
    run = dataclasses.replace(make_run("chain-1", rounds), batch_size=2)
    assert metrics.steady_rounds(run) == rounds[2:]
    few = metrics.steady_state([run], [])
    assert (few.rounds, few.tokens_per_second) == (3, None)
    assert few.reason == "3 of at least 50 timed rounds with all 2 places in use"
    many = metrics.steady_state([dataclasses.replace(run, rounds=tuple(rounds[:4] * 25))], [])
    assert (many.rounds, many.tokens_per_second, many.reason) == (50, 7.0, "")


def test_accepted_length_and_positions():
    run = make_run("x", [make_round("chain-3", 3, 1.0, 6, (3, 1)), make_round("chain-1", 1, 1.0, 3, (1, 0))])
    assert metrics.mean_accepted_length([run]) == 1 + 5 / 4
    # Four rows drafted a first token and three of them accepted it; only chain-3's two rows drafted more.
    assert metrics.acceptance_by_position([run]) == (3 / 4, 1 / 2, 1 / 2)
    assert metrics.acceptance_by_position([make_run("plain", [make_round("plain", 0, 1.0, 1, (0,))])]) == ()
    assert metrics.mean_accepted_length([]) is None


def test_time_per_token_is_a_requests_own():
    completion = make_run("x", []).completions[0]
    assert completion.tpot == pytest.approx(0.3 / 3)
    assert dataclasses.replace(completion, gaps=((0.6, 1), (0.1, 5))).tpot == pytest.approx(0.7 / 6)
    assert dataclasses.replace(completion, gaps=()).tpot is None


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_percentile_is_the_nearest_rank(share: float, expected: float):
    assert metrics.percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_speedup_is_the_median_of_paired_ratios():
    # The machine slowed down for the second repeat; the ratio within each repeat did not care.
    runs = [
        *(steady("plain", speed, i) for i, speed in enumerate((100, 50, 80))),
        *(steady("chain-3", speed, i, 3) for i, speed in enumerate((200, 105, 120))),
    ]
    plain, chain = metrics.summarize(runs)
    assert plain.end_to_end == metrics.EndToEnd(80.0, 50.0, 100.0, 1.0)
    assert chain.end_to_end.speedup == pytest.approx(2.0)  # of 2.0, 2.1, 1.5
    # 1 token in 1 / 100, 1 / 50 and 1 / 80 s against 1 / 200, 1 / 105 and 1 / 120.
    assert chain.steady_state.speedup == pytest.approx((0.01 + 0.02 + 0.0125) / (1 / 200 + 1 / 105 + 1 / 120))
    assert chain.repeats == 3 and chain.ttft_p50 == 0.5 and chain.tiers == {"chain-3": 150}


def test_without_plain_decoding_there_is_no_speedup():
    (summary,) = metrics.summarize([steady("chain-1", 10.0, depth=1)])
    assert summary.end_to_end.speedup is None and summary.steady_state.speedup is None
    assert summary.steady_state.tokens_per_second == pytest.approx(10.0)


def test_an_interrupted_repeat_is_compared_where_both_ran():
    runs = [steady("plain", 100, 0), steady("chain-1", 150, 0, 1), steady("chain-1", 900, 1, 1)]
    chain = metrics.summarize(runs)[1]
    assert chain.end_to_end.speedup == pytest.approx(1.5) and chain.steady_state.speedup == pytest.approx(1.5)


def test_regret_is_against_the_best_fixed_choice_plain_included():
    runs = [steady("plain", 100), steady("chain-1", 80, depth=1), steady("adaptive", 95)]
    (regret,) = metrics.regrets(runs)
    assert regret.best == "plain" and regret.loss == pytest.approx(0.05)
    (regret,) = metrics.regrets([*runs, steady("chain-3", 190, depth=3)])
    assert regret.best == "chain-3" and regret.loss == pytest.approx(0.5)
    assert metrics.regrets(runs[:2]) == [] and metrics.regrets(runs[2:]) == []


def test_divergence_names_the_first_different_token():
    base = steady("plain", 1)
    other = dataclasses.replace(
        base, mode="chain-1", completions=(dataclasses.replace(base.completions[0], token_ids=(5, 6, 9, 8)),)
    )
    (found,) = metrics.divergences([base, other])
    assert (found.mode, found.prompt, found.position, found.plain, found.other) == ("chain-1", ("code", 0), 2, 7, 9)
    assert metrics.divergences([base, dataclasses.replace(base, mode="chain-1")]) == []


def test_a_text_that_ends_early_diverges_at_its_end():
    base = steady("plain", 1)
    shorter = dataclasses.replace(base.completions[0], token_ids=(5, 6))
    (found,) = metrics.divergences([base, dataclasses.replace(base, mode="x", completions=(shorter,))])
    assert (found.position, found.plain, found.other) == (2, 7, None)


def test_tier_shares_over_time():
    deep, off = make_round("chain-3", 3, 1.0, 1, (0,)), make_round("plain", 0, 1.0, 1, (0,), "prose")
    runs = [make_run("adaptive", [deep, deep, deep, off]), make_run("adaptive", [deep, deep, off, off])]
    assert metrics.tier_shares(runs, 2) == {"plain": [0.0, 0.75], "chain-3": [1.0, 0.25]}
    assert metrics.kind_shares(runs, "prose", 2) == [0.0, 0.75]
    assert metrics.tier_rounds(runs) == {"plain": 3, "chain-3": 5}
