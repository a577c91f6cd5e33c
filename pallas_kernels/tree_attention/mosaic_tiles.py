"""What wide attention does to tiles thread by thread: values in shared memory that must not count, rows to memory.

Both are the counterparts of `mosaic_rows`' copies, for tiles that the copy engine brought and for results.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.tree_attention.mosaic_rows import ROWS, Source, tiled

_THREADS, _CHUNK = 128, 8
_SCALAR = plgpu.Layout.WG_SPLAT(())


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
    four = ir.VectorType.get((4,), i32)
    c = lambda value: arith.constant(i32, value)
    splat = lambda x: arith.constant(four, ir.DenseElementsAttr.get_splat(four, ir.IntegerAttr.get(i32, x)))
    where = ir.MemRefType(tile.type)
    tiles = where.shape[1]  # of 64 channels, 8 rows each
    exponent = 0x7F80 if isinstance(where.element_type, ir.BF16Type) else 0x7C00
    thread = arith.remui(utils.thread_idx(), c(_THREADS))
    begin = utils.memref_ptr(tile)
    for i in range(ROWS * tiles * 64 // (_THREADS * _CHUNK)):
        at = arith.addi(thread, c(i * _THREADS))  # of pieces of 16 bytes, as they lie
        row = arith.addi(arith.muli(arith.divui(at, c(64 * tiles)), c(8)), arith.remui(arith.divui(at, c(8)), c(8)))
        pointer = utils.getelementptr(begin, [arith.muli(at, c(16))], ir.IntegerType.get_signless(8))
        found = llvm.load(four, pointer, alignment=16)
        for shift in (0, 16):
            ones = splat(exponent << shift)
            broken = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(found, ones), ones)
            found = arith.select(broken, arith.andi(found, splat(0xFFFF if shift else -0x10000)), found)
        below = arith.cmpi(arith.CmpIPredicate.slt, row, low)
        outside = arith.ori(below, arith.cmpi(arith.CmpIPredicate.sge, row, high))
        llvm.store(arith.select(outside, splat(0), found), pointer, alignment=16)


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
        thread = arith.remui(utils.thread_idx(), c(_THREADS))
        warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
        column = arith.muli(arith.remui(lane, c(4)), c(2))
        flat = values.registers.reshape(-1, 2)
        kind = ir.VectorType(flat[0, 0].type).element_type
        to = utils.memref_ptr(ref)
        for half in range(2):
            row = arith.addi(arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4))), c(8 * half))
            r = arith.addi(first, row)
            with utils.when(arith.cmpi(arith.CmpIPredicate.slt, r, count)):
                at = arith.addi(
                    arith.muli(arith.divui(r, c(source.group)), c(source.outer)),
                    arith.muli(arith.remui(r, c(source.group)), c(source.inner)),
                )
                at = arith.addi(arith.addi(base, at), column)
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
        code, void = f"bar.{what} $0, {2 * _THREADS};", ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [at], code, "r", has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(_SCALAR,))(run)(jnp.asarray(number, jnp.int32))
