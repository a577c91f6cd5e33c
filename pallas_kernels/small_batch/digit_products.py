"""How threads make digits of rows, and multiply weights by them (see digits).

Owns the code: a row in shared memory, or rows in registers, become digits in shared memory, ldmatrix reads these as
mma's second operand, its first are weights whose nibbles or bytes a mask finds. Must not know who walks along the
inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.small_batch import unpack
from pallas_kernels.small_batch.digits import (
    AT_ONCE,
    BITS,
    DIGITS,
    LEAST,
    TOGETHER,
    Share,
    Step,
    pretended,
    split,
    transforms,
)
from pallas_kernels.small_batch.packed import BLOCK, SCALE, ZEROS
from pallas_kernels.small_batch.threads import STORE, STORE_TWO, Code, Index

#: Words of inputs that a thread makes digits of at a turn.
WORDS = 4
#: Bytes of the digits of four blocks, and threads that make those of a block.
_GROUP, _MAKERS = TOGETHER * DIGITS * BLOCK, 16
#: [64 columns, 4] over a warpgroup, the same for each of the threads that share a column.
OWN = plgpu.Layout.TILED(
    plgpu.Tiling(((64, TOGETHER), (16, TOGETHER), (8, TOGETHER), (1,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)

# The larger of both halves' magnitudes, one of another thread's as well, and what a block's exponent is of: all as bits
# of bfloat16, two a word.
_MAGNITUDE = "{ .reg .b32 a, b; and.b32 a, $1, 0x7fff7fff; and.b32 b, $2, 0x7fff7fff; max.u16x2 $0, a, b; }"
_LARGER = "max.u16x2 $0, $1, $2;"
_EXPONENT = """{{ .reg .b32 a, b;
shr.u32 a, $1, 16; and.b32 b, $1, 0xffff; max.u32 a, a, b; shr.u32 a, a, 7; max.u32 $0, a, {least}; }}"""
# A value times a power of two, rounded to an integer in the low bits of a float32, then with halves of a digit added so
# that bytes are digits: the low ones 128 too large.
_FIXED = """{ .reg .b32 a;
fma.rn.f32 a, $1, $2, 0f4B400000;
add.u32 $0, a, 0xffc08080; }"""
# Of four of these the low, the next and the high bytes; a low word's are 128 too large.
_PAIRED, _LOW, _NEXT = "prmt.b32 $0, $1, $2, 0x5140;", "prmt.b32 $0, $1, $2, 0x5410;", "prmt.b32 $0, $1, $2, 0x7632;"
_HIGH_PAIRED = "prmt.b32 $0, $1, $2, 0x0062;"
_SIGNED = "xor.b32 $0, $1, 0x80808080;"
# Four nibbles of a word as bytes, 16 times too large: the even and the odd ones. With zero points, of which $2 has 8
# more in each byte, the differences.
_NIBBLES = "{ .reg .b32 a; shl.b32 a, $1, 4; and.b32 $0, a, 0xf0f0f0f0; }", "and.b32 $0, $1, 0xf0f0f0f0;"
_DIFFERENCES = tuple(
    f"""{{ .reg .b32 a;
shr.u32 a, $1, {shift};
lop3.b32 a, a, 0x0f0f0f0f, 0x88888888, 0x6a;
sub.u32 a, a, $2;
xor.b32 $0, a, 0x80808080; }}"""
    for shift in (0, 4)
)
_ZERO = "{ .reg .b32 a; add.u32 a, $1, 8; prmt.b32 $0, a, 0, 0x0000; }"
_MMA = """mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"""
# Sums of the three digits, put together and scaled; a sum, rounded before anything else is done.
_WHOLE = """{ .reg .b32 a, b;
mad.lo.s32 a, $2, 256, $1;
cvt.rn.f32.s32 a, a;
cvt.rn.f32.s32 b, $3;
fma.rn.f32 a, b, 0f47800000, a;
mul.rn.f32 $0, a, $4; }"""
# The power of two that makes integers of a block whose exponent this is, and the bits of what makes good for it.
_SCALED_BY = f"{{ .reg .b32 a; sub.u32 a, {253 + BITS}, $1; shl.b32 $0, a, 23; }}"
_FACTOR = "{{ .reg .b32 a; sub.u32 a, $1, {less}; shl.b32 $0, a, 23; }}"
_NAN = 0x7FC00000
_TIMES, _PLUS = "mul.rn.f32 $0, $1, $2;", "add.rn.f32 $0, $1, $2;"
# From the thread of this number among four.
_OF_FOUR = "shfl.sync.idx.b32 $0, $1, {}, 0x1c1f, 0xffffffff;"
_ACROSS = "shfl.sync.bfly.b32 $0, $1, {}, 0x1f, 0xffffffff;"


def meet(interpret: bool) -> None:
    """Waits for a warpgroup's other threads, and for what they have written to shared memory."""
    if not interpret:
        plgpu.inline_mgpu()(lambda _: utils.warpgroup_barrier())()


