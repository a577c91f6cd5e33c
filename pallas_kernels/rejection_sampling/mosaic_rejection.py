"""Rejection sampling against draft probabilities on Mosaic GPU: a node's children in turn, and the residual.

The residual after rejections is (p - a q)+ (`reference` has the rule). A node's draft row lies in shared memory beside
its logits, so that every sum over the residual and the race over it read both from there.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rejection_sampling.mosaic_filters import threshold, weigh
from pallas_kernels.rejection_sampling.mosaic_lanes import gather, math_sum, once, spread, where
from pallas_kernels.rejection_sampling.mosaic_rows import GROUP, NONE, WORD, Best, Row
from pallas_kernels.rejection_sampling.mosaic_walk import Sampler, Tree, Turn, highest, usable
from pallas_kernels.rejection_sampling.noise import TILE, Purpose, threefry2x32, to_uniform
from pallas_kernels.rejection_sampling.reference import NO_RESIDUAL

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32


class Drafts:
    """A node's draft probabilities, as far as they are this member's: in shared memory, as the logits are.

    Attributes:
      count: nodes of a request that have any, the first ones.
    """

    def __init__(self, probs: Any, count: int, q: Any, barriers: Any, row: Row) -> None:
        self.probs, self.count, self.q, self.barriers, self.row = probs, count, q, barriers, row

    def fetch(self, number: jax.Array) -> None:
        """Begins to copy a node's row (its number among all draft rows of the batch)."""
        row = self.row
        if row.vocab % TILE:
            return
        for w in range(row.most_words):

            @pl.when(w < row.num_words)
            def _(w: int = w) -> None:
                source = self.probs.at[number, pl.ds(row.first + w * WORD, WORD)]
                plgpu.copy_gmem_to_smem(source, self.q.at[pl.ds(w * WORD, WORD)], self.barriers.at[w])

    def arrived(self, number: jax.Array) -> None:
        """Waits for the row; once for every `fetch`."""
        row = self.row

        def load(r: jax.Array, _: Any) -> tuple[()]:
            token = row.token(r)
            value = gather(self.probs, jnp.minimum(token, row.vocab - 1), row.interpret, number, row.vocab)
            self.q[r] = where(token < row.vocab, value, spread(0.0, _f32))
            return ()

        if row.vocab % TILE:
            lax.fori_loop(0, row.num_words * WORD, load, ())
            return

        def wait(w: jax.Array, _: Any) -> tuple[()]:
            plgpu.barrier_wait(self.barriers.at[w])
            return ()

        lax.fori_loop(0, row.num_words, wait, ())

    def of(self, number: jax.Array, token: jax.Array) -> jax.Array:
        """One probability."""
        if self.row.vocab % TILE:
            return self.probs[number, token]
        return self.probs[number, lax.div(token, _i32(TILE)), lax.rem(token, _i32(TILE))]


