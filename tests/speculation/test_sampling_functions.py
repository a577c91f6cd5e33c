"""Sampling on the device against definitions written apart, in float64 and token by token."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.request import SamplingParams
from jaxspec.speculation.layouts import Admission
from jaxspec.speculation.sampling import MAX_STOP_IDS, SamplingState, adjust_logits, top_logprobs
from jaxspec.speculation.state import Geometry
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise
from pallas_kernels.rejection_sampling.reference import NEG_INF, choose, filter_logits

V = 13
NUMBERS = SamplingState.numbers()
_filter = jax.jit(lambda x, rows: filter_logits(x, *rows.draws[:4]))
_choose = jax.jit(lambda x, rows, noise: choose(x, rows.draws, noise))
_adjust = jax.jit(adjust_logits)
_gumbel = jax.jit(gumbel_noise, static_argnums=(2, 3))


def rows(count: int, **fields: Any) -> SamplingState:
    """Rows of neutral parameters with some of them replaced; scalars are the same for every row."""
    state = SamplingState.empty(count, V)
    arrays = {}
    for name, value in fields.items():
        old = getattr(state, name)
        arrays[name] = jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape)
    return dataclasses.replace(state, **arrays)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def kept_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The documented order: temperature, min-p, top-k, top-p; ties with a threshold stay."""
    x = logits.astype(np.float64) / temperature
    p = softmax(x)
    x = np.where(p >= min_p * p.max() * (1 - 1e-7), x, -np.inf)
    if 0 < top_k < len(x):
        x = np.where(x >= np.sort(x)[-top_k], x, -np.inf)
    if top_p < 1:
        p = softmax(x)
        for threshold in sorted(set(p), reverse=True):
            if p[p >= threshold].sum() >= top_p:
                break
        x = np.where(p >= threshold, x, -np.inf)
    return set(np.flatnonzero(np.isfinite(x)))


GRID = list(itertools.product((0.3, 1.0, 2.5), (0, 1, 4, 12, 13, 50), (1.0, 0.9, 0.5, 1e-6), (0.0, 0.05, 0.4, 1.0)))


def test_filters_over_the_grid():
    """One batch holds every combination, three nodes a row, greedy rows between them."""
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(len(GRID), 3, V))).astype(np.float32)
    t, k, p, m = (np.asarray(x) for x in zip(*GRID, strict=True))
    state = rows(len(GRID), temperature_S=t, top_k_S=k, top_p_S=p, min_p_S=m)
    out = np.asarray(_filter(jnp.asarray(logits), state))
    for i, (combination, node) in enumerate(itertools.product(range(len(GRID)), range(3))):
        kept = set(np.flatnonzero(out[combination, node] > NEG_INF / 2))
        assert kept == kept_tokens(logits[combination, node], *GRID[combination]), (GRID[combination], i)
        inside = sorted(kept)
        np.testing.assert_allclose(
            out[combination, node, inside], logits[combination, node, inside] / GRID[combination][0], rtol=1e-6
        )


def test_order_is_temperature_first():
    """Top-p of 0.6 keeps one token at T = 1 but two at T = 4 (the peers' plain and verify paths differed here)."""
    logits = np.full((1, 1, V), -50, np.float32)
    logits[0, 0, :4] = [4, 2, 1, 0]
    cold = np.asarray(_filter(jnp.asarray(logits), rows(1, temperature_S=1.0, top_p_S=0.6)))
    hot = np.asarray(_filter(jnp.asarray(logits), rows(1, temperature_S=4.0, top_p_S=0.6)))
    assert (cold > NEG_INF / 2).sum() == 1 and (hot > NEG_INF / 2).sum() == 2
    assert kept_tokens(logits[0, 0], 4.0, 0, 0.6, 0.0) == {0, 1}


