"""What a drafter would draft after every position of a text, and which of it the target would accept.

Owns what a chain of drafts is, computed for all positions at once, and the rules of acceptance for it; each kind's
trainer brings its chains. Must not know kinds, nor the engine: `evaluate` compares with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp

from jaxspec.drafters.kind import DrafterKind
from jaxspec.models.base import TargetModel
from jaxspec.train.data.batch import Batch
from jaxspec.train.objective.chunks import best_tokens, map_positions
from jaxspec.train.objective.ttt import unroll


@dataclasses.dataclass(frozen=True)
class Chain:
    """Drafts after every position, the text given as the drafts before.

    Attributes:
      hidden: for each draft i, [B, N, E] with N = T - 1 - D: at n, about token n + 2 + i, where the target itself gave
        token n + 1.
      logits: of the hidden states of each draft, float32 over the draft vocabulary; those of a whole batch are large.
      target_ids_V: the target's id of each draft id; None where the vocabularies are equal.
      vocab_size: of the drafts.
    """

    hidden: list[jax.Array]
    logits: list[Callable[[jax.Array], jax.Array]]
    target_ids_V: jax.Array | None
    vocab_size: int


class Trainer(Protocol):
    """A command that trains one kind of drafter or several: a module of this package."""

    def add_arguments(self, p: argparse.ArgumentParser) -> None: ...

    def main(self, args: argparse.Namespace) -> dict[str, Any]:
        """Trains, writes the drafter and returns the record that lies beside it as training.json."""
        ...

    def chain(self, module: Any, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> Chain:
        """What a module drafts on a batch; aux_BTA: the target's streams that the kind's `aux_layers` names."""
        ...


def trainer_of(kind: DrafterKind[Any]) -> Trainer:
    """The trainer of a kind.

    Raises:
      ValueError: it has none.
    """
    if kind.trainer is None:
        raise ValueError(f"a drafter of kind {kind.name!r} has no trainer, which would know what it drafts on a text")
    return cast(Trainer, importlib.import_module(kind.trainer))


def with_room(x_BTE: jax.Array, batch: Batch, depth: int, start: int = 0) -> jax.Array:
    """As many positions, from `start` on, as have a whole round after them in the batch's rows, [B, N, E]."""
    return jax.lax.slice_in_dim(x_BTE, start, start + batch.tokens_BT.shape[1] - 1 - depth, axis=1)


def head_chain(head: Any, batch: Batch, states: Sequence[jax.Array]) -> Chain:
    """The chain of a FeatureHead from its hidden states for each draft i, which at n are about token n + 2 + i."""
    cfg, depth = head.config, len(states)
    ids_V = None if cfg.draft_vocab_size == cfg.vocab_size else head.target_ids[...]
    hidden = [with_room(x, batch, depth) for x in states]
    return Chain(hidden, [head.logits] * depth, ids_V, cfg.draft_vocab_size)


def unrolled(head: Any, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> Chain:
    """The chain of a FeatureHead that drafts token by token; see Trainer.chain."""
    assert aux_BTA is not None
    return head_chain(head, batch, unroll(head, batch, aux_BTA, depth))


def greedy_matches(chain: Chain, target: TargetModel, hidden_BTE: jax.Array) -> jax.Array:
    """Whether each draft is the target's own greedy choice, bool [B, N, D].

    Args:
      hidden_BTE: the target's, after its final norm.
    """
    best_BT, matches = best_tokens(target, hidden_BTE), []
    for i, (hidden_BNE, logits) in enumerate(zip(chain.hidden, chain.logits, strict=True)):

        def part(hidden_BnE: jax.Array, best_Bn: jax.Array, logits: Any = logits) -> jax.Array:
            choice_Bn = jnp.argmax(logits(hidden_BnE), axis=-1)
            return (choice_Bn if chain.target_ids_V is None else chain.target_ids_V[choice_Bn]) == best_Bn

        best_BN = jax.lax.slice_in_dim(best_BT, i + 1, i + 1 + hidden_BNE.shape[1], axis=1)
        matches.append(map_positions(part, (hidden_BNE, best_BN), chain.vocab_size))
    return jnp.stack(matches, axis=-1)


def coupled_matches(
    chain: Chain, target: TargetModel, hidden_BTE: jax.Array, tokens_BT: jax.Array, temperature: jax.Array,
    key: jax.Array,
) -> jax.Array:  # fmt: skip
    """Draws whether each draft is accepted when target and drafter share their noise, bool [B, N, D].

    The text is what the target drew. With Gumbel noise in common both draw token y with probability
    1 / sum_x max(p_x / p_y, q_x / q_y) (Daliri, Musco, Suresh 2025), so the draft is y with that over p_y.
    """
    matches = []
    for i, (hidden_BNE, logits) in enumerate(zip(chain.hidden, chain.logits, strict=True)):

        def part(
            hidden_BnE: jax.Array, target_BnE: jax.Array, drawn_Bn: jax.Array, uniform_Bn: jax.Array,
            logits: Any = logits,
        ) -> jax.Array:  # fmt: skip
            p_BnV = jax.nn.log_softmax(target.logits(target_BnE) / temperature, axis=-1)
            own_BnV = logits(hidden_BnE)
            if chain.target_ids_V is not None:
                own_BnV = jnp.full(p_BnV.shape, -jnp.inf, jnp.float32).at[..., chain.target_ids_V].set(own_BnV)
            q_BnV = jax.nn.log_softmax(own_BnV / temperature, axis=-1)
            own_p, own_q = (jnp.take_along_axis(x, drawn_Bn[..., None], axis=-1) for x in (p_BnV, q_BnV))
            ratio_BnV = jnp.maximum(p_BnV - own_p, jnp.where(jnp.isneginf(own_q), jnp.inf, q_BnV - own_q))
            return uniform_Bn < jnp.exp(-jax.nn.logsumexp(ratio_BnV, axis=-1) - own_p[..., 0])

        count = hidden_BNE.shape[1]
        of = lambda x, start, count=count: jax.lax.slice_in_dim(x, start, start + count, axis=1)
        uniform_BN = jax.random.uniform(jax.random.fold_in(key, i), hidden_BNE.shape[:2])
        arrays = (hidden_BNE, of(hidden_BTE, i + 1), of(tokens_BT, i + 2), uniform_BN)
        matches.append(map_positions(part, arrays, 3 * target.config.vocab_size))
    return jnp.stack(matches, axis=-1)
