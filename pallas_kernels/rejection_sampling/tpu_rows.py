"""Eight requests' rows in a TPU's VMEM, and the sweeps over them.

    raw  [8, V]   the rows as they came        x     [8, V+] tempered logits, -inf behind V
    mass [8, V+]  integer masses for top-p     draft [8, V+] the draft's probabilities

A request is a sublane; numbers of a request are [8, 1], flags among them int32. Knows what a
threshold, a residual and a race are; the walk over the tree is the kernel's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rejection_sampling.noise import GUMBEL_MAX, PAIR, TILE, Purpose, threefry2x32, to_gumbel, to_uniform
from pallas_kernels.rejection_sampling.reference import (
    RejectionSamplingArgs,
    from_sortable,
    mass_scale,
    midpoint,
    sortable,
)
from pallas_kernels.sizes import round_up

GROUP = 8
CHUNK = 2048
MAX_CHUNKS = TILE  # a lane each
VMEM_SLACK = 6 << 20  # double-buffered small blocks and the compiler's own temporaries

#: Columns of a request's numbers.
TOP_K, SEED, POSITION, TEMPERATURE, INVERSE, TOP_P, LOG_MIN_P = range(7)

_i32, _f32 = jnp.int32, jnp.float32
_INF = float("inf")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about a call.

    Attributes:
      chunk: tokens that a sweep reads at once. width: V rounded up to whole chunks.
      packed: bfloat16 logits, of which two rows share one of 32 bits.
      drafts: rows of draft_probs; 0 in coupled mode.
      nodes_first, drafts_first: whether the kernel reads logits, draft_probs as [N, B, V].
    """

    batch: int
    vocab: int
    chunk: int
    depth: int
    greedy: bool
    packed: bool
    drafts: int
    nodes_first: bool
    drafts_first: bool

    @classmethod
    def of(cls, args: RejectionSamplingArgs) -> Plan:
        b, n, v = args.logits_BNV.shape
        chunk = min(CHUNK, round_up(v, PAIR))
        while -(-v // chunk) > MAX_CHUNKS:
            chunk *= 2
        packed = args.logits_BNV.dtype == jnp.bfloat16
        drafts = 0 if args.drafts is None else args.drafts.shape[1]
        orders = _nodes_first(b, n, packed), _nodes_first(b, drafts, False)
        return cls(b, v, chunk, args.depth, args.greedy, packed, drafts, *orders)

    @property
    def width(self) -> int:
        return round_up(self.vocab, self.chunk)

    @property
    def chunks(self) -> int:
        return self.width // self.chunk

    def buffers(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The rows in VMEM, by name."""
        shape = lambda width, dtype: jax.ShapeDtypeStruct((GROUP, width), dtype)
        out = {"raw": shape(self.vocab, jnp.uint32 if self.packed else _f32), "x": shape(self.width, _f32)}
        if not self.greedy:
            out["mass"] = shape(self.width, _i32)
        if self.drafts:
            out["draft"] = shape(self.width, _f32)
            if self.vocab % TILE:  # a copy of part of a tile must fill its buffer's rows
                out["draft_raw"] = shape(self.vocab, _f32)
        return out

    @property
    def vmem_bytes(self) -> int:
        return sum(GROUP * round_up(s.shape[1], TILE) * 4 for s in self.buffers().values()) + VMEM_SLACK


def _nodes_first(batch: int, nodes: int, packed: bool) -> bool:
    """Whether [N, B, V] is how XLA lays the rows out.

    Tiles span 8 rows (16 of bfloat16), and the product that makes the logits writes the order with less
    padding. Asking for the other one would copy all of them.
    """
    tile = 16 if packed else 8
    if packed and (batch % 2 or nodes % 2):
        return nodes % 2 == 1
    return nodes * round_up(batch, tile) < batch * round_up(nodes, tile)


def take_lane(x: jax.Array, lane_G1: jax.Array | int) -> jax.Array:
    """One lane of each row, [8, 1]; 0 where the lane does not exist. Integers must lie within 2**24."""
    lane = lax.broadcasted_iota(_i32, x.shape, 1)
    return jnp.sum(jnp.where(lane == lane_G1, x, jnp.zeros_like(x)), axis=1, keepdims=True)


def _total(x: jax.Array) -> jax.Array:
    """Sum over lanes of int32 that add up to less than 2**31, exact even where lanes are summed as floats."""
    high = jnp.sum((x >> 12).astype(_f32), axis=1, keepdims=True)
    low = jnp.sum((x & 4095).astype(_f32), axis=1, keepdims=True)
    return (high.astype(_i32) << 12) + low.astype(_i32)


def any_of(x_G1: jax.Array) -> jax.Array:
    return jnp.max(x_G1) > 0


def _tiles(x: jax.Array) -> list[jax.Array]:
    return [x[:, i : i + TILE] for i in range(0, x.shape[1], TILE)]


def _fold(op: Callable[[jax.Array, jax.Array], jax.Array], start: jax.Array, x: jax.Array) -> jax.Array:
    """Reduces a chunk to one tile."""
    for tile in _tiles(x):
        start = op(start, tile)
    return start


class Rows:
    """The rows of eight requests in VMEM, and sweeps over them. Flags are int32 [8, 1]."""

    def __init__(
        self,
        plan: Plan,
        first: jax.Array,
        small: jax.Array,
        logits: Any,
        drafts: Any,
        buffers: dict[str, Any],
        sem: Any,
    ):
        self.plan, self.first, self.logits, self.drafts, self.sem = plan, first, logits, drafts, sem
        self.raw, self.x = buffers["raw"], buffers["x"]
        self.mass: Any = buffers.get("mass")
        self.draft: Any = buffers.get("draft")
        self.draft_raw: Any = buffers.get("draft_raw")
        self.lane = lax.broadcasted_iota(_i32, (GROUP, TILE), 1)
        self.seed = lax.bitcast_convert_type(small[:, SEED : SEED + 1], jnp.uint32)
        self.position = small[:, POSITION : POSITION + 1]
        # Taken by a reduction, which spreads a number over the lanes: Mosaic cannot do that late, inside two loops.
        self.top_k = take_lane(small, TOP_K)
        real = lambda i: take_lane(lax.bitcast_convert_type(small, _f32), i)
        self.inverse, self.top_p, self.log_min_p = real(INVERSE), real(TOP_P), real(LOG_MIN_P)
        self.greedy = (real(TEMPERATURE) == 0).astype(_i32)
        filters = (self.top_k > 0) | (self.top_p < 1.0) | (self.log_min_p > -_INF)
        self.filters = filters.astype(_i32) * (1 - self.greedy)

    def load(self, node: jax.Array, wanted: jax.Array) -> None:
        """Copies the rows of the wanted requests' nodes."""
        # One scalar a request leaves the vector unit: the node, or -1.
        index = jnp.where(wanted > 0, node, -1)
        nodes = [jnp.max(index[j : j + 1]) for j in range(GROUP)]

        plan = self.plan

        def row(rows: Any, nodes_first: bool, j: int, packed: bool = False) -> Any:
            outer, inner = (nodes[j], self.first + j) if nodes_first else (self.first + j, nodes[j])
            if packed:
                return rows.at[outer].bitcast(jnp.uint32).at[pl.ds(inner // 2, 1)]
            return rows.at[outer, pl.ds(inner, 1)]

        def copies(j: int) -> list[tuple[jax.Array, Any]]:
            source = row(self.logits, plan.nodes_first, j, plan.packed)
            out = [(nodes[j] >= 0, pltpu.make_async_copy(source, self.raw.at[pl.ds(j, 1)], self.sem))]
            if self.draft is not None:
                into = self.draft.at[:, pl.ds(0, plan.vocab)] if self.draft_raw is None else self.draft_raw
                into = into.at[pl.ds(j, 1)]
                copy = pltpu.make_async_copy(row(self.drafts, plan.drafts_first, j), into, self.sem)
                out.append(((nodes[j] >= 0) & (nodes[j] < plan.drafts), copy))
            return out

        for phase in ("start", "wait"):
            for j in range(GROUP):
                for here, copy in copies(j):
                    pl.when(here)(getattr(copy, phase))

    def prepare(self, node: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Fills x from raw. Returns (maximum, its first token, whether usable, maximum of each chunk in its lane)."""
        plan = self.plan
        chunk, whole = plan.chunk, plan.vocab // plan.chunk
        # Of two bfloat16 rows in one, the second has the upper halves.
        upper = (lax.broadcasted_iota(_i32, (GROUP, 1), 0) if plan.nodes_first else node) % 2

        def tempered(raw: jax.Array) -> jax.Array:
            if plan.packed:
                odd = jnp.broadcast_to(upper, raw.shape) > 0
                raw = jnp.where(odd, raw & jnp.uint32(0xFFFF0000), raw << jnp.uint32(16))
                raw = lax.bitcast_convert_type(raw, _f32)
            return raw if plan.greedy else raw * self.inverse

        def measure(base: Any, x: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            best, where, bad, peaks = carry
            peak = jnp.full((GROUP, TILE), -_INF, _f32)
            for i, tile in enumerate(_tiles(x)):
                better = tile > best
                best = jnp.where(better, tile, best)
                where = jnp.where(better, base + i * TILE + self.lane, where)
                bad = jnp.where(tile != tile, 1, bad)
                peak = jnp.maximum(peak, tile)
            peaks = jnp.where(self.lane == base // chunk, jnp.max(peak, axis=1, keepdims=True), peaks)
            return best, where, bad, peaks

        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = pl.ds(pl.multiple_of(i * chunk, TILE), chunk)
            x = tempered(self.raw[:, at])
            if not plan.greedy:
                self.x[:, at] = x
            if self.draft_raw is not None:
                self.draft[:, at] = self.draft_raw[:, at]
            return measure(i * chunk, x, carry)

        low = jnp.full((GROUP, TILE), -_INF, _f32)
        zero = jnp.zeros((GROUP, TILE), _i32)
        carry = (low, zero, zero, low)
        if whole:
            carry = lax.fori_loop(0, whole, body, carry)
        if plan.vocab % chunk:
            base, tile_end = whole * chunk, plan.vocab // TILE * TILE
            self.x[:, base:] = jnp.full((GROUP, chunk), -_INF, _f32)
            for start, end in ((base, tile_end), (tile_end, plan.vocab)):
                if start < end:
                    self.x[:, start:end] = tempered(self.raw[:, start:end])
                    if self.draft_raw is not None:
                        self.draft[:, start:end] = self.draft_raw[:, start:end]
            carry = measure(base, self.x[:, base:], carry)
        best, where, bad, peaks = carry
        top = jnp.max(best, axis=1, keepdims=True)
        first = jnp.min(jnp.where(best == top, where, plan.vocab - 1), axis=1, keepdims=True)
        fine = (jnp.max(bad, axis=1, keepdims=True) == 0) & (jnp.abs(top) < _INF)
        return top, first, fine.astype(_i32), peaks

    def sweep(self, body: Callable[..., Any], start: Any, *names: str) -> Any:
        """Runs body(base, chunks of the named buffers..., carry) over the vocabulary."""
        refs = [getattr(self, name) for name in names]

        def step(i: jax.Array, carry: Any) -> Any:
            base = pl.multiple_of(i * self.plan.chunk, TILE)
            return body(base, *(ref[:, pl.ds(base, self.plan.chunk)] for ref in refs), carry)

        return lax.fori_loop(0, self.plan.chunks, step, start)

    def threshold(self, top: jax.Array, active: jax.Array) -> jax.Array:
        """The least tempered logit that min-p, top-k and top-p keep, [8, 1]; see reference.filter_logits."""
        on = (self.filters * active) > 0
        floor = jnp.where(on & (self.log_min_p > -_INF), top + self.log_min_p, -_INF)
        k = jnp.where(on, self.top_k, 0)
        p = jnp.where(on, self.top_p, 1.0)
        zero = jnp.zeros((GROUP, TILE), _i32)

        def count(_: jax.Array, x: jax.Array, at_least: jax.Array) -> jax.Array:
            return (x >= at_least).astype(_i32)

        cut = lax.cond(any_of(k), lambda: self._search(count, k, floor, top, ("x",)), lambda: floor)

        def nucleus() -> jax.Array:
            def weights(_: jax.Array, x: jax.Array, carry: jax.Array) -> jax.Array:
                return _fold(jnp.add, carry, jnp.where(x >= cut, jnp.exp(x - top), 0.0))

            total = self.sweep(weights, jnp.zeros((GROUP, TILE), _f32), "x")
            scale = mass_scale(jnp.sum(total, axis=1, keepdims=True))

            def masses(base: jax.Array, x: jax.Array, carry: jax.Array) -> jax.Array:
                weight = jnp.where(x >= cut, jnp.exp(x - top), 0.0)
                mass = (weight * scale + 0.5).astype(_i32)
                self.mass[:, pl.ds(base, self.plan.chunk)] = mass
                return _fold(jnp.add, carry, mass)

            total = _total(self.sweep(masses, zero, "x")).astype(_f32)
            need = jnp.where(p < 1.0, jnp.maximum(jnp.ceil(p * total).astype(_i32), 1), 0)
            held = lambda mass, x, at_least: jnp.where(x >= at_least, mass, 0)
            return self._search(held, need, cut, top, ("mass", "x"))

        return lax.cond(any_of((p < 1.0).astype(_i32)), nucleus, lambda: cut)

    def _search(
        self, amount: Callable[..., jax.Array], need: jax.Array, low: jax.Array, top: jax.Array, names: tuple[str, ...]
    ) -> jax.Array:
        """The largest token value in [low, top] with at least `need` at or above it; low where need is 0.

        Bisection that jumps to the nearest values present: its steps follow the tokens in question, not the
        bits of a float, and ties end it as well.
        """

        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            lo, hi = carry
            middle = midpoint(lo, hi)
            mid = from_sortable(middle)

            def step(base: jax.Array, *args: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                *chunks, (sums, above, below) = args
                x = chunks[-1]
                inside = x >= mid
                sums = _fold(jnp.add, sums, amount(chunks[0], x, mid))
                above = _fold(jnp.minimum, above, jnp.where(inside, x, _INF))
                below = _fold(jnp.maximum, below, jnp.where(inside, -_INF, x))
                return sums, above, below

            full = lambda v: jnp.full((GROUP, TILE), v, _f32)
            sums, above, below = self.sweep(step, (jnp.zeros((GROUP, TILE), _i32), full(_INF), full(-_INF)), *names)
            passes, unsure = _total(sums) >= need, lo < hi
            up = jnp.clip(sortable(jnp.min(above, axis=1, keepdims=True)), middle, hi)
            down = jnp.clip(sortable(jnp.max(below, axis=1, keepdims=True)), lo, middle - 1)
            return jnp.where(unsure & passes, up, lo), jnp.where(unsure & ~passes, down, hi)

        lo, hi = sortable(low), jnp.where(need > 0, sortable(top), sortable(low))
        lo, _ = lax.while_loop(lambda c: any_of((c[0] < c[1]).astype(_i32)), body, (lo, hi))
        return from_sortable(lo)

    def log_total(self, top: jax.Array, cut: jax.Array) -> jax.Array:
        """log-sum-exp of what is kept, [8, 1]."""
        add = lambda _, x, carry: _fold(jnp.add, carry, jnp.where(x >= cut, jnp.exp(x - top), 0.0))
        total = self.sweep(add, jnp.zeros((GROUP, TILE), _f32), "x")
        return top + jnp.log(jnp.sum(total, axis=1, keepdims=True))

    def residual(self, x: jax.Array, draft: jax.Array, cut: jax.Array, log_total: jax.Array, a: jax.Array) -> jax.Array:
        """(p - a q)+ of a chunk."""
        left = jnp.exp(x - log_total) - a * draft
        return jnp.where((x >= cut) & (left > 0), left, 0.0)  # behind V, draft may hold a NaN

    def residual_mass(self, cut: jax.Array, log_total: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(sum, maximum) of (p - a q)+, [8, 1] each."""

        def add(_: jax.Array, x: jax.Array, draft: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            left = self.residual(x, draft, cut, log_total, a)
            return _fold(jnp.add, carry[0], left), _fold(jnp.maximum, carry[1], left)

        zero = jnp.zeros((GROUP, TILE), _f32)
        total, peak = self.sweep(add, (zero, zero), "x", "draft")
        return jnp.sum(total, axis=1, keepdims=True), jnp.max(peak, axis=1, keepdims=True)

    def pick(self, ref: Any, token: jax.Array) -> jax.Array:
        """The value at one token of each row, [8, 1]."""
        first = [pl.multiple_of(jnp.max(token[j : j + 1]) // TILE * TILE, TILE) for j in range(GROUP)]
        tiles = jnp.concatenate([ref[j : j + 1, pl.ds(first[j], TILE)] for j in range(GROUP)], axis=0)
        return take_lane(tiles, token % TILE)

    def coins(self, position: jax.Array) -> jax.Array:
        """Uniform noise of children by their ordinal in the lanes, [8, 128]."""
        wide = lambda x: jnp.broadcast_to(x, (GROUP, TILE))
        lane, purpose = self.lane.astype(jnp.uint32), jnp.full((GROUP, TILE), int(Purpose.ACCEPT), jnp.uint32)
        return to_uniform(threefry2x32(wide(self.seed), wide(position.astype(jnp.uint32)), lane, purpose)[0])

    def race(
        self, active: jax.Array, position: jax.Array, cut: jax.Array, best: jax.Array, peaks: jax.Array,
        bound: jax.Array, score: Callable[..., jax.Array], *names: str
    ) -> jax.Array:  # fmt: skip
        """First token of the largest score plus Gumbel noise, [8, 1].

        Args:
          best: what to return where no token scores.
          peaks: maximum of x in each chunk. bound: no chunk below it can win, the noise's bounds included.
          score: of a chunk, from the chunks of x and of the other named buffers.
        """
        wide = lambda x: jnp.broadcast_to(x, (GROUP, TILE))
        seed, position = wide(self.seed), wide(position.astype(jnp.uint32))
        purpose = jnp.full((GROUP, TILE), int(Purpose.TARGET), jnp.uint32)
        hot = jnp.where((active > 0) & (peaks + GUMBEL_MAX >= bound), 1, 0)
        hot = jnp.max(hot, axis=0, keepdims=True)

        def draw(base: jax.Array, *args: Any) -> tuple[jax.Array, jax.Array]:
            x, *others, (top, where) = args
            plain = jnp.where(x >= cut, score(x, *others), -_INF)
            for start in range(0, self.plan.chunk, PAIR):
                pair = (base + start) // 2 + self.lane
                words = threefry2x32(seed, position, pair.astype(jnp.uint32), purpose)
                for first, word in zip((start, start + TILE), words, strict=True):
                    total = plain[:, first : first + TILE] + to_gumbel(word)
                    better = total > top
                    top = jnp.where(better, total, top)
                    where = jnp.where(better, base + first + self.lane, where)
            return top, where

        def step(base: jax.Array, *args: Any) -> tuple[jax.Array, jax.Array]:
            worth = jnp.max(jnp.where(self.lane[:1] == base // self.plan.chunk, hot, 0)) > 0
            return lax.cond(worth, lambda: draw(base, *args), lambda: args[-1])

        start = (jnp.full((GROUP, TILE), -_INF, _f32), wide(best))
        top, where = self.sweep(step, start, "x", *names)
        highest = jnp.max(top, axis=1, keepdims=True)
        first = jnp.min(jnp.where(top == highest, where, self.plan.vocab - 1), axis=1, keepdims=True)
        return jnp.where(highest > -_INF, first, best)
