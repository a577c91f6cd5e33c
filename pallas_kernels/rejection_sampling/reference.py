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

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import static
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RejectionSamplingArgs:
    """The arguments of one call; `api.rejection_sampling` describes them."""

    logits_BNV: jax.Array
    tokens_BN: jax.Array
    parents_BN: jax.Array
    depths_BN: jax.Array
    sampling: SamplingRows
    position_B: jax.Array
    draft_probs_BXV: jax.Array | None = None
    noise_BDV: jax.Array | None = None
    depth: int = static()
    chain: bool = static()
    greedy: bool = static(default=False)

    @property
    def drafts(self) -> jax.Array | None:
        """draft_probs_BXV where rejection sampling reads them: neither a greedy batch nor a lone root does."""
        return None if self.greedy or self.depth == 0 else self.draft_probs_BXV


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


def rejection_sampling(args: RejectionSamplingArgs) -> Verdict:
    """See api.rejection_sampling."""
    if args.greedy:
        return _followed(args, jnp.argmax(args.logits_BNV, axis=-1).astype(jnp.int32))
    if args.drafts is not None:
        return _rejection_chain(args, args.drafts) if args.chain else _RejectionWalk(args, args.drafts).run()
    if not args.chain and args.depth > 0:
        return _coupled_tree(args)
    levels, noise_BDV = args.depth + 1, args.noise_BDV
    if noise_BDV is None:
        noise_BDV = _target_noise(args, args.position_B[:, None] + jnp.arange(levels)[None, :])
    return _followed(args, choose(args.logits_BNV[:, :levels], args.sampling, noise_BDV))


def _target_noise(args: RejectionSamplingArgs, position_BN: jax.Array) -> jax.Array:
    return gumbel_noise(args.sampling.seed_B, position_BN, args.logits_BNV.shape[-1], Purpose.TARGET)


def _last_noise(args: RejectionSamplingArgs, accepted_B: jax.Array) -> jax.Array:
    """What the token after the path is drawn with, [B, 1, V]."""
    if args.noise_BDV is None:
        return _target_noise(args, (args.position_B + accepted_B)[:, None])
    return _row(args.noise_BDV, accepted_B)


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


def _followed(args: RejectionSamplingArgs, choice_BN: jax.Array) -> Verdict:
    ok_BN = _finite(args.logits_BNV[:, : choice_BN.shape[1]], choice_BN)
    return follow(choice_BN, ok_BN, args.tokens_BN, args.parents_BN, args.depths_BN, depth=args.depth, chain=args.chain)


def follow(
    choice_BN: jax.Array, ok_BN: jax.Array, tokens_BN: jax.Array, parents_BN: jax.Array, depths_BN: jax.Array, *,
    depth: int, chain: bool,
) -> Verdict:  # fmt: skip
    """Walks along the target's own tokens, where they are known for every node (coupled mode).

    Args:
      choice_BN: those tokens, int32. ok_BN: whether the logits that they are from are usable.
    """
    b, n = choice_BN.shape
    index = jnp.arange(n, dtype=jnp.int32)[None, :]
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


def _coupled_tree(args: RejectionSamplingArgs) -> Verdict:
    """Draws only at the nodes of the path."""
    tokens_BN, depth = args.tokens_BN, args.depth
    b, n = tokens_BN.shape
    index = jnp.arange(n, dtype=jnp.int32)[None, :]
    level = jnp.arange(depth + 1, dtype=jnp.int32)[None, :]

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d, walking, node, path, accepted, token, ok = carry
        row = _row(args.logits_BNV, node)
        if args.noise_BDV is None:
            noise = _target_noise(args, args.position_B[:, None] + d)
        else:
            noise = jax.lax.dynamic_slice_in_dim(args.noise_BDV, d, 1, axis=1)
        choice = choose(row, args.sampling, noise)
        token = jnp.where(walking, choice[:, 0], token)
        ok = ok & (_finite(row, choice)[:, 0] | ~walking)
        match_BN = (args.parents_BN == node[:, None]) & (tokens_BN == choice) & (index > 0)
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


def _rejection_chain(args: RejectionSamplingArgs, draft_probs_BXV: jax.Array) -> Verdict:
    """All nodes at once: each has one child."""
    logits_BNV, depth = args.logits_BNV, args.depth
    b, _, v = logits_BNV.shape
    x_BNV = _filter(logits_BNV, args.sampling)
    log_total = jax.nn.logsumexp(x_BNV, axis=-1, keepdims=True)
    drafted = args.tokens_BN[:, 1:]
    proposed = (drafted >= 0) & (drafted < v)
    at = lambda x: jnp.take_along_axis(x, jnp.clip(drafted, 0, v - 1)[:, :, None], axis=2)[:, :, 0]
    p_BD = jnp.exp(at(x_BNV[:, :-1]) - log_total[:, :-1, 0])
    q_BD = at(draft_probs_BXV[:, :depth])
    position_BD = args.position_B[:, None] + jnp.arange(depth)[None, :]
    u_BD = uniform_noise(args.sampling.seed_B, position_BD, Purpose.ACCEPT)
    best_BN = jnp.argmax(logits_BNV, axis=-1).astype(jnp.int32)
    greedy = args.sampling.temperature_B == 0
    passes = jnp.where(greedy[:, None], drafted == best_BN[:, :-1], p_BD > u_BD * q_BD) & proposed
    accepted = jnp.cumprod(passes.astype(jnp.int32), axis=1).sum(axis=1).astype(jnp.int32)
    refused = (accepted < depth) & _at(jnp.pad(proposed, ((0, 0), (0, 1))), accepted)

    noise = _last_noise(args, accepted)
    x_BV, q_BV = _row(x_BNV, accepted)[:, 0], _row(draft_probs_BXV, accepted)[:, 0]
    drawn = _last_token(x_BV, q_BV, refused.astype(jnp.float32), _at(log_total[:, :, 0], accepted), noise[:, 0])
    path = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32)[None, :], (b, depth + 1))
    token = jnp.where(greedy, _at(best_BN, accepted), drawn)
    return Verdict(path, accepted, token, _all_on_path(_finite(logits_BNV, best_BN), path, accepted))


