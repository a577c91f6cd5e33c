"""Rows from global memory to what wgmma reads: copies that Pallas has no operation for, thread by thread.

The copy engine moves whole tiles of 8 rows; a request's queries and a chain's new tokens begin anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
THREADS, _CHUNK = 128, 8
SCALAR = plgpu.Layout.WG_SPLAT(())
#: A chunk for each thread, as two values in a word.
_PIECE = plgpu.Layout.WG_STRIDED((4 * THREADS,), 4)
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
    wanted = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    def run(_: Any, x: Any) -> Any:
        c = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)
        found = nvvm.shfl_sync(c(-1), x.registers.item(), c(0), c(31), nvvm.ShflKind.idx)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=wanted)(run)(jnp.asarray(x, jnp.int32))


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
    leads: Sequence[int], keep: tuple[Any, Any] | None = None, finite: bool = False,
    spread: bool = False, loaded: Sequence[jax.Array] | None = None,
) -> None:  # fmt: skip
    """Rows of sources into tiles [64, C] in shared memory, each into its own. `commit_smem` must follow.

    Row r of [0, count) becomes row first + r of the tile, where that is one. Columns of a tile beside a row's are left.

    Args:
      channels: of a row, a multiple of 8. leads: the columns of tiles where rows begin, such multiples too.
      keep: other rows of the last tile become zeros outside of it.
      finite: zeros for values of the last source that are not.
      spread: row r becomes row `spread_row(r)`.
      loaded: what `load` has read of the sources.
    """
    many, held = len(tiles), list(loaded or ())
    types = (*[plgpu.RefType(tiled())] * many, *[plgpu.RefType()] * many, *[SCALAR] * 4, *[_PIECE] * len(held))

    def run(_: Any, *args: Any) -> None:
        scalars = (x.registers.item() for x in args[2 * many : 2 * many + 4])
        values = [x.registers.item() for x in args[2 * many + 4 :]]
        shape = source, channels, leads, count
        _put(args[:many], args[many : 2 * many], values, *shape, spread, keep is not None, finite, *scalars)

    args = [jnp.asarray(x, jnp.int32) for x in (base, first, *(keep or (0, 0)))]
    plgpu.inline_mgpu(arg_types=types)(run)(*tiles, *refs, *args, *held)


def pieces(channels: int) -> int:
    """Rows of which each thread holds a piece at most."""
    return THREADS * _CHUNK // channels


def load(refs: Sequence[Any], source: Source, channels: int, base: Any, count: int) -> tuple[jax.Array, ...]:
    """The first `count` rows of sources for `put`, no more than there are `pieces`."""
    wanted = (plgpu.ShapeDtypeStruct((4 * THREADS,), jnp.int32, layout=_PIECE),) * len(refs)

    def run(_: Any, *args: Any) -> Any:
        *refs, base = args
        i32 = ir.IntegerType.get_signless(32)
        c = lambda value: arith.constant(i32, value)
        thread = arith.remui(utils.thread_idx(), c(THREADS))
        column = arith.muli(arith.remui(thread, c(channels // _CHUNK)), c(_CHUNK))
        row = arith.divui(thread, c(channels // _CHUNK))
        row = arith.select(arith.cmpi(arith.CmpIPredicate.slt, row, c(count)), row, c(0))
        found = []
        for ref in refs:
            at = arith.addi(arith.addi(base.registers.item(), column), offset_of(source, row))
            kind = ir.MemRefType(ref.type).element_type
            registers = np.empty((1,), dtype=object)
            pointer = utils.getelementptr(utils.memref_ptr(ref), [at], kind)
            registers[0] = llvm.load(ir.VectorType.get((4,), i32), pointer, alignment=16)
            found.append(mgpu.FragmentedArray(_registers=registers, _layout=_PIECE.to_mgpu(), _is_signed=True))
        return tuple(found)

    types = (*[plgpu.RefType()] * len(refs), SCALAR)
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(*refs, jnp.asarray(base, jnp.int32))


def offset_of(source: Source, row: Any) -> Any:
    """Where a row lies in its source."""
    c = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)
    outer = arith.muli(arith.divui(row, c(source.group)), c(source.outer))
    return arith.addi(outer, arith.muli(arith.remui(row, c(source.group)), c(source.inner)))


def place_of(row: Any, chunk: Any, across: int) -> Any:
    """Where a row's chunk of 16 bytes lies in a tile whose eights of rows are so many bytes apart, in bytes."""
    c = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)
    inner, tile, at = arith.remui(row, c(8)), arith.divui(chunk, c(8)), arith.remui(chunk, c(8))
    begin = arith.addi(arith.muli(arith.divui(row, c(8)), c(across)), arith.muli(tile, c(1024)))
    begin = arith.addi(begin, arith.muli(inner, c(128)))
    return arith.addi(begin, arith.muli(arith.xori(at, inner), c(16)))


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
    step = THREADS // chunks  # rows at once; threads that are left over store nothing
    thread = arith.remui(utils.thread_idx(), c(THREADS))
    chunk, row0 = arith.remui(thread, c(chunks)), arith.divui(thread, c(chunks))
    column = arith.muli(chunk, c(_CHUNK))
    splat = lambda x: arith.constant(four, ir.DenseElementsAttr.get_splat(four, ir.IntegerAttr.get(i32, x)))
    exponent = 0x7F80 if isinstance(value_type, ir.BF16Type) else 0x7C00
    less = lambda a, b: arith.cmpi(arith.CmpIPredicate.slt, a, b)
    within = lambda x, low, high: arith.andi(arith.cmpi(arith.CmpIPredicate.sge, x, low), less(x, high))

    own = less(row0, c(step)) if THREADS % chunks else None

    def place(row: Any, lead: int) -> Any:
        """Where this thread's chunk of a row lies in a tile, in bytes."""
        return place_of(row, arith.addi(chunk, c(lead // _CHUNK)) if lead else chunk, across)

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
        at = arith.addi(arith.addi(base, offset_of(source, arith.select(live, r, c(0)))), column)
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
        thread, four = arith.remui(utils.thread_idx(), c(THREADS)), ir.VectorType.get((4,), i32)
        zeros = arith.constant(four, ir.DenseElementsAttr.get_splat(four, ir.IntegerAttr.get(i32, 0)))
        row, half = arith.divui(thread, c(2)), arith.remui(thread, c(2))  # a row is two threads'
        for chunk in range(first // _CHUNK, where.shape[1] * 64 // _CHUNK, 2):
            place, byte = place_of(row, arith.addi(half, c(chunk)), 2 * strides[0]), ir.IntegerType.get_signless(8)
            llvm.store(zeros, utils.getelementptr(utils.memref_ptr(tile), [place], byte), alignment=16)

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
        kind = halves[0, 1].type
        halves[:, 1] = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, zero()))
        return mgpu.FragmentedArray(_registers=halves.reshape(found.shape), _layout=x.layout, _is_signed=None)

    return plgpu.inline_mgpu(arg_types=(layout,), return_type=wanted)(run)(x)


def part(x: Any, i: int) -> Any:
    """One of a vector's values."""
    return vector.extract(x, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def zero() -> Any:
    """A constant of float32."""
    return ir.FloatAttr.get(ir.F32Type.get(), 0.0)
