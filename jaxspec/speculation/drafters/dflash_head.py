"""The DFlash network: a few decoder layers over a block of placeholders, with the target's states as their context.

Owns geometry, parameters and arithmetic (arXiv 2602.06036; the fields of `speculators` included). Must not know caches,
checkpoints or training: attention goes through the caller's `Attend`, which holds the context.

A block is the last token that was emitted (its anchor) and placeholders after it; the layers see it at the positions
that its tokens will have. Their context is what the target made of the positions before the anchor: `context` fuses its
states once for all layers, and each layer's own key and value maps make `entries` of it. Nothing else of a text enters
the network, so entries of committed positions are final, and those of a block are thrown away with it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import FULL_ATTENTION, Attend, AttentionOptions, ModelConfig, Split
from jaxspec.models.layers import (
    MLP,
    Linear,
    RMSNorm,
    output_logits,
)
from jaxspec.models.rope import Tables, apply_rope, rotary_tables
from jaxspec.models.sharded import take_rows
from jaxspec.speculation.drafters.eagle3_head import Buffer


@dataclasses.dataclass(frozen=True)
class DflashConfig:
    """Geometry of a DFlash head.

    Attributes:
      layer: its decoder layers in the terms of models.layers, `num_layers` of them; width and vocabulary are the
        target's.
      aux_layer_ids: layers of the target whose INPUT is read; its num_layers names the stream before its final norm.
      block_size: placeholders of a block and the anchor.
      mask_token_id: what a placeholder holds.
      draft_vocab_size: tokens that the head can propose, at most the vocabulary's.
      sample_from_anchor: the anchor's own place predicts the token after it, each placeholder the one after its own.
        Without, each placeholder predicts the token of its own place, and the anchor's place nothing.
      sliding_layers: layers that see `sliding_window` positions only, and of a block what lies before them, unless
        `sliding_non_causal`. Full layers see all of both.
      window_from_anchor: the window of every place is counted as its anchor's is, and holds the anchor besides
        (`speculators`); without, a place at position p sees positions above p - window.

    Raises:
      ValueError: values that contradict each other; the message names both.
    """

    layer: ModelConfig
    aux_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    draft_vocab_size: int
    sample_from_anchor: bool = False
    sliding_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_non_causal: bool = False
    window_from_anchor: bool = False

    def __post_init__(self) -> None:
        layer, vocab = self.layer, self.layer.vocab_size
        if not layer.qk_norm or layer.mlp_bias:
            raise ValueError(
                f"DflashConfig.layer must have qk_norm and no mlp_bias, as Qwen3's layers, got qk_norm {layer.qk_norm} "
                f"and mlp_bias {layer.mlp_bias}"
            )
        for name, least in (("block_size", 1 if self.sample_from_anchor else 2), ("draft_vocab_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"DflashConfig.{name} must be at least {least}, got {getattr(self, name)}")
        if not self.aux_layer_ids:
            raise ValueError("DflashConfig.aux_layer_ids must name at least one layer, got none")
        if self.draft_vocab_size > vocab:
            raise ValueError(
                f"DflashConfig.draft_vocab_size must be at most vocab_size {vocab}, got {self.draft_vocab_size}"
            )
        if not 0 <= self.mask_token_id < vocab:
            raise ValueError(
                f"DflashConfig.mask_token_id must lie in [0, vocab_size {vocab}), got {self.mask_token_id}"
            )
        if not all(0 <= i < layer.num_layers for i in self.sliding_layers):
            raise ValueError(
                f"DflashConfig.sliding_layers must lie in [0, num_layers {layer.num_layers}), got {self.sliding_layers}"
            )
        if bool(self.sliding_layers) != (self.sliding_window is not None) or (self.sliding_window or 1) < 1:
            raise ValueError(
                f"DflashConfig.sliding_window must be at least 1 where sliding_layers are, else None, "
                f"got {self.sliding_window} with sliding_layers {self.sliding_layers}"
            )

    @property
    def drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def aux_width(self) -> int:
        """Channels of the states that are fused."""
        return len(self.aux_layer_ids) * self.layer.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def num_layers(self) -> int:
        return self.layer.num_layers

    def options(self, layer: int) -> AttentionOptions:
        """What a layer asks of attention."""
        return AttentionOptions(window=self.sliding_window) if layer in self.sliding_layers else FULL_ATTENTION

    def window(self, offset_N: jax.Array) -> tuple[int, jax.Array]:
        """A sliding layer's window, and from which offset to the anchor each place of a block counts it.

        A place sees the context's positions above anchor + offset - window.

        Args:
          offset_N: of the places to the anchor.
        """
        assert self.sliding_window is not None
        if self.window_from_anchor:
            return self.sliding_window + 1, jnp.zeros_like(offset_N)
        return self.sliding_window, offset_N

    def block_mask(self, options: AttentionOptions) -> jax.Array:
        """Which places of a block each one sees, bool [block_size, block_size]."""
        full = jnp.ones((self.block_size, self.block_size), bool)
        return full if options.window is None or self.sliding_non_causal else jnp.tril(full)


class BlockAttention(nnx.Module):
    """Attention of a block: keys and values of the context and of the block pass through the same maps.

    Attributes:
      shards: groups of columns that kv is stored in, [k v] of one shard after the other (`layouts.tensor_parallel`).
    """

    def __init__(self, cfg: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        self.shards = 1
        self.num_heads, self.num_kv_heads, self.head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        wide, narrow = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        linear = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.q = linear(cfg.hidden_size, wide, bias=cfg.attention_bias)
        self.kv = linear(cfg.hidden_size, 2 * narrow, bias=cfg.attention_bias)
        self.out = linear(wide, cfg.hidden_size, bias=cfg.output_bias, std=0.02 / (2 * cfg.num_layers) ** 0.5)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps, dtype=dtype)

    def entries(self, x_BNE: jax.Array, rope: Tables) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, N, G, C] of the context or of a block, rotary positions applied."""
        b, n, _ = x_BNE.shape
        t, g, c = self.shards, self.num_kv_heads, self.head_dim
        both = self.kv(x_BNE).reshape(b, n, t, 2, g // t, c)
        k_BNGC, v_BNGC = both[:, :, :, 0].reshape(b, n, g, c), both[:, :, :, 1].reshape(b, n, g, c)
        return apply_rope(self.k_norm(k_BNGC), rope), v_BNGC

    def __call__(
        self, x_BNE: jax.Array, rope: Tables, attend: Attend, layer: int, options: AttentionOptions
    ) -> jax.Array:
        b, n, _ = x_BNE.shape
        q_BNHC = self.q(x_BNE).reshape(b, n, self.num_heads, self.head_dim)
        q_BNHC = apply_rope(self.q_norm(q_BNHC), rope)
        out_BNHC = attend(layer, q_BNHC, *self.entries(x_BNE, rope), options)
        return self.out(out_BNHC.reshape(b, n, -1))

    def splits(self, shards: int) -> list[Split]:
        """See `layouts.tensor_parallel`."""
        if self.num_kv_heads % shards:
            return []
        self.shards = shards
        value = self.num_kv_heads * self.head_dim
        return [*self.q.columns(), *self.kv.columns((value, value)), *self.out.rows()]


class BlockLayer(nnx.Module):
    """Pre-norm attention and MLP over a block."""

    def __init__(self, cfg: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        self.attn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, dtype=dtype)
        self.attn = BlockAttention(cfg, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(cfg, dtype=dtype, rngs=rngs)

    def __call__(
        self, x_BNE: jax.Array, rope: Tables, attend: Attend, layer: int, options: AttentionOptions
    ) -> jax.Array:
        x_BNE = x_BNE + self.attn(self.attn_norm(x_BNE), rope, attend, layer, options)
        return x_BNE + self.mlp(self.mlp_norm(x_BNE))


class DflashHead(nnx.Module):
    """The head's parameters. With rngs None they are placeholders that a checkpoint fills.

    Attributes:
      embedding: [V, E] the target's token embeddings (Shared), or the head's own.
      lm_head: the target's output layer (Shared kernel), rows of it, or the head's own, [E, Vd]; None where it is tied
        to the target's embedding.
      target_ids: [Vd] int32 buffer, the target's id of each draft id.
    """

    def __init__(
        self, cfg: DflashConfig, embedding: nnx.Variable, lm_head: Linear | None, *,
        dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs | None = None,
    ):  # fmt: skip
        self.config = cfg
        layer = cfg.layer
        norm = functools.partial(RMSNorm, layer.hidden_size, layer.rms_norm_eps, dtype=dtype)
        self.embedding = embedding
        self.fc = Linear(cfg.aux_width, layer.hidden_size, dtype=dtype, rngs=rngs)
        self.hidden_norm = norm()
        self.layers = nnx.List([self._layer(dtype, rngs) for _ in range(layer.num_layers)])
        self.norm = norm()
        self.lm_head = lm_head
        self.target_ids = Buffer(jnp.arange(cfg.draft_vocab_size, dtype=jnp.int32))

    def _layer(self, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> BlockLayer:
        return BlockLayer(self.config.layer, dtype=dtype, rngs=rngs)

    def context(self, aux_BNA: jax.Array) -> jax.Array:
        """The target's states [B, N, aux_width] as what every layer's keys and values are made of, [B, N, E]."""
        return self.hidden_norm(self.fc(aux_BNA.astype(self.norm.weight[...].dtype)))

    def entries(self, aux_BNA: jax.Array, positions_BN: jax.Array) -> jax.Array:
        """Keys and values of the context at its positions, [layers, B, N, G, 2C]."""
        context_BNE, rope = self.context(aux_BNA), self._rope(positions_BN)
        return jnp.stack([jnp.concatenate(layer.attn.entries(context_BNE, rope), axis=-1) for layer in self.layers])

    def block(self, anchor_B: jax.Array) -> jax.Array:
        """The tokens of blocks, [B, block_size]."""
        masks = jnp.full((*anchor_B.shape, self.config.block_size - 1), self.config.mask_token_id, anchor_B.dtype)
        return jnp.concatenate([anchor_B[..., None], masks], axis=-1)

    def __call__(self, tokens_BN: jax.Array, positions_BN: jax.Array, attend: Attend) -> jax.Array:
        """Hidden states [B, N, E] of the places of blocks, which `logits` reads.

        Args:
          tokens_BN: as `block` makes them. positions_BN: that the tokens will have.
          attend: the caller's; called once a layer with the layer's `options`.
        """
        rope = self._rope(positions_BN)
        hidden_BNE = take_rows(self.embedding, tokens_BN)
        hidden_BNE = hidden_BNE.astype(self.norm.weight[...].dtype)
        for i, layer in enumerate(self.layers):
            hidden_BNE = layer(hidden_BNE, rope, attend, i, self.config.options(i))
        return self.norm(hidden_BNE)

    def predicting(self, x_BN: jax.Array) -> jax.Array:
        """Of the places of a block [.., block_size, ...] (axis 1) those that predict, [B, drafts, ...]."""
        return x_BN if self.config.sample_from_anchor else x_BN[:, 1:]

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        """Float32 logits over the draft vocabulary, [B, N, Vd]."""
        return output_logits(hidden_BNE, self.lm_head, self.embedding)

    def _rope(self, positions_BN: jax.Array) -> Tables:
        return rotary_tables(self.config.layer, positions_BN)
