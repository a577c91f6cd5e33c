"""Chunks of several texts, side by side: layers see the tokens as one row without gaps, attention a rectangle of rows.

So products cost what the tokens cost, however unequal the chunks are. Owns the two orders and the way between them.
Must not know prompts or caches.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.models.base import FULL_ATTENTION, Answering, Attend, AttentionOptions
from jaxspec.speculation.state import Rows


@dataclasses.dataclass(frozen=True)
class Ragged:
    """T tokens of B rows.

    Attributes:
      rows: whose text it is.
      count_B: tokens of each row; rows without any come last. start_B: where they begin among the T.
      index_BN: positions in the rectangle, N of a row. real_BN: which of them are tokens of the chunks.
      row_T, offset_T: the row of each token, and its place in the row's chunk.
      index_T: its position. real_T: whether it is no padding.
    """

    rows: Rows
    count_B: jax.Array
    start_B: jax.Array
    index_BN: jax.Array
    real_BN: jax.Array
    row_T: jax.Array
    offset_T: jax.Array
    index_T: jax.Array
    real_T: jax.Array

    @classmethod
    def of(cls, rows: Rows, count_B: jax.Array, size: int, width: int) -> Ragged:
        """Chunks of count_B tokens from position length on, at most `width` each and `size` together."""
        step_N, at_T = jnp.arange(width, dtype=jnp.int32)[None, :], jnp.arange(size, dtype=jnp.int32)
        end_B = jnp.cumsum(count_B, dtype=jnp.int32)
        start_B, last = end_B - count_B, count_B.shape[0] - 1
        row_T = jnp.minimum((at_T[:, None] >= end_B[None, :]).sum(axis=1, dtype=jnp.int32), last)
        offset_T = jnp.minimum(at_T - start_B[row_T], width - 1)
        return cls(
            rows, count_B, start_B, rows.length_B[:, None] + step_N, step_N < count_B[:, None], row_T, offset_T,
            rows.length_B[row_T] + offset_T, at_T < end_B[-1],
        )  # fmt: skip

    @property
    def width(self) -> int:
        """N, most tokens of a row."""
        return self.index_BN.shape[1]

    @property
    def _alone(self) -> bool:
        """One row as wide as all: both orders are the same."""
        return self.count_B.shape[0] == 1 and self.width == self.row_T.shape[0]

    def tokens(self, tokens_SL: jax.Array) -> jax.Array:
        """The tokens themselves, [1, T] (padding is any token)."""
        return tokens_SL.at[self.rows.slot_B[self.row_T], self.index_T].get(mode="clip")[None]

    def flat(self, x_BN: jax.Array) -> jax.Array:
        """[B, N, ...] as [1, T, ...]."""
        if self._alone:
            return x_BN
        merged = x_BN.reshape(-1, *x_BN.shape[2:])
        return jnp.take(merged, self.row_T * self.width + self.offset_T, axis=0, mode="clip")[None]

    def rectangle(self, x_1T: jax.Array) -> jax.Array:
        """[1, T, ...] as [B, N, ...]; behind a row's tokens others' may stand."""
        if self._alone:
            return x_1T
        at_BN = self.start_B[:, None] + jnp.arange(self.width)[None, :]
        return jnp.take(x_1T[0], at_BN, axis=0, mode="clip")

    def last(self, x_1T: jax.Array) -> jax.Array:
        """Of each row's last token, [B, ...]."""
        return jnp.take(x_1T[0], self.start_B + self.count_B - 1, axis=0, mode="clip")

    def attend(self, attend: Attend, ends: int | None = None) -> Attend:
        """`attend`, which reads rectangles and answers all queries or none, for layers that see [1, T].

        Args:
          ends: the last layer, if it shall answer each row's last token alone, [1, B].
        """
        if self._alone and ends is None:
            return attend

        def spread(
            layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions = FULL_ATTENTION
        ) -> jax.Array:
            out = attend(layer, self.rectangle(q), self.rectangle(k), self.rectangle(v), options)
            if layer == ends:
                at_B1 = jnp.maximum(self.count_B - 1, 0)[:, None, None, None]
                return jnp.take_along_axis(out, at_B1, axis=1)[:, 0][None]
            return self.flat(out) if out.size else out.reshape(1, 0, *out.shape[2:])

        if ends is not None:
            return Answering(spread, ends, lambda x_1T: self.last(x_1T)[None])
        return Answering(spread, attend.layer, attend.pick) if isinstance(attend, Answering) else spread
