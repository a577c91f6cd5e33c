"""From target logits to tokens: one documented order, the same for every node and for plain decoding.

Order (vLLM's): raw logits -> logit bias and the ban on stop tokens before min_tokens ->
repetition, frequency and presence penalties -> greedy rows take the argmax here ->
temperature -> min-p -> top-k -> top-p -> Gumbel-max with the request's own noise.

Noise is threefry under the key (request seed, absolute position), with the vocabulary
index and the purpose as counter: independent of batch, slot, bucket, tier, drafter and
shard. Filters are thresholds found by bisection, never a sort;
tokens that tie with the threshold are all kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import IntEnum

import jax
import jax.numpy as jnp

NEG_INF = -1e30
MAX_STOP_IDS = 40  # 32 of a request and the checkpoint's own ends


class Purpose(IntEnum):
    """What a draw is for; each purpose has its own stream at every position."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Sampling parameters and token statistics of rows (slots S in the DecodeState, or a batch B).

    Attributes:
      temperature_S: 0 marks a greedy row.
      top_k_S: 0 keeps all. top_p_S, min_p_S: 1 and 0 keep all.
      presence_S, frequency_S, repetition_S: penalties; 0, 0 and 1 change nothing.
      seed_S: uint32, the request's.
      prompt_len_S: tokens of the prompt; outputs are counted from there.
      ban_until_S: stop tokens are banned at positions below this one (min_tokens).
      stop_ids_SK: those tokens, padded with V.
      bias_SV: logit bias.
      counts_SV: occurrences of each token in the output.
      in_prompt_SV: whether the token occurs in the prompt.
    """

    temperature_S: jax.Array
    top_k_S: jax.Array
    top_p_S: jax.Array
    min_p_S: jax.Array
    presence_S: jax.Array
    frequency_S: jax.Array
    repetition_S: jax.Array
    seed_S: jax.Array
    prompt_len_S: jax.Array
    ban_until_S: jax.Array
    stop_ids_SK: jax.Array
    bias_SV: jax.Array
    counts_SV: jax.Array
    in_prompt_SV: jax.Array

    @classmethod
    def empty(cls, slots: int, vocab_size: int) -> SamplingState:
        f = lambda v: jnp.full((slots,), v, jnp.float32)
        i = lambda v: jnp.full((slots,), v, jnp.int32)
        return cls(
            f(0), i(0), f(1), f(0), f(0), f(0), f(1),
            jnp.zeros((slots,), jnp.uint32), i(0), i(0),
            jnp.full((slots, MAX_STOP_IDS), vocab_size, jnp.int32),
            jnp.zeros((slots, vocab_size), jnp.float32),
            jnp.zeros((slots, vocab_size), jnp.int32),
            jnp.zeros((slots, vocab_size), bool),
        )  # fmt: skip

    def rows(self, slot_B: jax.Array) -> SamplingState:
        """The batch's rows; a padding slot (S) reads the last one, and is ignored by the caller."""
        return jax.tree.map(lambda x: jnp.take(x, slot_B, axis=0, mode="clip"), self)


