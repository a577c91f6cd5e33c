"""Top-p and min-p on Mosaic GPU without a threshold: tokens race as if nothing filtered, and the winner is examined.

The best of all tokens is the best of those that are kept, if it is one of them; and it is if what lies above it holds
less than p of the mass. Else all tokens up to it are left out, and the others race again: each time the winner is kept
with at least the probability p. (The idea of rejecting what a draw gives, and of the pivot, is that of FlashInfer's
sampling without sorting; with noise that belongs to tokens the result is that of filtering first.)
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rejection_sampling.mosaic_filters import Filters, ceiling, masses
from pallas_kernels.rejection_sampling.mosaic_lanes import once, spread, where
from pallas_kernels.rejection_sampling.mosaic_rows import FLOOR, GROUP, Row
from pallas_kernels.rejection_sampling.reference import from_sortable, sortable

#: Races, before a threshold is searched after all.
RACES = 3

_i32, _f32 = jnp.int32, jnp.float32


class _Beyond(Row):
    """A row without the tokens up to a pivot; finds the row's largest value on the way."""

    LARGEST = 1

    def __init__(self, row: Row, pivot: jax.Array) -> None:
        vars(self).update(vars(row))
        self.pivot = pivot

    def left(self, x: jax.Array) -> jax.Array:
        return where(x > self.pivot, x, spread(-jnp.inf, _f32))

    def value(self, row: Any) -> jax.Array:
        return self.left(super().value(row))

    def at(self, row: jax.Array) -> jax.Array:
        return self.left(super().at(row))

    def bounds(self, begin: Any, more: tuple[jax.Array, ...]) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        xs = [Row.value(self, begin + r) for r in range(GROUP)]
        return [self.left(x) for x in xs], (functools.reduce(jnp.maximum, xs, more[0]),)  # a NaN stays


def contest(
    row: Row, filters: Filters, key: tuple[jax.Array, jax.Array], at: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(token, 1 where the row is usable, 1 where the token is decided, exchanges so far), while the row arrives.

    Args:
      filters: without top-k. at: the node's number among all nodes of the batch.
    """

    def race(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        races, _, _, _, pivot, step = carry
        token, fine, (top,), step = _Beyond(row, pivot).dash(key, at, step, races == 0)
        token, fine = jnp.clip(token, 0, row.vocab - 1), fine & (top < jnp.inf)
        x, low = row.tempered(row.logit(at, token)), jnp.maximum(top + jnp.log(filters.min_p), FLOOR)

        def weighed(_: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
            least = 1.0 + jnp.where(x < top, jnp.exp(x - top), 0.0)  # two tokens of the row
            _, _, (whole, above), step = masses(row, top, low, least, step, above=x)
            return jnp.where(above < ceiling(filters.top_p * whole.astype(_f32)), 1, 0), step

        inside = jnp.where(x >= low, 1, 0)
        kept, step = once(fine & (inside > 0) & (filters.top_p < 1.0), weighed, (inside, step))
        decided = jnp.where(fine, kept, 1)
        pivot = jnp.maximum(x, from_sortable(sortable(low) - 1))
        return races + 1, token, jnp.where(fine, 1, 0), decided, pivot, step

    zero = step * 0
    start = (zero, zero, zero, zero, zero.astype(_f32) - jnp.inf, step)
    _, token, fine, decided, _, step = lax.while_loop(lambda c: (c[0] < RACES) & (c[3] == 0), race, start)
    return token, fine, decided, step
