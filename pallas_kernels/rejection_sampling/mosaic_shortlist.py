"""What a filtered row keeps, on Mosaic GPU, where that is few tokens: one list of them in every member's memory.

The largest logits of 128 parts of the row bound the k-th largest from below (k of them are k tokens), so that the
tokens from there on are few, and hold all of the k. For top-p alone, which needs the mass of the whole row, the list is
of tokens that are likely to hold the nucleus, made in the pass that weighs the row. Each member then has the whole
list: thresholds, masses and the draw need no more exchange. Where it is too long or too short, `mosaic_filters`
searches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rejection_sampling.mosaic_filters import (
    LIST,
    Filters,
    Scratch,
    ceiling,
    clear,
    collect,
    join,
    mass,
    masses,
    pl_tile,
    threshold,
    weigh,
    weight,
)  # fmt: skip
from pallas_kernels.rejection_sampling.mosaic_lanes import once, reaching, spread, where
from pallas_kernels.rejection_sampling.mosaic_rows import FLOOR, NONE, Best, Row
from pallas_kernels.rejection_sampling.noise import TILE
from pallas_kernels.rejection_sampling.reference import mass_scale

#: The largest k that is looked for in a list: of 128 random parts' largest logits, the 104th has 214 tokens above it.
MOST = 104
#: Where top-p alone filters, as many parts' largest logits are in the list: some 89 tokens.
LIKELY = 64

_i32, _f32 = jnp.int32, jnp.float32


class Kept(NamedTuple):
    """Attributes:
    cut: what a token must reach to pass the filters. listed: length of the joint list, which holds all that do; or -1.
    step: exchanges so far.
    """

    cut: jax.Array
    listed: jax.Array
    step: jax.Array


def keep(row: Row, scratch: Scratch, filters: Filters, best: Best, step: jax.Array) -> Kept:
    """What passes the filters as in reference.filter_logits; the row's maximum is finite."""
    k, low = filters.most(row.vocab), jnp.maximum(best.top + jnp.log(filters.min_p), FLOOR)
    short = (k <= MOST) & ((k > 0) | (filters.top_p < 1.0))
    plain = (k == 0) & (filters.top_p >= 1.0)
    kept = Kept(low, jnp.where(plain, -1, -2), step)
    listed = lambda _, __, step: tuple(_listed(row, scratch, filters, best, k, low, step))
    kept = Kept(*once(short, listed, tuple(kept)))

    def search(*kept: jax.Array) -> tuple[jax.Array, ...]:
        cut, step = threshold(row, scratch, filters, best.parts, best.top, kept[-1])
        return cut, step * 0 - 1, step

    return Kept(*once(kept.listed < -1, search, tuple(kept)))


def _listed(
    row: Row, scratch: Scratch, filters: Filters, best: Best, k: jax.Array, low: jax.Array, step: jax.Array
) -> Kept:
    """By a list; the count is -2 where that is too long or too short."""
    plgpu.commit_smem()
    scratch.joint[pl_tile(0)] = best.parts
    plgpu.commit_smem()
    (above,) = reaching(scratch.joint, None, _i32(TILE), [best.parts], row.interpret)
    wanted = jnp.where(k > 0, k, LIKELY)
    least = jnp.maximum(low, jnp.max(where(above >= wanted, best.parts, spread(FLOOR, _f32))))
    clear(scratch)

    def weighed(_: jax.Array, __: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        parts = where(best.parts >= low, row.exp(best.parts - best.top), spread(0.0, _f32))
        note = lambda begin, xs: collect(row, scratch, begin, xs, least)
        _, scale, (whole,), step = masses(row, best.top, low, jnp.sum(parts), step, note)
        return scale, whole, step

    def counted(step: jax.Array) -> tuple[jax.Array]:
        row.sweep(lambda begin, xs, _: collect(row, scratch, begin, xs, least), ())
        row.cluster.meet()
        return (step,)

    scale, whole, step = once(k == 0, weighed, (best.top * 0.0, k * 0, step))
    (step,) = once(k > 0, counted, (step,))
    count, step = join(row, scratch, step, met=True)

    def choose(cut: jax.Array, _: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        own = [scratch.joint[pl_tile(p)] for p in range(2)]
        highest = lambda above, need: jnp.max(
            jnp.maximum(*(where(a >= need, x, spread(FLOOR, _f32)) for a, x in zip(above, own, strict=True)))
        )

        def by_count(cut: jax.Array) -> tuple[jax.Array]:
            above = reaching(scratch.joint, None, count, own, row.interpret)
            return (jnp.maximum(cut, highest(above, k)),)

        (cut,) = once(k > 0, by_count, (cut,))

        def by_mass(cut: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
            unit = jnp.where(k > 0, mass_scale(weight(row, own, best.top, cut)), scale)
            held = [mass(row, x, best.top, cut, unit) for x in own]
            for p in range(2):
                scratch.amounts[pl_tile(p)] = held[p]
            plgpu.commit_smem()
            inside = jnp.sum(held[0] + held[1])
            need = ceiling(filters.top_p * jnp.where(k > 0, inside, whole).astype(_f32))
            above = reaching(scratch.joint, scratch.amounts, count, own, row.interpret)
            # A list that holds too little, and not all there is, does not tell.
            return jnp.maximum(cut, highest(above, need)), jnp.where((inside < need) & (least > low), 0, 1)

        cut, told = once(filters.top_p < 1.0, by_mass, (cut, k * 0 + 1))
        return cut, jnp.where(told > 0, count, -2), step

    return Kept(*once(count <= LIST, choose, (low, k * 0 - 2, step)))


def total(row: Row, scratch: Scratch, best: Best, kept: Kept) -> tuple[jax.Array, jax.Array]:
    """(sum of exp(x - the row's maximum) over what is kept, exchanges so far)."""
    inside = lambda _, step: (
        weight(row, [scratch.joint[pl_tile(p)] for p in range(2)], best.top, kept.cut),
        step,
    )
    found = once(kept.listed >= 0, inside, (best.top * 0.0, kept.step))
    return once(kept.listed < 0, lambda _, step: weigh(row, best.top, kept.cut, step), found)


def draw(row: Row, scratch: Scratch, key: tuple[jax.Array, jax.Array], best: Best, kept: Kept) -> Any:
    """(token of the largest sum of value and Gumbel noise among those that are kept, exchanges so far)."""

    def half(p: int) -> tuple[jax.Array, jax.Array]:
        value, token = scratch.joint[pl_tile(p)], scratch.tokens[pl_tile(p)]
        return where(value >= kept.cut, value + row.noise(key, token), spread(-jnp.inf, _f32)), token

    def listed(_: jax.Array) -> tuple[jax.Array]:
        def both(score: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            other, at = half(1)
            take = (other > score) | ((other == score) & (at < token))
            return where(take, other, score), where(take, at, token)

        score, token = once(kept.listed > TILE, both, half(0))
        top = jnp.max(score)
        return (jnp.clip(jnp.min(where(score == top, token, spread(NONE, _i32))), 0, row.vocab - 1),)

    (token,) = once(kept.listed >= 0, listed, (kept.listed * 0,))
    race = lambda _, step: row.race(key, kept.cut, best, step)
    return once(kept.listed < 0, race, (token, kept.step))
