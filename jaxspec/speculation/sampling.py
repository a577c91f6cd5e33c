"""What sampling parameters do to logits before a token is drawn from them, the same at every node.

Order (vLLM's; a grammar's mask comes after all that could undo it): raw logits -> logit bias
and the ban on stop tokens before min_tokens -> repetition, frequency and presence penalties ->
tokens that the row's grammar refuses (all here) -> greedy rows take the argmax ->
temperature -> min-p -> top-k -> top-p -> Gumbel-max with the request's own noise (all in
pallas_kernels.rejection_sampling).
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Annotated

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.reference import NEG_INF, SamplingRows

MAX_STOP_IDS = 40  # 32 of a request and the checkpoint's own ends
INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Number:
    """A sampling parameter that is one number a row.

    Attributes:
      name: SamplingParams', where it is one of the caller's.
      neutral: what changes nothing.
    """

    name: str
    dtype: type = jnp.float32
    neutral: float = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Sampling parameters and token statistics of rows (slots S in the DecodeState, or a batch B).

    A further number takes a line here, by which it is uploaded and admitted too, and its use below.

    Attributes:
      temperature_S: 0 marks a greedy row.
      top_k_S: 0 keeps all. top_p_S, min_p_S: 1 and 0 keep all.
      presence_S, frequency_S, repetition_S: penalties; 0, 0 and 1 change nothing.
      seed_S: uint32, the request's.
      prompt_len_S: tokens of the prompt; outputs are counted from there.
      ban_until_S: stop tokens are banned at positions below this one (min_tokens), and end nothing there.
      ends_at_S: tokens of prompt and outputs at which the text is over.
      eos_ends_S: whether the checkpoint's own end tokens end it.
      num_stops_S: how many of the stop tokens do, which are the request's own and come first.
      stop_ids_SK: the stop tokens, padded with V.
      bias_SV: logit bias.
      counts_SV: occurrences of each token in the output.
      in_prompt_SV: whether the token occurs in the prompt.
    """

    temperature_S: Annotated[jax.Array, Number("temperature")]
    top_k_S: Annotated[jax.Array, Number("top_k", jnp.int32)]
    top_p_S: Annotated[jax.Array, Number("top_p", neutral=1)]
    min_p_S: Annotated[jax.Array, Number("min_p")]
    presence_S: Annotated[jax.Array, Number("presence_penalty")]
    frequency_S: Annotated[jax.Array, Number("frequency_penalty")]
    repetition_S: Annotated[jax.Array, Number("repetition_penalty", neutral=1)]
    seed_S: Annotated[jax.Array, Number("seed", jnp.uint32)]
    prompt_len_S: Annotated[jax.Array, Number("prompt_len", jnp.int32)]
    ban_until_S: Annotated[jax.Array, Number("ban_until", jnp.int32)]
    ends_at_S: Annotated[jax.Array, Number("ends_at", jnp.int32, INT32_MAX)]
    eos_ends_S: Annotated[jax.Array, Number("eos_ends", jnp.int32)]
    num_stops_S: Annotated[jax.Array, Number("num_stops", jnp.int32)]
    stop_ids_SK: jax.Array
    bias_SV: jax.Array
    counts_SV: jax.Array
    in_prompt_SV: jax.Array

    @classmethod
    def empty(cls, slots: int, vocab_size: int) -> SamplingState:
        return cls(
            **{name: jnp.full((slots,), one.neutral, one.dtype) for name, one in cls.numbers().items()},
            stop_ids_SK=jnp.full((slots, MAX_STOP_IDS), vocab_size, jnp.int32),
            bias_SV=jnp.zeros((slots, vocab_size), jnp.float32),
            counts_SV=jnp.zeros((slots, vocab_size), jnp.int32),
            in_prompt_SV=jnp.zeros((slots, vocab_size), bool),
        )

    @classmethod
    @functools.cache
    def numbers(cls) -> dict[str, Number]:
        """The fields that are one number a row, in order."""
        hints = typing.get_type_hints(cls, include_extras=True)
        return {name: hint.__metadata__[0] for name, hint in hints.items() if typing.get_origin(hint) is Annotated}

    def rows(self, slot_B: jax.Array) -> SamplingState:
        """The batch's rows; a padding slot (S) reads the last one, and is ignored by the caller."""
        return jax.tree.map(lambda x: jnp.take(x, slot_B, axis=0, mode="clip"), self)

    @property
    def draws(self) -> SamplingRows:
        """What a draw from adjusted logits depends on."""
        return SamplingRows(self.temperature_S, self.top_k_S, self.top_p_S, self.min_p_S, self.seed_S)


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
    n, v = logits_BNV.shape[1:]
    path_BNM = None if n == 1 else drafted_paths(tokens_BN, ancestors_BNN, v)
    return adjust_along(logits_BNV, rows, position_BN, path_BNM)


