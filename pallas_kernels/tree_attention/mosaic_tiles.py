"""What wide attention does to tiles thread by thread: queries to shared memory, values there that must not count, rows
to memory.

The counterparts of `mosaic_rows`' copies, for whole tiles, for those that the copy engine brought and for results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.tree_attention.mosaic_rows import ROWS, THREADS, Source, offset_of, part, place_of, tiled

_CHUNK = 8
_SCALAR = plgpu.Layout.WG_SPLAT(())


def _piece() -> Any:
    """16 bytes."""
    return ir.VectorType.get((4,), ir.IntegerType.get_signless(32))


def _splat(word: int) -> Any:
    of = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), word)
    return arith.constant(_piece(), ir.DenseElementsAttr.get_splat(_piece(), of))


def prefetch(ref: Any, at: Any) -> None:
    """Has what lies at a place in global memory, counted in values, brought to the second-level cache."""

    def run(_: Any, ref: Any, at: Any) -> None:
        kind, void = ir.MemRefType(ref.type).element_type, ir.Type.parse("!llvm.void")
        pointer = utils.getelementptr(utils.memref_ptr(ref), [at.registers.item()], kind)
        llvm.inline_asm(void, [pointer], "prefetch.global.L2 [$0];", "l", has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))(run)(ref, jnp.asarray(at, jnp.int32))


def clean(tile: Any, keep: tuple[Any, Any]) -> None:
    """Zeros for the rows of a tile [64, C] in shared memory outside [keep[0], keep[1]), and for what is not finite.

    `commit_smem` must follow.
    """

    def run(_: Any, tile: Any, low: Any, high: Any) -> None:
        _clean(tile, low.registers.item(), high.registers.item())

    types = (plgpu.RefType(tiled()), _SCALAR, _SCALAR)
    plgpu.inline_mgpu(arg_types=types)(run)(tile, *(jnp.asarray(x, jnp.int32) for x in keep))


def _clean(tile: Any, low: Any, high: Any) -> None:
    i32 = ir.IntegerType.get_signless(32)
    c = lambda value: arith.constant(i32, value)
    where = ir.MemRefType(tile.type)
    tiles = where.shape[1]  # of 64 channels, 8 rows each
    exponent = 0x7F80 if isinstance(where.element_type, ir.BF16Type) else 0x7C00
    thread = arith.remui(utils.thread_idx(), c(THREADS))
    begin = utils.memref_ptr(tile)
    for i in range(ROWS * tiles * 64 // (THREADS * _CHUNK)):
        at = arith.addi(thread, c(i * THREADS))  # of pieces of 16 bytes, as they lie
        row = arith.addi(arith.muli(arith.divui(at, c(64 * tiles)), c(8)), arith.remui(arith.divui(at, c(8)), c(8)))
        pointer = utils.getelementptr(begin, [arith.muli(at, c(16))], ir.IntegerType.get_signless(8))
        found = llvm.load(_piece(), pointer, alignment=16)
        for shift in (0, 16):
            ones = _splat(exponent << shift)
            broken = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(found, ones), ones)
            found = arith.select(broken, arith.andi(found, _splat(0xFFFF if shift else -0x10000)), found)
        below = arith.cmpi(arith.CmpIPredicate.slt, row, low)
        outside = arith.ori(below, arith.cmpi(arith.CmpIPredicate.sge, row, high))
        llvm.store(arith.select(outside, _splat(0), found), pointer, alignment=16)


def fill(tile: Any, ref: Any, source: Source, base: Any, first: Any, count: Any) -> None:
    """A tile [64, C] in shared memory: row i is row first + i of a source, if that is below count, and else zeros.

    All is asked for before any of it is stored. `commit_smem` must follow.

    Args:
      ref: in global memory, of the tile's dtype. base: of row 0, in values.
    """

    def run(_: Any, tile: Any, ref: Any, *scalars: Any) -> None:
        base, first, count = (x.registers.item() for x in scalars)
        to, zeros = utils.memref_ptr(tile), _splat(0)
        pieces = list(_pieces(tile, ref, source, base, first, count))
        found = [llvm.load(_piece(), pointer, alignment=16) for _, pointer, _ in pieces]
        for (place, _, live), value in zip(pieces, found, strict=True):
            pointer = utils.getelementptr(to, [place], ir.IntegerType.get_signless(8))
            llvm.store(arith.select(live, value, zeros), pointer, alignment=16)

    _with_tile(run, tile, ref, base, first, count)


def drain(tile: Any, ref: Any, source: Source, base: Any, first: Any, count: Any) -> None:
    """What `fill` does, the other way: the rows below count to where they lie."""

    def run(_: Any, tile: Any, ref: Any, *scalars: Any) -> None:
        base, first, count = (x.registers.item() for x in scalars)
        begin = utils.memref_ptr(tile)
        pieces = list(_pieces(tile, ref, source, base, first, count))
        places = [utils.getelementptr(begin, [place], ir.IntegerType.get_signless(8)) for place, _, _ in pieces]
        found = [llvm.load(_piece(), place, alignment=16) for place in places]
        i32, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        # No branches, between which loads would wait for each other.
        code = "{.reg .pred p; setp.ne.u32 p, $0, 0; @p st.global.v4.u32 [$1], {$2, $3, $4, $5};}"
        for (_, pointer, live), value in zip(pieces, found, strict=True):
            words = [part(value, i) for i in range(4)]
            llvm.inline_asm(void, [arith.extui(i32, live), pointer, *words], code, "r,l,r,r,r,r", has_side_effects=True)

    _with_tile(run, tile, ref, base, first, count)


def _with_tile(run: Any, tile: Any, ref: Any, *scalars: Any) -> None:
    types = (plgpu.RefType(tiled()), plgpu.RefType(), *[_SCALAR] * len(scalars))
    plgpu.inline_mgpu(arg_types=types)(run)(tile, ref, *(jnp.asarray(x, jnp.int32) for x in scalars))


def _pieces(tile: Any, ref: Any, source: Source, base: Any, first: Any, count: Any) -> Iterator[tuple[Any, Any, Any]]:
    """A thread's pieces of 16 bytes of a tile: the place of each in the tile, in bytes, and in memory, and whether its
    row exists. Of a row that does not, the place in memory is row 0's."""
    i32 = ir.IntegerType.get_signless(32)
    c = lambda value: arith.constant(i32, value)
    where = ir.MemRefType(tile.type)
    chunks, begin = where.shape[1] * 64 // _CHUNK, utils.memref_ptr(ref)
    strides, _ = where.get_strides_and_offset()
    # Read anew each time, lest what follows from it should lie in registers from one call to the next.
    thread: Any = llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)
    thread = arith.remui(thread, c(THREADS))
    chunk, own = arith.remui(thread, c(chunks)), arith.divui(thread, c(chunks))
    for i in range(0, ROWS, THREADS // chunks):
        row = arith.addi(own, c(i))
        r = arith.addi(first, row)
        live = arith.cmpi(arith.CmpIPredicate.slt, r, count)
        at = arith.addi(base, offset_of(source, arith.select(live, r, c(0))))
        at = arith.addi(at, arith.muli(chunk, c(_CHUNK)))
        yield place_of(row, chunk, 2 * strides[0]), utils.getelementptr(begin, [at], where.element_type), live


def put(ref: Any, values: jax.Array, source: Source, base: Any, first: Any, count: Any) -> None:
    """Rows of a result [64, C] in wgmma's layout to where queries lie: row i to row first + i, if that is below count.

    Args:
      ref: [..., C] in global memory, of the values' dtype.
      base: of row 0, in values.
    """
    types = (plgpu.RefType(), plgpu.Layout.WGMMA, *[_SCALAR] * 3)

    def run(_: Any, ref: Any, values: Any, *scalars: Any) -> None:
        base, first, count = (x.registers.item() for x in scalars)
        i32 = ir.IntegerType.get_signless(32)
        c = lambda value: arith.constant(i32, value)
        thread = arith.remui(utils.thread_idx(), c(THREADS))
        warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
        column = arith.muli(arith.remui(lane, c(4)), c(2))
        flat = values.registers.reshape(-1, 2)
        kind = ir.VectorType(flat[0, 0].type).element_type
        to = utils.memref_ptr(ref)
        for half in range(2):
            row = arith.addi(arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4))), c(8 * half))
            r = arith.addi(first, row)
            with utils.when(arith.cmpi(arith.CmpIPredicate.slt, r, count)):
                at = arith.addi(arith.addi(base, offset_of(source, r)), column)
                for j, pair in enumerate(flat[:, half]):
                    word = vector.bitcast(ir.VectorType.get((1,), i32), pair)
                    pointer = utils.getelementptr(to, [arith.addi(at, c(8 * j))], kind)
                    llvm.store(word, pointer, alignment=4)

    args = [jnp.asarray(x, jnp.int32) for x in (base, first, count)]
    plgpu.inline_mgpu(arg_types=types)(run)(ref, values, *args)


def barrier(what: str, number: Any) -> None:
    """bar.sync or bar.arrive of two warpgroups at one of the hardware's barriers that Mosaic leaves alone."""

    def run(_: Any, number: Any) -> None:
        at = arith.addi(number.registers.item(), arith.constant(ir.IntegerType.get_signless(32), 8))
        code, void = f"bar.{what} $0, {2 * THREADS};", ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [at], code, "r", has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(_SCALAR,))(run)(jnp.asarray(number, jnp.int32))
