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

from jaxspec.models.base import Attend
from jaxspec.models.experts import mlp
from jaxspec.models.latent import attention
from jaxspec.models.layers import DecoderLayer, Linear, RMSNorm
from jaxspec.models.rope import rotary_tables
from jaxspec.speculation.drafters.last_state_head import LastStateConfig, LastStateHead


@dataclasses.dataclass(frozen=True)
class MtpConfig(LastStateConfig):
    """Geometry of an MTP module, whose decoder layer is one."""

    def __post_init__(self) -> None:
        if self.layer.num_layers != 1:
            raise ValueError(f"an MTP module has one decoder layer, got num_layers {self.layer.num_layers}")


class MtpHead(LastStateHead):
    """The module's parameters. With rngs None they are placeholders that a checkpoint fills.

    Attributes:
      fc: joins the normed embedding (first) and the normed feature: eh_proj, input_proj or fc in checkpoints.
    """

    narrows = True

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
        self.few_rows = None
        width, eps = cfg.layer.hidden_size, cfg.layer.rms_norm_eps
        self.embedding = embedding
        self.embedding_norm = RMSNorm(width, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, eps, dtype=dtype)
        self.fc = Linear(2 * width, width, dtype=dtype, rngs=rngs)
        self.layer = DecoderLayer(cfg.layer, dtype=dtype, rngs=rngs, mlp=mlp, attn=attention)
        self.norm = RMSNorm(width, eps, dtype=dtype)
        self.lm_head = lm_head

    @property
    def blocks(self) -> list[DecoderLayer]:
        """Its decoder layer."""
        return [self.layer]

    def __call__(
        self, tokens_BN: jax.Array, feature_BNE: jax.Array, positions_BN: jax.Array, attend: Attend
    ) -> jax.Array:
        """One step: the next features [B, N, E], already normed; arguments as in Eagle3Head."""
        layer = self.config.layer
        rope = rotary_tables(layer, positions_BN)
        both = [self.embedding_norm(self.embed(tokens_BN)), self.hidden_norm(feature_BNE)]
        hidden_BNE = self.fc(jnp.concatenate(both, axis=-1))
        if self.few_rows is not None and tokens_BN.size <= self.few_rows.most:
            return self.few_rows.blocks(self.blocks, self.norm, hidden_BNE, [rope], attend)[-1]
        hidden_BNE = self.layer(hidden_BNE, rope, attend, 0)
        return self.norm(hidden_BNE)
