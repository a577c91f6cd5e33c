"""From a tile of packed weights in shared memory to wgmma's first operand in registers, on Hopper.

A thread of wgmma holds, of each 16 inputs, pairs (2q, 2q + 1) and (8 + 2q, 9 + 2q) of two rows eight apart; q is the
thread's number among the four that share a row. `packed` puts what a thread holds of 128 inputs side by side, 32 or 16
bytes, so that it is loaded 16 bytes at a time and without conflicts of banks, and each pair where a mask finds both
values in one word.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.small_batch import packed
from pallas_kernels.small_batch.packed import BLOCK

#: Rows of wgmma's first operand.
ROWS = 64

# Two values of one word to two of bfloat16. Exponent 0x43 makes a unit of the last mantissa bit 1: 128 + the low seven
# bits, less 128 or, where the sign bit is added to the exponent, 256. Nibbles are 8 more, less 136. Of float8 the
# exponent's and the mantissa's bits fall into place, but 120 powers of two too low.
_INT8 = """{ .reg .b32 a, b;
lop3.b32 a, $1, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, $1, 0x00800080, 0x43004300, 0xea;
sub.bf16x2 $0, a, b; }"""
_INT4 = """{ .reg .b32 a, b;
lop3.b32 a, $1, 0x000f000f, 0x43084308, 0x6a;
mov.b32 b, 0x43084308;
sub.bf16x2 $0, a, b; }"""
_FLOAT8 = """{ .reg .b32 a, b, c;
shr.u32 a, $1, 4;
and.b32 b, $1, 0x80008000;
lop3.b32 a, a, 0x07f007f0, b, 0xea;
mov.b32 c, 0x7b807b80;
mul.bf16x2 $0, a, c; }"""


def row_bytes(dtype: Any) -> int:
    """Bytes of BLOCK inputs of an output."""
    return BLOCK // 2 if jnp.dtype(dtype) == jnp.int4 else BLOCK


def transforms(dtype: Any) -> tuple[Any, ...]:
    """How a tile lies in shared memory: pieces of 8 outputs, of 64 bytes each as they come, of 128 swizzled."""
    tiling = (plgpu.TilingTransform((8, BLOCK)),)
    return tiling if jnp.dtype(dtype) == jnp.int4 else (*tiling, plgpu.SwizzleTransform(BLOCK))


def unpack(tile: Any, dtype: Any, block: int, interpret: bool) -> jax.Array:
    """A block of a tile [2, 32, blocks * BLOCK] of shared memory as bfloat16 [64, BLOCK], inputs in natural order."""
    if interpret:
        values = tile[:, :, block * BLOCK : (block + 1) * BLOCK].reshape(ROWS, BLOCK)
        return packed.natural(values, jnp.dtype(dtype)).astype(jnp.bfloat16)
    blocks = tile.shape[-1] // BLOCK
    wanted = plgpu.ShapeDtypeStruct((ROWS, BLOCK), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms(dtype)),), return_type=wanted)(
        functools.partial(_unpack, kind=jnp.dtype(dtype).name, block=block, blocks=blocks)
    )(tile)


def _unpack(_: Any, tile: Any, *, kind: str, block: int, blocks: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    c = lambda value: arith.constant(i32, value)
    words = ir.VectorType.get((4,), i32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    four = kind == "int4"
    pitch = BLOCK // 2 if four else BLOCK

    thread = arith.remui(utils.thread_idx(), c(128))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
    row, quarter = arith.divui(lane, c(4)), arith.remui(lane, c(4))
    # Chunks of 16 bytes: the thread's own of a row, where the swizzle put them.
    chunk = quarter if four else arith.xori(arith.muli(quarter, c(2)), row)
    piece = 8 * pitch
    at = arith.addi(arith.muli(row, c(pitch)), arith.muli(chunk, c(16)))
    at = arith.addi(at, arith.addi(arith.muli(warp, c(2 * blocks * piece)), c(block * piece)))
    base = utils.memref_ptr(tile)

    def load(offset: Any) -> list[Any]:
        pointer = utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))
        loaded = llvm.load(words, pointer, alignment=16)
        return [vector.extract(loaded, [], [i]) for i in range(4)]

    code = {"int8": _INT8, "int4": _INT4, "float8_e4m3fn": _FLOAT8}[kind]
    expand: Any = lambda word: utils.bitcast(cast(Any, llvm.inline_asm(i32, [word], code, "=r,r")), pair)
    right = lambda word, bits: arith.shrui(word, c(bits)) if bits else word
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, BLOCK)), dtype=object)
    assert registers.size == 2 * BLOCK // 8, registers.shape
    flat = registers.reshape(BLOCK // 8, 2)
    for half in range(2):
        begin = arith.addi(at, c(blocks * piece * half))
        if four:
            for v, word in enumerate(load(begin)):
                for i in range(4):  # (step, half of its inputs)
                    flat[4 * v + i, half] = expand(right(word, 4 * i))
            continue
        for v, word in enumerate([*load(begin), *load(arith.xori(begin, c(16)))]):
            both = (arith.shli(word, c(8)), word) if kind == "float8_e4m3fn" else (word, right(word, 8))
            for i in range(2):
                flat[2 * v + i, half] = expand(both[i])
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def row_scales(scales: Any, blocks: Sequence[Any], interpret: bool) -> jax.Array:
    """Of scales [2, G, 32] in shared memory those of a block of each half, along wgmma's 64 rows: float32 [64]."""
    if interpret:
        return jnp.concatenate([scales[half, blocks[half]] for half in range(2)])
    wanted = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(1))
    scalar = plgpu.Layout.WG_SPLAT(())
    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar), return_type=wanted)(_row_scales)
    return call(scales, *blocks)