def make(step: Step, x: Any, digits: Any, factors: Any, share: Share, *, interpret: bool) -> None:
    """Makes digits of a turn of a share; they are there for others behind a barrier.

    Args:
      x: [rows * blocks, BLOCK], a row's blocks after another's. digits, factors: of `scratch`.
    """
    if not interpret:
        args = *(plgpu.RefType(),) * 3, *(plgpu.Layout.WG_SPLAT(()),) * 2
        run = plgpu.inline_mgpu(arg_types=args)(functools.partial(_make, step=step, share=share))
        run(x, digits, factors, jnp.int32(share.number), jnp.int32(share.turn))
        return
    blocks = x.shape[0] // step.rows
    for row, block in itertools.product(range(step.rows), range(blocks)):

        @pl.when(share.has(block, row))
        def _(row: int = row, block: int = block) -> None:
            place = step.place(block, row)
            made, by = split(x[row * blocks + block])
            digits[place], factors[place] = made, by * step.unit


def read(step: Step, x: Any, share: Share, *, interpret: bool) -> Any:
    """What a warpgroup makes digits of in all of its turns, in registers, for `make_all`.

    Args:
      x: as `make`'s, of global memory.
    """
    turns = share.turns(x.shape[0] // step.rows)
    if interpret:
        return jnp.zeros((turns * WORDS * 128,), jnp.int32)
    layout = plgpu.Layout.WG_STRIDED((turns * WORDS * 128,), 1)
    wanted = plgpu.ShapeDtypeStruct((turns * WORDS * 128,), jnp.int32, layout=layout)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=wanted)
    return run(functools.partial(_read, step=step, share=share, turns=turns))(x, jnp.int32(share.number))


def make_all(step: Step, x: Any, words: Any, digits: Any, factors: Any, share: Share, *, interpret: bool) -> None:
    """`make` of all turns of a share, of what it has read."""
    blocks = x.shape[0] // step.rows
    turns = share.turns(blocks)
    if interpret:
        for turn in range(turns):
            make(step, x, digits, factors, dataclasses.replace(share, turn=turn), interpret=True)
        return
    layout = plgpu.Layout.WG_STRIDED((turns * WORDS * 128,), 1)
    args = plgpu.RefType(), layout, *(plgpu.RefType(),) * 2, plgpu.Layout.WG_SPLAT(())
    run = plgpu.inline_mgpu(arg_types=args)
    run(functools.partial(_make_all, step=step, share=share, turns=turns))(
        x, words, digits, factors, jnp.int32(share.number)
    )


