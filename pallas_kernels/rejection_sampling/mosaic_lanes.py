"""What a warpgroup does with 128 values, one a thread: gathers, and lists in shared memory.

Pallas for Mosaic GPU indexes references by slices only; the rest is a few instructions, written here by hand, with a
plain form of each for the interpreter. Knows nothing of sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.rejection_sampling.noise import TILE

#: Thread i holds entry i.
LANES = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
SCALAR = plgpu.Layout.WG_SPLAT(())

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32


def spread(x: Any, dtype: Any) -> jax.Array:
    """A number in every lane, [128]."""
    return plgpu.layout_cast(jnp.full((TILE,), x, dtype), LANES)


def lane_ids() -> jax.Array:
    return plgpu.layout_cast(plgpu.broadcasted_iota(_i32, (TILE,), 0, layout=LANES), LANES)


def where(condition: jax.Array, a: Any, b: Any) -> jax.Array:
    """jnp.where in lanes. Mosaic reads off `a` whether integers have signs, or off the condition if `a` is a number."""
    if jnp.ndim(a) == 0 and jnp.ndim(b) == 1:
        return jnp.where(~condition, b, a)
    if jnp.ndim(a) == 0 and isinstance(a, int):
        a = spread(a, _i32)
    return jnp.where(condition, a, b)


def once(condition: jax.Array, body: Callable[..., Any], carry: Any) -> Any:
    """`body(*carry)` if the condition holds, else carry.

    Not lax.cond, whose first branch is lowered twice, and four times inside of another.
    """
    return lax.fori_loop(0, jnp.where(condition, 1, 0), lambda _, c: body(*c), carry)


def bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _i32)


def real(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _f32)


def quick_exp(x: jax.Array, interpret: bool) -> jax.Array:
    """exp(x) in lanes by the device's approximate power of two: three instructions, 2**-22 of the value."""
    scaled = x * math.log2(math.e)
    if interpret:
        return jnp.exp2(scaled)
    wanted = plgpu.ShapeDtypeStruct((TILE,), _f32, layout=LANES)
    return plgpu.inline_mgpu(arg_types=(LANES,), return_type=wanted)(lambda _, x: x.exp2(approx=True))(scaled)


def population(x: jax.Array) -> jax.Array:
    """Set bits of uint32, as int32."""
    x = x - ((x >> _u32(1)) & _u32(0x55555555))
    x = (x & _u32(0x33333333)) + ((x >> _u32(2)) & _u32(0x33333333))
    x = (x + (x >> _u32(4))) & _u32(0x0F0F0F0F)
    return ((x * _u32(0x01010101)) >> _u32(24)).astype(_i32)


def place_of(ref: Any, index: Any, row: Any = None, pitch: int = 0) -> tuple[Any, Any]:
    """(address of an entry of a contiguous reference, its type)."""
    element, i64 = ir.MemRefType(ref.type).element_type, ir.IntegerType.get_signless(64)
    at = arith.extsi(i64, index)
    if row is not None:
        at = arith.addi(at, arith.muli(arith.extsi(i64, row), arith.constant(i64, pitch)))
    return utils.getelementptr(utils.memref_ptr(ref), [at], element), element


def mine(x: Any) -> Any:
    """A thread's entry."""
    return vector.extract(x.registers.item(), [], [0])


def array(value: Any, signed: bool | None) -> Any:
    one = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    registers = np.empty((1,), dtype=object)
    registers[0] = one
    return mgpu.FragmentedArray(_registers=registers, _layout=LANES.to_mgpu(), _is_signed=signed)


def _signed(dtype: Any) -> bool | None:
    return jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None


def gather(ref: Any, index: jax.Array, interpret: bool, row: jax.Array | None = None, pitch: int = 0) -> jax.Array:
    """Entries of a contiguous reference, by their places in it; behind `row` rows of `pitch` entries."""
    if interpret:
        values = ref[...].reshape(-1)
        return values[index if row is None else index + row * pitch]
    wanted = plgpu.ShapeDtypeStruct((TILE,), ref.dtype, layout=LANES)

    def read(_: Any, ref: Any, index: Any, *row: Any) -> Any:
        pointer, element = place_of(ref, mine(index), *(r.registers.item() for r in row), pitch=pitch)
        return array(llvm.load(element, pointer), _signed(dtype))

    dtype, rows = ref.dtype, () if row is None else (row,)
    types = (plgpu.RefType(), LANES, *(SCALAR for _ in rows))
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(read)(ref, index, *rows)


