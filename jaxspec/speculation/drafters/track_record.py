"""How often what was proposed came true: each proposal is compared with the text that was committed in its place.

The target's token at a position does not depend on what was drafted, so a proposal that was not chosen, or not
verified, is judged like the others as far as the text has come. Owns counts by cell (a kind of proposal: a length of
match, a confidence) over all requests, and of each request how far it departs from them. Integers throughout: all
devices of a mesh agree. Must not know where proposals come from.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.speculation.state import Geometry, Rows

#: Labels of a cell from which its evidence is halved; labels that its prior is worth.
_FULL, _PRIOR = 1024, 4.0
#: A label in a request's sums; labels that the prior of its departure is worth; 2^-_FADE is lost a round.
_UNIT, _CALM, _FADE = 256, 8.0, 4
#: A chance is never above it.
_SURE = 0.995
#: The kind of a proposal of which nothing is to be learnt.
NOTHING = 1 << 30


class Proposal(NamedTuple):
    """What a source of drafts would put at the next positions, and how probable it holds it.

    Attributes:
      tokens_BD: the vocabulary's size where there is none.
      cells_BD: kinds; NOTHING where nothing is to be learnt.
      chance_BD: that the text goes on with it if it did with those before, as the cell's record has it.
    """

    tokens_BD: jax.Array
    cells_BD: jax.Array
    chance_BD: jax.Array

    def padded(self, depth: int) -> Proposal:
        """With nothing proposed up to `depth`."""
        room = ((0, 0), (0, depth - self.tokens_BD.shape[1]))
        pad = lambda x, value: jnp.pad(x, room, constant_values=value)
        return Proposal(pad(self.tokens_BD, -1), pad(self.cells_BD, NOTHING), pad(self.chance_BD, 0.0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrackRecord:
    """Attributes:
    counts_X2: labels of each cell, and those that were right.
    at_S: root of the latest proposals, which are not judged yet; -1: none.
    tokens_SAD, cells_SAD, chance_SAD: these, by source (A); chances in units.
    sums_SA2: a request's chances and rights so far, in units, fading.
    """

    counts_X2: jax.Array
    at_S: jax.Array
    tokens_SAD: jax.Array
    cells_SAD: jax.Array
    chance_SAD: jax.Array
    sums_SA2: jax.Array

    @classmethod
    def empty(cls, geo: Geometry, cells: int, sources: int) -> TrackRecord:
        shape = (geo.slots, sources, max(1, geo.max_depth))
        return cls(
            jnp.zeros((cells, 2), jnp.int32), jnp.full((geo.slots,), -1, jnp.int32), jnp.full(shape, -1, jnp.int32),
            jnp.full(shape, NOTHING, jnp.int32), jnp.zeros(shape, jnp.int32),
            jnp.zeros((geo.slots, sources, 2), jnp.int32),
        )  # fmt: skip

    def admit(self, slot_B: jax.Array) -> TrackRecord:
        """Requests take these slots."""
        return dataclasses.replace(
            self, at_S=self.at_S.at[slot_B].set(-1, mode="drop"), sums_SA2=self.sums_SA2.at[slot_B].set(0, mode="drop")
        )

    def judged(self, rows: Rows, tokens_SL: jax.Array) -> TrackRecord:
        """What the rows' texts say of their latest proposals."""
        cells, depth = self.counts_X2.shape[0], self.tokens_SAD.shape[2]
        of = lambda x: jnp.take(x, rows.slot_B, axis=0, mode="clip")
        at_B, cells_BAD, chance_BAD, sums_BA2 = map(of, (self.at_S, self.cells_SAD, self.chance_SAD, self.sums_SA2))
        index_BD = at_B[:, None] + 1 + jnp.arange(depth, dtype=jnp.int32)[None, :]
        there_BD = (index_BD <= rows.length_B[:, None]) & ((at_B >= 0) & rows.valid_B)[:, None]
        right_BAD = of(self.tokens_SAD) == rows.tokens_at(tokens_SL, index_BD)[:, None, :]
        right_BAD = right_BAD & there_BD[:, None, :]
        reached_BAD = jnp.cumprod(jnp.pad(right_BAD[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True), axis=2)
        known_BAD = there_BD[:, None, :] & (reached_BAD > 0) & (cells_BAD < NOTHING)
        labels = jnp.stack([known_BAD, known_BAD & right_BAD], axis=-1).astype(jnp.int32)
        counts = self.counts_X2.at[jnp.where(known_BAD, cells_BAD, cells)].add(labels, mode="drop")
        counts = jnp.where(counts[:, :1] >= _FULL, counts >> 1, counts)
        units = jnp.stack([jnp.where(known_BAD, chance_BAD, 0), labels[..., 1] * _UNIT], axis=-1).sum(axis=2)
        faded = jnp.where(known_BAD.any(axis=2)[..., None], sums_BA2 - (sums_BA2 >> _FADE) + units, sums_BA2)
        slot = jnp.where(rows.valid_B, rows.slot_B, self.at_S.shape[0])
        return dataclasses.replace(
            self, counts_X2=counts, at_S=self.at_S.at[slot].set(-1, mode="drop"),
            sums_SA2=self.sums_SA2.at[slot].set(faded.astype(jnp.int32), mode="drop"),
        )  # fmt: skip

    def chance(self, cells: jax.Array, prior: jax.Array) -> jax.Array:
        """How often proposals of these cells come true; `prior` where nothing is known."""
        counts = jnp.take(self.counts_X2, cells, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
        rate = (counts[..., 1] + _PRIOR * prior) / (counts[..., 0] + _PRIOR)
        return jnp.clip(rate, 0.0, _SURE)

    def departure(self, rows: Rows, source: int) -> jax.Array:
        """By how much a source is right more often in each row than its cells say, float32 [B]; 1 at first."""
        sums_B2 = jnp.take(self.sums_SA2[:, source], rows.slot_B, axis=0, mode="clip").astype(jnp.float32) / _UNIT
        return (sums_B2[:, 1] + _CALM) / (sums_B2[:, 0] + _CALM)

    def proposed(self, rows: Rows, proposals: list[Proposal | None]) -> TrackRecord:
        """Keeps the proposals of each source, to be judged by the next call of `judged`."""
        depth = self.tokens_SAD.shape[2]
        slot = jnp.where(rows.valid_B, rows.slot_B, self.at_S.shape[0])
        nothing = jnp.zeros((len(rows.slot_B), 0), jnp.int32)
        none = Proposal(nothing, nothing, nothing.astype(jnp.float32))
        whole = [(none if one is None else one).padded(depth) for one in proposals]
        tokens, kinds, chance = (jnp.stack(parts, axis=1) for parts in zip(*whole, strict=True))
        put = lambda table, value: table.at[slot].set(value.astype(jnp.int32), mode="drop")
        return dataclasses.replace(
            self, at_S=put(self.at_S, rows.length_B), tokens_SAD=put(self.tokens_SAD, tokens),
            cells_SAD=put(self.cells_SAD, kinds), chance_SAD=put(self.chance_SAD, chance * _UNIT),
        )  # fmt: skip
