"""What a head learns from, kept on the device until the host takes it: the target's states of committed tokens.

Every position of a text comes once, when the target has computed it: in a prompt's chunk, or in the round that accepted
it. Owns the buffer's rows. Must not know files, nor who learns.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import distinct
from jaxspec.models.base import ModelConfig
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows

#: Of what a row is of: number of the text, position, token, length of the prompt, the temperature's bits.
ABOUT = 5


def ring_layers(cfg: ModelConfig, drafters: tuple[int, ...]) -> tuple[int, ...]:
    """The streams of a row: the drafter's layers, and last the states that the target's logits are made of."""
    last = cfg.num_layers + 1
    return drafters if last in drafters[-1:] else (*drafters, last)


def ring_width(cfg: ModelConfig, drafters: tuple[int, ...]) -> int:
    """Channels of a row."""
    return len(ring_layers(cfg, drafters)) * cfg.hidden_size


def ring_bytes(cfg: ModelConfig, drafters: tuple[int, ...]) -> int:
    """Of a row."""
    return 2 * ring_width(cfg, drafters) + 4 * ABOUT


def empty_ring(cfg: ModelConfig, geo: Geometry, drafters: tuple[int, ...]) -> Any:
    """The ring of an engine of these sizes, () where it has none."""
    return FeatureRing.empty(geo.ring, ring_width(cfg, drafters), geo.slots) if geo.ring else ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeatureRing:
    """Attributes:
    rows_RX: one row a position, in the order in which they came, uint32 [R, F / 2 + ABOUT]: the target's states in
      bfloat16, two to a word, then what the row is of. One array, so that a round writes, and the host copies, once.
    count: rows that came since the buffer was exchanged; those beyond R are lost.
    text_S: number of each slot's text, -1 where it is not gathered. texts: of the next one.
    """

    rows_RX: jax.Array
    count: jax.Array
    text_S: jax.Array
    texts: jax.Array

    @classmethod
    def empty(cls, rows: int, width: int, slots: int) -> FeatureRing:
        numbers = lambda *shape: jnp.zeros(shape, jnp.int32)  # each an array of its own: all are donated
        return cls(jnp.zeros((rows, width // 2 + ABOUT), jnp.uint32), numbers(), numbers(slots) - 1, numbers())

    def admit(self, slot_B: jax.Array) -> FeatureRing:
        """Texts begin in these slots (S: none), each with a number of its own.

        They are gathered while the buffer is at most half full; the rest is room for those under way. So where the
        host does not keep up, it is whole texts that are left out.
        """
        begins_B = slot_B < self.text_S.shape[0]
        number_B = self.texts - 1 + jnp.cumsum(begins_B, dtype=jnp.int32)
        number_B = jnp.where(self.count <= self.rows_RX.shape[0] // 2, number_B, -1)
        text_S = self.text_S.at[slot_B].set(number_B, mode="drop")
        return dataclasses.replace(self, text_S=text_S, texts=self.texts + begins_B.sum(dtype=jnp.int32))

    def round(
        self, rows: Rows, sampling_S: SamplingState, tokens_SL: jax.Array, features_BDF: jax.Array, count_B: jax.Array
    ) -> FeatureRing:
        """With the first count_B positions that a round committed, from the rows' length on."""
        b, d = features_BDF.shape[:2]
        step_1D, row_B1 = jnp.arange(d, dtype=jnp.int32)[None, :], jnp.arange(b, dtype=jnp.int32)[:, None]
        position_BD = rows.length_B[:, None] + step_1D
        flat = lambda x_BD: jnp.broadcast_to(x_BD, (b, d)).reshape(-1)
        return self._with(
            rows.slot_B, count_B, flat(row_B1), flat(step_1D), flat(position_BD),
            flat(rows.tokens_at(tokens_SL, position_BD)), sampling_S, features_BDF.reshape(b * d, -1),
        )  # fmt: skip

    def chunks(
        self, text: Ragged, sampling_S: SamplingState, tokens_1T: jax.Array, features_1TF: jax.Array
    ) -> FeatureRing:
        """With the positions of prompts' chunks."""
        offset_T = jnp.where(text.real_T, text.offset_T, text.width)  # padding lies behind every chunk
        return self._with(
            text.rows.slot_B, text.count_B, text.row_T, offset_T, text.index_T, tokens_1T[0], sampling_S,
            features_1TF[0],
        )  # fmt: skip

    def _with(
        self, slot_B: jax.Array, count_B: jax.Array, row_T: jax.Array, offset_T: jax.Array, position_T: jax.Array,
        token_T: jax.Array, sampling_S: SamplingState, features_TF: jax.Array,
    ) -> FeatureRing:  # fmt: skip
        """With the first count_B of each row's positions, of the texts that are gathered."""
        of = lambda x_S: jnp.take(x_S, slot_B, mode="clip")
        text_B = of(self.text_S)
        kept_B = jnp.where(text_B >= 0, count_B, 0)
        index_B = jnp.arange(len(kept_B), dtype=jnp.int32)
        before_B = jnp.sum(jnp.where(index_B[None] < index_B[:, None], kept_B[None], 0), axis=1, dtype=jnp.int32)
        place_T = self.count + before_B[row_T] + offset_T
        room = self.rows_RX.shape[0]
        place_T = distinct(jnp.where(offset_T < kept_B[row_T], place_T, room), room)
        heat_B = jax.lax.bitcast_convert_type(of(sampling_S.temperature_S), jnp.int32)
        about_TI = jnp.stack(
            [text_B[row_T], position_T, token_T, of(sampling_S.prompt_len_S)[row_T], heat_B[row_T]], axis=1
        )
        states_TF2 = features_TF.astype(jnp.bfloat16).reshape(len(row_T), -1, 2)
        bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)
        rows_TX = jnp.concatenate([bits(states_TF2), bits(about_TI)], axis=1)
        return dataclasses.replace(
            self,
            rows_RX=self.rows_RX.at[place_T].set(rows_TX, mode="drop", unique_indices=True),
            count=self.count + kept_B.sum(dtype=jnp.int32),
        )


def split_rows(rows_NX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the target's states, bfloat16 [N, F]; what they are of, int32 [N, ABOUT]) of rows on the host; views."""
    return rows_NX[:, :-ABOUT].view(jnp.bfloat16), rows_NX[:, -ABOUT:].view(np.int32)
