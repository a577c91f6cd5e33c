"""Drafters that run a small network token by token: EAGLE heads and draft models.

Owns the draft cache and the expansion into chains and EAGLE-2 trees; a `DraftCore` owns
the network. A cache entry belongs to one committed token: entry q of a draft model is
(x_q) at rotary position q; of an EAGLE head it is the pair (feature of q - 1, x_q) at
position q - 1.

Only entries of committed text are kept. Each draft starts with one wide step over the
tokens committed since the last one (its window), whose true features wait in a ring that
every round fills, plain rounds included. So a round without drafting costs nothing; after a
run of them `catch_up` consumes what the ring still holds. A longer run leaves a gap, which
costs acceptance only: entries are stored densely, in order of arrival, with their rotary
position already applied, so the cache just lacks them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxspec.cache import TreeKV, commit, init_pages
from jaxspec.models.base import Attend
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree, ancestors
from jaxspec.tier import Tier
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise, gumbel_noise_at
from pallas_kernels.rejection_sampling.reference import NEG_INF, filter_logits

#: Committed tokens that `catch_up` can still consume after rounds without drafting.
CATCH_UP = 64


class DraftCore(Protocol):
    """The network of an autoregressive drafter, bound to its parameters inside a trace."""

    #: 1 where an entry pairs a token with the feature before it (EAGLE), else 0.
    offset: int
    aux_layers: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    aux_width: int
    vocab_size: int
    draft_vocab_size: int
    dtype: jnp.dtype

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


@dataclasses.dataclass
class _Expansion:
    """What the steps of one draft share."""

    net: Any
    cache: DraftCache
    rows: Rows
    entries_B: jax.Array
    window_seen_BR: jax.Array
    kv: jax.Array


class AutoregressiveDrafter:
    """Chains and dynamic trees from a DraftCore."""

    supports_trees = True
    has_cache = True
    catch_up_tokens = CATCH_UP

    def __init__(self, core: DraftCore, geo: Geometry):
        self.core, self.geo = core, geo
        self.aux_layers = core.aux_layers
        self.lookahead = core.offset
        self.window = geo.max_depth + 1
        self.ring = self.window + CATCH_UP
        self.max_topk = core.draft_vocab_size

    def init_state(self, geo: Geometry) -> DraftCache:
        core = self.core
        return DraftCache(
            pages=init_pages(
                core.num_layers,
                geo.num_pages,
                core.num_kv_heads,
                geo.page_size,
                core.head_dim,
                core.dtype,
                geo.kernels,
            ),
            next_S=jnp.zeros((geo.slots,), jnp.int32),
            length_S=jnp.zeros((geo.slots,), jnp.int32),
            ring_SRA=jnp.zeros((geo.slots, self.ring, core.aux_width), core.dtype),
        )

    def admit(self, draft: DraftCache, slot: jax.Array, cached: jax.Array) -> DraftCache:
        start = jnp.where(cached > 0, cached + self.core.offset, 0)
        return dataclasses.replace(
            draft,
            next_S=draft.next_S.at[slot].set(start, mode="drop"),
            length_S=draft.length_S.at[slot].set(cached, mode="drop"),
        )

    def extend(self, draft: DraftCache, rows: Rows, aux_BDA: jax.Array | None, count_B: jax.Array) -> DraftCache:
        if aux_BDA is None or self.core.offset == 0:
            return draft
        n = aux_BDA.shape[1]
        index = jnp.arange(n)[None, :]
        keep = (index < count_B[:, None]) & (index >= count_B[:, None] - self.ring) & rows.valid_B[:, None]
        slot = jnp.where(keep, rows.slot_B[:, None], self.geo.slots)
        row = (rows.length_B[:, None] + index) % self.ring
        ring = draft.ring_SRA.at[slot, row].set(aux_BDA.astype(draft.ring_SRA.dtype), mode="drop")
        return dataclasses.replace(draft, ring_SRA=ring)

    def _features(self, net: Any, draft: DraftCache, rows: Rows, index_BN: jax.Array) -> jax.Array | None:
        """Features that belong to the entries of the given token indices, from the ring."""
        if self.core.offset == 0:
            return None
        row = jnp.maximum(index_BN - 1, 0) % self.ring
        return self.core.fuse(net, draft.ring_SRA.at[rows.slot_B[:, None], row].get(mode="clip"))

    def _consume(
        self, net: Any, draft: DraftCache, rows: Rows, tokens_BN: jax.Array, feature: jax.Array | None,
        index_BN: jax.Array, real_BN: jax.Array,
    ) -> tuple[jax.Array, DraftCache, jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """Runs committed tokens through the network and appends their entries.

        Returns (hidden, cache with the entries counted but the pool as before, entries kv, their
        positions in the cache, which are real).
        """
        n = tokens_BN.shape[1]
        length_B = jnp.take(draft.length_S, rows.slot_B, mode="clip")
        first_B = jnp.maximum(jnp.take(draft.next_S, rows.slot_B, mode="clip"), self.core.offset)
        # Tokens before the first index of this window that never got an entry are the gap.
        first_B = jnp.maximum(first_B, index_BN[:, 0])
        real = real_BN & (index_BN >= first_B[:, None]) & rows.valid_B[:, None]
        causal = jnp.tril(jnp.ones((n, n), bool))[None]
        mask = (causal & real[:, None, :]) | jnp.eye(n, dtype=bool)[None]
        kv = TreeKV(draft.pages, rows.table_BM, length_B, mask, self.geo.num_pages, kernels=self.geo.kernels)
        hidden = self.core.forward(net, tokens_BN, feature, jnp.maximum(index_BN - self.core.offset, 0), kv.attend)
        place = length_B[:, None] + index_BN - first_B[:, None]
        added = real.sum(axis=1).astype(jnp.int32)
        slot = jnp.where(rows.valid_B, rows.slot_B, self.geo.slots)
        last = jnp.max(jnp.where(real, index_BN, -1), axis=1) + 1
        draft = dataclasses.replace(
            draft,
            length_S=draft.length_S.at[slot].set(length_B + added, mode="drop"),
            next_S=draft.next_S.at[slot].max(last, mode="drop"),
        )
        return hidden, draft, kv.stacked(), place, real

    def prefill(
        self, params: Any, draft: DraftCache, rows: Rows, tokens_BN: jax.Array, count_B: jax.Array,
        aux_BNA: jax.Array | None,
    ) -> DraftCache:  # fmt: skip
        net = self.core.bind(params)
        n = tokens_BN.shape[1]
        index = rows.length_B[:, None] + jnp.arange(n)[None, :]
        feature = None
        if self.core.offset:
            assert aux_BNA is not None
            row = jnp.maximum(rows.length_B - 1, 0) % self.ring
            before = draft.ring_SRA.at[rows.slot_B, row].get(mode="clip")[:, None]
            feature = self.core.fuse(net, jnp.concatenate([before, aux_BNA[:, :-1].astype(before.dtype)], axis=1))
        real = jnp.arange(n)[None, :] < count_B[:, None]
        hidden, draft, kv, place, real = self._consume(net, draft, rows, tokens_BN, feature, index, real)
        # The first token is always a real one; a NaN there belongs to the request, whose drafts are lost anyway.
        ready_B = jnp.isfinite(hidden[:, 0, 0])
        pages = commit(draft.pages, kv, rows.table_BM, place, real, self.geo.num_pages, ready_B=ready_B)
        draft = dataclasses.replace(draft, pages=pages)
        return self.extend(draft, rows, aux_BNA, count_B)

    def catch_up(self, params: Any, draft: DraftCache, rows: Rows, tokens_SL: jax.Array) -> DraftCache:
        net = self.core.bind(params)
        # The root is left to the next draft, which needs its hidden state.
        index = rows.length_B[:, None] + jnp.arange(-CATCH_UP, 0)[None, :]
        tokens, feature = rows.tokens_at(tokens_SL, index), self._features(net, draft, rows, index)
        hidden, draft, kv, place, real = self._consume(net, draft, rows, tokens, feature, index, index >= 0)
        ready_B = jnp.isfinite(hidden[:, -1, 0])
        pages = commit(draft.pages, kv, rows.table_BM, place, real, self.geo.num_pages, ready_B=ready_B)
        return dataclasses.replace(draft, pages=pages)

    def draft(
        self, params: Any, draft: DraftCache, rows: Rows, tokens_SL: jax.Array, tier: Tier,
        sampling: SamplingState | None, noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, DraftCache]:  # fmt: skip
        net = self.core.bind(params)
        # As wide as the deepest round's commit, whatever the tier: entries survive a switch to a shallower one.
        index = rows.length_B[:, None] + jnp.arange(1 - self.window, 1)[None, :]
        tokens = rows.tokens_at(tokens_SL, index)
        feature = self._features(net, draft, rows, index)
        entries_B = jnp.take(draft.length_S, rows.slot_B, mode="clip")
        hidden, after, kv, place, real = self._consume(net, draft, rows, tokens, feature, index, index >= 0)
        x = _Expansion(net, draft, rows, entries_B, real, kv)
        if tier.is_chain:
            tree = self._chain(x, hidden[:, -1:], tier, sampling, noise_BDV, sample)
        else:
            tree = self._tree(x, hidden[:, -1:], tier, sampling, noise_BDV)
        ready_B = tree.tokens_BN[:, -1] >= 0
        pages = commit(draft.pages, kv, rows.table_BM, place, real, self.geo.num_pages, ready_B=ready_B)
        return tree, dataclasses.replace(after, pages=pages)

    def _to_target(self, net: Any, ids: jax.Array) -> jax.Array:
        table = self.core.target_ids(net)
        return ids if table is None else jnp.take(table, ids, mode="clip")

    def _scores(
        self, x: _Expansion, logits_BWV: jax.Array, sampling: SamplingState | None, noise_BDV: jax.Array | None,
        level: int,
    ) -> jax.Array:  # fmt: skip
        """Ranking scores: logits, or for sampled rows tempered logits plus the target's own noise."""
        if sampling is None:
            return logits_BWV
        table, position_B = self.core.target_ids(x.net), x.rows.length_B + level
        if noise_BDV is not None:
            noise = noise_BDV[:, level - 1]
            noise = noise if table is None else jnp.take(noise, table, axis=1, mode="clip")
        elif table is None:
            v = self.core.vocab_size
            noise = gumbel_noise(sampling.seed_S, position_B[:, None], v, Purpose.TARGET)[:, 0]
        else:
            noise = gumbel_noise_at(sampling.seed_S, position_B, table, Purpose.TARGET)
        greedy = (sampling.temperature_S == 0)[:, None, None]
        temperature = jnp.where(greedy, 1.0, sampling.temperature_S[:, None, None])
        return jnp.where(greedy, logits_BWV, logits_BWV / temperature + noise[:, None, :])

    def _step(
        self, x: _Expansion, tokens_BW: jax.Array, feature: jax.Array, mask_BWT: jax.Array, level: int
    ) -> jax.Array:
        """One narrow step over drafted tokens at depth `level`; appends their kv to the expansion."""
        b, w = tokens_BW.shape
        seen = jnp.broadcast_to(x.window_seen_BR[:, None, :], (b, w, x.window_seen_BR.shape[1]))
        mask = jnp.concatenate([seen, mask_BWT], axis=2)
        kv = TreeKV(
            x.cache.pages, x.rows.table_BM, x.entries_B, mask, self.geo.num_pages, prior=x.kv, kernels=self.geo.kernels
        )
        position = jnp.broadcast_to((x.rows.length_B + level - self.core.offset)[:, None], (b, w))
        hidden = self.core.forward(x.net, tokens_BW, feature, position, kv.attend)
        x.kv = jnp.concatenate([x.kv, kv.stacked()], axis=2)
        return hidden

    def _chain(
        self, x: _Expansion, hidden: jax.Array, tier: Tier, sampling: SamplingState | None,
        noise_BDV: jax.Array | None, sample: bool,
    ) -> DraftTree:  # fmt: skip
        tokens, probs = [x.rows.root_B], []
        for level in range(1, tier.depth + 1):
            logits = self.core.logits(x.net, hidden)
            if sample:
                assert sampling is not None
                token, prob_BV = self._draw(x, logits, sampling, level)
                probs.append(prob_BV)
            else:
                best = jnp.argmax(self._scores(x, logits, sampling, noise_BDV, level)[:, 0], axis=-1)
                token = self._to_target(x.net, best.astype(jnp.int32))
            tokens.append(token)
            if level < tier.depth:
                mask = jnp.ones((token.shape[0], 1, level), bool)
                hidden = self._step(x, token[:, None], hidden, mask, level)
        return DraftTree.chain(jnp.stack(tokens, axis=1), jnp.stack(probs, axis=1) if sample else None)

    def _draw(
        self, x: _Expansion, logits: jax.Array, sampling: SamplingState, level: int
    ) -> tuple[jax.Array, jax.Array]:
        """A token from the tempered and filtered draft distribution, and that distribution over V."""
        b, v = logits.shape[0], self.core.vocab_size
        table = self.core.target_ids(x.net)
        wide = logits[:, 0]
        if table is not None:
            wide = jnp.full((b, v), NEG_INF, jnp.float32).at[:, table].set(wide)
        kept = filter_logits(wide[:, None], *sampling.draws[:4])[:, 0]
        noise = gumbel_noise(sampling.seed_S, (x.rows.length_B + level)[:, None], v, Purpose.DRAFT)[:, 0]
        greedy = (sampling.temperature_S == 0)[:, None]
        token = jnp.argmax(jnp.where(greedy, wide, kept + noise), axis=-1).astype(jnp.int32)
        return token, jax.nn.softmax(kept, axis=-1)

    def _tree(
        self, x: _Expansion, hidden: jax.Array, tier: Tier, sampling: SamplingState | None,
        noise_BDV: jax.Array | None,
    ) -> DraftTree:  # fmt: skip
        """EAGLE-2's dynamic tree: expand the best k nodes a level, then keep the best of all candidates."""
        k, b = tier.topk, hidden.shape[0]

        def children(hidden: jax.Array, level: int) -> tuple[jax.Array, jax.Array]:
            scores = self._scores(x, self.core.logits(x.net, hidden), sampling, noise_BDV, level)
            logprobs = jax.nn.log_softmax(scores, axis=-1)
            # top_k ranks NaN first, and a node so chosen would come without its parents.
            ranked = jnp.where(jnp.isnan(logprobs), NEG_INF, logprobs)
            # As a matrix: only there does XLA rank a vocabulary that lies on several devices in parts.
            value, ids = (y.reshape(b, -1, k) for y in jax.lax.top_k(ranked.reshape(-1, ranked.shape[-1]), k))
            return value, self._to_target(x.net, ids.astype(jnp.int32))

        value, ids = children(hidden, 1)  # [B, 1, k]
        score, token = value[:, 0], ids[:, 0]
        scores, tokens = [score], [token]
        parents = [jnp.full((b, k), -1, jnp.int32)]  # candidate index of each candidate's parent
        depths = [1] * k
        frontier = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32)[None], (b, k))
        seen = jnp.broadcast_to(jnp.eye(k, dtype=bool)[None], (b, k, k))
        feature = jnp.broadcast_to(hidden, (b, k, hidden.shape[-1]))
        base = k
        for level in range(1, tier.depth):
            hidden = self._step(x, token, feature, seen, level)
            value, ids = children(hidden, level + 1)  # [B, k, k]
            flat = (score[:, :, None] + value).reshape(b, k * k)
            ids = ids.reshape(b, k * k)
            scores.append(flat)
            tokens.append(ids)
            parents.append(jnp.repeat(frontier, k, axis=1))
            depths += [level + 1] * (k * k)
            score, pick = jax.lax.top_k(flat, k)
            pick = pick.astype(jnp.int32)
            token = jnp.take_along_axis(ids, pick, axis=1)
            from_row = pick // k
            feature = jnp.take_along_axis(hidden, from_row[:, :, None], axis=1)
            seen = jnp.take_along_axis(seen, from_row[:, :, None], axis=1)
            eye = jnp.broadcast_to(jnp.eye(k, dtype=bool)[None], (b, k, k))
            seen = jnp.concatenate([seen, eye], axis=2)
            frontier = base + pick
            base += k * k

        score_BM, token_BM = jnp.concatenate(scores, axis=1), jnp.concatenate(tokens, axis=1)
        parent_BM = jnp.concatenate(parents, axis=1)
        # A child never scores above its parent and comes after it, so the best set is closed under parents.
        _, chosen = jax.lax.top_k(score_BM, tier.num_nodes - 1)
        chosen = jnp.sort(chosen.astype(jnp.int32), axis=1)
        parent = jnp.take_along_axis(parent_BM, chosen, axis=1)
        node_of = jnp.argmax(chosen[:, None, :] == parent[:, :, None], axis=2).astype(jnp.int32) + 1
        root = jnp.zeros((b, 1), jnp.int32)
        parents_BN = jnp.concatenate([root, jnp.where(parent < 0, 0, node_of)], axis=1)
        depth_BN = jnp.concatenate([root, jnp.take(jnp.asarray(depths, jnp.int32), chosen)], axis=1)
        tokens_BN = jnp.concatenate([x.rows.root_B[:, None], jnp.take_along_axis(token_BM, chosen, axis=1)], axis=1)
        return DraftTree(tokens_BN, parents_BN, depth_BN, ancestors(parents_BN, tier.depth))
