"""What warpgroups bring to shared memory by themselves, each thread 16 bytes at a time (`cp.async`).

The copy engine brings what it was asked for in that order, whichever warpgroup asked: a small array behind rings of
weights comes when these are full. Threads' own copies overtake it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.small_batch import unpack

#: Bytes of a line, and threads of a warpgroup.
_LINE, _LANES = 16, 128
_COPY = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.cg.shared.global [$0], [$1], 16; }"


def copy(source: Any, target: Any, number: Any, of: int, *, each: int | None = None, interpret: bool) -> None:
    """Asks for a warpgroup's share of an array; it has come after its `wait`, for others behind a barrier.

    Args:
      source: of global memory, [R, W], its rows whole lines of 16 bytes.
      target: of shared memory, the same, without transforms.
      number: of the share, of so many.
      each: lines that are one share's before the next one's come, those of whole rows: who asked may read them behind a
        barrier of its own.
    """
    if interpret and each is not None:
        rows = each * _LINE // (source.shape[1] * source.dtype.itemsize)
        for i, begin in enumerate(range(0, source.shape[0], rows)):
            at = slice(begin, min(begin + rows, source.shape[0]))

            @pl.when(number == i % of)
            def _(at: slice = at) -> None:
                target[at] = source[at]

        return
    if interpret:

        @pl.when(number == 0)
        def _() -> None:
            target[...] = source[...]

        return
    args = plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
    plgpu.inline_mgpu(arg_types=args)(functools.partial(_copy, of=of, each=each or _LANES))(
        source, target, jnp.int32(number)
    )


def copy_rows(source: Any, target: Any, *, interpret: bool) -> None:
    """Asks for up to 8 rows as mma reads them; who waits for them sooner than for the copy engine's.

    Args:
      source: of global memory, bfloat16 [M, W], W a multiple of 64.
      target: of shared memory, [8, W] with `unpack.rows_transforms`: of rows beyond M it keeps what it had.
    """
    if interpret:
        target[: source.shape[0]] = source[...]
        return
    args = plgpu.RefType(), plgpu.RefType(unpack.rows_transforms())
    plgpu.inline_mgpu(arg_types=args)(_copy_rows)(source, target)


def commit(interpret: bool) -> None:
    """What the thread has asked for so far can be waited for by itself."""
    if not interpret:
        plgpu.inline_mgpu()(functools.partial(_run, code="cp.async.commit_group;"))()


def wait(interpret: bool, *, committed: bool = False) -> None:
    """Returns when the thread has all that it asked for, or what it did before the last `commit` but one."""
    if not interpret:
        plgpu.inline_mgpu()(
            functools.partial(_run, code="cp.async.wait_group 1;" if committed else "cp.async.wait_all;")
        )()


def _copy(_: Any, source: Any, target: Any, number: Any, *, of: int, each: int = _LANES) -> None:
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    c = lambda value: arith.constant(i32, value)
    kind = ir.MemRefType(source.type)
    (height, width), ((pitch, _), _) = kind.shape, kind.get_strides_and_offset()
    size = utils.bitwidth(kind.element_type) // 8
    if width * size % _LINE or pitch * size % _LINE:
        raise ValueError(f"rows must be whole lines of {_LINE} bytes, got {width} values of {size}, {pitch} apart")
    across = width * size // _LINE
    base, to = llvm.ptrtoint(i64, utils.memref_ptr(source)), llvm.ptrtoint(i32, utils.memref_ptr(target))
    thread = arith.remui(utils.thread_idx(), c(_LANES))
    number = number.registers.item()
    for begin in range(0, -(-height * across // (of * each)) * each, _LANES):
        own = arith.addi(thread, c(begin))
        turn, i = arith.divui(own, c(each)), arith.remui(own, c(each))
        i = arith.addi(arith.muli(arith.addi(arith.muli(turn, c(of)), number), c(each)), i)
        row, line = arith.divui(i, c(across)), arith.remui(i, c(across))
        at = arith.addi(arith.muli(row, c(pitch * size)), arith.muli(line, c(_LINE)))
        there = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.ult, i, c(height * across)))
        args = [arith.addi(to, arith.muli(i, c(_LINE))), arith.addi(base, arith.extui(i64, at)), there]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), args, _COPY, "r,l,r,~{memory}", has_side_effects=True)


def _copy_rows(_: Any, source: Any, target: Any) -> None:
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    c = lambda value: arith.constant(i32, value)
    kind = ir.MemRefType(source.type)
    (height, width), ((pitch, _), _) = kind.shape, kind.get_strides_and_offset()
    across, per = width * 2 // _LINE, 128 // _LINE  # lines of a row, and of 64 inputs of it
    base, to = llvm.ptrtoint(i64, utils.memref_ptr(source)), llvm.ptrtoint(i32, utils.memref_ptr(target))
    thread = arith.remui(utils.thread_idx(), c(_LANES))
    for begin in range(0, height * across, _LANES):
        i = arith.addi(thread, c(begin))
        row, line = arith.divui(i, c(across)), arith.remui(i, c(across))
        tile, piece = arith.divui(line, c(per)), arith.xori(arith.remui(line, c(per)), row)
        place = arith.addi(
            arith.muli(tile, c(8 * 128)), arith.addi(arith.muli(row, c(128)), arith.muli(piece, c(_LINE)))
        )
        at = arith.addi(arith.muli(row, c(pitch * 2)), arith.muli(line, c(_LINE)))
        there = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.ult, i, c(height * across)))
        args = [arith.addi(to, place), arith.addi(base, arith.extui(i64, at)), there]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), args, _COPY, "r,l,r,~{memory}", has_side_effects=True)


def _run(_: Any, *, code: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], code, "~{memory}", has_side_effects=True)
