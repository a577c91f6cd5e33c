"""What heads share that read the target's last hidden state and write with its tables: EAGLE-1 and MTP modules.

Owns their sizes as a drafter asks for them, and the tables. Must not know what stands between the two.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from jaxspec.models.base import ModelConfig
from jaxspec.models.layers import LayerRunner, Linear, output_logits
from jaxspec.models.sharded import take_rows


@dataclasses.dataclass(frozen=True)
class LastStateConfig:
    """Geometry of such a head.

    Attributes:
      layer: its decoder layers in the terms of models.layers, `num_layers` of them; width and vocabulary are the
        target's.
      target_layers: decoder layers of the target.
    """

    layer: ModelConfig
    target_layers: int

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The target's stream after its final norm."""
        return (self.target_layers + 1,)

    @property
    def aux_width(self) -> int:
        return self.layer.hidden_size

    @property
    def num_layers(self) -> int:
        return self.layer.num_layers

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.layer.vocab_size


class LastStateHead(nnx.Module):
    """The tables of such a head.

    Attributes:
      embedding: [V, E] token embeddings: the target's (Shared) or its own.
      lm_head: the output layer: the target's (Shared kernel) or its own; None where it is tied to `embedding`.
      few_rows: how its layers run where rows are few; None: as they always do.
    """

    embedding: nnx.Variable
    lm_head: Linear | None
    few_rows: LayerRunner | None

    def fuse(self, aux_BNA: jax.Array) -> jax.Array:
        """The target's last hidden states as they are, [B, N, E]."""
        return aux_BNA

    def embed(self, tokens_BN: jax.Array) -> jax.Array:
        """Token embeddings, [B, N, E]."""
        return take_rows(self.embedding, tokens_BN)

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        """Float32 logits over the target's vocabulary, [B, N, V]."""
        logits_BNV = None if self.few_rows is None else self.few_rows.logits(self, hidden_BNE)
        return output_logits(hidden_BNE, self.lm_head, self.embedding) if logits_BNV is None else logits_BNV
