"""Thresholds of min-p, top-k and top-p on Mosaic GPU, for rows that lie in a cluster's shared memory.

A threshold is the largest token value at or above which a row still counts k tokens, or holds p of its mass. It is
found by ranks, not by bisection: the largest logits of the lanes bound it from below (k of them are k tokens, and p of
the mass of them is p of the mass), which leaves a few tokens in question. These go into a list, in which each
thread ranks its own against all others. Only where the list would be too long (flat rows, many equal values) is the
range narrowed first, by histograms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rejection_sampling.mosaic_lanes import (
    add_at,
    bits,
    math_sum,
    once,
    real,
    scatter,
    spread,
    take_numbers,
    where,
)  # fmt: skip
from pallas_kernels.rejection_sampling.mosaic_rows import Row
from pallas_kernels.rejection_sampling.noise import TILE
from pallas_kernels.rejection_sampling.reference import from_sortable, mass_scale, sortable

_LOWEST = -1e38  # under every logit, and far enough from -inf that differences are finite
#: Tokens of the list: two for each thread.
LIST = 2 * TILE
#: A range of logits that is wider than this has an end that nobody knows.
_WIDE = 1024.0
#: Thresholds of a pass that narrows the range.
_TRIES = 3

_i32, _f32 = jnp.int32, jnp.float32

Amount = Callable[[jax.Array], jax.Array]  # int32 of each logit; what lies at or above a threshold is added up


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory: a member's list, the joint list, amounts of its tokens; a histogram, or the list's length."""

    own: Any
    joint: Any
    amounts: Any
    bins: Any

    @staticmethod
    def shapes() -> dict[str, Any]:
        dtypes = {"own": _f32, "joint": _f32, "amounts": _i32, "bins": _i32}
        return {name: plgpu.SMEM((LIST,), dtype) for name, dtype in dtypes.items()}


class Filters(NamedTuple):
    """A request's filters; 0, 1 and 0 keep all."""

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @property
    def active(self) -> jax.Array:
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


class _Range(NamedTuple):
    """Where a threshold may lie: [low, high].

    Attributes:
      over: amount above `high`. need: the amount that is needed. first: whether that is still to be found out.
      done: whether the threshold is low. step: exchanges so far.
    """

    low: jax.Array
    high: jax.Array
    over: jax.Array
    need: jax.Array
    first: jax.Array
    done: jax.Array
    step: jax.Array


