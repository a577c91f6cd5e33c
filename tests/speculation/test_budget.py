"""Which nodes a budget buys: against a plain search, and what must hold for any confidences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.speculation.budget import EDGE, calibrated, select, spend, survival
from jaxspec.speculation.tree import DraftTree, ancestors

B, N, DEPTH = 5, 7, 6
IDENTITY = np.tile(np.asarray([1.0, 0.0], np.float32), (DEPTH, 1))


def random_tree(rng: np.random.Generator, chain: bool) -> DraftTree:
    parents = np.asarray([[0] + [n - 1 if chain else rng.integers(0, n) for n in range(1, N)] for _ in range(B)])
    lineage = np.asarray(ancestors(jnp.asarray(parents), DEPTH))
    confidence = rng.choice([0.0, 0.25, 0.5, 0.9, 1.0, rng.random()], (B, N)).astype(np.float32)
    confidence[:, 0] = 1
    as_int = lambda x: jnp.asarray(x, jnp.int32)
    return DraftTree(
        as_int(np.zeros((B, N))), as_int(parents), as_int(lineage.sum(axis=2) - 1), jnp.asarray(lineage),
        confidence_BN=jnp.asarray(confidence),
    )  # fmt: skip


def plainly(p: np.ndarray, tree: DraftTree) -> np.ndarray:
    """Products along paths, in the order of the path."""
    parents, out = np.asarray(tree.parents_BN), np.ones((B, N), np.float32)
    for row in range(B):
        for node in range(1, N):
            out[row, node] = p[row, node] * out[row, parents[row, node]]
    return out


@pytest.mark.parametrize("chain", [False, True])
def test_the_best_nodes_of_the_batch_are_chosen(chain: bool):
    rng = np.random.default_rng(2)
    chosen = jax.jit(spend, static_argnames=("tokens", "depth"))
    for trial in range(6):
        tree = random_tree(rng, chain)
        depths, parents = np.asarray(tree.depths_BN), np.asarray(tree.parents_BN)
        valid, cap = rng.random(B) < 0.8, rng.integers(0, DEPTH + 1, B).astype(np.int32)
        fit = rng.normal(1, 0.3, (DEPTH, 2)).astype(np.float32)
        offset, weight = (rng.random(B).astype(np.float32) for _ in range(2))
        weight[trial % B] = (0.0, np.nan, 2.0, 1.0, -1.0, np.inf)[trial]
        p = np.asarray(calibrated(tree.confidence_BN, tree.depths_BN, fit, offset))
        worth = plainly(p, tree) * np.clip(np.nan_to_num(weight), 0, 1e9)[:, None]
        eligible = valid[:, None] & (depths <= cap[:, None])
        ranked = sorted(
            ((-worth[r, n], depths[r, n], r, n) for r in range(B) for n in range(1, N) if eligible[r, n]),
        )
        for tokens in (B, B + 1, 11, 20, B * N):
            got = chosen(tree, valid, cap, tokens, fit, offset, weight, depth=DEPTH)
            wanted = {(r, 0) for r in range(B)} | {(r, n) for *_, r, n in ranked[: tokens - B]}
            nodes = np.asarray(got.node_T)
            assert nodes.tolist() == sorted(r * N + n for r, n in wanted) + [B * N] * (tokens - len(wanted))
            admitted = np.asarray(got.admitted)
            assert {(r, n) for r, n in zip(*np.nonzero(admitted), strict=True)} == wanted
            assert (nodes[np.asarray(got.slot_BN)[admitted]] == np.flatnonzero(admitted)).all()
            rows = np.arange(B)[:, None]
            assert admitted[rows, parents][admitted].all(), "an admitted node's parent is admitted"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, 1.0, 0.3, -2.0])
def test_any_confidence_leaves_whole_paths(value: float):
    """Constant confidences spread the budget level by level, row by row; what is no number counts as 0."""
    tree = random_tree(np.random.default_rng(0), chain=True)
    tree = DraftTree.chain(tree.tokens_BN, confidence_BN=jnp.full((B, N), value, jnp.float32).at[:, 0].set(1.0))
    everyone, most = np.ones(B, bool), np.full(B, N, np.int32)
    zero, one = np.zeros(B, np.float32), np.ones(B, np.float32)
    got = spend(tree, jnp.asarray(everyone), jnp.asarray(most), 17, jnp.asarray(IDENTITY), zero, one, depth=DEPTH)
    assert np.asarray(got.admitted).sum(axis=1).tolist() == [4, 4, 3, 3, 3]
    assert np.asarray(got.admitted)[:, :3].all()


def test_calibration_is_a_logistic_fit_of_each_depth():
    confidence = jnp.asarray([[1.0, 0.2, 0.9, np.nan, 0.0], [1.0, 0.5, 0.5, 0.5, 1.0]], jnp.float32)
    depths = jnp.asarray([[0, 1, 2, 3, 4]] * 2, jnp.int32)
    zero = jnp.zeros(2, jnp.float32)
    same = calibrated(confidence, depths, jnp.asarray(IDENTITY), zero)
    np.testing.assert_allclose(same, [[1, 0.2, 0.9, 0, 0], [1, 0.5, 0.5, 0.5, 1 - EDGE]], rtol=1e-5)
    fit = jnp.asarray([[2.0, 1.0], [0.0, 0.0], [1.0, np.nan], [1.0, -30.0]], jnp.float32)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    moved = calibrated(confidence, depths, fit, jnp.asarray([0.0, 0.7], jnp.float32))
    logit = np.log(0.2 / 0.8)
    exact = [[1, sigmoid(2 * logit + 1), 0.5, 0, 0], [1, sigmoid(1.7), sigmoid(0.7), 0, 0]]
    np.testing.assert_allclose(moved, exact, atol=1e-6)


def test_survival_never_grows_along_a_path():
    rng = np.random.default_rng(1)
    tree = random_tree(rng, chain=False)
    p = (1 - 1e-7 * rng.random((B, N))).astype(np.float32)
    p[:, 0] = 1
    out = np.asarray(survival(jnp.asarray(p), tree.parents_BN, DEPTH))
    np.testing.assert_array_equal(out, plainly(p, tree))
    assert (out <= np.take_along_axis(out, np.asarray(tree.parents_BN), axis=1)).all()


def test_a_budget_for_every_node_keeps_their_order():
    got = select(jnp.ones((B, N)), jnp.zeros((B, N), jnp.int32), jnp.ones((B, N), bool), B * N)
    assert np.asarray(got.node_T).tolist() == list(range(B * N))
    assert np.asarray(got.slot_BN).ravel().tolist() == list(range(B * N))
