"""Products of many rows by packed weights on Mosaic GPU: weights are expanded in registers, not in memory.

A program has 128 columns of the result, a tile of rows and a stretch of the inputs. A warpgroup brings weights, rows
and scales; two others expand 64 columns each, the first operand of wgmma, whose second one is the rows as they lie. A
block's sums are scaled and added in float32. Where programs are too few for all multiprocessors, several share the
inputs of a tile, and XLA adds what they find.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import overlap
from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import gpu, mosaic, packed, packed_launch, unpack
from pallas_kernels.small_batch.mosaic import F32, SUMS, flipped, load
from pallas_kernels.small_batch.packed import BLOCK, FLOAT4, Packed

#: Columns of a warpgroup, in two stretches as `unpack` has them; warpgroups that multiply.
_COLUMNS, _TEAMS = unpack.ROWS, 2
#: Rows of a tile: two sums [64, rows] of a warpgroup fit into its registers.
_MOST_ROWS = 128
_MAX_STAGES = 6
#: Rows up to which the kernel for few of them is tried.
_FEW_ROWS = 8
#: Registers of a thread that copies, and of one that multiplies.
FEW, MANY = 40, 232
#: Programs that may share the inputs of a tile. What it costs, in bytes that a multiprocessor reads in that time (of
#: rows and weights some 40 GB/s, from the second-level cache): to begin and end a program, to launch what adds sums up,
#: and to write and read a sum of float32, from memory.
_SHARES = 1, 2, 3, 4, 6, 8
_WAVE, _LAUNCH, _SUM_BYTES = 80_000, 80_000, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """One launch.

    Attributes:
      dtype: of the values, as `Packed.kind`. shape: (M, K) of the rows, whole tiles. columns: of the kernel. groups: of
        scales. rows: of a tile. shares: of the inputs. out: type of the result. interpret: whether it is pretended.
    """

    dtype: str
    shape: tuple[int, int]
    columns: int
    groups: int
    rows: int
    shares: int
    out: Any
    interpret: bool = False

    @property
    def name(self) -> str:
        return f"{self.dtype}_many"

    @property
    def teams(self) -> int:
        """Warpgroups: the last one copies."""
        return self.pairs + 1

    @property
    def pairs(self) -> int:
        """Of stretches of columns: warpgroups that multiply."""
        return math.gcd(_TEAMS, self.columns // _COLUMNS)

    @property
    def tiles(self) -> int:
        """Of rows."""
        return self.shape[0] // self.rows

    @property
    def programs(self) -> int:
        return self.tiles * self.shares * self.columns // (_COLUMNS * self.pairs)

    @property
    def flipped(self) -> bool:
        """Whether results are [N, M], as wgmma has them: vectors of float32 cannot be transposed."""
        return self.out == F32

    @property
    def pieces(self) -> int:
        """Of a block, that have scales of their own."""
        return packed.pieces(self.shape[1], self.groups)

    @property
    def steps(self) -> int:
        """Blocks of inputs of a program."""
        return self.shape[1] // (BLOCK * self.shares)

    def scratch(self, rows_dtype: Any) -> dict[str, Any]:
        stored = unpack.stored(self.dtype)
        shape = (_COLUMNS, self.rows) if self.flipped else (self.rows, _COLUMNS)
        out = {"out": plgpu.SMEM((self.pairs, *shape), self.out)}
        row = unpack.row_bytes(self.dtype) + 4 * self.pieces
        step = BLOCK * self.rows * 2 + self.pairs * _COLUMNS * row + 1024
        stages = max(1, min(_MAX_STAGES, mosaic.room(out) // step, self.steps))
        parts = (stages, self.pairs, 2)
        lie = unpack.rows_transforms(min(64, BLOCK // self.pieces))
        x = plgpu.SMEM((stages, self.rows, BLOCK), rows_dtype, transforms=lie)
        w = plgpu.SMEM((*parts, _COLUMNS // 2, BLOCK), stored, transforms=unpack.transforms(stored))
        kind = jnp.int32 if unpack.has_words(self.dtype) else F32
        scales = {} if self.groups == 1 else {"scale": plgpu.SMEM((*parts, self.pieces, _COLUMNS // 2), kind)}
        copies = 1 + self.pairs * (1 + (min(self.pieces, 2) if scales else 0))
        return {
            "x": x, "w": w, **scales, **out,
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
            "free": plgpu.Barrier(num_barriers=stages, num_arrivals=self.pairs),
        }  # fmt: skip

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """A warpgroup of a program; programs side by side have the same columns, so memory is read once for all."""
        team, program = lax.axis_index("team"), lax.axis_index("program")
        tile, rest = lax.rem(program, self.tiles), program // self.tiles
        share, column = lax.rem(rest, self.shares), (rest // self.shares) * self.pairs
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)

        @pl.when(team == self.pairs)
        def _() -> None:
            plgpu.set_max_registers(FEW, action="decrease")
            self.bring(ins, tile, share, column, shared)

        @pl.when(team < self.pairs)
        def _() -> None:
            plgpu.set_max_registers(MANY, action="increase")
            total = self.total(team, shared)
            if self.groups == 1:
                scale = load(ins[2].at[0, pl.ds((column + team) * _COLUMNS, _COLUMNS)], SUMS.reduce(1))
                total = total * mosaic.along_columns(scale, self.rows)
            rows, columns = pl.ds(tile * self.rows, self.rows), pl.ds((column + team) * _COLUMNS, _COLUMNS)
            own = shared["out"].at[team]
            mosaic.write(own if self.flipped else flipped(own), total.astype(self.out))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own, outs[0].at[(share, columns, rows) if self.flipped else (share, rows, columns)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def bring(self, ins: Sequence[Any], tile: Any, share: Any, column: Any, shared: dict[str, Any]) -> None:
        """All steps, each as soon as its place is free."""
        x_MK, w_NBK, scale = ins
        stages, rows = shared["x"].shape[0], pl.ds(tile * self.rows, self.rows)

        def step(i: Any, _: Any) -> tuple[()]:
            slot, block = lax.rem(i, stages), share * self.steps + i
            full, inputs = shared["full"].at[slot], pl.ds(block * BLOCK, BLOCK)
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(shared["free"].at[slot]))
            plgpu.copy_gmem_to_smem(x_MK.at[rows, inputs], shared["x"].at[slot], full)
            for pair in range(self.pairs):
                own = pl.ds((column + pair) * 2, 2)
                plgpu.copy_gmem_to_smem(w_NBK.at[own, :, inputs], shared["w"].at[slot, pair], full)
                if self.groups > 1 and self.pieces == 1:
                    plgpu.copy_gmem_to_smem(scale.at[block, own], shared["scale"].at[slot, pair], full)
                elif self.groups > 1:  # as they lie, each half of the columns has its pieces
                    groups = pl.ds(block * self.pieces, self.pieces)
                    for part in range(2):
                        source = scale.at[groups, (column + pair) * 2 + part, 0]
                        plgpu.copy_gmem_to_smem(source, shared["scale"].at[slot, pair, part], full)
            return ()

        lax.fori_loop(0, self.steps, step, ())

    def total(self, team: Any, shared: dict[str, Any]) -> jax.Array:
        """The sums of a warpgroup's columns, float32 [64, rows]: it expands while the other one multiplies."""
        stages = shared["x"].shape[0]

        def step(i: Any, total: jax.Array) -> jax.Array:
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(shared["full"].at[slot])
            scales = None if self.groups == 1 else shared["scale"].at[slot, team]
            found, size = [], BLOCK // self.pieces
            for piece in range(self.pieces):
                one = dict(piece=piece, pieces=self.pieces)
                weights = unpack.expanded(shared["w"].at[slot, team], self.dtype, self.interpret, scales, **one)
                x = shared["x"].at[slot, :, pl.ds(piece * size, size)]
                sums = unpack.multiplied(weights, x, self.interpret)
                if scales is not None:
                    scale = unpack.row_scales(scales, i * 0, self.interpret, arrive=True, **one)
                    sums = sums * mosaic.along_columns(scale, self.rows)
                found.append(sums)
            if self.interpret:  # its reads are not wgmma's
                plgpu.commit_smem()
            plgpu.barrier_arrive(shared["free"].at[slot])
            for sums in found:
                total = total + sums
            return total

        return lax.fori_loop(0, self.steps, step, plgpu.layout_cast(jnp.zeros((_COLUMNS, self.rows), F32), SUMS))


