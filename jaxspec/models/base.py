"""What every target model offers, and nothing about any family.

Owns ModelConfig and the two protocols that the rest of the engine sees: `Attend`
(attention over whatever cache the caller keeps) and `TargetModel`. Must not know
families, caches, drafters or schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

#: attend(layer, q_BNHC, k_BNGC, v_BNGC) -> out_BNHC. The callee owns the cache and the mask;
#: keys arrive with their rotary embedding applied.
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of the rotary embedding (Llama 3.1's rule, or "linear").

    Attributes:
      rope_type: "llama3" or "linear".
      factor: how much longer than the original context.
      low_freq_factor, high_freq_factor: edges of the interpolated band ("llama3" only).
      original_max_position_embeddings: the context of pre-training, in tokens.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry of a decoder-only transformer, in Hugging Face's terms.

    Attributes:
      family: key in jaxspec.models.registry ("llama", "qwen2", "qwen3").
      num_layers: decoder layers.
      head_dim: channels a head (may differ from hidden_size / num_heads).
      attention_bias: biases on q, k and v (Qwen2; Llama with `attention_bias`).
      output_bias: bias on the attention's output projection (Llama with `attention_bias`).
      qk_norm: RMSNorm over each head's channels of q and k (Qwen3).
      max_position_embeddings: longest context in tokens.
      eos_token_ids: tokens that end a text; empty if the checkpoint names none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose input feeds an EAGLE-3 head by default: [2, N//2, N-3] (reference: SafeAILab/EAGLE)."""
        n = self.num_layers
        return tuple(min(max(i, 0), n - 1) for i in (2, n // 2, n - 3))


class TargetModel(Protocol):
    """A causal language model whose attention is supplied by the caller.

    Implementations are flax.nnx modules; the engine splits them once into a static graph
    and a flat state, and calls them inside its own jitted round.
    """

    config: ModelConfig

    def __call__(
        self, tokens_BN: jax.Array, positions_BN: jax.Array, attend: Attend, aux_layers: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns (hidden_BNE after the final norm, aux_BNA or None).

        aux_BNA concatenates the residual streams that enter `aux_layers`; the index
        `num_layers` names the stream before the final norm, `num_layers + 1` the one after it.
        """
        ...

    def embed(self, tokens_BN: jax.Array) -> jax.Array:
        """Token embeddings, [B, N, E]."""
        ...

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        """Float32 logits [B, N, V] of hidden states that passed the final norm."""
        ...


#: A family's reader: (Hugging Face config.json) -> ModelConfig.
ConfigReader = Callable[[dict[str, Any]], ModelConfig]
