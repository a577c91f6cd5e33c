"""The training-time test: a head unrolled over its own outputs, at every position of packed rows at once.

Owns the alignment (Li et al. 2025, section 3) for every FeatureHead: EAGLE-3, EAGLE-1 and MTP modules. Must not know
losses or data.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import FULL_ATTENTION, AttentionOptions
from jaxspec.train.data.batch import Batch, ahead
from jaxspec.train.objective.attention import UnrolledAttention


def unroll(head: Any, batch: Batch, aux_BTA: jax.Array, steps: int, *, gradients: int | None = None) -> list[jax.Array]:
    """Hidden states of a head that drafts `steps` tokens from every position, the text given as its drafts.

    In step i, position n holds the embedding of token n + 1 + i, the hidden state that step i - 1 left at n (step 0:
    the fused auxiliary states of n), and n's rotary position plus i. It sees the step-0 keys of its text up to n, as a
    draft cache of true features would hold them, and its own keys of the steps since.

    Args:
      head: a FeatureHead. aux_BTA: the target's streams that it reads.
      gradients: steps that gradients pass; later ones are computed for their values only. None: all.

    Returns:
      [B, T, E] of each step, which `head.logits` reads; step i at n is about token n + 2 + i. Where that lies beyond
      n's text (see `Batch.learned_ahead`) it means nothing.
    """
    batch_size, length = batch.tokens_BT.shape
    # All rows as one: the gradient of a product contracts over one axis then, which XLA's CPU backend does 3 times
    # faster than over two. Only attention has to know rows.
    flat = lambda x: x.reshape(1, batch_size * length, *x.shape[2:])
    rows = lambda x: x.reshape(batch_size, length, *x.shape[2:])
    unrolled = UnrolledAttention(batch.segments_BT)

    def attend(
        layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions = FULL_ATTENTION
    ) -> jax.Array:
        return flat(unrolled(layer, rows(q), rows(k), rows(v), options))

    hidden_1XE, states = head.fuse(flat(aux_BTA)), []
    for i in range(steps):
        if i == gradients:
            hidden_1XE, head = jax.lax.stop_gradient(hidden_1XE), _constant(head)
            unrolled.stop_gradient()
        positions_BT = batch.positions_BT + jnp.asarray(i, batch.positions_BT.dtype)
        hidden_1XE = head(flat(ahead(batch.tokens_BT, 1 + i)), hidden_1XE, flat(positions_BT), attend)
        states.append(rows(hidden_1XE))
    return states


def _constant(head: Any) -> Any:
    graph, state = nnx.split(head)
    return nnx.merge(graph, jax.lax.stop_gradient(state))
