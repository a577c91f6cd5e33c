"""What one kind of drafter adds to training. Implementations: the modules beside it."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from jaxspec.models.base import TargetModel
from jaxspec.train.data.batch import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetStates:
    """What the frozen target computed on a batch, online or read from the cache on disk.

    Attributes:
      aux_BTA: the streams of the recipe's `aux_layers`, concatenated; None where it has none.
      hidden_BTE: hidden states after the final norm; `target.logits` makes logits of any part of them.
    """

    aux_BTA: jax.Array | None
    hidden_BTE: jax.Array


class Recipe(Protocol):
    """A kind of drafter and its settings; holds no parameters (those are the module's)."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Streams of the target that the module reads (see TargetModel)."""
        ...

    @property
    def depth(self) -> int:
        """Drafted positions that `loss` reports on."""
        ...

    def loss(
        self, module: Any, target: TargetModel, batch: Batch, states: TargetStates, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """One batch; traced inside the training step.

        Args:
          module: the trainee (nnx.Module) in the compute dtype. key: typed PRNG key of the step.

        Returns:
          (loss in nats, float32 scalar; matches bool [R, N, depth] of the first R rows, as acceptance.rounds takes
          them, against the target's own greedy choices on this text; further scalars to log).
        """
        ...
