"""What a warpgroup does with 128 values, one a thread: gathers, scatters, and exchanges with others of its cluster.

Pallas for Mosaic GPU indexes references by slices only, and its interpreter knows no memory of neighbours; both are
a few instructions, written here by hand, with a plain form of each for the interpreter. Knows nothing of sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.rejection_sampling.noise import TILE

#: Thread i holds entry i.
LANES = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
_SCALAR = plgpu.Layout.WG_SPLAT(())

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32


def spread(x: Any, dtype: Any) -> jax.Array:
    """A number in every lane, [128]."""
    return plgpu.layout_cast(jnp.full((TILE,), x, dtype), LANES)


def lane_ids() -> jax.Array:
    return plgpu.layout_cast(plgpu.broadcasted_iota(_i32, (TILE,), 0, layout=LANES), LANES)


def where(condition: jax.Array, a: Any, b: Any) -> jax.Array:
    """jnp.where in lanes. Mosaic reads off `a` whether integers have signs, or off the condition if `a` is a number."""
    if jnp.ndim(a) == 0 and jnp.ndim(b) == 1:
        return jnp.where(~condition, b, a)
    if jnp.ndim(a) == 0 and isinstance(a, int):
        a = spread(a, _i32)
    return jnp.where(condition, a, b)


def once(condition: jax.Array, body: Callable[..., Any], carry: Any) -> Any:
    """`body(*carry)` if the condition holds, else carry.

    Not lax.cond, whose first branch is lowered twice, and four times inside of another.
    """
    return lax.fori_loop(0, jnp.where(condition, 1, 0), lambda _, c: body(*c), carry)


def bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _i32)


def real(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _f32)


def population(x: jax.Array) -> jax.Array:
    """Set bits of uint32, as int32."""
    x = x - ((x >> _u32(1)) & _u32(0x55555555))
    x = (x & _u32(0x33333333)) + ((x >> _u32(2)) & _u32(0x33333333))
    x = (x + (x >> _u32(4))) & _u32(0x0F0F0F0F)
    return ((x * _u32(0x01010101)) >> _u32(24)).astype(_i32)


def _pointer(ref: Any, index: Any, row: Any = None, pitch: int = 0) -> tuple[Any, Any]:
    """(address of an entry of a contiguous reference, its type)."""
    element, i64 = ir.MemRefType(ref.type).element_type, ir.IntegerType.get_signless(64)
    at = arith.extsi(i64, index)
    if row is not None:
        at = arith.addi(at, arith.muli(arith.extsi(i64, row), arith.constant(i64, pitch)))
    return utils.getelementptr(utils.memref_ptr(ref), [at], element), element


def _of(x: Any) -> Any:
    """A thread's entry."""
    return vector.extract(x.registers.item(), [], [0])


def _array(value: Any, signed: bool | None) -> Any:
    one = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    registers = np.empty((1,), dtype=object)
    registers[0] = one
    return mgpu.FragmentedArray(_registers=registers, _layout=LANES.to_mgpu(), _is_signed=signed)


def _signed(dtype: Any) -> bool | None:
    return jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None


def gather(ref: Any, index: jax.Array, interpret: bool, row: jax.Array | None = None, pitch: int = 0) -> jax.Array:
    """Entries of a contiguous reference, by their places in it; behind `row` rows of `pitch` entries."""
    if interpret:
        values = ref[...].reshape(-1)
        return values[index if row is None else index + row * pitch]
    wanted = plgpu.ShapeDtypeStruct((TILE,), ref.dtype, layout=LANES)

    def read(_: Any, ref: Any, index: Any, *row: Any) -> Any:
        pointer, element = _pointer(ref, _of(index), *(r.registers.item() for r in row), pitch=pitch)
        return _array(llvm.load(element, pointer), _signed(dtype))

    dtype, rows = ref.dtype, () if row is None else (row,)
    types = (plgpu.RefType(), LANES, *(_SCALAR for _ in rows))
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(read)(ref, index, *rows)


