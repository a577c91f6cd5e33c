"""DecodeState: everything that lives on the device between rounds. Donated to every executable.

Its shapes depend on the engine's sizes only, never on tier or bucket, so switching tiers
is a dictionary look-up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import init_pages
from jaxspec.models.base import ModelConfig
from jaxspec.sizes import Sizes
from jaxspec.speculation.sampling import SamplingState

#: Most tokens of rows that travel with a call of chunks.
_NEW_TOKENS = 1 << 17


@dataclasses.dataclass(frozen=True)
class Geometry(Sizes):
    """The sizes, and what reads the DecodeState that they fix.

    Attributes:
      kernels: the implementation of the kernels that read the state; None: the backend's own.
      batch_invariant: whether the target's attention in rounds gives a token the same bits whatever stands beside it.
      ring: rows of the ring of features (speculation.ring); 0: there is none.
      whole_drafter: where devices share the target, each has the drafter's own weights and its pools whole, and drafts
        alike; else they share these, too.
    """

    kernels: str | None = None
    batch_invariant: bool = False
    ring: int = 0
    whole_drafter: bool = False

    @property
    def attention(self) -> str | None:
        """The implementation of the target's attention in rounds."""
        return "batch_invariant" if self.batch_invariant else self.kernels

    @property
    def tokens_per_seq(self) -> int:
        """Length of a row's token buffer."""
        return self.pages_per_seq * self.page_size + 1

    def most_new(self, rows: int) -> int:
        """Requests that may get slots in a call of so many chunks: their texts travel as long as the longest may be."""
        return max(1, min(rows, _NEW_TOKENS // self.tokens_per_seq))

    @property
    def most_features(self) -> int:
        """Most rows of the ring that one dispatch brings: rounds, a step's chunks, or a round and a chunk in a pass."""
        rows = self.slots * self.max_growth
        return max(self.max_num_batched_tokens, rows * self.max_rounds, rows + self.prefill_chunk)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Attributes:
    pages: the target's KV pool, [layers * P, G, page, 2C].
    table_SM: page numbers of each slot; P stands for none.
    tokens_SL: every token of each slot; the one at index length is the root, whose KV is not in the pool yet.
    length_S: tokens whose KV is in the pool.
    over_S: whether the slot's text is over: until a request gets the slot, rounds treat its row as padding.
    sampling: parameters and statistics of each slot.
    draft: the drafter's own pytree.
    ring: a FeatureRing, or () where nothing is kept to learn from.
    """

    pages: jax.Array
    table_SM: jax.Array
    tokens_SL: jax.Array
    length_S: jax.Array
    over_S: jax.Array
    sampling: SamplingState
    draft: Any
    ring: Any = ()

    @classmethod
    def empty(cls, cfg: ModelConfig, geo: Geometry, dtype: jnp.dtype, draft: Any, ring: Any = ()) -> DecodeState:
        return cls(
            pages=init_pages(
                cfg.num_layers, geo.num_pages, cfg.num_kv_heads, geo.page_size, cfg.kv_width, dtype, geo.kernels
            ),
            table_SM=jnp.full((geo.slots, geo.pages_per_seq), geo.num_pages, jnp.int32),
            tokens_SL=jnp.zeros((geo.slots, geo.tokens_per_seq), jnp.int32),
            length_S=jnp.zeros((geo.slots,), jnp.int32),
            over_S=jnp.zeros((geo.slots,), bool),
            sampling=SamplingState.empty(geo.slots, cfg.vocab_size),
            draft=draft,
            ring=ring,
        )


#: What the tokens of padding rows are apart.
_APART = 7919


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """One batch's view of the state.

    Attributes:
      slot_B: slot of each row; S marks padding, and rows that are over.
      valid_B: whether the row is not padding.
      table_BM, length_B, root_B: gathered state; padding rows have length 0 and no pages.
      allowed_BDW: tokens that grammars allow at each of the next positions, as sets of bits, int32; None: all.
    """

    slot_B: jax.Array
    valid_B: jax.Array
    table_BM: jax.Array
    length_B: jax.Array
    root_B: jax.Array
    allowed_BDW: jax.Array | None = None

    @classmethod
    def gather(cls, state: DecodeState, slot_B: jax.Array, geo: Geometry) -> Rows:
        slot_B = jnp.where(jnp.take(state.over_S, slot_B, mode="clip"), geo.slots, slot_B)
        valid = slot_B < geo.slots
        length = jnp.where(valid, jnp.take(state.length_S, slot_B, mode="clip"), 0)
        table = jnp.take(state.table_SM, slot_B, axis=0, mode="clip")
        table = jnp.where(valid[:, None], table, geo.num_pages)
        # Padding has texts of its own: rows that were all alike would all be given the same experts.
        strange = (slot_B - geo.slots) * _APART % state.sampling.counts_SV.shape[1]
        root = jnp.where(valid, state.tokens_SL.at[slot_B, length].get(mode="clip"), strange)
        return cls(slot_B, valid, table, length, root)

    def tokens_at(self, tokens_SL: jax.Array, index_BN: jax.Array) -> jax.Array:
        """Committed tokens at the given indices, [B, N] (clipped where out of range)."""
        return tokens_SL.at[self.slot_B[:, None], jnp.maximum(index_BN, 0)].get(mode="clip")