class _Node(NamedTuple):
    """The node that each request has reached: its kept logits, its draft's row, and what they come to."""

    x_BV: jax.Array
    q_BV: jax.Array
    log_total_B: jax.Array
    best_B: jax.Array
    fine_B1: jax.Array


class _RejectionWalk:
    """Rejection over a tree: level by level; within a level, child by child."""

    def __init__(self, args: RejectionSamplingArgs, draft_probs_BXV: jax.Array) -> None:
        self.args, self.draft_probs_BXV = args, draft_probs_BXV
        b, n = args.tokens_BN.shape
        self.index = jnp.arange(n, dtype=jnp.int32)[None, :]
        self.level = jnp.arange(args.depth + 1, dtype=jnp.int32)[None, :]
        self.greedy = args.sampling.temperature_B == 0
        self.zero, self.yes = jnp.zeros((b,), jnp.int32), jnp.ones((b,), bool)

    def run(self) -> Verdict:
        (b,), zero, yes = self.zero.shape, self.zero, self.yes
        first, path = jnp.zeros((), jnp.int32), jnp.zeros((b, self.args.depth + 1), jnp.int32)
        start = (first, yes, zero, path, zero, jnp.zeros((b,), jnp.float32), yes)
        _, _, node, path, accepted, a, ok = jax.lax.while_loop(lambda c: jnp.any(c[1]), self.step, start)
        end = self.enter(node)
        drawn = _last_token(end.x_BV, end.q_BV, a, end.log_total_B, _last_noise(self.args, accepted)[:, 0])
        return Verdict(path, accepted, jnp.where(self.greedy, end.best_B, drawn), ok & end.fine_B1[:, 0])

    def enter(self, node_B: jax.Array) -> _Node:
        row = _row(self.args.logits_BNV, node_B)
        best = jnp.argmax(row, axis=-1).astype(jnp.int32)
        x_BV = _filter(row, self.args.sampling)[:, 0]
        q_BV = _row(self.draft_probs_BXV, node_B)[:, 0]
        return _Node(x_BV, q_BV, jax.nn.logsumexp(x_BV, axis=-1), best[:, 0], _finite(row, best))

    def step(self, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """One level down, where a child is accepted."""
        d, walking, node, path, accepted, rejected_mass, ok = carry
        here = self.enter(node)
        ok = ok & (here.fine_B1[:, 0] | ~walking)
        child_BN = (self.args.parents_BN == node[:, None]) & (self.index > 0) & walking[:, None]
        a, taken = self.offer(here, child_BN, d)
        moved = walking & (taken > 0)
        node = jnp.where(moved, taken, node)
        accepted = accepted + moved.astype(jnp.int32)
        path = jnp.where(moved[:, None] & (self.level == accepted[:, None]), node[:, None], path)
        following, deeper = d + 1, moved & (d + 1 < self.args.depth)
        rejected_mass = jnp.where(walking, jnp.where(moved, 0.0, a), rejected_mass)
        return following, deeper, node, path, accepted, rejected_mass, ok

    def offer(self, node: _Node, child_BN: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(rejected mass a, the accepted child or 0) when a node's children are tried in turn."""
        b, v = node.x_BV.shape

        def residual(a: jax.Array) -> jax.Array:
            p_BV = jnp.exp(node.x_BV - node.log_total_B[:, None])
            return jnp.maximum(p_BV - a[:, None] * node.q_BV, 0.0).sum(axis=-1)

        def attempt(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ordinal, left_BN, a, z, taken = carry
            child = jnp.argmax(left_BN, axis=1).astype(jnp.int32)
            token = _at(self.args.tokens_BN, child)
            proposed = jnp.any(left_BN, axis=1) & (token >= 0) & (token < v)
            token = jnp.clip(token, 0, v - 1)
            p, q = jnp.exp(_at(node.x_BV, token) - node.log_total_B), _at(node.q_BV, token)
            counter = jnp.broadcast_to(ordinal, (b, 1))
            position_B1 = self.args.position_B[:, None] + d
            u = uniform_noise(self.args.sampling.seed_B, position_B1, Purpose.ACCEPT, counter)[:, 0]
            passes = proposed & jnp.where(self.greedy, token == node.best_B, p - a * q > u * z * q)
            fails = proposed & ~passes & ~self.greedy
            a = jnp.where(fails, a + z, a)
            z = jnp.where(fails, jax.lax.cond(jnp.any(fails), residual, lambda a: z, a), z)
            left_BN = left_BN & (self.index != child[:, None]) & ~passes[:, None]
            return ordinal + 1, left_BN, a, z, jnp.where(passes, child, taken)

        one = jnp.ones((b,), jnp.float32)
        tries = (jnp.zeros((), jnp.int32), child_BN, jnp.zeros((b,), jnp.float32), one, self.zero)
        _, _, a, _, taken = jax.lax.while_loop(lambda c: jnp.any(c[1]), attempt, tries)
        return a, taken
