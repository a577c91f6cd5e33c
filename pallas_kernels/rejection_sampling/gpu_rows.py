"""A team of GPU programs on one request's rows: how they sweep them, and how they exchange what they found.

The vocabulary is cut into chunks, and each member owns a stretch of them. What is merged does
not depend on the number of members: maxima, counts and integer masses are exact, and sums of
floats are kept by chunk and added up in one order. Every member merges the same words in the
same order, so all of them know the same without electing one.

Knows what a residual and a race are; the walk over the tree is the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import triton as plgpu
from pallas_kernels.rejection_sampling.noise import (
    GUMBEL_BOUND,
    TILE,
    Purpose,
    gumbel_bound,
    threefry2x32,
    to_gumbel,
)
from pallas_kernels.sizes import power_of_two

NONE = 2**30  # no node, no token
ROWS = 8  # values of an exchange, at most

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32

Pair = tuple[jax.Array, jax.Array]  # what holds for a chunk's tokens that take first, and second, words of the draws
Reach = Callable[[jax.Array], jax.Array]  # which chunks a sweep reads


def table_words(vocab: int, chunk: int, members: int) -> int:
    """uint32 words of each of a request's two slots."""
    return max(4 * -(-vocab // chunk), 2 * ROWS * members)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _i32)


def _float(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _f32)


class Team:
    """The programs of one request, and the table through which they exchange words.

    Words are read while others write them. So no two threads may hold copies of a word: one could
    find it fresh and the other not, and they would part at the next barrier. Triton copies
    the entries of tensors with fewer entries than a program has threads; `width` keeps them larger.
    """

    def __init__(self, table_ref: Any, request: jax.Array, member: jax.Array, size: int, warps: int) -> None:
        self.table_ref, self.request, self.member, self.size, self.warps = table_ref, request, member, size, warps

    def width(self, values: int, lanes: int) -> int:
        """Lanes of a tensor that exchanges so many values in so many lanes."""
        return max(power_of_two(lanes), 32 * self.warps // (2 * values), 2)

    def share(
        self, step: jax.Array, words_LP: jax.Array, lanes: int, mine_L: jax.Array,
        merge: Callable[[jax.Array], tuple[jax.Array, ...]],
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
        """Merges every member's words.

        Args:
          step: exchanges so far.
          words_LP: int32, this member's own at its lanes.
          lanes: lanes in use, the first ones.
          mine_L: which are this member's; each lane is one member's.
          merge: from all words (unspecified in lanes not in use) to scalars.

        Returns:
          (what `merge` made of them, exchanges so far).
        """
        step = step + 1
        if self.size == 1:
            return merge(words_LP), step
        # Both halves go out in one instruction: each atomic waits for the one before.
        shape = words_LP.shape
        assert 2 * words_LP.size >= 32 * self.warps
        at, half_LPH, _ = self._at(step, shape, lanes)
        words = lax.bitcast_convert_type(words_LP, _u32)[:, :, None]
        value = jnp.where(half_LPH == 0, words << _u32(16), words & _u32(0xFFFF0000)) | step.astype(_u32)
        mine = jnp.broadcast_to(mine_L[:, None, None], value.shape)
        plgpu.atomic_xchg(self.table_ref, at, value, mask=mine)

        # The loop carries scalars: jaxlib 0.10's Triton crashes on loaded tensors that a while loop carries.
        def poll(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            words, missing = self.read(step, shape, lanes)
            merged = lax.cond(missing > 0, lambda: carry[1:], lambda: merge(words))
            return missing, *merged

        empty = (jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(merge, words_LP))
        _, *merged = lax.while_loop(lambda carry: carry[0] > 0, poll, (_i32(1), *empty))
        plgpu.debug_barrier()  # no warp may go on to the next exchange while another still reads this one
        return tuple(merged), step

    def read(self, step: jax.Array, shape: tuple[int, ...], lanes: int) -> tuple[jax.Array, jax.Array]:
        """(words of an exchange, whether any has yet to arrive)."""
        at, half_LPH, live_LPH = self._at(step, shape, lanes)
        value = plgpu.load(self.table_ref.at[at], mask=live_LPH, other=_u32(0), volatile=True)
        stale = live_LPH & ((value & _u32(0xFFFF)) != step.astype(_u32))
        part = jnp.where(half_LPH == 0, value >> _u32(16), value & _u32(0xFFFF0000))
        words_LP = lax.bitcast_convert_type(part, _i32).sum(axis=2)
        return words_LP, jnp.where(stale, 1, 0).max(axis=2).max(axis=1).max(axis=0)

    def again(self, step: jax.Array, shape: tuple[int, ...], lanes: int) -> jax.Array:
        """The words [L, P] of the latest exchange, once more."""
        words_LP, _ = self.read(step, shape, lanes)
        plgpu.debug_barrier()
        return words_LP

    def _at(
        self, step: jax.Array, shape: tuple[int, ...], lanes: int
    ) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        """(where an exchange's half words lie, which half each is, which are in use)."""
        width, values = shape
        lane, value, half = (lax.broadcasted_iota(_i32, (width, values, 2), axis) for axis in range(3))
        return (self.request, step % 2, (lane * values + value) * 2 + half), half, lane < lanes


class Program:
    """One program's share of one request: its refs, its parameters, and sweeps over its chunks."""

    def __init__(
        self, logits_ref: Any, draft_ref: Any, team: Team, chunk: int, each: int, temperature: jax.Array | None
    ) -> None:
        self.logits_ref, self.draft_ref, self.team, self.request = logits_ref, draft_ref, team, team.request
        self.vocab, self.chunk = logits_ref.shape[2], chunk
        self.chunks, self.each = -(-self.vocab // chunk), each
        self.first = team.member * each
        self.last = jnp.minimum(self.first + each, self.chunks)
        self.draw_C = jnp.arange(chunk // 2, dtype=_i32)  # draws of the first chunk, and the tokens they serve
        # Wide loads have another layout than the draws, which costs a trip through shared memory. A floor
        # division hides from Triton that tokens lie side by side; a truncating one shows it.
        tile_C = self.draw_C // TILE if temperature is not None else lax.div(self.draw_C, _i32(TILE))
        self.token_C = self.draw_C + tile_C * TILE
        self.inverse = None
        self.sampled = None
        if temperature is not None:
            self.sampled = temperature > 0
            self.inverse = 1.0 / jnp.where(self.sampled, temperature, 1.0)
        self.lane_L = jnp.arange(team.width(1, self.chunks), dtype=_i32)
        self.mine_L = (self.lane_L >= self.first) & (self.lane_L < self.last)
        self.live_L = self.lane_L < self.chunks

    def tokens(self, chunk: jax.Array) -> Pair:
        first = chunk * self.chunk + self.token_C
        return first, first + TILE

    def load(
        self, ref: Any, node: jax.Array, token: jax.Array, other: float, mask: jax.Array | None = None
    ) -> jax.Array:
        """Entries of a row; `other` behind the vocabulary and where the mask is off."""
        live = token < self.vocab
        live = live if mask is None else live & mask
        return plgpu.load(ref.at[self.request, node, token], mask=live, other=jnp.asarray(other, ref.dtype))

    def tempered(self, logits: jax.Array) -> jax.Array:
        """float32 logits over the temperature; NaN becomes inf, which only a broken row holds."""
        x = logits.astype(_f32)
        x = jnp.where(x < jnp.inf, x, jnp.inf)
        return x if self.inverse is None else x * self.inverse

    def sweep(
        self, node: jax.Array, body: Callable[[jax.Array, Pair, Any], Any], init: Any,
        reach: Reach | None = None,
    ) -> Any:  # fmt: skip
        """Folds `body(chunk, tempered logits, carry)` over this member's chunks, the next one in flight.

        Args:
          reach: which chunks matter; the others are not read.
        """

        def ahead(chunk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            wanted = chunk < self.last
            if reach is not None:
                wanted = wanted & reach(chunk)
            first, second = (self.load(self.logits_ref, node, v, -jnp.inf, wanted) for v in self.tokens(chunk))
            return wanted.astype(_i32), first, second

        def step(chunk: jax.Array, carry: Any) -> Any:
            (wanted, first, second), inner = carry
            following = ahead(chunk + 1)
            visit = lambda inner: body(chunk, (self.tempered(first), self.tempered(second)), inner)
            inner = visit(inner) if reach is None else lax.cond(wanted > 0, visit, lambda inner: inner, inner)
            return following, inner

        return lax.fori_loop(self.first, self.last, step, (ahead(self.first), init))[1]

    def above(self, tops_L: jax.Array, low: jax.Array) -> Reach:
        """`reach` of the chunks whose maximum is at least `low`."""
        return lambda chunk: jnp.where(self.lane_L == chunk, tops_L, -jnp.inf).max() >= low

    def by_chunk(
        self, step: jax.Array, values: Sequence[jax.Array], merge: Callable[..., tuple[jax.Array, ...]]
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Merges float values [L] of each chunk; `merge` finds 0 in lanes without one."""
        shape = (self.lane_L.shape[0], power_of_two(len(values)))
        value_LP = lax.broadcasted_iota(_i32, shape, 1)
        words_LP = jnp.broadcast_to(_bits(values[0])[:, None], shape)
        for i, value_L in enumerate(values[1:], start=1):
            words_LP = jnp.where(value_LP == i, jnp.broadcast_to(_bits(value_L)[:, None], shape), words_LP)
        columns = lambda words_LP: merge(*(self.column(words_LP, i) for i in range(len(values))))
        return self.team.share(step, words_LP, self.chunks, self.mine_L, columns)

    def column(self, words_LP: jax.Array, index: int) -> jax.Array:
        """One of the values that `by_chunk` shares."""
        return jnp.where(self.live_L, _float(pick(words_LP, index)), 0.0)

    def sum_by_chunk(self, step: jax.Array, sum_L: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(sum over all chunks, exchanges so far); one order of addition, whatever the team."""
        (total,), step = self.by_chunk(step, [sum_L], lambda sum_L: (sum_L.sum(),))
        return total, step

    def by_member(
        self, step: jax.Array, words_P: jax.Array, merge: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Merges words [P] of each member; `merge` takes (words [S, P], which members there are [S])."""
        values, size = words_P.shape[0], self.team.size
        lane_S = jnp.arange(self.team.width(values, size), dtype=_i32)
        words_SP = jnp.broadcast_to(words_P[None, :], (lane_S.shape[0], values))
        merge_live = lambda words_SP: merge(words_SP, lane_S < size)
        return self.team.share(step, words_SP, size, lane_S == self.team.member, merge_live)


def pick(words_LP: jax.Array, index: int) -> jax.Array:
    """One column, [L] int32: the sum of a word and zeros."""
    return jnp.where(lax.broadcasted_iota(_i32, words_LP.shape, 1) == index, words_LP, 0).sum(axis=1)


def highest(program: Program, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(largest tempered logit of this member's chunks, its token); the lowest token among equals."""

    def body(chunk: jax.Array, x: Pair, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best_C, token_C = carry
        for x_C, v_C in zip(x, program.tokens(chunk), strict=True):
            better_C = x_C > best_C
            best_C, token_C = jnp.where(better_C, x_C, best_C), jnp.where(better_C, v_C, token_C)
        return best_C, token_C

    init = (jnp.full(program.draw_C.shape, -jnp.inf, _f32), jnp.zeros(program.draw_C.shape, _i32))
    best_C, token_C = program.sweep(node, body, init)
    best = best_C.max()
    return best, jnp.where(best_C == best, token_C, NONE).min()


class Race:
    """Gumbel-max over one row: argmax of its base scores plus noise.

    The base is the tempered logits from `cut` on, or where `a` is positive the logarithm of the
    residual (p - a q)+ with p = exp(x - log_total).

    Drawing takes about 35 integer operations a token, more than reading it; the two logarithms of
    Gumbel noise would take 45 more. So a sweep keeps the largest upper bound of scores in each
    lane only. Then lanes are evaluated, all tokens of a lane at once, while a lane's bound reaches
    the best score: nearly always one lane.
    """

    def __init__(
        self, program: Program, key: tuple[jax.Array, jax.Array], node: jax.Array, cut: jax.Array,
        a: jax.Array | None = None, log_total: jax.Array | None = None,
    ) -> None:  # fmt: skip
        self.program, self.key, self.node, self.cut, self.a, self.log_total = program, key, node, cut, a, log_total

    def kept(self, x: jax.Array) -> jax.Array:
        return lax.cond(self.cut > -jnp.inf, lambda: jnp.where(x >= self.cut, x, -jnp.inf), lambda: x)

    def residual(self, x: jax.Array, token: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        assert self.a is not None and self.log_total is not None
        q = self.program.load(self.program.draft_ref, self.node, token, 0.0, mask)
        return jnp.maximum(jnp.exp(self.kept(x) - self.log_total) - self.a * q, 0.0)

    def draws(self, draw: jax.Array) -> tuple[jax.Array, jax.Array]:
        return threefry2x32(*self.key, draw.astype(_u32), _u32(Purpose.TARGET))

    def run(self, reach: Reach | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(best score, its token, sums [L] of the residual in this member's chunks)."""
        program = self.program

        def body(chunk: jax.Array, x: Pair, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            bound_C, sums_L = carry
            if self.a is None:
                base = (self.kept(x[0]), self.kept(x[1]))
            else:
                none = x[0].max() * 0.0

                def left() -> tuple[jax.Array, jax.Array, jax.Array]:
                    first, second = (self.residual(*pair) for pair in zip(x, program.tokens(chunk), strict=True))
                    return jnp.log(first), jnp.log(second), (first + second).sum()

                plain = lambda: (self.kept(x[0]), self.kept(x[1]), none)
                *base, total = lax.cond(self.a > 0, left, plain)
                sums_L = jnp.where(program.lane_L == chunk, total, sums_L)
            words = self.draws(chunk * (program.chunk // 2) + program.draw_C)
            for base_C, bits_C in zip(base, words, strict=True):
                bound_C = jnp.maximum(bound_C, base_C + gumbel_bound(bits_C))
            return bound_C, sums_L

        init = (jnp.full(program.draw_C.shape, -jnp.inf, _f32), jnp.zeros(program.lane_L.shape, _f32))
        bound_C, sums_L = program.sweep(self.node, body, init, reach)

        def hope(carry: tuple[jax.Array, ...]) -> jax.Array:
            best, _, bound, _ = carry
            return (bound > -jnp.inf) & (bound + GUMBEL_BOUND + (1e-4 + 1e-6 * jnp.abs(bound)) >= best)

        def evaluate(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            best, token, bound, bound_C = carry
            lane = jnp.where(bound_C == bound, program.draw_C, NONE).min()
            top, at = self.lane(lane)
            better = (top > best) | ((top == best) & (at < token))
            bound_C = jnp.where(program.draw_C == lane, -jnp.inf, bound_C)
            return jnp.where(better, top, best), jnp.where(better, at, token), bound_C.max(), bound_C

        start = (jnp.full((), -jnp.inf, _f32), _i32(NONE), bound_C.max(), bound_C)
        best, token, _, _ = lax.while_loop(hope, evaluate, start)
        return best, token, sums_L

    def lane(self, lane: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(best score, its token) of a lane of this member's chunks."""
        program = self.program
        entry_E = jnp.arange(max(2, 2 * power_of_two(program.each)), dtype=_i32)
        chunk_E, second_E = program.first + (entry_E >> 1), (entry_E & 1) > 0
        token_E = chunk_E * program.chunk + lane + lax.div(lane, _i32(TILE)) * TILE + jnp.where(second_E, TILE, 0)
        mine_E = chunk_E < program.last
        x_E = program.tempered(program.load(program.logits_ref, self.node, token_E, -jnp.inf, mine_E))
        if self.a is None:
            base_E = self.kept(x_E)
        else:
            residual = lambda: jnp.log(self.residual(x_E, token_E, mine_E))
            base_E = lax.cond(self.a > 0, residual, lambda: self.kept(x_E))
        first_E, last_E = self.draws(chunk_E * (program.chunk // 2) + lane)
        score_E = base_E + to_gumbel(jnp.where(second_E, last_E, first_E))
        score_E = jnp.where(mine_E & (token_E < program.vocab), score_E, -jnp.inf)
        best = score_E.max()
        return best, jnp.where(score_E == best, token_E, NONE).min()


def elect(
    program: Program, step: jax.Array, best: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(token of the best score of all members, whether the row is usable, exchanges so far)."""

    def merge(words_S2: jax.Array, live_S: jax.Array) -> tuple[jax.Array, jax.Array]:
        best_S = jnp.where(live_S, _float(pick(words_S2, 0)), -jnp.inf)
        best = best_S.max()
        return best, jnp.where(best_S == best, pick(words_S2, 1), NONE).min()

    words_2 = jnp.where(jnp.arange(2, dtype=_i32) == 0, _bits(best), token)
    (best, token), step = program.by_member(step, words_2, merge)
    return jnp.clip(token, 0, program.vocab - 1), (best > -jnp.inf) & (best < jnp.inf), step
