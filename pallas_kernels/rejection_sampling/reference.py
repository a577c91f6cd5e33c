"""Tree rejection sampling in plain XLA: the specification, and the path that CPUs run.

Owns what a kept token, a drawn token and an accepted child are. Knows neither drafters nor
how logits came to be.

Coupled mode draws the target's own token at each node of the path and accepts the child
that holds it. Rejection mode takes children that were drawn i.i.d. from `draft_probs` of
their parent. After k of them were rejected the residual is (p - a_k q)+, with a_0 = 0,
Z_0 = 1, a_{k+1} = a_k + Z_k and Z_k its sum, and child x is accepted with probability
(p(x) - a_k q(x)) / (Z_k q(x)), clipped to [0, 1] (one child a node: Leviathan, Kalman and
Matias 2023; several: the multi-round rule of SpecInfer and SpecTr in one scalar).
The token after the path is Gumbel-max over the residual; where nothing was rejected that is
the coupled mode's draw.

Filters keep the tokens at or above one threshold a row, found by bisection, never by
sorting: tokens that tie with it are all kept. The probability mass of top-p is counted in
integers, so that the kept set depends neither on the order of summation nor on shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise, uniform_noise

NEG_INF = -1e30
#: A residual with less mass than this is rounding: the last token is drawn from the target instead.
NO_RESIDUAL = 1e-9
#: The integer masses of a row sum to less than 2**(MASS_BITS + 1).
MASS_BITS = 29


class SamplingRows(NamedTuple):
    """How each request samples.

    Attributes:
      temperature_B: float32; 0 marks a greedy row.
      top_k_B: int32; 0 keeps all.
      top_p_B, min_p_B: float32; 1 and 0 keep all.
      seed_B: uint32, the request's.
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    seed_B: jax.Array


class Verdict(NamedTuple):
    """What the target made of a draft.

    Attributes:
      path_BD: node at each depth 0..depth of the accepted path; beyond num_accepted unspecified but in range.
      num_accepted_B: accepted drafts, without the token after them.
      next_token_B: the token after the path: the bonus, or the correction.
      finite_B: False where a node of the path holds a NaN or has no finite maximum. The path below
        such a node and the tokens are then unspecified but in range.
    """

    path_BD: jax.Array
    num_accepted_B: jax.Array
    next_token_B: jax.Array
    finite_B: jax.Array