def _row_scales(_: Any, scales: Any, low: Any, high: Any) -> Any:
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    c = lambda value: arith.constant(i32, value)
    groups, columns = ir.MemRefType(scales.type).shape[1:]
    thread = arith.remui(utils.thread_idx(), c(128))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
    second = arith.cmpi(arith.CmpIPredicate.uge, warp, c(2))
    low, high = low.registers.item(), arith.addi(high.registers.item(), c(groups))
    column = arith.addi(arith.muli(arith.remui(warp, c(2)), c(16)), arith.divui(lane, c(4)))
    at = arith.addi(arith.muli(arith.select(second, high, low), c(columns)), column)
    base = utils.memref_ptr(scales)
    layout = plgpu.Layout.WGMMA.reduce(1).to_mgpu()
    registers = np.empty(layout.registers_shape((ROWS,)), dtype=object)
    assert registers.size == 2, registers.shape
    for half in range(2):
        pointer = utils.getelementptr(base, [arith.addi(at, c(8 * half))], f32)
        registers.flat[half] = llvm.load(ir.VectorType.get((1,), f32), pointer, alignment=4)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def times(a: jax.Array, b: jax.Array, layout: Any, interpret: bool) -> jax.Array:
    """a * b in float32, rounded before anything is added to it.

    Compilers make one operation of a product and a sum, of a * b + c * d either product's, and not the same one for
    every number of rows.
    """
    if interpret:
        return a * b
    wanted = plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout, layout), return_type=wanted)(_times)(a, b)


def _times(_: Any, a: Any, b: Any) -> Any:
    f32 = ir.F32Type.get()
    registers = np.empty_like(a.registers)
    for at in np.ndindex(registers.shape):
        x, y = a.registers[at], b.registers[at]
        found = x
        for i in range(ir.VectorType(x.type).shape[0]):
            pair = [vector.extract(v, [], [i]) for v in (x, y)]
            product: Any = llvm.inline_asm(f32, pair, "mul.rn.f32 $0, $1, $2;", "=f,f,f")
            found = vector.insert(product, found, [], [i])
        registers[at] = found
    return mgpu.FragmentedArray(_registers=registers, _layout=a.layout, _is_signed=None)
