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
    latest_SADF: a request's latest proposals, which are not judged yet, by source (A): token, cell and chance in units.
    state_SY: root of these (-1: none), and of each source the request's chances and rights so far, in units, fading.
    """

    counts_X2: jax.Array
    latest_SADF: jax.Array
    state_SY: jax.Array

    @classmethod
    def empty(cls, geo: Geometry, cells: int, sources: int) -> TrackRecord:
        latest = jnp.tile(jnp.asarray([-1, NOTHING, 0], jnp.int32), (geo.slots, sources, max(1, geo.max_depth), 1))
        return cls(jnp.zeros((cells, 2), jnp.int32), latest, _nothing_said(geo.slots, sources))

    def admit(self, slot_B: jax.Array) -> TrackRecord:
        """Requests take these slots."""
        fresh = _nothing_said(len(slot_B), self.latest_SADF.shape[1])
        return dataclasses.replace(self, state_SY=self.state_SY.at[slot_B].set(fresh, mode="drop"))

    def judged(self, rows: Rows, tokens_SL: jax.Array) -> tuple[TrackRecord, jax.Array]:
        """What the rows' texts say of their latest proposals, and the rows' own sums by now, int32 [B, A, 2].

        The proposals stay as they are: those that follow (`proposed`) take their place.
        """
        of = lambda x: jnp.take(x, rows.slot_B, axis=0, mode="clip")
        latest_BADF, state_BY = of(self.latest_SADF), of(self.state_SY)
        said_BAD, cells_BAD, chance_BAD = (latest_BADF[..., i] for i in range(3))
        b, sources, depth = said_BAD.shape
        at_B, sums_BA2 = state_BY[:, 0], state_BY[:, 1:].reshape(b, sources, 2)
        index_BD = at_B[:, None] + 1 + jnp.arange(depth, dtype=jnp.int32)[None, :]
        there_BD = (index_BD <= rows.length_B[:, None]) & ((at_B >= 0) & rows.valid_B)[:, None]
        right_BAD = (said_BAD == rows.tokens_at(tokens_SL, index_BD)[:, None, :]) & there_BD[:, None, :]
        reached = [jnp.ones((b, sources), bool)]
        for step in range(depth - 1):
            reached.append(reached[-1] & right_BAD[..., step])
        known_BAD = there_BD[:, None, :] & jnp.stack(reached, axis=2) & (cells_BAD < NOTHING)
        rights_BAD = known_BAD & right_BAD
        # A comparison with every cell: a scatter takes several kernels, and a copy of the counts.
        mine_BADX = cells_BAD[..., None] == jnp.arange(self.counts_X2.shape[0], dtype=jnp.int32)[None, None, None]
        new = [
            (mine_BADX & labels[..., None]).sum(axis=(0, 1, 2), dtype=jnp.int32) for labels in (known_BAD, rights_BAD)
        ]
        counts = self.counts_X2 + jnp.stack(new, axis=1)
        counts = jnp.where(counts[:, :1] >= _FULL, counts >> 1, counts)
        units = jnp.stack([jnp.where(known_BAD, chance_BAD, 0), jnp.where(rights_BAD, _UNIT, 0)], axis=-1).sum(axis=2)
        faded = jnp.where(known_BAD.any(axis=2)[..., None], sums_BA2 - (sums_BA2 >> _FADE) + units, sums_BA2)
        return dataclasses.replace(self, counts_X2=counts), faded.astype(jnp.int32)

    def chance(self, cells: jax.Array, prior: jax.Array) -> jax.Array:
        """How often proposals of these cells come true; `prior` where nothing is known."""
        counts = jnp.take(self.counts_X2, cells, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
        rate = (counts[..., 1] + _PRIOR * prior) / (counts[..., 0] + _PRIOR)
        return jnp.clip(rate, 0.0, _SURE)

    def proposed(self, rows: Rows, sums_BA2: jax.Array, proposals: list[Proposal | None]) -> TrackRecord:
        """Keeps the proposals of each source, to be judged by the next call of `judged`, and the rows' sums."""
        _, _, depth, _ = self.latest_SADF.shape
        slot = jnp.where(rows.valid_B, rows.slot_B, self.state_SY.shape[0])
        nothing = jnp.zeros((len(rows.slot_B), 0), jnp.int32)
        none = Proposal(nothing, nothing, nothing.astype(jnp.float32))
        whole = [(none if one is None else one).padded(depth) for one in proposals]
        latest = [jnp.stack([p.tokens_BD, p.cells_BD, (p.chance_BD * _UNIT).astype(jnp.int32)], axis=2) for p in whole]
        state_BY = jnp.concatenate([rows.length_B[:, None], sums_BA2.reshape(len(slot), -1)], axis=1)
        put = lambda table, value: table.at[slot].set(value, mode="drop")
        return dataclasses.replace(
            self, latest_SADF=put(self.latest_SADF, jnp.stack(latest, axis=1)), state_SY=put(self.state_SY, state_BY)
        )


def departure(sums_BA2: jax.Array, source: int) -> jax.Array:
    """By how much a source is right more often in each row than its cells say, float32 [B]; 1 at first."""
    sums_B2 = sums_BA2[:, source].astype(jnp.float32) / _UNIT
    return (sums_B2[:, 1] + _CALM) / (sums_B2[:, 0] + _CALM)


def _nothing_said(count: int, sources: int) -> jax.Array:
    """state_SY of as many requests that begin."""
    return jnp.tile(jnp.asarray([-1] + [0] * (2 * sources), jnp.int32), (count, 1))
