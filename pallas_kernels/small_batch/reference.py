"""The products of a decoder layer for few rows in plain XLA: the specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import packed
from pallas_kernels.small_batch.packed import Packed

#: Features whose squares are summed together: columns of a kernel's tile.
TILE = 64
#: Rows beyond which sums of squares are padded further (see `padded`).
FEW_ROWS = 32
#: Features of a tile that lie side by side while those apart by so many are added up.
_SIDE = 8


class Stream(NamedTuple):
    """The residual stream between two products, and what the next one's norm needs of it.

    Attributes:
      h_ME: the stream. scaled_ME: times the gain of the norm that reads it next, not yet divided by its root mean
        square. squares_TR: float32 sums of h squared over each tile of features; R is `padded` M, and the columns
        beyond M may hold anything.
    """

    h_ME: jax.Array
    scaled_ME: jax.Array
    squares_TR: jax.Array


class NormedPart(NamedTuple):
    """Rows that are normed.

    Attributes:
      rows: [M, E], or a table [V, E]. gain_E: of the norm, in their type. ids_M: int32, the table's rows; None: all.
    """

    rows: jax.Array
    gain_E: jax.Array
    ids_M: jax.Array | None = None


def padded(m: int) -> int:
    """Columns of a stream's squares: whole groups of 8, and beyond 32 rows of 128, a thread of a warpgroup for each."""
    return round_up(m, 8 if m <= FEW_ROWS else 128)


