"""What a warpgroup does with 128 values, one a thread: gathers, scatters, and exchanges with others of its cluster.

Pallas for Mosaic GPU indexes references by slices only, and its interpreter knows no memory of neighbours; both are
a few instructions, written here by hand, with a plain form of each for the interpreter. Knows nothing of sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

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

from pallas_kernels.rejection_sampling.noise import TILE

#: Thread i holds entry i.
LANES = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
_SCALAR = plgpu.Layout.WG_SPLAT(())

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


def population(x: jax.Array) -> jax.Array:
    """Set bits of uint32, as int32."""
    x = x - ((x >> _u32(1)) & _u32(0x55555555))
    x = (x & _u32(0x33333333)) + ((x >> _u32(2)) & _u32(0x33333333))
    x = (x + (x >> _u32(4))) & _u32(0x0F0F0F0F)
    return ((x * _u32(0x01010101)) >> _u32(24)).astype(_i32)


def _pointer(ref: Any, index: Any, row: Any = None, pitch: int = 0) -> tuple[Any, Any]:
    """(address of an entry of a contiguous reference, its type)."""
    element, i64 = ir.MemRefType(ref.type).element_type, ir.IntegerType.get_signless(64)
    at = arith.extsi(i64, index)
    if row is not None:
        at = arith.addi(at, arith.muli(arith.extsi(i64, row), arith.constant(i64, pitch)))
    return utils.getelementptr(utils.memref_ptr(ref), [at], element), element


def _of(x: Any) -> Any:
    """A thread's entry."""
    return vector.extract(x.registers.item(), [], [0])


def _array(value: Any, signed: bool | None) -> Any:
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
        pointer, element = _pointer(ref, _of(index), *(r.registers.item() for r in row), pitch=pitch)
        return _array(llvm.load(element, pointer), _signed(dtype))

    dtype, rows = ref.dtype, () if row is None else (row,)
    types = (plgpu.RefType(), LANES, *(_SCALAR for _ in rows))
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(read)(ref, index, *rows)


def scatter(ref: Any, index: jax.Array, value: jax.Array, mask: jax.Array, interpret: bool) -> None:
    """Writes entries of a flat reference where the mask is on; the others' index may be anything."""
    if interpret:
        ref[...] = ref[...].at[jnp.where(mask, index, ref.shape[0])].set(value, mode="drop")
        return

    def write(_: Any, ref: Any, index: Any, value: Any, mask: Any) -> None:
        on = arith.cmpi(arith.CmpIPredicate.ne, _of(mask), arith.constant(ir.IntegerType.get_signless(32), 0))
        with utils.when(on):
            pointer, _ = _pointer(ref, _of(index))
            llvm.store(_of(value), pointer)

    types = (plgpu.RefType(), LANES, LANES, LANES)
    plgpu.inline_mgpu(arg_types=types)(write)(ref, index, value, where(mask, 1, 0))


def add_at(ref: Any, index: jax.Array, value: jax.Array, mask: jax.Array, interpret: bool) -> None:
    """Adds to entries of a flat reference in shared memory, where the mask is on; lanes may name the same entry."""
    if interpret:
        ref[...] = ref[...].at[jnp.where(mask, index, ref.shape[0])].add(value, mode="drop")
        return

    def add(_: Any, ref: Any, index: Any, value: Any, mask: Any) -> None:
        on = arith.cmpi(arith.CmpIPredicate.ne, _of(mask), arith.constant(ir.IntegerType.get_signless(32), 0))
        with utils.when(on):
            pointer, _ = _pointer(ref, _of(index))
            llvm.atomicrmw(llvm.AtomicBinOp.add, pointer, _of(value), llvm.AtomicOrdering.monotonic)

    types = (plgpu.RefType(), LANES, LANES, LANES)
    plgpu.inline_mgpu(arg_types=types)(add)(ref, index, value, where(mask, 1, 0))


