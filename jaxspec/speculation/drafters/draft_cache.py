"""The cache of a drafter that runs a network: which committed tokens have entries, and how they get them.

Owns the draft pool's contents and the ring of features; a `DraftCore` owns the network. Must not
know how drafts are made. A cache entry belongs to one committed token: entry q of a draft model
is (x_q) at rotary position q; of a head over the target's features it is the pair (feature of
q - 1, x_q) at position q - 1.

Only entries of committed text are kept. Each draft starts with one wide step over the
tokens committed since the last one (its window), whose true features wait in a ring that
every round fills, plain rounds included. So a round without drafting costs nothing; after a
run of them `catch_up` consumes what the ring still holds. A longer run leaves a gap, which
costs acceptance only: entries are stored densely, in order of arrival, with their rotary
position already applied, so the cache just lacks them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxspec.cache import TreeKV, after_reads, commit, distinct, init_pages
from jaxspec.models.base import Attend
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.state import Geometry, Rows

#: Committed tokens that `catch_up` can still consume after rounds without drafting.
CATCH_UP = 64


class DraftCore(Protocol):
    """The network of a drafter with a cache, bound to its parameters inside a trace."""

    #: 1 where an entry pairs a token with the feature before it (EAGLE, MTP), else 0.
    offset: int
    aux_layers: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    #: See ModelConfig.
    kv_width: int
    aux_width: int
    vocab_size: int
    draft_vocab_size: int
    dtype: jnp.dtype
    #: Whether its layers go on with the rows that are `answered`; others compute all.
    narrows: bool

    def bind(self, params: Any) -> Any:
        """The module with its parameters."""
        ...

    def fuse(self, net: Any, aux_BNA: jax.Array) -> jax.Array | None:
        """The target's auxiliary states as the network's input features."""
        ...

    def forward(
        self, net: Any, tokens_BN: jax.Array, feature_BNE: jax.Array | None, positions_BN: jax.Array, attend: Attend
    ) -> jax.Array:
        """Hidden states [B, N, E]; they are also the features of the next step."""
        ...

    def logits(self, net: Any, hidden_BNE: jax.Array) -> jax.Array:
        """[B, N, Vd] float32."""
        ...

    def target_ids(self, net: Any) -> jax.Array | None:
        """[Vd] the target's id of each draft id; None where the vocabularies are equal."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftCache:
    """Attributes:
    pages: [layers * P, G, page, 2C], under the target's page table.
    next_S: first token index that has no entry yet.
    length_S: entries in the cache (below next_S where a gap was left).
    ring_SRA: auxiliary states of the last R positions, position p in row p % R.
    """

    pages: jax.Array
    next_S: jax.Array
    length_S: jax.Array
    ring_SRA: jax.Array


class Inputs(NamedTuple):
    """What a wide step reads.

    Attributes:
      tokens_BN, feature_BNE: tokens and their features (None for draft models).
      index_BN: token indices; below 0 where there is none.
      slots: the last so many tokens are placeholders of tokens to come. They see the text and the slots before
        them, nothing but later slots sees them, and they get no entries.
    """

    tokens_BN: jax.Array
    feature_BNE: jax.Array | None
    index_BN: jax.Array
    slots: int = 0


class Consumed(NamedTuple):
    """Tokens that went through the network; their entries are not written yet.

    Attributes:
      hidden_BNE: of the last inputs, as many as were asked for.
      cache: the new entries counted, the pool as before.
      kv_LBNGc, place_BN, real_BN: entries, their positions in the cache, and which to write.
      before_B: entries that the cache held.
    """

    hidden_BNE: jax.Array
    cache: DraftCache
    kv_LBNGc: jax.Array
    place_BN: jax.Array
    real_BN: jax.Array
    before_B: jax.Array