def products(
    step: Step, total: jax.Array, tile: Any, digits: Any, factors: Any, scales: Any, first: Any, *, interpret: bool
) -> jax.Array:
    """Adds the products of a step to float32 [64, 4], in `OWN`'s layout, block by block.

    Args:
      tile: weights of a step, [2, 32, depth * BLOCK] or [1, 32, 2 * depth * BLOCK].
      digits, factors: of `scratch`. scales: [parts, G, 32], as `unpack` has them.
      first: the block of a warp's, of all, that the step begins with.
    """
    if interpret:
        return pretended(step, total, tile, digits, factors, scales, first)
    scalar = plgpu.Layout.WG_SPLAT(())
    args = OWN, plgpu.RefType(transforms(step.kind, step.paired)), *(plgpu.RefType(),) * 3, scalar
    wanted = plgpu.ShapeDtypeStruct((64, TOGETHER), jnp.float32, layout=OWN)
    run = plgpu.inline_mgpu(arg_types=args, return_type=wanted)(functools.partial(_products, step=step))
    return run(total, tile, digits, factors, scales, first)


def _matrices(code: Code, address: Any) -> list[Any]:
    kind = llvm.StructType.get_literal([code.i32] * 4)
    found: Any = llvm.inline_asm(kind, [address], unpack.LOAD, unpack.LOADED, has_side_effects=True)
    return [llvm.extractvalue(code.i32, found, [i]) for i in range(4)]


def _mma(code: Code, a: list[Any], b: list[Any], sums: list[Any]) -> list[Any]:
    kind = llvm.StructType.get_literal([code.i32] * 4)
    found: Any = llvm.inline_asm(kind, [*a, *b, *sums], _MMA, ",".join(["=r"] * 4 + ["r"] * 10))
    return [llvm.extractvalue(code.i32, found, [i]) for i in range(4)]


def _offset(group: Any, place: Any, digit: int, chunk: Any) -> Any:
    """Where 16 of a digit's inputs lie: of a group the low digits of four blocks in 8 lines of 128 bytes, then the high
    ones in 4, the 16 bytes of a line in other places by its number, so that 8 lines are read without conflicts."""
    line = place * 2 + digit % 2
    begin = line * BLOCK if digit < 2 else place * BLOCK + 2 * TOGETHER * BLOCK
    return group * _GROUP + begin + (chunk ^ line) * 16


def _make(_: Any, x: Any, digits: Any, factors: Any, number: Any, turn: Any, *, step: Step, share: Share) -> None:
    code = Code()
    maker = _Maker(code, step, share, ir.MemRefType(x.type).shape[0], number)
    turns = [Index(code, turn.registers.item())]
    maker.write(digits, factors, turns, [maker.words(x, turn) for turn in turns])