class Residual(Row):
    """A row whose values are logarithms of (p - a q)+, with p = exp(x - log_total) from `cut` on."""

    def __init__(self, row: Row, drafts: Drafts, a: jax.Array, log_total: jax.Array, cut: jax.Array) -> None:
        vars(self).update(vars(row))
        self.drafts, self.a, self.log_total, self.cut = drafts, a, log_total, cut

    def left(self, x: jax.Array, q: jax.Array) -> jax.Array:
        p = jnp.where(x >= self.cut, jnp.exp(x - self.log_total), 0.0)
        return jnp.maximum(p - self.a * q, 0.0)

    def value(self, row: Any) -> jax.Array:
        return jnp.log(self.left(super().value(row), self.drafts.q[row]))

    def at(self, row: jax.Array) -> jax.Array:
        q = gather(self.drafts.q, row * TILE + self.lane, self.interpret)
        return jnp.log(self.left(super().at(row), q))

    def sum(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(sum of the residual, exchanges so far); the same for every number of members.

        Eight rows of a lane are added up as floats, in one order, and these as integers of 10, 16 and 16 bits.
        """

        def add(g: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rows = [g * GROUP + r for r in range(GROUP)]
            part = math_sum([self.left(Row.value(self, row), self.drafts.q[row]) for row in rows])
            out = []
            for total, bits in zip(sums, (10, 16, 16), strict=True):
                part = part * (2.0**bits)
                whole = part.astype(_i32)
                part = part - whole.astype(_f32)
                out.append(total + whole)
            return tuple(out)

        zero = spread(0, _i32)
        sums = lax.fori_loop(0, self.num_words * (WORD // GROUP), add, (zero, zero, zero))
        sums, step = self.cluster.sums(step, sums)
        first, second, third = (x.astype(_f32) for x in sums)
        return first * (2.0**-10) + second * (2.0**-26) + third * (2.0**-42), step


def attempt(
    row: Row, drafts: Drafts, sampler: Sampler, tree: Tree, node: jax.Array, depth: jax.Array, at: jax.Array,
    number: jax.Array, step: jax.Array,
) -> Turn:  # fmt: skip
    """Offers a node's children in turn to rejection sampling, and draws a token where all are rejected.

    Args:
      at: the node's number among all nodes of the batch. number: of its draft row, if it has one.
    """
    ended = (depth >= tree.depth) | (node >= drafts.count) | ~sampler.sampled
    first = jnp.where(ended, NONE, tree.child(node, node))
    row.fetch(at)
    pl.when(first < NONE)(lambda: drafts.fetch(number))
    key = sampler.key(depth)

    def greedy(_: jax.Array, __: jax.Array, ___: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        token, fine, step = highest(row, at, step)
        return tree.holding(node, depth, token), token, fine, step

    def leaf(_: jax.Array, __: jax.Array, ___: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        token, fine, step = row.dash(key, at, step)
        return first * 0 + NONE, token, jnp.where(fine, 1, 0), step

    def inner(_: jax.Array, __: jax.Array, ___: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        best, step = row.elect(*row.survey(at), step)
        pl.when(first < NONE)(lambda: drafts.arrived(number))
        fine = usable(best.top)
        offer = functools.partial(_offer, row, drafts, sampler, tree, key, node, at, number, best)
        found = once(fine, lambda *turn: tuple(offer(Turn(*turn))), (first, best.token, first * 0 + 1, step))
        child, token, _, step = found
        return jnp.where(fine, child, NONE), token, jnp.where(fine, 1, 0), step

    plain = sampler.sampled & (first >= NONE) & ~sampler.filters.active
    turn = once(~sampler.sampled, greedy, (first, first * 0, first * 0, step))
    turn = once(plain, leaf, turn)
    return Turn(*once(sampler.sampled & ~plain, inner, turn))


def _offer(
    row: Row, drafts: Drafts, sampler: Sampler, tree: Tree, key: tuple[jax.Array, jax.Array], node: jax.Array,
    at: jax.Array, number: jax.Array, best: Best, turn: Turn,
) -> Turn:  # fmt: skip
    zero = best.top * 0.0
    kept = lambda _, __, step: threshold(row, sampler.tables, sampler.filters, best.lanes, best.top, step)
    cut, marked, step = once(sampler.filters.active, kept, (zero - jnp.inf, turn.step * 0 - 1, turn.step))
    mass = lambda _, step: weigh(row, best.top, cut, step)
    total, step = once(turn.child < NONE, mass, (zero + 1.0, step))
    log_total = best.top + jnp.log(total)

    def offer(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        child, ordinal, a, mass, taken, step = carry
        token = tree.token(child)
        proposed = (token >= 0) & (token < row.vocab)
        token = jnp.clip(token, 0, row.vocab - 1)
        x, q = row.tempered(row.logit(at, token)), drafts.of(number, token)
        p = jnp.where(x >= cut, jnp.exp(x - log_total), 0.0)
        u = to_uniform(threefry2x32(*key, ordinal.astype(_u32), _u32(Purpose.ACCEPT))[0])
        passes = proposed & (p - a * q > u * mass * q)
        fails = proposed & ~passes
        a = jnp.where(fails, a + mass, a)
        left = lambda _, step: Residual(row, drafts, a, log_total, cut).sum(step)
        mass, step = once(fails, left, (mass, step))
        following = tree.child(node, child)
        return jnp.where(passes, NONE, following), ordinal + 1, a, mass, jnp.where(passes, child, taken), step

    init = (turn.child, turn.child * 0, zero, zero + 1.0, turn.child * 0 + NONE, step)
    _, _, a, mass, taken, step = lax.while_loop(lambda c: c[0] < NONE, offer, init)
    rejected = taken >= NONE
    some = (a > 0.0) & (mass > NO_RESIDUAL)
    rest = lambda _, step: Residual(row, drafts, a, log_total, cut).dash(key, None, step)[::2]
    token, step = once(rejected & some, rest, (turn.token, step))
    token, step = once(rejected & ~some, lambda _, step: row.race(key, cut, marked, best, step), (token, step))
    return Turn(taken, token, turn.fine, step)
