"""The TPU kernel of rejection sampling takes the reference's decisions, in the interpreters.

`interpret=True` is quick; TPU interpret mode also keeps copies back until they are awaited,
fills fresh memory with NaN and looks for races. Neither says anything about hardware.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rejection_sampling import api, reference, tpu
from pallas_kernels.rejection_sampling.cases import CASES, SMALL, Case
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, SamplingRows
from pallas_kernels.rejection_sampling.tpu_rows import Plan

STRICT = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")


@functools.cache
def _jitted(kernel: bool, strict: bool):
    if kernel:
        return jax.jit(functools.partial(tpu.rejection_sampling, interpret=STRICT if strict else True))
    return jax.jit(reference.rejection_sampling)


def run(case: Case, args: RejectionSamplingArgs, kernel: bool = True, strict: bool = False) -> tuple[np.ndarray, ...]:
    """The verdict as numpy, with the unspecified part of the path cleared."""
    verdict = _jitted(kernel, strict)(args)
    path, accepted, token, finite = (np.asarray(x) for x in verdict)
    assert path.shape == (case.batch, case.depth + 1) and path.min() >= 0 and path.max() < case.nodes
    assert token.min() >= 0 and token.max() < case.vocab and accepted.min() >= 0 and accepted.max() <= case.depth
    # As `Case.specified` has it, which would compile anew for every case.
    specified = np.arange(case.depth + 1) <= accepted[:, None]
    return np.where(specified, path, 0), accepted, token, finite


def assert_same(case: Case, args: RejectionSamplingArgs, **options: Any) -> tuple[np.ndarray, ...]:
    got, want = run(case, args, **options), run(case, args, kernel=False)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    return got


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_decides_as_the_reference(case: Case):
    """Peaked logits, of which most chunks are skipped; flat ones, of which none is; and ones full of ties."""
    args = case.draw(0)
    _, accepted, _, finite = assert_same(case, args)
    assert finite.all() and (case.depth == 0 or accepted.any())
    others = jax.jit(lambda x: (x * 0.05, jnp.round(x * 0.5), jnp.where(x < 1.0, -jnp.inf, x)))
    for logits_BNV in others(args.logits_BNV):
        assert_same(case, dataclasses.replace(args, logits_BNV=logits_BNV))


def test_chunks_far_below_the_best_token_still_win_their_share():
    """One token holds half of the mass, and the other half is thin over chunks whose best lies 7 below it."""
    case = CASES["small-wide"]
    args = case.draw(0)
    args = dataclasses.replace(
        args, sampling=dataclasses.replace(case, rows=("plain",)).sampling(np.random.default_rng(0))
    )
    args = dataclasses.replace(args, tokens_BN=jnp.full_like(args.tokens_BN, case.vocab))
    shape = args.logits_BNV.shape
    drawn = []
    for seed in range(6):
        thin = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
        _, _, token, _ = assert_same(case, dataclasses.replace(args, logits_BNV=thin.at[:, :, 5000].set(11.0)))
        drawn += [v // 2048 for v in token.tolist()]
    assert len(set(drawn)) > 4


def test_both_orders_of_requests_and_nodes_are_covered():
    orders = lambda dtype: {Plan.of(c.shapes()).nodes_first for c in (*SMALL, ODD) if c.dtype == dtype}
    assert orders("float32") == {True, False} and orders("bfloat16") == {True, False}


ODD = Case("bf16-b3", 3, 6, 300, 2, dtype="bfloat16", rows=("plain", "all", "greedy"))


def test_packed_rows_of_an_odd_number_of_requests():
    for seed in range(3):
        assert_same(ODD, ODD.draw(seed))


@pytest.mark.parametrize("name", ["small-tree", "small-rejection", "small-rejection-chain"])
def test_waits_for_its_copies_and_has_no_races(name: str, capfd: pytest.CaptureFixture[str]):
    assert_same(CASES[name], CASES[name].draw(1), strict=True)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("name", ["small-tree", "small-rejection"])
def test_a_request_gets_the_same_in_any_place(name: str):
    case = CASES[name]
    args = case.draw(2)
    order = np.random.default_rng(0).permutation(case.batch)
    shuffled = jax.tree.map(lambda x: x[order], args)
    for got, want in zip(run(case, shuffled), run(case, args), strict=True):
        np.testing.assert_array_equal(got, want[order])


def test_a_request_gets_the_same_alone():
    case = CASES["small-rejection"]
    args = case.draw(2)
    together, single = run(case, args), dataclasses.replace(case, batch=1)
    for row in range(case.batch):
        alone = jax.tree.map(lambda x: x[row : row + 1], args)  # noqa: B023
        for got, want in zip(run(single, alone), together, strict=True):
            np.testing.assert_array_equal(got[0], want[row])


@pytest.mark.parametrize("name", ["small-tree", "small-greedy", "small-rejection"])
def test_flags_broken_rows_of_the_path_and_ignores_others(name: str):
    case = CASES[name]
    args = case.draw(3)
    path, accepted, token, _ = run(case, args)
    rows = np.arange(case.batch)
    for value in (jnp.nan, jnp.inf):
        poison = args.logits_BNV.at[rows, path[rows, accepted], 5].set(value)
        assert not run(case, dataclasses.replace(args, logits_BNV=poison))[3].any()
    banned = args.logits_BNV.at[rows, path[rows, accepted]].set(-jnp.inf)
    assert not run(case, dataclasses.replace(args, logits_BNV=banned))[3].any()
    on_path = np.zeros((case.batch, case.nodes), bool)
    for row in rows:
        on_path[row, path[row, : accepted[row] + 1]] = True
    poisoned = dataclasses.replace(args, logits_BNV=jnp.where(on_path[:, :, None], args.logits_BNV, jnp.nan))
    if args.draft_probs_BXV is not None:
        drafts = jnp.where(on_path[:, :-1, None], args.draft_probs_BXV, jnp.nan)
        poisoned = dataclasses.replace(poisoned, draft_probs_BXV=drafts)
    for got, want in zip(run(case, poisoned), (path, accepted, token, np.ones(case.batch, bool)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["small-tree", "small-rejection"])
def test_passes_over_tokens_outside_the_vocabulary(name: str):
    case = CASES[name]
    args = case.draw(4)
    some = np.random.default_rng(4).random((case.batch, case.nodes)) < 0.4
    args = dataclasses.replace(
        args, tokens_BN=jnp.where(some, jnp.where(args.tokens_BN % 2 == 0, case.vocab, -1), args.tokens_BN)
    )
    assert_same(case, args)


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_first_tokens_have_the_exact_distribution(mode: str, exhaustive: bool):
    """Requests whose root has three children."""
    v, each = 12, 8000 if exhaustive else 2000
    rng = np.random.default_rng(5)
    logits = 1.5 * rng.normal(size=v)
    p = np.exp(logits / 0.8)
    p = np.where(p >= np.sort(p)[-6], p, 0) / np.sort(p)[-6:].sum()
    q = rng.dirichlet(np.ones(v))
    tokens = np.zeros((each, 4), np.int32)
    if mode == "rejection":
        tokens[:, 1:] = rng.choice(v, (each, 3), p=q)
    else:
        tokens[:, 1:] = np.argsort(-p)[[1, 3, 5]]
    field = lambda x, dtype: jnp.full((each,), x, dtype)
    sampling = SamplingRows(
        field(0.8, jnp.float32), field(6, jnp.int32), field(1.0, jnp.float32), field(0.0, jnp.float32),
        jnp.arange(each, dtype=jnp.uint32),
    )  # fmt: skip
    level = jnp.broadcast_to(jnp.asarray([[0, 1, 1, 1]], jnp.int32), (each, 4))
    wide = lambda x, rows: jnp.broadcast_to(jnp.asarray(x, jnp.float32)[None, None], (each, rows, v))
    args = RejectionSamplingArgs(
        wide(logits, 4), jnp.asarray(tokens), jnp.zeros((each, 4), jnp.int32), level, sampling, field(9, jnp.int32),
        wide(q, 1) if mode == "rejection" else None, depth=1, chain=False,
    )  # fmt: skip
    path, accepted, last, finite = (np.asarray(x) for x in _jitted(True, False)(args))
    assert finite.all() and 0.2 < accepted.mean() < 0.9
    first = np.where(accepted > 0, tokens[np.arange(each), path[:, 1]], last)
    share = np.bincount(first, minlength=v) / each
    noise = 0.5 * np.sqrt(2 / np.pi * p * (1 - p) / each).sum()
    assert 0.5 * np.abs(share - p).sum() < 2 * noise
    assert share[p == 0].sum() == 0


def test_runs_by_name_and_refuses_with_the_reason():
    for case in (CASES["small-greedy"], Case("", 2, 2, 256, 1, rows=("greedy",), dtype="bfloat16")):
        args = case.draw(6)
        got = api.rejection_sampling(**vars(args), implementation="interpret")
        np.testing.assert_array_equal(got.next_token_B, run(case, args, kernel=False)[2])

    call = lambda case: jax.eval_shape(
        lambda args: api.rejection_sampling(**vars(args), implementation="interpret"), case.shapes()
    )
    for wrong, reason in (
        (Case("", 1, 129, 64, 4), "at most 128 nodes, got 129"),
        (Case("", 1, 128, 64, 127, chain=True), "depth at most 124, got 127"),
        (Case("", 3, 5, 64, 2, dtype="bfloat16"), "an even number of requests or of nodes, got 3 and 5"),
        (Case("", 2, 4, 64, 2, dtype="float16"), "float32 or bfloat16, got float16"),
        (Case("", 1, 2, 2**20, 1), "fits 58720256 bytes of VMEM, got 1048576 tokens"),
    ):
        with pytest.raises(ValueError, match=f"implementation 'interpret' cannot serve these arguments: .*{reason}"):
            call(wrong)
