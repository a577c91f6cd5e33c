"""What plain attention does to rows of any width thread by thread: keys and values to registers, a result to memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

_THREADS, _ROWS = 128, 64
_SCALAR = plgpu.Layout.WG_SPLAT(())
_TILE = plgpu.Layout.WGMMA


def load(
    ref: Any, table: Any, b: Any, head: Any, start: Any, low: Any, high: Any, column: Any, width: int, *,
    finite: bool = False, pretend: bool = False,
) -> jax.Array:  # fmt: skip
    """Channels [column, column + width) of 64 tokens from `start` on in float32, zeros of those outside [low, high).

    Args:
      ref: pages [P, G, page, W] of the table [B, M]; or without one new tokens [B, T, G, W].
      finite: zeros for what is not finite.
      pretend: compute what the threads would.
    """
    if pretend:
        return _pretended(ref, table, b, head, start, low, high, column, width, finite)
    wanted = plgpu.ShapeDtypeStruct((_ROWS, width), jnp.float32, layout=_TILE)
    refs = (ref,) if table is None else (ref, table)

    def run(_: Any, *args: Any) -> Any:
        scalars = [x.registers.item() for x in args[len(refs) :]]
        return _load(args[0], None if table is None else args[1], wanted, finite, *scalars)

    types = (*[plgpu.RefType()] * len(refs), *[_SCALAR] * 6)
    scalars = (jnp.asarray(x, jnp.int32) for x in (b, head, start, low, high, column))
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(*refs, *scalars)


def _pretended(
    ref: Any, table: Any, b: Any, head: Any, start: Any, low: Any, high: Any, column: Any, width: int, finite: bool
) -> jax.Array:
    position = start + jnp.arange(_ROWS)
    live = (position >= low) & (position < high)
    position = jnp.where(live, position, 0)
    if table is None:
        rows = ref[b][position, head]
    else:
        page = ref.shape[2]
        number = jnp.where(live, table[b][position // page], 0)
        rows = ref[...][number, head, position % page]
    found = jax.lax.dynamic_slice_in_dim(rows, column, width, axis=1).astype(jnp.float32)
    live = live[:, None] & (jnp.isfinite(found) if finite else True)
    return jnp.where(live, found, 0.0)


def _load(
    ref: Any, table: Any, wanted: Any, finite: bool, b: Any, head: Any, start: Any, low: Any, high: Any, column: Any
) -> Any:
    i32, i64, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.F32Type.get()
    c, c64 = (lambda value, kind=kind: arith.constant(kind, value) for kind in (i32, i64))
    wide = lambda x: arith.extsi(i64, x)
    *_, _, _, row_width = ir.MemRefType(ref.type).shape
    kind = ir.MemRefType(ref.type).element_type
    pair, floats = ir.VectorType.get((2,), kind), ir.VectorType.get((2,), f32)
    constant = lambda x: arith.constant(floats, ir.DenseElementsAttr.get_splat(floats, ir.FloatAttr.get(f32, x)))
    pointer = utils.memref_ptr(ref)
    registers = np.empty(wanted.layout.to_mgpu().registers_shape(wanted.shape), dtype=object)
    flat = registers.reshape(-1, 2)
    thread = arith.remui(utils.thread_idx(), c(_THREADS))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
    own = arith.addi(column, arith.muli(arith.remui(lane, c(4)), c(2)))
    for half in range(2):
        row = arith.addi(arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4))), c(8 * half))
        position = arith.addi(start, row)
        above = arith.cmpi(arith.CmpIPredicate.sge, position, low)
        live = arith.andi(above, arith.cmpi(arith.CmpIPredicate.slt, position, high))
        position = arith.select(live, position, c(0))
        if table is None:
            _, tokens, heads, _ = ir.MemRefType(ref.type).shape
            at = arith.addi(arith.muli(wide(b), c64(tokens)), wide(position))
            at = arith.addi(arith.muli(at, c64(heads)), wide(head))
        else:
            _, heads, page, _ = ir.MemRefType(ref.type).shape
            entry = arith.addi(arith.muli(b, c(ir.MemRefType(table.type).shape[1])), arith.divui(position, c(page)))
            number = llvm.load(i32, utils.getelementptr(utils.memref_ptr(table), [entry], i32), alignment=4)
            number = arith.select(live, number, c(0))
            at = arith.addi(arith.muli(wide(number), c64(heads)), wide(head))
            at = arith.addi(arith.muli(at, c64(page)), wide(arith.remui(position, c(page))))
        at = arith.addi(arith.muli(at, c64(row_width)), wide(own))
        for j in range(len(flat)):
            where = utils.getelementptr(pointer, [arith.addi(at, c64(8 * j))], kind)
            value = llvm.load(pair, where, alignment=2 * utils.bitwidth(kind) // 8)
            value = value if kind == f32 else arith.extf(floats, value)
            value = arith.select(live, value, constant(0.0))
            if finite:
                size = arith.cmpf(arith.CmpFPredicate.OLT, _absolute(value), constant(float("inf")))
                value = arith.select(size, value, constant(0.0))
            flat[j, half] = value
    return mgpu.FragmentedArray(_registers=registers, _layout=wanted.layout.to_mgpu(), _is_signed=None)


def _absolute(value: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((2,), i32)
    mask = arith.constant(words, ir.DenseElementsAttr.get_splat(words, ir.IntegerAttr.get(i32, 0x7FFFFFFF)))
    return arith.bitcast(value.type, arith.andi(arith.bitcast(words, value), mask))


def write(ref: Any, value: jax.Array, row: Any, begin: Any) -> None:
    """Channels from `begin` on of a row of [..., C], of which every warp has them all."""

    def run(_: Any, ref: Any, value: Any, row: Any, begin: Any) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        c = lambda value: arith.constant(i32, value)
        kind = ir.MemRefType(ref.type)
        thread = arith.remui(utils.thread_idx(), c(_THREADS))
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, thread, c(4))):
            at = arith.muli(arith.extsi(i64, row.registers.item()), arith.constant(i64, kind.shape[-1]))
            own = arith.addi(begin.registers.item(), arith.muli(thread, c(2)))
            at = arith.addi(at, arith.extsi(i64, own))
            for j, two in enumerate(value.registers.reshape(-1)):
                where = arith.addi(at, arith.constant(i64, 8 * j))
                pointer = utils.getelementptr(utils.memref_ptr(ref), [where], kind.element_type)
                llvm.store(two, pointer, alignment=2 * utils.bitwidth(kind.element_type) // 8)

    types = plgpu.RefType(), _TILE.reduce(0), _SCALAR, _SCALAR
    plgpu.inline_mgpu(arg_types=types)(run)(ref, value, *(jnp.asarray(x, jnp.int32) for x in (row, begin)))
