"""Coupled verification of logits whose vocabulary is split over devices, inside `jax.shard_map`.

Each device filters, draws and ranks its own part, and what crosses is a few words a row: the best token of each part,
and the counts and masses by which thresholds are found. Noise belongs to tokens, so that parts draw what one device
would. The kept sets, hence tokens, are those of `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise_at
from pallas_kernels.rejection_sampling.reference import (
    NEG_INF,
    RejectionSamplingArgs,
    SamplingRows,
    Verdict,
    follow,
    from_sortable,
    mass_scale,
    sortable,
)

#: Thresholds that are tried at once: a search costs an exchange for each factor of so many.
_TRIED = 8


def rejection_sampling(args: RejectionSamplingArgs, axis_name: Hashable) -> Verdict:
    """See api.rejection_sampling; args.logits_BNV is this device's part of the vocabulary, in its rank's place.

    Raises:
      ValueError: rejection mode, whose residuals need more than this exchanges.
    """
    if args.drafts is not None:
        raise ValueError("a split vocabulary is verified in coupled mode only, got draft_probs")
    choice_BN, ok_BN = choose(args, axis_name)
    return follow(choice_BN, ok_BN, args.tokens_BN, args.parents_BN, args.depths_BN, depth=args.depth, chain=args.chain)


def choose(args: RejectionSamplingArgs, axis_name: Hashable) -> tuple[jax.Array, jax.Array]:
    """(the target's own token at every node, int32; whether the logits that it is from are usable), [B, N] each."""
    b, n, v = args.logits_BNV.shape
    first = lax.axis_index(axis_name) * v
    logits_BNv = args.logits_BNV.astype(jnp.float32)
    score_BNv = logits_BNv
    if not args.greedy:
        token_v = first + jnp.arange(v, dtype=jnp.int32)
        position_BN = args.position_B[:, None] + args.depths_BN
        noise = gumbel_noise_at(jnp.repeat(args.sampling.seed_B, n), position_BN.reshape(-1), token_v, Purpose.TARGET)
        kept_BNv = filter_logits(logits_BNv, args.sampling, axis_name)
        greedy = (args.sampling.temperature_B == 0)[:, None, None]
        score_BNv = jnp.where(greedy, logits_BNv, kept_BNv + noise.reshape(b, n, v))
    own_BN = jnp.argmax(score_BNv, axis=-1).astype(jnp.int32)
    at = lambda x: jnp.take_along_axis(x, own_BN[:, :, None], axis=2)[:, :, 0]
    best_BN, ok_BN = at(score_BNv), jnp.isfinite(at(logits_BNv))
    best_BN = jnp.where(jnp.isnan(best_BN), jnp.inf, best_BN)  # as argmax, which points at a NaN where there is one
    words = jnp.stack([lax.bitcast_convert_type(best_BN, jnp.int32), first + own_BN, ok_BN.astype(jnp.int32)])
    best, token, ok = jnp.moveaxis(lax.all_gather(words, axis_name), 1, 0)  # [shards, B, N] each
    # The first of equals: parts are in the order of their tokens.
    winner = jnp.argmax(lax.bitcast_convert_type(best, jnp.float32), axis=0)[None]
    of = lambda x: jnp.take_along_axis(x, winner, axis=0)[0]
    return of(token), of(ok) > 0


def filter_logits(logits_BNv: jax.Array, sampling: SamplingRows, axis_name: Hashable) -> jax.Array:
    """`reference.filter_logits` of a part."""
    temperature_B, top_k_B, top_p_B, min_p_B, _ = sampling
    v = logits_BNv.shape[-1] * lax.axis_size(axis_name)
    greedy = temperature_B == 0
    inverse = 1.0 / jnp.where(greedy, 1.0, temperature_B)
    x_BNv = logits_BNv * inverse[:, None, None]

    def filtered(x_BNv: jax.Array) -> jax.Array:
        k = jnp.where(greedy | (top_k_B <= 0), v, jnp.minimum(top_k_B, v))[:, None, None]
        p = jnp.where(greedy, 1.0, top_p_B)[:, None, None]
        min_p = jnp.where(greedy, 0.0, min_p_B)[:, None, None]
        ends = jnp.concatenate([x_BNv.max(axis=-1, keepdims=True), -x_BNv.min(axis=-1, keepdims=True)], axis=-1)
        ends = lax.pmax(ends, axis_name)
        top, low = ends[..., :1], -ends[..., 1:]
        low = jnp.maximum(low, top + jnp.log(min_p))

        def summed(value: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
            each = lambda t: value(t).sum(axis=-1, keepdims=True)
            tried = lambda thresholds: jnp.concatenate([each(t) for t in jnp.split(thresholds, _TRIED, -1)], axis=-1)
            return lambda thresholds: lax.psum(tried(thresholds), axis_name)

        count = summed(lambda t: (x_BNv >= t).astype(jnp.int32))
        cut = _largest(lambda t: count(t) >= k, low, jnp.where(k >= v, low, top))
        weight = jnp.where(x_BNv >= cut, jnp.exp(x_BNv - top), 0.0)
        scale = mass_scale(lax.psum(weight.sum(axis=-1, keepdims=True), axis_name))
        mass_BNv = (weight * scale + 0.5).astype(jnp.int32)
        total = lax.psum(mass_BNv.sum(axis=-1, keepdims=True), axis_name)
        need = jnp.ceil(p * total.astype(jnp.float32)).astype(jnp.int32)
        mass = summed(lambda t: jnp.where(x_BNv >= t, mass_BNv, 0))
        cut = _largest(lambda t: mass(t) >= need, cut, jnp.where(p >= 1.0, cut, top))
        return jnp.where(x_BNv < cut, NEG_INF, x_BNv)

    any_filter = jnp.any((top_k_B > 0) | (top_p_B < 1.0) | (min_p_B > 0.0))
    return lax.cond(any_filter, filtered, lambda x: x, x_BNv)


def _largest(test: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
    """Largest float32 threshold in [low, high] that passes the monotone `test` (low does), [..., 1].

    The test judges _TRIED thresholds at once, [..., _TRIED].
    """
    step = jnp.arange(1, _TRIED + 1, dtype=jnp.uint32)

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lo, hi = carry
        span = lax.bitcast_convert_type(hi - lo, jnp.uint32)  # of two int32, modulo 2 ** 32
        each, rest = span // _TRIED, span % _TRIED
        # [..., _TRIED] keys from above lo to hi itself; where there are fewer, the last ones repeat.
        offset = each * step.reshape((1,) * (lo.ndim - 1) + (_TRIED,))
        offset = offset + jnp.minimum(step.reshape((1,) * (lo.ndim - 1) + (_TRIED,)), rest)
        tried = lo + lax.bitcast_convert_type(offset, jnp.int32)
        passed = test(from_sortable(tried))
        new_lo = jnp.max(jnp.where(passed, tried, lo), axis=-1, keepdims=True)
        new_hi = jnp.min(jnp.where(passed, hi, tried - 1), axis=-1, keepdims=True)
        going = lo < hi
        return jnp.where(going, new_lo, lo), jnp.where(going, new_hi, hi)

    lo, _ = lax.while_loop(lambda c: jnp.any(c[0] < c[1]), body, (sortable(low), sortable(high)))
    return from_sortable(lo)
