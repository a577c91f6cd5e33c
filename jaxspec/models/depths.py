"""How many inputs of a product XLA's CPU backend adds up in one order, whatever the number of rows.

Of more it adds up few rows in other parts than many, as its tiles for the processor have it: with AVX2 and 32 KB of
first-level cache few rows of more than 512 inputs in parts of 512, and 63 rows and more otherwise; with AVX-512 nothing
was seen of it (docs/notes.md). A round and plain decoding have different numbers of rows, and must have the same bits.
So deeper products are summed part by part there.

Owns the question, and the cuts. Must not know who multiplies.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

#: Inputs that are tried, the most first; depth and rows with which the backend is asked.
_PARTS, _DEPTH, _ROWS, _MANY = (512, 256, 128), 2048, (2, 40), 80
_BLOCK = 64


def multiply(rows: jax.Array, kernel: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Rows [M, in] by a kernel [in, out], [M, out], or by column blocks [K, in, width], [K, M, width].

    Args:
      dtype: of the result, where sums shall not be rounded to the rows'.
    """
    inputs = kernel.shape[-2]
    most = at_once() if rows.dtype == jnp.float32 else None
    if most is None or inputs <= most:
        if kernel.ndim == 2:
            return jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
        spread = jnp.broadcast_to(rows[None], (kernel.shape[0], *rows.shape))
        return jax.lax.dot_general(spread, kernel, (((2,), (1,)), ((0,), (0,))), preferred_element_type=dtype)
    whole = kernel if kernel.ndim == 3 else kernel[None]
    blocks, least = whole.shape[0], -(-inputs // most)
    # Equal parts lie in a kernel as they are; others are copied out of it.
    count = next((n for n in range(least, 2 * least + 1) if inputs % n == 0), None)
    parts = [slice(None)] if count else [slice(i, i + most) for i in range(0, inputs, most)]
    found = []
    for part in parts:
        x = rows[:, part].reshape(len(rows), count or 1, -1).transpose(1, 0, 2)
        own = whole[:, part].reshape(blocks, len(x), -1, whole.shape[2])
        x = jnp.broadcast_to(x[None], (blocks, *x.shape))
        y_KPMW = jax.lax.dot_general(x, own, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=dtype)
        found += [y_KPMW[:, i] for i in range(y_KPMW.shape[1])]
    y_KMW = functools.reduce(jnp.add, found)
    return y_KMW if kernel.ndim == 3 else y_KMW[0]


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
