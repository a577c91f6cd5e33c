"""Rejection sampling against an oracle in numpy float64."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sampling_oracle import drawn, gumbels, jitted, naive, run

from pallas_kernels.rejection_sampling import api, reference, sharded
from pallas_kernels.rejection_sampling.cases import CASES, FILTERS, SMALL, Case
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs


@pytest.mark.parametrize("case", [c for c in SMALL if c.vocab < 5000], ids=lambda c: c.name)
def test_verdicts_equal_the_oracle(case: Case):
    for seed in range(2):
        args = drawn(case.name, seed)
        path, accepted, token, finite = run(case, args)
        assert finite.all()
        assert case.depth == 0 or accepted.any()
        for row in range(case.batch):
            expected = naive(case, args, row)
            assert (path[row, : accepted[row] + 1].tolist(), token[row]) == expected, (seed, row)


def test_none_chooses_the_reference_on_cpus():
    case = CASES["small-tree"]
    args = drawn(case.name, 7)
    for got, want in zip(run(case, args, None), run(case, args), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["small-tree", "small-chain", "small-rejection", "small-rejection-chain"])
def test_noise_that_the_caller_has_changes_nothing(name: str):
    case = CASES[name]
    args = drawn(case.name, 7)
    position = args.position_B[:, None] + np.arange(case.depth + 1, dtype=np.int32)[None]
    noise = np.asarray(
        jax.jit(gumbel_noise, static_argnums=(2, 3))(args.sampling.seed_B, position, case.vocab, Purpose.TARGET)
    )
    given, shifted = (
        jitted(dataclasses.replace(args, noise_BDV=x), "reference") for x in (noise, np.roll(noise, 1, axis=2))
    )
    _, accepted, token, _ = run(case, args)
    np.testing.assert_array_equal(given.num_accepted_B, accepted)
    np.testing.assert_array_equal(given.next_token_B, token)
    assert (np.asarray(shifted.next_token_B) != token).any(), "the noise was not taken"


@pytest.mark.parametrize("name", ["small-tree-odd", "small-chain", "small-rejection", "small-rejection-chain"])
def test_a_request_alone_gets_what_it_gets_in_a_batch(name: str):
    case = CASES[name]
    args = drawn(case.name, 11)
    together = run(case, args)
    order = np.random.default_rng(0).permutation(case.batch)
    for got, want in zip(run(case, jax.tree.map(lambda x: x[order], args)), together, strict=True):
        np.testing.assert_array_equal(got, want[order])
    alone = dataclasses.replace(case, batch=1)
    for row in range(case.batch):
        one = jax.tree.map(operator.itemgetter(slice(row, row + 1)), args)
        for got, want in zip(run(alone, one), together, strict=True):
            np.testing.assert_array_equal(got[0], want[row])


@pytest.mark.parametrize("name", ["small-chain", "small-rejection-chain"])
def test_a_chain_is_a_tree(name: str):
    chain = CASES[name]
    args = drawn(chain.name, 2)
    for got, want in zip(run(dataclasses.replace(chain, chain=False), args), run(chain, args), strict=True):
        np.testing.assert_array_equal(got, want)


def test_greedy_batches_equal_greedy_rows_and_take_the_lowest_tie():
    case = CASES["small-greedy"]
    args = drawn(case.name, 3)
    args = dataclasses.replace(args, logits_BNV=np.round(args.logits_BNV / 8))
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
    args = drawn(case.name, 4)
    whole = run(case, args)
    some = np.random.default_rng(4).random((case.batch, case.nodes)) < 0.4
    args = dataclasses.replace(
        args, tokens_BN=np.where(some, np.where(args.tokens_BN % 2 == 0, case.vocab, -1), args.tokens_BN)
    )
    path, accepted, token, _ = run(case, args)
    assert accepted.sum() <= whole[1].sum()
    for row in range(case.batch):
        assert naive(case, args, row) == (path[row, : accepted[row] + 1].tolist(), token[row])
    args = dataclasses.replace(args, tokens_BN=np.full_like(args.tokens_BN, case.vocab))
    assert run(case, args)[1].sum() == 0


def test_an_empty_residual_falls_back_to_the_target():
    case = dataclasses.replace(CASES["small-rejection-chain"], rows=("plain",))
    args = drawn("small-rejection-chain", 6)
    args = dataclasses.replace(args, sampling=case.sampling(np.random.default_rng(6)))
    assert args.draft_probs_BXV is not None
    logits, q, tokens = (np.array(x) for x in (args.logits_BNV[:, 0], args.draft_probs_BXV, args.tokens_BN))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    rare = p.argmin(axis=1)
    p[np.arange(case.batch), rare] += 1e-3  # p - q is nowhere positive
    q[:, 0], tokens[:, 1] = p, rare
    args = dataclasses.replace(args, draft_probs_BXV=q, tokens_BN=tokens)
    _, accepted, token, _ = run(case, args)
    refused = np.flatnonzero(accepted == 0)
    assert len(refused) >= case.batch - 1
    for row in refused:
        seed, position = args.sampling.seed_B[row].item(), args.position_B[row].item()
        score = logits[row].astype(np.float64) + gumbels(seed, position, case.vocab, Purpose.TARGET)
        assert token[row] == score.argmax()


#: What is wrong with a row, by the tokens that it is written to.
BROKEN = {"nan": (7, np.nan), "inf": (7, np.inf), "all banned": (slice(None), -np.inf)}


def with_broken(args: RejectionSamplingArgs, rows: np.ndarray, nodes: Any, kind: str) -> RejectionSamplingArgs:
    """The arguments with one node's logits of some requests broken."""
    logits = np.array(args.logits_BNV)
    where, value = BROKEN[kind]
    for row, node in np.broadcast(rows, nodes):
        logits[row, node, where] = value
    return dataclasses.replace(args, logits_BNV=logits)


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize(
    "name", ["small-tree", "small-chain", "small-greedy", "small-rejection", "small-rejection-chain"]
)
def test_only_broken_nodes_on_the_path_are_flagged(name: str, kind: str):
    case = CASES[name]
    args = drawn(case.name, 8)
    path, accepted, token, finite = run(case, args)
    assert finite.all()
    rows = np.arange(case.batch)
    for node in (path[rows, accepted], 0):
        assert not run(case, with_broken(args, rows, node, kind))[3].any()
    off = np.asarray([next((n for n in range(case.nodes) if n not in path[i]), -1) for i in rows])
    elsewhere = off >= 0
    assert elsewhere.any()
    found = run(case, with_broken(args, rows[elsewhere], off[elsewhere], kind))
    for got, want in zip(found, (path, accepted, token, finite), strict=True):
        np.testing.assert_array_equal(got, want)


