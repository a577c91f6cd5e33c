"""Thresholds of min-p, top-k and top-p on Mosaic GPU, for rows that lie in a cluster's shared memory.

A threshold is the largest token value at or above which a row still counts k tokens, or holds p of its mass. It is
found by ranks, not by bisection: the largest logits of the lanes bound it from below (k of them are k tokens, and p of
the mass of them is p of the mass), which leaves a few tokens in question. These go into a list, in which each
thread ranks its own against all others. Only where the list would be too long (flat rows, many equal values) is the
range narrowed first, by histograms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rejection_sampling.mosaic_lanes import (
    add_at,
    append,
    bits,
    math_sum,
    once,
    reaching,
    real,
    spread,
    where,
)  # fmt: skip
from pallas_kernels.rejection_sampling.mosaic_rows import FLOOR, Row
from pallas_kernels.rejection_sampling.noise import TILE
from pallas_kernels.rejection_sampling.reference import from_sortable, mass_scale, sortable

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
    """Shared memory: a member's list of logits and their tokens, the joint list, amounts of its entries; and a
    histogram, or the length of the member's list.
    """

    own: Any
    places: Any
    joint: Any
    tokens: Any
    amounts: Any
    bins: Any

    @staticmethod
    def shapes() -> dict[str, Any]:
        dtypes = {"own": _f32, "places": _i32, "joint": _f32, "tokens": _i32, "amounts": _i32, "bins": _i32}
        return {name: plgpu.SMEM((LIST,), dtype) for name, dtype in dtypes.items()}


class Filters(NamedTuple):
    """A request's filters; 0, 1 and 0 keep all."""

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @property
    def active(self) -> jax.Array:
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)

    def most(self, vocab: int) -> jax.Array:
        """k of top-k, or 0 where it keeps all."""
        return jnp.where((self.top_k > 0) & (self.top_k < vocab), self.top_k, 0)


class _Range(NamedTuple):
    """Where a threshold may lie: [low, high].

    Attributes:
      over: amount above `high`.
      many: 1 where the range is expected to hold more tokens than the list.
      done: 1 where the threshold is low.
      step: exchanges so far.
    """

    low: jax.Array
    high: jax.Array
    over: jax.Array
    many: jax.Array
    done: jax.Array
    step: jax.Array


