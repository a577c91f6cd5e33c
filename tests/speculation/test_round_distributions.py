"""Whole rounds on a table look-up model: exact equality in coupled mode, exact distributions in both.

Every slot of one big batch is a request of its own seed; settings lie side by side in the batch, greedy rows included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from jaxspec.tier import PLAIN, Tier

V = 7
EACH = 6000
TREE = Tier(2, 2, 5)
DEEP = Tier(3, 2, 9)
PROMPT = [3, 1, 4, 1, 5, 1]
#: (filters, adjustments) of a block of rows.
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(temperature=0.0), dict()),
    (dict(temperature=0.0), dict(repetition=1.5, presence=0.6)),
    (dict(temperature=1.0), dict()),
    (dict(temperature=0.6, top_k=3), dict()),
    (dict(temperature=1.6, top_p=0.7), dict()),
    (dict(temperature=1.3, min_p=0.25), dict()),
    (dict(temperature=0.8, top_k=5, top_p=0.85, min_p=0.05), dict()),
    (dict(temperature=1.0), dict(frequency=0.9, presence=-0.4)),
    (dict(temperature=1.2, top_p=0.9), dict(repetition=1.8)),
    (dict(temperature=1.0, top_k=4), dict(bias=np.asarray([0, 0, 3, 0, -3, 0, 0.5]), ban=(2, 2))),
]
GREEDY = [filters["temperature"] == 0 for filters, _ in SETTINGS]
#: Rows of each block where distributions are looked at; a greedy one's rows all say the same.
COUNTS = [EACH // 20 if greedy else EACH for greedy in GREEDY]
#: Where each block lies.
BLOCKS = [slice(end - count, end) for count, end in zip(COUNTS, np.cumsum(COUNTS), strict=True)]


def blocks(markov: Callable[[int], Any], counts: list[int]) -> tuple[Any, dict[str, Any]]:
    """The rounds, and the sampling fields of all blocks."""
    field = lambda group, name, default: np.repeat([s[group].get(name, default) for s in SETTINGS], counts, axis=0)
    zero, slots = np.zeros(V), sum(counts)
    ban = field(1, "ban", (0, V))
    stops = np.full((slots, 40), V)
    stops[:, 7] = ban[:, 1]
    return markov(slots), dict(
        temperature_S=field(0, "temperature", 0.0), top_k_S=field(0, "top_k", 0), top_p_S=field(0, "top_p", 1.0),
        min_p_S=field(0, "min_p", 0.0), repetition_S=field(1, "repetition", 1.0), presence_S=field(1, "presence", 0.0),
        frequency_S=field(1, "frequency", 0.0), ban_until_S=len(PROMPT) + ban[:, 0], stop_ids_SK=stops,
        bias_SV=field(1, "bias", zero),
    )  # fmt: skip


@pytest.fixture(scope="module")
def batch(markov: Callable[[int], Any]) -> tuple[Any, dict[str, Any]]:
    """As many rows as distributions need."""
    return blocks(markov, COUNTS)


@pytest.fixture(scope="module")
def few(markov: Callable[[int], Any], exhaustive: bool) -> tuple[Any, dict[str, Any]]:
    """Rows to be compared one by one."""
    return blocks(markov, [EACH if exhaustive else EACH // 20] * len(SETTINGS))


@pytest.fixture(scope="module")
def plain_few(few: tuple[Any, dict[str, Any]]) -> np.ndarray:
    """Three tokens of plain decoding for each of the few."""
    rounds, fields = few
    return rounds.generate(rounds.state(**fields), PLAIN, 3)[0]


@pytest.fixture(scope="module")
def plain(batch: tuple[Any, dict[str, Any]]) -> np.ndarray:
    """Three tokens of plain decoding for every slot."""
    rounds, fields = batch
    return rounds.generate(rounds.state(**fields), PLAIN, 3)[0]


def p_value(tokens: np.ndarray, exact: np.ndarray) -> float:
    """Chi-square of joint counts; cells expected fewer than 5 times are merged into one."""
    counts = np.zeros(exact.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    assert counts[exact == 0].sum() == 0, "a token that the filters exclude"
    expected = exact * len(tokens)
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < 5:
        observed, wanted = np.append(observed[:-2], observed[-2:].sum()), np.append(wanted[:-2], wanted[-2:].sum())
    if len(wanted) < 2:
        return 1.0
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def check_blocks(tokens: np.ndarray, target: np.ndarray, exact_joint: Callable[..., Any]) -> None:
    """The first two tokens of each block against the exact joint distribution."""
    for i, (filters, adjust) in enumerate(SETTINGS):
        block = tokens[BLOCKS[i], :2]
        exact = exact_joint(target, 2, PROMPT, filters, adjust)
        np.testing.assert_allclose(exact.sum(), 1)
        assert p_value(block, exact) > 1e-4, (filters, adjust)
        counts = np.zeros(exact.shape)
        np.add.at(counts, tuple(block.T), 1)
        # A fair sample's expected total variation; its standard deviation is about a fifth of that.
        noise = np.sqrt(exact * (1 - exact) * 2 / np.pi / len(block)).sum() / 2
        assert 0.5 * np.abs(counts / len(block) - exact).sum() < 2.2 * noise + 0.002, (filters, adjust)


def test_plain_decoding_has_the_documented_distribution(
    batch: tuple[Any, dict[str, Any]], plain: np.ndarray, exact_joint: Callable[..., Any]
):
    check_blocks(plain, batch[0].target, exact_joint)


@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        ("draft", Tier(1)),
        ("draft", Tier(3)),
        ("draft", TREE),
        ("draft", DEEP),
        ("ngram", Tier(3)),
        ("parallel", Tier(3)),
        ("parallel", DEEP),
    ],
)
def test_coupled_rounds_repeat_plain_decoding(
    few: tuple[Any, dict[str, Any]], plain_few: np.ndarray, kind: str, tier: Tier
):
    """The same seed with and without speculation: the same tokens, in every row of a mixed batch."""
    rounds, fields = few
    tokens, state = rounds.generate(rounds.state(**fields), tier, 3, kind=kind)
    np.testing.assert_array_equal(tokens, plain_few)
    gained = np.asarray(state.length_S) - (len(PROMPT) - 1)
    assert gained.max() > 3, "nothing was ever accepted"


def test_the_tier_may_change_every_round(few: tuple[Any, dict[str, Any]], plain_few: np.ndarray):
    rounds, fields = few
    state = rounds.state(**fields)
    for tier in (Tier(1), PLAIN, TREE):
        state, _ = rounds.run(state, tier)
    np.testing.assert_array_equal(np.asarray(state.tokens_SL)[:, 6:9], plain_few)


@pytest.mark.parametrize("kind", ["draft", "parallel"])
def test_rejection_of_a_sampled_chain_is_lossless(
    batch: tuple[Any, dict[str, Any]], plain: np.ndarray, exact_joint: Callable[..., Any], kind: str
):
    """Also where a depth's tokens were drawn without regard to those before them."""
    rounds, fields = batch
    tokens, state = rounds.generate(rounds.state(**fields), Tier(3), 2, kind=kind, rejection=True)
    check_blocks(tokens, rounds.target, exact_joint)
    greedy = np.repeat(GREEDY, COUNTS)
    np.testing.assert_array_equal(tokens[greedy], plain[greedy, :2])
    assert (tokens[~greedy] != plain[~greedy, :2]).any(), "this was coupled verification"
    # Acceptance at the first position is 1 - TV(target, draft): the optimum of any rule for sampled drafts.
    assert np.asarray(state.length_S).max() > len(PROMPT) + 4


