"""What the Mosaic kernels of few rows have in common: how they lie in shared memory, walk, end and are launched.

Owns no product. A kernel is a frozen record that says what it needs of shared memory and what a program does; `launch`
makes a call of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch.reference import TILE

#: Bytes of shared memory that a program may have on Hopper, and multiprocessors of an H100 and an H200.
SHARED, MULTIPROCESSORS = 232448, 132
#: What Pallas aligns each array of shared memory to, keeps for sums across lanes, and a margin for barriers of rings.
_ALIGNED, SUMMING, _BARRIERS = 1024, 2048, 1024
#: The layout of wgmma's sums [64, rows]; vectors along either axis are its reductions.
SUMS = plgpu.Layout.WGMMA
F32 = jnp.float32


class Kernel(Protocol):
    """One launch. Hashable: layers that launch the same share its trace.

    Attributes:
      name: for profiles. programs: of the grid, those of a cluster together one. teams: warpgroups of a program.
    """

    @property
    def name(self) -> str: ...
    @property
    def programs(self) -> int: ...
    @property
    def teams(self) -> int: ...

    def scratch(self, dtype: Any, /) -> dict[str, Any]:
        """Shared memory and barriers by name, for rows of a dtype."""
        ...

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any], /) -> None:
        """What a warpgroup of a program does; axes of the grid are "program" and, with several teams, "team"."""
        ...


# Jitted: a model's layers share one trace and one lowering of a kernel, which take Python a second.
@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("interpret", "members", "summing"))
def launch(
    kernel: Any, outs: tuple[jax.ShapeDtypeStruct, ...], *ins: jax.Array, interpret: Any = None, members: int = 1,
    summing: int = SUMMING,
) -> Any:  # fmt: skip
    """The results of a `Kernel`, as `outs` says; the first of `ins` are its rows.

    Args:
      members: programs of a cluster, its axis "member". summing: bytes of shared memory for sums across lanes.
    """
    scratch = kernel.scratch(ins[0].dtype)
    names = list(scratch)

    def small_batch(*refs: Any) -> None:
        shared = dict(zip(names, refs[len(ins) + len(outs) :], strict=True))
        kernel.body(refs[: len(ins)], refs[len(ins) : len(ins) + len(outs)], shared)

    small_batch.__name__ = f"small_batch_{kernel.name}"
    extra: dict[str, Any] = {} if interpret is None else {"interpret": interpret}
    if kernel.teams > 1:
        extra |= {"num_threads": kernel.teams, "thread_name": "team"}
    if members > 1:
        extra |= {"cluster": (members,), "cluster_names": ("member",)}
    lane = plgpu.LoweringSemantics.Lane
    return plgpu.kernel(
        small_batch, out_type=outs, scratch_types=tuple(scratch.values()), grid=(kernel.programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=lane, reduction_scratch_bytes=summing), **extra,
    )(*ins)  # fmt: skip


def room(beside: dict[str, Any], programs: int = 1, summing: int = SUMMING) -> int:
    """Bytes of shared memory for a program's rings.

    Args:
      beside: what it takes besides (see Kernel.scratch). programs: that share a multiprocessor. summing: see `launch`.
    """
    arrays = [x for x in beside.values() if not isinstance(x, plgpu.Barrier | plgpu.ClusterBarrier)]
    taken = sum(round_up(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize, _ALIGNED) for x in arrays)
    # Of shared memory the hardware keeps 1 KB for each program.
    whole = (SHARED + _ALIGNED) // programs - _ALIGNED
    return whole - taken - summing - _BARRIERS


def check_rows(m: int) -> None:
    """Raises ValueError for a number of rows that the copy engine cannot bring."""
    if m > 8 and m % 8:
        raise ValueError(f"rows must be at most 8 or a multiple of 8, got {m}")


def all_rows(program: Any, m: int, rows: int) -> Any:
    """A slice of m rows, and of so many more that they are `rows`, which the copy engine fills with zeros."""
    # A dynamic begin: of a static one JAX would say that it leaves the array.
    return pl.ds(program * 0, rows) if m % 8 else pl.ds(0, rows)


def tiled(lanes: int) -> tuple[Any, ...]:
    """How wgmma's operands lie in shared memory: bfloat16 tiles of 8 rows, swizzled."""
    swizzle = plgpu.find_swizzle(lanes * 16)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def with_tables(refs: Sequence[Any], at: int) -> list[Any]:
    """References in which cosines and sines, the two halves of one of them, are two."""
    return [*refs[:at], refs[at].at[0], refs[at].at[1], *refs[at + 1 :]]


def flipped(ref: Any) -> Any:
    return ref.transpose((1, 0))


def load(ref: Any, layout: Any) -> jax.Array:
    """From any memory into registers."""
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]: JAX 0.10's signature


def write(ref: Any, value: jax.Array) -> None:
    """From registers into memory, whatever layout they have."""
    store = getattr(plgpu, "store", None)  # JAX 0.12 refuses `ref[...] = value` where banks conflict
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)


