"""The walk over a request's draft tree on Mosaic GPU, and what a node's visit draws in coupled mode.

Knows which node comes next, and nothing of how a row is read (`mosaic_rows`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.rejection_sampling import mosaic_shortlist as shortlist
from pallas_kernels.rejection_sampling.mosaic_contest import contest
from pallas_kernels.rejection_sampling.mosaic_filters import Filters, Scratch
from pallas_kernels.rejection_sampling.mosaic_lanes import gather, lane_ids, once, spread, where
from pallas_kernels.rejection_sampling.mosaic_rows import NONE, Row
from pallas_kernels.rejection_sampling.noise import TILE

_i32, _u32 = jnp.int32, jnp.uint32


class Tree:
    """A request's draft tree: the nodes' tokens and parents, one node a lane; a chain's parents are not read."""

    def __init__(
        self, tokens: Any, parents: Any, request: jax.Array, nodes: int, depth: int, chain: bool, interpret: bool
    ) -> None:
        self.tokens, self.first, self.depth, self.chain = tokens, request * nodes, depth, chain
        self.lanes: list[tuple[jax.Array, jax.Array, jax.Array]] = []
        for begin in range(0, nodes if depth else 0, TILE):  # a lone root is nobody's child
            index = begin + lane_ids()
            here = self.first + jnp.minimum(index, nodes - 1)
            own = gather(tokens, here, interpret)
            parent = own if chain else gather(parents, here, interpret)  # a chain's are not looked at
            self.lanes.append((where(index < nodes, index, NONE), own, parent))

    def child(self, node: jax.Array, after: jax.Array, token: jax.Array | None = None) -> jax.Array:
        """The first child of `node` with an index above `after` (that holds `token`), or NONE."""
        found = spread(NONE, _i32)
        for index, own, parent in self.lanes:
            match = (index == node + 1) if self.chain else (parent == node) & (index > 0)
            match = match & (index > after)
            if token is not None:
                match = match & (own == token)
            found = jnp.minimum(found, where(match, index, NONE))
        return jnp.min(found)

    def holding(self, node: jax.Array, depth: jax.Array, token: jax.Array) -> jax.Array:
        """The child of `node`, which is so deep, that holds the target's own token; or NONE."""
        return jnp.where(depth < self.depth, self.child(node, node, token), NONE)

    def token(self, node: jax.Array) -> jax.Array:
        return self.tokens[self.first + node]


class Turn(NamedTuple):
    """What a node's visit leaves.

    Attributes:
      child: the accepted one, or NONE. token: drawn where none is accepted. fine: 1 where the row is usable.
      step: exchanges so far.
    """

    child: jax.Array
    token: jax.Array
    fine: jax.Array
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How a request samples. sampled: whether it does. tables: shared memory of the filters."""

    sampled: jax.Array
    filters: Filters
    tables: Scratch
    seed: jax.Array
    position: jax.Array

    def key(self, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the noise at a node so deep."""
        return self.seed, (self.position + depth).astype(_u32)


def usable(top: jax.Array) -> jax.Array:
    """Whether a row with this maximum is neither broken nor empty."""
    return (top < jnp.inf) & (top > -jnp.inf)


def highest(row: Row, at: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(token of the largest logit of a node, 1 where the row is usable, exchanges so far)."""
    top, token, _, step = row.cluster.winner(step, *row.survey(at))
    return token, jnp.where(usable(top), 1, 0), step


def own_token(
    row: Row, sampler: Sampler | None, at: jax.Array, depth: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the target's own token at a node, 1 where the row is usable, exchanges so far).

    Args:
      sampler: None in a call that is known to be greedy. at: the node's number among all nodes of the batch.
    """
    row.fetch(at)
    if sampler is None:
        return highest(row, at, step)
    filters, tables, key = sampler.filters, sampler.tables, sampler.key(depth)
    plain = sampler.sampled & ~filters.active
    open_ = sampler.sampled & filters.active & (filters.most(row.vocab) == 0)
    zero = at * 0

    def drawn(_: jax.Array, __: jax.Array, ___: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        token, fine, _none, step = row.dash(key, at, step)
        return token, jnp.where(fine, 1, 0), zero + 1, step

    def contested(_: jax.Array, __: jax.Array, ___: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        return contest(row, filters, key, at, step)

    def surveyed(_: jax.Array, __: jax.Array, ___: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        best, step = row.elect(*row.survey(at, ~open_), step)
        fine = usable(best.top)

        def draw(_: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
            return shortlist.draw(row, tables, key, best, shortlist.keep(row, tables, filters, best, step))

        token, step = once(sampler.sampled & fine, draw, (best.token, step))
        return token, jnp.where(fine, 1, 0), zero + 1, step

    found = once(plain, drawn, (zero, zero, zero, step))
    found = once(open_, contested, found)
    token, fine, _, step = once(found[2] == 0, surveyed, found)
    return token, fine, step


def walk(
    tree: Tree, visit: Callable[[jax.Array, jax.Array, jax.Array], Turn], request: jax.Array, writes: jax.Array,
    outs: Any,
) -> None:  # fmt: skip
    """A request's path, into the references of a verdict.

    Args:
      visit: of (node, its depth, exchanges so far). writes: whether this program writes.
    """
    path_ref, accepted_ref, token_ref, fine_ref = outs
    levels = tree.depth + 1

    def put(level: jax.Array, node: jax.Array) -> None:
        @pl.when(writes)
        def _() -> None:
            path_ref[request * levels + level] = node

    lax.fori_loop(0, levels, lambda d, _: (put(d, d if tree.chain else d * 0), ())[1], ())

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        node, accepted, _, fine, exchanges = carry
        turn = visit(node, accepted, exchanges)
        moved = turn.child < NONE
        accepted = accepted + jnp.where(moved, 1, 0)
        pl.when(moved)(lambda: put(accepted, turn.child))
        return turn.child, accepted, turn.token, fine * turn.fine, turn.step

    zero = request * 0
    start = (zero, zero, zero, zero + 1, zero)
    accepted, token, fine = lax.while_loop(lambda c: c[0] < NONE, step, start)[1:4]

    @pl.when(writes)
    def _() -> None:
        accepted_ref[request], token_ref[request], fine_ref[request] = accepted, token, fine > 0
