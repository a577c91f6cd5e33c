"""Counter-based noise: what a draw is depends on (request seed, absolute position, purpose, token) and nothing else.

The key of a draw is (seed, position), its counter (pair, purpose). One draw has two words
and serves two tokens: of 256 consecutive tokens, the first 128 take the first words and
the last 128 the second words of 128 draws, so that kernels fill two neighbouring
128-wide tiles from one draw. Batch, slot, tile and vocabulary shard play no part.

The functions of bits are plain jax.numpy, so that kernels use them word for word.
"""

from __future__ import annotations

import math
from enum import IntEnum

import jax
import jax.numpy as jnp

TILE = 128
PAIR = 2 * TILE  # tokens that one row of draws serves

#: Bounds of the Gumbel noise below: no token whose score lies further than their difference under the best can win.
GUMBEL_MAX = 16.64
GUMBEL_MIN = -2.82
#: See `gumbel_bound`.
GUMBEL_BOUND = 127 * math.log(2.0)


class Purpose(IntEnum):
    """What a draw is for; each purpose has its own stream at every position."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


def threefry2x32(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), uint32 arrays of one shape.

    Written out instead of jax.random's, whose key handling compiles to a loop a draw on CPUs.
    """
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in rotations[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(r)) | (x1 >> jnp.uint32(32 - r))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def to_uniform(bits: jax.Array) -> jax.Array:
    """uint32 to float32 in (0, 1), never 0 or 1: 23 mantissa bits and half a step."""
    mantissa = jax.lax.bitcast_convert_type((bits >> jnp.uint32(9)) | jnp.uint32(0x3F800000), jnp.float32)
    return (mantissa - 1.0) + jnp.float32(2.0**-24)


def to_gumbel(bits: jax.Array) -> jax.Array:
    """uint32 to Gumbel noise in [GUMBEL_MIN, GUMBEL_MAX], float32."""
    return -jnp.log(-jnp.log(to_uniform(bits)))


def gumbel_bound(bits: jax.Array) -> jax.Array:
    """At least the Gumbel noise of these bits, less GUMBEL_BOUND, from one conversion instead of two logarithms.

    The noise is -log E with E = -log u >= w = 1 - u, and the bits of a float count at most its logarithm:
    those of w < 2**(e + 1) lie under a line through powers of two.
    """
    one = (bits >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
    w = (2.0 - 2.0**-23) - jax.lax.bitcast_convert_type(one, jnp.float32)  # 1 - u, or less
    return jax.lax.bitcast_convert_type(w, jnp.int32).astype(jnp.float32) * (-(2.0**-23) * math.log(2.0))


def uniform_noise(
    seed_B: jax.Array, position_BN: jax.Array, purpose: Purpose, counter_BN: jax.Array | None = None
) -> jax.Array:
    """One scalar in (0, 1) for each absolute position (and counter, 0 by default), [B, N] float32."""
    shape = position_BN.shape
    counter = jnp.zeros(shape, jnp.uint32) if counter_BN is None else counter_BN.astype(jnp.uint32)
    seed = jnp.broadcast_to(seed_B.astype(jnp.uint32)[:, None], shape)
    bits, _ = threefry2x32(seed, position_BN.astype(jnp.uint32), counter, jnp.full(shape, int(purpose), jnp.uint32))
    return to_uniform(bits)


def gumbel_noise_at(seed_B: jax.Array, position_B: jax.Array, token_V: jax.Array, purpose: Purpose) -> jax.Array:
    """Gumbel noise of some tokens at one absolute position a request, [B, V] float32: entries of `gumbel_noise`."""
    shape = (*position_B.shape, *token_V.shape)
    pair_V = (token_V // PAIR) * TILE + token_V % TILE
    words = threefry2x32(
        jnp.broadcast_to(seed_B.astype(jnp.uint32)[:, None], shape),
        jnp.broadcast_to(position_B.astype(jnp.uint32)[:, None], shape),
        jnp.broadcast_to(pair_V.astype(jnp.uint32)[None, :], shape),
        jnp.full(shape, int(purpose), jnp.uint32),
    )
    return to_gumbel(jnp.where(((token_V // TILE) % 2 == 0)[None, :], *words))


def gumbel_noise(
    seed_B: jax.Array, position_BN: jax.Array, vocab_size: int, purpose: Purpose, first: int | jax.Array = 0
) -> jax.Array:
    """Gumbel noise for the token at each absolute position, [B, N, V] float32.

    Args:
      seed_B: uint32 request seeds.
      position_BN: absolute positions of the tokens to draw.
      vocab_size: V, of this shard of the vocabulary.
      first: the shard's first token; may be traced.
    """
    b, n = position_BN.shape
    static = isinstance(first, int)
    start = first // PAIR
    skip = first - start * PAIR
    rows = -(-(skip + vocab_size) // PAIR) if static else -(-(PAIR - 1 + vocab_size) // PAIR)
    # A vocabulary within one tile needs no second words, and no more draws than tokens.
    lanes = skip + vocab_size if static and skip + vocab_size <= TILE else TILE
    shape = (b, n, rows, lanes)
    spread = lambda x: jnp.broadcast_to(x.astype(jnp.uint32), shape)
    pair = (jnp.asarray(start, jnp.uint32) + jnp.arange(rows, dtype=jnp.uint32)) * jnp.uint32(TILE)
    words = threefry2x32(
        spread(seed_B[:, None, None, None]),
        spread(position_BN[:, :, None, None]),
        spread((pair[:, None] + jnp.arange(lanes, dtype=jnp.uint32)[None, :])[None, None]),
        jnp.full(shape, int(purpose), jnp.uint32),
    )
    if lanes < TILE or (static and skip + vocab_size <= TILE):
        bits = words[0].reshape(b, n, lanes)
    else:
        # The barrier keeps XLA from fusing the draw into both of its uses, which would compute it twice.
        bits = jnp.stack(jax.lax.optimization_barrier(words), axis=3).reshape(b, n, rows * PAIR)
    if static:
        bits = bits[:, :, skip : skip + vocab_size]
    else:
        bits = jax.lax.dynamic_slice_in_dim(bits, skip, vocab_size, axis=2)
    return to_gumbel(bits)
