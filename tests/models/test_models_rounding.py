"""Weights rounded to few bits: the same by NumPy, which writes checkpoints, and by JAX, which loads drafters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import rounding
from jaxspec.models.quantised import product

#: Half a step of the largest weight, in its share: what rounding may change a weight by.
STEP = {"int8": 0.5 / 127, "fp8": 0.5 / 8, "int4-g128": 0.5 / 7.5}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", rounding.FORMATS)
def test_numpy_and_jax_round_alike(name: str, dtype: Any):
    """But for the last bit of a scale, by which a value halfway between two may go either way."""
    w_FE = jax.random.normal(jax.random.key(0), (64, 256)).astype(dtype).at[3].set(0.0)
    by = rounding.FORMATS[name][0]
    (values, scale), (other, theirs) = by(w_FE), by(np.asarray(w_FE))
    assert isinstance(scale, jax.Array) and isinstance(theirs, np.ndarray)
    assert values.dtype == other.dtype and scale.dtype == theirs.dtype == dtype
    ulp = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(scale, np.float32), theirs.astype(np.float32), rtol=ulp)
    assert np.mean(np.asarray(values, np.float32) != other.astype(np.float32)) < 0.01


@pytest.mark.parametrize("name", rounding.FORMATS)
def test_rounded_kernels_multiply_as_the_weights_that_they_stand_for(name: str):
    kernel_EF = jax.random.normal(jax.random.key(1), (256, 64)) * 0.02
    few = rounding.rounded(kernel_EF, name)
    _, kind, group = rounding.FORMATS[name]
    assert few.shape == (256, 64) and few.values.dtype == kind and few.groups == (1 if group is None else 256 // group)
    assert few.nbytes < kernel_EF.nbytes / (7 if kind == jnp.int4 else 3.7)
    expanded = np.asarray(few.dequantised())
    largest = np.abs(np.asarray(kernel_EF)).reshape(few.groups, -1, 64).max(axis=1, keepdims=True)
    off = np.abs(expanded - np.asarray(kernel_EF)).reshape(few.groups, -1, 64) / largest
    # The largest weights of a group of 4 bits may be cut off, by 28% at most; others are off by less than a step.
    assert off.max() <= (0.28 + STEP[name] if group else STEP[name]) * 1.01 and np.median(off) <= STEP[name] / 1.5
    x = jax.random.normal(jax.random.key(2), (3, 256))
    np.testing.assert_allclose(product(x, few), x @ expanded, atol=1e-5)