def sortable(x: jax.Array) -> jax.Array:
    """float32 as int32 keys of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def from_sortable(key: jax.Array) -> jax.Array:
    """The inverse of `sortable`."""
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key), jnp.float32)


def midpoint(low: jax.Array, high: jax.Array) -> jax.Array:
    """The upper middle of two int32, without overflow."""
    return (low >> 1) + (high >> 1) + ((low | high) & 1)


def mass_scale(total: jax.Array) -> jax.Array:
    """The power of two that turns weights exp(x - max) of sum `total` (at least 1) into integer masses.

    A weight's mass is int32(weight * scale + 0.5): 2**MASS_BITS stands for the power of two below the total.
    """
    exponent = (jax.lax.bitcast_convert_type(total, jnp.int32) >> 23) - 127
    return jax.lax.bitcast_convert_type((127 + MASS_BITS - exponent) << 23, jnp.float32)


def _largest(test: Callable[[jax.Array], tuple[jax.Array, jax.Array]], low: jax.Array, high: jax.Array) -> jax.Array:
    """Largest threshold in [low, high] that passes the monotone `test` (low does), by bisection over float32.

    The test returns (passes, ends the search: every other threshold with this outcome keeps the same tokens).
    """

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lo, hi = carry
        mid = midpoint(lo, hi)
        ok, exact = test(from_sortable(mid))
        return jnp.where(ok, mid, lo), jnp.where(exact, mid, jnp.where(ok, hi, mid - 1))

    lo, _ = jax.lax.while_loop(lambda c: jnp.any(c[0] < c[1]), body, (sortable(low), sortable(high)))
    return from_sortable(lo)


def filter_logits(
    logits_BNV: jax.Array, temperature_B: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array
) -> jax.Array:
    """Tempered logits with everything outside min-p, top-k and top-p at NEG_INF, [B, N, V] float32.

    x = logits * (1 / temperature). min-p keeps x >= max + log(min_p), top-k everything at or above the
    k-th largest, and top-p the fewest of those that hold p of their mass. Greedy rows come back as they are.
    """
    v = logits_BNV.shape[-1]
    greedy = temperature_B == 0
    inverse = 1.0 / jnp.where(greedy, 1.0, temperature_B)
    x_BNV = logits_BNV.astype(jnp.float32) * inverse[:, None, None]

    def filtered(x_BNV: jax.Array) -> jax.Array:
        k = jnp.where(greedy | (top_k_B <= 0), v, jnp.minimum(top_k_B, v))[:, None, None]
        p = jnp.where(greedy, 1.0, top_p_B)[:, None, None]
        min_p = jnp.where(greedy, 0.0, min_p_B)[:, None, None]
        top = x_BNV.max(axis=-1, keepdims=True)
        low = jnp.maximum(x_BNV.min(axis=-1, keepdims=True), top + jnp.log(min_p))

        def enough(threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
            count = (x_BNV >= threshold).astype(jnp.int32).sum(axis=-1, keepdims=True)
            return count >= k, count == k

        cut = _largest(enough, low, jnp.where(k >= v, low, top))
        weight = jnp.where(x_BNV >= cut, jnp.exp(x_BNV - top), 0.0)
        scale = mass_scale(weight.sum(axis=-1, keepdims=True))
        mass_BNV = (weight * scale + 0.5).astype(jnp.int32)
        need = jnp.ceil(p * mass_BNV.sum(axis=-1, keepdims=True).astype(jnp.float32)).astype(jnp.int32)

        def heavy(threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
            mass = jnp.where(x_BNV >= threshold, mass_BNV, 0).sum(axis=-1, keepdims=True)
            passes = mass >= need
            return passes, jnp.zeros_like(passes)

        cut = _largest(heavy, cut, jnp.where(p >= 1.0, cut, top))
        return jnp.where(x_BNV < cut, NEG_INF, x_BNV)

    any_filter = jnp.any((top_k_B > 0) | (top_p_B < 1.0) | (min_p_B > 0.0))
    return jax.lax.cond(any_filter, filtered, lambda x: x, x_BNV)


def _filter(logits_BNV: jax.Array, sampling: SamplingRows) -> jax.Array:
    return filter_logits(logits_BNV, *sampling[:4])


def choose(logits_BNV: jax.Array, sampling: SamplingRows, noise_BNV: jax.Array) -> jax.Array:
    """The target's own token at every node, [B, N] int32: argmax, or Gumbel-max with the row's noise."""
    greedy = (sampling.temperature_B == 0)[:, None, None]
    perturbed = _filter(logits_BNV, sampling) + noise_BNV
    return jnp.argmax(jnp.where(greedy, logits_BNV.astype(jnp.float32), perturbed), axis=-1).astype(jnp.int32)


def rejection_sampling(
    logits_BNV: jax.Array,
    tokens_BN: jax.Array,
    parents_BN: jax.Array,
    depths_BN: jax.Array,
    sampling: SamplingRows,
    position_B: jax.Array,
    draft_probs_BXV: jax.Array | None = None,
    *,
    depth: int,
    chain: bool,
    greedy: bool = False,
    noise_BDV: jax.Array | None = None,
) -> Verdict:
    """See api.rejection_sampling.

    Args:
      noise_BDV: TARGET noise of positions position_B + 0..depth, where the caller has it already.
    """
    args = (logits_BNV, tokens_BN, parents_BN, sampling, position_B)
    if greedy:
        choice_BN = jnp.argmax(logits_BNV, axis=-1).astype(jnp.int32)
        return _follow(logits_BNV, choice_BN, tokens_BN, parents_BN, depths_BN, depth, chain)
    if draft_probs_BXV is not None and depth > 0:
        rejection = _rejection_chain if chain else _rejection_tree
        return rejection(*args, draft_probs_BXV, depth, noise_BDV)
    if not chain and depth > 0:
        return _coupled_tree(*args, depth, noise_BDV)
    if noise_BDV is None:
        noise_BDV = _target_noise(sampling, position_B[:, None] + jnp.arange(depth + 1)[None, :], logits_BNV)
    choice_BN = choose(logits_BNV[:, : depth + 1], sampling, noise_BDV)
    return _follow(logits_BNV, choice_BN, tokens_BN, parents_BN, depths_BN, depth, chain)


def _target_noise(sampling: SamplingRows, position_BN: jax.Array, logits_BNV: jax.Array) -> jax.Array:
    return gumbel_noise(sampling.seed_B, position_BN, logits_BNV.shape[-1], Purpose.TARGET)


def _at(x_BN: jax.Array, index_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BN, index_B[:, None], axis=1)[:, 0]


def _row(x_BNV: jax.Array, node_B: jax.Array) -> jax.Array:
    """One node's row of each request, [B, 1, V] float32."""
    return jnp.take_along_axis(x_BNV, node_B[:, None, None], axis=1, mode="clip").astype(jnp.float32)