class CachedText:
    """Keeps a DraftCache in step with the committed text; drafters hold one and forward to it.

    Attributes:
      window: committed tokens that a draft consumes by itself. As wide as the deepest round's commit, whatever the
        tier: entries survive a switch to a shallower one.
    """

    def __init__(self, core: DraftCore, geo: Geometry):
        self.core, self.geo = core, geo
        self.window = geo.max_depth + 1
        self.ring = self.window + CATCH_UP

    def init_state(self, geo: Geometry) -> DraftCache:
        """See Drafter, as for the methods below that it names."""
        core = self.core
        return DraftCache(
            pages=init_pages(
                core.num_layers,
                geo.num_pages,
                core.num_kv_heads,
                geo.page_size,
                core.kv_width,
                core.dtype,
                geo.kernels,
            ),
            next_S=jnp.zeros((geo.slots,), jnp.int32),
            length_S=jnp.zeros((geo.slots,), jnp.int32),
            ring_SRA=jnp.zeros((geo.slots, self.ring, core.aux_width), core.dtype),
        )

    def admit(self, draft: DraftCache, slot_B: jax.Array, cached_B: jax.Array) -> DraftCache:
        start_B = jnp.where(cached_B > 0, cached_B + self.core.offset, 0)
        return dataclasses.replace(
            draft,
            next_S=draft.next_S.at[slot_B].set(start_B, mode="drop"),
            length_S=draft.length_S.at[slot_B].set(cached_B, mode="drop"),
        )

    def extend(
        self, params: Any, draft: DraftCache, rows: Rows, aux_BDA: jax.Array | None, count_B: jax.Array
    ) -> DraftCache:
        if aux_BDA is None or self.core.offset == 0:
            return draft
        n = aux_BDA.shape[1]
        index = jnp.arange(n)[None, :]
        keep = (index < count_B[:, None]) & (index >= count_B[:, None] - self.ring) & rows.valid_B[:, None]
        return self._remember(draft, rows.slot_B[:, None], rows.length_B[:, None] + index, aux_BDA, keep)

    def _remember(
        self, draft: DraftCache, slot: jax.Array, position: jax.Array, aux: jax.Array, keep: jax.Array
    ) -> DraftCache:
        """Puts auxiliary states [..., A] of positions, those to keep, into their slots' rings."""
        slot = distinct(jnp.where(keep, slot, self.geo.slots), self.geo.slots)
        at, aux = (slot, position % self.ring), aux.astype(draft.ring_SRA.dtype)
        ring = draft.ring_SRA.at[at].set(aux, mode="drop", unique_indices=True)
        return dataclasses.replace(draft, ring_SRA=ring)

    def prefill(
        self, params: Any, draft: DraftCache, text: Ragged, tokens_1T: jax.Array, aux_1TA: jax.Array | None
    ) -> DraftCache:
        net, rows = self.core.bind(params), text.rows
        feature = None
        if self.core.offset:
            assert aux_1TA is not None
            row = jnp.maximum(rows.length_B - 1, 0) % self.ring
            ring_BA = draft.ring_SRA.at[rows.slot_B, row].get(mode="clip")
            # Each token comes with the states of the one before it: in the chunk, or for the first one in the ring.
            before_1TA = jnp.roll(aux_1TA, 1, axis=1).astype(ring_BA.dtype)
            # Rows without tokens begin where others end.
            count = before_1TA.shape[1]
            start_B = distinct(jnp.where(text.count_B > 0, text.start_B, count), count)
            before_1TA = before_1TA.at[0, start_B].set(ring_BA, mode="drop", unique_indices=True)
            feature = self.core.fuse(net, before_1TA)
        inputs = Inputs(tokens_1T, feature, text.index_BN)
        done = self.consume(net, draft, rows, inputs, text.real_BN, asked=0, text=text)
        draft = self.write(draft, rows, done, ready_B=after_reads(done.kv_LBNGc))
        if not self.core.offset:
            return draft
        assert aux_1TA is not None
        keep_T = text.real_T & (text.offset_T >= text.count_B[text.row_T] - self.ring)
        return self._remember(draft, rows.slot_B[text.row_T], text.index_T, aux_1TA[0], keep_T)

    def catch_up(self, params: Any, draft: DraftCache, rows: Rows, tokens_SL: jax.Array) -> DraftCache:
        net = self.core.bind(params)
        # The root is left to the next draft, which needs its hidden state.
        inputs = self.committed(net, draft, rows, tokens_SL, -CATCH_UP, 0)
        done = self.consume(net, draft, rows, inputs, inputs.index_BN >= 0, asked=0)
        return self.write(draft, rows, done, ready_B=after_reads(done.kv_LBNGc))

    def committed(self, net: Any, draft: DraftCache, rows: Rows, tokens_SL: jax.Array, start: int, stop: int) -> Inputs:
        """Committed tokens at indices root + start to root + stop (excluded), with their features from the ring."""
        index_BN = rows.length_B[:, None] + jnp.arange(start, stop)[None, :]
        tokens_BN = rows.tokens_at(tokens_SL, index_BN)
        if self.core.offset == 0:
            return Inputs(tokens_BN, None, index_BN)
        row = jnp.maximum(index_BN - 1, 0) % self.ring
        aux_BNA = draft.ring_SRA.at[rows.slot_B[:, None], row].get(mode="clip")
        return Inputs(tokens_BN, self.core.fuse(net, aux_BNA), index_BN)

    def consume(
        self, net: Any, draft: DraftCache, rows: Rows, inputs: Inputs, real_BN: jax.Array, *, asked: int,
        text: Ragged | None = None,
    ) -> Consumed:  # fmt: skip
        """Runs tokens through the network in one wide step.

        Args:
          real_BN: committed tokens of the text (slots are none); those that have entries already are skipped.
          asked: the last inputs whose hidden states are wanted; of the others the last layer makes entries alone. All
            of a rectangle's rows, or none of a text.
          text: how the tokens and their features stand side by side; None: as a rectangle.
        """
        index_BN = inputs.index_BN
        n = index_BN.shape[1]
        length_B = jnp.take(draft.length_S, rows.slot_B, mode="clip")
        first_B = jnp.maximum(jnp.take(draft.next_S, rows.slot_B, mode="clip"), self.core.offset)
        # Tokens before the first index of this window that never got an entry are the gap.
        first_B = jnp.maximum(first_B, index_BN[:, 0])
        real = real_BN & (index_BN >= first_B[:, None]) & rows.valid_B[:, None]
        seen = real | (jnp.arange(n) >= n - inputs.slots)[None, :]
        causal = jnp.tril(jnp.ones((n, n), bool))[None]
        mask = (causal & seen[:, None, :]) | jnp.eye(n, dtype=bool)[None]
        kv = TreeKV(
            draft.pages, rows.table_BM, length_B, mask, self.geo.num_pages,
            place_BT=jnp.maximum(index_BN - first_B[:, None], 0), kernels=self.geo.kernels,
            whole=self.geo.whole_drafter, asked=asked if self.core.narrows else None,
        )  # fmt: skip
        position_BN = jnp.maximum(index_BN - self.core.offset, 0)
        attend = kv.attend
        if text is not None:
            position_BN, attend = text.flat(position_BN), text.attend(attend)
        hidden = self.core.forward(net, inputs.tokens_BN, inputs.feature_BNE, position_BN, attend)
        hidden = hidden[:, hidden.shape[1] - asked :]
        place = length_B[:, None] + index_BN - first_B[:, None]
        added = real.sum(axis=1).astype(jnp.int32)
        slot = jnp.where(rows.valid_B, rows.slot_B, self.geo.slots)
        last = jnp.max(jnp.where(real, index_BN, -1), axis=1) + 1
        counted = dataclasses.replace(
            draft,
            length_S=draft.length_S.at[slot].set(length_B + added, mode="drop"),
            next_S=draft.next_S.at[slot].max(last, mode="drop"),
        )
        return Consumed(hidden, counted, kv.stacked(), place, real, length_B)

    def write(self, draft: DraftCache, rows: Rows, done: Consumed, *, ready_B: jax.Array) -> DraftCache:
        """The cache with the consumed tokens' entries.

        Args:
          draft: the cache that they were consumed on.
          ready_B: see jaxspec.cache.commit.
        """
        geo = self.geo
        pages = commit(
            draft.pages, done.kv_LBNGc, rows.table_BM, done.place_BN, done.real_BN, geo.num_pages, ready_B=ready_B,
            whole=geo.whole_drafter,
        )  # fmt: skip
        return dataclasses.replace(done.cache, pages=pages)


class CachedDrafter:
    """A drafter whose state is the text's cache; how it drafts from there is left open (see Drafter).

    Attributes:
      text: keeps the cache in step with what is committed.
    """

    supports_trees = True
    lags = True
    extends_by_params = False
    catch_up_tokens = CATCH_UP

    def __init__(self, core: DraftCore, geo: Geometry):
        self.text = text = CachedText(core, geo)
        self.aux_layers, self.lookahead, self.max_topk = core.aux_layers, core.offset, core.draft_vocab_size
        self.window = text.window
        self.init_state, self.admit, self.prefill = text.init_state, text.admit, text.prefill
        self.catch_up, self.extend = text.catch_up, text.extend
