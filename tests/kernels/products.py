"""Operands of small-batch products of one layer, and how near results of two ways are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.small_batch import reference
from pallas_kernels.small_batch.reference import Stream

EPS = 1e-5
E, F, C = 256, 384, 128
COUNTS = (2, 1, 1)


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    with jax.ensure_compile_time_eval():  # where only shapes are asked for, too
        drawn = np.asarray(jax.random.normal(jax.random.key(seed), shape, jnp.float32))
        return jnp.asarray((drawn * np.float32(scale)).astype(jnp.bfloat16))


def stream(m: int) -> Stream:
    return reference.begin(normal(0, m, E), normal(1, E))


def arguments(name: str, m: int) -> tuple[Any, ...]:
    angle = jax.random.uniform(jax.random.key(2), (C // 2, reference.padded(m))) * 6
    return {
        "project": (stream(m), normal(3, E, 192, scale=0.1), EPS),
        "multiply": (normal(4, m, F), normal(3, F, 192, scale=0.1)),
        "logits": (normal(4, m, F), normal(3, F, 192, scale=0.1)),
        "heads": (stream(m), normal(3, E, 4 * C, scale=0.1), jnp.stack([jnp.cos(angle), jnp.sin(angle)]), COUNTS, EPS),
        "swiglu": (stream(m), normal(3, E, 2 * F, scale=0.1), EPS),
        "add": (normal(4, m, F), normal(3, F, E, scale=0.1), normal(0, m, E), normal(1, E)),
    }[name]


def close(got: Any, want: Any, m: int) -> None:
    if isinstance(got, Stream):
        got, want = (s._replace(squares_TR=s.squares_TR.sum(axis=0)[:m]) for s in (got, want))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-7 * np.abs(b).max())
