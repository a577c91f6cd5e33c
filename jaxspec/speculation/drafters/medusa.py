"""Medusa: one head for each position ahead, all reading the target's last hidden state.

Owns that state, one row a slot; there is no cache. Head i at position p predicts the token at
p + 2 + i, so with the root at index `length` the feature is that of position length - 1, and the
tokens of depth d come from head d - 1. Whatever the path, a depth has one distribution.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import distinct
from jaxspec.speculation.drafters.cores import Trained
from jaxspec.speculation.drafters.medusa_head import MedusaHeads
from jaxspec.speculation.drafters.proposals import Ranking, propose_block
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import Tier


class MedusaDrafter(Trained):
    """Chains and trees from Medusa heads. Its state is the features of the last committed positions, [S, E].

    Raises:
      ValueError: a tier deeper than there are heads.
    """

    supports_trees = True
    lags = False
    extends_by_params = False
    stepwise = False
    lookahead = 0
    window = 0
    catch_up_tokens = 0

    def __init__(self, heads: MedusaHeads, geo: Geometry):
        cfg = heads.config
        if geo.max_depth > cfg.num_heads:
            raise ValueError(
                f"tiers of these Medusa heads may be at most {cfg.num_heads} deep, one token a head, "
                f"got {geo.max_depth}"
            )
        self.config, self.geo = cfg, geo
        self.aux_layers: tuple[int, ...] = cfg.aux_layer_ids
        self.max_topk = cfg.vocab_size
        self.graph, self.params = nnx.split(heads)
        bias = heads.heads[0].blocks[0].bias
        assert bias is not None
        self.dtype: jnp.dtype = bias[...].dtype

    def init_state(self, geo: Geometry) -> jax.Array:
        return jnp.zeros((geo.slots, self.config.aux_width), self.dtype)

    def admit(self, draft: jax.Array, slot_B: jax.Array, cached_B: jax.Array) -> jax.Array:
        # The last token of a prompt is computed even where the rest is cached: prefill brings the feature.
        return draft

    def prefill(
        self, params: Any, draft: jax.Array, text: Ragged, tokens_1T: jax.Array, aux_1TA: jax.Array | None
    ) -> jax.Array:
        assert aux_1TA is not None
        return self._keep(draft, text.rows, text.last(aux_1TA))

    def catch_up(self, params: Any, draft: jax.Array, rows: Rows, tokens_SL: jax.Array) -> jax.Array:
        return draft

    def extend(
        self, params: Any, draft: jax.Array, rows: Rows, aux_BDA: jax.Array | None, count_B: jax.Array
    ) -> jax.Array:
        assert aux_BDA is not None
        return self._keep(draft, rows, jnp.take_along_axis(aux_BDA, (count_B - 1)[:, None, None], axis=1)[:, 0])

    def _keep(self, draft: jax.Array, rows: Rows, last_BE: jax.Array) -> jax.Array:
        slot_B = distinct(jnp.where(rows.valid_B, rows.slot_B, self.geo.slots), self.geo.slots)
        return draft.at[slot_B].set(last_BE.astype(draft.dtype), mode="drop", unique_indices=True)

    def draft(
        self, params: Any, draft: jax.Array, rows: Rows, tokens_SL: jax.Array, tier: Tier,
        sampling: SamplingState | None, noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, jax.Array]:  # fmt: skip
        net = nnx.merge(self.graph, params)
        feature_B1E = jnp.take(draft, rows.slot_B, axis=0, mode="clip")[:, None]
        logits_BDV = jnp.concatenate([net.logits(feature_B1E, head) for head in range(tier.depth)], axis=1)
        ranking = Ranking(rows, sampling, noise_BDV, self.config.vocab_size)
        return propose_block(logits_BDV, ranking, tier, sample=sample), draft
