"""Weights rounded to few bits: what `python -m jaxspec.quantize` writes, and what drafters are rounded to when loaded.

No text is needed: a scale is what its own weights ask for. Must not know modules, nor formats of checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.quantised import Quantised

#: How far groups of 4 bits may cut their largest weights off, of which the least squared error is taken.
_CUTS = np.linspace(1.0, 0.72, 15, dtype=np.float32)
#: Inputs that share a scale in 4 bits.
GROUP = 128
#: Outputs that JAX rounds at once.
_TOGETHER = 1024

#: An array of NumPy's or of JAX's.
Array = Any


def int8(w_FE: Array) -> tuple[Array, Array]:
    """Values [out, in] int8 and scales [out, 1] of the weights' type, the largest of each output being 127."""
    xp, w = _float32(w_FE)
    scale = _scale(xp, xp.max(xp.abs(w), axis=1, keepdims=True) / 127, w_FE.dtype)
    return xp.clip(xp.rint(w / scale.astype(np.float32)), -128, 127).astype(np.int8), scale


def fp8(w_FE: Array) -> tuple[Array, Array]:
    """The same in float8_e4m3fn, the largest being 448."""
    xp, w = _float32(w_FE)
    scale = _scale(xp, xp.max(xp.abs(w), axis=1, keepdims=True) / 448, w_FE.dtype)
    return xp.clip(w / scale.astype(np.float32), -448, 448).astype(jnp.float8_e4m3fn), scale


def int4(w_FE: Array, group: int = GROUP) -> tuple[Array, Array]:
    """Values -8 to 7 [out, in] int8 and scales [out, in / group], of the least squared error of a few cuts."""
    xp, w = _float32(w_FE)
    w_FGg = w.reshape(w.shape[0], -1, group)
    largest_FG = xp.max(xp.abs(w_FGg), axis=2)
    best = _scale(xp, largest_FG / 7.5, w_FE.dtype)
    least = xp.full(largest_FG.shape, np.inf, np.float32)
    for cut in _CUTS:
        scale = _scale(xp, cut * largest_FG / 7.5, w_FE.dtype)
        error = xp.sum(xp.square(_rounded(xp, w_FGg, scale) * scale.astype(np.float32)[..., None] - w_FGg), axis=2)
        best, least = xp.where(error < least, scale, best), xp.minimum(error, least)
    return _rounded(xp, w_FGg, best).reshape(w.shape).astype(np.int8), best


def _float32(w_FE: Array) -> tuple[Any, Array]:
    """The namespace of an array, and the array in float32."""
    return jnp if isinstance(w_FE, jax.Array) else np, w_FE.astype(np.float32)


def _scale(xp: Any, scale: Array, kind: Any) -> Array:
    """As it will be stored, and never 0."""
    return xp.maximum(scale, np.float32(1e-8)).astype(kind)


def _rounded(xp: Any, w_FGg: Array, scale_FG: Array) -> Array:
    return xp.clip(xp.rint(w_FGg / scale_FG.astype(np.float32)[..., None]), -8, 7)


#: By name: how weights [out, in] are rounded, the type of the values, and inputs that share a scale; None: all.
FORMATS: dict[str, tuple[Callable[[Array], tuple[Array, Array]], Any, int | None]] = {
    "int8": (int8, jnp.int8, None), "fp8": (fp8, jnp.float8_e4m3fn, None), "int4-g128": (int4, jnp.int4, GROUP),
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=1)
def rounded(kernel_EF: jax.Array, name: str) -> Quantised:
    """A kernel [in, out] in a format of FORMATS.

    Some outputs after the others: all at once would take up to 40 times the kernel's memory.
    """
    by, kind, _ = FORMATS[name]
    d_in, d_out = kernel_EF.shape
    size = min(_TOGETHER, d_out)
    w_KFE = jnp.pad(kernel_EF.T, ((0, -d_out % size), (0, 0))).reshape(-1, size, d_in)
    values, scale = (x.reshape(-1, x.shape[-1])[:d_out] for x in jax.lax.map(by, w_KFE))
    return Quantised(values.T.astype(kind), scale.T)
