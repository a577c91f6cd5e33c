"""Sums and results of wgmma between registers and global memory, thread by thread, and how they are added up.

The counterparts of `mosaic_rows`' copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.tree_attention.mosaic_rows import ROWS, SCALAR, THREADS, Source, zero


def spill(refs: tuple[Any, ...], values: tuple[Any, ...], base: Any, count: Any, *, spread: bool = False) -> None:
    """Sums [64, C], maxima [64] and weights [64] of the first `count` rows to rows from `base` on.

    Args:
      refs: float32 in global memory, [..., C] and twice [...].
      spread: see spread_row.
    """
    layout = plgpu.Layout.WGMMA
    types = (*[plgpu.RefType()] * 3, layout, layout.reduce(1), layout.reduce(1), SCALAR, SCALAR)

    def run(_: Any, *args: Any) -> None:
        (acc, *vectors), (base, count) = args[3:6], (x.registers.item() for x in args[6:])
        flat = acc.registers.reshape(-1, 2)
        for half, row, pointer in _rows(args[:3], acc.shape[1], base, spread):
            with utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, count)):
                for j, pair in enumerate(flat[:, half]):
                    llvm.store(pair, pointer(0, 8 * j), alignment=8)
                for i, vector in enumerate(vectors, 1):  # the four threads of a row write the same
                    llvm.store(vector.registers.flat[half], pointer(i, 0), alignment=4)

    args = [jnp.asarray(x, jnp.int32) for x in (base, count)]
    plgpu.inline_mgpu(arg_types=types)(run)(*refs, *values, *args)


def store(ref: Any, value: jax.Array, source: Source, base: Any, count: int, *, spread: bool, lead: int = 0) -> None:
    """The first `count` rows of results [64, C] in two bytes a value to where a source has them, but `lead` columns."""
    layout = plgpu.Layout.WGMMA

    def run(_: Any, ref: Any, value: Any, base: Any) -> None:
        c = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)
        kind, pointer = ir.MemRefType(ref.type).element_type, utils.memref_ptr(ref)
        column = arith.muli(arith.remui(utils.thread_idx(), c(4)), c(2))
        for half, row, _ in _rows((), value.shape[1], c(0), spread):
            with utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, c(count))):
                at = arith.addi(
                    arith.muli(arith.divui(row, c(source.group)), c(source.outer)),
                    arith.muli(arith.remui(row, c(source.group)), c(source.inner)),
                )
                at = arith.addi(arith.addi(base.registers.item(), at), column)
                for j, pair in enumerate(value.registers.reshape(-1, 2)[lead // 8 :, half]):
                    where = utils.getelementptr(pointer, [arith.addi(at, c(8 * j))], kind)
                    llvm.store(pair, where, alignment=4)

    types = (plgpu.RefType(), layout, SCALAR)
    plgpu.inline_mgpu(arg_types=types)(run)(ref, value, jnp.asarray(base, jnp.int32))


#: A warpgroup's arrival at the word $1, once its threads have met, by the one whose $3 is not zero: whether $2 came
#: before. What they had written until then is there to be read, and the last leaves a zero. $4 is a barrier of its own.
_ARRIVE = """{
    .reg .pred own, last;
    .reg .u32 before;
    setp.ne.u32 own, $3, 0;
    mov.u32 before, 0;
    bar.sync $4, 128;
    @own fence.acq_rel.gpu;
    @own atom.relaxed.gpu.global.add.u32 before, [$1], 1;
    setp.eq.and.u32 last, before, $2, own;
    @last st.relaxed.gpu.global.u32 [$1], 0;
    @own fence.acq_rel.gpu;
    bar.red.or.pred last, $4, 128, last;
    selp.u32 $0, 1, 0, last;
}"""
#: The first of barriers that Pallas does not use.
_BARRIERS = 8


def arrive(ref: Any, unit: Any, others: Any) -> Any:
    """Whether so many other warpgroups came before to a unit's word in `ref`, int32 [units]: 1 or 0.

    It is zero before anyone and after all have come.
    """
    wanted = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    def run(_: Any, ref: Any, unit: Any, others: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        c = lambda value: arith.constant(i32, value)
        thread, where = utils.thread_idx(), utils.getelementptr(utils.memref_ptr(ref), [unit.registers.item()], i32)
        # Not who asks for copies: a fence waits for all that its thread has asked for.
        own = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, c(THREADS)), c(THREADS - 32))
        barrier = arith.addi(arith.divui(thread, c(THREADS)), c(_BARRIERS))
        args = [where, others.registers.item(), arith.extui(i32, own), barrier]
        last: Any = llvm.inline_asm(i32, args, _ARRIVE, "=r,l,r,r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(last, (), is_signed=True)

    types, scalars = (plgpu.RefType(), SCALAR, SCALAR), (jnp.asarray(x, jnp.int32) for x in (unit, others))
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(ref, *scalars)


def fetch(
    refs: tuple[Any, ...], channels: int, base: Any, count: Any, *, spread: bool = False,
    columns: tuple[Any, int] | None = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """What `spill` wrote, by the same threads; other rows hold some row's.

    Args:
      columns: the first of those to read, and how many.
    """
    layout, (first, width) = plgpu.Layout.WGMMA, columns or (0, channels)
    like = lambda *shape, layout: plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)
    wanted = like(ROWS, width, layout=layout), *[like(ROWS, layout=layout.reduce(1))] * 2

    def run(_: Any, *args: Any) -> Any:
        base, count, first = (x.registers.item() for x in args[3:])
        f32 = ir.F32Type.get()
        found = [np.empty(x.layout.to_mgpu().registers_shape(x.shape), dtype=object) for x in wanted]
        flat = [x.reshape(-1, 2) for x in found]
        for x, size in zip(flat, (2, 1, 1), strict=True) if spread else ():
            kind = ir.VectorType.get((size,), f32)
            x[:, 1] = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, zero()))
        for half, _, pointer in _rows(args[:3], channels, base, spread, count, first):
            for j in range(width // 8):
                flat[0][j, half] = llvm.load(ir.VectorType.get((2,), f32), pointer(0, 8 * j), alignment=8)
            for i in (1, 2):
                flat[i][0, half] = llvm.load(ir.VectorType.get((1,), f32), pointer(i, 0), alignment=4)
        fragments = [
            mgpu.FragmentedArray(_registers=x, _layout=like.layout.to_mgpu(), _is_signed=None)
            for x, like in zip(found, wanted, strict=True)
        ]
        return tuple(fragments)

    types = (*[plgpu.RefType()] * 3, *[SCALAR] * 3)
    args = [jnp.asarray(x, jnp.int32) for x in (base, count, first)]
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(*refs, *args)


def _rows(
    refs: Any, channels: int, base: Any, spread: bool, count: Any = None, first: Any = None
) -> Iterator[tuple[int, Any, Any]]:
    """The rows of a thread of wgmma's sums: which of two, its number, and the pointer to where its values lie."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    c = lambda value: arith.constant(i32, value)
    thread = arith.remui(utils.thread_idx(), c(THREADS))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
    column = arith.muli(arith.remui(lane, c(4)), c(2))
    column = column if first is None else arith.addi(column, first)
    pointers = [utils.memref_ptr(ref) for ref in refs]
    for half in range(1 if spread else 2):
        row = arith.addi(arith.addi(arith.muli(warp, c(8 if spread else 16)), arith.divui(lane, c(4))), c(8 * half))
        if count is not None:
            row = arith.select(arith.cmpi(arith.CmpIPredicate.slt, row, count), row, c(0))
        at = arith.addi(base, row)
        begin = arith.addi(arith.muli(at, c(channels)), column)

        def pointer(ref: int, offset: int, at: Any = at, begin: Any = begin) -> Any:
            where = at if ref else arith.addi(begin, c(offset))
            return utils.getelementptr(pointers[ref], [where], f32)

        yield half, row, pointer


