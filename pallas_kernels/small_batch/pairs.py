"""What two programs of a cluster send each other: a tile of sums [64, rows], as a thread holds it.

The interpreter knows no memory of a neighbour: there the two have inboxes in global memory, and meet at a barrier.
"""

from __future__ import annotations

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

from pallas_kernels import clusters
from pallas_kernels.small_batch.mosaic import F32, SUMS
from pallas_kernels.small_batch.reference import TILE

#: Floats that a thread holds side by side.
_SIDE = 2


def scratch(rows: int, interpret: bool) -> dict[str, Any]:
    """Shared memory for what a program is sent."""
    if interpret:
        return {"met": plgpu.ClusterBarrier(collective_axes=("member",))}
    return {"met": clusters.barrier(), "inbox": plgpu.SMEM((TILE * rows,), F32)}


def inboxes(pairs: int, rows: int) -> jax.ShapeDtypeStruct:
    """The interpreter's."""
    return jax.ShapeDtypeStruct((pairs, 2, TILE, rows), F32)


def begin(team: Any, expects: Any, rows: int, shared: dict[str, Any], interpret: bool) -> None:
    """For every warpgroup, first of all.

    Args:
      expects: whether the program is sent a tile, of so many rows.
    """
    if interpret:
        return

    @pl.when(team == 0)
    def _() -> None:
        clusters.make(shared["met"])
        pl.when(expects)(lambda: clusters.expect(shared["met"], jnp.int32(TILE * rows * 4)))

    clusters.arrive()


def wait(interpret: bool) -> None:
    """Until both have begun; for every warpgroup, once, before it sends."""
    if not interpret:
        clusters.wait()


def half(y: jax.Array, which: Any, interpret: bool) -> jax.Array:
    """The first or second half of a tile's rows."""
    rows = y.shape[1] // 2
    if interpret:
        return lax.dynamic_slice(y, (0, which * rows), (TILE, rows))

    def run(_: Any, y: Any, which: Any) -> Any:
        count = y.registers.shape[1] // 2  # the axis of eights of rows
        second = arith.cmpi(arith.CmpIPredicate.ne, which.registers.item(), clusters.constant(0))
        found = np.empty_like(y.registers[:, :count])
        for i, (a, b) in enumerate(zip(y.registers[:, :count].flat, y.registers[:, count:].flat, strict=True)):
            found.flat[i] = arith.select(second, b, a)
        return mgpu.FragmentedArray(_registers=found, _layout=y.layout, _is_signed=None)

    wanted = plgpu.ShapeDtypeStruct((TILE, rows), F32, layout=SUMS)
    return plgpu.inline_mgpu(arg_types=(SUMS, clusters.SCALAR), return_type=wanted)(run)(y, which)


def send(y: jax.Array, member: Any, shared: dict[str, Any], inbox: Any) -> None:
    """To the other of the two; inbox: the interpreter's of the pair, or None."""
    if inbox is not None:
        inbox.at[1 - member][...] = y
        return

    def run(_: Any, ref: Any, met: Any, y: Any, whose: Any) -> None:
        for i, two in enumerate(y.registers.flat):
            values = [vector.extract(two, [], [k]) for k in range(_SIDE)]
            clusters.store(ref, _at(i), met, whose.registers.item(), values)

    args = plgpu.RefType(), plgpu.RefType(), SUMS, clusters.SCALAR
    plgpu.inline_mgpu(arg_types=args)(run)(shared["inbox"], shared["met"], y, 1 - member)


def meet(shared: dict[str, Any], inbox: Any) -> None:
    """For both of the interpreter's, between `send` and `received`; compiled, a barrier counts what has come."""
    if inbox is not None:
        plgpu.barrier_arrive(shared["met"])
        plgpu.barrier_wait(shared["met"])


def received(own: jax.Array, member: Any, shared: dict[str, Any], inbox: Any) -> jax.Array:
    """What a program was sent, when it has come; own: a tile that is held alike."""
    if inbox is not None:
        return inbox[member]
    clusters.receive(shared["met"])

    def run(_: Any, ref: Any, own: Any) -> Any:
        pair, f32 = ir.VectorType.get((_SIDE,), ir.F32Type.get()), ir.F32Type.get()
        found = np.empty(own.registers.shape, dtype=object)
        for i in range(found.size):
            at = utils.getelementptr(utils.memref_ptr(ref), [_at(i)], f32)
            found.flat[i] = llvm.load(pair, at, alignment=4 * _SIDE)
        return mgpu.FragmentedArray(_registers=found, _layout=own.layout, _is_signed=None)

    wanted = plgpu.ShapeDtypeStruct(own.shape, F32, layout=SUMS)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SUMS), return_type=wanted)(run)(shared["inbox"], own)


def _at(i: int) -> Any:
    """Where a thread's values lie: those of all threads side by side."""
    c = clusters.constant
    thread = arith.remui(utils.thread_idx(), c(clusters.LANES))
    return arith.muli(arith.addi(thread, c(i * clusters.LANES)), c(_SIDE))