def _read(_: Any, x: Any, number: Any, *, step: Step, share: Share, turns: int) -> Any:
    code = Code()
    maker = _Maker(code, step, share, ir.MemRefType(x.type).shape[0], number)
    found = [word for turn in range(turns) for word in maker.words(x, Index(code, code.c(turn)))]
    one = ir.VectorType.get((1,), code.i32)
    registers = np.empty((len(found),), object)
    for i, word in enumerate(found):
        registers[i] = vector.insert(word, llvm.mlir_undef(one), [], [0])
    layout = mgpu.WGStridedFragLayout((len(found) * 128,), 1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def _make_all(
    _: Any, x: Any, words: Any, digits: Any, factors: Any, number: Any, *, step: Step, share: Share, turns: int
) -> None:
    code = Code()
    maker = _Maker(code, step, share, ir.MemRefType(x.type).shape[0], number)
    found = [vector.extract(word, [], [0]) for word in words.registers.flat]
    own = [Index(code, code.c(turn)) for turn in range(turns)]
    maker.write(digits, factors, own, [found[WORDS * turn : WORDS * (turn + 1)] for turn in range(turns)])


class _Maker:
    """A thread that makes digits, of 8 inputs of a block at a turn."""

    def __init__(self, code: Code, step: Step, share: Share, lines: int, number: Any) -> None:
        self.code, self.step, self.share = code, step, share
        self.blocks = lines // step.rows
        self.number = Index(code, number.registers.item())
        own = code.thread % _MAKERS
        self.unit = code.thread // _MAKERS
        self.v, self.a, self.half = own // 4, own // 2 % 2, own % 2

    def own(self, turn: Any) -> tuple[Any, Any, Any]:
        """Block and row of a turn, and whether they are its own. A thread that has nothing left reads another's, which
        may not have come yet, and keeps it to itself."""
        code, share = self.code, self.share
        own = self.unit + turn * AT_ONCE
        row, own = (own % share.rows, own // share.rows) if share.rows > 1 else (own * 0, own)
        block = (own // share.each * share.of + self.number) * share.each + own % share.each
        has = arith.extui(code.i32, arith.cmpi(arith.CmpIPredicate.ult, block.value, code.c(self.blocks)))
        return block.least(self.blocks - 1), row, has

    def words(self, x: Any, turn: Any) -> list[Any]:
        """Two times four inputs, such that what a byte of a word of weights has side by side comes together."""
        apart, between = (8, 16) if self.step.four else (16, 8)
        block, row, _ = self.own(turn)
        begins = [self.v * 32 + self.a * apart + self.half * 4 + i * between for i in range(2)]
        base, line = utils.memref_ptr(x), (row * self.blocks + block) * (2 * BLOCK)
        return [word for k in begins for word in self.code.words(base, (line + k * 2).value, 2)]

    def write(self, digits: Any, factors: Any, turns: list[Any], words: list[list[Any]]) -> None:
        """Digits and factors of several turns, side by side, so that none waits for another's threads."""
        code, step = self.code, self.step
        to, factors_at = (Index(code, llvm.ptrtoint(code.i32, utils.memref_ptr(ref))) for ref in (digits, factors))
        largest = [
            code.asm(_LARGER, code.asm(_MAGNITUDE, *each[:2]), code.asm(_MAGNITUDE, *each[2:])) for each in words
        ]
        for distance in (8, 4, 2, 1):
            others = [code.shuffle(_ACROSS.format(distance), mine) for mine in largest]
            largest = [code.asm(_LARGER, *pair) for pair in zip(largest, others, strict=True)]
        for turn, each, most in zip(turns, words, largest, strict=True):
            block, row, has = self.own(turn)
            exponent = code.asm(_EXPONENT.format(least=LEAST), most)
            power = llvm.bitcast(code.f32, code.asm(_SCALED_BY, exponent))
            group, place = step.place(block, row)
            columns = [_digits(code, each[i], each[2 + i], power) for i in range(2)]
            for digit in range(DIGITS):
                at = to + _offset(group, place, digit, self.v * 2 + self.a) + self.half * 8
                code.store(STORE_TWO, at.value, columns[0][digit], columns[1][digit], has)
            factor = code.asm(_FACTOR.format(less=BITS - 1 + (4 if step.unit < 1 else 0)), exponent)
            finite = arith.cmpi(arith.CmpIPredicate.ult, exponent, code.c(255))
            factor = arith.select(finite, factor, code.c(_NAN))
            code.store(STORE, (factors_at + (group * TOGETHER + place) * 4).value, factor, has)


def _digits(code: Code, near: Any, far: Any, power: Any) -> list[Any]:
    """Of two words of two inputs each the words of their digits."""
    wide = lambda text, word: llvm.bitcast(code.f32, code.asm(text, word))
    low, high = "shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;"
    fixed = [code.asm(_FIXED, wide(text, word), power) for text in (low, high) for word in (near, far)]
    pairs = [code.asm(_PAIRED, *fixed[i : i + 2]) for i in (0, 2)]
    high_pairs = [code.asm(_HIGH_PAIRED, *fixed[i : i + 2]) for i in (0, 2)]
    return [
        code.asm(_SIGNED, code.asm(_LOW, *pairs)), code.asm(_SIGNED, code.asm(_NEXT, *pairs)),
        code.asm(_LOW, *high_pairs),
    ]  # fmt: skip


def _products(_: Any, total: Any, tile: Any, digits: Any, factors: Any, scales: Any, first: Any, *, step: Step) -> Any:
    code = Code()
    one = ir.VectorType.get((1,), code.f32)
    second, column = code.warp // 2, code.lane // 4
    part = second if step.parts == 2 else 0
    sums = [vector.extract(x, [], [0]) for x in total.registers.flat]
    first = Index(code, first.registers.item()) * (2 // step.parts)
    factors_at, scales_at = utils.memref_ptr(factors), utils.memref_ptr(scales)
    groups, pieces = ir.MemRefType(scales.type).shape[1], max(1, step.pieces)
    words = step.kind.endswith(ZEROS)

    def scale_words(block: Any, piece: int) -> list[Any]:
        """Of both columns of a thread."""
        at = (part * groups + (first + block) * pieces + piece) * 32 + code.warp % 2 * 16 + column
        kind = code.i32 if words else code.f32
        pointers = [utils.getelementptr(scales_at, [(at + 8 * half).value], kind) for half in range(2)]
        return [llvm.load(kind, pointer, alignment=4) for pointer in pointers]

    def scaled(block: Any, found: list[list[Any]]) -> list[list[Any]]:
        """What is to be added for each piece of a block, for both columns."""
        group, place = step.place(first + block, code.lane % 4)
        factor = code.float32(factors_at, (group * TOGETHER + place).value)
        out = []
        for piece, (low, middle, high) in enumerate(found):
            by = [factor] * 2
            if step.pieces:
                own = scale_words(block, piece)
                if words:
                    own = [
                        llvm.bitcast(code.f32, code.asm(f"and.b32 $0, $1, {SCALE & 0xFFFFFFFF:#x};", x)) for x in own
                    ]
                by = [code.asm(_TIMES, x, factor, to=code.f32) for x in own]
            out.append([code.asm(_WHOLE, low[i], middle[i], high[i], by[i], to=code.f32) for i in range(2)])
        return out

    plus = lambda terms: [code.asm(_PLUS, *pair, to=code.f32) for pair in zip(sums, terms, strict=True)]
    lines = dict[int, Any]()
    for begin in range(0, step.depth, step.share):
        b, found = _second_operand(code, step, digits, begin, second, first), []
        for i in range(begin, begin + step.share):
            zeros = _zeros(code, step, scale_words, step.block(i, second)) if words else None
            found.append(_multiplied(code, step, tile, i, second, b, zeros, lines))
        if step.rows > 1:  # the four threads of a column have a row each
            for piece in scaled(step.block(begin, second), found[0]):
                sums = plus(piece)
            continue
        # They scale a block each, and give it to the others.
        own = code.lane % 4 % step.share
        terms = scaled(step.block(own + begin, second), _chosen(code, found, own))
        for i in range(step.share):
            for piece in terms:
                sums = plus([code.shuffle(_OF_FOUR.format(i), x, to=code.f32) for x in piece])
    registers = np.empty_like(total.registers)
    for i, value in enumerate(sums):
        registers.flat[i] = vector.insert(value, llvm.mlir_undef(one), [], [0])
    return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)


def _second_operand(code: Code, step: Step, digits: Any, begin: int, second: Any, first: Any) -> tuple[list[Any], ...]:
    """Of every 32 inputs two words, of the low digits and of the high ones."""
    base = Index(code, llvm.ptrtoint(code.i32, utils.memref_ptr(digits)))
    line, piece = code.lane % 8, code.lane // 8  # lanes have a line's address each, of four matrices
    group, place = step.place(first + step.block(line // 2 % step.share + begin, second), line // 2)
    found: tuple[list[Any], ...] = [], []
    for i in range(2):
        # Of the low digits both, in lines side by side; of the high one the same twice.
        low = place * 2 + line % 2
        at = group * _GROUP + low * BLOCK + ((piece + 4 * i) ^ low) * 16
        found[0].extend(_matrices(code, (base + at).value))
        found[1].extend(_matrices(code, (base + _offset(group, place, 2, piece + 4 * i)).value))
    return found


def _chosen(code: Code, found: list[list[list[list[Any]]]], number: Any) -> list[list[list[Any]]]:
    """Of several blocks' sums, as `_multiplied` has them, those of a thread's own."""
    kept = found[0]
    for i, other in enumerate(found[1:], 1):
        mine = arith.cmpi(arith.CmpIPredicate.eq, number.value, code.c(i))
        choose = lambda a, b, mine=mine: [arith.select(mine, y, x) for x, y in zip(a, b, strict=True)]
        kept = [[choose(*pair) for pair in zip(*pieces, strict=True)] for pieces in zip(kept, other, strict=True)]
    return kept


def _zeros(code: Code, step: Step, scale_words: Any, block: Any) -> list[list[Any]]:
    """Of each piece what is subtracted from bytes, for both columns."""
    return [[code.asm(_ZERO, word) for word in scale_words(block, piece)] for piece in range(step.pieces)]


def _multiplied(
    code: Code, step: Step, tile: Any, i: int, second: Any, b: tuple[list[Any], ...], zeros: Any, lines: dict[int, Any]
) -> list[list[list[Any]]]:
    """Of each piece of a warp's i-th block the sums of three digits, for both columns."""
    weights, pieces = _first_operand(code, step, tile, i, second, zeros, lines), max(1, step.pieces)
    found = []
    for piece in range(pieces):
        low, high = ([code.c(0)] * 4 for _ in range(2))
        for v in range(piece * 4 // pieces, (piece + 1) * 4 // pieces):
            low = _mma(code, weights[v], b[0][2 * v : 2 * v + 2], low)
            high = _mma(code, weights[v], b[1][2 * v : 2 * v + 2], high)
        found.append([[low[0], low[2]], [low[1], low[3]], [high[0], high[2]]])
    return found


def _first_operand(
    code: Code, step: Step, tile: Any, i: int, second: Any, zeros: Any, lines: dict[int, Any]
) -> list[list[Any]]:
    """Of every 32 inputs of a warp's i-th block four words of weights."""
    base, (row, quarter) = utils.memref_ptr(tile), (code.lane // 4, code.lane % 4)
    inputs = step.blocks * BLOCK
    line = (2 * BLOCK if step.paired else BLOCK) if step.four else BLOCK  # inputs of a line
    size = line // 2 if step.four else line
    pieces8 = inputs // line * 8 * size  # bytes of 8 columns
    begin = row * size + code.warp % 2 * (2 * pieces8)
    if step.parts == 2:
        begin = begin + second * (4 * pieces8)
    halves = []
    for half in range(2):
        at = begin + half * pieces8
        if not step.four:
            block = step.block(i, second)
            chunk = (quarter * 2) ^ row
            places = [at + block * (8 * size) + (chunk ^ x) * 16 for x in range(2)]
            halves.append([word for place in places for word in code.words(base, place.value, 4)])
        elif not step.paired:
            place = at + step.block(i, second) * (8 * size) + quarter * 16
            halves.append(code.words(base, place.value, 4))
        else:
            halves.append(_of_line(code, step, base, at, i, second, half, quarter, row, lines))
    if not step.four:
        return [[halves[half][2 * v + k] for k in range(2) for half in range(2)] for v in range(4)]
    per = 4 // max(1, step.pieces)

    def nibbles(k: int, half: int, v: int) -> Any:
        word = halves[half][v]
        if zeros is None:
            return code.asm(_NIBBLES[k], word)
        return code.asm(_DIFFERENCES[k], word, zeros[v // per][half])

    return [[nibbles(k, half, v) for k in range(2) for half in range(2)] for v in range(4)]


def _of_line(
    code: Code, step: Step, base: Any, at: Any, i: int, second: Any, half: int, quarter: Any, row: Any, lines: Any
) -> list[Any]:
    """The words of a block that shares lines with the one beside it. Threads of odd rows read the other one first, for
    two rows' halves of a line lie in the same banks."""
    if i % 2 == 0:
        place = at + step.block(i, second) // 2 * 1024 + quarter * 16
        both = [code.words(base, (place + side * 64).value, 4) for side in (row % 2, (row + 1) % 2)]
        odd = arith.cmpi(arith.CmpIPredicate.eq, (row % 2).value, code.c(1))
        lines[half] = [[arith.select(odd, x[1 - k], x[k]) for x in zip(*both, strict=True)] for k in range(2)]
    return lines[half][i % 2]
