"""Work on many positions a part at a time: logits over a whole vocabulary are larger than everything else together.

Owns the cutting, and the cross entropies of students that have the target's vocabulary. Must not know kinds of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspec.models.base import TargetModel
from jaxspec.models.layers import product
from jaxspec.models.quantised import Quantised
from jaxspec.train.objective.loss import soft_cross_entropy

#: Elements that a part may hold: 256 MiB of float32.
LIMIT = 2**26


def map_positions(fn: Callable[..., Any], arrays: tuple[jax.Array, ...], width: int) -> Any:
    """fn(*arrays) for arrays [B, N, ...], computed on parts of the positions and again in the backward pass.

    Args:
      fn: positions of its results (a pytree of arrays [B, n, ...]) depend on the same positions of its arguments
        only. What else it reads (parameters) it closes over; their gradients are summed over the parts in float32.
      width: elements that fn holds at once for each row and position, usually the vocabulary's size.
    """
    batch, count = arrays[0].shape[:2]
    size = max(1, min(count, LIMIT // (batch * width)))
    parts = -(-count // size)
    if parts == 1:
        return jax.checkpoint(fn)(*arrays)
    size = -(-count // parts)

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, parts * size - count)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, parts, size, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, parts * size, *x.shape[3:])[:, :count]

    cuts = tuple(cut(x) for x in arrays)
    pure, closed = jax.closure_convert(fn, *(x[0] for x in cuts))
    wide = [c.astype(jnp.float32) if c.dtype == jnp.bfloat16 else c for c in closed]

    def one(*part: jax.Array) -> Any:
        return pure(*part, *(w.astype(c.dtype) for w, c in zip(wide, closed, strict=True)))

    return jax.tree.map(join, jax.lax.map(lambda part: jax.checkpoint(one)(*part), cuts))


def best_tokens(target: TargetModel, hidden_BTE: jax.Array) -> jax.Array:
    """The target's choice after each token, int32 [B, T], from its hidden states after the final norm."""
    part = lambda hidden: jnp.argmax(target.logits(hidden), axis=-1).astype(jnp.int32)
    return map_positions(part, (hidden_BTE,), target.config.vocab_size)


def draft_vocabulary_logits(target: TargetModel, head: Any) -> Callable[[jax.Array], jax.Array]:
    """The target's output layer, cut down to the tokens that a head can draft."""
    if head.config.draft_vocab_size == head.config.vocab_size:
        return target.logits
    ids_V = head.target_ids[...]
    if target.lm_head is not None:
        kernel_EV, cut = target.lm_head.kernel[...], lambda x: jnp.take(x, ids_V, axis=1)
        kernel_EV = kernel_EV.along_outputs(cut) if isinstance(kernel_EV, Quantised) else cut(kernel_EV)
    else:
        kernel_EV = jnp.take(target.embedding[...], ids_V, axis=0).T
    return lambda hidden_BNE: product(hidden_BNE, kernel_EV, jnp.dtype(jnp.float32))


def text_cross_entropy(
    logits: Callable[[jax.Array], jax.Array], hidden_BNE: jax.Array, labels_BN: jax.Array, best_BN: jax.Array,
    width: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Cross entropy to tokens of a text.

    Args:
      logits: of the student's hidden states, `width` of them a position. best_BN: see `best_tokens`.

    Returns:
      (nats a position, float32 [B, N]; whether best_BN is the student's choice as well, bool [B, N]).
    """

    def part(hidden: jax.Array, labels: jax.Array, best: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = logits(hidden)
        return optax.softmax_cross_entropy_with_integer_labels(own, labels), _chooses(own, best)

    return map_positions(part, (hidden_BNE, labels_BN, best_BN), width)


def mixed_cross_entropy(
    logits: Callable[[jax.Array], jax.Array], target: TargetModel, hidden_BNE: jax.Array, target_hidden_BNE: jax.Array,
    labels_BN: jax.Array, hard_share: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """hard_share of the cross entropy to tokens of a text, the rest to the target's distributions.

    Args:
      logits: of the student's hidden states, over the target's vocabulary.
      target_hidden_BNE: where the target says the token that the student's hidden state is about.

    Returns:
      (nats a position, float32 [B, N]; whether both choose the same token, bool [B, N]).
    """

    def part(hidden: jax.Array, target_hidden: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        own, theirs = logits(hidden), target.logits(target_hidden)
        loss = (1.0 - hard_share) * soft_cross_entropy(own, jax.nn.softmax(theirs, axis=-1))
        if hard_share:
            loss = loss + hard_share * optax.softmax_cross_entropy_with_integer_labels(own, labels)
        return loss, _chooses(own, jnp.argmax(theirs, axis=-1))

    return map_positions(part, (hidden_BNE, target_hidden_BNE, labels_BN), 2 * target.config.vocab_size)


def _chooses(logits_BNV: jax.Array, token_BN: jax.Array) -> jax.Array:
    own_BN = jnp.take_along_axis(logits_BNV, token_BN[..., None], axis=-1)[..., 0]
    return own_BN >= jnp.max(logits_BNV, axis=-1)
