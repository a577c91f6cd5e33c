"""Rejection sampling against an oracle in numpy float64, and against the exact distributions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.rejection_sampling import api, reference, sharded
from pallas_kernels.rejection_sampling.cases import CASES, FILTERS, SMALL, Case
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
from pallas_kernels.rejection_sampling.reference import (
    NEG_INF,
    RejectionSamplingArgs,
    SamplingRows,
    Verdict,
    filter_logits,
)

# ---- the oracle: scalar, float64, probabilities instead of logarithms, sorts instead of thresholds


def cipher(seed: int, position: int, pair: Any, purpose: int) -> tuple[Any, Any]:
    """Threefry-2x32-20 in 64-bit integers, of numbers or of arrays of pairs."""
    mask = 2**32 - 1
    keys = [seed, position & mask, 0x1BD11BDA ^ seed ^ (position & mask)]
    x, y = (pair + keys[0]) & mask, ((purpose + keys[1]) & mask) + 0 * pair
    for i in range(20):
        r = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x = (x + y) & mask
        y = (((y << r) | (y >> (32 - r))) & mask) ^ x
        if i % 4 == 3:
            turn = i // 4 + 1
            x, y = (x + keys[turn % 3]) & mask, (y + keys[(turn + 1) % 3] + turn) & mask
    return x, y


def coin(bits: Any) -> Any:
    return (bits >> 9) / 2**23 + 2.0**-24


def gumbels(seed: int, position: int, vocab: int, purpose: Purpose) -> np.ndarray:
    v = np.arange(vocab, dtype=np.int64)
    first, second = cipher(seed, position, v // 256 * 128 + v % 128, int(purpose))
    return -np.log(-np.log(coin(np.where(v // 128 % 2 == 0, first, second))))


def kept_probs(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution that a sampled row draws from."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    keep = p >= min_p * p.max()
    if 0 < top_k < len(p):
        keep &= p >= np.sort(p)[-top_k]
    if top_p < 1:
        order = np.argsort(-np.where(keep, p, 0), kind="stable")
        mass = np.cumsum(np.where(keep, p, 0)[order])
        last = order[np.searchsorted(mass, top_p * mass[-1])]
        keep &= p >= p[last]
    return np.where(keep, p, 0) / np.where(keep, p, 0).sum()


def naive(case: Case, args: RejectionSamplingArgs, row: int) -> tuple[list[int], int]:
    """(accepted path, next token) of one request."""
    tokens, parents = np.asarray(args.tokens_BN[row]), np.asarray(args.parents_BN[row])
    temperature, top_k, top_p, min_p, seed = (x[row].item() for x in args.sampling)
    logits = np.asarray(args.logits_BNV[row].astype(jnp.float32))
    path = [0]
    while True:
        node, position = path[-1], int(args.position_B[row]) + len(path) - 1
        children = [c for c in range(1, case.nodes) if parents[c] == node]
        if temperature == 0:
            own = int(np.argmax(logits[node]))
            taken = [c for c in children if tokens[c] == own]
        else:
            p = kept_probs(logits[node], temperature, top_k, top_p, min_p)
            taken = []
            if case.mode == "rejection":
                for ordinal, child in enumerate(children):
                    q, x = np.asarray(args.draft_probs_BXV, np.float64)[row, node], tokens[child]
                    if not 0 <= x < case.vocab:
                        continue
                    u = coin(cipher(seed, position, ordinal, Purpose.ACCEPT)[0])
                    if p[x] > u * q[x]:
                        taken = [child]
                        break
                    p = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
            if not taken:
                with np.errstate(divide="ignore"):
                    own = int(np.argmax(np.log(p) + gumbels(seed, position, case.vocab, Purpose.TARGET)))
                if case.mode == "coupled":
                    taken = [c for c in children if tokens[c] == own]
        if not taken:
            return path, own
        path.append(taken[0])


# ---- running the thing


@functools.partial(jax.jit, static_argnums=1)
def _jitted(args: RejectionSamplingArgs, implementation: str | None) -> Verdict:
    return api.rejection_sampling(**vars(args), implementation=implementation)


def run(case: Case, args: RejectionSamplingArgs, implementation: str | None = "reference") -> tuple[np.ndarray, ...]:
    """The verdict as numpy, with the unspecified part of the path cleared."""
    verdict = _jitted(dataclasses.replace(args, **case.options), implementation)
    path, accepted, token, finite = (np.asarray(x) for x in verdict)
    assert path.shape == (case.batch, case.depth + 1) and path.min() >= 0 and path.max() < case.nodes
    assert token.min() >= 0 and token.max() < case.vocab and accepted.min() >= 0 and accepted.max() <= case.depth
    return np.asarray(case.specified(verdict).path_BD), accepted, token, finite


def rows_of(args: RejectionSamplingArgs, index: Any) -> RejectionSamplingArgs:
    return jax.tree.map(lambda x: x[index], args)


# ---- noise


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
    noise = gumbel_noise(jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32), vocab, Purpose.DRAFT)
    assert noise.shape == (2, 3, vocab) and noise.dtype == jnp.float32
    for b, n in np.ndindex(2, 3):
        exact = gumbels(seeds[b], positions[b][n], vocab, Purpose.DRAFT)
        np.testing.assert_allclose(noise[b, n], exact, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("first", "size"), [(0, 300), (256, 512), (512, 100), (128, 128), (130, 3), (77, 900), (999, 1)]
)
def test_a_shard_of_the_vocabulary_draws_its_part_of_the_noise(first: int, size: int):
    seed, position = jnp.asarray([3, 4], jnp.uint32), jnp.asarray([[9], [8]], jnp.int32)
    whole = gumbel_noise(seed, position, 1000, Purpose.TARGET)[:, :, first : first + size]
    np.testing.assert_array_equal(gumbel_noise(seed, position, size, Purpose.TARGET, first), whole)
    traced = jax.jit(lambda first: gumbel_noise(seed, position, size, Purpose.TARGET, first))
    np.testing.assert_array_equal(traced(jnp.int32(first)), whole)


def test_noise_of_single_tokens_is_that_of_the_vocabulary():
    seed, position = jnp.asarray([5, 2**32 - 1], jnp.uint32), jnp.asarray([0, 77], jnp.int32)
    token = jnp.asarray([0, 127, 128, 255, 256, 383, 384, 700, 999, 3], jnp.int32)
    whole = gumbel_noise(seed, position[:, None], 1000, Purpose.TARGET)[:, 0]
    some = gumbel_noise_at(seed, position, token, Purpose.TARGET)
    np.testing.assert_array_equal(np.asarray(some), np.asarray(whole)[:, np.asarray(token)])


def test_noise_streams_differ():
    seed, position = jnp.asarray([1, 2], jnp.uint32), jnp.asarray([[1, 2], [1, 2]], jnp.int32)
    draws = [np.asarray(gumbel_noise(seed, position, 512, p)).reshape(-1) for p in Purpose]
    counters = jnp.asarray([[0, 1], [0, 1]], jnp.int32)
    draws.append(np.asarray(uniform_noise(seed, position, Purpose.ACCEPT, counters)).reshape(-1))
    values = np.concatenate(draws)
    assert len(np.unique(values)) > 0.999 * len(values)
    np.testing.assert_array_equal(
        uniform_noise(seed, position, Purpose.ACCEPT), uniform_noise(seed, position, Purpose.ACCEPT, 0 * counters)
    )
    exact = coin(cipher(2, 1, 1, Purpose.ACCEPT)[0])
    assert uniform_noise(seed, position[:, :1], Purpose.ACCEPT, counters[:, 1:])[1, 0] == np.float32(exact)


def test_noise_is_open_flat_and_bounded():
    extremes = jnp.asarray([0, 2**32 - 1], jnp.uint32)
    assert to_uniform(extremes)[0] > 0 and to_uniform(extremes)[1] < 1
    low, high = np.asarray(to_gumbel(extremes))
    assert GUMBEL_MIN < low < GUMBEL_MIN + 0.02 and GUMBEL_MAX - 0.02 < high < GUMBEL_MAX
    g = np.asarray(gumbel_noise(jnp.arange(64, dtype=jnp.uint32), jnp.zeros((64, 1), jnp.int32), 4096, Purpose.TARGET))
    u = np.sort(np.exp(-np.exp(-g.astype(np.float64))).ravel())
    assert np.abs(u - (np.arange(u.size) + 0.5) / u.size).max() < 1.8 / np.sqrt(u.size)  # Kolmogorov-Smirnov
    pairs = g[:, 0, :256] - g.mean()
    assert abs((pairs[:, :128] * pairs[:, 128:]).mean()) < 4 * g.var() / np.sqrt(64 * 128)  # the words of one draw


# ---- filters


_filter = jax.jit(filter_logits)


def kept_rows(logits_RV: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> list[set[int]]:
    """The tokens that pass, row by row."""
    field = lambda x, dtype: jnp.full((len(logits_RV),), x, dtype)
    out = _filter(
        jnp.asarray(logits_RV, jnp.float32)[:, None], field(temperature, jnp.float32), field(top_k, jnp.int32),
        field(top_p, jnp.float32), field(min_p, jnp.float32),
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


# ---- the walk


@pytest.mark.parametrize("case", [c for c in SMALL if c.vocab < 5000], ids=lambda c: c.name)
def test_verdicts_equal_the_oracle(case: Case):
    for seed in range(2):
        args = case.draw(seed)
        path, accepted, token, finite = run(case, args)
        assert finite.all()
        assert case.depth == 0 or accepted.any()
        for row in range(case.batch):
            expected = naive(case, args, row)
            assert (path[row, : accepted[row] + 1].tolist(), token[row]) == expected, (seed, row)


def test_none_chooses_the_reference_on_cpus():
    case = CASES["small-tree"]
    args = case.draw(7)
    for got, want in zip(run(case, args, None), run(case, args), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["small-tree", "small-chain", "small-rejection", "small-rejection-chain"])
def test_noise_that_the_caller_has_changes_nothing(name: str):
    case = CASES[name]
    args = case.draw(7)
    position = args.position_B[:, None] + jnp.arange(case.depth + 1)[None]
    noise = gumbel_noise(args.sampling.seed_B, position, case.vocab, Purpose.TARGET)
    given, shifted = (
        _jitted(dataclasses.replace(args, noise_BDV=x), "reference") for x in (noise, jnp.roll(noise, 1, axis=2))
    )
    _, accepted, token, _ = run(case, args)
    np.testing.assert_array_equal(given.num_accepted_B, accepted)
    np.testing.assert_array_equal(given.next_token_B, token)
    assert (np.asarray(shifted.next_token_B) != token).any(), "the noise was not taken"


@pytest.mark.parametrize("name", ["small-tree-odd", "small-chain", "small-rejection", "small-rejection-chain"])
def test_a_request_alone_gets_what_it_gets_in_a_batch(name: str):
    case = CASES[name]
    args = case.draw(11)
    together = run(case, args)
    order = np.random.default_rng(0).permutation(case.batch)
    for got, want in zip(run(case, rows_of(args, order)), together, strict=True):
        np.testing.assert_array_equal(got, want[order])
    alone = dataclasses.replace(case, batch=1)
    for row in range(case.batch):
        for got, want in zip(run(alone, rows_of(args, slice(row, row + 1))), together, strict=True):
            np.testing.assert_array_equal(got[0], want[row])


@pytest.mark.parametrize("name", ["small-chain", "small-rejection-chain"])
def test_a_chain_is_a_tree(name: str):
    chain = CASES[name]
    args = chain.draw(2)
    for got, want in zip(run(dataclasses.replace(chain, chain=False), args), run(chain, args), strict=True):
        np.testing.assert_array_equal(got, want)


def test_greedy_batches_equal_greedy_rows_and_take_the_lowest_tie():
    case = CASES["small-greedy"]
    args = case.draw(3)
    args = dataclasses.replace(args, logits_BNV=jnp.round(args.logits_BNV / 8))
    batch = run(case, args)
    mixed = run(dataclasses.replace(case, rows=("greedy", "greedy")), args)
    for got, want in zip(batch, mixed, strict=True):
        np.testing.assert_array_equal(got, want)
    top = np.asarray(args.logits_BNV.max(axis=-1, keepdims=True) == args.logits_BNV).sum(axis=-1)
    assert (top > 1).mean() > 0.5
    for row in range(case.batch):
        assert naive(case, args, row) == (batch[0][row, : batch[1][row] + 1].tolist(), batch[2][row])


@pytest.mark.parametrize(
    "name", ["small-tree", "small-chain", "small-greedy", "small-rejection", "small-rejection-chain"]
)
def test_a_token_outside_the_vocabulary_is_no_proposal(name: str):
    """It is passed over, and its siblings keep their places, which their coins depend on."""
    case = CASES[name]
    args = case.draw(4)
    whole = run(case, args)
    some = np.random.default_rng(4).random((case.batch, case.nodes)) < 0.4
    args = dataclasses.replace(
        args, tokens_BN=jnp.where(some, jnp.where(args.tokens_BN % 2 == 0, case.vocab, -1), args.tokens_BN)
    )
    path, accepted, token, _ = run(case, args)
    assert accepted.sum() <= whole[1].sum()
    for row in range(case.batch):
        assert naive(case, args, row) == (path[row, : accepted[row] + 1].tolist(), token[row])
    args = dataclasses.replace(args, tokens_BN=jnp.full_like(args.tokens_BN, case.vocab))
    assert run(case, args)[1].sum() == 0


def test_an_empty_residual_falls_back_to_the_target():
    case = dataclasses.replace(CASES["small-rejection-chain"], rows=("plain",))
    args = dataclasses.replace(case.draw(6), sampling=case.sampling(np.random.default_rng(6)))
    assert args.draft_probs_BXV is not None
    p = jax.nn.softmax(args.logits_BNV[:, 0], axis=-1)
    rare = jnp.argmin(p, axis=-1).astype(jnp.int32)
    q = p.at[jnp.arange(case.batch), rare].add(1e-3)  # p - q is nowhere positive
    args = dataclasses.replace(
        args, draft_probs_BXV=args.draft_probs_BXV.at[:, 0].set(q), tokens_BN=args.tokens_BN.at[:, 1].set(rare)
    )
    _, accepted, token, _ = run(case, args)
    refused = np.flatnonzero(accepted == 0)
    assert len(refused) >= case.batch - 1
    for row in refused:
        seed, position = args.sampling.seed_B[row].item(), args.position_B[row].item()
        score = np.asarray(args.logits_BNV[row, 0], np.float64) + gumbels(seed, position, case.vocab, Purpose.TARGET)
        assert token[row] == score.argmax()


BROKEN = {
    "nan": lambda x: x.at[7].set(jnp.nan),
    "inf": lambda x: x.at[7].set(jnp.inf),
    "all banned": lambda x: jnp.full_like(x, -jnp.inf),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize(
    "name", ["small-tree", "small-chain", "small-greedy", "small-rejection", "small-rejection-chain"]
)
def test_only_broken_nodes_on_the_path_are_flagged(name: str, kind: str):
    case = CASES[name]
    args = case.draw(8)
    path, accepted, token, finite = run(case, args)
    assert finite.all()
    broken = functools.partial(jax.vmap(BROKEN[kind]))
    rows = np.arange(case.batch)
    last = path[rows, accepted]
    at_end = run(
        case,
        dataclasses.replace(args, logits_BNV=args.logits_BNV.at[rows, last].set(broken(args.logits_BNV[rows, last]))),
    )
    assert not at_end[3].any()
    root = jnp.zeros_like(last)
    at_root = run(
        case,
        dataclasses.replace(args, logits_BNV=args.logits_BNV.at[rows, root].set(broken(args.logits_BNV[rows, root]))),
    )
    assert not at_root[3].any()
    off = np.asarray([next((n for n in range(case.nodes) if n not in path[i]), -1) for i in rows])
    elsewhere = off >= 0
    assert elsewhere.any()
    i, n = rows[elsewhere], off[elsewhere]
    for got, want in zip(
        run(case, dataclasses.replace(args, logits_BNV=args.logits_BNV.at[i, n].set(broken(args.logits_BNV[i, n])))),
        (path, accepted, token, finite),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_banned_tokens_are_no_failure():
    case = CASES["small-rejection"]
    args = case.draw(9)
    _, _, token, finite = run(case, dataclasses.replace(args, logits_BNV=args.logits_BNV.at[:, :, 3:].set(-jnp.inf)))
    assert finite.all() and token.max() < 3


# ---- distributions

V = 12
EACH = 200_000
#: Parents and depths of a tree with two levels, and of a chain.
TREE = (np.asarray([0, 0, 0, 1, 1, 2]), np.asarray([0, 1, 1, 2, 2, 2]))
CHAIN = (np.asarray([0, 0, 1]), np.asarray([0, 1, 2]))


def total_variation(tokens: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """(total variation between counts and `exact`, what it is expected to be for a fair sample)."""
    counts = np.bincount(tokens, minlength=len(exact))
    noise = 0.5 * np.sqrt(2 / np.pi * exact * (1 - exact) / len(tokens)).sum()
    return 0.5 * np.abs(counts / len(tokens) - exact).sum(), noise


def emitted(
    table: np.ndarray, draft: np.ndarray, filters: tuple[float, int, float, float], chain: bool, mode: str, each: int,
    implementation: str = "reference",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """First and second tokens after token 0 of `each` requests, and which have a second one.

    The logits of a node depend on its token only.
    """
    rng = np.random.default_rng(each)
    parents, depths = CHAIN if chain else TREE
    q = np.stack([kept_probs(row, *filters) for row in draft])
    tokens = np.zeros((each, len(parents)), np.int32)
    for node in range(1, len(parents)):
        if mode == "rejection":  # i.i.d. draws from the parent's draft distribution
            steps = np.cumsum(q[tokens[:, parents[node]]], axis=1)
            tokens[:, node] = (rng.random((each, 1)) > steps).sum(axis=1).clip(0, V - 1)
        else:
            ordinal = node - 1 - list(parents[1:]).index(parents[node])
            tokens[:, node] = np.argsort(-draft, axis=1)[tokens[:, parents[node]], ordinal]
    spread = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32)[None], tokens.shape)
    field = lambda x, dtype: jnp.full((each,), x, dtype)
    sampling = SamplingRows(
        field(filters[0], jnp.float32), field(filters[1], jnp.int32), field(filters[2], jnp.float32),
        field(filters[3], jnp.float32), jnp.arange(each, dtype=jnp.uint32),
    )  # fmt: skip
    args = RejectionSamplingArgs(
        jnp.asarray(table, jnp.float32)[tokens], jnp.asarray(tokens), spread(parents), spread(depths), sampling,
        field(40, jnp.int32), jnp.asarray(q, jnp.float32)[tokens[:, :-1]] if mode == "rejection" else None,
        depth=2, chain=chain,
    )  # fmt: skip
    verdict = _jitted(args, implementation)
    path, accepted, last, finite = (np.asarray(x) for x in verdict)
    assert finite.all()
    rows = np.arange(each)
    first = np.where(accepted > 0, tokens[rows, path[:, 1]], last)
    second = np.where(accepted > 1, tokens[rows, path[:, 2]], last)
    return first, second, accepted > 0


def models(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Next-token logits by token, of a target and of a draft model."""
    rng = np.random.default_rng(seed)
    table = 1.5 * rng.normal(size=(V, V))
    return table, table + 0.6 * rng.normal(size=(V, V))