@pytest.mark.parametrize("tier", [TREE, Tier(1)])
def test_rejection_mode_is_lossless_where_the_tier_switches(
    batch: tuple[Any, dict[str, Any]], tier: Tier, exact_joint: Callable[..., Any]
):
    """A tree falls back to the coupled rule; the streams of noise that both rules use must not meet."""
    rounds, fields = batch
    state, _ = rounds.run(rounds.state(**fields), tier, rejection=True)
    state, _ = rounds.run(state, Tier(3), rejection=True)
    check_blocks(np.asarray(state.tokens_SL)[:, 6:8], rounds.target, exact_joint)


def test_these_tests_can_fail(batch: tuple[Any, dict[str, Any]], plain: np.ndarray, exact_joint: Callable[..., Any]):
    """Every dropped filter and penalty that moves the exact distribution is seen at this sample size."""
    rounds, seen = batch[0], 0
    for i, (filters, adjust) in enumerate(SETTINGS):
        if not filters["temperature"]:
            continue
        block = plain[BLOCKS[i], :2]
        wrong = [({k: v for k, v in filters.items() if k != name}, adjust) for name in filters if name != "temperature"]
        wrong += [({**filters, "temperature": 1.0}, adjust), (filters, {})]
        exact = exact_joint(rounds.target, 2, PROMPT, filters, adjust)
        for pair in wrong:
            other = exact_joint(rounds.target, 2, PROMPT, *pair)
            if 0.5 * np.abs(exact - other).sum() > 0.06:
                assert excluded(block, other) or p_value(block, other) < 1e-6, pair
                seen += 1
    assert seen >= 12


def excluded(tokens: np.ndarray, exact: np.ndarray) -> bool:
    """Some drawn pair has probability 0."""
    return bool((exact[tuple(tokens.T)] == 0).any())
