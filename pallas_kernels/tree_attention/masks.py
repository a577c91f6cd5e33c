"""The tree's visibility as words of bits, and the query positions that it implies.

A mask over the prefix would cost lengths x nodes; these words cost nodes x nodes / 32 and
say everything, because every query sees the whole prefix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pack_words(mask_BNT: jax.Array) -> jax.Array:
    """Bit t % 32 of word t // 32 says whether query n sees tree entry t: uint32 [B, N, ceil(T / 32)]."""
    b, n, t = mask_BNT.shape
    words = -(-t // 32)
    bits = jnp.pad(mask_BNT, ((0, 0), (0, 0), (0, 32 * words - t))).reshape(b, n, words, 32).astype(jnp.uint32)
    return (bits << jnp.arange(32, dtype=jnp.uint32)[None, None, None, :]).sum(axis=-1, dtype=jnp.uint32)


def offsets(mask_BNT: jax.Array) -> jax.Array:
    """Query positions relative to the prefix's end where each row marks a whole path: int32 [B, N]."""
    return mask_BNT.sum(axis=-1, dtype=jnp.int32) - 1
