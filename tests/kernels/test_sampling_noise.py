"""Noise and filters of rejection sampling against their definitions, in numpy and float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_oracle import cipher, coin, gumbels, kept_probs

from pallas_kernels.rejection_sampling.cases import FILTERS
from pallas_kernels.rejection_sampling.noise import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    Purpose,
    gumbel_noise,
    gumbel_noise_at,
    threefry2x32,
    to_gumbel,
    to_uniform,
    uniform_noise,
)
from pallas_kernels.rejection_sampling.reference import NEG_INF, filter_logits

#: Compiled whole: piece by piece each shape takes several times longer.
draw = functools.partial(jax.jit, static_argnums=(2, 3, 4))(gumbel_noise)


def test_threefry_known_answers():
    """Random123's kat_vectors for threefry2x32 with 20 rounds."""
    ones = 2**32 - 1
    vectors = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ones, ones), (ones, ones), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, answer in vectors:
        out = threefry2x32(*(jnp.full((1,), x, jnp.uint32) for x in (*key, *counter)))
        assert tuple(int(x[0]) for x in out) == answer
        assert cipher(key[0], key[1], counter[0], counter[1]) == answer


@pytest.mark.parametrize("vocab", [1, 100, 128, 129, 257, 1000])
def test_gumbel_noise_is_the_documented_function_of_seed_position_and_token(vocab: int):
    seeds, positions = [0, 2**32 - 1], [[5, 0, 2**31 - 1], [6, 5, 4]]
    noise = draw(np.asarray(seeds, np.uint32), np.asarray(positions, np.int32), vocab, Purpose.DRAFT)
    assert noise.shape == (2, 3, vocab) and noise.dtype == jnp.float32
    for b, n in np.ndindex(2, 3):
        exact = gumbels(seeds[b], positions[b][n], vocab, Purpose.DRAFT)
        np.testing.assert_allclose(np.asarray(noise)[b, n], exact, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("first", "size"), [(0, 300), (256, 512), (512, 100), (128, 128), (130, 3), (77, 900), (999, 1)]
)
def test_a_shard_of_the_vocabulary_draws_its_part_of_the_noise(first: int, size: int):
    seed, position = np.asarray([3, 4], np.uint32), np.asarray([[9], [8]], np.int32)
    whole = np.asarray(draw(seed, position, 1000, Purpose.TARGET))[:, :, first : first + size]

    @jax.jit
    def both(seed: jax.Array, position: jax.Array, traced: jax.Array) -> list[jax.Array]:
        return [gumbel_noise(seed, position, size, Purpose.TARGET, start) for start in (first, traced)]

    for part in both(seed, position, np.int32(first)):
        np.testing.assert_array_equal(part, whole)


def test_noise_of_single_tokens_is_that_of_the_vocabulary():
    seed, position = jnp.asarray([5, 2**32 - 1], jnp.uint32), jnp.asarray([0, 77], jnp.int32)
    token = jnp.asarray([0, 127, 128, 255, 256, 383, 384, 700, 999, 3], jnp.int32)
    whole = np.asarray(draw(seed, position[:, None], 1000, Purpose.TARGET))[:, 0]
    some = jax.jit(gumbel_noise_at, static_argnums=3)(seed, position, token, Purpose.TARGET)
    np.testing.assert_array_equal(some, whole[:, np.asarray(token)])


def test_noise_streams_differ():
    seed, position = np.asarray([1, 2], np.uint32), np.asarray([[1, 2], [1, 2]], np.int32)
    uniform = jax.jit(lambda seed, position, counter=None: uniform_noise(seed, position, Purpose.ACCEPT, counter))
    draws = [np.asarray(draw(seed, position, 512, p)).reshape(-1) for p in Purpose]
    counters = np.asarray([[0, 1], [0, 1]], np.int32)
    draws.append(np.asarray(uniform(seed, position, counters)).reshape(-1))
    values = np.concatenate(draws)
    assert len(np.unique(values)) > 0.999 * len(values)
    np.testing.assert_array_equal(uniform(seed, position), uniform(seed, position, 0 * counters))
    exact = coin(cipher(2, 1, 1, Purpose.ACCEPT)[0])
    assert uniform(seed, position[:, ::-1], counters)[1, 1] == np.float32(exact)


