"""What a drafter would draft after every position of a text, and which of it the target would accept.

Owns the chains of each kind of drafter, computed for all positions at once, and the rules of acceptance for them.
Must not know the engine: `evaluate` compares with it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.layers import Transformer
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head
from jaxspec.speculation.drafters.medusa_head import MedusaHeads
from jaxspec.train.attention import packed_attention
from jaxspec.train.batch import Batch
from jaxspec.train.peagle import one_pass_logits
from jaxspec.train.ttt import training_time_test


def aux_layers(module: Any) -> tuple[int, ...]:
    """Streams of the target that a drafter reads; empty for draft models."""
    return () if isinstance(module, Transformer) else module.config.aux_layer_ids


def max_depth(module: Any) -> int | None:
    """The longest chain that a drafter can draft; None where nothing limits it."""
    return module.config.num_heads if isinstance(module, MedusaHeads) else None


def chain_logits(module: Any, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> list[jax.Array]:
    """Draft logits after every position, the text given as the drafts before.

    Args:
      module: any draft head, or a draft model.
      aux_BTA: the target's streams that `aux_layers` names.

    Returns:
      For each i below depth float32 [B, N, Vd] with N = T - 1 - depth: at n, for token n + 2 + i, where the target
      itself gave token n + 1.
    """
    count = batch.tokens_BT.shape[1] - 1 - depth
    cut = lambda x, start: jax.lax.slice_in_dim(x, start, start + count, axis=1)
    if isinstance(module, Transformer):
        hidden_BTE, _ = module(batch.tokens_BT, batch.positions_BT, packed_attention(batch.segments_BT))
        return [module.logits(cut(hidden_BTE, i + 1)) for i in range(depth)]
    assert aux_BTA is not None
    if isinstance(module, MedusaHeads):
        return [module.logits(cut(aux_BTA, 0), i) for i in range(depth)]
    if isinstance(module, Eagle3Head) and module.mask_hidden is not None:
        return [cut(logits, 0) for logits in one_pass_logits(module, batch, aux_BTA, depth)]
    return [cut(logits, 0) for logits in training_time_test(module, batch, aux_BTA, depth)]


def greedy_matches(logits: list[jax.Array], target_ids_V: jax.Array | None, best_BT: jax.Array) -> jax.Array:
    """Whether each draft is the target's own greedy choice, bool [B, N, D].

    Args:
      target_ids_V: the target's id of each draft id; None where the vocabularies are equal.
      best_BT: the target's choice after each token of the text.
    """
    matches = []
    for i, logits_BNV in enumerate(logits):
        choice_BN = jnp.argmax(logits_BNV, axis=-1)
        if target_ids_V is not None:
            choice_BN = target_ids_V[choice_BN]
        matches.append(choice_BN == jax.lax.slice_in_dim(best_BT, i + 1, i + 1 + choice_BN.shape[1], axis=1))
    return jnp.stack(matches, axis=-1)


def coupled_matches(
    logits: list[jax.Array], target_ids_V: jax.Array | None, target_logits_BTV: jax.Array, tokens_BT: jax.Array,
    temperature: jax.Array, key: jax.Array,
) -> jax.Array:  # fmt: skip
    """Draws whether each draft is accepted when target and drafter share their noise, bool [B, N, D].

    The text is what the target drew. With Gumbel noise in common both draw token y with probability
    1 / sum_x max(p_x / p_y, q_x / q_y) (Daliri, Musco, Suresh 2025), so the draft is y with that over p_y.
    """
    matches = []
    vocab_size = target_logits_BTV.shape[-1]
    for i, logits_BNV in enumerate(logits):
        count = logits_BNV.shape[1]
        part = lambda x, i=i, count=count: jax.lax.slice_in_dim(x, i + 1, i + 1 + count, axis=1)
        drawn_BN1 = jax.lax.slice_in_dim(tokens_BT, i + 2, i + 2 + count, axis=1)[..., None]
        p_BNV = jax.nn.log_softmax(part(target_logits_BTV) / temperature, axis=-1)
        if target_ids_V is not None:
            wide = jnp.full((*logits_BNV.shape[:2], vocab_size), -jnp.inf, jnp.float32)
            logits_BNV = wide.at[..., target_ids_V].set(logits_BNV)
        q_BNV = jax.nn.log_softmax(logits_BNV / temperature, axis=-1)
        own_p, own_q = (jnp.take_along_axis(x, drawn_BN1, axis=-1) for x in (p_BNV, q_BNV))
        ratio_BNV = jnp.maximum(p_BNV - own_p, jnp.where(jnp.isneginf(own_q), jnp.inf, q_BNV - own_q))
        accept_BN = jnp.exp(-jax.nn.logsumexp(ratio_BNV, axis=-1) - own_p[..., 0])
        matches.append(jax.random.uniform(jax.random.fold_in(key, i), accept_BN.shape) < accept_BN)
    return jnp.stack(matches, axis=-1)
