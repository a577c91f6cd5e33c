"""What wide attention does to wgmma's scores in registers, thread by thread: masks, weights and their sums.

A thread holds a pair in every eight columns of two rows, and shares each row with three others. Sums are scaled by a
maximum that scores may pass by some powers of two before it follows them, as FlashAttention-4 does it (Zadouri et al.,
2026): it seldom has to, so that exponentials wait neither for the row's other threads nor for sums to be scaled anew.
Until `settle` each of a row's four threads holds its own part of the weights' sum, which only operations element by
element may touch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from pallas_kernels.tree_attention.mosaic_rows import ROWS, THREADS, part

#: Powers of two by which a row's scores may pass the maximum that its sums are scaled by.
SLACK = 8.0
#: Threads that share a row.
SHARERS = 4
#: Pairs of columns whose exponentials a thread takes by the old maximum while it looks for a new one.
_EARLY = 3
_SUMS = plgpu.Layout.WGMMA
_ROW = _SUMS.reduce(1)

Op = Callable[[Any, Any], Any]


def hide(s: jax.Array, words: Sequence[jax.Array]) -> jax.Array:
    """Scores [64, columns], -inf where a row's bit is 0: bit c % 32 of word c // 32 for column c, each uint32 [64]."""

    def run(_: Any, s: Any, *words: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        c = lambda value: arith.constant(i32, value)
        lane = arith.muli(arith.remui(utils.thread_idx(), c(SHARERS)), c(2))  # its pair among eight columns
        flat, hidden = s.registers.reshape(-1, 2), _float(-float("inf"))
        found = np.empty(flat.shape, dtype=object)
        for half in range(2):
            own = [arith.shrui(_values(word)[half], lane) for word in words]
            for j in range(len(flat)):
                values = []
                for i, value in enumerate(_parts(flat[j, half])):
                    bit = arith.andi(own[j // 4], c(1 << (j % 4 * 8 + i)))
                    values.append(arith.select(arith.cmpi(arith.CmpIPredicate.ne, bit, c(0)), value, hidden))
                found[j, half] = _pair(*values)
        return _like(found, s)

    wanted = plgpu.ShapeDtypeStruct(s.shape, s.dtype, layout=_SUMS)
    return plgpu.inline_mgpu(arg_types=(_SUMS, *[_ROW] * len(words)), return_type=wanted)(run)(s, *words)


def weights(
    s: jax.Array, acc: jax.Array, top: jax.Array, total: jax.Array, scale: float, dtype: Any
) -> tuple[jax.Array, ...]:
    """What values weigh, and sums as they are added to.

    Args:
      s: scores [64, columns], float32.
      acc, top, total: sums [64, C], the maximum [64] that they are scaled by, in powers of two, and the weights [64] so
        far: of each thread those that it has added up.
      scale: of scores, as powers of two.

    Returns:
      Weights [64, columns] in `dtype`, at most some 2 ** SLACK, and the new acc, top and total. A row's depend on its
      own scores alone.
    """

    def run(_: Any, s: Any, acc: Any, top: Any, total: Any) -> Any:
        values, tops, totals = _halves(s), _values(top), _values(total)
        f32, kind = ir.F32Type.get(), ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
        pair = ir.VectorType.get((2,), kind)
        columns, of_acc = len(values[0]), list(acc.registers.flat)

        def power(half: int, j: int, top: Any) -> list[Any]:
            return [_power(value, scale, top) for value in values[half][j]]

        def early(tops: Sequence[Any]) -> list[Any]:
            """The first columns' weights, and what each row's add up to."""
            found = [[power(half, j, tops[half]) for j in range(_EARLY)] for half in range(2)]
            sums = [_chains([p for of_pair in row for p in of_pair], arith.addf, 2) for row in found]
            return [arith.truncf(pair, _pair(*p)) for row in found for p in row] + sums

        high = [arith.mulf(_chains(_flat(row), arith.maximumf, 4), _float(scale)) for row in values]
        limit = [arith.addf(top, _float(SLACK)) for top in tops]
        above = lambda x, half: arith.cmpf(arith.CmpFPredicate.OGT, x, limit[half])
        begun = early(tops)
        passed = scf.IfOp(
            _any(arith.ori(above(high[0], 0), above(high[1], 1))),
            [*[f32] * 4, *(x.type for x in of_acc), *[pair] * (2 * _EARLY), *[f32] * 2], has_else=True,
        )  # fmt: skip
        with ir.InsertionPoint(passed.then_block):
            most = [_across(x, arith.maximumf) for x in high]
            new = [arith.select(above(most[half], half), most[half], tops[half]) for half in range(2)]
            keep = [_exp2(arith.subf(tops[half], new[half])) for half in range(2)]
            held = [[arith.mulf(x, keep[i % 2]) for x in _parts(of)] for i, of in enumerate(of_acc)]
            added = [arith.mulf(totals[half], keep[half]) for half in range(2)]
            scf.yield_([*new, *added, *(_pair(*x) for x in held), *early(new)])
        other: Any = passed.else_block
        with ir.InsertionPoint(other):
            scf.yield_([*tops, *totals, *of_acc, *begun])
        (*rest,) = passed.results
        tops, totals, of_acc, begun, sums = _split(rest, 2, 2, len(of_acc), 2 * _EARLY, 2)
        found = np.empty((columns, 2), dtype=object)
        for half in range(2):
            found[:_EARLY, half] = begun[half * _EARLY : (half + 1) * _EARLY]
        more: list[list[Any]] = [[], []]
        for j in range(_EARLY, columns):
            for half in range(2):
                p = power(half, j, tops[half])
                found[j, half] = arith.truncf(pair, _pair(*p))
                more[half] = [arith.addf(*x) for x in zip(more[half], p, strict=True)] if more[half] else p
        for half in range(2):
            totals[half] = arith.addf(totals[half], _chains([sums[half], *more[half]], arith.addf, 1))
        kept = np.empty(len(of_acc), dtype=object)
        kept[:] = of_acc
        return _like(found, s), _like(kept, acc), _rows(tops, top), _rows(totals, total)

    result = lambda shape, dtype, layout: plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    row = result((ROWS,), jnp.float32, _ROW)
    wanted = result(s.shape, dtype, _SUMS), result(acc.shape, jnp.float32, _SUMS), row, row
    return plgpu.inline_mgpu(arg_types=(_SUMS, _SUMS, _ROW, _ROW), return_type=wanted)(run)(s, acc, top, total)


def settle(total: jax.Array) -> jax.Array:
    """The weights [64] of rows, from those of their threads."""

    def run(_: Any, total: Any) -> Any:
        return _rows([_across(x, arith.addf) for x in _values(total)], total)

    wanted = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=_ROW)
    return plgpu.inline_mgpu(arg_types=(_ROW,), return_type=wanted)(run)(total)


def bits(mask: Any, b: Any, tile: Any, group: int, begin: Any, count: int) -> tuple[jax.Array, ...]:
    """Which entries a tile's rows see from `begin` on: 32 in a word, so many words, each uint32 [64].

    Args:
      mask: bool [B, N, T] in global memory, a byte a value, T a multiple of 4; behind its entries nothing is seen.
      tile: rows from 64 * tile on, of `group` rows a node; rows behind the last may see anything.
      count: 2 or 4. Each of a row's threads reads a word's entries, and gives it to the others.
    """
    nodes, entries = mask.shape[1:]
    width = 4 if entries % 16 else 16
    assert count in (2, 4) and entries % width == 0, (count, entries)
    scalar, layout = plgpu.Layout.WG_SPLAT(()), _ROW.to_mgpu()

    def run(_: Any, mask: Any, *scalars: Any) -> Any:
        b, tile, begin = (x.registers.item() for x in scalars)
        i8, i32 = (ir.IntegerType.get_signless(n) for n in (8, 32))
        c = lambda value: arith.constant(i32, value)
        thread = arith.remui(utils.thread_idx(), c(THREADS))
        lane, base = arith.remui(thread, c(32)), utils.memref_ptr(mask)
        row = arith.addi(arith.muli(arith.divui(thread, c(32)), c(16)), arith.divui(lane, c(SHARERS)))
        row = arith.addi(row, arith.muli(tile, c(ROWS)))
        own = arith.addi(begin, arith.muli(arith.remui(lane, c(count)), c(32)))
        kind = ir.VectorType.get((width // 4,), i32)
        found: list[Any] = []
        for half in range(2):
            node = arith.minsi(arith.divui(arith.addi(row, c(8 * half)), c(group)), c(nodes - 1))
            first = arith.muli(arith.addi(arith.muli(b, c(nodes)), node), c(entries))
            for i in range(0, 32, width):
                at = arith.addi(own, c(i))
                live = arith.cmpi(arith.CmpIPredicate.slt, at, c(entries))
                pointer = utils.getelementptr(base, [arith.addi(first, arith.select(live, at, c(0)))], i8)
                found.append((half, i, live, llvm.load(kind, pointer, alignment=width)))
        words = [c(0), c(0)]
        for half, i, live, value in found:
            for j in range(width // 4):
                four = arith.muli(part(value, j), c(0x01020408))  # bytes of 0 or 1 as the bits from 24 on
                four = arith.select(live, arith.andi(arith.shrui(four, c(24)), c(15)), c(0))
                words[half] = arith.ori(words[half], arith.shli(four, c(i + 4 * j)))
        leader = arith.subi(lane, arith.remui(lane, c(SHARERS)))
        give = lambda word, i: nvvm.shfl_sync(c(-1), word, arith.addi(leader, c(i)), c(31), nvvm.ShflKind.idx)
        given = [_vectors([give(word, i) for word in words]) for i in range(count)]
        shaped = [x.reshape(layout.registers_shape((ROWS,))) for x in given]
        return tuple(mgpu.FragmentedArray(_registers=x, _layout=layout, _is_signed=False) for x in shaped)

    wanted = (plgpu.ShapeDtypeStruct((ROWS,), jnp.uint32, layout=_ROW),) * count
    found = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * 3), return_type=wanted)(run)
    return tuple(found(mask, *(jnp.asarray(x, jnp.int32) for x in (b, tile, begin))))


def _float(value: float) -> Any:
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def _parts(pair: Any) -> list[Any]:
    return [part(pair, i) for i in range(2)]


def _pair(a: Any, b: Any) -> Any:
    return vector.from_elements(ir.VectorType.get((2,), a.type), [a, b])


def _flat(pairs: Sequence[Sequence[Any]]) -> list[Any]:
    return [x for pair in pairs for x in pair]


def _split(values: list[Any], *counts: int) -> list[list[Any]]:
    ends = np.cumsum([0, *counts])
    return [values[a:b] for a, b in itertools.pairwise(ends)]


def _halves(s: Any) -> list[list[list[Any]]]:
    """A thread's scores: of each of its two rows, pair by pair."""
    flat = s.registers.reshape(-1, 2)
    return [[_parts(pair) for pair in flat[:, half]] for half in range(2)]


def _values(x: Any) -> list[Any]:
    """Of a thread's two rows."""
    return [part(register, 0) for register in x.registers.flat]


def _vectors(values: Sequence[Any]) -> Any:
    found = np.empty(len(values), dtype=object)
    found[:] = [vector.from_elements(ir.VectorType.get((1,), value.type), [value]) for value in values]
    return found


def _rows(values: Sequence[Any], like: Any) -> Any:
    return _like(_vectors(values), like)


def _like(registers: Any, like: Any) -> Any:
    shaped = registers.reshape(like.registers.shape)
    return mgpu.FragmentedArray(_registers=shaped, _layout=like.layout, _is_signed=None)


def _chains(values: Sequence[Any], op: Op, count: int) -> Any:
    """All values as one, by so many chains: what a chain adds waits for what it added before."""
    chains = list(values[:count])
    for i, value in enumerate(values[count:]):
        chains[i % count] = op(chains[i % count], value)
    while len(chains) > 1:
        chains = [op(*chains[i : i + 2]) if i + 1 < len(chains) else chains[i] for i in range(0, len(chains), 2)]
    return chains[0]


def _across(x: Any, op: Op) -> Any:
    """What the threads of a row have, as one."""
    c = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)
    for other in (1, 2):
        x = op(x, nvvm.shfl_sync(c(-1), x, c(other), c(31), nvvm.ShflKind.bfly))
    return x


def _any(x: Any) -> Any:
    """Whether it is so in any thread of the warp."""
    i32 = ir.IntegerType.get_signless(32)
    code = "{.reg .pred p, q; setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, -1; selp.u32 $0, 1, 0, q;}"
    found: Any = llvm.inline_asm(i32, [arith.extui(i32, x)], code, "=r,r", has_side_effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, found, arith.constant(i32, 0))


def _exp2(x: Any) -> Any:
    return llvm.inline_asm(ir.F32Type.get(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def _power(x: Any, scale: float, top: Any) -> Any:
    """2 ** (x * scale - top)."""
    args, code = [x, _float(scale), arith.negf(top)], "fma.rn.f32 $0, $1, $2, $3;"
    return _exp2(llvm.inline_asm(ir.F32Type.get(), args, code, "=f,f,f,f"))