#: Each mode on chains and trees, and each filter in each mode.
SOME = {
    (True, "coupled", "plain"), (False, "coupled", "top-k"), (True, "coupled", "top-p"), (False, "coupled", "min-p"),
    (True, "rejection", "top-k"), (False, "rejection", "top-p"), (True, "rejection", "min-p"),
    (False, "rejection", "plain"),
}  # fmt: skip
EVERY = pytest.mark.exhaustive("every mode with every filter on chains and trees")


@pytest.mark.parametrize(
    ("chain", "mode", "filters"),
    [
        pytest.param(*which, marks=() if which in SOME else EVERY)
        for which in itertools.product((True, False), ("coupled", "rejection"), ("plain", "top-k", "top-p", "min-p"))
    ],
)
def test_tokens_have_the_exact_distribution(chain: bool, mode: str, filters: str):
    """200,000 requests: the first token, and the second given the first, against float64."""
    setting = {"top-k": (0.8, 4, 1.0, 0.0)}.get(filters, FILTERS[filters])
    table, draft = models(1)
    exact = np.stack([kept_probs(row, *setting) for row in table])
    first, second, more = emitted(table, draft, setting, chain, mode, EACH)
    distance, noise = total_variation(first, exact[0])
    assert distance < 2 * noise, (distance, noise)
    assert 0.1 < more.mean() < 0.99
    seen = 0
    for token in range(V):
        given = second[more & (first == token)]
        if len(given) > 5000:
            distance, noise = total_variation(given, exact[token])
            assert distance < 2.2 * noise, (token, distance, noise)
            seen += 1
    assert seen >= (2 if mode == "rejection" else 1)
    # A rule that drops the filter, or keeps the draft's distribution, is far outside.
    wrong = kept_probs(draft[0], *setting)
    assert total_variation(first, wrong)[0] > 5 * noise