def threefry2x32(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), uint32 arrays of one shape.

    Written out instead of jax.random's, whose key handling compiles to a loop a draw on CPUs;
    kernels can repeat it word for word.
    """
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in rotations[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(r)) | (x1 >> jnp.uint32(32 - r))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def uniform_noise(seed_B: jax.Array, position_BN: jax.Array, purpose: Purpose, width: int = 1) -> jax.Array:
    """Uniform noise in (0, 1), never 0 or 1, [B, N, width] float32: counter v under key (seed, position)."""
    shape = (*position_BN.shape, width)
    spread = lambda x: jnp.broadcast_to(x.astype(jnp.uint32), shape)
    bits, _ = threefry2x32(
        spread(seed_B[:, None, None]),
        spread(position_BN[:, :, None]),
        spread(jnp.arange(width, dtype=jnp.uint32)[None, None, :]),
        jnp.full(shape, int(purpose), jnp.uint32),
    )
    mantissa = jax.lax.bitcast_convert_type((bits >> jnp.uint32(9)) | jnp.uint32(0x3F800000), jnp.float32)
    return (mantissa - 1.0) + jnp.float32(2.0**-24)


def gumbel_noise(seed_B: jax.Array, position_BN: jax.Array, vocab_size: int, purpose: Purpose) -> jax.Array:
    """Gumbel noise for the token at each absolute position, [B, N, V] float32."""
    return -jnp.log(-jnp.log(uniform_noise(seed_B, position_BN, purpose, vocab_size)))


def adjust_logits(
    logits_BNV: jax.Array, rows: SamplingState, position_BN: jax.Array, tokens_BN: jax.Array, ancestors_BNN: jax.Array
) -> jax.Array:
    """Bias, min_tokens and penalties at every node, as if the node's path had been emitted.

    Args:
      logits_BNV: raw target logits at each node.
      position_BN: absolute position of the token that each node's logits predict.
      tokens_BN: the nodes' tokens; node 0 (the root) is counted in `rows` already.
      ancestors_BNN: paths, node included.
    """
    b, n, v = logits_BNV.shape
    logits = logits_BNV + rows.bias_SV[:, None, :]
    k = rows.stop_ids_SK.shape[1]
    stop_BNK = jnp.broadcast_to(rows.stop_ids_SK[:, None, :], (b, n, k))
    banned_BN = position_BN < rows.ban_until_S[:, None]
    stop_BNK = jnp.where(banned_BN[:, :, None], stop_BNK, v)
    bi, ni = jnp.arange(b)[:, None, None], jnp.arange(n)[None, :, None]
    logits = logits.at[bi, ni, stop_BNK].set(NEG_INF, mode="drop")

    def penalise(x: jax.Array, count: jax.Array, seen: jax.Array, expand: tuple[int, ...]) -> jax.Array:
        rep, freq, pres = (p.reshape(p.shape + expand) for p in (rows.repetition_S, rows.frequency_S, rows.presence_S))
        x = jnp.where(seen, jnp.where(x > 0, x / rep, x * rep), x)
        return x - freq * count.astype(jnp.float32) - pres * (count > 0).astype(jnp.float32)

    count_BV, prompt_BV = rows.counts_SV, rows.in_prompt_SV
    base = penalise(logits, count_BV[:, None, :], (prompt_BV | (count_BV > 0))[:, None, :], (1, 1))
    if n == 1:
        return base
    # Only the tokens drafted on a node's own path have other counts than the committed text:
    # redo those entries alone instead of building [B, N, V] counts.
    drafted_BNN = ancestors_BNN & (jnp.arange(n) > 0)[None, None, :]
    same_BNN = (tokens_BN[:, :, None] == tokens_BN[:, None, :]).astype(jnp.int32)
    extra_BNM = jnp.einsum("bnk,bkm->bnm", drafted_BNN.astype(jnp.int32), same_BNN)
    token_BNM = jnp.where(drafted_BNN, jnp.broadcast_to(tokens_BN[:, None, :], (b, n, n)), v)
    count_BNM = extra_BNM + jnp.take_along_axis(count_BV, tokens_BN, axis=1)[:, None, :]
    raw_BNM = jnp.take_along_axis(logits, jnp.minimum(token_BNM, v - 1), axis=2)
    value_BNM = penalise(raw_BNM, count_BNM, count_BNM > 0, (1, 1))
    return base.at[bi, ni, token_BNM].set(value_BNM, mode="drop")


def _sortable(x: jax.Array) -> jax.Array:
    """float32 as int32 keys of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_key(test: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
    """Largest key in [low, high] for which the monotone `test` holds (it holds at low), by bisection."""

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lo, hi = carry
        # Overflow-free upper middle of two int32.
        mid = (lo >> 1) + (hi >> 1) + ((lo | hi) & 1)
        ok = test(mid)
        return jnp.where(ok, mid, lo), jnp.where(ok, hi, mid - 1)

    lo, _ = jax.lax.while_loop(lambda c: jnp.any(c[0] < c[1]), body, (low, high))
    return lo


def filter_logits(logits_BNV: jax.Array, rows: SamplingState) -> jax.Array:
    """Tempered logits with everything outside min-p, top-k and top-p at NEG_INF, [B, N, V].

    Greedy rows (temperature 0) come back untempered and unfiltered.
    """
    v = logits_BNV.shape[-1]
    greedy = rows.temperature_S == 0
    temperature = jnp.where(greedy, 1.0, rows.temperature_S)[:, None, None]
    x_BNV = logits_BNV / temperature

    def filtered(x_BNV: jax.Array) -> jax.Array:
        k = jnp.where(greedy | (rows.top_k_S <= 0), v, jnp.minimum(rows.top_k_S, v))[:, None]
        p = jnp.where(greedy, 1.0, rows.top_p_S)[:, None]
        min_p = jnp.where(greedy, 0.0, rows.min_p_S)[:, None, None]
        top = x_BNV.max(axis=-1, keepdims=True)
        x_BNV = jnp.where(x_BNV - top < jnp.log(jnp.maximum(min_p, 1e-37)), NEG_INF, x_BNV)
        key_BNV = _sortable(x_BNV)
        high, low = key_BNV.max(axis=-1), key_BNV.min(axis=-1)
        enough = lambda t: (key_BNV >= t[:, :, None]).sum(axis=-1) >= k
        kth = _largest_key(enough, jnp.where(k >= v, high, low), high)
        x_BNV = jnp.where((key_BNV < kth[:, :, None]) & (k < v)[:, :, None], NEG_INF, x_BNV)
        weight = jnp.exp(x_BNV - top)
        need = p * weight.sum(axis=-1)
        mass = lambda t: jnp.where(key_BNV >= t[:, :, None], weight, 0.0).sum(axis=-1) >= need
        cut = _largest_key(mass, jnp.where(p >= 1.0, high, low), high)
        return jnp.where((key_BNV < cut[:, :, None]) & (p < 1.0)[:, :, None], NEG_INF, x_BNV)

    any_filter = jnp.any((rows.top_k_S > 0) | (rows.top_p_S < 1.0) | (rows.min_p_S > 0.0))
    return jax.lax.cond(any_filter, filtered, lambda x: x, x_BNV)


def choose(adjusted_BNV: jax.Array, rows: SamplingState, noise_BNV: jax.Array) -> jax.Array:
    """The target's own token at every node, [B, N] int32: argmax, or Gumbel-max with the row's noise."""
    greedy = (rows.temperature_S == 0)[:, None, None]
    perturbed = filter_logits(adjusted_BNV, rows) + noise_BNV
    return jnp.argmax(jnp.where(greedy, adjusted_BNV, perturbed), axis=-1).astype(jnp.int32)


def top_logprobs(
    logits_NV: jax.Array, tokens_N: jax.Array, k: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Raw log-probabilities: (of the tokens [N], their ranks from 1 [N], top-k values [N, k], top-k ids [N, k])."""
    logprobs = jax.nn.log_softmax(logits_NV, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens_N[:, None], axis=1)
    rank = 1 + (logprobs > chosen).sum(axis=-1)
    values, ids = jax.lax.top_k(logprobs, k)
    return chosen[:, 0], rank.astype(jnp.int32), values, ids.astype(jnp.int32)
