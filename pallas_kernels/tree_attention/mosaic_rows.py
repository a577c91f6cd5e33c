"""Rows between global memory and what wgmma reads or leaves: copies that Pallas has no operation for, thread by thread.

The copy engine moves whole tiles of 8 rows; a request's queries and a chain's new tokens begin anywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

#: Rows of a tile: wgmma's first operand, and the keys of a block.
ROWS = 64
#: Threads of a warpgroup, and values of two bytes that one of them moves at once.
_THREADS, _CHUNK = 128, 8
_SCALAR = plgpu.Layout.WG_SPLAT(())
#: A chunk for each thread, as two values in a word.
_PIECE = plgpu.Layout.WG_STRIDED((4 * _THREADS,), 4)
#: A maximum over nothing.
MASKED = -1e30


def params() -> Any:
    """How both kernels are compiled."""
    return plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def div(a: Any, b: int) -> Any:
    """a // b of what is not negative."""
    return lax.div(a, jnp.full_like(a, b))


def rem(a: Any, b: int) -> Any:
    """a % b of what is not negative."""
    return lax.rem(a, jnp.full_like(a, b))


def uniform(x: Any) -> Any:
    """An int32 that is the same for all of a warp, as the compiler is told then.

    It does not know that of what was read from memory. Whatever follows from such a value, a loop's end and a ring's
    slot in that loop, stays in each thread's own registers, and wgmma's descriptors are moved one by one between
    instructions that should follow each other.
    """
    wanted = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

    def run(_: Any, x: Any) -> Any:
        c = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)
        found = nvvm.shfl_sync(c(-1), x.registers.item(), c(0), c(31), nvvm.ShflKind.idx)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return plgpu.inline_mgpu(arg_types=(_SCALAR,), return_type=wanted)(run)(jnp.asarray(x, jnp.int32))


@dataclasses.dataclass(frozen=True)
class Source:
    """Where rows lie in global memory: row r at `(r // group) * outer + (r % group) * inner` values from a base."""

    group: int
    outer: int
    inner: int


def tiled() -> tuple[Any, ...]:
    """How a tile [64, C] of two bytes a value lies in shared memory, for wgmma and the copy engine."""
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def put(
    tiles: Sequence[Any], refs: Sequence[Any], source: Source, channels: int, base: Any, first: Any, count: int, *,
    leads: Sequence[int] | None = None, keep: tuple[Any, Any] | None = None, finite: bool = False,
    spread: bool = False, loaded: Sequence[jax.Array] | None = None,
) -> None:  # fmt: skip
    """Rows of sources into tiles [64, C] in shared memory, each into its own. `commit_smem` must follow.

    Row r of [0, count) becomes row first + r of the tile, where that is one. Columns of a tile beside a row's are left.

    Args:
      channels: of a row, a multiple of 8. leads: the columns of tiles where rows begin, such multiples too; or 0.
      keep: other rows of the last tile become zeros outside of it.
      finite: zeros for values of the last source that are not.
      spread: row r becomes row `spread_row(r)`.
      loaded: what `load` has read of the sources.
    """
    many, held = len(tiles), list(loaded or ())
    types = (*[plgpu.RefType(tiled())] * many, *[plgpu.RefType()] * many, *[_SCALAR] * 4, *[_PIECE] * len(held))

    def run(_: Any, *args: Any) -> None:
        scalars = (x.registers.item() for x in args[2 * many : 2 * many + 4])
        values = [x.registers.item() for x in args[2 * many + 4 :]]
        shape = source, channels, leads or (0,) * many, count
        _put(args[:many], args[many : 2 * many], values, *shape, spread, keep is not None, finite, *scalars)

    args = [jnp.asarray(x, jnp.int32) for x in (base, first, *(keep or (0, 0)))]
    plgpu.inline_mgpu(arg_types=types)(run)(*tiles, *refs, *args, *held)


def pieces(channels: int) -> int:
    """Rows of which each thread holds a piece at most."""
    return _THREADS * _CHUNK // channels


