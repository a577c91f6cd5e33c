"""The networks that drafters run: a head over the target's features, or a whole small model."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Attend, TargetModel


class FeatureHead(Protocol):
    """A module that continues the target's features: EAGLE heads and MTP modules (nnx.Module).

    `config` offers num_layers, layer (a ModelConfig), aux_layer_ids, aux_width, vocab_size and draft_vocab_size.

    Attributes:
      narrows: whether its layers go on with the rows that attention answers (`models.base.answered`). Heads without it
        compute all, which costs time alone.
    """

    config: Any

    def fuse(self, aux_BNA: jax.Array) -> jax.Array:
        """The target's auxiliary states [B, N, aux_width] as features [B, N, E]."""
        ...

    def __call__(
        self, tokens_BN: jax.Array, feature_BNE: jax.Array, positions_BN: jax.Array, attend: Attend
    ) -> jax.Array:
        """Hidden states that `logits` reads and the next step takes as its features.

        [B, N, E], or of the rows that are answered.
        """
        ...

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        """Float32 logits over the draft vocabulary, [B, N, Vd]."""
        ...


class Trained:
    """Holds a network's parameters until a round takes them as its argument."""

    params: Any

    def take_params(self) -> Any:
        """The parameters, no longer held here: a round that took them from here would have them compiled in."""
        params, self.params = self.params, None
        return params


class HeadCore(Trained):
    """A FeatureHead: an entry pairs the feature of a position with the token after it.

    Attributes:
      mask_token_id: the placeholders' token of a P-EAGLE head, else None.
    """

    offset = 1

    def __init__(self, head: Any):
        cfg = head.config
        self.graph, self.params = nnx.split(head)
        self.aux_layers: tuple[int, ...] = cfg.aux_layer_ids
        self.num_layers: int = cfg.num_layers
        self.num_kv_heads: int = cfg.layer.num_kv_heads
        self.kv_width: int = cfg.layer.kv_width
        self.aux_width: int = cfg.aux_width
        self.vocab_size: int = cfg.vocab_size
        self.draft_vocab_size: int = cfg.draft_vocab_size
        self.narrows: bool = getattr(head, "narrows", False)
        self.mask_token_id: int | None = getattr(cfg, "mask_token_id", None)
        self.full_vocabulary = cfg.draft_vocab_size == cfg.vocab_size
        self.dtype: jnp.dtype = head.embedding[...].dtype

    def bind(self, params: Any) -> Any:
        return nnx.merge(self.graph, params)

    def fuse(self, net: FeatureHead, aux_BNA: jax.Array) -> jax.Array:
        return net.fuse(aux_BNA)

    def forward(
        self,
        net: FeatureHead,
        tokens_BN: jax.Array,
        feature_BNE: jax.Array | None,
        positions_BN: jax.Array,
        attend: Attend,
    ) -> jax.Array:
        assert feature_BNE is not None
        return net(tokens_BN, feature_BNE, positions_BN, attend)

    def logits(self, net: FeatureHead, hidden_BNE: jax.Array) -> jax.Array:
        return net.logits(hidden_BNE)

    def mask_feature(self, net: Any) -> jax.Array:
        """The feature of a P-EAGLE head's placeholders, [E]."""
        return net.fuse(net.mask_hidden[...][None, None, :])[0, 0]

    def target_ids(self, net: Any) -> jax.Array | None:
        return None if self.full_vocabulary else net.target_ids[...]


class DraftModelCore(Trained):
    """A small language model with the target's vocabulary (Leviathan et al. 2023)."""

    offset = 0
    aux_layers: tuple[int, ...] = ()
    aux_width = 0

    def __init__(self, model: TargetModel):
        cfg = model.config
        self.graph, self.params = nnx.split(model)
        self.num_layers, self.num_kv_heads, self.kv_width = cfg.num_layers, cfg.num_kv_heads, cfg.kv_width
        self.vocab_size = self.draft_vocab_size = cfg.vocab_size
        self.dtype: jnp.dtype = model.embedding[...].dtype
        self.narrows = model.narrows

    def bind(self, params: Any) -> TargetModel:
        return nnx.merge(self.graph, params)

    def fuse(self, net: TargetModel, aux_BNA: jax.Array) -> None:
        return None

    def forward(
        self,
        net: TargetModel,
        tokens_BN: jax.Array,
        feature_BNE: jax.Array | None,
        positions_BN: jax.Array,
        attend: Attend,
    ) -> jax.Array:
        return net(tokens_BN, positions_BN, attend)[0]

    def logits(self, net: TargetModel, hidden_BNE: jax.Array) -> jax.Array:
        return net.logits(hidden_BNE)

    def target_ids(self, net: TargetModel) -> None:
        return None
