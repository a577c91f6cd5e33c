"""Thresholds of min-p, top-k and top-p for a team of GPU programs.

A row is surveyed once: the maximum of each chunk tells later passes which chunks they need not
read, and bounds the search for the k-th largest from below. A pass tries several thresholds at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rejection_sampling.gpu_rows import ROWS, Pair, Program, pick
from pallas_kernels.rejection_sampling.reference import from_sortable, mass_scale, sortable

_LOWEST = -1e38  # under every logit, and far enough from -inf that differences are finite
_TRIES = ROWS - 2  # thresholds of a pass; the other two values that it shares are extremes

_i32, _f32 = jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True)
class Filters:
    """A request's filters; 0, 1 and 0 keep all."""

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @property
    def active(self) -> jax.Array:
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


def survey(program: Program, node: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(maximum of each chunk, the row's maximum, sum of exp(x - maximum), exchanges so far)."""

    def body(chunk: jax.Array, x: Pair, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tops_L, sums_L = carry
        top = jnp.maximum(*x).max()
        base = jnp.where(top > -jnp.inf, top, 0.0)
        total = (jnp.exp(x[0] - base) + jnp.exp(x[1] - base)).sum()
        here = program.lane_L == chunk
        return jnp.where(here, top, tops_L), jnp.where(here, total, sums_L)

    def merge(tops_L: jax.Array, sums_L: jax.Array) -> tuple[jax.Array, jax.Array]:
        tops_L = jnp.where(program.live_L, tops_L, -jnp.inf)
        top = tops_L.max()
        weight_L = jnp.where(tops_L > -jnp.inf, jnp.exp(tops_L - top), 0.0)
        return top, (sums_L * weight_L).sum()

    zeros_L = jnp.zeros(program.lane_L.shape, _f32)
    tops_L, sums_L = program.sweep(node, body, (zeros_L, zeros_L))
    (top, total), step = program.by_chunk(step, [tops_L, sums_L], merge)
    if program.team.size > 1:
        tops_L = program.column(program.team.again(step, (tops_L.shape[0], 2), program.chunks), 0)
    return jnp.where(program.live_L, tops_L, -jnp.inf), top, total, step


def weigh(
    program: Program, node: jax.Array, step: jax.Array, tops_L: jax.Array, top: jax.Array, cut: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(sum of exp(x - top) over x >= cut, exchanges so far)."""

    def body(chunk: jax.Array, x: Pair, sums_L: jax.Array) -> jax.Array:
        first, second = (jnp.where(v >= cut, jnp.exp(v - top), 0.0) for v in x)
        return jnp.where(program.lane_L == chunk, (first + second).sum(), sums_L)

    zeros_L = jnp.zeros(program.lane_L.shape, _f32)
    return program.sum_by_chunk(step, program.sweep(node, body, zeros_L, program.above(tops_L, cut)))


def _largest(
    program: Program, node: jax.Array, step: jax.Array, tops_L: jax.Array, within: tuple[jax.Array, ...],
    need: Callable[[jax.Array], jax.Array], measure: Callable[[jax.Array], jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(largest threshold above which the row still measures what is needed, exchanges so far).

    Each pass tries several thresholds and takes the extremes of what lies between the bounds; the
    search ends when the bounds meet on one value, or on the very count.

    Args:
      within: the least threshold, a guess of it for the first pass, the largest.
      need: what is needed, given what reaches the least. measure: of logits, below 2**31 in all; None counts them.
    """
    low, start, high = within
    row_P = jnp.arange(ROWS, dtype=_i32)
    tried_P = row_P < _TRIES

    def body(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, goal, first, step = carry
        spread_P = (row_P.astype(_f32) - first) / (_TRIES - 1 - first)
        base = jnp.where(first > 0, start, low)
        at_P = jnp.where(row_P == _TRIES - 1, high, base + (high - base) * spread_P)
        at_P = jnp.where(tried_P, jnp.where(row_P == 0, low, at_P), jnp.inf)

        def visit(chunk: jax.Array, x: Pair, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            sum_PC, least_C, most_C = carry
            for v in x:
                value_C = jnp.ones(v.shape, _i32) if measure is None else measure(v)
                sum_PC = sum_PC + jnp.where(v[None, :] >= at_P[:, None], value_C[None, :], 0)
                least_C = jnp.minimum(least_C, jnp.where(v >= low, v, jnp.inf))
                most_C = jnp.maximum(most_C, jnp.where(v <= high, v, -jnp.inf))
            return sum_PC, least_C, most_C

        full = lambda x: jnp.full(program.draw_C.shape, x, _f32)
        init = (jnp.zeros((ROWS, program.chunk // 2), _i32), full(jnp.inf), full(-jnp.inf))
        sum_PC, least_C, most_C = program.sweep(node, visit, init, program.above(tops_L, low))

        def merge(words_SP: jax.Array, live_S: jax.Array) -> tuple[jax.Array, ...]:
            value_S = lambda index: lax.bitcast_convert_type(pick(words_SP, index), _f32)
            least = jnp.where(live_S, value_S(_TRIES), jnp.inf).min()
            most = jnp.where(live_S, value_S(_TRIES + 1), -jnp.inf).max()
            sum_P = jnp.where(live_S[:, None] & tried_P[None, :], words_SP, 0).sum(axis=0)
            wanted = jnp.where(first > 0, need(jnp.where(row_P == 0, sum_P, 0).sum()), goal)
            passes_P = tried_P & (sum_P >= wanted)
            over_P = (row_P == 0) & ~passes_P  # even `low` has too little: it stays
            if measure is None:
                over_P = over_P | (passes_P & (sum_P == wanted))
            ceiling = jnp.where(tried_P & ~passes_P & (row_P > 0), at_P, jnp.inf).min()
            below = jnp.minimum(jnp.minimum(high, from_sortable(sortable(ceiling) - 1)), most)
            above = jnp.maximum(jnp.where(passes_P, at_P, low).max(), least)
            return above, jnp.where(jnp.where(over_P, 1, 0).max() > 0, above, below), wanted

        words_P = lax.bitcast_convert_type(jnp.where(row_P == _TRIES, least_C.min(), most_C.max()), _i32)
        words_P = jnp.where(tried_P, sum_PC.sum(axis=1), words_P)
        (low, high, goal), step = program.by_member(step, words_P, merge)
        return low, high, goal, first * 0.0, step

    low, *_, step = lax.while_loop(lambda c: c[0] < c[1], body, (low, high, _i32(0), jnp.ones((), _f32), step))
    return low, step


def threshold(
    program: Program, filters: Filters, node: jax.Array, step: jax.Array, tops_L: jax.Array, top: jax.Array,
    total: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """What a token must reach to pass min-p, top-k and top-p, as in reference.filter_logits.

    Args:
      tops_L, top, total: as from `survey`.
    """
    usable = (top < jnp.inf) & (top > -jnp.inf)
    low = jnp.maximum(top + jnp.log(filters.min_p), _LOWEST)
    k = jnp.where((filters.top_k > 0) & (filters.top_k < program.vocab), filters.top_k, 0)

    def by_count() -> tuple[jax.Array, jax.Array]:
        # At least k tokens reach the k-th largest maximum of a chunk.
        above_L = jnp.where(tops_L[None, :] >= tops_L[:, None], 1, 0).sum(axis=1)
        bound = jnp.where(above_L >= k, tops_L, _LOWEST).max()
        lowest = jnp.maximum(low, bound)
        start = jnp.maximum(lowest, top - 24.0)
        return _largest(program, node, step, tops_L, (lowest, start, top), lambda _: k, None)

    cut, step = lax.cond(usable & (k > 0), by_count, lambda: (low, step))

    def by_mass() -> tuple[jax.Array, jax.Array]:
        fewer = (k > 0) | (filters.min_p > 0)
        kept, after = lax.cond(fewer, lambda: weigh(program, node, step, tops_L, top, cut), lambda: (total, step))
        scale = mass_scale(kept)
        # Tokens below this hold less than 1 - p together, but for rounding.
        start = top + jnp.log((1.0 - filters.top_p) * kept / program.vocab)
        start = jnp.minimum(jnp.maximum(cut, start), top)
        measure = lambda x: jnp.where(x >= cut, jnp.exp(x - top) * scale + 0.5, 0.0).astype(_i32)
        need = lambda whole: jnp.ceil(filters.top_p * whole.astype(_f32)).astype(_i32)
        return _largest(program, node, after, tops_L, (cut, start, top), need, measure)

    return lax.cond(usable & (filters.top_p < 1.0), by_mass, lambda: (cut, step))
