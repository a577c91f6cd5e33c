"""Products of a tile of packed weights in shared memory, expanded in registers, and of rows there, on Hopper.

mma multiplies 16 columns of weights, the rows of its first operand, by 8 rows of activations. A thread of it holds, of
each 16 inputs, pairs (2q, 2q + 1) and (8 + 2q, 9 + 2q) of two columns eight apart; q is the thread's number among the
four that share a column. `packed` puts what a thread holds of 128 inputs side by side, 32 or 16
bytes, so that it is loaded 16 bytes at a time and without conflicts of banks, and each pair where a mask finds both
values in one word. Of MXFP4 each such word has the inputs of one scale, a power of two, which is multiplied in. A zero
point is subtracted from both values at once: exact, as differences of integers of up to 8 bits are.
"""

from __future__ import annotations

import functools
from typing import Any, cast

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

from pallas_kernels.small_batch import packed
from pallas_kernels.small_batch.packed import BLOCK, FLOAT4, SCALE, ZEROS

#: Columns of weights that a warpgroup's four warps multiply at once.
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
# With a zero point $2 is subtracted: of nibbles 136 + zero in one go, of bytes the zero besides.
_INT8_ZEROS = """{ .reg .b32 a, b;
lop3.b32 a, $1, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, $1, 0x00800080, 0x43004300, 0xea;
sub.bf16x2 a, a, b;
sub.bf16x2 $0, a, $2; }"""
_INT4_ZEROS = """{ .reg .b32 a;
lop3.b32 a, $1, 0x000f000f, 0x43084308, 0x6a;
sub.bf16x2 $0, a, $2; }"""
# What that is, in both halves of a word, from the signed low byte of another: 136 + zero has 0x4308 + zero for bits.
_INT8_ZERO = f"{{ .reg .b32 z; prmt.b32 z, $1, 0, 0x4040; {_INT8.replace('$1', 'z')} }}"
_INT4_ZERO = """{ .reg .b32 z;
prmt.b32 z, $1, 0, 0x8880;
mad.lo.s32 $0, z, 0x00010001, 0x43084308; }"""
_FLOAT8 = """{ .reg .b32 a, b, c;
shr.u32 a, $1, 4;
and.b32 b, $1, 0x80008000;
lop3.b32 a, a, 0x07f007f0, b, 0xea;
mov.b32 c, 0x7b807b80;
mul.bf16x2 $0, a, c; }"""
# Float4's bits fall into place too, 126 powers of two too low, which the scale makes good; those of the i-th nibble of
# both halves of the word after two shifts. A scale's exponent (see packed.EXPONENT) in both halves of a word.
_FLOAT4 = """{{ .reg .b32 a, b;
{}
and.b32 b, b, 0x80008000;
lop3.b32 a, a, 0x01c001c0, b, 0xea;
mul.bf16x2 $0, a, $2; }}"""
_SHIFTS = (
    "shl.b32 a, $1, 6; shl.b32 b, $1, 12;", "shl.b32 a, $1, 2; shl.b32 b, $1, 8;",
    "shr.u32 a, $1, 2; shl.b32 b, $1, 4;", "shr.u32 a, $1, 6; mov.b32 b, $1;",
)  # fmt: skip
_EXPONENT = "{{ .reg .b32 a; prmt.b32 a, $1, 0, 0x{0}4{0}4; shr.u32 $0, a, 1; }}"
# Waits for a loaded word, for what comes behind may not come before a store: of none, as no scale has this value.
_READ = "{ .reg .pred p; setp.eq.b32 p, $1, 0xffffdead; @p st.volatile.shared.b32 [$0], $1; }"
_CODES = {
    "int8": _INT8, "int4": _INT4, "float8_e4m3fn": _FLOAT8, "int8" + ZEROS: _INT8_ZEROS, "int4" + ZEROS: _INT4_ZEROS,
}  # fmt: skip
# Four pieces of 8 rows and 8 inputs, as mma's second operand has them; and mma.
LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
LOADED = "=r,=r,=r,=r,r,~{memory}"
_MMA = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"""


def stored(kind: str) -> Any:
    """The type that values of `Packed.kind` lie there as."""
    return jnp.dtype("int4" if kind == FLOAT4 else kind.removesuffix(ZEROS))


def has_words(kind: str) -> bool:
    """Whether `Packed.scale` has words that values are expanded by, not just scales of products."""
    return kind == FLOAT4 or kind.endswith(ZEROS)


def row_bytes(kind: str) -> int:
    """Bytes of BLOCK inputs of an output."""
    return BLOCK // 2 if stored(kind) == jnp.int4 else BLOCK


def rows_transforms(inputs: int = 64) -> tuple[Any, ...]:
    """How the rows of activations lie in shared memory: pieces of 8 rows and 64 inputs, or so many, swizzled."""
    return plgpu.TilingTransform((8, inputs)), plgpu.SwizzleTransform(2 * inputs)


def transforms(dtype: Any) -> tuple[Any, ...]:
    """How a tile lies in shared memory: pieces of 8 outputs, of 64 bytes each as they come, of 128 swizzled."""
    tiling = (plgpu.TilingTransform((8, BLOCK)),)
    return tiling if jnp.dtype(dtype) == jnp.int4 else (*tiling, plgpu.SwizzleTransform(BLOCK))


def products(
    tile: Any, x: Any, kind: str, blocks: int, rows: int, begin: Any, *, alone: bool, scales: Any, interpret: bool,
    pieces: int = 1,
) -> list[jax.Array]:  # fmt: skip
    """Of each block of a step, and of each piece of a block, the sums float32 [64, rows] in wgmma's layout.

    Args:
      tile: of shared memory, [2, 32, blocks * BLOCK], or [1, 32, 2 * blocks * BLOCK]: then the first 32 of the result
        have the even blocks of inputs, and the others the odd ones.
      x: of shared memory, bfloat16 [rows or more, as many]; or, alone, [all blocks, BLOCK] or pieces of these, of one
        row, which all of the result's are.
      kind: of the values, see `Packed.kind`; float4's sums are 2 ** packed.EXPONENT too small.
      begin: of one row, and of kinds that have words, the block, or pair of blocks, that the step begins with.
      scales: of shared memory, [parts, G, 32]: words, of which float4's are multiplied by, and zero points subtracted;
        other scales are not read.
      pieces: of a block, that have scales of their own.
    """
    parts, float4, by_words = tile.shape[0], kind == FLOAT4, has_words(kind)
    if interpret:
        values, wide = packed.natural(tile[...], stored(kind)), x[...].astype(jnp.float32)
        values = packed.float4(values) if float4 else values.astype(jnp.float32)
        wide = wide.reshape(-1, BLOCK) if alone else wide[:rows]

        size = BLOCK // pieces

        def sums(block: int, piece: int, half: int) -> jax.Array:
            at = block if parts == 2 else 2 * block + half
            inputs = slice(at * BLOCK + piece * size, at * BLOCK + (piece + 1) * size)
            w = values[half % parts, :, inputs]
            if by_words:
                number = begin + block if parts == 2 else 2 * (begin + block) + half
                w = _by_words(w, scales[half % parts][number * pieces + piece], kind)
            if not alone:
                return lax.dot_general(w, wide[:, inputs], (((1,), (1,)), ((), ())))
            own = wide[begin * (2 // parts) + at, piece * size : (piece + 1) * size]
            return jnp.broadcast_to(jnp.sum(w * own[None], axis=1, keepdims=True), (w.shape[0], rows))

        all_pieces = ((block, piece) for block in range(blocks) for piece in range(pieces))
        return [jnp.concatenate([sums(*at, half) for half in range(2)]) for at in all_pieces]
    wanted = plgpu.ShapeDtypeStruct((ROWS, rows), jnp.float32, layout=plgpu.Layout.WGMMA)
    scalar = plgpu.Layout.WG_SPLAT(())
    rows_in = plgpu.RefType() if alone else plgpu.RefType(rows_transforms())
    args: list[Any] = [plgpu.RefType(transforms(stored(kind))), rows_in]
    given = [tile, x]
    if alone or by_words:
        args, given = [*args, scalar], [*given, begin]
    if by_words:
        args, given = [*args, plgpu.RefType()], [*given, scales]
    extra = dict(kind=kind, blocks=blocks, rows=rows, parts=parts, alone=alone, pieces=pieces)
    found: list[jax.Array] = []
    for block in range(blocks):
        run = functools.partial(_products, block=block, **extra)
        found += plgpu.inline_mgpu(arg_types=tuple(args), return_type=[wanted] * pieces)(run)(*given)
    return found


def _by_words(w: jax.Array, words: jax.Array, kind: str) -> jax.Array:
    """Values [columns, BLOCK] in float32 by their words [columns], as registers have them."""
    if kind == FLOAT4:
        return w * jnp.repeat(packed.powers(words[None]), BLOCK // 4, axis=0).T
    return w - packed.word_zeros(words)[:, None]


def expanded(
    tile: Any, kind: str, interpret: bool, scales: Any = None, *, number: Any = None, block: int = 0, blocks: int = 1,
    piece: int = 0, pieces: int = 1,
) -> jax.Array:  # fmt: skip
    """Of a tile in shared memory [2, 32, blocks * BLOCK] a block's values, or one of its pieces', bfloat16 [64, BLOCK
    / pieces], as wgmma's first operand.

    Args:
      kind: of the values, see `Packed.kind`; float4's are 2 ** packed.EXPONENT too small.
      scales: of kinds that have words, in shared memory: [2, G, 32]. Others are not scaled.
      number: of the block among these (default: the first). block: the same among the tile's.
      pieces: of a block, that have scales of their own.
    """
    size = BLOCK // pieces
    words = scales if has_words(kind) else None
    if interpret:
        values = packed.natural(tile[:, :, block * BLOCK : (block + 1) * BLOCK], stored(kind))
        values = packed.float4(values) if kind == FLOAT4 else values.astype(jnp.float32)
        values = values.reshape(ROWS, BLOCK)[:, piece * size : (piece + 1) * size]
        if words is not None:
            own = (0 if number is None else number) * pieces + piece
            values = _by_words(values, words[:, own].reshape(ROWS), kind)
        return values.astype(jnp.bfloat16)
    wanted = plgpu.ShapeDtypeStruct((ROWS, size), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    args, given = [plgpu.RefType(transforms(stored(kind)))], [tile]
    if words is not None:
        args, given = [*args, plgpu.RefType()], [*given, words]
        if number is not None:
            args, given = [*args, plgpu.Layout.WG_SPLAT(())], [*given, number]
    run = functools.partial(_expanded, kind=kind, block=block, blocks=blocks, piece=piece, pieces=pieces)
    return plgpu.inline_mgpu(arg_types=tuple(args), return_type=wanted)(run)(*given)


def _expanded(
    _: Any, tile: Any, scales: Any = None, number: Any = None, *, kind: str, block: int, blocks: int, piece: int,
    pieces: int,
) -> Any:  # fmt: skip
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    by = None
    if scales is not None:
        first = arith.constant(ir.IntegerType.get_signless(32), 0)
        by = _factors_or_zeros(scales, first if number is None else number.registers.item(), kind, pieces)
    words = _unpacked(tile, kind=kind, block=block, blocks=blocks, parts=2, by=by, piece=piece, pieces=pieces)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, BLOCK // pieces)), dtype=object)
    flat = registers.reshape(words.shape)
    for at in np.ndindex(words.shape):
        flat[at] = llvm.bitcast(pair, words[at])
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def multiplied(weights: jax.Array, x: Any, interpret: bool) -> jax.Array:
    """Weights in registers [64, K] times rows in shared memory [rows, K]: sums float32 [64, rows]."""
    if interpret:  # knows no operand in registers
        return lax.dot_general(weights, x[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    def sums(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, weights, x.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(sums, plgpu.WGMMAAccumulatorRef((ROWS, x.shape[0]), jnp.float32))


def _products(
    _: Any, tile: Any, x: Any, begin: Any = None, scales: Any = None, *, kind: str, block: int, blocks: int, rows: int,
    parts: int, alone: bool, pieces: int,
) -> list[Any]:  # fmt: skip
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    by = None
    if scales is not None:
        by = _factors_or_zeros(scales, arith.addi(begin.registers.item(), arith.constant(i32, block)), kind, pieces)
    weights = _unpacked(tile, kind=kind, block=block, blocks=blocks, parts=parts, by=by)
    struct = lambda kind: llvm.StructType.get_literal([kind] * 4)
    pointers = _pointers(x, begin if alone else None, block, blocks, parts)
    shape = mgpu.WGMMA_LAYOUT.registers_shape((ROWS, rows))
    found_of = [np.empty(shape, dtype=object) for _ in range(pieces)]
    assert found_of[0].size == 2 * rows // 8, shape
    pair = ir.VectorType.get((2,), f32)
    for tile_of_rows in range(rows // 8):
        sums: list[Any] = []
        for quarter in range(4):
            if quarter % (4 // pieces) == 0:
                sums = [arith.constant(f32, 0.0)] * 4
            pointer = pointers(tile_of_rows, quarter)
            found: Any = llvm.inline_asm(struct(i32), [pointer], LOAD, LOADED, has_side_effects=True)
            b = [llvm.extractvalue(i32, found, [i]) for i in range(4)]
            for i in range(2):
                step = quarter * 2 + i
                a = [weights[2 * step, 0], weights[2 * step, 1], weights[2 * step + 1, 0], weights[2 * step + 1, 1]]
                result: Any = llvm.inline_asm(
                    struct(f32), [*a, *b[2 * i : 2 * i + 2], *sums], _MMA,
                    "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                )  # fmt: skip
                sums = [llvm.extractvalue(f32, result, [j]) for j in range(4)]
            if (quarter + 1) % (4 // pieces):
                continue
            flat = found_of[quarter * pieces // 4].reshape(rows // 8, 2)
            for half in range(2):
                value = llvm.mlir_undef(pair)
                for j in range(2):
                    value = vector.insert(sums[2 * half + j], value, [], [j])
                flat[tile_of_rows, half] = value
    whole = functools.partial(mgpu.FragmentedArray, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
    return [whole(_registers=registers) for registers in found_of]


def _pointers(x: Any, begin: Any, block: int, blocks: int, parts: int) -> Any:
    """Where a lane's row of 8 inputs lies, of each 8 rows and quarter of a block, which are four pieces of 8 lanes."""
    i32 = ir.IntegerType.get_signless(32)
    c = lambda value: arith.constant(i32, value)
    thread = arith.remui(utils.thread_idx(), c(128))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
    row, piece = arith.remui(lane, c(8)), arith.divui(lane, c(8))
    second = arith.divui(warp, c(2))  # with one part these two warps have the odd blocks
    base = llvm.ptrtoint(i32, utils.memref_ptr(x))
    if begin is not None:
        own = arith.addi(begin.registers.item(), c(block))
        if parts == 1:
            own = arith.addi(arith.muli(own, c(2)), second)
        at = arith.addi(base, arith.addi(arith.muli(own, c(2 * BLOCK)), arith.muli(piece, c(16))))
        return lambda _, quarter: arith.addi(at, c(64 * quarter))
    # Tiles of 8 rows of 64 inputs, 128 bytes a row, swizzled.
    at, first, across = arith.addi(base, arith.muli(row, c(128))), block, blocks
    if parts == 1:
        first, across = 2 * block, 2 * blocks
        at = arith.addi(at, arith.muli(second, c(2048)))
    chunks = [arith.muli(arith.xori(arith.addi(piece, c(4 * i)), row), c(16)) for i in range(2)]
    places = [arith.addi(at, chunk) for chunk in chunks]
    tile = lambda rows, quarter: c((rows * across * 2 + first * 2 + quarter // 2) * 1024)
    return lambda rows, quarter: arith.addi(places[quarter % 2], tile(rows, quarter))


def _factors_or_zeros(scales: Any, number: Any, kind: str, pieces: int) -> Any:
    """Words [32 inputs of four, half of 16 rows] of two equal values of bfloat16, of a block: what float4 is multiplied
    by, or what is subtracted where there are zero points, which the four of a piece have in common."""
    i32 = ir.IntegerType.get_signless(32)
    flat = np.empty((4, 2), dtype=object)
    zero = {"int4": _INT4_ZERO, "int8": _INT8_ZERO}.get(kind.removesuffix(ZEROS))
    for piece in range(pieces):
        for half, pointer in enumerate(_scale_pointers(scales, number, i32, piece, pieces)):
            word = llvm.load(i32, pointer, alignment=4)
            common = None if zero is None else llvm.inline_asm(i32, [word], zero, "=r,r")
            for v in range(piece * 4 // pieces, (piece + 1) * 4 // pieces):
                own = llvm.inline_asm(i32, [word], _EXPONENT.format(v), "=r,r") if common is None else common
                flat[v, half] = own
    return flat


def _unpacked(
    tile: Any, *, kind: str, block: int, blocks: int, parts: int, by: Any, piece: int = 0, pieces: int = 1
) -> Any:
    """Words [pairs of steps of 8 inputs, half of 16 rows] of two values of bfloat16, of a block or of one of so many
    pieces; `by` is _factors_or_zeros'."""
    i32 = ir.IntegerType.get_signless(32)
    c = lambda value: arith.constant(i32, value)
    words = ir.VectorType.get((4,), i32)
    four = stored(kind) == jnp.int4
    pitch = BLOCK // 2 if four else BLOCK

    thread = arith.remui(utils.thread_idx(), c(128))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
    row, quarter = arith.divui(lane, c(4)), arith.remui(lane, c(4))
    # Chunks of 16 bytes: the thread's own of a row, where the swizzle put them.
    chunk = quarter if four else arith.xori(arith.muli(quarter, c(2)), row)
    eight = 8 * pitch
    at = arith.addi(arith.muli(row, c(pitch)), arith.muli(chunk, c(16)))
    across, begin = blocks, arith.addi(arith.muli(warp, c(2 * blocks * eight)), c(block * eight))
    if parts == 1:
        across = 2 * blocks
        begin = arith.addi(arith.muli(arith.remui(warp, c(2)), c(2 * across * eight)), c(2 * block * eight))
        begin = arith.addi(begin, arith.muli(arith.divui(warp, c(2)), c(eight)))
    at = arith.addi(at, begin)
    base = utils.memref_ptr(tile)

    def load(offset: Any) -> list[Any]:
        pointer = utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))
        loaded = llvm.load(words, pointer, alignment=16)
        return [vector.extract(loaded, [], [i]) for i in range(4)]

    code = _CODES.get(kind, "")

    def expand(word: Any, v: int, half: int) -> Any:
        if by is None:
            return cast(Any, llvm.inline_asm(i32, [word], code, "=r,r"))
        return cast(Any, llvm.inline_asm(i32, [word, by[v, half]], code, "=r,r,r"))

    right = lambda word, bits: arith.shrui(word, c(bits)) if bits else word
    flat, per = np.empty((BLOCK // 8, 2), dtype=object), 4 // pieces
    wanted = range(piece * per, (piece + 1) * per)  # of 32 inputs each
    for half in range(2):
        begin = arith.addi(at, c(across * eight * half))
        if four:
            for v, word in enumerate(load(begin)):
                for i in range(4 if v in wanted else 0):  # (step, half of its inputs)
                    if kind != FLOAT4:
                        flat[4 * v + i, half] = expand(right(word, 4 * i), v, half)
                        continue
                    code = _FLOAT4.format(_SHIFTS[i])
                    flat[4 * v + i, half] = llvm.inline_asm(i32, [word, by[v, half]], code, "=r,r,r")
            continue
        for v, word in enumerate([*load(begin), *load(arith.xori(begin, c(16)))]):
            if v // 2 not in wanted:
                continue
            both = (arith.shli(word, c(8)), word) if kind == "float8_e4m3fn" else (word, right(word, 8))
            for i in range(2):
                flat[2 * v + i, half] = expand(both[i], v // 2, half)
    return flat[4 * wanted.start : 4 * wanted.stop]


def row_scales(
    scales: Any, block: Any, interpret: bool, *, piece: int = 0, pieces: int = 1, arrive: bool = False
) -> jax.Array:
    """Of scales [parts, G, 32] in shared memory those of a block of `products`, along its rows: float32 [64].

    Words lose their zero points.

    Args:
      pieces: of a block, that have scales of their own.
      arrive: whether a barrier may say right behind that their place can be written over. An arrival does not wait for
        loads that are under way, and on an H100 it overtook them: what was read was the place's next scales.
    """
    if interpret:
        parts = scales.shape[0]
        at = [(0, 2 * block + i) if parts == 1 else (i, block) for i in range(2)]
        found = jnp.concatenate([scales[part, number * pieces + piece] for part, number in at])
        return packed.word_scales(found) if found.dtype == jnp.int32 else found
    wanted = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(1))
    scalar = plgpu.Layout.WG_SPLAT(())
    read = functools.partial(_row_scales, piece=piece, pieces=pieces, arrive=arrive)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=wanted)(read)(scales, block)


def _row_scales(_: Any, scales: Any, block: Any, *, piece: int, pieces: int, arrive: bool) -> Any:
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    layout = plgpu.Layout.WGMMA.reduce(1).to_mgpu()
    registers = np.empty(layout.registers_shape((ROWS,)), dtype=object)
    assert registers.size == 2, registers.shape
    one = ir.VectorType.get((1,), f32)
    words = ir.MemRefType(scales.type).element_type != f32
    for half, pointer in enumerate(_scale_pointers(scales, block.registers.item(), f32, piece, pieces)):
        if words:
            word = arith.andi(llvm.load(i32, pointer, alignment=4), arith.constant(i32, SCALE))
            value = llvm.bitcast(one, word)
        else:
            value = llvm.load(one, pointer, alignment=4)
        registers.flat[half] = value
        if arrive:
            bits, at = llvm.bitcast(i32, value), llvm.ptrtoint(i32, pointer)
            llvm.inline_asm(ir.Type.parse("!llvm.void"), [at, bits], _READ, "r,r,~{memory}", has_side_effects=True)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _scale_pointers(scales: Any, number: Any, kind: Any, piece: int, pieces: int) -> list[Any]:
    """Where the scales of a block, or of one of so many pieces, lie, for both of a thread's columns of weights."""
    i32 = ir.IntegerType.get_signless(32)
    c = lambda value: arith.constant(i32, value)
    parts, groups, columns = ir.MemRefType(scales.type).shape
    thread = arith.remui(utils.thread_idx(), c(128))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
    second = arith.divui(warp, c(2))
    if parts == 1:
        number = arith.addi(arith.muli(number, c(2)), second)
    group = arith.addi(arith.muli(number, c(pieces)), c(piece))
    if parts == 2:
        group = arith.addi(arith.muli(second, c(groups)), group)
    column = arith.addi(arith.muli(arith.remui(warp, c(2)), c(16)), arith.divui(lane, c(4)))
    at = arith.addi(arith.muli(group, c(columns)), column)
    base = utils.memref_ptr(scales)
    return [utils.getelementptr(base, [arith.addi(at, c(8 * half))], kind) for half in range(2)]


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
