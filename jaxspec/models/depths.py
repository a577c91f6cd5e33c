"""How many inputs of a product XLA's CPU backend adds up in one order, whatever the number of rows.

Of more it adds up parts where rows are many, and all at once where they are few, as its tiles for the processor have
it: with AVX2 and 32 KB of first-level cache of more than 512 inputs from 63 rows on, with AVX-512 of none that was
tried (docs/notes.md). A round and plain decoding have different numbers of rows, and must have the same bits. So deeper
products are summed part by part there.

Owns the question, and the cuts. Must not know who multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

#: Inputs that are tried, the most first; depth and rows with which the backend is asked.
_PARTS, _DEPTH, _ROWS, _MANY = (512, 256, 128), 2048, (2, 40), 80
_BLOCK = 64


def in_parts(rows: jax.Array, kernel: jax.Array, multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """A product of rows [M, in] by a kernel [.., in, out], in float32 of so many inputs at a time."""
    inputs = kernel.shape[-2]
    most = at_once() if rows.dtype == jnp.float32 else None
    most = inputs if most is None else most
    parts = [multiply(rows[:, i : i + most], kernel[..., i : i + most, :]) for i in range(0, inputs, most)]
    return functools.reduce(jnp.add, parts)


@functools.cache
def at_once() -> int | None:
    """The most inputs of a part; None: all that there are, also where the backend is no CPU."""
    if jax.default_backend() != "cpu" or _same_bits(_DEPTH):
        return None
    return next((depth for depth in _PARTS if _same_bits(depth)), _PARTS[-1])


def _same_bits(depth: int) -> bool:
    """Whether the first rows of many have the bits that they have by themselves."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, _MANY, depth), np.float32)
    kernel = rng.standard_normal((1, depth, _BLOCK), np.float32)

    def run(rows: int) -> np.ndarray:
        # Compiled ahead: a trace may be under way.
        given = x[:, :rows], kernel
        dot = lambda x, w: jax.lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))
        shapes = (jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in given)
        return np.asarray(jax.jit(dot).lower(*shapes).compile()(*given))

    many = run(_MANY)
    return all(np.array_equal(run(rows), many[:, :rows]) for rows in _ROWS)
