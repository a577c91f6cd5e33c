"""Sequence-level unlikelihood (Welleck et al. 2020, section 5.2): a model unlearns what its own greedy text repeats.

Small models that decode greedily fall into loops, which no loss on texts of others ever shows them. Owns the greedy
text and what counts as a repetition. Must not know where prompts come from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.models.base import FULL_ATTENTION, Attend, AttentionOptions, TargetModel
from jaxspec.models.layers import causal_attention
from jaxspec.train.data.batch import Batch

#: Tokens of a prompt, and of the greedy text that follows it.
PROMPT, OWN = 64, 192
#: Tokens of what counts as repeated where the text has it a second time.
NGRAM = 4
#: The least improbability whose logarithm is taken.
_LEAST = 1e-4


def of_own_text(
    model: TargetModel, fixed: TargetModel, batch: Batch, key: jax.Array, *, prompt: int, own: int
) -> tuple[jax.Array, jax.Array]:
    """Unlikelihood of what greedy continuations of random pieces of the batch repeat.

    Args:
      model: whose gradient is wanted. fixed: the same weights as constants; it writes the text.
      batch: rows [B, T], T at least `prompt`; each gives one prompt.
      prompt, own: tokens of the prompt, and of the text that follows.

    Returns:
      (mean over the texts' tokens, nats; share of them that end a repeated n-gram).
    """
    tokens_BT = continued(fixed, _prompts(batch.tokens_BT, key, prompt, model.config.bos_token_id), own)
    positions_BT = jnp.broadcast_to(jnp.arange(prompt + own)[None], tokens_BT.shape)
    hidden_BTE, _ = model(tokens_BT, positions_BT, causal_attention)
    logits_BNV = model.logits(hidden_BTE[:, prompt - 1 : -1])
    nats_BNV = jax.nn.log_softmax(logits_BNV, axis=-1)
    chosen_BN = jnp.take_along_axis(nats_BNV, tokens_BT[:, prompt:, None], axis=-1)[..., 0]
    ended_BT = jnp.isin(tokens_BT, jnp.asarray(model.config.eos_token_ids, tokens_BT.dtype))
    over_BN = jnp.cumsum(ended_BT[:, prompt - 1 : -1], axis=1) > 0  # nobody reads on there
    again_BN = repeated(tokens_BT)[:, prompt:] & ~over_BN
    unlikely_BN = -jnp.log(jnp.maximum(1.0 - jnp.exp(chosen_BN), _LEAST))
    return jnp.mean(jnp.where(again_BN, unlikely_BN, 0.0)), jnp.mean(again_BN, dtype=jnp.float32)


def _prompts(tokens_BT: jax.Array, key: jax.Array, count: int, bos: int | None) -> jax.Array:
    """Random pieces of the rows as users would send them, [B, count]: with BOS, half of them a text's beginning."""
    rows, length = tokens_BT.shape
    where, which = jax.random.split(key)
    first_B = jax.random.randint(where, (rows,), 0, max(1, length - count + 1))
    if bos is not None:
        begin_B = jnp.argmax(tokens_BT == bos, axis=1).astype(first_B.dtype)
        whole_B = jnp.any(tokens_BT == bos, axis=1) & (begin_B <= length - count)
        first_B = jnp.where(whole_B & jax.random.bernoulli(which, 0.5, (rows,)), begin_B, first_B)
    at_BP = jnp.minimum(first_B[:, None] + jnp.arange(count)[None], length - 1)
    prompts_BP = jnp.take_along_axis(tokens_BT, at_BP, axis=1)
    return prompts_BP if bos is None else prompts_BP.at[:, 0].set(bos)


def repeated(tokens_BT: jax.Array, ngram: int = NGRAM) -> jax.Array:
    """Which tokens end an n-gram that their row had before, bool [B, T]."""
    count = tokens_BT.shape[1]
    same_BTT = jnp.ones((tokens_BT.shape[0], count, count), bool)
    for back in range(ngram):
        shifted_BT = jnp.pad(tokens_BT, ((0, 0), (back, 0)), constant_values=-1)[:, :count]
        same_BTT &= shifted_BT[:, :, None] == shifted_BT[:, None, :]
    earlier_TT = jnp.arange(count)[:, None] > jnp.arange(count)[None, :]
    whole_T = jnp.arange(count) >= ngram - 1
    return jnp.any(same_BTT & earlier_TT[None] & whole_T[None, None, :], axis=-1)


def continued(model: TargetModel, prompts_BP: jax.Array, count: int) -> jax.Array:
    """Prompts and `count` tokens of greedy text behind each, int32 [B, P + count]; it goes on after ends of text."""
    prompt = prompts_BP.shape[1]
    length = prompt + count
    cache: dict[int, tuple[jax.Array, jax.Array]] = {}
    positions_BP = jnp.broadcast_to(jnp.arange(prompt)[None], prompts_BP.shape)
    hidden_BPE, _ = model(prompts_BP, positions_BP, _kept(cache, length))
    best = lambda hidden_BNE: jnp.argmax(model.logits(hidden_BNE[:, -1:]), axis=-1).astype(prompts_BP.dtype)

    def step(
        carry: tuple[jax.Array, dict[int, tuple[jax.Array, jax.Array]]], position: jax.Array
    ) -> tuple[tuple[jax.Array, dict[int, tuple[jax.Array, jax.Array]]], jax.Array]:
        token_B1, cache = carry
        cache = dict(cache)
        at_B1 = jnp.broadcast_to(position[None, None], token_B1.shape)
        hidden_B1E, _ = model(token_B1, at_B1, _cached(cache, position))
        return (best(hidden_B1E), cache), token_B1[:, 0]

    _, own_NB = jax.lax.scan(step, (best(hidden_BPE), cache), jnp.arange(prompt, length))
    return jnp.concatenate([prompts_BP, own_NB.T], axis=1)


def _kept(cache: dict[int, tuple[jax.Array, jax.Array]], length: int) -> Attend:
    """Causal attention that leaves its keys and values in `cache`, with room for `length` tokens."""

    def attend(
        layer: int, q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array, options: AttentionOptions = FULL_ATTENTION
    ) -> jax.Array:
        room = [(0, 0), (0, length - k_BNGC.shape[1]), (0, 0), (0, 0)]
        cache[layer] = jnp.pad(k_BNGC, room), jnp.pad(v_BNGC, room)
        return causal_attention(layer, q_BNHC, k_BNGC, v_BNGC, options)

    return attend


def _cached(cache: dict[int, tuple[jax.Array, jax.Array]], position: jax.Array) -> Attend:
    """Attention of the token at `position` to those before it and itself."""

    def attend(
        layer: int, q_B1HC: jax.Array, k_B1GC: jax.Array, v_B1GC: jax.Array, options: AttentionOptions = FULL_ATTENTION
    ) -> jax.Array:
        options.refuse("unlikelihood training", ("scale",))
        put = lambda table, new: jax.lax.dynamic_update_slice_in_dim(table, new, position, 1)
        keys, values = cache[layer] = put(cache[layer][0], k_B1GC), put(cache[layer][1], v_B1GC)
        seen = (jnp.arange(keys.shape[1]) <= position)[None, None, None]
        return jax.nn.dot_product_attention(q_B1HC, keys, values, mask=seen, scale=options.scale)

    return attend
