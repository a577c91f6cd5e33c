"""The distributions of tokens that rejection sampling emits, against exact ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampling_oracle import jitted, kept_probs

from pallas_kernels.rejection_sampling.cases import FILTERS
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, SamplingRows

V = 12
#: Requests of each filter.
EACH = {False: 25_000, True: 200_000}
FILTERED = {name: FILTERS[name] for name in ("plain", "top-p", "min-p")} | {"top-k": (0.8, 4, 1.0, 0.0)}
#: Parents and depths of a tree with two levels, and of a chain.
TREE = (np.asarray([0, 0, 0, 1, 1, 2]), np.asarray([0, 1, 1, 2, 2, 2]))
CHAIN = (np.asarray([0, 0, 1]), np.asarray([0, 1, 2]))


def total_variation(tokens: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """(total variation between counts and `exact`, what it is expected to be for a fair sample)."""
    counts = np.bincount(tokens, minlength=len(exact))
    noise = 0.5 * np.sqrt(2 / np.pi * exact * (1 - exact) / len(tokens)).sum()
    return 0.5 * np.abs(counts / len(tokens) - exact).sum(), noise


def emitted(
    table: np.ndarray, draft: np.ndarray, chain: bool, mode: str, each: int
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By filter: first and second tokens after token 0 of `each` requests, and which have a second one.

    The logits of a node depend on its token only. All filters are rows of one call.
    """
    rng = np.random.default_rng(each)
    parents, depths = CHAIN if chain else TREE
    drafted = []
    for filters in FILTERED.values():
        q = np.stack([kept_probs(row, *filters) for row in draft])
        tokens = np.zeros((each, len(parents)), np.int32)
        for node in range(1, len(parents)):
            if mode == "rejection":  # i.i.d. draws from the parent's draft distribution
                steps = np.cumsum(q, axis=1)[tokens[:, parents[node]]]
                tokens[:, node] = (rng.random((each, 1)) > steps).sum(axis=1).clip(0, V - 1)
            else:
                ordinal = node - 1 - list(parents[1:]).index(parents[node])
                tokens[:, node] = np.argsort(-draft, axis=1)[tokens[:, parents[node]], ordinal]
        drafted.append((tokens, q.astype(np.float32)[tokens[:, :-1]]))
    tokens, probs = (np.concatenate(x) for x in zip(*drafted, strict=True))
    spread = lambda x: np.broadcast_to(x.astype(np.int32)[None], tokens.shape)
    field = lambda i, dtype: np.repeat(np.asarray([filters[i] for filters in FILTERED.values()], dtype), each)
    sampling: Any = SamplingRows(
        field(0, np.float32), field(1, np.int32), field(2, np.float32), field(3, np.float32),
        np.arange(len(tokens), dtype=np.uint32),
    )  # fmt: skip
    args: Any = RejectionSamplingArgs(
        table.astype(np.float32)[tokens], tokens, spread(parents), spread(depths), sampling,
        np.full(len(tokens), 40, np.int32), probs if mode == "rejection" else None, depth=2, chain=chain,
    )  # fmt: skip
    path, accepted, last, finite = (np.asarray(x) for x in jitted(args, "reference"))
    assert finite.all()
    rows = np.arange(len(tokens))
    first = np.where(accepted > 0, tokens[rows, path[:, 1]], last)
    second = np.where(accepted > 1, tokens[rows, path[:, 2]], last)
    parts = zip(*(np.split(x, len(FILTERED)) for x in (first, second, accepted > 0)), strict=True)
    return dict(zip(FILTERED, parts, strict=True))


def models(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Next-token logits by token, of a target and of a draft model."""
    rng = np.random.default_rng(seed)
    table = 1.5 * rng.normal(size=(V, V))
    return table, table + 0.6 * rng.normal(size=(V, V))


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_tokens_have_the_exact_distribution(chain: bool, mode: str, exhaustive: bool):
    """Under every filter: the first token, and the second given the first, against float64."""
    table, draft = models(1)
    each, far = EACH[exhaustive], []
    for name, (first, second, more) in emitted(table, draft, chain, mode, each).items():
        setting = FILTERED[name]
        exact = np.stack([kept_probs(row, *setting) for row in table])
        distance, noise = total_variation(first, exact[0])
        assert distance < 2 * noise, (name, distance, noise)
        assert 0.1 < more.mean() < 0.99
        seen = 0
        for token in range(V):
            given = second[more & (first == token)]
            if len(given) > each // 40:
                distance, noise = total_variation(given, exact[token])
                assert distance < 3 * noise, (name, token, distance, noise)
                far.append(distance / noise)
                seen += 1
        assert seen >= (2 if mode == "rejection" else 1), name
        # A rule that drops the filter, or keeps the draft's distribution, is far outside.
        wrong = kept_probs(draft[0], *setting)
        assert total_variation(first, wrong)[0] > 5 * noise
    assert np.mean(far) < 1.3, far