def drafted_paths(tokens_BN: jax.Array, ancestors_BNN: jax.Array, vocab_size: int) -> jax.Array:
    """The drafted tokens on each node's path, its own included, [B, N, N]; vocab_size elsewhere, and for the root."""
    b, n = tokens_BN.shape
    drafted_BNN = ancestors_BNN & (jnp.arange(n) > 0)[None, None, :]
    return jnp.where(drafted_BNN, jnp.broadcast_to(tokens_BN[:, None, :], (b, n, n)), vocab_size)


def adjust_along(
    logits_BNV: jax.Array, rows: SamplingState, position_BN: jax.Array, path_BNM: jax.Array | None
) -> jax.Array:
    """`adjust_logits` of nodes whose drafted tokens are known: path_BNM, V for none; None: roots alone."""
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
    if path_BNM is None:
        return base
    # Only the tokens drafted on a node's own path have other counts than the committed text:
    # redo those entries alone instead of building [B, N, V] counts.
    m = path_BNM.shape[2]
    inside_BNM = jnp.minimum(path_BNM, v - 1)
    extra_BNM = (path_BNM[:, :, :, None] == path_BNM[:, :, None, :]).astype(jnp.int32).sum(axis=2)
    committed_BX = jnp.take_along_axis(count_BV, inside_BNM.reshape(b, n * m), axis=1)
    count_BNM = extra_BNM + committed_BX.reshape(b, n, m)
    raw_BNM = jnp.take_along_axis(logits, inside_BNM, axis=2)
    value_BNM = penalise(raw_BNM, count_BNM, count_BNM > 0, (1, 1))
    return base.at[bi, ni, path_BNM].set(value_BNM, mode="drop")


def unpack_bits(words: jax.Array, size: int) -> jax.Array:
    """Whether each of `size` tokens is in a set of bits, int32 [..., ceil(size / 32)] -> bool [..., size]."""
    place = jnp.arange(32, dtype=jnp.int32).reshape((1,) * words.ndim + (32,))
    bits = (words[..., None] >> place) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :size].astype(bool)


def restrict_logits(logits_BNV: jax.Array, allowed_BNW: jax.Array) -> jax.Array:
    """Logits with all tokens but the allowed ones (a set of bits a node) far below any; NaN stays NaN."""
    allowed_BNV = unpack_bits(allowed_BNW, logits_BNV.shape[-1])
    return logits_BNV + jnp.where(allowed_BNV, 0.0, NEG_INF).astype(logits_BNV.dtype)


def top_logprobs(
    logits_NV: jax.Array, tokens_N: jax.Array, k: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Raw log-probabilities: (of the tokens [N], their ranks from 1 [N], top-k values [N, k], top-k ids [N, k])."""
    logprobs = jax.nn.log_softmax(logits_NV, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens_N[:, None], axis=1)
    rank = 1 + (logprobs > chosen).sum(axis=-1)
    values, ids = jax.lax.top_k(logprobs, k)
    return chosen[:, 0], rank.astype(jnp.int32), values, ids.astype(jnp.int32)
