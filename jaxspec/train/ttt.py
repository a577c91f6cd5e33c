"""The training-time test: an EAGLE-3 head unrolled over its own outputs, at every position at once.

Owns the arithmetic (Li et al. 2025, section 3) and nothing of losses or data.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.speculation.drafters.eagle3_head import Eagle3Head


def training_time_test(head: Eagle3Head, aux_BTA: jax.Array, tokens_BT: jax.Array, steps: int) -> list[jax.Array]:
    """What the head says when it drafts `steps` tokens from every position, the text given as its drafts.

    In step i, position n holds the embedding of token n + 1 + i, the hidden state that step
    i - 1 left at n (step 0: the fused auxiliary states of n), and the rotary position n + i.
    It sees the step-0 keys up to n, as a draft cache of true features would hold them, and
    its own keys of the steps since.

    Returns:
      float32 logits [B, T - steps, Vd] of each step; those of step i at n predict token n + 2 + i.
    """
    batch, length = tokens_BT.shape
    count = length - steps
    feature_BNE = head.fuse(aux_BTA[:, :count])
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def attend(_layer: int, q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array) -> jax.Array:
        keys.append(k_BNGC)
        values.append(v_BNGC)
        return unrolled_attention(q_BNHC, keys, values)

    logits = []
    for i in range(steps):
        positions_BN = jnp.broadcast_to(jnp.arange(i, count + i)[None, :], (batch, count))
        hidden_BNE = head(tokens_BT[:, i + 1 : i + 1 + count], feature_BNE, positions_BN, attend)
        logits.append(head.logits(hidden_BNE))
        feature_BNE = hidden_BNE
    return logits


def unrolled_attention(q_BNHC: jax.Array, keys: list[jax.Array], values: list[jax.Array]) -> jax.Array:
    """One softmax over the causal block of the first keys and, for each later [B, N, G, C], its diagonal."""
    batch, count, heads, channels = q_BNHC.shape
    groups = keys[0].shape[2]
    q_BNGRC = q_BNHC.reshape(batch, count, groups, heads // groups, channels) * jnp.asarray(
        channels**-0.5, q_BNHC.dtype
    )
    block_BGRNM = jnp.einsum("bngrc,bmgc->bgrnm", q_BNGRC, keys[0]).astype(jnp.float32)
    causal = jnp.tril(jnp.ones((count, count), bool))[None, None, None]
    scores = [jnp.where(causal, block_BGRNM, -jnp.inf)]
    scores += [jnp.einsum("bngrc,bngc->bgrn", q_BNGRC, k).astype(jnp.float32)[..., None] for k in keys[1:]]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BNHC.dtype)
    out_BNGRC = jnp.einsum("bgrnm,bmgc->bngrc", weights[..., :count], values[0])
    for j, v_BNGC in enumerate(values[1:]):
        own_BNGR = jnp.moveaxis(weights[..., count + j], 3, 1)
        out_BNGRC = out_BNGRC + own_BNGR[..., None] * v_BNGC[:, :, :, None]
    return out_BNGRC.reshape(batch, count, heads, channels)