def take_numbers(counter: Any, mask: jax.Array, interpret: bool) -> jax.Array:
    """The next number for each lane where the mask is on, in any order; `counter` is flat, and counts in entry 0."""
    if interpret:
        one = where(mask, 1, 0)
        start = counter[0]
        counter[0] = start + one.sum(dtype=_i32)
        return start + jnp.cumsum(one, dtype=_i32) - one
    wanted = plgpu.ShapeDtypeStruct((TILE,), _i32, layout=LANES)

    def add(_: Any, counter: Any, amount: Any) -> Any:
        pointer, _ = _pointer(counter, arith.constant(ir.IntegerType.get_signless(32), 0))
        old = llvm.atomicrmw(llvm.AtomicBinOp.add, pointer, _of(amount), llvm.AtomicOrdering.monotonic)
        return _array(old, True)

    types = (plgpu.RefType(), LANES)
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(add)(counter, where(mask, 1, 0))


class Cluster:
    """The programs of one request, which share what they found through each other's shared memory.

    A program writes its planes (int32 [128]) into its own slot, all meet at the cluster's barrier, and each reads
    everyone's. Slots take turns: whoever writes one again has met the others since they read it.
    """

    #: Planes of an exchange, at most; the interpreter's tables are planes too.
    PLANES, TABLES = 3, 2

    def __init__(self, board: Any, barrier: Any, request: jax.Array, size: int, interpret: bool) -> None:
        self.board, self.barrier, self.request, self.size, self.interpret = board, barrier, request, size, interpret
        self.member = lax.axis_index("member") if size > 1 else request * 0

    @classmethod
    def board_shape(cls, interpret: bool, batch: int, size: int) -> tuple[int, ...]:
        """Of the board in shared memory; of the interpreter's in global memory."""
        return (batch, size, 2, cls.PLANES + cls.TABLES, TILE) if interpret else (2, cls.PLANES, TILE)

    def meet(self) -> None:
        """Waits for all members; what they wrote before can be read after."""
        if self.size == 1:
            plgpu.commit_smem()
        elif self.interpret:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)
        else:
            plgpu.inline_mgpu()(_meet)()

    def share(
        self, step: jax.Array, planes: Sequence[jax.Array], table: Any = None
    ) -> tuple[Callable[[int, int], jax.Array], jax.Array]:
        """(what reads plane p of member c, exchanges so far).

        Args:
          table: float32 [256] of shared memory that is read along, as two more planes. Whoever writes it again does so
            after another exchange.
        """
        if table is not None and (self.size == 1 or self.interpret):
            planes = [*planes, *(bits(table[p * TILE : (p + 1) * TILE]) for p in range(self.TABLES))]
            table = None
        if self.size == 1:
            return (lambda _, p: planes[p]), step + 1
        assert len(planes) <= self.board.shape[-2], (len(planes), self.board.shape)
        slot = lax.rem(step, 2)
        own = (self.request, self.member) if self.interpret else ()
        for p, plane in enumerate(planes):
            self.board.at[(*own, slot, p)][...] = plane
        self.meet()

        def read(c: int, p: int) -> jax.Array:
            if self.interpret:
                return self.board[self.request, c, slot, p]
            if table is not None and p >= len(planes):
                theirs = table.at[pl.ds((p - len(planes)) * TILE, TILE)]
                return bits(plgpu.cluster_ref(theirs, {"member": _i32(c)})[...])
            return plgpu.cluster_ref(self.board.at[slot, p], {"member": _i32(c)})[...]

        return read, step + 1

    def total(self, read: Callable[[int, int], jax.Array], plane: int) -> jax.Array:
        """Sum over lanes and members of int32, a scalar."""
        return jnp.sum(math_sum([read(c, plane) for c in range(self.size)]))


def math_sum(parts: Sequence[jax.Array]) -> jax.Array:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def _meet(_: Any) -> None:
    void = ir.Type.parse("!llvm.void")
    for text in ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"):
        llvm.inline_asm(void, [], text, "~{memory}", has_side_effects=True)


def words_of(rows: int) -> int:
    """Words of bits, one a row."""
    return math.ceil(rows / 32)