def _finite(logits_BNV: jax.Array, best_BN: jax.Array) -> jax.Array:
    """Whether rows are usable, [B, N], given where their maximum (or that of a perturbed row) is.

    argmax points at a NaN where there is one.
    """
    return jnp.isfinite(jnp.take_along_axis(logits_BNV, best_BN[:, :, None], axis=2)[:, :, 0])


def _follow(
    logits_BNV: jax.Array, choice_BN: jax.Array, tokens_BN: jax.Array, parents_BN: jax.Array, depths_BN: jax.Array,
    depth: int, chain: bool,
) -> Verdict:  # fmt: skip
    """Walks along tokens that are known for every node."""
    b, n = choice_BN.shape
    index = jnp.arange(n, dtype=jnp.int32)[None, :]
    ok_BN = _finite(logits_BNV[:, :n], choice_BN)
    if depth == 0:
        zero = jnp.zeros((b,), jnp.int32)
        return Verdict(zero[:, None], zero, choice_BN[:, 0], ok_BN[:, 0])
    if chain:
        matched = (tokens_BN[:, 1:] == choice_BN[:, :-1]).astype(jnp.int32)
        accepted = jnp.cumprod(matched, axis=1).sum(axis=1).astype(jnp.int32)
        path = jnp.broadcast_to(index, (b, n))
    else:
        match_BN = tokens_BN == jnp.take_along_axis(choice_BN, parents_BN, axis=1)
        alive_BN = jnp.broadcast_to(index == 0, (b, n))
        for _ in range(depth):
            alive_BN = (index == 0) | (match_BN & jnp.take_along_axis(alive_BN, parents_BN, axis=1))
        # Siblings hold distinct tokens, so at most one node a depth is alive.
        at_depth = depths_BN[:, None, :] == jnp.arange(depth + 1)[None, :, None]
        path = jnp.argmax(at_depth & alive_BN[:, None, :], axis=2).astype(jnp.int32)
        accepted = jnp.max(jnp.where(alive_BN, depths_BN, 0), axis=1).astype(jnp.int32)
    return Verdict(path, accepted, _at(choice_BN, _at(path, accepted)), _all_on_path(ok_BN, path, accepted))


def _all_on_path(ok_BN: jax.Array, path_BD: jax.Array, accepted_B: jax.Array) -> jax.Array:
    beyond = jnp.arange(path_BD.shape[1])[None, :] > accepted_B[:, None]
    return jnp.all(jnp.take_along_axis(ok_BN, path_BD, axis=1) | beyond, axis=1)