#: A value for each thread.
LINE = plgpu.Layout.WG_STRIDED((THREADS,), 1)


def gather(refs: tuple[Any, ...], channels: int, width: int, bases: Sequence[Any], first: Any) -> Any:
    """`width` neighbouring channels for each of 128 threads, and the maximum and weight of their row.

    Args:
      refs: what `spill` writes.
      bases: rows side by side, of the threads in turn, counted from the row `first`.
    """
    wanted = (plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, layout=LINE),) * (width + 2)

    def run(_: Any, *args: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        c = lambda value: arith.constant(i32, value)
        acc, *vectors = (utils.memref_ptr(ref) for ref in args[:3])
        first, *bases = (x.registers.item() for x in args[3:])
        thread = arith.remui(utils.thread_idx(), c(THREADS))
        per = channels // width
        row = bases[0]
        for i, other in enumerate(bases[1:], 1):
            behind = arith.cmpi(arith.CmpIPredicate.sge, thread, c(i * per))
            row = arith.select(behind, other, row)
        row = arith.addi(row, first)
        at = arith.addi(arith.muli(row, c(channels)), arith.muli(arith.remui(thread, c(per)), c(width)))
        several, one = ir.VectorType.get((width,), f32), ir.VectorType.get((1,), f32)
        loaded = llvm.load(several, utils.getelementptr(acc, [at], f32), alignment=4 * width)
        found = [vector.from_elements(one, [vector.extract(loaded, [], [i])]) for i in range(width)]
        found += [llvm.load(one, utils.getelementptr(x, [row], f32), alignment=4) for x in vectors]
        return tuple(line(x) for x in found)

    types = (*[plgpu.RefType()] * 3, *[SCALAR] * (1 + len(bases)))
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(*refs, first, *bases)


def line(value: Any) -> Any:
    """A value of each thread, as an array of layout LINE."""
    registers = np.empty((1,), dtype=object)
    registers[0] = value
    return mgpu.FragmentedArray(_registers=registers, _layout=LINE.to_mgpu(), _is_signed=None)


def write(ref: Any, values: Sequence[jax.Array], base: Any, channels: int, lead: int) -> None:
    """Values of each thread side by side, from `base` on, in the type of what they are written to.

    They are rows of so many channels, of which the first `lead` are left out.
    """

    def run(_: Any, ref: Any, base: Any, *values: Any) -> None:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.remui(utils.thread_idx(), arith.constant(i32, THREADS))
        width, kind = len(values), ir.MemRefType(ref.type).element_type
        own = [vector.extract(x.registers.item(), [], [0]) for x in values]
        several = vector.from_elements(ir.VectorType.get((width,), f32), own)
        rounded = arith.truncf(ir.VectorType.get((width,), kind), several)
        c = lambda value: arith.constant(i32, value)
        at = arith.muli(thread, c(width))
        column = arith.remui(at, c(channels))
        at = arith.subi(at, arith.muli(arith.addi(arith.divui(at, c(channels)), c(1)), c(lead))) if lead else at
        with utils.when(arith.cmpi(arith.CmpIPredicate.uge, column, c(lead))) if lead else contextlib.nullcontext():
            where = utils.getelementptr(utils.memref_ptr(ref), [arith.addi(base.registers.item(), at)], kind)
            llvm.store(rounded, where, alignment=2 * width)

    types = (plgpu.RefType(), SCALAR, *[LINE] * len(values))
    plgpu.inline_mgpu(arg_types=types)(run)(ref, jnp.asarray(base, jnp.int32), *values)


#: Of float32: each product is rounded where the instructions say so, whatever stands around it. Compilers contract
#: sums of products as they please, and not in the same way in every kernel.
_CODE = {
    "times": "mul.rn.f32 $0, $1, $2;",
    "scaled": "{ .reg .f32 a; neg.f32 a, $3; fma.rn.f32 $0, $1, $2, a; }",
    "sum": "{ .reg .f32 a; mul.rn.f32 a, $3, $4; fma.rn.f32 $0, $1, $2, a; }",
}
_PRETEND: dict[str, Callable[..., jax.Array]] = {
    "times": lambda a, b: a * b, "scaled": lambda a, b, c: a * b - c, "sum": lambda a, b, c, d: a * b + c * d,
}  # fmt: skip


def fused(kind: str, *values: jax.Array, layout: Any, pretend: bool) -> jax.Array:
    """a * b, a * b - c or a * b + c * d, of which the last is the product that is rounded by itself."""
    if pretend:
        return _PRETEND[kind](*values)
    wanted = plgpu.ShapeDtypeStruct(values[0].shape, jnp.float32, layout=layout)
    run = functools.partial(_fused, code=_CODE[kind])
    return plgpu.inline_mgpu(arg_types=(layout,) * len(values), return_type=wanted)(run)(*values)


def _fused(_: Any, *values: Any, code: str) -> Any:
    f32 = ir.F32Type.get()
    registers = np.empty_like(values[0].registers)
    constraints = ",".join(["=f", *["f"] * len(values)])
    for at in np.ndindex(registers.shape):
        own = [x.registers[at] for x in values]
        found = own[0]
        for i in range(ir.VectorType(found.type).shape[0]):
            one: Any = llvm.inline_asm(f32, [vector.extract(x, [], [i]) for x in own], code, constraints)
            found = vector.insert(one, found, [], [i])
        registers[at] = found
    return mgpu.FragmentedArray(_registers=registers, _layout=values[0].layout, _is_signed=None)
