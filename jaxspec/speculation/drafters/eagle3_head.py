"""The EAGLE-3 head: a small transformer that continues the target's hidden states.

Owns the head's geometry, parameters and arithmetic (Li et al. 2025, EAGLE-3; the fields of
EAGLE-3.1, of P-EAGLE and of `speculators` included). Must not know caches, trees, checkpoints or training:
attention goes through the caller's `Attend`, as in the target.

Alignment: the pair (feature of position p, token at p + 1) has rotary position p and predicts the
token at p + 2. Features of verified positions come from `fuse`; while drafting, the hidden state
that the head returned is the next feature.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Attend, ModelConfig, RopeScaling, answered
from jaxspec.models.layers import MLP, Attention, DecoderLayer, LayerRunner, Linear, RMSNorm, product
from jaxspec.models.rope import rotary_tables
from jaxspec.models.sharded import take_rows


class Buffer(nnx.Variable):
    """An array that belongs to a module but is never trained."""


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Geometry of an EAGLE-3 head.

    Attributes:
      num_layers: decoder layers; those after the first are plain ones of the head's own width.
      hidden_size: the head's width; may be narrower than the target's.
      target_hidden_size: width of each auxiliary state.
      num_aux: auxiliary states that are fused (usually 3).
      vocab_size: the target's vocabulary, which the head's embedding covers.
      draft_vocab_size: tokens that the head can propose, at most vocab_size.
      norm_before_residual: the residual starts from the normed feature.
      norm_before_fc: one RMSNorm over the concatenated states before fc.
      fc_norm: one RMSNorm for each auxiliary state before fc (EAGLE-3.1; excludes norm_before_fc).
      norm_output: the normed hidden state is fed back (EAGLE-3.1).
      aux_layer_ids: layers whose INPUT is an auxiliary state; the target's num_layers names the
        stream before its final norm.
      attention_bias: biases on q, k, v and the output projection. qk_norm: Qwen3's norms.
      max_position_embeddings: longest context that the head was trained for, in tokens.
      sliding_window, sliding_layers: of its layers, as ModelConfig's.
      mask_token_id: makes it a P-EAGLE head, which drafts all positions in one pass: drafted positions hold this
        token and a learned feature in place of the auxiliary states. None: drafts token by token.

    Raises:
      ValueError: values that contradict each other; the message names both.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    num_aux: int = 3
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    num_layers: int = 1
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "target_hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "vocab_size", "draft_vocab_size", "num_aux", "num_layers", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"Eagle3Config.{name} must be at least 1, got {getattr(self, name)}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"Eagle3Config.draft_vocab_size must be at most vocab_size {self.vocab_size}, "
                f"got {self.draft_vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Eagle3Config.num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"Eagle3Config.head_dim must be even for rotary embeddings, got {self.head_dim}")
        if len(self.aux_layer_ids) != self.num_aux:
            raise ValueError(
                f"Eagle3Config.aux_layer_ids must name num_aux = {self.num_aux} layers, got {self.aux_layer_ids}"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"Eagle3Config.mask_token_id must lie in [0, vocab_size {self.vocab_size}), got {self.mask_token_id}"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("Eagle3Config.fc_norm excludes norm_before_fc, got fc_norm True and norm_before_fc True")

    @property
    def aux_width(self) -> int:
        """Channels of the concatenated auxiliary states."""
        return self.num_aux * self.target_hidden_size

    @property
    def layer(self) -> ModelConfig:
        """The decoder layers in the terms of models.layers."""
        return ModelConfig(
            family="eagle3",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            attention_bias=self.attention_bias,
            output_bias=self.attention_bias,
            qk_norm=self.qk_norm,
            max_position_embeddings=self.max_position_embeddings,
            sliding_window=self.sliding_window,
            sliding_layers=self.sliding_layers,
        )


class Eagle3Head(nnx.Module):
    """The head's parameters. With rngs None they are placeholders that a checkpoint fills.

    Attributes:
      embedding: [V, E] token embeddings at the head's width.
      target_ids: [Vd] int32 buffer, the target's id of each draft id, ascending.
      layers: the plain layers after the first.
      few_rows: how its layers run where rows are few; None: as they always do.
      mask_hidden: [num_aux * target_hidden_size], P-EAGLE's stand-in for auxiliary states; None elsewhere.
    """

    narrows = True

    def __init__(self, cfg: Eagle3Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs | None = None):
        self.config = cfg
        self.few_rows: LayerRunner | None = None
        layer, wide = cfg.layer, cfg.aux_width
        norm = functools.partial(RMSNorm, eps=cfg.rms_norm_eps, dtype=dtype)
        # A linear map of one-hot tokens, so its kernel is the table.
        self.embedding = Linear(cfg.vocab_size, cfg.hidden_size, dtype=dtype, rngs=rngs).kernel
        self.fc = Linear(wide, cfg.hidden_size, dtype=dtype, rngs=rngs)
        self.fc_in_norm = norm(wide) if cfg.norm_before_fc else None
        self.fc_norms = nnx.List([norm(cfg.target_hidden_size) for _ in range(cfg.num_aux)]) if cfg.fc_norm else None
        self.input_norm = norm(cfg.hidden_size)
        self.hidden_norm = norm(cfg.hidden_size)
        self.attn = Attention(layer, d_in=2 * cfg.hidden_size, dtype=dtype, rngs=rngs)
        self.mlp_norm = norm(cfg.hidden_size)
        self.mlp = MLP(layer, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(layer, i, dtype=dtype, rngs=rngs) for i in range(1, cfg.num_layers)])
        self.norm = norm(cfg.hidden_size)
        self.lm_head = Linear(cfg.hidden_size, cfg.draft_vocab_size, dtype=dtype, rngs=rngs)
        self.target_ids = Buffer(jnp.arange(cfg.draft_vocab_size, dtype=jnp.int32))
        mask = None if cfg.mask_token_id is None else Linear(wide, 1, dtype=dtype, rngs=rngs).kernel
        if mask is not None:
            mask.set_value(mask.get_value()[:, 0])
        self.mask_hidden = mask

    @property
    def blocks(self) -> list[Eagle3Head | DecoderLayer]:
        """Decoder layers: the first, whose attention reads the token's embedding too, is the head itself."""
        return [self, *self.layers]

    def fuse(self, aux_BNA: jax.Array) -> jax.Array:
        """The target's auxiliary states [B, N, num_aux * target_hidden_size] as features [B, N, E]."""
        if self.fc_in_norm is not None:
            aux_BNA = self.fc_in_norm(aux_BNA)
        if self.fc_norms is not None:
            chunks = jnp.split(aux_BNA, self.config.num_aux, axis=-1)
            aux_BNA = jnp.concatenate([f(x) for f, x in zip(self.fc_norms, chunks, strict=True)], axis=-1)
        return self.fc(aux_BNA)

    def embed(self, tokens_BN: jax.Array) -> jax.Array:
        """Token embeddings at the head's width, [B, N, E]."""
        return take_rows(self.embedding, tokens_BN)

    def __call__(
        self, tokens_BN: jax.Array, feature_BNE: jax.Array, positions_BN: jax.Array, attend: Attend
    ) -> jax.Array:
        """One step of the head.

        Args:
          tokens_BN: the token after each feature's position.
          feature_BNE: from `fuse`, or a previous call's result while drafting.
          positions_BN: rotary positions, those of the features.
          attend: the caller's attention; called once a layer.

        Returns:
          hidden_BNE, which `logits` reads and the next drafting step takes as its feature
          (un-normed, or normed with `norm_output`); of the rows that are `answered`.
        """
        cfg = self.config
        rope, few = rotary_tables(cfg.layer, positions_BN), self._few(tokens_BN.size)
        if few is None:
            normed_BNE = self.hidden_norm(feature_BNE)
            both = jnp.concatenate([self.input_norm(self.embed(tokens_BN)), normed_BNE], axis=-1)
        else:
            table_VE = self.embedding[...]
            both = few.norms([self.input_norm, self.hidden_norm], [table_VE, feature_BNE], tokens_BN)
            normed_BNE = both[..., cfg.hidden_size :]
        residual_BNE = normed_BNE if cfg.norm_before_residual else feature_BNE
        if few is not None:
            *_, hidden_BNE, out_BNE = few.blocks(self.blocks, self.norm, residual_BNE, [rope], attend, both)
            return out_BNE if cfg.norm_output else hidden_BNE
        out_BNE = self.attn(both, rope, attend, 0)
        hidden_BNE = answered(attend, 0, residual_BNE)
        if not hidden_BNE.size:
            return hidden_BNE
        hidden_BNE = hidden_BNE + out_BNE
        hidden_BNE = hidden_BNE + self.mlp(self.mlp_norm(hidden_BNE))
        for i, layer in enumerate(self.layers, start=1):
            hidden_BNE = layer(hidden_BNE, rope, attend, i)
        return self.norm(hidden_BNE) if cfg.norm_output else hidden_BNE

    def _few(self, rows: int) -> LayerRunner | None:
        """How layers run that have so many rows, if not as they always do."""
        return self.few_rows if self.few_rows is not None and rows <= self.few_rows.most else None

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        """Float32 logits over the draft vocabulary, [B, N, Vd], of what `__call__` returned."""
        if not self.config.norm_output:
            few = self._few(math.prod(hidden_BNE.shape[:-1]))
            hidden_BNE = self.norm(hidden_BNE) if few is None else few.norms([self.norm], [hidden_BNE])
        logits_BNV = None if self.few_rows is None else self.few_rows.logits(self, hidden_BNE)
        if logits_BNV is not None:
            return logits_BNV
        return product(hidden_BNE, self.lm_head.kernel[...], jnp.dtype(jnp.float32))