def scatter(ref: Any, index: jax.Array, value: jax.Array, mask: jax.Array, interpret: bool) -> None:
    """Writes entries of a flat reference where the mask is on; the others' index may be anything."""
    if interpret:
        ref[...] = ref[...].at[jnp.where(mask, index, ref.shape[0])].set(value, mode="drop")
        return

    def write(_: Any, ref: Any, index: Any, value: Any, mask: Any) -> None:
        on = arith.cmpi(arith.CmpIPredicate.ne, _of(mask), arith.constant(ir.IntegerType.get_signless(32), 0))
        with utils.when(on):
            pointer, _ = _pointer(ref, _of(index))
            llvm.store(_of(value), pointer)

    types = (plgpu.RefType(), LANES, LANES, LANES)
    plgpu.inline_mgpu(arg_types=types)(write)(ref, index, value, where(mask, 1, 0))


def add_at(ref: Any, index: jax.Array, value: jax.Array, mask: jax.Array, interpret: bool) -> None:
    """Adds to entries of a flat reference in shared memory, where the mask is on; lanes may name the same entry."""
    if interpret:
        ref[...] = ref[...].at[jnp.where(mask, index, ref.shape[0])].add(value, mode="drop")
        return

    def add(_: Any, ref: Any, index: Any, value: Any, mask: Any) -> None:
        on = arith.cmpi(arith.CmpIPredicate.ne, _of(mask), arith.constant(ir.IntegerType.get_signless(32), 0))
        with utils.when(on):
            pointer, _ = _pointer(ref, _of(index))
            llvm.atomicrmw(llvm.AtomicBinOp.add, pointer, _of(value), llvm.AtomicOrdering.monotonic)

    types = (plgpu.RefType(), LANES, LANES, LANES)
    plgpu.inline_mgpu(arg_types=types)(add)(ref, index, value, where(mask, 1, 0))


def take_numbers(counter: Any, mask: jax.Array, interpret: bool) -> jax.Array:
    """The next number for each lane where the mask is on, in any order; `counter` is flat, and counts in entry 0."""
    if interpret:
        one = where(mask, 1, 0)
        start = counter[0]
        counter[0] = start + one.sum(dtype=_i32)
        return start + jnp.cumsum(one, dtype=_i32) - one
    wanted = plgpu.ShapeDtypeStruct((TILE,), _i32, layout=LANES)

    def add(_: Any, counter: Any, amount: Any) -> Any:
        pointer, _ = _pointer(counter, arith.constant(ir.IntegerType.get_signless(32), 0))
        old = llvm.atomicrmw(llvm.AtomicBinOp.add, pointer, _of(amount), llvm.AtomicOrdering.monotonic)
        return _array(old, True)

    types = (plgpu.RefType(), LANES)
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(add)(counter, where(mask, 1, 0))