def _coupled_tree(
    logits_BNV: jax.Array, tokens_BN: jax.Array, parents_BN: jax.Array, sampling: SamplingRows,
    position_B: jax.Array, depth: int, noise_BDV: jax.Array | None,
) -> Verdict:  # fmt: skip
    """Draws only at the nodes of the path."""
    b, n = tokens_BN.shape
    index = jnp.arange(n, dtype=jnp.int32)[None, :]
    level = jnp.arange(depth + 1, dtype=jnp.int32)[None, :]

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d, walking, node, path, accepted, token, ok = carry
        row = _row(logits_BNV, node)
        if noise_BDV is None:
            noise = _target_noise(sampling, position_B[:, None] + d, row)
        else:
            noise = jax.lax.dynamic_slice_in_dim(noise_BDV, d, 1, axis=1)
        choice = choose(row, sampling, noise)
        token = jnp.where(walking, choice[:, 0], token)
        ok = ok & (_finite(row, choice)[:, 0] | ~walking)
        match_BN = (parents_BN == node[:, None]) & (tokens_BN == choice) & (index > 0)
        walking = walking & jnp.any(match_BN, axis=1) & (d < depth)
        node = jnp.where(walking, jnp.argmax(match_BN, axis=1).astype(jnp.int32), node)
        accepted = accepted + walking.astype(jnp.int32)
        path = jnp.where(walking[:, None] & (level == accepted[:, None]), node[:, None], path)
        return d + 1, walking, node, path, accepted, token, ok

    zero = jnp.zeros((b,), jnp.int32)
    yes = jnp.ones((b,), bool)
    start = (jnp.zeros((), jnp.int32), yes, zero, jnp.zeros((b, depth + 1), jnp.int32), zero, zero, yes)
    _, _, _, path, accepted, token, ok = jax.lax.while_loop(lambda c: jnp.any(c[1]), step, start)
    return Verdict(path, accepted, token, ok)


def _last_token(
    x_BV: jax.Array, q_BV: jax.Array, a_B: jax.Array, log_total_B: jax.Array, noise_BV: jax.Array
) -> jax.Array:
    """Gumbel-max over the residual (p - a q)+, or over p itself where a is 0 or nothing is left."""
    p_BV = jnp.exp(x_BV - log_total_B[:, None])
    residual = jnp.maximum(p_BV - a_B[:, None] * q_BV, 0.0)
    whole = (a_B == 0) | (residual.sum(axis=-1) <= NO_RESIDUAL)
    score = jnp.where(whole[:, None], x_BV, jnp.log(residual))
    return jnp.argmax(score + noise_BV, axis=-1).astype(jnp.int32)


def _rejection_chain(
    logits_BNV: jax.Array, tokens_BN: jax.Array, parents_BN: jax.Array, sampling: SamplingRows,
    position_B: jax.Array, draft_probs_BXV: jax.Array, depth: int, noise_BDV: jax.Array | None,
) -> Verdict:  # fmt: skip
    """All nodes at once: each has one child."""
    b, v = logits_BNV.shape[0], logits_BNV.shape[-1]
    x_BNV = _filter(logits_BNV, sampling)
    log_total = jax.nn.logsumexp(x_BNV, axis=-1, keepdims=True)
    drafted = tokens_BN[:, 1:]
    proposed = (drafted >= 0) & (drafted < v)
    at = lambda x: jnp.take_along_axis(x, jnp.clip(drafted, 0, v - 1)[:, :, None], axis=2)[:, :, 0]
    p_BD = jnp.exp(at(x_BNV[:, :-1]) - log_total[:, :-1, 0])
    q_BD = at(draft_probs_BXV[:, :depth])
    u_BD = uniform_noise(sampling.seed_B, position_B[:, None] + jnp.arange(depth)[None, :], Purpose.ACCEPT)
    best_BN = jnp.argmax(logits_BNV, axis=-1).astype(jnp.int32)
    greedy = sampling.temperature_B == 0
    passes = jnp.where(greedy[:, None], drafted == best_BN[:, :-1], p_BD > u_BD * q_BD) & proposed
    accepted = jnp.cumprod(passes.astype(jnp.int32), axis=1).sum(axis=1).astype(jnp.int32)
    refused = (accepted < depth) & _at(jnp.pad(proposed, ((0, 0), (0, 1))), accepted)

    if noise_BDV is None:
        noise = _target_noise(sampling, (position_B + accepted)[:, None], logits_BNV)
    else:
        noise = _row(noise_BDV, accepted)
    x_BV, q_BV = _row(x_BNV, accepted)[:, 0], _row(draft_probs_BXV, accepted)[:, 0]
    drawn = _last_token(x_BV, q_BV, refused.astype(jnp.float32), _at(log_total[:, :, 0], accepted), noise[:, 0])
    path = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32)[None, :], (b, depth + 1))
    token = jnp.where(greedy, _at(best_BN, accepted), drawn)
    return Verdict(path, accepted, token, _all_on_path(_finite(logits_BNV, best_BN), path, accepted))


