"""What draft heads and draft models are trained towards, and how acceptance is read off a batch.

Pure functions of logits; must not know modules, optimisers or data.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def soft_cross_entropy(logits_BNV: jax.Array, target_probs_BNV: jax.Array) -> jax.Array:
    """-sum(target_probs * log softmax(logits)), nats a position, [B, N]. target_probs sum to one."""
    normaliser_BN = jax.nn.logsumexp(logits_BNV, axis=-1)
    return normaliser_BN - jnp.sum(target_probs_BNV * logits_BNV, axis=-1)


def on_draft_vocabulary(target_logits_BNV: jax.Array, target_ids_V: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The target's distribution restricted to a draft vocabulary and renormalised.

    Args:
      target_logits_BNV: over the target's vocabulary.
      target_ids_V: the target's id of each draft id, [Vd].

    Returns:
      (target_probs [B, N, Vd], inside [B, N]: the target's most probable token can be drafted).
    """
    vocab_size = target_logits_BNV.shape[-1]
    if target_ids_V.shape[0] == vocab_size:
        return jax.nn.softmax(target_logits_BNV, axis=-1), jnp.ones(target_logits_BNV.shape[:-1], bool)
    drafted_V = jnp.zeros((vocab_size,), bool).at[target_ids_V].set(True)
    inside_BN = drafted_V[jnp.argmax(target_logits_BNV, axis=-1)]
    return jax.nn.softmax(jnp.take(target_logits_BNV, target_ids_V, axis=-1), axis=-1), inside_BN


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of the values where mask is true; 0 where it never is."""
    weight = mask.astype(values.dtype)
    return jnp.sum(values * weight) / jnp.maximum(jnp.sum(weight), 1)


def acceptance_metrics(matches: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Acceptance of a greedy chain, estimated from every position of a batch.

    Args:
      matches: bool [B, N] for each draft position: the draft's first choice was right.

    Returns:
      accept_1, accept_2, ...: acceptance at a draft position among the chains that got there, and
      length: 1 + the sum of their running products (tokens a round, the bonus included).
    """
    metrics, alive, reached = {}, jnp.ones(matches[0].shape, bool), jnp.float32(1.0)
    length = jnp.float32(1.0)
    for i, match in enumerate(matches):
        alive = alive & match
        survived = jnp.mean(alive.astype(jnp.float32))
        metrics[f"accept_{i + 1}"] = survived / jnp.maximum(reached, 1e-9)
        length, reached = length + survived, survived
    return {**metrics, "length": length}