# ---- the boundary


def test_arguments_that_do_not_fit_are_named():
    case = Case("", 2, 3, 16, 1, mode="rejection")
    args = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), case.shapes())
    assert args.draft_probs_BXV is not None
    call = lambda **changed: api.rejection_sampling(**(vars(args) | changed))
    rejects = functools.partial(pytest.raises, ValueError)
    with rejects(match=r"tokens must be int32 \(2, 3\) beside logits \(2, 3, 16\), got int32 \(2, 2\)"):
        call(tokens_BN=args.tokens_BN[:, :2])
    with rejects(match=r"seed must be uint32 \(2,\) .* got int32 \(2,\)"):
        call(sampling=args.sampling._replace(seed_B=jnp.zeros((2,), jnp.int32)))
    with rejects(match=r"temperature must be float32 \(2,\) .* got float32 \(1,\)"):
        call(sampling=args.sampling._replace(temperature_B=jnp.ones((1,), jnp.float32)))
    with rejects(match=r"draft_probs must be \[2, 1 to 3, 16\] .* got \(2, 2, 15\)"):
        call(draft_probs_BXV=args.draft_probs_BXV[:, :, :15])
    with rejects(match=r"noise must be \(2, 2, 16\) beside logits \(2, 3, 16\), got \(2, 3, 16\)"):
        call(noise_BDV=args.logits_BNV)
    with rejects(match="depth must be 0 to 2 for 3 nodes, got 3"):
        call(depth=3, chain=False)
    with rejects(match="depth must be 2 for 3 nodes, got 1"):
        call(depth=1, chain=True)
    with rejects(match=r"logits must be \[B, N, V\] and not empty, got \(2, 16\)"):
        call(logits_BNV=args.logits_BNV[:, 0])
    with rejects(match="logits must be floating point, got int32"):
        call(logits_BNV=args.logits_BNV.astype(jnp.int32))
    with rejects(match="implementation must be None or one of"):
        call(implementation="cuda")


