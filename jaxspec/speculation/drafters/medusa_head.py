"""Medusa heads: each predicts one position further ahead from the target's last hidden state.

Owns geometry, parameters and arithmetic (Cai et al. 2024). Head i (from 0) at position p predicts the token at
p + 2 + i; the token at p + 1 is the target's own. Heads see nothing of each other, nor of the text since p.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.layers import Linear, product


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Geometry of a set of Medusa heads.

    Attributes:
      num_heads: tokens that can be drafted. num_layers: residual blocks a head.
      hidden_size, vocab_size, target_layers: the target's.

    Raises:
      ValueError: sizes below 1.
    """

    num_heads: int
    hidden_size: int
    vocab_size: int
    target_layers: int
    num_layers: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"MedusaConfig.{field.name} must be at least 1, got {getattr(self, field.name)}")

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The target's stream after its final norm."""
        return (self.target_layers + 1,)

    @property
    def aux_width(self) -> int:
        return self.hidden_size


class MedusaHead(nnx.Module):
    """One head: residual blocks x + SiLU(W x + b), then an output layer."""

    def __init__(self, cfg: MedusaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        width = cfg.hidden_size
        # Zero blocks pass the hidden state on: with the target's output layer a new head starts as the target.
        self.blocks = nnx.List(
            [Linear(width, width, bias=True, dtype=dtype, rngs=rngs, std=0.0) for _ in range(cfg.num_layers)]
        )
        self.lm_head = Linear(width, cfg.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(self, hidden_BNE: jax.Array) -> jax.Array:
        """Float32 logits [B, N, V]."""
        for block in self.blocks:
            hidden_BNE = hidden_BNE + jax.nn.silu(block(hidden_BNE))
        return product(hidden_BNE, self.lm_head.kernel[...], jnp.dtype(jnp.float32))


class MedusaHeads(nnx.Module):
    """All heads. With rngs None their parameters are placeholders that a checkpoint fills."""

    def __init__(self, cfg: MedusaConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs | None = None):
        self.config = cfg
        self.heads = nnx.List([MedusaHead(cfg, dtype=dtype, rngs=rngs) for _ in range(cfg.num_heads)])

    def logits(self, hidden_BNE: jax.Array, head: int) -> jax.Array:
        """Float32 logits [B, N, V] of one head, from the target's hidden states after its final norm."""
        return self.heads[head](hidden_BNE)
