"""Packed rows of tokens: what every trainee is given, and which positions of them count.

Owns the meaning of segments and of learned tokens. Must not know where tokens come from (data.py) or who learns.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of packed texts on the device.

    Attributes:
      tokens_BT: int32.
      segments_BT: int32, the number of the text within its row, from 1; 0 is padding (at a row's end).
      positions_BT: int32, rotary positions: each text starts at 0.
      learn_BT: bool, tokens to be learned: the model's own output, or a text's every token but its first.
    """

    tokens_BT: jax.Array
    segments_BT: jax.Array
    positions_BT: jax.Array
    learn_BT: jax.Array

    def learned(self, start: int, count: int) -> jax.Array:
        """Whether token n + start belongs to the same text as token n and is to be learned, bool [B, count]."""
        of = jax.lax.slice_in_dim
        there, here = of(self.segments_BT, start, start + count, axis=1), of(self.segments_BT, 0, count, axis=1)
        return (there == here) & of(self.learn_BT, start, start + count, axis=1)

    def learned_ahead(self, start: int) -> jax.Array:
        """`learned` for every position of the rows, bool [B, T]; False where a row ends before token n + start."""
        return (ahead(self.segments_BT, start) == self.segments_BT) & ahead(self.learn_BT, start)


def ahead(values_BT: jax.Array, count: int) -> jax.Array:
    """Rows shifted left: n holds what n + count held; zeros (False) at the end. [B, T, ...]."""
    padding = [(0, 0), (0, count)] + [(0, 0)] * (values_BT.ndim - 2)
    return jnp.pad(values_BT[:, count:], padding)


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Packed rows on the host; the arrays of `Batch`, [R, T].

    Attributes:
      source: where in a ring the target's states of each token are; -1: nowhere. None where there is no ring.
    """

    tokens: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    learn: np.ndarray
    source: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens a row."""
        return self.tokens.shape[1]

    def take(self, index: np.ndarray) -> PackedRows:
        """Some of the rows, by an index array."""
        source = None if self.source is None else self.source[index]
        return PackedRows(self.tokens[index], self.segments[index], self.positions[index], self.learn[index], source)

    def batch(self, index: np.ndarray) -> Batch:
        """The rows of an index array [B]."""
        arrays = (self.tokens, self.segments, self.positions, self.learn)
        return Batch(*(jnp.asarray(array[index]) for array in arrays))