def test_banned_tokens_are_no_failure():
    case = CASES["small-rejection"]
    args = drawn(case.name, 9)
    logits = np.array(args.logits_BNV)
    logits[:, :, 3:] = -np.inf
    _, _, token, finite = run(case, dataclasses.replace(args, logits_BNV=logits))
    assert finite.all() and token.max() < 3


# ---- the boundary


def test_arguments_that_do_not_fit_are_named():
    case = Case("", 2, 3, 16, 1, mode="rejection")
    args = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), case.shapes())
    assert args.draft_probs_BXV is not None
    call = lambda **changed: api.rejection_sampling(**(vars(args) | changed))
    rejects = functools.partial(pytest.raises, ValueError)
    with rejects(match=r"tokens must be int32 \(2, 3\) beside logits \(2, 3, 16\), got int32 \(2, 2\)"):
        call(tokens_BN=args.tokens_BN[:, :2])
    with rejects(match=r"seed must be uint32 \(2,\) .* got int32 \(2,\)"):
        call(sampling=args.sampling._replace(seed_B=np.zeros((2,), np.int32)))
    with rejects(match=r"temperature must be float32 \(2,\) .* got float32 \(1,\)"):
        call(sampling=args.sampling._replace(temperature_B=np.ones((1,), np.float32)))
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
        call(logits_BNV=args.logits_BNV.astype(np.int32))
    with rejects(match="implementation must be None or one of"):
        call(implementation="cuda")


def test_a_sharded_vocabulary_gives_the_same_verdict():
    """Logits and draft probabilities split over devices, everything else whole on each."""
    case = CASES["small-rejection"]
    args = drawn(case.name, 1)
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
    args = jax.tree.map(np.asarray, case.draw(1))
    logits = np.round(args.logits_BNV * 2) / 2  # many ties, of thresholds too
    logits[0, 0, 200], logits[1, 0], logits[2, 0, 7] = np.nan, -np.inf, np.inf
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