def walk(
    totals: Sequence[Any], shared: dict[str, Any], steps: Any, copy: Callable[[Any, Any], None], *, begin: Any = 0,
    all_steps: Any = None, flip: bool = True, first: Any = 0,
) -> list[jax.Array]:  # fmt: skip
    """Products summed over steps of a ring, whose first copies were asked for by the caller; all but one of a ring.

    Args:
      totals: accumulators [64, rows], one for each part of "w" in shared memory.
      copy: brings a step into a slot that is free, or has it brought. begin: the step of the ring's life that is the
        first of these. all_steps: of the ring's life (default: these).
      flip: whether a tile of weights has inputs in rows. first: part of "w" that is the first accumulator's.
    """
    stages = shared["w"].shape[0]
    all_steps = steps if all_steps is None else all_steps

    def one(step: Any, _: Any) -> tuple[()]:
        slot = lax.rem(begin + step, stages)
        plgpu.barrier_wait(shared["full"].at[slot])
        for part, total in enumerate(totals):
            tile = shared["w"].at[slot, first + part]
            plgpu.wgmma(total, flipped(tile) if flip else tile, flipped(shared["x"].at[slot]))
        plgpu.wgmma_wait(len(totals))  # the step before is done, and its slot free
        ahead = begin + step + stages - 1

        @pl.when(ahead < all_steps)
        def _() -> None:
            copy(ahead, lax.rem(ahead, stages))

        return ()

    lax.fori_loop(0, steps, one, ())
    return [total[...] for total in totals]


def along_rows(v: jax.Array, columns: int = 64) -> jax.Array:
    """[rows] as [columns, rows]."""
    return lax.broadcast_in_dim(v, (columns, v.shape[0]), (1,))


def along_columns(v: jax.Array, rows: int) -> jax.Array:
    """[columns] as [columns, rows]."""
    return lax.broadcast_in_dim(v, (v.shape[0], rows), (0,))


def inverse_rms(squares: Any, width: int, eps: float, vector: Any, several: int = 8) -> jax.Array:
    """1 / root mean square of each row, [rows], by the sums of squares of tiles [tiles, rows], in their order.

    Args:
      width: features of a row. vector: a layout of [rows]. several: tiles that are read at once.
    """
    return lax.rsqrt(summed_tiles(squares, 0, squares.shape[0], vector, several) * (1.0 / width) + eps)


def summed_tiles(tiles: Any, begin: Any, count: int, vector: Any, several: int = 8) -> jax.Array:
    """The sum of so many of an array's rows [tiles, rows] in memory, in their order."""
    several = math.gcd(count, several)  # all at once may take more registers than there are

    def add(i: Any, total: jax.Array) -> jax.Array:
        for t in range(several):
            total = total + load(tiles.at[begin + i * several + t], vector)
        return total

    start = plgpu.layout_cast(jnp.zeros((tiles.shape[1],), F32), vector)
    return lax.fori_loop(0, count // several, add, start)


def added(rows: int, dtype: Any) -> dict[str, Any]:
    """The shared memory of `add_and_store`."""
    return {
        "h": plgpu.SMEM((rows, TILE), dtype), "gain": plgpu.SMEM((TILE,), dtype),
        "out": plgpu.SMEM((rows, TILE), dtype), "sums": plgpu.SMEM((rows,), F32),
    }  # fmt: skip


class Rows(NamedTuple):
    """Which rows of a result a program writes: of two that share them each a span of its own.

    Attributes:
      spans: first row and count of each program's. member: which the program is.
    """

    spans: tuple[tuple[int, int], ...]
    member: Any = 0


def add_and_store(
    tile: Any, y: jax.Array, outs: Sequence[Any], shared: Any, rows: int | Rows, times: Callable[..., Any]
) -> None:
    """Adds [64, rows] to the stream's tile "h", and stores its rows, or the first so many, as a `Stream`."""
    dtype = outs[0].dtype
    h = load(flipped(shared["h"].at[:, :]), SUMS).astype(F32) + y
    h = h.astype(dtype).astype(F32)
    gain = load(shared["gain"], SUMS.reduce(1)).astype(F32)
    store(shared["h"], h.astype(dtype), outs[0], tile * TILE, rows)
    store(shared["out"], (h * along_columns(gain, h.shape[1])).astype(dtype), outs[1], tile * TILE, rows)
    write(shared["sums"], jnp.sum(times(h, h), axis=0))
    plgpu.commit_smem()
    member = rows.member if isinstance(rows, Rows) else 0
    plgpu.copy_smem_to_gmem(shared["sums"], outs[2].at[tile, pl.ds(member * h.shape[1], h.shape[1])])


def store(shared: Any, y: jax.Array, ref: Any, begin: Any, rows: int | Rows) -> None:
    """[64, rows] by way of shared memory to the rows, or the first so many, of 64 columns."""
    write(flipped(shared.at[:, :]), y)
    plgpu.commit_smem()
    copy_out(shared, ref, begin, rows)


def copy_out(shared: Any, ref: Any, begin: Any, rows: int | Rows) -> None:
    """What was committed to shared memory, to 64 columns of a result."""
    if isinstance(rows, int):
        plgpu.copy_smem_to_gmem(shared.at[pl.ds(0, rows)], ref.at[:, pl.ds(begin, TILE)])
        return
    for member, (first, count) in enumerate(rows.spans):

        @pl.when(rows.member == member)
        def _(first: int = first, count: int = count) -> None:
            target = ref.at[pl.ds(first, count), pl.ds(begin, TILE)]
            plgpu.copy_smem_to_gmem(shared.at[pl.ds(0, count)], target)
