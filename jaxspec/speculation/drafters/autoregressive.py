"""Drafters that run a small network token by token: EAGLE and MTP heads, and draft models.

Owns the narrow steps over drafted tokens. What is committed lies in `draft_cache`, which candidates
a draft holds is `proposals`' business. Entries of drafted tokens live as long as their draft.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import TreeKV
from jaxspec.speculation.drafters.draft_cache import CachedDrafter, Consumed, DraftCache, DraftCore
from jaxspec.speculation.drafters.proposals import Frontier, Ranking, propose
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import Tier


@dataclasses.dataclass
class _Steps:
    """The `Levels` of one draft: one narrow step for each depth after the first.

    Attributes:
      pages: the draft pool, of which each row sees its first entries_B entries.
      window_seen_BR: which tokens of the window every drafted token sees.
      kv_LBTGc: entries of the window and of the drafted tokens so far, with room for those to come: steps of one shape
        are compiled once.
      hidden_BWE: what the last frontier left; of the root at first.
      place_BT: of the window and of the drafted tokens, counted from the pool's last entry.
      filled: entries of drafted tokens so far.
    """

    core: DraftCore
    geo: Geometry
    net: Any
    rows: Rows
    pages: jax.Array
    entries_B: jax.Array
    window_seen_BR: jax.Array
    kv_LBTGc: jax.Array
    hidden_BWE: jax.Array
    place_BT: jax.Array
    filled: int = 0

    @classmethod
    def after(
        cls, core: DraftCore, geo: Geometry, net: Any, rows: Rows, pages: jax.Array, done: Consumed, tier: Tier
    ) -> _Steps:
        """The steps of a draft of the tier's shape, after the window."""
        room = (tier.depth - 1) * tier.topk
        kv_LBTGc = jnp.pad(done.kv_LBNGc, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0)))
        place_BT = jnp.pad(jnp.maximum(done.place_BN - done.before_B[:, None], 0), ((0, 0), (0, room)))
        return cls(core, geo, net, rows, pages, done.before_B, done.real_BN, kv_LBTGc, done.hidden_BNE, place_BT)

    def __call__(self, depth: int, frontier: Frontier | None) -> jax.Array:
        if frontier is not None:
            self._step(depth - 1, frontier)
        return self.core.logits(self.net, self.hidden_BWE)

    def _step(self, depth: int, frontier: Frontier) -> None:
        b, w = frontier.tokens_BW.shape
        feature = self.hidden_BWE
        if frontier.origin_BW is None:
            feature = jnp.broadcast_to(feature, (b, w, feature.shape[-1]))
        else:
            feature = jnp.take_along_axis(feature, frontier.origin_BW[:, :, None], axis=1)
        window = self.window_seen_BR.shape[1]
        seen = jnp.broadcast_to(self.window_seen_BR[:, None, :], (b, w, window))
        # Earlier frontiers, room, and last the frontier itself.
        room = jnp.zeros((b, w, self.kv_LBTGc.shape[2] - window - self.filled), bool)
        earlier, own = jnp.split(frontier.seen_BWT, [self.filled], axis=2)
        mask = jnp.concatenate([seen, earlier, room, own], axis=2)
        own_BW = jnp.broadcast_to(self.place_BT[:, window - 1 : window] + depth, (b, w))  # after the root, the last
        place_BT = jnp.concatenate([self.place_BT, own_BW], axis=1)
        kv = TreeKV(
            self.pages, self.rows.table_BM, self.entries_B, mask, self.geo.num_pages, prior=self.kv_LBTGc,
            place_BT=place_BT, kernels=self.geo.kernels, whole=self.geo.whole_drafter,
        )  # fmt: skip
        position = jnp.broadcast_to((self.rows.length_B + depth - self.core.offset)[:, None], (b, w))
        self.hidden_BWE = self.core.forward(self.net, frontier.tokens_BW, feature, position, kv.attend)
        self.kv_LBTGc = jax.lax.dynamic_update_slice_in_dim(self.kv_LBTGc, kv.stacked(), window + self.filled, axis=2)
        self.place_BT = jax.lax.dynamic_update_slice_in_dim(self.place_BT, own_BW, window + self.filled, axis=1)
        self.filled += w


class AutoregressiveDrafter(CachedDrafter):
    """Chains and dynamic trees from a DraftCore."""

    stepwise = True

    def __init__(self, core: DraftCore, geo: Geometry):
        super().__init__(core, geo)
        self.core, self.geo = core, geo

    def draft(
        self, params: Any, draft: DraftCache, rows: Rows, tokens_SL: jax.Array, tier: Tier,
        sampling: SamplingState | None, noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, DraftCache]:  # fmt: skip
        core, text = self.core, self.text
        net = core.bind(params)
        inputs = text.committed(net, draft, rows, tokens_SL, 1 - text.window, 1)
        done = text.consume(net, draft, rows, inputs, inputs.index_BN >= 0, asked=1)
        levels = _Steps.after(core, self.geo, net, rows, draft.pages, done, tier)
        ranking = Ranking(rows, sampling, noise_BDV, core.vocab_size, core.target_ids(net))
        tree = propose(levels, ranking, tier, sample=sample)
        return tree, text.write(draft, rows, done, ready_B=tree.tokens_BN[:, -1] >= 0)
