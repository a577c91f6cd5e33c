"""DFlash: every token of a draft from one pass over a block of placeholders.

Owns the cache of what the layers see of the text: keys and values of every committed position, projected from the
target's states when the position is committed, in rounds without drafting too. So the cache never lags behind, and a
draft reads it and leaves nothing. Whatever a tier drafts, the block is as wide as it was trained: places see each
other, so a shorter block would draft other tokens. A place has one distribution whatever the path, as in `parallel`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import attend_paged, commit, init_pages
from jaxspec.models.base import FULL_ATTENTION, AttentionOptions
from jaxspec.speculation.drafters.cores import Trained
from jaxspec.speculation.drafters.dflash_head import DflashHead
from jaxspec.speculation.drafters.proposals import Ranking, propose_block
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import Tier
from pallas_kernels.tree_attention.reference import Shared


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextCache:
    """Attributes:
    pages: [layers * P, G, page, 2C], under the target's page table; committed position p lies at p.
    """

    pages: jax.Array


class BlockDrafter(Trained):
    """Chains and trees from a DFlash head.

    Raises:
      ValueError: tiers deeper than a block.
    """

    supports_trees = True
    lags = False
    extends_by_params = True
    stepwise = False
    lookahead = 0
    window = 0
    catch_up_tokens = 0

    def __init__(self, head: DflashHead, geo: Geometry):
        cfg = head.config
        if geo.max_depth > cfg.drafts:
            raise ValueError(
                f"tiers of this DFlash head may be at most {cfg.drafts} deep, the tokens of its block of "
                f"{cfg.block_size}, got {geo.max_depth}"
            )
        self.config, self.geo = cfg, geo
        self.aux_layers: tuple[int, ...] = cfg.aux_layer_ids
        self.max_topk = cfg.draft_vocab_size
        self.full_vocabulary = cfg.draft_vocab_size == cfg.vocab_size
        self.dtype: jnp.dtype = head.norm.weight[...].dtype
        self.graph, self.params = nnx.split(head)

    def init_state(self, geo: Geometry) -> ContextCache:
        layer = self.config.layer
        heads, page, channels = layer.num_kv_heads, geo.page_size, layer.head_dim
        return ContextCache(
            init_pages(layer.num_layers, geo.num_pages, heads, page, 2 * channels, self.dtype, geo.kernels)
        )

    def admit(self, draft: ContextCache, slot_B: jax.Array, cached_B: jax.Array) -> ContextCache:
        # An entry depends on its position's states alone: those of a shared prefix lie in the shared pages.
        return draft

    def prefill(
        self, params: Any, draft: ContextCache, text: Ragged, tokens_1T: jax.Array, aux_1TA: jax.Array | None
    ) -> ContextCache:
        assert aux_1TA is not None
        kv_L1TGc = self._bind(params).entries(aux_1TA, text.index_T[None])
        kv_BNLGc = text.rectangle(jnp.moveaxis(kv_L1TGc, 0, 2))
        return self._write(draft, text.rows, jnp.moveaxis(kv_BNLGc, 2, 0), text.index_BN, text.real_BN)

    def catch_up(self, params: Any, draft: ContextCache, rows: Rows, tokens_SL: jax.Array) -> ContextCache:
        return draft

    def extend(
        self, params: Any, draft: ContextCache, rows: Rows, aux_BDA: jax.Array | None, count_B: jax.Array
    ) -> ContextCache:
        assert aux_BDA is not None
        step_1D = jnp.arange(aux_BDA.shape[1])[None, :]
        position_BD = rows.length_B[:, None] + step_1D
        real_BD = (step_1D < count_B[:, None]) & rows.valid_B[:, None]
        kv_LBDGc = self._bind(params).entries(aux_BDA, position_BD)
        return self._write(draft, rows, kv_LBDGc, position_BD, real_BD)

    def draft(
        self, params: Any, draft: ContextCache, rows: Rows, tokens_SL: jax.Array, tier: Tier,
        sampling: SamplingState | None, noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, ContextCache]:  # fmt: skip
        net, cfg = self._bind(params), self.config
        logits_BDV = net.logits(self._predicting(net, draft, rows)[:, : tier.depth])
        ids_V = None if self.full_vocabulary else net.target_ids[...]
        ranking = Ranking(rows, sampling, noise_BDV, cfg.vocab_size, ids_V)
        return propose_block(logits_BDV, ranking, tier, sample=sample), draft

    def _predicting(self, net: DflashHead, draft: ContextCache, rows: Rows) -> jax.Array:
        """Hidden states of the places of every row's block that predict, [B, drafts, E]."""
        cfg, geo, b = self.config, self.geo, rows.root_B.shape[0]
        offset_N, shared = jnp.arange(cfg.block_size, dtype=jnp.int32), Shared()

        def attend(
            layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions = FULL_ATTENTION
        ) -> jax.Array:
            mask_1NN, offset_BN = cfg.block_mask(options)[None], None
            if options.window is not None:
                window, own_N = cfg.window(offset_N)
                options = dataclasses.replace(options, window=window)
                offset_BN = jnp.broadcast_to(own_N[None], (b, cfg.block_size))
            k, v = k.astype(draft.pages.dtype), v.astype(draft.pages.dtype)
            return attend_paged(
                q, draft.pages, rows.table_BM, rows.length_B, k, v,
                jnp.broadcast_to(mask_1NN, (b, *mask_1NN.shape[1:])), options, offset_BN=offset_BN,
                kernels=geo.kernels, whole=geo.whole_drafter, first_page=layer * geo.num_pages,
                shared=shared,
            )  # fmt: skip

        return net.predicting(net(net.block(rows.root_B), rows.length_B[:, None] + offset_N[None, :], attend))

    def _bind(self, params: Any) -> DflashHead:
        return nnx.merge(self.graph, params)

    def _write(
        self, draft: ContextCache, rows: Rows, kv_LBNGc: jax.Array, position_BN: jax.Array, real_BN: jax.Array
    ) -> ContextCache:
        # Whatever reads the pool in a round comes before the states that are written: they are of the drafted tokens.
        ready_B = jnp.ones(real_BN.shape[:1], bool)
        geo, table_BM = self.geo, rows.table_BM
        pages = commit(
            draft.pages, kv_LBNGc, table_BM, position_BN, real_BN, geo.num_pages, ready_B=ready_B,
            whole=geo.whole_drafter,
        )  # fmt: skip
        return ContextCache(pages)
