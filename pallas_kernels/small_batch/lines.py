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


def _run(_: Any, *, code: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], code, "~{memory}", has_side_effects=True)
