"""The EAGLE-1 and EAGLE-2 head: a small transformer over (next token, the target's last hidden state).

Owns geometry, parameters and arithmetic (Li et al. 2024; the reference is SafeAILab/EAGLE). EAGLE-2 is the same head
with a dynamic tree. Alignment is EAGLE-3's: the pair (feature of position p, token at p + 1) has rotary position p
and predicts the token at p + 2. The feature is the target's hidden state after its final norm, which the head learns
to predict; the target's own output layer turns it into logits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Attend
from jaxspec.models.layers import DecoderLayer, Linear
from jaxspec.models.rope import rotary_tables
from jaxspec.speculation.drafters.last_state_head import LastStateConfig, LastStateHead


@dataclasses.dataclass(frozen=True)
class Eagle1Config(LastStateConfig):
    """Geometry of an EAGLE-1 head.

    Attributes:
      bias: whether fc has one.
      first_norm: whether the first layer norms its input (published heads do not).
    """

    bias: bool = True
    first_norm: bool = False


class Eagle1Head(LastStateHead):
    """The head's parameters. With rngs None they are placeholders that a checkpoint fills."""

    narrows = True

    def __init__(
        self,
        cfg: Eagle1Config,
        embedding: nnx.Variable,
        lm_head: Linear | None,
        *,
        dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        self.config = cfg
        self.few_rows = None
        width = cfg.layer.hidden_size
        self.embedding = embedding
        self.fc = Linear(2 * width, width, bias=cfg.bias, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [
                DecoderLayer(cfg.layer, i, attn_norm=i > 0 or cfg.first_norm, dtype=dtype, rngs=rngs)
                for i in range(cfg.num_layers)
            ]
        )
        self.lm_head = lm_head

    @property
    def blocks(self) -> list[DecoderLayer]:
        """Its decoder layers."""
        return list(self.layers)

    def __call__(
        self, tokens_BN: jax.Array, feature_BNE: jax.Array, positions_BN: jax.Array, attend: Attend
    ) -> jax.Array:
        """One step of the head: the predicted next features [B, N, E]; arguments as in Eagle3Head."""
        layer = self.config.layer
        rope = rotary_tables(layer, positions_BN)
        hidden_BNE = self.fc(jnp.concatenate([self.embed(tokens_BN), feature_BNE], axis=-1))
        if self.few_rows is not None and tokens_BN.size <= self.few_rows.most:
            first, last = self.layers[0], self.layers[-1]
            read = hidden_BNE if first.attn_norm is None else None
            assert last.mlp_norm is not None  # any norm will do: none reads what the last one leaves
            return self.few_rows.blocks(self.blocks, last.mlp_norm, hidden_BNE, [rope], attend, read)[-2]
        for i, block in enumerate(self.layers):
            hidden_BNE = block(hidden_BNE, rope, attend, i)
        return hidden_BNE
