"""Texts that the drafter remembers: a ring of tokens and a hash table of their 4- and 2-grams, both on the device.

Owns where a gram lies and how far back a match goes. Shapes are fixed and nothing waits for the host; what an entry
says is compared with the ring itself, so stale and colliding ones cost a place and never a wrong match. Must not know
requests. (Source of the layout: vLLM's suffix speculator.)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

#: Lengths of the grams, the longer one first.
_GRAMS = (4, 2)
#: Places of a bucket: the newest occurrence in each of as many texts.
_WAYS = 8
#: No token, in the ring: between texts and where none was written.
_END = -1
#: Places of a look-up.
PLACES = len(_GRAMS) * _WAYS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Corpus:
    """Attributes:
    ring_R: tokens, each text followed by an end; none lies across the ring's end.
    table_GKW: index in the ring of a gram's last token, by length of gram, bucket and text; -1: none.
    head: where the next text goes. texts: how many there were.
    """

    ring_R: jax.Array
    table_GKW: jax.Array
    head: jax.Array
    texts: jax.Array

    @classmethod
    def empty(cls, tokens: int) -> Corpus:
        """Room for `tokens` tokens, ends included: 20 to 36 bytes each."""
        buckets = 1 << max(0, (tokens - 1).bit_length() - 2)
        zero = lambda: jnp.zeros((), jnp.int32)
        ring = jnp.full((tokens,), _END, jnp.int32)
        return cls(ring, jnp.full((len(_GRAMS), buckets, _WAYS), -1, jnp.int32), zero(), zero())

    def emptied(self) -> Corpus:
        """As it was at the start, on the same devices; nothing is compiled."""

        def fill(x: jax.Array, value: int) -> jax.Array:
            # Where processes share them, each puts its own.
            whole = np.full(x.shape, value, x.dtype)
            return jax.make_array_from_callback(x.shape, x.sharding, lambda index: whole[index])

        return Corpus(fill(self.ring_R, _END), fill(self.table_GKW, -1), fill(self.head, 0), fill(self.texts, 0))

    @property
    def _buckets(self) -> int:
        return self.table_GKW.shape[1]

    def remember(self, tokens_L: jax.Array, count: jax.Array) -> Corpus:
        """With a text of `count` tokens more, in place of the oldest; as it was where there is none."""
        size, (length,) = self.ring_R.shape[0], tokens_L.shape
        head = jnp.where(self.head + count + 1 > size, 0, self.head)
        index_L = jnp.arange(length, dtype=jnp.int32)
        real_L = index_L < count
        # One more: the end.
        wide = jnp.arange(length + 1, dtype=jnp.int32)
        text = jnp.where(wide < count, jnp.pad(tokens_L, (0, 1)), _END)
        place = jnp.where((wide <= count) & (count > 0), head + wide, size)
        table = self.table_GKW
        for row, gram in enumerate(_GRAMS):
            shifted = [jnp.roll(tokens_L, back) for back in range(gram)]
            bucket_L = self._bucket(jnp.stack(shifted, axis=-1))
            bucket_L = jnp.where(real_L & (index_L >= gram - 1), bucket_L, self._buckets)
            way = self.texts % _WAYS
            # The newest occurrence in this text, whatever an older text left there.
            table = table.at[row, bucket_L, way].set(-1, mode="drop")
            table = table.at[row, bucket_L, way].max(head + index_L, mode="drop")
        return Corpus(
            self.ring_R.at[place].set(text, mode="drop"), table,
            jnp.where(count > 0, head + count + 1, self.head), self.texts + (count > 0).astype(jnp.int32),
        )  # fmt: skip

    def look_up(self, tail_BK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(length, index in the ring) of the matches of texts' ends, int32 [B, PLACES]; length 0: there is none.

        Args:
          tail_BK: the last K tokens, the last first; below -1 where a text has none.
        """
        found = [self.table_GKW[row, self._bucket(tail_BK[:, :gram])] for row, gram in enumerate(_GRAMS)]
        # What the longer gram found need not vote twice.
        twice_BW = jnp.any(found[1][:, :, None] == found[0][:, None, :], axis=2)
        at_BC = jnp.concatenate([found[0], jnp.where(twice_BW, -1, found[1])], axis=1)
        back_K = jnp.arange(tail_BK.shape[1], dtype=jnp.int32)
        index_BCK = at_BC[:, :, None] - back_K[None, None, :]
        token_BCK = jnp.where(index_BCK < 0, _END, jnp.take(self.ring_R, index_BCK, mode="clip"))
        same_BCK = token_BCK == tail_BK[:, None, :]
        return jnp.cumprod(same_BCK.astype(jnp.int32), axis=2).sum(axis=2, dtype=jnp.int32), at_BC

    def continuations(self, at_BC: jax.Array, depth: int, none: int) -> jax.Array:
        """The tokens after each index, [B, C, depth]; `none` from a text's end on."""
        index_BCD = at_BC[:, :, None] + 1 + jnp.arange(depth, dtype=jnp.int32)[None, None, :]
        token_BCD = jnp.take(self.ring_R, index_BCD, mode="fill", fill_value=_END)
        inside_BCD = jnp.cumprod((token_BCD != _END).astype(jnp.int32), axis=2) > 0
        return jnp.where(inside_BCD, token_BCD, none)

    def _bucket(self, gram_XG: jax.Array) -> jax.Array:
        """Of grams whose tokens, last first, are the last axis."""
        mixed = jnp.zeros(gram_XG.shape[:-1], jnp.uint32)
        for back in range(gram_XG.shape[-1]):
            mixed = (mixed + gram_XG[..., back].astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
            mixed = mixed ^ (mixed >> 15)
        return (mixed & jnp.uint32(self._buckets - 1)).astype(jnp.int32)