class Cluster:
    """The programs of one request, which share what they found through each other's shared memory.

    A program writes its planes (int32 [128]) into its own slot, all meet at the cluster's barrier, and each reads
    everyone's. Slots take turns: whoever writes one again has met the others since they read it.
    """

    #: Planes of an exchange, at most; the interpreter's tables are planes too.
    PLANES, TABLES = 4, 2

    def __init__(self, board: Any, barrier: Any, request: jax.Array, size: int, interpret: bool) -> None:
        self.board, self.barrier, self.request, self.size, self.interpret = board, barrier, request, size, interpret
        self.member = lax.axis_index("member") if size > 1 else request * 0

    @classmethod
    def board_shape(cls, interpret: bool, batch: int, size: int) -> tuple[int, ...]:
        """Of the board in shared memory; of the interpreter's in global memory."""
        return (batch, size, 2, cls.PLANES + cls.TABLES, TILE) if interpret else (2, cls.PLANES, TILE)

    def meet(self) -> None:
        """Waits for all members; what they wrote before can be read after."""
        if self.size == 1:
            plgpu.commit_smem()
        elif self.interpret:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)
        else:
            plgpu.inline_mgpu()(_meet)()

    def share(
        self, step: jax.Array, planes: Sequence[jax.Array], table: Any = None
    ) -> tuple[Callable[[Any, int], jax.Array], jax.Array]:
        """(what reads plane p of member c, exchanges so far).

        Args:
          table: float32 [256] of shared memory that is read along, as two more planes. Whoever writes it again does so
            after another exchange.
        """
        if table is not None and (self.size == 1 or self.interpret):
            planes = [*planes, *(bits(table[p * TILE : (p + 1) * TILE]) for p in range(self.TABLES))]
            table = None
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
            if table is not None and p >= len(planes):
                theirs = table.at[pl.ds((p - len(planes)) * TILE, TILE)]
                return bits(plgpu.cluster_ref(theirs, {"member": jnp.asarray(c, _i32)})[...])
            return plgpu.cluster_ref(self.board.at[slot, p], {"member": jnp.asarray(c, _i32)})[...]

        return read, step + 1

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
        self, step: jax.Array, value: jax.Array, token: jax.Array, others: Sequence[jax.Array] = ()
    ) -> tuple[jax.Array, jax.Array, list[jax.Array], jax.Array]:
        """Over lanes and members: (the largest value, its token, the largest of each of `others`, exchanges so far).

        Of equal values the lowest token; a NaN among `others` stays.
        """

        def merge(a: list[Any], b: list[Any]) -> list[Any]:
            more = arith.cmpf(arith.CmpFPredicate.OGT, b[0], a[0])
            same = arith.cmpf(arith.CmpFPredicate.OEQ, b[0], a[0])
            lower = arith.cmpi(arith.CmpIPredicate.slt, b[1], a[1])
            take = arith.ori(more, arith.andi(same, lower))
            first = [arith.select(take, y, x) for x, y in zip(a[:2], b[:2], strict=True)]
            return first + [arith.maximumf(x, y) for x, y in zip(a[2:], b[2:], strict=True)]

        def plain(lanes: list[jax.Array]) -> list[jax.Array]:
            top = jnp.max(lanes[0])
            return [top, jnp.min(where(lanes[0] == top, lanes[1], 2**31 - 1)), *map(jnp.max, lanes[2:])]

        (top, token, *largest), step = self._fold(step, [value, token, *others], merge, plain)
        return top, token, largest, step

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
        size, entry = self.size, 4  # words of a warp's entry, read at once
        assert len(lanes) <= entry and size in (1, 2, 4, 8, 16)

        def exchange(_: Any, board: Any, slot: Any, *lanes: Any) -> Any:
            i32 = ir.IntegerType.get_signless(32)
            const = lambda x: arith.constant(i32, x)

            def reduced(values: list[Any], width: int) -> list[Any]:
                distance = 1
                while distance < width:
                    values = merge(values, [utils.shfl_bfly(x, distance) for x in values])
                    distance *= 2
                return values

            values = reduced([_of(x) for x in lanes], 32)
            types = [x.type for x in values]
            thread = arith.remui(utils.thread_idx(), const(TILE))
            lane, warp = arith.remui(thread, const(32)), arith.divui(thread, const(32))
            start = arith.muli(slot.registers.item(), const(self.PLANES * TILE))
            with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, const(0))):
                own = arith.addi(start, arith.muli(warp, const(entry)))
                for i, x in enumerate(values):
                    pointer, _ = _pointer(board, arith.addi(own, const(i)))
                    llvm.store(x if x.type == i32 else arith.bitcast(i32, x), pointer)
            if size > 1:
                _meet(None)
            else:
                utils.warpgroup_barrier()
            every: list[Any] | None = None
            for begin in range(0, 4 * size, 32):
                number = arith.remui(arith.addi(lane, const(begin)), const(4 * size))
                pointer, _ = _pointer(board, arith.addi(start, arith.muli(arith.remui(number, const(4)), const(entry))))
                if size > 1:
                    pointer = utils.get_cluster_ptr(pointer, arith.divui(number, const(4)), generic=False)
                words = llvm.load(ir.VectorType.get((entry,), i32), pointer, alignment=16)
                one = [vector.extract(words, [], [i]) for i in range(len(types))]
                one = [x if t == i32 else arith.bitcast(t, x) for x, t in zip(one, types, strict=True)]
                every = one if every is None else merge(every, one)
            assert every is not None
            every = reduced(every, min(4 * size, 32))
            return tuple(mgpu.FragmentedArray.splat(x, (), is_signed=True if x.type == i32 else None) for x in every)

        wanted = tuple(plgpu.ShapeDtypeStruct((), x.dtype, layout=_SCALAR) for x in lanes)
        types = (plgpu.RefType(), _SCALAR, *(LANES for _ in lanes))
        return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(exchange)(self.board, slot, *lanes)


def math_sum(parts: Sequence[jax.Array]) -> jax.Array:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def _meet(_: Any) -> None:
    void = ir.Type.parse("!llvm.void")
    for text in ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"):
        llvm.inline_asm(void, [], text, "~{memory}", has_side_effects=True)


def words_of(rows: int) -> int:
    """Words of bits, one a row."""
    return math.ceil(rows / 32)
