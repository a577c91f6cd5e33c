"""The programs of one request on Mosaic GPU: they meet at the cluster's barrier and read each other's shared memory.

Pallas' interpreter knows no memory of neighbours: there members exchange through global memory. Knows nothing of
sampling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.rejection_sampling.mosaic_lanes import (
    LANES,
    SCALAR,
    array,
    bits,
    mine,
    place_of,
    real,
    spread,
    where,
)  # fmt: skip
from pallas_kernels.rejection_sampling.noise import TILE

_i32, _f32 = jnp.int32, jnp.float32


class Cluster:
    """The programs of one request, which share what they found through each other's shared memory.

    A program writes its planes (int32 [128]) into its own slot, all meet at the cluster's barrier, and each reads
    everyone's. Slots take turns: whoever writes one again has met the others since they read it.
    """

    #: Planes of an exchange, at most; the interpreter exchanges lists and lanes that way, too.
    PLANES, INTERPRETED = 2, 6

    def __init__(self, board: Any, barrier: Any, request: jax.Array, size: int, interpret: bool) -> None:
        self.board, self.barrier, self.request, self.size, self.interpret = board, barrier, request, size, interpret
        self.member = lax.axis_index("member") if size > 1 else request * 0

    @classmethod
    def board_shape(cls, interpret: bool, batch: int, size: int) -> tuple[int, ...]:
        """Of the board in shared memory; of the interpreter's in global memory."""
        return (batch, size, 2, cls.INTERPRETED, TILE) if interpret else (2, cls.PLANES, TILE)

    def meet(self) -> None:
        """Waits for all members; what they wrote before can be read after."""
        if self.size == 1:
            plgpu.commit_smem()
        elif self.interpret:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)
        else:
            plgpu.inline_mgpu()(_meet)()

    def share(self, step: jax.Array, planes: Sequence[jax.Array]) -> tuple[Callable[[Any, int], jax.Array], jax.Array]:
        """(what reads plane p of member c, exchanges so far)."""
        if self.size == 1:
            return (lambda _, p: planes[p]), step + 1
        assert len(planes) <= self.board.shape[-2], (len(planes), self.board.shape)
        slot = lax.rem(step, 2)
        own = (self.request, self.member) if self.interpret else ()
        for p, plane in enumerate(planes):
            self.board.at[(*own, slot, p)][...] = plane
        self.meet()

        def read(c: Any, p: int) -> jax.Array:
            if self.interpret:
                return self.board[self.request, c, slot, p]
            return plgpu.cluster_ref(self.board.at[slot, p], {"member": jnp.asarray(c, _i32)})[...]

        return read, step + 1

    def parts(
        self, step: jax.Array, value: jax.Array, token: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """The cluster's lanes in 128 parts, each of as many neighbours as there are members: of each part the largest
        value and its token, a part a lane; then both over all parts; exchanges so far. Of equals the lowest token.
        """
        if not self.interpret:
            return (*self._parts(lax.rem(step, 2), value, token), step + 1)
        read, step = self.share(step, [bits(value), token])
        every = [(real(read(c, 0)).reshape(-1, self.size), read(c, 1).reshape(-1, self.size)) for c in range(self.size)]
        values, tokens = (jnp.concatenate(x) for x in zip(*every, strict=True))
        lowest = lambda top: jnp.min(jnp.where(values == top, tokens, 2**31 - 1), axis=-1)
        most = jnp.max(values, axis=-1)
        top = jnp.max(most)
        return most, lowest(most[:, None]), top, jnp.min(lowest(top)), step

    def _parts(self, slot: jax.Array, value: jax.Array, token: jax.Array) -> Any:
        size = self.size

        def exchange(_: Any, board: Any, slot: Any, *lanes: Any) -> Any:
            i32 = ir.IntegerType.get_signless(32)
            const = lambda x: arith.constant(i32, x)
            thread = arith.remui(utils.thread_idx(), const(TILE))
            start = arith.muli(slot.registers.item(), const(self.PLANES * TILE))
            best = _reduced([mine(x) for x in lanes], size, _larger)
            with utils.when(arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, const(size)), const(0))):
                own = arith.addi(start, arith.muli(arith.divui(thread, const(size)), const(2)))
                llvm.store(arith.bitcast(i32, best[0]), place_of(board, own)[0])
                llvm.store(best[1], place_of(board, arith.addi(own, const(1)))[0])
            if size > 1:
                _meet(None)
            else:
                utils.warpgroup_barrier()
            found = []
            for begin in range(0, TILE, 32):
                part = arith.remui(arith.addi(thread, const(begin)), const(TILE))
                member, number = arith.divui(part, const(TILE // size)), arith.remui(part, const(TILE // size))
                place, _ = place_of(board, arith.addi(start, arith.muli(number, const(2))))
                if size > 1:
                    place = utils.get_cluster_ptr(place, member, generic=False)
                words = llvm.load(ir.VectorType.get((2,), i32), place, alignment=8)
                one = [vector.extract(words, [], [i]) for i in range(2)]
                found.append([arith.bitcast(ir.F32Type.get(), one[0]), one[1]])
            every = functools.reduce(_larger, found)
            top, lowest = _reduced(every, 32, _larger)
            whole = lambda x, signed: mgpu.FragmentedArray.splat(x, (), is_signed=signed)
            return array(found[0][0], None), array(found[0][1], True), whole(top, None), whole(lowest, True)

        of = lambda shape, dtype, layout: plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
        wanted = (of((TILE,), _f32, LANES), of((TILE,), _i32, LANES), of((), _f32, SCALAR), of((), _i32, SCALAR))
        types = (plgpu.RefType(), SCALAR, LANES, LANES)
        return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(exchange)(self.board, slot, value, token)

    def join(
        self, step: jax.Array, counter: Any, own: tuple[Any, Any], joint: tuple[Any, Any], met: bool
    ) -> tuple[jax.Array, jax.Array]:
        """(entries of all members' lists, exchanges so far); puts the lists together, as far as there is room.

        Behind the last entry values are -inf. Who writes `counter` or `own` again does so after another exchange.

        Args:
          counter: int32, flat; entry 0 is the length of the own list. own, joint: values and tokens, flat, of one size.
          met: whether all have met since the lists were written.
        """
        if not self.interpret:
            if not met:
                self.meet()
            return self._join(counter, own, joint), step if met else step + 1
        room = own[0].shape[0]
        tiles = range(0, room, TILE)
        planes = [spread(counter[0], _i32), *(bits(own[0][t : t + TILE]) for t in tiles)]
        read, step = self.share(step, [*planes, *(own[1][t : t + TILE] for t in tiles)])
        total, lane = jnp.int32(0), jnp.arange(TILE)
        values, tokens = jnp.full((room,), -jnp.inf, _f32), jnp.zeros((room,), _i32)
        for c in range(self.size):
            count = read(c, 0)[0]
            for t in tiles:
                at = jnp.where(t + lane < count, total + t + lane, room)
                values = values.at[at].set(real(read(c, 1 + t // TILE)), mode="drop")
                tokens = tokens.at[at].set(read(c, 1 + len(tiles) + t // TILE), mode="drop")
            total = total + count
        joint[0][...], joint[1][...] = values, tokens
        return total, step

    def _join(self, counter: Any, own: tuple[Any, Any], joint: tuple[Any, Any]) -> jax.Array:
        size, room = self.size, own[0].shape[0]

        def pull(_: Any, counter: Any, *refs: Any) -> Any:
            i32 = ir.IntegerType.get_signless(32)
            const = lambda x: arith.constant(i32, x)
            less = lambda a, b: arith.cmpi(arith.CmpIPredicate.slt, a, b)
            theirs = lambda place, member: utils.get_cluster_ptr(place, member, generic=False) if size > 1 else place
            counts = [llvm.load(i32, theirs(place_of(counter, const(0))[0], const(c))) for c in range(size)]
            thread = arith.remui(utils.thread_idx(), const(TILE))
            starts = [const(0)]
            for count in counts:
                starts.append(arith.addi(starts[-1], count))
            for begin in range(0, room, TILE):
                number = arith.addi(thread, const(begin))
                member, first = const(0), const(0)
                for c in range(1, size):
                    before = less(number, starts[c])
                    member = arith.select(before, member, const(c))
                    first = arith.select(before, first, starts[c])
                at = arith.minsi(arith.subi(number, first), const(room - 1))
                there = less(number, starts[-1])
                for source, target, none in zip(refs[:2], refs[2:], (-math.inf, 0), strict=True):
                    place, kind = place_of(source, at)
                    value = llvm.load(kind, theirs(place, member))
                    llvm.store(arith.select(there, value, arith.constant(kind, none)), place_of(target, number)[0])
            return mgpu.FragmentedArray.splat(starts[-1], (), is_signed=True)

        wanted = plgpu.ShapeDtypeStruct((), _i32, layout=SCALAR)
        types = tuple(plgpu.RefType() for _ in range(5))
        return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(pull)(counter, *own, *joint)

    def over(self, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Folds body(member, carry): of half of 16 at once, as registers decide how many programs are resident."""
        at_once = min(self.size, 8)

        def several(begin: Any, carry: Any) -> Any:
            for c in range(at_once):
                carry = body(begin + c, carry)
            return carry

        if self.size == at_once:
            return several(0, carry)
        return lax.fori_loop(0, self.size // at_once, lambda b, carry: several(b * at_once, carry), carry)

    def winner(
        self, step: jax.Array, value: jax.Array, token: jax.Array, others: Sequence[jax.Array] = (),
        added: Sequence[jax.Array] = (),
    ) -> tuple[jax.Array, jax.Array, list[jax.Array], jax.Array]:  # fmt: skip
        """Over lanes and members: (the largest value, its token, more, exchanges so far).

        Of equal values the lowest token. More: the largest of each of `others`, where a NaN stays, then the sum of each
        of `added`, float32 in the order of the cluster's lanes.
        """
        count = 2 + len(others)

        def merge(a: list[Any], b: list[Any]) -> list[Any]:
            first = _larger(a[:2], b[:2])
            first += [arith.maximumf(x, y) for x, y in zip(a[2:count], b[2:count], strict=True)]
            return first + [arith.addf(x, y) for x, y in zip(a[count:], b[count:], strict=True)]

        def plain(lanes: list[jax.Array]) -> list[jax.Array]:
            top = jnp.max(lanes[0])
            token = jnp.min(where(lanes[0] == top, lanes[1], 2**31 - 1))
            return [top, token, *map(jnp.max, lanes[2:count]), *map(jnp.sum, lanes[count:])]

        (top, token, *more), step = self._fold(step, [value, token, *others, *added], merge, plain)
        return top, token, more, step

    def softmax(self, step: jax.Array, top: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Over lanes and members: (the largest of `top`, the sum of total * exp(top - it), exchanges so far).

        Args:
          top: finite, or inf or NaN, which stay; the sum is unspecified then.
        """

        def power(x: Any) -> Any:
            scaled = arith.mulf(x, arith.constant(ir.F32Type.get(), math.log2(math.e)))
            return llvm.inline_asm(ir.F32Type.get(), [scaled], "ex2.approx.ftz.f32 $0, $1;", "=f,f")

        def merge(a: list[Any], b: list[Any]) -> list[Any]:
            top = arith.maximumf(a[0], b[0])
            part = lambda x: arith.mulf(x[1], power(arith.subf(x[0], top)))
            return [top, arith.addf(part(a), part(b))]

        def plain(lanes: list[jax.Array]) -> list[jax.Array]:
            top = jnp.max(lanes[0])
            return [top, jnp.sum(lanes[1] * jnp.exp(lanes[0] - top))]

        (top, total), step = self._fold(step, [top, total], merge, plain)
        return top, total, step

    def sums(self, step: jax.Array, values: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        """(sums over lanes and members of int32, as scalars; exchanges so far)."""
        merge = lambda a, b: [arith.addi(x, y) for x, y in zip(a, b, strict=True)]
        return self._fold(step, list(values), merge, lambda lanes: [jnp.sum(x) for x in lanes])

    def _fold(
        self, step: jax.Array, lanes: list[jax.Array], merge: Callable[[list[Any], list[Any]], list[Any]],
        plain: Callable[[list[jax.Array]], list[jax.Array]],
    ) -> tuple[list[jax.Array], jax.Array]:  # fmt: skip
        """(scalars of all lanes and members, exchanges so far).

        In less time than an exchange of planes and their reduction: a warp reduces its lanes, and every warp reads all
        members' four.

        Args:
          merge: of two threads' values, by MLIR. plain: the same of all lanes, by jax.numpy, for the interpreter.
        """
        if not self.interpret:
            return list(self._by_warps(lax.rem(step, 2), lanes, merge)), step + 1
        as_bits = lambda x: bits(x) if x.dtype == _f32 else x
        as_was = lambda x, like: real(x) if like.dtype == _f32 else x
        read, step = self.share(step, [as_bits(x) for x in lanes])
        every = [jnp.concatenate([as_was(read(c, p), x) for c in range(self.size)]) for p, x in enumerate(lanes)]
        return plain(every), step

    def _by_warps(self, slot: jax.Array, lanes: list[jax.Array], merge: Callable[..., list[Any]]) -> Any:
        size, entry = self.size, -(-len(lanes) // 4) * 4  # words of a warp's entry, four of them read at once
        assert 4 * entry <= self.PLANES * TILE and size in (1, 2, 4, 8, 16)

        def exchange(_: Any, board: Any, slot: Any, *lanes: Any) -> Any:
            i32 = ir.IntegerType.get_signless(32)
            const = lambda x: arith.constant(i32, x)

            values = _reduced([mine(x) for x in lanes], 32, merge)
            types = [x.type for x in values]
            thread = arith.remui(utils.thread_idx(), const(TILE))
            lane, warp = arith.remui(thread, const(32)), arith.divui(thread, const(32))
            start = arith.muli(slot.registers.item(), const(self.PLANES * TILE))
            with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, const(0))):
                own = arith.addi(start, arith.muli(warp, const(entry)))
                for i, x in enumerate(values):
                    pointer, _ = place_of(board, arith.addi(own, const(i)))
                    llvm.store(x if x.type == i32 else arith.bitcast(i32, x), pointer)
            if size > 1:
                _meet(None)
            else:
                utils.warpgroup_barrier()
            every: list[Any] | None = None
            for begin in range(0, 4 * size, 32):
                number = arith.remui(arith.addi(lane, const(begin)), const(4 * size))
                pointer, _ = place_of(board, arith.addi(start, arith.muli(arith.remui(number, const(4)), const(entry))))
                if size > 1:
                    pointer = utils.get_cluster_ptr(pointer, arith.divui(number, const(4)), generic=False)
                words = llvm.load(ir.VectorType.get((entry,), i32), pointer, alignment=16)
                one = [vector.extract(words, [], [i]) for i in range(len(types))]
                one = [x if t == i32 else arith.bitcast(t, x) for x, t in zip(one, types, strict=True)]
                every = one if every is None else merge(every, one)
            assert every is not None
            every = _reduced(every, min(4 * size, 32), merge)
            return tuple(mgpu.FragmentedArray.splat(x, (), is_signed=True if x.type == i32 else None) for x in every)

        wanted = tuple(plgpu.ShapeDtypeStruct((), x.dtype, layout=SCALAR) for x in lanes)
        types = (plgpu.RefType(), SCALAR, *(LANES for _ in lanes))
        return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(exchange)(self.board, slot, *lanes)


def _larger(a: list[Any], b: list[Any]) -> list[Any]:
    """Of two (value, token) the one with the larger value, then with the lower token, by MLIR."""
    more = arith.cmpf(arith.CmpFPredicate.OGT, b[0], a[0])
    same = arith.cmpf(arith.CmpFPredicate.OEQ, b[0], a[0])
    lower = arith.cmpi(arith.CmpIPredicate.slt, b[1], a[1])
    take = arith.ori(more, arith.andi(same, lower))
    return [arith.select(take, y, x) for x, y in zip(a, b, strict=True)]


def _reduced(values: list[Any], width: int, merge: Callable[..., list[Any]]) -> list[Any]:
    """Values of a warp's threads, merged over `width` neighbours."""
    distance = 1
    while distance < width:
        values = merge(values, [utils.shfl_bfly(x, distance) for x in values])
        distance *= 2
    return values


def _meet(_: Any) -> None:
    void = ir.Type.parse("!llvm.void")
    for text in ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"):
        llvm.inline_asm(void, [], text, "~{memory}", has_side_effects=True)
