"""Rejection sampling against draft probabilities on Mosaic GPU: a node's children in turn, and the residual.

The residual after rejections is (p - a q)+ (`reference` has the rule). A node's draft row lies in shared memory beside
its logits, so that every sum over the residual and the race over it read both from there.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rejection_sampling import mosaic_shortlist as shortlist
from pallas_kernels.rejection_sampling.mosaic_lanes import (
    bits,
    gather,
    math_sum,
    once,
    quick_exp,
    spread,
    where,
)  # fmt: skip
from pallas_kernels.rejection_sampling.mosaic_rows import FLOOR, GROUP, NONE, WORD, Best, Row
from pallas_kernels.rejection_sampling.mosaic_walk import Sampler, Tree, Turn, highest, usable
from pallas_kernels.rejection_sampling.noise import TILE, Purpose, threefry2x32, to_uniform
from pallas_kernels.rejection_sampling.reference import NO_RESIDUAL

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32


class Drafts:
    """A node's draft probabilities, as far as they are this member's: in shared memory, as the logits are.

    Attributes:
      count: nodes of a request that have any, the first ones.
    """

    def __init__(self, probs: Any, count: int, q: Any, barriers: Any, table: Any, row: Row) -> None:
        self.probs, self.count, self.q, self.barriers, self.table, self.row = probs, count, q, barriers, table, row

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

    def read(self, tree: Tree, key: tuple[jax.Array, jax.Array], at: jax.Array, number: jax.Array) -> None:
        """Tempered logits and draft probabilities of all nodes' tokens at one node, and its coins, into the table.

        At once, while the rows arrive: one after the other each would wait for the memory.
        """
        row = self.row
        for place, (_, own, _) in enumerate(tree.lanes):
            token = jnp.clip(own, 0, row.vocab - 1)
            x = row.tempered(gather(row.logits, token, row.interpret, at, row.vocab))
            q = gather(self.probs, token, row.interpret, number, row.vocab)
            ordinal = (place * TILE + row.lane).astype(_u32)
            coin = to_uniform(threefry2x32(*key, ordinal, spread(int(Purpose.ACCEPT), _u32))[0])
            for field, value in enumerate((x, where(token == own, q, spread(-1.0, _f32)), coin)):
                self.table[pl.ds((field * len(tree.lanes) + place) * TILE, TILE)] = value

    def child(self, child: jax.Array, ordinal: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(tempered logit, draft probability or -1 for no proposal, coin) of a child, `ordinal`th of those offered."""
        third = self.table.shape[0] // 3
        return self.table[child], self.table[third + child], self.table[2 * third + ordinal]


#: float32 bits times this, less 127 ln 2, are at most a value's logarithm; and this more is at least it.
_BIT, _OVER = math.log(2.0) * 2.0**-23, 0.0598