def append(
    counter: Any, values: Any, tokens: Any, found: Sequence[tuple[jax.Array, jax.Array, jax.Array]], interpret: bool
) -> None:
    """Adds lanes' (value, token) to a list in shared memory where the mask is on, in any order.

    Args:
      counter: int32, flat; entry 0 counts, also what the list has no room for.
      found: (value, token, mask) of 128 lanes each.
    """
    if interpret:
        value, token, mask = (jnp.concatenate(x) for x in zip(*found, strict=True))
        number = counter[0] + jnp.cumsum(mask, dtype=_i32) - 1
        counter[0] = counter[0] + mask.sum(dtype=_i32)
        at = jnp.where(mask, number, values.shape[0])
        values[...] = values[...].at[at].set(value, mode="drop")
        tokens[...] = tokens[...].at[at].set(token, mode="drop")
        return
    room = values.shape[0]

    def add(_: Any, counter: Any, values: Any, tokens: Any, *lanes: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        const = lambda x: arith.constant(i32, x)
        for value, token, mask in zip(lanes[::3], lanes[1::3], lanes[2::3], strict=True):
            with utils.when(arith.cmpi(arith.CmpIPredicate.ne, mine(mask), const(0))):
                place, _ = place_of(counter, const(0))
                number = llvm.atomicrmw(llvm.AtomicBinOp.add, place, const(1), llvm.AtomicOrdering.monotonic)
                with utils.when(arith.cmpi(arith.CmpIPredicate.slt, number, const(room))):
                    for ref, x in ((values, value), (tokens, token)):
                        llvm.store(mine(x), place_of(ref, number)[0])

    lanes = [x for value, token, mask in found for x in (value, token, where(mask, 1, 0))]
    types = (plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), *(LANES for _ in lanes))
    plgpu.inline_mgpu(arg_types=types)(add)(counter, values, tokens, *lanes)


def reaching(
    values: Any, amounts: Any, count: jax.Array, own: Sequence[jax.Array], interpret: bool
) -> tuple[jax.Array, ...]:
    """For each lane of each of `own`, what those of a list's first entries amount to that are at least its value.

    Args:
      values: float32, flat, in shared memory; -inf from `count` to the next multiple of 4.
      amounts: int32 of each, or None for ones.
    """
    if interpret:
        index = jnp.arange(values.shape[0])
        amount = jnp.where(index < count, 1 if amounts is None else amounts[...], 0)
        return tuple(jnp.where(values[...][None] >= x[:, None], amount[None], 0).sum(axis=1, dtype=_i32) for x in own)
    wanted = tuple(plgpu.ShapeDtypeStruct((TILE,), _i32, layout=LANES) for _ in own)

    def add(_: Any, count: Any, values: Any, *rest: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        const = lambda x: arith.constant(i32, x)
        refs, lanes = (rest[:1], rest[1:]) if amounts is not None else ((), rest)
        mines = [mine(x) for x in lanes]
        fours = arith.divui(arith.addi(count.registers.item(), const(3)), const(4))

        @utils.fori(fours, [const(0) for _ in lanes])
        def sums(j: Any, sums: Any) -> Any:
            first = arith.muli(j, const(4))
            load = lambda ref, kind: llvm.load(ir.VectorType.get((4,), kind), place_of(ref, first)[0], alignment=16)
            value = load(values, f32)
            amount = load(refs[0], i32) if refs else None
            for i in range(4):
                one = vector.extract(value, [], [i])
                part = const(1) if amount is None else vector.extract(amount, [], [i])
                holds = [arith.cmpf(arith.CmpFPredicate.OGE, one, x) for x in mines]
                sums = [arith.addi(s, arith.select(h, part, const(0))) for s, h in zip(sums, holds, strict=True)]
            return sums

        return tuple(array(x, True) for x in sums.results)

    types = (SCALAR, plgpu.RefType(), *((plgpu.RefType(),) if amounts is not None else ()), *(LANES for _ in own))
    refs = (values,) if amounts is None else (values, amounts)
    return tuple(plgpu.inline_mgpu(arg_types=types, return_type=wanted)(add)(count, *refs, *own))


def add_at(ref: Any, index: jax.Array, value: jax.Array, mask: jax.Array, interpret: bool) -> None:
    """Adds to entries of a flat reference in shared memory, where the mask is on; lanes may name the same entry."""
    if interpret:
        ref[...] = ref[...].at[jnp.where(mask, index, ref.shape[0])].add(value, mode="drop")
        return

    def add(_: Any, ref: Any, index: Any, value: Any, mask: Any) -> None:
        on = arith.cmpi(arith.CmpIPredicate.ne, mine(mask), arith.constant(ir.IntegerType.get_signless(32), 0))
        with utils.when(on):
            pointer, _ = place_of(ref, mine(index))
            llvm.atomicrmw(llvm.AtomicBinOp.add, pointer, mine(value), llvm.AtomicOrdering.monotonic)

    types = (plgpu.RefType(), LANES, LANES, LANES)
    plgpu.inline_mgpu(arg_types=types)(add)(ref, index, value, where(mask, 1, 0))


def math_sum(parts: Sequence[jax.Array]) -> jax.Array:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def words_of(rows: int) -> int:
    """Words of bits, one a row."""
    return math.ceil(rows / 32)
