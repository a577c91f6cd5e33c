"""What a head learns from, kept on the device until the host takes it: the target's states of committed tokens.

Every position of a text comes once, when the target has computed it: in a prompt's chunk, or in the round that accepted
it. Owns the buffer's rows. Must not know files, nor who learns.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.base import ModelConfig
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows

#: Columns of `FeatureRing.about_RI`: number of the text, position, token, length of the prompt, the temperature's bits.
ABOUT = 5


def ring_layers(cfg: ModelConfig, drafters: tuple[int, ...]) -> tuple[int, ...]:
    """The streams of a row: the drafter's layers, and last the states that the target's logits are made of."""
    last = cfg.num_layers + 1
    return drafters if last in drafters[-1:] else (*drafters, last)


def ring_width(cfg: ModelConfig, drafters: tuple[int, ...]) -> int:
    """Channels of a row."""
    return len(ring_layers(cfg, drafters)) * cfg.hidden_size


def empty_ring(cfg: ModelConfig, geo: Geometry, drafters: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """The ring of an engine of these sizes, () where it has none."""
    return FeatureRing.empty(geo.ring, ring_width(cfg, drafters), geo.slots, dtype) if geo.ring else ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeatureRing:
    """Attributes:
    features_RF: the target's states, one row a position, in the order in which they came.
    about_RI: int32 [R, ABOUT], what each row is of.
    count: rows that came since the buffer was exchanged; those beyond R are lost.
    text_S: number of each slot's text. texts: of the next one.
    """

    features_RF: jax.Array
    about_RI: jax.Array
    count: jax.Array
    text_S: jax.Array
    texts: jax.Array

    @classmethod
    def empty(cls, rows: int, width: int, slots: int, dtype: jnp.dtype) -> FeatureRing:
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)  # each an array of its own: all are donated
        return cls(jnp.zeros((rows, width), dtype), zeros(rows, ABOUT), zeros(), zeros(slots), zeros())

    def admit(self, slot_B: jax.Array) -> FeatureRing:
        """Texts begin in these slots (S: none), each with a number of its own."""
        count = slot_B.shape[0]
        text_S = self.text_S.at[slot_B].set(self.texts + jnp.arange(count, dtype=jnp.int32), mode="drop")
        return dataclasses.replace(self, text_S=text_S, texts=self.texts + count)

    def round(
        self, rows: Rows, sampling_S: SamplingState, tokens_SL: jax.Array, features_BDF: jax.Array, count_B: jax.Array
    ) -> FeatureRing:
        """With the first count_B positions that a round committed, from the rows' length on."""
        b, d = features_BDF.shape[:2]
        step_1D = jnp.arange(d, dtype=jnp.int32)[None, :]
        position_BD = rows.length_B[:, None] + step_1D
        flat = lambda x_BD: jnp.broadcast_to(x_BD, (b, d)).reshape(-1)
        return self._with(
            flat(rows.slot_B[:, None]), flat(position_BD), flat(rows.tokens_at(tokens_SL, position_BD)), sampling_S,
            features_BDF.reshape(b * d, -1), flat(step_1D < count_B[:, None]),
        )  # fmt: skip

    def chunks(
        self, text: Ragged, sampling_S: SamplingState, tokens_1T: jax.Array, features_1TF: jax.Array
    ) -> FeatureRing:
        """With the positions of prompts' chunks."""
        return self._with(
            text.rows.slot_B[text.row_T], text.index_T, tokens_1T[0], sampling_S, features_1TF[0], text.real_T
        )

    def _with(
        self, slot_T: jax.Array, position_T: jax.Array, token_T: jax.Array, sampling_S: SamplingState,
        features_TF: jax.Array, keep_T: jax.Array,
    ) -> FeatureRing:  # fmt: skip
        size = self.features_RF.shape[0]
        kept_T = keep_T.astype(jnp.int32)
        row_T = jnp.where(keep_T, self.count + jnp.cumsum(kept_T, dtype=jnp.int32) - 1, size)
        of = lambda x_S: jnp.take(x_S, slot_T, mode="clip")
        heat_T = jax.lax.bitcast_convert_type(of(sampling_S.temperature_S), jnp.int32)
        about_TI = jnp.stack([of(self.text_S), position_T, token_T, of(sampling_S.prompt_len_S), heat_T], axis=1)
        return dataclasses.replace(
            self,
            features_RF=self.features_RF.at[row_T].set(features_TF.astype(self.features_RF.dtype), mode="drop"),
            about_RI=self.about_RI.at[row_T].set(about_TI, mode="drop"),
            count=self.count + kept_T.sum(dtype=jnp.int32),
        )