def threshold(
    row: Row, scratch: Scratch, filters: Filters, tops: jax.Array, top: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(what a token must reach to pass the filters as in reference.filter_logits, exchanges so far).

    Args:
      tops: largest logit of each part of the row. top: of the row, finite.
    """
    k = filters.most(row.vocab)
    low = jnp.maximum(top + jnp.log(filters.min_p), FLOOR)

    def by_count(low: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        one = spread(1, _i32)
        above = _sums_above(row, scratch, tops, one)
        bound = jnp.max(jnp.where(above >= k, tops, FLOOR))
        none = bound <= FLOOR
        bound = jnp.where(none, top - 24.0, bound)  # a guess, where k is more than there are lanes
        amount = lambda x: one if x.ndim else step * 0 + 1
        return _largest(row, scratch, low, jnp.maximum(low, bound), top, k, amount, none & (k > LIST), step)

    def by_mass(cut: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = jnp.where(tops >= cut, row.exp(tops - top), 0.0)
        total, scale, (whole,), step = masses(row, top, cut, jnp.sum(weights), step)
        # Lanes' largest logits that hold p of the mass together, in units that leave room for rounding.
        enough = jnp.minimum(filters.top_p * total * (2.0**20) * (1 + 2.0**-10) + TILE, 2.0**30).astype(_i32)
        above = _sums_above(row, scratch, tops, (weights * (2.0**20)).astype(_i32))
        bound = jnp.max(jnp.where(above >= enough, tops, FLOOR))
        # And tokens below this hold less than 1 - p together, but for rounding: the first pass checks it.
        rest = top + jnp.log((1.0 - filters.top_p) * total / row.vocab)
        guess = jnp.minimum(jnp.maximum(jnp.maximum(cut, rest), bound), top)
        need = ceiling(filters.top_p * whole.astype(_f32))
        amount = lambda x: mass(row, x, top, cut, scale)
        return _largest(row, scratch, cut, guess, top, need, amount, bound <= FLOOR, step)

    found = once(k > 0, by_count, (low, step))
    return once(filters.top_p < 1.0, by_mass, found)


def ceiling(x: jax.Array) -> jax.Array:
    """Mosaic GPU knows no ceil."""
    whole = x.astype(_i32)
    return whole + jnp.where(whole.astype(_f32) < x, 1, 0)


def _sums_above(row: Row, scratch: Scratch, values: jax.Array, amounts: jax.Array) -> jax.Array:
    """For each lane, what all lanes with values at or above its own amount to, [128] int32."""
    plgpu.commit_smem()
    scratch.joint[pl_tile(0)] = values
    scratch.amounts[pl_tile(0)] = amounts
    plgpu.commit_smem()
    return reaching(scratch.joint, scratch.amounts, _i32(TILE), [values], row.interpret)[0]


def pl_tile(index: int) -> slice:
    return slice(index * TILE, (index + 1) * TILE)


_FINE = 2.0**12  # weights are added up as integers: units of 1 / _FINE, and the rest in units of 1 / _FINE**2


def _units(part: jax.Array) -> tuple[jax.Array, jax.Array]:
    whole = (part * _FINE).astype(_i32)
    return whole, ((part * _FINE - whole.astype(_f32)) * _FINE + 0.5).astype(_i32)


def _value(whole: jax.Array, rest: jax.Array) -> jax.Array:
    return whole.astype(_f32) * (1 / _FINE) + rest.astype(_f32) * (1 / _FINE**2)


def weigh(row: Row, top: jax.Array, cut: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of exp(x - top) over x >= cut, exchanges so far); the same for every number of members.

    Eight rows of a lane are added up as floats, in one order, and these as integers.
    """

    def add(_: jax.Array, xs: list[jax.Array], carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        part = _units(math_sum([jnp.where(x >= cut, row.exp(x - top), 0.0) for x in xs]))
        return tuple(a + b for a, b in zip(carry, part, strict=True))

    zero = spread(0, _i32)
    sums, step = row.cluster.sums(step, row.sweep(add, (zero, zero)))
    return _value(*sums), step


def weight(row: Row, xs: list[jax.Array], top: jax.Array, cut: jax.Array) -> jax.Array:
    """As `weigh`, of values that are no row's, 128 each."""
    weights = [where(x >= cut, row.exp(x - top), 0.0) for x in xs]
    whole, rest = zip(*map(_units, weights), strict=True)
    return _value(jnp.sum(math_sum(whole)), jnp.sum(math_sum(rest)))


def mass(row: Row, x: jax.Array, top: jax.Array, cut: jax.Array, scale: jax.Array) -> jax.Array:
    """Integer masses, 0 under `cut`; scale: of reference.mass_scale."""
    power = row.exp(x - top) if x.ndim else jnp.exp(x - top)
    return jnp.where(x >= cut, power * scale + 0.5, 0.0).astype(_i32)


def masses(
    row: Row, top: jax.Array, cut: jax.Array, least: jax.Array, step: jax.Array,
    note: Callable[[jax.Array, list[jax.Array]], Any] = lambda _, __: None, above: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, list[jax.Array], jax.Array]:  # fmt: skip
    """(as `weigh`, `reference.mass_scale` of it, integer masses, exchanges so far).

    Masses: of the tokens from `cut` on, and where `above` is given of those of them above it.

    Args:
      least: at most the sum. Its scale and the next are tried while the sum is not known; it is rarely more.
      note: sees every 8 rows: the first one's number, and their values.
    """
    first = mass_scale(least)
    second = first * 0.5

    def of(xs: list[jax.Array], weights: list[jax.Array], scale: jax.Array) -> list[jax.Array]:
        each = [(w * scale + 0.5).astype(_i32) for w in weights]
        higher = [] if above is None else [where(x > above, m, 0) for x, m in zip(xs, each, strict=True)]
        return [math_sum(each), *([math_sum(higher)] if higher else [])]

    weights_of = lambda xs: [jnp.where(x >= cut, row.exp(x - top), 0.0) for x in xs]

    def add(begin: jax.Array, xs: list[jax.Array], carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        note(begin, xs)
        weights = weights_of(xs)
        part = (*_units(math_sum(weights)), *of(xs, weights, first), *of(xs, weights, second))
        return tuple(a + b for a, b in zip(carry, part, strict=True))

    zeros = (spread(0, _i32),) * (1 if above is None else 2)
    (whole, rest, *both), step = row.cluster.sums(step, row.sweep(add, 2 * (spread(0, _i32),) + 2 * zeros))
    total = _value(whole, rest)
    scale = mass_scale(total)
    sums = [jnp.where(scale == first, a, b) for a, b in zip(both[: len(zeros)], both[len(zeros) :], strict=True)]

    def again(*carry: jax.Array) -> tuple[jax.Array, ...]:
        add = lambda _, xs, sums: tuple(a + b for a, b in zip(sums, of(xs, weights_of(xs), scale), strict=True))
        sums, step = row.cluster.sums(carry[-1], row.sweep(add, zeros))
        return *sums, step

    *sums, step = once((scale != first) & (scale != second), again, (*sums, step))
    return total, scale, sums, step


def _largest(
    row: Row, scratch: Scratch, low: jax.Array, guess: jax.Array, high: jax.Array, need: jax.Array, amount: Amount,
    many: jax.Array, step: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(largest value in [low, high] at or above which the row amounts to `need`, or low; exchanges so far).

    Args:
      guess: where to look first; it is checked.
      many: whether more tokens than the list holds are expected from there on.
    """

    def listed(at: _Range) -> _Range:
        row.cluster.meet()  # others may still read the last list
        clear(scratch)
        row.sweep(lambda begin, xs, _: collect(row, scratch, begin, xs, at.low, at.high), ())
        count, step = join(row, scratch, at.step, met=False)
        at = at._replace(step=step, many=jnp.where(count > LIST, 1, 0))

        def finish(*at: Any) -> tuple[jax.Array, ...]:
            best, inside = _finish(row, scratch, _Range(*at), count, amount, need)
            at = _Range(*at)
            bold = at.over + inside < need  # the guess, or all there is: then low stays
            ended = ~bold | (at.low <= low)
            return tuple(at._replace(low=jnp.where(bold, low, best), done=jnp.where(ended, 1, 0)))

        return _Range(*once(count <= LIST, finish, tuple(at)))

    def thinned(at: _Range) -> _Range:
        # A histogram's bins are a power of two wide, so that their edges are exact.
        width = at.high - at.low
        finest = (bits(jnp.maximum(jnp.abs(at.low), jnp.abs(at.high))) >> 23) - 22
        exponent = jnp.clip((bits(width * (1.0 / (LIST - 6))) >> 23) + 1, 10, 240)
        sift = (width < _WIDE) & (exponent > finest)
        start = tuple(at)
        found = once(sift, lambda *at: tuple(_sift(row, scratch, _Range(*at), amount, need, low, exponent)), start)
        return _Range(*once(~sift, lambda *at: tuple(_narrow(row, _Range(*at), amount, need, low)), found))

    def body(at: _Range) -> _Range:
        many = at.many > 0
        at = _Range(*once(~many, lambda *at: tuple(listed(_Range(*at))), tuple(at)))
        more = (at.many > 0) & (at.done == 0)
        return _Range(*once(more, lambda *at: tuple(thinned(_Range(*at))), tuple(at)))

    zero = step * 0
    start = _Range(guess, high, zero, jnp.where(many, 1, 0), zero, step)
    end = lax.while_loop(lambda at: at.done == 0, body, start)
    return end.low, end.step


def clear(scratch: Scratch) -> None:
    """Empties the member's list."""
    plgpu.commit_smem()
    scratch.bins[0] = _i32(0)
    plgpu.commit_smem()


def collect(row: Row, scratch: Scratch, begin: jax.Array, xs: list[jax.Array], low: Any, high: Any = None) -> tuple[()]:
    """Puts the tokens of 8 rows that lie in [low, high] into the member's list."""
    holds = [x >= low if high is None else (x >= low) & (x <= high) for x in xs]
    found = [(x, row.token(begin + r), here) for r, (x, here) in enumerate(zip(xs, holds, strict=True))]
    append(scratch.bins, scratch.own, scratch.places, found, row.interpret)
    return ()


def join(row: Row, scratch: Scratch, step: jax.Array, *, met: bool) -> tuple[jax.Array, jax.Array]:
    """(tokens in the lists of all members, exchanges so far); see Cluster.join."""
    plgpu.commit_smem()
    own, joint = (scratch.own, scratch.places), (scratch.joint, scratch.tokens)
    found = row.cluster.join(step, scratch.bins, own, joint, met)
    plgpu.commit_smem()
    return found


def _finish(
    row: Row, scratch: Scratch, at: _Range, count: jax.Array, amount: Amount, need: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(the threshold, amount in the range), where all tokens in the range are in the joint list."""
    own = [scratch.joint[pl_tile(p)] for p in range(2)]
    held = [where(x >= at.low, amount(x), 0) for x in own]
    for p in range(2):
        scratch.amounts[pl_tile(p)] = held[p]
    plgpu.commit_smem()
    best = spread(-jnp.inf, _f32)
    above = reaching(scratch.joint, scratch.amounts, count, own, row.interpret)
    for value, reached in zip(own, above, strict=True):
        best = jnp.maximum(best, where(reached + at.over >= need, value, spread(-jnp.inf, _f32)))
    return jnp.max(best), jnp.sum(held[0] + held[1])


def _sift(
    row: Row, scratch: Scratch, at: _Range, amount: Amount, need: jax.Array, lowest: jax.Array, exponent: jax.Array
) -> _Range:
    """One of the bins of a histogram, each 2**(exponent - 127) wide; from `lowest` on where the range does not do."""
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
        scratch.amounts[pl_tile(p)] = row.cluster.over(lambda c, sum_, p=p: sum_ + read(c, p), spread(0, _i32))
    plgpu.commit_smem()
    above = reaching(scratch.joint, scratch.amounts, _i32(LIST), [b.astype(_f32) for b in bins], row.interpret)
    reached = [where(a + at.over >= need, b, -1) for a, b in zip(above, bins, strict=True)]
    best = jnp.max(jnp.maximum(*reached))
    beyond = jnp.sum(math_sum([where(b == best + 1, a, 0) for a, b in zip(above, bins, strict=True)]))
    edge = lambda i: (base + i).astype(_f32) * wide
    low = jnp.maximum(at.low, edge(best))
    high = jnp.minimum(at.high, from_sortable(sortable(edge(best + 1)) - 1))
    reached = jnp.sum(math_sum([where(b == best, a, 0) for a, b in zip(above, bins, strict=True)]))
    # So many tokens at most: none amounts to less than the lowest.
    most = (reached - beyond).astype(_f32) / jnp.maximum(amount(low), 1).astype(_f32)
    inside = at._replace(
        low=low, high=high, over=at.over + beyond, step=step, done=jnp.where(low >= high, 1, 0),
        many=jnp.where(most > LIST, 1, 0),
    )  # fmt: skip
    return _bolder(at._replace(step=step), inside, best < 0, lowest)


def _bolder(at: _Range, inside: _Range, bold: jax.Array, lowest: jax.Array) -> _Range:
    """`inside`, or where the range held too little all from `lowest` on; the end where it was that already."""
    wide = at._replace(low=lowest, done=jnp.where(at.low <= lowest, 1, 0))
    return _Range(*(jnp.where(bold, a, b) for a, b in zip(wide, inside, strict=True)))


def _narrow(row: Row, at: _Range, amount: Amount, need: jax.Array, lowest: jax.Array) -> _Range:
    """A third of the range, or less; from `lowest` on where the range does not do."""
    width = at.high - at.low
    # Wide ranges are those whose lower end nobody knows: distances from the upper end in one ratio.
    ratio = jnp.log(16.0 / jnp.maximum(width, 16.0)) * (1.0 / _TRIES)
    part = lambda i: jnp.where(width > 64.0, jnp.exp(ratio * i), (_TRIES - i) / _TRIES)
    tries = [jnp.clip(at.high - width * part(i), at.low, at.high) for i in range(1, _TRIES)] + [at.high]

    def add(_: jax.Array, xs: list[jax.Array], sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for x in xs:
            value = where(x <= at.high, amount(x), 0)
            sums = tuple(s + where(x >= v, value, 0) for s, v in zip(sums, [at.low, *tries], strict=True))
        return sums

    (whole, *held), step = row.cluster.sums(at.step, row.sweep(add, tuple(spread(0, _i32) for _ in range(_TRIES + 1))))
    low, high, over = at.low, at.high, at.over
    for part_, v in reversed(list(zip(held, tries, strict=True))):  # the last that fails bounds from above
        reached = part_ + at.over
        passes = reached >= need
        low = jnp.where(passes, jnp.maximum(low, v), low)
        high = jnp.where(passes, high, from_sortable(sortable(v) - 1))
        over = jnp.where(passes, over, reached)
    inside = at._replace(low=low, high=high, over=over, step=step, done=jnp.where(low >= high, 1, 0), many=at.many * 0)
    return _bolder(at._replace(step=step), inside, whole + at.over < need, lowest)