def refusal(weight: Packed) -> str | None:
    """Why these weights have no such kernel, or None."""
    return "MXFP4's scales are of 32 inputs" if weight.kind == FLOAT4 else None


def product(x_MK: jax.Array, weight: Packed, dtype: DTypeLike, *, interpret: Any = None) -> jax.Array:
    """Rows of bfloat16 times a packed kernel, [M, N] in `dtype`.

    Raises:
      ValueError: `refusal` says why.
    """
    if why := refusal(weight):
        raise ValueError(why)
    m, (k, n) = x_MK.shape[0], weight.shape
    rows = round_up(-(-m // -(-m // _MOST_ROWS)), 8)
    x = jnp.pad(weight.rows(x_MK), ((0, -m % rows), (0, 0)))
    shares = _shares(x.shape[0] // rows, rows, k, n, unpack.row_bytes(weight.kind))
    out = jnp.dtype(dtype) if shares == 1 else jnp.dtype(F32)
    kernel = _Kernel(
        dtype=weight.kind, shape=(x.shape[0], k), columns=n, groups=weight.groups, rows=rows, shares=shares, out=out,
        interpret=interpret is not None,
    )  # fmt: skip
    half = _COLUMNS // 2
    scale = weight.scale if weight.groups == 1 else weight.scale.reshape(weight.groups, n // half, 1, half)
    found = jax.ShapeDtypeStruct((shares, n, x.shape[0]) if kernel.flipped else (shares, x.shape[0], n), out)
    (y,) = mosaic.launch(kernel, (found,), x, weight.values.reshape(n // half, half, k), scale, interpret=interpret)
    return (jnp.sum(y, axis=0).T if kernel.flipped else y[0])[:m].astype(dtype)


def multiply(x_MK: jax.Array, weight: Packed, dtype: DTypeLike) -> jax.Array:
    """Rows times a packed kernel, [M, N] in `dtype`: by a kernel where it is compiled for a GPU and one serves them."""
    plain = lambda x, w: packed.product(x, w).astype(dtype)
    if x_MK.dtype != jnp.bfloat16 or gpu.too_old() or refusal(weight):
        return plain(x_MK, weight)
    few = x_MK.dtype == dtype and _takes_few(x_MK.shape[0], weight)
    own = gpu.multiply if few else lambda x, w: product(x, w, dtype)
    return lax.platform_dependent(x_MK, weight, cuda=own, default=plain)


def _takes_few(rows: int, weight: Packed) -> bool:
    """Whether the kernel for few rows is faster: where inputs are many and outputs few (a head's fc: 12,288 x 4,096),
    here several programs would share the inputs, for XLA to add up what they find."""
    (k, n), groups = weight.shape, weight.groups
    if rows > _FEW_ROWS or k < 2 * n or packed.refusal(weight.values.dtype, weight.shape, groups):
        return False
    return packed_launch.room_refusal("project", weight.kind, weight.shape, groups) is None


def _shares(tiles: int, rows: int, k: int, n: int, row_bytes: int) -> int:
    """How many programs share the inputs of a tile, by what that costs in bytes that one multiprocessor reads."""
    pairs, blocks = math.gcd(_TEAMS, n // _COLUMNS), k // BLOCK
    programs, step = tiles * n // (_COLUMNS * pairs), BLOCK * rows * 2 + _COLUMNS * pairs * row_bytes

    def cost(s: int) -> float:
        waves = -(-programs * s // mosaic.MULTIPROCESSORS)
        sums = 0 if s == 1 else _LAUNCH + _SUM_BYTES * s * tiles * rows * n / mosaic.MULTIPROCESSORS
        return waves * (blocks // s * step + _WAVE) + sums

    return min((s for s in _SHARES if s == 1 or (blocks % s == 0 and blocks // s >= 4)), key=cost)
