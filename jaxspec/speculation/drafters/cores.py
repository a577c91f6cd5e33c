"""The networks that AutoregressiveDrafter can run: an EAGLE-3 head, or a whole small model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Attend
from jaxspec.models.layers import Transformer
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head


class Eagle3Core:
    """EAGLE-3 (Li et al. 2025): one layer over the target's fused auxiliary states."""

    offset = 1

    def __init__(self, head: Eagle3Head):
        cfg = head.config
        self.graph, self.params = nnx.split(head)
        self.aux_layers = cfg.aux_layer_ids
        self.num_layers, self.num_kv_heads, self.head_dim = 1, cfg.num_kv_heads, cfg.head_dim
        self.aux_width = cfg.num_aux * cfg.target_hidden_size
        self.vocab_size = cfg.vocab_size
        self.draft_vocab_size = cfg.draft_vocab_size
        self.full_vocabulary = cfg.draft_vocab_size == cfg.vocab_size
        self.dtype = head.fc.kernel[...].dtype

    def bind(self, params: Any) -> Eagle3Head:
        return nnx.merge(self.graph, params)

    def fuse(self, net: Eagle3Head, aux_BNA: jax.Array) -> jax.Array:
        return net.fuse(aux_BNA)

    def forward(
        self,
        net: Eagle3Head,
        tokens_BN: jax.Array,
        feature_BNE: jax.Array | None,
        positions_BN: jax.Array,
        attend: Attend,
    ) -> jax.Array:
        assert feature_BNE is not None
        return net(tokens_BN, feature_BNE, positions_BN, attend)

    def logits(self, net: Eagle3Head, hidden_BNE: jax.Array) -> jax.Array:
        return net.logits(hidden_BNE)

    def target_ids(self, net: Eagle3Head) -> jax.Array | None:
        return None if self.full_vocabulary else net.target_ids[...]


class DraftModelCore:
    """A small language model with the target's vocabulary (Leviathan et al. 2023)."""

    offset = 0
    aux_layers: tuple[int, ...] = ()
    aux_width = 0

    def __init__(self, model: Transformer):
        cfg = model.config
        self.graph, self.params = nnx.split(model)
        self.num_layers, self.num_kv_heads, self.head_dim = cfg.num_layers, cfg.num_kv_heads, cfg.head_dim
        self.vocab_size = self.draft_vocab_size = cfg.vocab_size
        self.dtype: jnp.dtype = model.embedding[...].dtype

    def bind(self, params: Any) -> Transformer:
        return nnx.merge(self.graph, params)

    def fuse(self, net: Transformer, aux_BNA: jax.Array) -> None:
        return None

    def forward(
        self,
        net: Transformer,
        tokens_BN: jax.Array,
        feature_BNE: jax.Array | None,
        positions_BN: jax.Array,
        attend: Attend,
    ) -> jax.Array:
        return net(tokens_BN, positions_BN, attend)[0]

    def logits(self, net: Transformer, hidden_BNE: jax.Array) -> jax.Array:
        return net.logits(hidden_BNE)

    def target_ids(self, net: Transformer) -> None:
        return None
