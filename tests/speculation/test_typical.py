"""Typical acceptance against its definition, node by node, over random trees and chains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.tree import DraftTree, ancestors
from jaxspec.speculation.typical import Typical
from jaxspec.speculation.verifier import verify
from jaxspec.tier import Tier
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise

V, B, N, DEPTH = 11, 240, 9, 5
#: Settings that the rows cycle through; every fourth row is greedy.
FILTERS = [
    dict(temperature=1.0),
    dict(temperature=0.6, top_k=4),
    dict(temperature=1.7, top_p=0.8, min_p=0.02),
    dict(temperature=0.0),
]


def random_trees(rng: np.random.Generator, chain: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, parents, depths): parents first, siblings distinct, some nodes without a proposal."""
    tokens, parents, depths = rng.integers(0, V, (B, N)), np.zeros((B, N), int), np.zeros((B, N), int)
    for row in range(B):
        for node in range(1, N):
            shallow = [m for m in range(node) if depths[row, m] < DEPTH]
            parents[row, node] = node - 1 if chain else rng.choice(shallow)
            depths[row, node] = depths[row, parents[row, node]] + 1
            siblings = [m for m in range(1, node) if parents[row, m] == parents[row, node]]
            while tokens[row, node] in tokens[row, siblings]:
                tokens[row, node] = (tokens[row, node] + 1) % V
    tokens[::7, -1] = V
    return tokens, parents, depths


def distribution(x: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    p = np.exp((x - x.max()) / temperature)
    p[p < min_p] = 0
    if top_k:
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    if top_p < 1:
        p[p < p[order[int(np.searchsorted(np.cumsum(p[order]), top_p))]]] = 0
    return p / p.sum()


def expected(
    tokens: np.ndarray, parents: np.ndarray, logits: np.ndarray, filters: dict[str, Any], rule: Typical
) -> list[int]:
    """The winning path: the longest of accepted nodes, then the likeliest, then the first."""
    best: tuple[int, float, int] = (0, 0.0, 0)
    lineage: list[list[int] | None] = [[0]]
    sums = [0.0]
    for node in range(1, len(tokens)):
        before, token = lineage[parents[node]], tokens[node]
        accepted, gain = False, 0.0
        if before is not None and token < V:
            x = logits[parents[node]].astype(np.float64)
            if filters["temperature"] == 0:
                accepted = bool(token == x.argmax())
            else:
                p = distribution(x, **filters)
                entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
                accepted = p[token] > min(rule.threshold, rule.alpha * np.exp(-entropy))
                gain = float(np.log(p[token])) if accepted else 0.0
        lineage.append([*before, node] if accepted and before is not None else None)
        sums.append(sums[parents[node]] + gain)
        if accepted:
            key = (len(before or []), sums[node], -node)
            best = max(best, key)
    found = lineage[-best[2]]
    assert found is not None
    return found


@pytest.mark.parametrize("rule", [Typical(), Typical(threshold=0.3, alpha=0.9)], ids=["default", "strict"])
@pytest.mark.parametrize("chain", [False, True])
def test_the_longest_plausible_path_wins(chain: bool, rule: Typical):
    rng = np.random.default_rng(3 + chain)
    tokens, parents, depths = random_trees(rng, chain)
    logits = (1.8 * rng.normal(size=(B, N, V))).astype(np.float32)
    likely = (tokens < V) & (rng.random((B, N)) < 0.6) & (np.arange(N) > 0)
    for row, node in zip(*np.nonzero(likely), strict=True):
        logits[row, parents[row, node], tokens[row, node]] += 3
    filters = [FILTERS[row % len(FILTERS)] for row in range(B)]
    depth = N - 1 if chain else DEPTH
    field = lambda name, default: jnp.asarray([f.get(name, default) for f in filters])
    state = SamplingState.empty(B, V)
    sampling = type(state)(
        **{**vars(state), "temperature_S": field("temperature", 0.0), "top_k_S": field("top_k", 0),
           "top_p_S": field("top_p", 1.0), "min_p_S": field("min_p", 0.0), "seed_S": jnp.arange(B, dtype=jnp.uint32)}
    )  # fmt: skip
    as_int = lambda x: jnp.asarray(x, jnp.int32)
    tree = DraftTree(as_int(tokens), as_int(parents), as_int(depths), ancestors(as_int(parents), depth))
    first, tier = as_int(rng.integers(1, 40, B)), Tier(depth) if chain else Tier(depth, 3, N)
    verdict = jax.jit(lambda tree, logits: verify(tree, logits, sampling, first, tier, typical=rule))(tree, logits)
    assert verdict.finite_B.all()
    accepted = np.asarray(verdict.num_accepted_B)
    noise = np.asarray(gumbel_noise(sampling.seed_S, (first + accepted)[:, None], V, Purpose.TARGET))[:, 0]
    lengths = []
    for row in range(B):
        path = expected(tokens[row], parents[row], logits[row], filters[row], rule)
        assert np.asarray(verdict.path_BD)[row, : len(path)].tolist() == path, row
        assert accepted[row] == len(path) - 1
        x = logits[row, path[-1]].astype(np.float64)
        if filters[row]["temperature"]:
            with np.errstate(divide="ignore"):
                x = np.log(distribution(x, **filters[row])) + noise[row]
        assert verdict.next_token_B[row] == x.argmax(), row
        lengths.append(len(path) - 1)
    assert max(lengths) >= 3 and min(lengths) == 0


def test_a_nan_on_the_path_is_reported_and_one_beside_it_is_not():
    tokens = jnp.asarray([[0, 1, 2, 3]] * 3, jnp.int32)
    parents = jnp.asarray([[0, 0, 0, 1]] * 3, jnp.int32)
    logits = np.full((3, 4, V), -5.0, np.float32)
    logits[:, 0, 1] = logits[:, 1, 3] = logits[:, 3, 4] = 5
    logits[1, 2, 0] = logits[2, 3, 0] = np.nan
    sampling = SamplingState.empty(3, V)
    sampling = type(sampling)(**{**vars(sampling), "temperature_S": jnp.ones(3)})
    tree = DraftTree(tokens, parents, jnp.asarray([[0, 1, 1, 2]] * 3, jnp.int32), ancestors(parents, 2))
    start = jnp.ones(3, jnp.int32)
    tier = Tier(2, 2, 4)
    verdict = jax.jit(lambda tree, logits: verify(tree, logits, sampling, start, tier, typical=Typical()))(tree, logits)
    assert np.asarray(verdict.path_BD).tolist() == [[0, 1, 3]] * 3
    assert np.asarray(verdict.finite_B).tolist() == [True, True, False]


def test_batches_of_greedy_rows_never_meet_it():
    """Without sampling rows the rule is the exact one."""
    tree = DraftTree.chain(jnp.asarray([[0, 1]], jnp.int32))
    logits = jnp.asarray([[[0.0, 0.9, 1.0], [1.0, 0.0, 0.0]]])
    start = jnp.ones(1, jnp.int32)
    verdict = jax.jit(lambda tree, logits: verify(tree, logits, None, start, Tier(1), typical=Typical()))(tree, logits)
    assert verdict.num_accepted_B.tolist() == [0] and verdict.next_token_B.tolist() == [2]