def test_tokens_that_tie_with_a_threshold_are_all_kept():
    logits = np.asarray([[[2.0, 1, 1, 1, 0, 0, -1, -1, -1, -1, -1, -1, -1]]], np.float32)
    by_k = np.asarray(_filter(jnp.asarray(logits), rows(1, temperature_S=1.0, top_k_S=2)))[0, 0]
    assert set(np.flatnonzero(by_k > NEG_INF / 2)) == {0, 1, 2, 3}
    by_p = np.asarray(_filter(jnp.asarray(logits), rows(1, temperature_S=1.0, top_p_S=0.5)))[0, 0]
    assert set(np.flatnonzero(by_p > NEG_INF / 2)) == {0, 1, 2, 3}


def test_filters_of_a_row_leave_its_neighbours_alone():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(3, 2, V)), jnp.float32)
    plain = rows(3, temperature_S=[0.8, 1.0, 0.0])
    mixed = dataclasses.replace(plain, top_k_S=jnp.asarray([0, 2, 5]), top_p_S=jnp.asarray([1.0, 0.7, 0.2]))
    before, after = np.asarray(_filter(logits, plain)), np.asarray(_filter(logits, mixed))
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[2], np.asarray(logits)[2])  # greedy: neither tempered nor filtered
    assert (after[1] < NEG_INF / 2).any()


def test_greedy_rows_take_the_argmax_in_any_company():
    """Peers: in batches of greedy and sampled rows no greedy row kept its argmax, and 41% returned the argmin."""
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(256, 4, V)), jnp.float32)
    temperature = np.where(np.arange(256) % 2, 0.0, 1.5)
    state = rows(256, temperature_S=temperature, top_k_S=np.arange(256) % 5, top_p_S=0.6, seed_S=np.arange(256))
    noise = _gumbel(state.seed_S, jnp.zeros((256, 4), jnp.int32), V, Purpose.TARGET)
    out = np.asarray(_choose(logits, state, noise))
    greedy = temperature == 0
    np.testing.assert_array_equal(out[greedy], np.argmax(logits, axis=-1)[greedy])
    assert (out[~greedy] != np.argmax(logits, axis=-1)[~greedy]).any()


def test_extreme_parameters_stay_finite():
    """Banned tokens under the largest penalty and the smallest temperature: still no overflow, still a legal token."""
    logits = np.zeros((3, 1, V), np.float32)
    logits[:, 0, :3] = [30, 29, 28]
    state = rows(
        3, temperature_S=[1e-5, 1e6, 1e-5], repetition_S=1e3, min_p_S=[0, 0, 1], top_p_S=[1, 1e-30, 1e-45],
        ban_until_S=9, seed_S=[1, 2, 3], in_prompt_SV=np.ones((3, V), bool),
        stop_ids_SK=np.broadcast_to(np.where(np.arange(40) == 0, 0, V), (3, 40)),
    )  # fmt: skip
    one = jnp.ones((3, 1, 1), bool)
    adjusted = _adjust(jnp.asarray(logits), state, jnp.zeros((3, 1), jnp.int32), jnp.zeros((3, 1), jnp.int32), one)
    assert np.isfinite(adjusted).all()
    noise = _gumbel(state.seed_S, jnp.zeros((3, 1), jnp.int32), V, Purpose.TARGET)
    out = np.asarray(_choose(adjusted, state, noise))[:, 0]
    assert out[0] == 1 and out[1] == 1 and out[2] == 1


def naive_adjust(
    logits: np.ndarray, position: int, prompt: list[int], output: list[int], p: dict[str, Any]
) -> np.ndarray:
    """Bias, ban, repetition, frequency, presence: for one node whose path has been emitted."""
    x = logits.astype(np.float64) + p["bias"]
    if position < p["ban_until"]:
        x[p["stops"]] = NEG_INF
    for token in range(V):
        count = output.count(token)
        if count or token in prompt:
            x[token] = x[token] / p["repetition"] if x[token] > 0 else x[token] * p["repetition"]
        x[token] -= p["frequency"] * count + p["presence"] * (count > 0)
    return x