def test_noise_is_open_flat_and_bounded():
    extremes = jnp.asarray([0, 2**32 - 1], jnp.uint32)
    assert to_uniform(extremes)[0] > 0 and to_uniform(extremes)[1] < 1
    low, high = np.asarray(to_gumbel(extremes))
    assert GUMBEL_MIN < low < GUMBEL_MIN + 0.02 and GUMBEL_MAX - 0.02 < high < GUMBEL_MAX
    g = np.asarray(draw(np.arange(64, dtype=np.uint32), np.zeros((64, 1), np.int32), 4096, Purpose.TARGET))
    u = np.sort(np.exp(-np.exp(-g.astype(np.float64))).ravel())
    assert np.abs(u - (np.arange(u.size) + 0.5) / u.size).max() < 1.8 / np.sqrt(u.size)  # Kolmogorov-Smirnov
    pairs = g[:, 0, :256] - g.mean()
    assert abs((pairs[:, :128] * pairs[:, 128:]).mean()) < 4 * g.var() / np.sqrt(64 * 128)  # the words of one draw


# ---- filters


_filter = jax.jit(filter_logits)


def kept_rows(logits_RV: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> list[set[int]]:
    """The tokens that pass, row by row."""
    field = lambda x, dtype: np.full((len(logits_RV),), x, dtype)
    out = _filter(
        logits_RV.astype(np.float32)[:, None], field(temperature, np.float32), field(top_k, np.int32),
        field(top_p, np.float32), field(min_p, np.float32),
    )  # fmt: skip
    return [set(np.flatnonzero(row > NEG_INF).tolist()) for row in np.asarray(out)[:, 0]]


def kept(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set:
    return kept_rows(logits[None], temperature, top_k, top_p, min_p)[0]


def test_filters_keep_exact_sets():
    x = np.log(np.asarray([0.4, 0.05, 0.2, 0.2, 0.1, 0.05]))
    assert kept(x) == set(range(6))
    assert kept(x, top_k=1) == {0}
    assert kept(x, top_k=2) == {0, 2, 3}, "ties with the threshold are kept"
    assert kept(x, top_k=5) == set(range(6))
    assert kept(x, top_k=99) == set(range(6))
    assert kept(x, top_p=0.39) == {0}
    assert kept(x, top_p=0.5) == {0, 2, 3}
    assert kept(x, top_p=0.85) == {0, 2, 3, 4}
    assert kept(x, top_p=1e-6) == {0}
    assert kept(x, min_p=0.3) == {0, 2, 3}
    assert kept(x, min_p=0.2) == {0, 2, 3, 4}
    assert kept(x, min_p=1.0) == {0}
    assert kept(x, top_k=4, top_p=0.85) == {0, 2, 3}, "top-p counts the mass that top-k kept"
    assert kept(x, min_p=0.2, top_p=0.87) == {0, 2, 3}, "top-p counts the mass that min-p kept"
    assert kept(x, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9) == set(range(6)), "greedy rows are not filtered"
    banned = np.where(np.arange(6) == 0, -np.inf, x)
    assert kept(banned, top_k=2) == {2, 3}
    assert kept(banned, top_p=0.6) == {2, 3}


@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p", "all"])
def test_filters_agree_with_sorting(name: str):
    rng = np.random.default_rng(0)
    logits = (np.asarray([0.1, 1.0, 2.0, 4.0, 40.0])[:, None] * rng.normal(size=(5, 1000))).astype(np.float32)
    logits = np.concatenate([logits, np.round(logits)])  # and many ties
    want = [set(np.flatnonzero(kept_probs(row, *FILTERS[name])).tolist()) for row in logits]
    assert kept_rows(logits, *FILTERS[name]) == want


def test_the_kept_set_does_not_depend_on_the_order_of_summation():
    rng = np.random.default_rng(1)
    logits = (0.5 * rng.normal(size=20_000)).astype(np.float32)  # flat: every token near the threshold counts
    orders = np.stack([rng.permutation(len(logits)) for _ in range(6)])
    sets = kept_rows(logits[orders], 1.0, 0, 0.7, 0.0)
    assert all(
        {int(order[v]) for v in found} == {int(orders[0][v]) for v in sets[0]}
        for order, found in zip(orders, sets, strict=True)
    )
