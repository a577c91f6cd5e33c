"""Rejection sampling in numpy and float64: probabilities instead of logarithms, sorts instead of thresholds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rejection_sampling import api
from pallas_kernels.rejection_sampling.cases import CASES, Case
from pallas_kernels.rejection_sampling.noise import Purpose
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, Verdict


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


@functools.partial(jax.jit, static_argnums=1)
def jitted(args: RejectionSamplingArgs, implementation: str | None) -> Verdict:
    return api.rejection_sampling(**vars(args), implementation=implementation)


def run(case: Case, args: RejectionSamplingArgs, implementation: str | None = "reference") -> tuple[np.ndarray, ...]:
    """The verdict as numpy, with the unspecified part of the path cleared."""
    verdict = jitted(dataclasses.replace(args, **case.options), implementation)
    path, accepted, token, finite = (np.asarray(x) for x in verdict)
    assert path.shape == (case.batch, case.depth + 1) and path.min() >= 0 and path.max() < case.nodes
    assert token.min() >= 0 and token.max() < case.vocab and accepted.min() >= 0 and accepted.max() <= case.depth
    # As `Case.specified` has it, which would compile anew for every case.
    specified = np.arange(case.depth + 1) <= accepted[:, None]
    return np.where(specified, path, 0), accepted, token, finite


@functools.cache
def drawn(name: str, seed: int) -> RejectionSamplingArgs:
    """A case's arguments as numpy arrays: changing these compiles nothing."""
    return jax.tree.map(np.asarray, CASES[name].draw(seed))
