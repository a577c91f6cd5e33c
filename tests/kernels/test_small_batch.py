"""Small-batch products: the Mosaic kernels, interpreted with race detection, against plain XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.small_batch import gpu, reference
from pallas_kernels.small_batch.reference import Stream

EPS = 1e-5
E, F, C = 256, 384, 128
COUNTS = (2, 1, 1)

interpreted = pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX has no interpreter for it")


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(jnp.bfloat16)


def stream(m: int) -> Stream:
    return reference.begin(normal(0, m, E), normal(1, E))


def arguments(name: str, m: int) -> tuple[Any, ...]:
    angle = jax.random.uniform(jax.random.key(2), (C // 2, -(-m // 8) * 8)) * 6
    return {
        "project": (stream(m), normal(3, E, 192, scale=0.1), EPS),
        "multiply": (normal(4, m, F), normal(3, F, 192, scale=0.1)),
        "heads": (stream(m), normal(3, E, 4 * C, scale=0.1), (jnp.cos(angle), jnp.sin(angle)), COUNTS, EPS),
        "swiglu": (stream(m), normal(3, E, 2 * F, scale=0.1), EPS),
        "add": (normal(4, m, F), normal(3, F, E, scale=0.1), normal(0, m, E), normal(1, E)),
    }[name]


def close(got: Any, want: Any, m: int) -> None:
    if isinstance(got, Stream):
        got, want = (s._replace(squares_TR=s.squares_TR[:, :m]) for s in (got, want))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-7 * np.abs(b).max())


@interpreted
@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("name", sorted(gpu.FUNCTIONS))
def test_kernels_agree_with_xla(name: str, m: int):
    args = arguments(name, m)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.FUNCTIONS[name](*args, interpret=params), getattr(reference, name)(*args), m)
