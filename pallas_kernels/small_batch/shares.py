"""Sums of a norm's squares, a warpgroup's share of them by one of its warps.

Registers that a whole warpgroup holds are read by each of its warps: sixteen reading all of a program's squares keep
shared memory busy for 1,100 cycles, which the first product would wait for.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.small_batch import mosaic

#: Threads of a warp and of a warpgroup.
_WARP, _LANES = 32, 128


def add(tiles: Any, begin: Any, count: int, target: Any, *, vector: Any, interpret: bool) -> None:
    """The sum of so many of an array's rows [tiles, rows], in their order, to [rows]; both float32 in shared memory.

    Args:
      begin: the first of the rows. vector: a layout of [rows], for the interpreter.
    """
    if interpret:
        mosaic.write(target, mosaic.summed_tiles(tiles, begin, count, vector))
        return
    args = plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
    plgpu.inline_mgpu(arg_types=args)(functools.partial(_add, count=count))(tiles, target, jnp.int32(begin))


def _add(_: Any, tiles: Any, target: Any, begin: Any, *, count: int) -> None:
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    c = lambda value: arith.constant(i32, value)
    rows = ir.MemRefType(tiles.type).shape[1]
    thread = arith.remui(utils.thread_idx(), c(_LANES))
    first = arith.addi(arith.muli(begin.registers.item(), c(rows)), thread)
    source, to = utils.memref_ptr(tiles), utils.memref_ptr(target)
    assert rows <= _WARP, rows
    with utils.when(arith.cmpi(arith.CmpIPredicate.ult, thread, c(rows))):
        total: Any = arith.constant(f32, 0.0)
        for i in range(count):
            at = arith.addi(first, c(i * rows))
            total = arith.addf(total, llvm.load(f32, utils.getelementptr(source, [at], f32), alignment=4))
        llvm.store(total, utils.getelementptr(to, [thread], f32), alignment=4)