def test_a_sharded_vocabulary_gives_the_same_verdict():
    """Logits and draft probabilities split over devices, everything else whole on each."""
    case = CASES["small-rejection"]
    args = case.draw(1)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("tp",))
    call = jax.jit(reference.rejection_sampling)
    split, whole = NamedSharding(mesh, P(None, None, "tp")), NamedSharding(mesh, P())
    placed = jax.tree.map(lambda x: jax.device_put(x, split if x.shape[-1:] == (case.vocab,) else whole), args)
    for rows in (placed.logits_BNV, placed.draft_probs_BXV):
        assert len(rows.addressable_shards) == 4
        assert rows.addressable_shards[0].data.shape[2] == case.vocab // 4
    for got, want in zip(call(placed), call(args), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy-chain", "tree"])
def test_parts_of_a_vocabulary_by_themselves_give_the_same_verdict(greedy: bool):
    """Every filter, equal logits and broken rows; each device sees its own part only."""
    rows, vocab = ("plain", "top-k", "all", *FILTERS), 384
    case = Case("sharded", len(rows), 4 if greedy else 9, vocab, 3, chain=greedy, rows=rows)
    args = case.draw(1)
    logits = jnp.round(args.logits_BNV * 2) / 2  # many ties, of thresholds too
    logits = logits.at[0, 0, 200].set(jnp.nan).at[1, 0, :].set(-jnp.inf).at[2, 0, 7].set(jnp.inf)
    args = dataclasses.replace(args, logits_BNV=logits, greedy=greedy)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("tp",))
    specs = dataclasses.replace(jax.tree.map(lambda _: P(), args), logits_BNV=P(None, None, "tp"))
    verify = lambda args: sharded.rejection_sampling(args, "tp")
    own = jax.shard_map(verify, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    got, want = (case.specified(jax.jit(fn)(args)) for fn in (own, reference.rejection_sampling))
    assert got.finite_B.tolist() == want.finite_B.tolist() == [i > 2 for i in range(len(rows))]
    assert int(got.num_accepted_B[3:].sum()) > 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a[3:], b[3:])
