"""The multi-token prediction module: a whole decoder layer over (next token, the target's last hidden state).

Owns geometry, parameters and arithmetic (DeepSeek-V3, section 2.2; Qwen3-Next has the same shape). Alignment is
EAGLE-3's: the pair (feature of position p, token at p + 1) has rotary position p and predicts the token at p + 2.
The feature is the target's hidden state after its final norm; while drafting, the module's own normed output
(published for Qwen3-Next; for DeepSeek's checkpoints what transformers does, where it matters from the second draft).
Embedding and output layer are the target's, unless a checkpoint brings others.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Attend, ModelConfig
from jaxspec.models.experts import mlp
from jaxspec.models.latent import attention
from jaxspec.models.layers import DecoderLayer, Linear, RMSNorm, output_logits
from jaxspec.models.rope import rotary_tables
from jaxspec.models.sharded import take_rows


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """Geometry of an MTP module.

    Attributes:
      layer: its decoder layer in the terms of models.layers (num_layers 1); width and vocabulary are the target's.
      target_layers: decoder layers of the target.
    """

    layer: ModelConfig
    target_layers: int

    def __post_init__(self) -> None:
        if self.layer.num_layers != 1:
            raise ValueError(f"an MTP module has one decoder layer, got num_layers {self.layer.num_layers}")

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The target's stream after its final norm."""
        return (self.target_layers + 1,)

    @property
    def aux_width(self) -> int:
        return self.layer.hidden_size

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.layer.vocab_size


class MtpHead(nnx.Module):
    """The module's parameters. With rngs None they are placeholders that a checkpoint fills.

    Attributes:
      embedding: [V, E] token embeddings: the target's (Shared) or its own.
      lm_head: the output layer: the target's (Shared kernel) or its own; None where it is tied to `embedding`.
      fc: joins the normed embedding (first) and the normed feature: eh_proj, input_proj or fc in checkpoints.
    """

    def __init__(
        self,
        cfg: MtpConfig,
        embedding: nnx.Variable,
        lm_head: Linear | None,
        *,
        dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        self.config = cfg
        width, eps = cfg.layer.hidden_size, cfg.layer.rms_norm_eps
        self.embedding = embedding
        self.embedding_norm = RMSNorm(width, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, eps, dtype=dtype)
        self.fc = Linear(2 * width, width, dtype=dtype, rngs=rngs)
        self.layer = DecoderLayer(cfg.layer, dtype=dtype, rngs=rngs, mlp=mlp, attn=attention)
        self.norm = RMSNorm(width, eps, dtype=dtype)
        self.lm_head = lm_head

    def fuse(self, aux_BNA: jax.Array) -> jax.Array:
        """The target's last hidden states as they are, [B, N, E]."""
        return aux_BNA

    def embed(self, tokens_BN: jax.Array) -> jax.Array:
        """Token embeddings, [B, N, E]."""
        return take_rows(self.embedding, tokens_BN)

    def __call__(
        self, tokens_BN: jax.Array, feature_BNE: jax.Array, positions_BN: jax.Array, attend: Attend
    ) -> jax.Array:
        """One step: the next features [B, N, E], already normed; arguments as in Eagle3Head."""
        layer = self.config.layer
        rope = rotary_tables(layer, positions_BN)
        both = [self.embedding_norm(self.embed(tokens_BN)), self.hidden_norm(feature_BNE)]
        hidden_BNE = self.layer(self.fc(jnp.concatenate(both, axis=-1)), rope, attend, 0)
        return self.norm(hidden_BNE)

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        """Float32 logits over the target's vocabulary, [B, N, V]."""
        return output_logits(hidden_BNE, self.lm_head, self.embedding)