class Residual(Row):
    """A row whose values are logarithms of (p - a q)+, with p = exp(x - log_total) from `cut` on."""

    ADDED = 1

    def __init__(self, row: Row, drafts: Drafts, a: jax.Array, log_total: jax.Array, cut: jax.Array) -> None:
        vars(self).update(vars(row))
        self.drafts, self.a, self.log_total, self.cut = drafts, a, log_total, cut

    def left(self, x: jax.Array, q: jax.Array) -> jax.Array:
        p = jnp.where(x >= self.cut, quick_exp(x - self.log_total, self.interpret), 0.0)
        return jnp.maximum(p - self.a * q, 0.0)

    def rows(self, begin: Any) -> list[jax.Array]:
        """What is left of a group of rows."""
        return [self.left(Row.value(self, begin + r), self.drafts.q[begin + r]) for r in range(GROUP)]

    def value(self, row: Any) -> jax.Array:
        return jnp.log(self.left(super().value(row), self.drafts.q[row]))

    def bounds(self, begin: Any, more: tuple[jax.Array, ...]) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        left = self.rows(begin)
        over = [bits(x).astype(_f32) * _BIT + (_OVER - 127 * math.log(2.0)) for x in left]
        return over, (more[0] + math_sum(left),)

    def at(self, row: jax.Array) -> jax.Array:
        q = gather(self.drafts.q, row * TILE + self.lane, self.interpret)
        return jnp.log(self.left(super().at(row), q))

    def sum(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(sum of the residual, exchanges so far); the same for every number of members.

        Eight rows of a lane are added up as floats, in one order, and these as integers of 10, 16 and 16 bits.
        """

        def add(g: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            part = math_sum(self.rows(g * GROUP))
            out = []
            for total, width in zip(sums, (10, 16, 16), strict=True):
                part = part * (2.0**width)
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
    key = sampler.key(depth)
    row.fetch(at)

    @pl.when(first < NONE)
    def _() -> None:
        drafts.fetch(number)
        drafts.read(tree, key, at, number)

    filtered = sampler.filters.active
    zero, none = first * 0, spread(-jnp.inf, _f32)
    log_none = zero.astype(_f32)
    low = log_none - jnp.inf

    def greedy(_: jax.Array, __: jax.Array, ___: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        token, fine, step = highest(row, at, step)
        return tree.holding(node, depth, token), token, fine, step

    def sampled(_: jax.Array, __: jax.Array, ___: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        def gauged(_: jax.Array, __: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
            top, total, step = row.gauge(at, step)
            return top + jnp.log(total), jnp.where((top < jnp.inf) & (top > FLOOR), 1, 0), step

        def kept(*carry: Any) -> tuple[Any, ...]:
            best, step = row.elect(*row.survey(at), carry[-1])
            fine = usable(best.top)

            def found(*carry: Any) -> tuple[Any, ...]:
                kept = shortlist.keep(row, sampler.tables, sampler.filters, best, carry[-1])
                total, step = shortlist.total(row, sampler.tables, best, kept)
                return best.top + jnp.log(total), kept.cut, kept.listed, step

            log_total, cut, count, step = once(fine, found, (log_none, low, zero - 1, step))
            return log_total, jnp.where(fine, 1, 0), cut, count, *best, step

        log_total, fine, step = once(~filtered & (first < NONE), gauged, (log_none, zero + 1, step))
        start = (log_total, fine, low, zero - 1, none, spread(NONE, _i32), low, zero, step)
        log_total, fine, cut, count, *best, step = once(filtered, kept, start)
        pl.when(first < NONE)(lambda: drafts.arrived(number))
        lane = _Node(row, drafts, sampler, tree, key, node, at, first, log_total, cut, count, Best(*best))
        return lane.turn(fine, step)

    turn = once(~sampler.sampled, greedy, (first, zero, zero, step))
    return Turn(*once(sampler.sampled, sampled, turn))


@dataclasses.dataclass(frozen=True)
class _Node:
    """A sampled node whose row is known: its children are offered, and a token drawn.

    Attributes:
      first: its first child, or NONE. log_total: of the kept tokens. cut, listed: as of `shortlist.Kept`.
      best: largest logits, where something filters.
    """

    row: Row
    drafts: Drafts
    sampler: Sampler
    tree: Tree
    key: tuple[jax.Array, jax.Array]
    node: jax.Array
    at: jax.Array
    first: jax.Array
    log_total: jax.Array
    cut: jax.Array
    listed: jax.Array
    best: Best

    def residual(self, a: jax.Array) -> Residual:
        return Residual(self.row, self.drafts, a, self.log_total, self.cut)

    def offer(self, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        child, ordinal, a, mass, taken, step = carry
        x, q, coin = self.drafts.child(child, ordinal)
        p = jnp.where(x >= self.cut, jnp.exp(x - self.log_total), 0.0)
        passes = (q >= 0) & (p - a * q > coin * mass * q)
        fails = (q >= 0) & ~passes
        a = jnp.where(fails, a + mass, a)
        following = jnp.where(passes, NONE, self.tree.child(self.node, child))

        def left(_: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.residual(a).sum(step)

        # Where no other child is offered, the sum comes with the last draw.
        mass, step = once(fails & (following < NONE), left, (mass, step))
        return following, ordinal + 1, a, mass, jnp.where(passes, child, taken), step

    def turn(self, fine: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        """(accepted child or NONE, token, 1 where the row is usable, exchanges so far)."""
        row, key, zero, filtered = self.row, self.key, self.first * 0, self.sampler.filters.active
        begin = jnp.where(fine > 0, self.first, NONE)
        none = zero.astype(_f32)
        init = (begin, zero, none, none + 1.0, zero + NONE, step)
        _, _, a, _, taken, step = lax.while_loop(lambda c: c[0] < NONE, self.offer, init)
        draws = (taken >= NONE) & (fine > 0)

        def rest(_: jax.Array, __: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
            token, _, (total,), step = self.residual(a).dash(key, None, step)
            return token, jnp.where(total > NO_RESIDUAL, 0, 1), step

        token, whole, step = once(draws & (a > 0.0), rest, (zero, zero + 1, step))
        whole = draws & (whole > 0)

        def plain(_: jax.Array, __: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
            token, fine, _none, step = row.dash(key, self.at, step, self.first >= NONE)
            return token, jnp.where(fine, 1, 0), step

        token, fine, step = once(whole & ~filtered, plain, (token, fine, step))
        kept = lambda _, step: shortlist.draw(
            row, self.sampler.tables, key, self.best, shortlist.Kept(self.cut, self.listed, step)
        )
        token, step = once(whole & filtered, kept, (token, step))
        return taken, token, fine, step