def _rejection_tree(
    logits_BNV: jax.Array, tokens_BN: jax.Array, parents_BN: jax.Array, sampling: SamplingRows,
    position_B: jax.Array, draft_probs_BXV: jax.Array, depth: int, noise_BDV: jax.Array | None,
) -> Verdict:  # fmt: skip
    """Level by level; within a level, child by child."""
    b, n = tokens_BN.shape
    v = logits_BNV.shape[-1]
    index = jnp.arange(n, dtype=jnp.int32)[None, :]
    level = jnp.arange(depth + 1, dtype=jnp.int32)[None, :]
    greedy = sampling.temperature_B == 0
    zero, yes = jnp.zeros((b,), jnp.int32), jnp.ones((b,), bool)

    def enter(node: jax.Array) -> tuple[jax.Array, ...]:
        row = _row(logits_BNV, node)
        best = jnp.argmax(row, axis=-1).astype(jnp.int32)
        x_BV = _filter(row, sampling)[:, 0]
        return x_BV, _row(draft_probs_BXV, node)[:, 0], jax.nn.logsumexp(x_BV, axis=-1), best[:, 0], _finite(row, best)

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d, walking, node, path, accepted, rejected_mass, ok = carry
        x_BV, q_BV, log_total, best, fine = enter(node)
        ok = ok & (fine[:, 0] | ~walking)
        child_BN = (parents_BN == node[:, None]) & (index > 0) & walking[:, None]

        def residual(a: jax.Array) -> jax.Array:
            p_BV = jnp.exp(x_BV - log_total[:, None])
            return jnp.maximum(p_BV - a[:, None] * q_BV, 0.0).sum(axis=-1)

        def attempt(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ordinal, left_BN, a, z, taken = carry
            child = jnp.argmax(left_BN, axis=1).astype(jnp.int32)
            token = _at(tokens_BN, child)
            proposed = jnp.any(left_BN, axis=1) & (token >= 0) & (token < v)
            token = jnp.clip(token, 0, v - 1)
            p, q = jnp.exp(_at(x_BV, token) - log_total), _at(q_BV, token)
            counter = jnp.broadcast_to(ordinal, (b, 1))
            u = uniform_noise(sampling.seed_B, position_B[:, None] + d, Purpose.ACCEPT, counter)[:, 0]
            passes = proposed & jnp.where(greedy, token == best, p - a * q > u * z * q)
            fails = proposed & ~passes & ~greedy
            a = jnp.where(fails, a + z, a)
            z = jnp.where(fails, jax.lax.cond(jnp.any(fails), residual, lambda a: z, a), z)
            left_BN = left_BN & (index != child[:, None]) & ~passes[:, None]
            return ordinal + 1, left_BN, a, z, jnp.where(passes, child, taken)

        one = jnp.ones((b,), jnp.float32)
        tries = (jnp.zeros((), jnp.int32), child_BN, jnp.zeros((b,), jnp.float32), one, zero)
        _, _, a, _, taken = jax.lax.while_loop(lambda c: jnp.any(c[1]), attempt, tries)
        moved = walking & (taken > 0)
        node = jnp.where(moved, taken, node)
        accepted = accepted + moved.astype(jnp.int32)
        path = jnp.where(moved[:, None] & (level == accepted[:, None]), node[:, None], path)
        return (
            d + 1,
            moved & (d + 1 < depth),
            node,
            path,
            accepted,
            jnp.where(walking, jnp.where(moved, 0.0, a), rejected_mass),
            ok,
        )

    start = (
        jnp.zeros((), jnp.int32),
        yes,
        zero,
        jnp.zeros((b, depth + 1), jnp.int32),
        zero,
        jnp.zeros((b,), jnp.float32),
        yes,
    )
    _, _, node, path, accepted, a, ok = jax.lax.while_loop(lambda c: jnp.any(c[1]), step, start)
    x_BV, q_BV, log_total, best, fine = enter(node)
    if noise_BDV is None:
        noise = _target_noise(sampling, (position_B + accepted)[:, None], logits_BNV)
    else:
        noise = _row(noise_BDV, accepted)
    drawn = _last_token(x_BV, q_BV, a, log_total, noise[:, 0])
    return Verdict(path, accepted, jnp.where(greedy, best, drawn), ok & fine[:, 0])