def begin(h_ME: jax.Array, gain_E: jax.Array, *, in_order: bool = False) -> Stream:
    """A stream of rows, to be normed with a gain next.

    Args:
      in_order: whether squares (of bfloat16 exact) are summed in one order: that of XLA's sums depends on how many rows
        there are.
    """
    m, e = h_ME.shape
    h32 = h_ME.astype(jnp.float32)
    tiles_MTF = h32.reshape(m, e // TILE, TILE)
    if in_order:
        eighths_MT8 = _tree([jnp.square(tiles_MTF[..., i : i + _SIDE]) for i in range(0, TILE, _SIDE)])
        if m > 1:
            # Else XLA has a thread of a GPU add up a whole tile, and find the row anew for each number: 14 to 18 us.
            eighths_MT8 = jax.lax.optimization_barrier(eighths_MT8)
        squares = _tree([eighths_MT8[..., i] for i in range(_SIDE)]).T
    else:
        squares = jnp.square(tiles_MTF).sum(axis=-1).T
    squares = jnp.pad(squares, ((0, 0), (0, padded(m) - m)))
    return Stream(h_ME, (h32 * gain_E.astype(jnp.float32)[None, :]).astype(h_ME.dtype), squares)


def _tree(terms: Sequence[jax.Array]) -> jax.Array:
    """The sum of a power of two of terms, by pairs."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def normed(stream: Stream, gain_E: jax.Array, eps: float) -> jax.Array:
    """The norm of a stream's rows, in their type: summed in one order, whatever their number."""
    m, e = stream.h_ME.shape
    total = stream.squares_TR[0, :m]
    for tile in range(1, stream.squares_TR.shape[0]):
        total = total + stream.squares_TR[tile, :m]
    scale = jax.lax.rsqrt(total / e + eps)
    return (stream.h_ME.astype(jnp.float32) * scale[:, None]).astype(stream.h_ME.dtype) * gain_E[None, :]


def norms(parts: Sequence[NormedPart], eps: float) -> jax.Array:
    """RMS norms [M, E each] of parts of one width and type, side by side."""

    def norm(part: NormedPart) -> jax.Array:
        x = part.rows if part.ids_M is None else jnp.take(part.rows, part.ids_M, axis=0, mode="clip")
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return (wide * scale).astype(x.dtype) * part.gain_E[None, :]

    return jnp.concatenate([norm(part) for part in parts], axis=-1)


def normed_product(stream: Stream, kernel: jax.Array | Packed, eps: float) -> jax.Array:
    """Float32 [M, N]: the norm's division comes after the product, which it commutes with."""
    m, e = stream.h_ME.shape
    mean = stream.squares_TR[:, :m].sum(axis=0) / e
    return _product(stream.scaled_ME, kernel) * jax.lax.rsqrt(mean + eps)[:, None]


def _product(x: jax.Array, kernel: jax.Array | Packed, *, flip: bool = True) -> jax.Array:
    if isinstance(kernel, Packed):
        return packed.product(x, kernel)
    contract = (((1,), (0 if flip else 1,)), ((), ()))
    return jax.lax.dot_general(x, kernel, contract, preferred_element_type=jnp.float32)


def multiply(x_MK: jax.Array, kernel: jax.Array | Packed) -> jax.Array:
    """The product alone, in x's type: of a part of the inputs, which is summed with others' before it is added."""
    return _product(x_MK, kernel).astype(x_MK.dtype)


def project(stream: Stream, kernel: jax.Array | Packed, eps: float) -> jax.Array:
    """The norm of a stream times a kernel, in its type."""
    return normed_product(stream, kernel, eps).astype(stream.h_ME.dtype)


def heads(
    stream: Stream | jax.Array, kernel: jax.Array | Packed, rope_2CR: jax.Array, counts: Sequence[int], eps: float, *,
    bias: jax.Array | None = None, gains: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Queries, keys and values [M, heads * C] of a normed stream, the first two rotated.

    Args:
      stream: or rows [M, K] that are multiplied as they are.
      rope_2CR: cosines and sines [2, C / 2, R] of each row's position, R as a stream's squares have it.
      counts: of query, key and value heads.
      bias: of the kernel's columns. gains: [C] of norms over each head of queries and of keys.
    """
    y = project(stream, kernel, eps) if isinstance(stream, Stream) else multiply(stream, kernel)
    if bias is not None:
        y = y + bias[None, :]
    m, half = y.shape[0], rope_2CR.shape[1]
    (q, k, _), split = counts, y.reshape(m, -1, 2 * half)
    if gains is not None:
        norm = lambda x, gain: (
            x.astype(jnp.float32) * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + eps)
        ).astype(x.dtype) * gain[None, None, :]  # fmt: skip
        split = jnp.concatenate(
            [norm(split[:, :q], gains[0]), norm(split[:, q : q + k], gains[1]), split[:, q + k :]], 1
        )  # fmt: skip
    lo, hi = jnp.split(split.astype(jnp.float32), 2, axis=-1)
    cos, sin = (table[:, :m].T[:, None] for table in rope_2CR)
    turned = jnp.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1).astype(y.dtype)
    out = jnp.concatenate([turned[:, : q + k], split[:, q + k :]], axis=1)
    return tuple(part.reshape(m, -1) for part in jnp.split(out, (q, q + k), axis=1))


def swiglu(stream: Stream, kernel: jax.Array | Packed, eps: float) -> jax.Array:
    """SwiGLU of a normed stream; the kernel is [E, gate and up]."""
    gate, up = jnp.split(project(stream, kernel, eps).astype(jnp.float32), 2, axis=-1)
    return (gate * jax.nn.sigmoid(gate) * up).astype(stream.h_ME.dtype)


def add(x_MK: jax.Array, kernel: jax.Array | Packed, h_ME: jax.Array, gain_E: jax.Array) -> Stream:
    """The stream after a product is added to it, with the gain of the norm that reads it next."""
    y = _product(x_MK, kernel).astype(h_ME.dtype)
    return begin((h_ME.astype(jnp.float32) + y.astype(jnp.float32)).astype(h_ME.dtype), gain_E)


def logits(x_MK: jax.Array, kernel: jax.Array | Packed, *, flip: bool = True) -> jax.Array:
    """Float32 sums [M, V]; with `flip` False the kernel is an embedding [V, K]."""
    return _product(x_MK, kernel, flip=flip)