def random_tree(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(parents, ancestors) of a tree whose parents precede their children."""
    parents = np.asarray([0] + [int(rng.integers(0, i)) for i in range(1, n)])
    ancestors = np.eye(n, dtype=bool)
    for i in range(1, n):
        ancestors[i] |= ancestors[parents[i]]
    return parents, ancestors


@pytest.mark.parametrize("n", [1, 6])
def test_every_node_is_adjusted_as_if_its_path_had_been_emitted(n: int):
    rng = np.random.default_rng(n)
    b = 24
    logits = (3 * rng.normal(size=(b, n, V))).astype(np.float32)
    tokens = rng.integers(0, V, (b, n))
    trees = [random_tree(rng, n) for _ in range(b)]
    ancestors = np.stack([a for _, a in trees])
    depth = ancestors.sum(axis=2) - 1
    prompts = [rng.integers(0, V, rng.integers(1, 6)).tolist() for _ in range(b)]
    outputs = [[*rng.integers(0, V, rng.integers(0, 6)).tolist(), int(tokens[i, 0])] for i in range(b)]
    stops = [rng.choice(V, 2, replace=False) for _ in range(b)]
    params = [
        dict(
            bias=np.where(rng.random(V) < 0.3, rng.normal(size=V), 0.0).astype(np.float32).astype(np.float64),
            ban_until=len(prompts[i]) + len(outputs[i]) + int(rng.integers(0, 3)), stops=stops[i],
            repetition=float(rng.choice([1.0, 1.7, 0.6])), frequency=float(rng.choice([0.0, 0.8, -1.5])),
            presence=float(rng.choice([0.0, 1.2, -0.7])),
        )
        for i in range(b)
    ]  # fmt: skip
    counts = np.stack([np.bincount(o, minlength=V) for o in outputs])
    seen = np.stack([np.isin(np.arange(V), p) for p in prompts])
    stop_ids = np.full((b, 40), V)
    stop_ids[:, 3:5] = stops
    first = np.asarray([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)])
    take = lambda name: np.asarray([p[name] for p in params])
    state = rows(
        b, repetition_S=take("repetition"), frequency_S=take("frequency"), presence_S=take("presence"),
        ban_until_S=take("ban_until"), stop_ids_SK=stop_ids, bias_SV=take("bias"), counts_SV=counts, in_prompt_SV=seen,
    )  # fmt: skip
    tokens_with_gap = tokens.copy()
    if n > 1:
        tokens_with_gap[0, n - 1] = V  # "no proposal" takes part in nothing
    position = first[:, None] + depth
    out = np.asarray(
        _adjust(jnp.asarray(logits), state, jnp.asarray(position), jnp.asarray(tokens_with_gap), jnp.asarray(ancestors))
    )
    for i, node in itertools.product(range(b), range(n)):
        path = [int(tokens_with_gap[i, m]) for m in range(1, n) if ancestors[i, node, m]]
        expected = naive_adjust(logits[i, node], int(position[i, node]), prompts[i], outputs[i] + path, params[i])
        np.testing.assert_allclose(out[i, node], expected, rtol=2e-6, atol=2e-6)


def test_chosen_tokens_have_the_filtered_distribution():
    """20,000 seeds for each of four settings in one batch: chi-square and total variation against float64."""
    settings = [(1.0, 0, 1.0, 0.0), (0.6, 5, 1.0, 0.0), (1.7, 0, 0.85, 0.0), (1.2, 8, 0.9, 0.1)]
    each = 20_000
    rng = np.random.default_rng(5)
    logits = (1.5 * rng.normal(size=V)).astype(np.float32)
    t, k, p, m = (np.repeat(np.asarray(x), each) for x in zip(*settings, strict=True))
    b = each * len(settings)
    state = rows(b, temperature_S=t, top_k_S=k, top_p_S=p, min_p_S=m, seed_S=np.arange(b))
    noise = _gumbel(state.seed_S, jnp.full((b, 1), 17), V, Purpose.TARGET)
    drawn = np.asarray(_choose(jnp.broadcast_to(jnp.asarray(logits), (b, 1, V)), state, noise))[:, 0]
    for i, setting in enumerate(settings):
        counts = np.bincount(drawn[i * each : (i + 1) * each], minlength=V)
        kept = sorted(kept_tokens(logits, *setting))
        exact = np.zeros(V)
        exact[kept] = softmax(logits[kept].astype(np.float64) / setting[0])
        assert counts[exact == 0].sum() == 0
        expected = exact[kept] * each
        chi = ((counts[kept] - expected) ** 2 / expected).sum()
        assert chi < len(kept) + 5 * np.sqrt(2 * len(kept)) + 8, setting
        assert 0.5 * np.abs(counts / each - exact).sum() < 0.012, setting


def test_top_logprobs_and_ranks():
    rng = np.random.default_rng(6)
    logits = (4 * rng.normal(size=(5, V))).astype(np.float32)
    logits[4] = 1.0  # every token ties: everyone's rank is 1
    tokens = np.asarray([0, 5, 12, int(logits[3].argmax()), 7])
    chosen, rank, values, ids = (np.asarray(x) for x in top_logprobs(jnp.asarray(logits), jnp.asarray(tokens), 4))
    exact = np.stack([np.log(softmax(row.astype(np.float64))) for row in logits])
    np.testing.assert_allclose(chosen, exact[np.arange(5), tokens], rtol=1e-5, atol=1e-6)
    for i in range(4):
        order = np.argsort(-exact[i])
        assert rank[i] == 1 + int((exact[i] > exact[i, tokens[i]]).sum())
        np.testing.assert_array_equal(ids[i], order[:4])
        np.testing.assert_allclose(values[i], exact[i][order[:4]], rtol=1e-5, atol=1e-6)
    assert rank[3] == 1 and rank[4] == 1


# From the host to the device.


def test_an_admission_arrives_as_it_was_sent():
    numbers = {name: 2**32 - 1 - i if n.dtype == jnp.uint32 else i + 0.5 for i, (name, n) in enumerate(NUMBERS.items())}
    numbers = {name: value if NUMBERS[name].dtype == jnp.float32 else int(value) for name, value in numbers.items()}
    geo = Geometry(4, 9, 8, 3, 1)
    sent = Admission(3, 8, 11, numbers, [5] * MAX_STOP_IDS, (7, 2), [12] * 11)
    got = Admission.of(geo, jnp.asarray(Admission.packed(geo, 2, [sent])))
    assert (got.slot.tolist(), got.cached[0], got.total[0]) == ([3, 4], 8, 11)
    for name, number in NUMBERS.items():
        assert got.numbers[name].dtype == number.dtype and got.numbers[name][0].item() == numbers[name], name
    assert got.stop_ids[0].tolist() == [5] * MAX_STOP_IDS and got.table[0].tolist() == [7, 2, 9]
    assert got.tokens[0].tolist() == [12] * 11 + [0] * 14
    nobody = Admission.packed(geo, 1)
    assert int(Admission.of(geo, jnp.asarray(nobody)).slot[0]) == 4, "dropped by every scatter"
    assert (nobody == 4).all(), "messages to other processes say it in a number"


def test_what_a_number_of_an_empty_row_changes_is_nothing():
    """A caller's default is as neutral, but for the temperature."""
    greedy = SamplingParams(temperature=0)
    derived = ("prompt_len", "ban_until", "ends_at", "eos_ends", "num_stops", "seed")
    own = {n.name: n.neutral for n in NUMBERS.values() if n.name not in derived}
    assert {name: getattr(greedy, name) for name in own} == own and greedy.plain_greedy