def load(refs: Sequence[Any], source: Source, channels: int, base: Any, count: int) -> tuple[jax.Array, ...]:
    """The first `count` rows of sources for `put`, no more than there are `pieces`."""
    wanted = (plgpu.ShapeDtypeStruct((4 * _THREADS,), jnp.int32, layout=_PIECE),) * len(refs)

    def run(_: Any, *args: Any) -> Any:
        *refs, base = args
        i32 = ir.IntegerType.get_signless(32)
        c = lambda value: arith.constant(i32, value)
        thread = arith.remui(utils.thread_idx(), c(_THREADS))
        column = arith.muli(arith.remui(thread, c(channels // _CHUNK)), c(_CHUNK))
        row = arith.divui(thread, c(channels // _CHUNK))
        row = arith.select(arith.cmpi(arith.CmpIPredicate.slt, row, c(count)), row, c(0))
        found = []
        for ref in refs:
            at = arith.addi(arith.addi(base.registers.item(), column), _of_row(source, row))
            kind = ir.MemRefType(ref.type).element_type
            registers = np.empty((1,), dtype=object)
            pointer = utils.getelementptr(utils.memref_ptr(ref), [at], kind)
            registers[0] = llvm.load(ir.VectorType.get((4,), i32), pointer, alignment=16)
            found.append(mgpu.FragmentedArray(_registers=registers, _layout=_PIECE.to_mgpu(), _is_signed=True))
        return tuple(found)

    types = (*[plgpu.RefType()] * len(refs), _SCALAR)
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(*refs, jnp.asarray(base, jnp.int32))


def _of_row(source: Source, row: Any) -> Any:
    """Where a row lies in its source."""
    c = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)
    outer = arith.muli(arith.divui(row, c(source.group)), c(source.outer))
    return arith.addi(outer, arith.muli(arith.remui(row, c(source.group)), c(source.inner)))


def _put(
    tiles: Sequence[Any], refs: Sequence[Any], loaded: Sequence[Any], source: Source, channels: int,
    leads: Sequence[int], count: int, spread: bool, clear: bool, finite: bool, base: Any, first: Any, low: Any,
    high: Any,
) -> None:  # fmt: skip
    i32 = ir.IntegerType.get_signless(32)
    c = lambda value: arith.constant(i32, value)
    value_type = ir.MemRefType(refs[0].type).element_type
    four = ir.VectorType.get((4,), i32)
    strides, _ = ir.MemRefType(tiles[0].type).get_strides_and_offset()
    across = 2 * strides[0]  # bytes from 8 rows to the next 8
    chunks = channels // _CHUNK
    step = _THREADS // chunks  # rows at once; threads that are left over store nothing
    thread = arith.remui(utils.thread_idx(), c(_THREADS))
    chunk, row0 = arith.remui(thread, c(chunks)), arith.divui(thread, c(chunks))
    column = arith.muli(chunk, c(_CHUNK))
    splat = lambda x: arith.constant(four, ir.DenseElementsAttr.get_splat(four, ir.IntegerAttr.get(i32, x)))
    exponent = 0x7F80 if isinstance(value_type, ir.BF16Type) else 0x7C00
    less = lambda a, b: arith.cmpi(arith.CmpIPredicate.slt, a, b)
    within = lambda x, low, high: arith.andi(arith.cmpi(arith.CmpIPredicate.sge, x, low), less(x, high))

    own = less(row0, c(step)) if _THREADS % chunks else None

    def place(row: Any, lead: int) -> Any:
        """Where this thread's chunk of a row lies in a tile, in bytes."""
        inner, at = arith.remui(row, c(8)), arith.addi(chunk, c(lead // _CHUNK)) if lead else chunk
        tile, at = arith.divui(at, c(8)), arith.remui(at, c(8))
        begin = arith.addi(arith.muli(arith.divui(row, c(8)), c(across)), arith.muli(tile, c(1024)))
        begin = arith.addi(begin, arith.muli(inner, c(128)))
        return arith.addi(begin, arith.muli(arith.xori(at, inner), c(16)))

    def store(value: Any, i: int, row: Any, live: Any) -> None:
        with utils.when(live if own is None else arith.andi(live, own)):
            where, byte = place(row, leads[i]), ir.IntegerType.get_signless(8)
            llvm.store(value, utils.getelementptr(utils.memref_ptr(tiles[i]), [where], byte), alignment=16)

    begin = c(0) if loaded else arith.maxsi(arith.subi(c(0), first), c(0))
    found = []
    for i in range(-(-min(count, ROWS) // step)):
        r = arith.addi(begin, arith.addi(row0, c(i * step)))
        row = arith.addi(first, r)
        if spread:
            row = arith.addi(arith.muli(arith.divui(r, c(8)), c(16)), arith.remui(r, c(8)))
        live = arith.andi(less(r, c(count)), within(row, c(0), c(ROWS)))
        found += [[k, row, live, value] for k, value in enumerate(loaded)]
        at = arith.addi(arith.addi(base, _of_row(source, arith.select(live, r, c(0)))), column)
        for k, ref in () if loaded else enumerate(refs):
            pointer = utils.getelementptr(utils.memref_ptr(ref), [at], value_type)
            found.append([k, row, live, llvm.load(four, pointer, alignment=16)])
    last = len(tiles) - 1
    for i in range(-(-ROWS // step)) if clear else ():
        row = arith.addi(row0, c(i * step))
        other = arith.ori(within(row, low, high), within(row, first, arith.addi(first, c(count))))
        other = other if ROWS % step == 0 else arith.ori(other, arith.cmpi(arith.CmpIPredicate.sge, row, c(ROWS)))
        store(splat(0), last, row, arith.xori(other, arith.constant(ir.IntegerType.get_signless(1), 1)))
    for k, row, live, value in found:
        for shift in (0, 16) if finite and k == last else ():
            ones = splat(exponent << shift)
            broken = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(value, ones), ones)
            value = arith.select(broken, arith.andi(value, splat(0xFFFF if shift else -0x10000)), value)
        store(value, k, row, live)


def clear(tile: Any, first: int) -> None:
    """Zeros for a tile's [64, C] columns from `first` on, a multiple of 8. `commit_smem` must follow."""

    def run(_: Any, tile: Any) -> None:
        where, i32 = ir.MemRefType(tile.type), ir.IntegerType.get_signless(32)
        c = lambda value: arith.constant(i32, value)
        strides, _ = where.get_strides_and_offset()
        thread, four = arith.remui(utils.thread_idx(), c(_THREADS)), ir.VectorType.get((4,), i32)
        zeros = arith.constant(four, ir.DenseElementsAttr.get_splat(four, ir.IntegerAttr.get(i32, 0)))
        row, half = arith.divui(thread, c(2)), arith.remui(thread, c(2))  # a row is two threads'
        begin = arith.addi(
            arith.muli(arith.divui(row, c(8)), c(2 * strides[0])), arith.muli(arith.remui(row, c(8)), c(128))
        )
        for chunk in range(first // _CHUNK, where.shape[1] * 64 // _CHUNK, 2):
            at = arith.addi(half, c(chunk))
            place = arith.muli(arith.xori(arith.remui(at, c(8)), arith.remui(row, c(8))), c(16))
            place = arith.addi(place, arith.muli(arith.divui(at, c(8)), c(1024)))
            pointer = utils.getelementptr(
                utils.memref_ptr(tile), [arith.addi(begin, place)], ir.IntegerType.get_signless(8)
            )
            llvm.store(zeros, pointer, alignment=16)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiled()),))(run)(tile)


def spread_row(row: Any) -> Any:
    """Where one of 32 rows or fewer stands in a tile of 64: in the first 8 of each 16.

    A thread holds two rows of wgmma's sums, 8 apart. Of rows that are spread only one of them is in use, and the
    compiler leaves out what would be computed for the other.
    """
    return row // 8 * 16 + row % 8


def first_rows(x: jax.Array) -> jax.Array:
    """The same values of wgmma's sums, but for zeros in the rows that nothing is spread to."""
    layout = plgpu.Layout.WGMMA
    wanted = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    def run(_: Any, x: Any) -> Any:
        found = x.registers.copy()
        halves = found.reshape(-1, 2)
        zero = arith.constant(halves[0, 1].type, ir.DenseElementsAttr.get_splat(halves[0, 1].type, _zero()))
        halves[:, 1] = zero
        return mgpu.FragmentedArray(_registers=halves.reshape(found.shape), _layout=x.layout, _is_signed=None)

    return plgpu.inline_mgpu(arg_types=(layout,), return_type=wanted)(run)(x)


def _zero() -> Any:
    return ir.FloatAttr.get(ir.F32Type.get(), 0.0)


def spill(refs: tuple[Any, ...], values: tuple[Any, ...], base: Any, count: Any, *, spread: bool = False) -> None:
    """Sums [64, C], maxima [64] and weights [64] of the first `count` rows to rows from `base` on.

    Args:
      refs: float32 in global memory, [..., C] and twice [...].
      spread: see spread_row.
    """
    layout = plgpu.Layout.WGMMA
    types = (*[plgpu.RefType()] * 3, layout, layout.reduce(1), layout.reduce(1), _SCALAR, _SCALAR)

    def run(_: Any, *args: Any) -> None:
        (acc, *vectors), (base, count) = args[3:6], (x.registers.item() for x in args[6:])
        flat = acc.registers.reshape(-1, 2)
        for half, row, pointer in _rows(args[:3], acc.shape[1], base, spread):
            with utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, count)):
                for j, pair in enumerate(flat[:, half]):
                    llvm.store(pair, pointer(0, 8 * j), alignment=8)
                for i, vector in enumerate(vectors, 1):  # the four threads of a row write the same
                    llvm.store(vector.registers.flat[half], pointer(i, 0), alignment=4)

    args = [jnp.asarray(x, jnp.int32) for x in (base, count)]
    plgpu.inline_mgpu(arg_types=types)(run)(*refs, *values, *args)


def store(ref: Any, value: jax.Array, source: Source, base: Any, count: int, *, spread: bool, lead: int = 0) -> None:
    """The first `count` rows of results [64, C] in two bytes a value to where a source has them, but `lead` columns."""
    layout = plgpu.Layout.WGMMA

    def run(_: Any, ref: Any, value: Any, base: Any) -> None:
        c = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)
        kind, pointer = ir.MemRefType(ref.type).element_type, utils.memref_ptr(ref)
        column = arith.muli(arith.remui(utils.thread_idx(), c(4)), c(2))
        for half, row, _ in _rows((), value.shape[1], c(0), spread):
            with utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, c(count))):
                at = arith.addi(
                    arith.muli(arith.divui(row, c(source.group)), c(source.outer)),
                    arith.muli(arith.remui(row, c(source.group)), c(source.inner)),
                )
                at = arith.addi(arith.addi(base.registers.item(), at), column)
                for j, pair in enumerate(value.registers.reshape(-1, 2)[lead // 8 :, half]):
                    where = utils.getelementptr(pointer, [arith.addi(at, c(8 * j))], kind)
                    llvm.store(pair, where, alignment=4)

    types = (plgpu.RefType(), layout, _SCALAR)
    plgpu.inline_mgpu(arg_types=types)(run)(ref, value, jnp.asarray(base, jnp.int32))


#: A warpgroup's arrival at the word $1, once its threads have met, by the one whose $3 is not zero: whether $2 came
#: before. What they had written until then is there to be read, and the last leaves a zero. $4 is a barrier of its own.
_ARRIVE = """{
    .reg .pred own, last;
    .reg .u32 before;
    setp.ne.u32 own, $3, 0;
    mov.u32 before, 0;
    bar.sync $4, 128;
    @own fence.acq_rel.gpu;
    @own atom.relaxed.gpu.global.add.u32 before, [$1], 1;
    setp.eq.and.u32 last, before, $2, own;
    @last st.relaxed.gpu.global.u32 [$1], 0;
    @own fence.acq_rel.gpu;
    bar.red.or.pred last, $4, 128, last;
    selp.u32 $0, 1, 0, last;
}"""
#: The first of barriers that Pallas does not use.
_BARRIERS = 8


def arrive(ref: Any, unit: Any, others: Any) -> Any:
    """Whether so many other warpgroups came before to a unit's word in `ref`, int32 [units]: 1 or 0.

    It is zero before anyone and after all have come.
    """
    wanted = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

    def run(_: Any, ref: Any, unit: Any, others: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        c = lambda value: arith.constant(i32, value)
        thread, where = utils.thread_idx(), utils.getelementptr(utils.memref_ptr(ref), [unit.registers.item()], i32)
        # Not who asks for copies: a fence waits for all that its thread has asked for.
        own = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, c(_THREADS)), c(_THREADS - 32))
        barrier = arith.addi(arith.divui(thread, c(_THREADS)), c(_BARRIERS))
        args = [where, others.registers.item(), arith.extui(i32, own), barrier]
        last: Any = llvm.inline_asm(i32, args, _ARRIVE, "=r,l,r,r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(last, (), is_signed=True)

    types, scalars = (plgpu.RefType(), _SCALAR, _SCALAR), (jnp.asarray(x, jnp.int32) for x in (unit, others))
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(ref, *scalars)


def fetch(
    refs: tuple[Any, ...], channels: int, base: Any, count: Any, *, spread: bool = False,
    columns: tuple[Any, int] | None = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """What `spill` wrote, by the same threads; other rows hold some row's.

    Args:
      columns: the first of those to read, and how many.
    """
    layout, (first, width) = plgpu.Layout.WGMMA, columns or (0, channels)
    like = lambda *shape, layout: plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)
    wanted = like(ROWS, width, layout=layout), *[like(ROWS, layout=layout.reduce(1))] * 2

    def run(_: Any, *args: Any) -> Any:
        base, count, first = (x.registers.item() for x in args[3:])
        f32 = ir.F32Type.get()
        found = [np.empty(x.layout.to_mgpu().registers_shape(x.shape), dtype=object) for x in wanted]
        flat = [x.reshape(-1, 2) for x in found]
        for x, size in zip(flat, (2, 1, 1), strict=True) if spread else ():
            kind = ir.VectorType.get((size,), f32)
            x[:, 1] = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, _zero()))
        for half, _, pointer in _rows(args[:3], channels, base, spread, count, first):
            for j in range(width // 8):
                flat[0][j, half] = llvm.load(ir.VectorType.get((2,), f32), pointer(0, 8 * j), alignment=8)
            for i in (1, 2):
                flat[i][0, half] = llvm.load(ir.VectorType.get((1,), f32), pointer(i, 0), alignment=4)
        fragments = [
            mgpu.FragmentedArray(_registers=x, _layout=like.layout.to_mgpu(), _is_signed=None)
            for x, like in zip(found, wanted, strict=True)
        ]
        return tuple(fragments)

    types = (*[plgpu.RefType()] * 3, *[_SCALAR] * 3)
    args = [jnp.asarray(x, jnp.int32) for x in (base, count, first)]
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(*refs, *args)


def _rows(
    refs: Any, channels: int, base: Any, spread: bool, count: Any = None, first: Any = None
) -> Iterator[tuple[int, Any, Any]]:
    """The rows of a thread of wgmma's sums: which of two, its number, and the pointer to where its values lie."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    c = lambda value: arith.constant(i32, value)
    thread = arith.remui(utils.thread_idx(), c(_THREADS))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
    column = arith.muli(arith.remui(lane, c(4)), c(2))
    column = column if first is None else arith.addi(column, first)
    pointers = [utils.memref_ptr(ref) for ref in refs]
    for half in range(1 if spread else 2):
        row = arith.addi(arith.addi(arith.muli(warp, c(8 if spread else 16)), arith.divui(lane, c(4))), c(8 * half))
        if count is not None:
            row = arith.select(arith.cmpi(arith.CmpIPredicate.slt, row, count), row, c(0))
        at = arith.addi(base, row)
        begin = arith.addi(arith.muli(at, c(channels)), column)

        def pointer(ref: int, offset: int, at: Any = at, begin: Any = begin) -> Any:
            where = at if ref else arith.addi(begin, c(offset))
            return utils.getelementptr(pointers[ref], [where], f32)

        yield half, row, pointer


#: A value for each thread.
LINE = plgpu.Layout.WG_STRIDED((_THREADS,), 1)


def gather(refs: tuple[Any, ...], channels: int, width: int, bases: Sequence[Any], first: Any) -> Any:
    """`width` neighbouring channels for each of 128 threads, and the maximum and weight of their row.

    Args:
      refs: what `spill` writes.
      bases: rows side by side, of the threads in turn, counted from the row `first`.
    """
    wanted = (plgpu.ShapeDtypeStruct((_THREADS,), jnp.float32, layout=LINE),) * (width + 2)

    def run(_: Any, *args: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        c = lambda value: arith.constant(i32, value)
        acc, *vectors = (utils.memref_ptr(ref) for ref in args[:3])
        first, *bases = (x.registers.item() for x in args[3:])
        thread = arith.remui(utils.thread_idx(), c(_THREADS))
        per = channels // width
        row = bases[0]
        for i, other in enumerate(bases[1:], 1):
            behind = arith.cmpi(arith.CmpIPredicate.sge, thread, c(i * per))
            row = arith.select(behind, other, row)
        row = arith.addi(row, first)
        at = arith.addi(arith.muli(row, c(channels)), arith.muli(arith.remui(thread, c(per)), c(width)))
        several, one = ir.VectorType.get((width,), f32), ir.VectorType.get((1,), f32)
        loaded = llvm.load(several, utils.getelementptr(acc, [at], f32), alignment=4 * width)
        found = [vector.from_elements(one, [vector.extract(loaded, [], [i])]) for i in range(width)]
        found += [llvm.load(one, utils.getelementptr(x, [row], f32), alignment=4) for x in vectors]
        return tuple(line(x) for x in found)

    types = (*[plgpu.RefType()] * 3, *[_SCALAR] * (1 + len(bases)))
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(*refs, first, *bases)


def line(value: Any) -> Any:
    """A value of each thread, as an array of layout LINE."""
    registers = np.empty((1,), dtype=object)
    registers[0] = value
    return mgpu.FragmentedArray(_registers=registers, _layout=LINE.to_mgpu(), _is_signed=None)


def write(ref: Any, values: Sequence[jax.Array], base: Any, channels: int, lead: int) -> None:
    """Values of each thread side by side, from `base` on, in the type of what they are written to.

    They are rows of so many channels, of which the first `lead` are left out.
    """

    def run(_: Any, ref: Any, base: Any, *values: Any) -> None:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.remui(utils.thread_idx(), arith.constant(i32, _THREADS))
        width, kind = len(values), ir.MemRefType(ref.type).element_type
        own = [vector.extract(x.registers.item(), [], [0]) for x in values]
        several = vector.from_elements(ir.VectorType.get((width,), f32), own)
        rounded = arith.truncf(ir.VectorType.get((width,), kind), several)
        c = lambda value: arith.constant(i32, value)
        at = arith.muli(thread, c(width))
        column = arith.remui(at, c(channels))
        at = arith.subi(at, arith.muli(arith.addi(arith.divui(at, c(channels)), c(1)), c(lead))) if lead else at
        with utils.when(arith.cmpi(arith.CmpIPredicate.uge, column, c(lead))) if lead else contextlib.nullcontext():
            where = utils.getelementptr(utils.memref_ptr(ref), [arith.addi(base.registers.item(), at)], kind)
            llvm.store(rounded, where, alignment=2 * width)

    types = (plgpu.RefType(), _SCALAR, *[LINE] * len(values))
    plgpu.inline_mgpu(arg_types=types)(run)(ref, jnp.asarray(base, jnp.int32), *values)


#: Of float32: each product is rounded where the instructions say so, whatever stands around it. Compilers contract
#: sums of products as they please, and not in the same way in every kernel.
_CODE = {
    "times": "mul.rn.f32 $0, $1, $2;",
    "scaled": "{ .reg .f32 a; neg.f32 a, $3; fma.rn.f32 $0, $1, $2, a; }",
    "sum": "{ .reg .f32 a; mul.rn.f32 a, $3, $4; fma.rn.f32 $0, $1, $2, a; }",
}
_PRETEND: dict[str, Callable[..., jax.Array]] = {
    "times": lambda a, b: a * b, "scaled": lambda a, b, c: a * b - c, "sum": lambda a, b, c, d: a * b + c * d,
}  # fmt: skip


def fused(kind: str, *values: jax.Array, layout: Any, pretend: bool) -> jax.Array:
    """a * b, a * b - c or a * b + c * d, of which the last is the product that is rounded by itself."""
    if pretend:
        return _PRETEND[kind](*values)
    wanted = plgpu.ShapeDtypeStruct(values[0].shape, jnp.float32, layout=layout)
    run = functools.partial(_fused, code=_CODE[kind])
    return plgpu.inline_mgpu(arg_types=(layout,) * len(values), return_type=wanted)(run)(*values)


def _fused(_: Any, *values: Any, code: str) -> Any:
    f32 = ir.F32Type.get()
    registers = np.empty_like(values[0].registers)
    constraints = ",".join(["=f", *["f"] * len(values)])
    for at in np.ndindex(registers.shape):
        own = [x.registers[at] for x in values]
        found = own[0]
        for i in range(ir.VectorType(found.type).shape[0]):
            one: Any = llvm.inline_asm(f32, [vector.extract(x, [], [i]) for x in own], code, constraints)
            found = vector.insert(one, found, [], [i])
        registers[at] = found
    return mgpu.FragmentedArray(_registers=registers, _layout=values[0].layout, _is_signed=None)