def threshold(
    row: Row, scratch: Scratch, filters: Filters, tops: jax.Array, top: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(what a token must reach to pass the filters as in reference.filter_logits, exchanges so far).

    Args:
      tops: largest logit of each lane in all members. top: of the row, finite.
    """
    k = jnp.where((filters.top_k > 0) & (filters.top_k < row.vocab), filters.top_k, 0)
    low = jnp.maximum(top + jnp.log(filters.min_p), _LOWEST)

    def by_count(low: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        one = spread(1, _i32)
        above = _sums_above(scratch, tops, one)
        bound = jnp.max(jnp.where(above >= k, tops, _LOWEST))
        bound = jnp.where(bound > _LOWEST, bound, top - 24.0)  # a guess, where k is more than there are lanes
        return _largest(row, scratch, low, jnp.maximum(low, bound), top, lambda _: k, lambda _: one, step)

    def by_mass(cut: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, step = _weight(row, top, cut, step)
        scale = mass_scale(total)
        # Lanes' largest logits that hold p of the mass together, in units that leave room for rounding.
        share = (jnp.where(tops >= cut, jnp.exp(tops - top), 0.0) * (2.0**20)).astype(_i32)
        enough = jnp.minimum(filters.top_p * total * (2.0**20) * (1 + 2.0**-10) + TILE, 2.0**30).astype(_i32)
        bound = jnp.max(jnp.where(_sums_above(scratch, tops, share) >= enough, tops, _LOWEST))
        # And tokens below this hold less than 1 - p together, but for rounding: the first pass checks it.
        rest = top + jnp.log((1.0 - filters.top_p) * total / row.vocab)
        guess = jnp.minimum(jnp.maximum(jnp.maximum(cut, rest), bound), top)
        need = lambda whole: _ceiling(filters.top_p * whole.astype(_f32))
        amount = lambda x: jnp.where(x >= cut, jnp.exp(x - top) * scale + 0.5, 0.0).astype(_i32)
        return _largest(row, scratch, cut, guess, top, need, amount, step)

    cut, step = once(k > 0, by_count, (low, step))
    return once(filters.top_p < 1.0, by_mass, (cut, step))


def _ceiling(x: jax.Array) -> jax.Array:
    """Mosaic GPU knows no ceil."""
    whole = x.astype(_i32)
    return whole + jnp.where(whole.astype(_f32) < x, 1, 0)


def _sums_above(scratch: Scratch, values: jax.Array, amounts: jax.Array) -> jax.Array:
    """For each lane, what all lanes with values at or above its own amount to, [128] int32."""
    plgpu.commit_smem()
    scratch.joint[pl_tile(0)] = values
    scratch.amounts[pl_tile(0)] = amounts
    plgpu.commit_smem()
    return _rank(scratch, _i32(TILE), (values,))[0]


def _rank(scratch: Scratch, count: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """For each of a thread's values, the amounts of those of the joint list that reach it."""

    def add(j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for i in range(4):
            value, amount = scratch.joint[4 * j + i], scratch.amounts[4 * j + i]
            sums = tuple(s + where(v <= value, amount, 0) for s, v in zip(sums, own, strict=True))
        return sums

    return lax.fori_loop(0, lax.div(count + 3, _i32(4)), add, tuple(spread(0, _i32) for _ in own))


def pl_tile(index: int) -> slice:
    return slice(index * TILE, (index + 1) * TILE)


def _weight(row: Row, top: jax.Array, cut: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of exp(x - top) over x >= cut, exchanges so far); the same for every number of members.

    Eight rows of a lane are added up as floats, in one order, and these as integers: units of 2**-12, and the rest.
    """

    def add(_: jax.Array, xs: list[jax.Array], carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        part = math_sum([jnp.where(x >= cut, jnp.exp(x - top), 0.0) for x in xs]) * (2.0**12)
        whole = part.astype(_i32)
        rest = ((part - whole.astype(_f32)) * (2.0**12) + 0.5).astype(_i32)
        return carry[0] + whole, carry[1] + rest

    zero = spread(0, _i32)
    read, step = row.cluster.share(step, row.sweep(add, (zero, zero)))
    whole, rest = (row.cluster.total(read, p).astype(_f32) for p in (0, 1))
    return whole * (2.0**-12) + rest * (2.0**-24), step


def _largest(
    row: Row, scratch: Scratch, low: jax.Array, guess: jax.Array, high: jax.Array,
    need: Callable[[jax.Array], jax.Array], amount: Amount, step: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(largest value in [low, high] at or above which the row amounts to what is needed, or low; exchanges so far).

    Args:
      guess: where to look first; it is checked.
      need: given what reaches `low`.
    """

    def body(at: _Range) -> _Range:
        whole, inside, count, read, step = _collect(row, scratch, low, at, amount)
        need_ = jnp.where(at.first > 0, need(whole), at.need)
        bold = at.over + inside < need_  # the guess, or all there is: then low stays
        at = at._replace(need=need_, step=step, first=_i32(0) * at.first)
        done = (bold & (at.low <= low)) | (~bold & (at.low >= at.high))
        at = at._replace(low=jnp.where(bold, low, at.low), done=jnp.where(done, 1, 0))
        short = ~bold & ~done & (count <= LIST)
        (best,) = once(short, lambda _: (_finish(row, scratch, at, count, read, amount),), (at.low,))
        at = at._replace(low=jnp.where(short, best, at.low), done=jnp.where(short, 1, at.done))
        # A histogram's bins are a power of two wide, so that their edges are exact.
        width = at.high - at.low
        finest = (bits(jnp.maximum(jnp.abs(at.low), jnp.abs(at.high))) >> 23) - 22
        exponent = jnp.clip((bits(width * (1.0 / (LIST - 6))) >> 23) + 1, 10, 240)
        sift = (width < _WIDE) & (exponent > finest)
        more = ~short & ~bold & ~done
        at = _Range(
            *once(more & sift, lambda *at: tuple(_sift(row, scratch, _Range(*at), amount, exponent)), tuple(at))
        )
        return _Range(*once(more & ~sift, lambda *at: tuple(_narrow(row, _Range(*at), amount)), tuple(at)))

    zero = step * 0
    start = _Range(guess, high, zero, zero, zero + 1, zero, step)
    end = lax.while_loop(lambda at: at.done == 0, lambda at: body(at), start)
    return end.low, end.step


def _collect(
    row: Row, scratch: Scratch, low: jax.Array, at: _Range, amount: Amount
) -> tuple[jax.Array, jax.Array, jax.Array, Callable[[int, int], jax.Array], jax.Array]:
    """(amount from `low` on, amount in the range, tokens there, what reads members' lists of these, exchanges so far).

    Planes 2, 3 and 4 of the exchange are a member's number of tokens, and its list.
    """
    plgpu.commit_smem()
    scratch.bins[0] = _i32(0)
    plgpu.commit_smem()

    def test(_: jax.Array, xs: Sequence[jax.Array], carry: tuple[jax.Array, jax.Array]) -> Any:
        whole, inside = carry
        yes = [(x >= at.low) & (x <= at.high) for x in xs]
        for x, here in zip(xs, yes, strict=True):
            value = amount(x)
            whole, inside = whole + where(x >= low, value, 0), inside + where(here, value, 0)
        return yes, (whole, inside)

    zero = spread(0, _i32)
    counts, (whole, inside) = row.mark(test, (zero, zero))
    count, most = jnp.sum(counts), jnp.max(counts)

    def note(places: list[jax.Array], founds: list[jax.Array], _: tuple[()]) -> tuple[()]:
        for place, found in zip(places, founds, strict=True):
            scatter(scratch.own, take_numbers(scratch.bins, found, row.interpret), row.at(place), found, row.interpret)
        return ()

    row.each_marked(jnp.where(count <= LIST, most, 0), note, ())
    plgpu.commit_smem()
    read, step = row.cluster.share(at.step, [whole, inside, spread(count, _i32)], scratch.own)
    total = jnp.max(math_sum([read(c, 2) for c in range(row.cluster.size)]))
    return row.cluster.total(read, 0), row.cluster.total(read, 1), total, read, step


def _finish(
    row: Row, scratch: Scratch, at: _Range, count: jax.Array, read: Callable[[int, int], jax.Array], amount: Amount
) -> jax.Array:
    """The threshold, where all tokens in the range fit into the list."""
    plgpu.commit_smem()
    offset = spread(0, _i32)
    for c in range(row.cluster.size):
        here = read(c, 2)
        for p in range(2):
            number = p * TILE + row.lane
            scatter(scratch.joint, offset + number, real(read(c, 3 + p)), number < here, row.interpret)
        offset = offset + here
    plgpu.commit_smem()
    own, held = [], []
    for p in range(2):
        here = p * TILE + row.lane < count
        value = where(here, scratch.joint[pl_tile(p)], -jnp.inf)
        own.append(value)
        held.append(where(here, amount(value), 0))
        scratch.amounts[pl_tile(p)] = held[p]
        scratch.joint[pl_tile(p)] = value
    plgpu.commit_smem()
    best = spread(-jnp.inf, _f32)
    for value, above in zip(own, _rank(scratch, count, tuple(own)), strict=True):
        best = jnp.maximum(best, jnp.where(above + at.over >= at.need, value, -jnp.inf))
    return jnp.max(best)


def _sift(row: Row, scratch: Scratch, at: _Range, amount: Amount, exponent: jax.Array) -> _Range:
    """One of the bins of a histogram, each 2**(exponent - 127) wide."""
    wide, inverse = real(exponent << 23), real((254 - exponent) << 23)

    def number(x: jax.Array) -> jax.Array:
        scaled = x * inverse
        whole = scaled.astype(_i32)
        return whole - jnp.where(whole.astype(_f32) > scaled, spread(1, _i32) if x.ndim else 1, 0)

    base = number(at.low)
    plgpu.commit_smem()
    for p in range(2):
        scratch.bins[pl_tile(p)] = spread(0, _i32)
    plgpu.commit_smem()

    def add(_: jax.Array, xs: list[jax.Array], none: tuple[()]) -> tuple[()]:
        for x in xs:
            here = (x >= at.low) & (x <= at.high)
            add_at(scratch.bins, jnp.clip(number(x) - base, 0, LIST - 1), amount(x), here, row.interpret)
        return none

    row.sweep(add, ())
    plgpu.commit_smem()
    read, step = row.cluster.share(at.step, [scratch.bins[pl_tile(p)] for p in range(2)])
    bins = []
    for p in range(2):
        bins.append(p * TILE + row.lane)
        scratch.joint[pl_tile(p)] = bins[p].astype(_f32)
        scratch.amounts[pl_tile(p)] = math_sum([read(c, p) for c in range(row.cluster.size)])
    plgpu.commit_smem()
    above = _rank(scratch, _i32(LIST), tuple(b.astype(_f32) for b in bins))
    reached = [where(a + at.over >= at.need, b, -1) for a, b in zip(above, bins, strict=True)]
    best = jnp.max(jnp.maximum(*reached))
    beyond = jnp.sum(math_sum([where(b == best + 1, a, 0) for a, b in zip(above, bins, strict=True)]))
    edge = lambda i: (base + i).astype(_f32) * wide
    low = jnp.maximum(at.low, edge(best))
    high = jnp.minimum(at.high, from_sortable(sortable(edge(best + 1)) - 1))
    return at._replace(low=low, high=high, over=at.over + beyond, step=step, done=jnp.where(low >= high, 1, 0))


def _narrow(row: Row, at: _Range, amount: Amount) -> _Range:
    """A third of the range, or less."""
    width = at.high - at.low
    # Wide ranges are those whose lower end nobody knows: distances from the upper end in one ratio.
    ratio = jnp.log(16.0 / jnp.maximum(width, 16.0)) * (1.0 / _TRIES)
    part = lambda i: jnp.where(width > 64.0, jnp.exp(ratio * i), (_TRIES - i) / _TRIES)
    tries = [jnp.clip(at.high - width * part(i), at.low, at.high) for i in range(1, _TRIES)] + [at.high]

    def add(_: jax.Array, xs: list[jax.Array], sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for x in xs:
            value = where(x <= at.high, amount(x), 0)
            sums = tuple(s + where(x >= v, value, 0) for s, v in zip(sums, tries, strict=True))
        return sums

    read, step = row.cluster.share(at.step, row.sweep(add, tuple(spread(0, _i32) for _ in tries)))
    low, high, over = at.low, at.high, at.over
    for p, v in reversed(list(enumerate(tries))):  # from the highest down: the last that fails bounds from above
        held = row.cluster.total(read, p) + at.over
        passes = held >= at.need
        low = jnp.where(passes, jnp.maximum(low, v), low)
        fails = ~passes
        high = jnp.where(fails, from_sortable(sortable(v) - 1), high)
        over = jnp.where(fails, held, over)
    return at._replace(low=low, high=high, over=over, step=step, done=jnp.where(low >= high, 1, 0))
