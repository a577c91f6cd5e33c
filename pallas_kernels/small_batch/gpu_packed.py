"""Products of few rows by packed weights of 8 or 4 bits, on Mosaic GPU: `gpu`'s four kernels over `packed.Packed`.

A program makes 32 columns of the result, or 32 pairs of columns (gate and up, the halves of a head). Its several
warpgroups take turns at the blocks of 128 inputs, each with a ring of its own, expand a block in registers (`unpack`)
and multiply it by the rows. wgmma's first operand has 64 rows: the two columns of each pair; or 32 columns twice, from
the first half of the inputs and from the second, which then have the rows of both halves beside each other as the
second operand. A block's sums are scaled and added in float32, a warpgroup's blocks in their order, then the
warpgroups', then the halves: the same whatever the number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import mosaic, packed, unpack
from pallas_kernels.small_batch.mosaic import F32, SUMS, flipped, load
from pallas_kernels.small_batch.packed import BLOCK, Packed
from pallas_kernels.small_batch.reference import Stream

Kind = Literal["project", "logits", "heads", "swiglu", "add"]

#: Columns, or pairs of columns, of a program.
COLUMNS = 32
_ROOM = 6144
_MAX_STAGES = 8
_UNIT = 2


def _half(vector: int) -> Any:
    """[32, rows] over a warpgroup, as wgmma's sums but for half of their rows, in vectors of 1 or 2 along them."""
    tiling = plgpu.Tiling(((COLUMNS, 8), (8, 8), (2,), (1,))[: 4 if vector == 1 else 3])
    shift = 1 if vector == 1 else 0
    return plgpu.Layout.TILED(tiling, warp_dims=(-5 - shift,), lane_dims=(-3 - shift, -2 - shift), vector_dim=-1)


_HALF = _half(2)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One launch.

    Attributes:
      kind: what is done around the product. dtype: of the values. shape: (M, K) of the rows. columns: of the kernel.
      groups: of scales. eps: of the norm before, over `squares` tiles; None where there is none.
      counts: query, key and value heads, of "heads". interpret: whether registers are pretended.
    """

    kind: Kind
    dtype: str
    shape: tuple[int, int]
    columns: int
    groups: int
    eps: float | None = None
    squares: int = 0
    counts: tuple[int, ...] = ()
    interpret: bool = False

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.kind}"

    @property
    def pairs(self) -> bool:
        return self.kind in ("heads", "swiglu")

    @property
    def rows(self) -> int:
        return round_up(self.shape[0], 8)

    @property
    def wide(self) -> int:
        """Rows of wgmma's second operand."""
        return self.rows * (1 if self.pairs else 2)

    @property
    def programs(self) -> int:
        return self.columns // (COLUMNS * (2 if self.pairs else 1))

    @property
    def blocks(self) -> int:
        """Of inputs, that each half of wgmma's rows has; of all warpgroups together."""
        return self.shape[1] // (BLOCK * (1 if self.pairs else 2))

    @property
    def teams(self) -> int:
        """Warpgroups. Columns that are many have two programs on a multiprocessor, which hide each other's ends."""
        return 2 if self.several else 4

    @property
    def several(self) -> bool:
        return self.kind in ("swiglu", "logits")

    @property
    def unit(self) -> int:
        """Blocks that a warpgroup takes at its turn, of this shape whatever the rows."""
        return math.gcd(_UNIT, self.blocks)

    @property
    def depth(self) -> int:
        """Blocks of a step."""
        return self.unit if 2 * self.stage(self.unit) * self.teams <= self.budget else 1

    def stage(self, depth: int) -> int:
        """Bytes of a step."""
        return depth * (unpack.ROWS * unpack.row_bytes(self.dtype) + self.wide * BLOCK * 2)

    @property
    def budget(self) -> int:
        """Bytes of shared memory for the rings."""
        tables = 4 * self.rows * (self.squares + unpack.ROWS * (self.teams // 2 + 2))
        tables += 0 if self.groups == 1 else 8 * COLUMNS * self.groups
        return mosaic.SHARED // (2 if self.several else 1) - _ROOM - tables

    @property
    def stages(self) -> int:
        steps = -(-self.blocks // (self.teams * self.depth))
        return max(1, min(_MAX_STAGES, self.budget // (self.stage(self.depth) * self.teams), steps))

    @property
    def layout(self) -> Any:
        """Of what is stored: float32 cannot be transposed in vectors."""
        return _half(1) if self.kind == "logits" else _HALF

    def scratch(self, rows_dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        slots, depth, dtype = self.teams * self.stages, self.depth * BLOCK, jnp.dtype(self.dtype)
        swizzle = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        out: dict[str, Any] = {
            "x": plgpu.SMEM((slots, self.wide, depth), rows_dtype, transforms=swizzle),
            "w": plgpu.SMEM((slots, 2, COLUMNS, depth), dtype, transforms=unpack.transforms(dtype)),
            "full": plgpu.Barrier(num_barriers=slots, num_arrivals=3 if self.pairs else 4),
            "sums": plgpu.SMEM((self.teams // 2, unpack.ROWS, self.rows), F32),
            "half": plgpu.Barrier(num_barriers=1, num_arrivals=self.teams // 2),
            "summed": plgpu.Barrier(num_barriers=1, num_arrivals=self.teams // 2),
            "scale": plgpu.SMEM((2, self.groups if self.pairs else -(-self.groups // 2), COLUMNS), F32),
        }
        beside = 2
        if self.eps is not None:
            out["squares"] = plgpu.SMEM((self.squares, self.rows), F32)
            beside += 1
        if self.kind == "heads":
            out["cos"], out["sin"] = (plgpu.SMEM((COLUMNS, self.rows), F32) for _ in range(2))
            beside += 2
        if self.kind == "add":
            out["h"], out["total"] = plgpu.SMEM((self.rows, COLUMNS), rows_dtype), plgpu.SMEM((self.rows,), F32)
            beside += 1
        out["ready"] = plgpu.Barrier(num_barriers=1, num_arrivals=beside)
        out["out"] = plgpu.SMEM((2 if self.kind == "heads" else 1, self.rows, COLUMNS), self.out_dtype(rows_dtype))
        return out

    def out_dtype(self, rows_dtype: Any) -> Any:
        return F32 if self.kind == "logits" else rows_dtype

    def begins(self, tile: Any) -> tuple[Any, Any]:
        """The two stretches of 32 columns that a program's tile of 64 rows has, the same one twice for halves."""
        if self.kind == "swiglu":
            return tile * COLUMNS, self.columns // 2 + tile * COLUMNS
        if self.kind == "heads":
            begin = (tile // 2) * 4 * COLUMNS + lax.rem(tile, 2) * COLUMNS
            return begin, begin + 2 * COLUMNS
        return tile * COLUMNS, tile * COLUMNS

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """A warpgroup of a program."""
        tile, team = lax.axis_index("program"), lax.axis_index("team")
        x_MK, w_NK, scale_GN, *beside = ins
        gain = None
        begins = self.begins(tile)
        rows = mosaic.all_rows(tile, self.shape[0], self.rows)
        behind = 0 if self.pairs else self.blocks  # blocks between the two halves of the inputs
        depth, units = self.depth, self.blocks // self.unit
        mine = (units - team + self.teams - 1) // self.teams * (self.unit // depth)

        def first(turn: Any) -> Any:
            """The block that a turn begins with."""
            per = self.unit // depth
            return ((turn // per) * self.teams + team) * self.unit + lax.rem(turn, per) * depth

        def copy_weights(turn: Any, slot: Any) -> None:
            for part, begin in enumerate(begins):
                inputs = pl.ds((first(turn) + part * behind) * BLOCK, depth * BLOCK)
                source = w_NK.at[pl.ds(begin, COLUMNS), inputs]
                plgpu.copy_gmem_to_smem(source, shared["w"].at[slot, part], shared["full"].at[slot])

        def copy_rows(turn: Any, slot: Any) -> None:
            for part in range(1 if self.pairs else 2):
                source = x_MK.at[rows, pl.ds((first(turn) + part * behind) * BLOCK, depth * BLOCK)]
                target = shared["x"].at[slot, pl.ds(part * self.rows, self.rows)]
                plgpu.copy_gmem_to_smem(source, target, shared["full"].at[slot])

        # Tables first, and rows before their weights: copies come in the order in which they were asked for, and no
        # step should wait until the whole ring is full.
        @pl.when(team == 0)
        def _() -> None:
            self.copy_tables(tile, begins, scale_GN, beside, rows, shared)

        for turn in range(self.stages):

            @pl.when(turn < mine)
            def _(turn: int = turn) -> None:
                copy_rows(jnp.int32(turn), team * self.stages + turn)
                copy_weights(jnp.int32(turn), team * self.stages + turn)

        plgpu.barrier_wait(shared["ready"].at[0])
        inverse = None
        if self.eps is not None:
            inverse = mosaic.inverse_rms(shared["squares"], self.shape[1], self.eps, _HALF.reduce(0))
        if self.kind == "add":  # too few bytes for the copy engine
            gain = load(beside[-1].at[pl.ds(begins[0], COLUMNS)], _HALF.reduce(1)).astype(F32)

        def step(turn: Any, total: jax.Array) -> jax.Array:
            slot = team * self.stages + lax.rem(turn, self.stages)
            plgpu.barrier_wait(shared["full"].at[slot])
            found = self.multiply(shared["w"].at[slot], shared["x"].at[slot])
            for block, sums in enumerate(found):
                if self.groups > 1:
                    at = first(turn) + block
                    scale = unpack.row_scales(shared["scale"], (at, at), self.interpret)
                    scale = lax.broadcast_in_dim(scale, (unpack.ROWS, self.wide), (0,))
                    sums = unpack.times(sums, scale, SUMS, self.interpret)
                total = total + sums

            @pl.when(turn + self.stages < mine)
            def _() -> None:
                copy_rows(turn + self.stages, slot)
                copy_weights(turn + self.stages, slot)

            return total

        start = plgpu.layout_cast(jnp.zeros((unpack.ROWS, self.wide), F32), SUMS)
        total = lax.fori_loop(0, mine, step, start)
        if not self.pairs:  # of the first half's columns the first rows, of the second's the second
            low = plgpu.broadcasted_iota(jnp.int32, (unpack.ROWS, self.rows), 0, layout=SUMS) < COLUMNS
            total = jnp.where(low, total[:, : self.rows], total[:, self.rows :])
        # Half of the warpgroups leave their sums to the others, which add their own.
        others = self.teams // 2

        @pl.when(team >= others)
        def _() -> None:
            shared["sums"].at[team - others][...] = total
            plgpu.barrier_arrive(shared["half"].at[0])

        @pl.when(team < others)
        def _() -> None:
            plgpu.barrier_wait(shared["half"].at[0])
            mine = shared["sums"].at[team]
            mine[...] = total + load(mine, SUMS)
            plgpu.barrier_arrive(shared["summed"].at[0])

        @pl.when(team == 0)
        def _() -> None:
            plgpu.barrier_wait(shared["summed"].at[0])
            self.finish(tile, outs, shared, inverse, gain, x_MK.dtype)

    def multiply(self, tile: Any, x: Any) -> list[jax.Array]:
        """Each block's sums [64, rows] of a step."""
        blocks = range(self.depth)
        if self.interpret:
            found, rows = [unpack.unpack(tile, self.dtype, i, True) for i in blocks], x[...].astype(F32)
            pieces = [rows[:, i * BLOCK : (i + 1) * BLOCK] for i in blocks]
            product = lambda w, x: lax.dot_general(w.astype(F32), x, (((1,), (1,)), ((), ())))
            return [product(w, x) for w, x in zip(found, pieces, strict=True)]

        def run(*sums: Any) -> list[jax.Array]:
            for i in blocks:
                weights = unpack.unpack(tile, self.dtype, i, False)
                plgpu.wgmma(sums[i], weights, flipped(x.at[:, pl.ds(i * BLOCK, BLOCK)]))
            return [total[...] for total in sums]

        return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((unpack.ROWS, self.wide), F32)] * self.depth)

    def copy_tables(self, tile: Any, begins: Any, scale_GN: Any, beside: Any, rows: Any, shared: Any) -> None:
        """What the end needs, besides the sums."""
        bring = lambda source, target: plgpu.copy_gmem_to_smem(source, target, shared["ready"].at[0])
        own = pl.ds(begins[0], COLUMNS)
        count = shared["scale"].shape[1]
        for part in range(2):
            at = 0 if self.pairs or self.groups == 1 else part * count
            bring(scale_GN.at[pl.ds(at, count), pl.ds(begins[part], COLUMNS)], shared["scale"].at[part])
        names = [name for name in ("squares", "cos", "sin", "h") if name in shared]
        for name, ref in zip(names, beside, strict=False):
            if name == "h":
                ref = ref.at[rows, own]
            elif name in ("cos", "sin"):
                ref = ref.at[pl.ds(lax.rem(tile, 2) * COLUMNS, COLUMNS)]
            bring(ref, shared[name])

    def along_rows(self, v: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(v, (COLUMNS, self.rows), (1,)), self.layout)

    def along_columns(self, v: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(v, (COLUMNS, self.rows), (0,)), self.layout)

    def finish(self, tile: Any, outs: Sequence[Any], shared: Any, inverse: Any, gain: Any, dtype: Any) -> None:
        """From the warpgroups' sums to the results."""
        parts = []
        for part in range(2):
            own = pl.ds(part * COLUMNS, COLUMNS)
            total = load(shared["sums"].at[0, own], self.layout)
            for team in range(1, self.teams // 2):
                total = total + load(shared["sums"].at[team, own], self.layout)
            parts.append(total)
        if not self.pairs:
            parts = [parts[0] + parts[1]]
        if self.groups == 1:
            scales = [load(shared["scale"].at[i, 0], self.layout.reduce(1)).astype(F32) for i in range(len(parts))]
            parts = [y * self.along_columns(scale) for y, scale in zip(parts, scales, strict=True)]
        if inverse is not None:
            parts = [y * self.along_rows(inverse) for y in parts]
        # As XLA does: products are rounded to the stream's dtype, and what follows is computed in float32.
        if self.kind != "logits":
            parts = [y.astype(dtype).astype(F32) for y in parts]
        if self.kind == "add":
            self._add(tile, parts[0], gain, outs, shared, dtype)
        else:
            getattr(self, f"_{self.kind}")(tile, parts, outs, shared, dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def store(self, shared: Any, y: jax.Array, ref: Any, begin: Any) -> None:
        """[32, rows] by way of shared memory to the M rows of 32 columns."""
        flipped(shared)[...] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared.at[pl.ds(0, self.shape[0])], ref.at[:, pl.ds(begin, COLUMNS)])

    def _logits(self, tile: Any, parts: Sequence[jax.Array], outs: Sequence[Any], shared: Any, _: Any) -> None:
        self.store(shared["out"].at[0], parts[0], outs[0], tile * COLUMNS)

    def _project(self, tile: Any, parts: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        self.store(shared["out"].at[0], parts[0].astype(dtype), outs[0], tile * COLUMNS)

    def _swiglu(self, tile: Any, parts: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        gate, up = parts
        y = (gate * lax.logistic(gate) * up).astype(dtype)
        self.store(shared["out"].at[0], y, outs[0], tile * COLUMNS)

    def _heads(self, tile: Any, parts: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        lo, hi = parts
        head, begin = tile // 2, lax.rem(tile, 2) * COLUMNS
        turns = jnp.where(head < self.counts[0] + self.counts[1], 1.0, 0.0)  # values stay as they are
        cos = load(shared["cos"], self.layout) * turns + (1.0 - turns)
        sin = load(shared["sin"], self.layout) * turns
        times = functools.partial(unpack.times, layout=_HALF, interpret=self.interpret)
        flipped(shared["out"].at[0])[...] = (times(lo, cos) - times(hi, sin)).astype(dtype)
        flipped(shared["out"].at[1])[...] = (times(hi, cos) + times(lo, sin)).astype(dtype)
        plgpu.commit_smem()
        first = 0
        for ref, count in zip(outs, self.counts, strict=True):

            @pl.when((head >= first) & (head < first + count))
            def _(ref: Any = ref, first: int = first) -> None:
                at = (head - first) * 4 * COLUMNS + begin
                for half in range(2):
                    source = shared["out"].at[half, pl.ds(0, self.shape[0])]
                    plgpu.copy_smem_to_gmem(source, ref.at[:, pl.ds(at + half * 2 * COLUMNS, COLUMNS)])

            first += count

    def _add(self, tile: Any, y: jax.Array, gain: jax.Array, outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        h = load(flipped(shared["h"]), _HALF).astype(F32) + y
        h = h.astype(dtype).astype(F32)
        self.store(shared["h"], h.astype(dtype), outs[0], tile * COLUMNS)
        self.store(shared["out"].at[0], (h * self.along_columns(gain)).astype(dtype), outs[1], tile * COLUMNS)
        shared["total"][...] = jnp.sum(h * h, axis=0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared["total"], outs[2].at[tile])


def _run(
    kind: Kind, x: jax.Array, weight: Packed, outs: Sequence[jax.ShapeDtypeStruct], *beside: jax.Array,
    interpret: Any, **extra: Any,
) -> Any:  # fmt: skip
    m, k = x.shape
    mosaic.check_rows(m)
    if why := packed.refusal(weight.values.dtype, weight.shape, weight.groups):
        raise ValueError(why)
    kernel = _Kernel(
        kind, weight.values.dtype.name, (m, k), weight.shape[1], weight.groups,
        interpret=interpret is not None, **extra,
    )  # fmt: skip
    return mosaic.launch(kernel, tuple(outs), x, weight.values, weight.scale, *beside, interpret=interpret)


def _normed(stream: Stream, eps: float) -> dict[str, Any]:
    return dict(eps=eps, squares=stream.squares_TR.shape[0])


def _like(x: jax.Array, columns: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype if dtype is None else dtype)


def logits(x_MK: jax.Array, kernel: Packed, *, interpret: Any = None) -> jax.Array:
    """See reference.logits."""
    return _run("logits", x_MK, kernel, [_like(x_MK, kernel.shape[1], F32)], interpret=interpret)[0]


def project(stream: Stream, kernel: Packed, eps: float, *, interpret: Any = None) -> jax.Array:
    """See reference.project."""
    x, extra = stream.scaled_ME, _normed(stream, eps)
    return _run("project", x, kernel, [_like(x, kernel.shape[1])], stream.squares_TR, interpret=interpret, **extra)[0]


def heads(
    stream: Stream, kernel: Packed, rope: tuple[jax.Array, jax.Array], counts: Sequence[int], eps: float, *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """See reference.heads."""
    x, extra = stream.scaled_ME, _normed(stream, eps)
    outs = [_like(x, count * 4 * COLUMNS) for count in counts]
    found = _run(
        "heads", x, kernel, outs, stream.squares_TR, *rope, interpret=interpret, counts=tuple(counts), **extra
    )  # fmt: skip
    return tuple(found)


def swiglu(stream: Stream, kernel: Packed, eps: float, *, interpret: Any = None) -> jax.Array:
    """See reference.swiglu."""
    x, outs = stream.scaled_ME, [_like(stream.scaled_ME, kernel.shape[1] // 2)]
    return _run("swiglu", x, kernel, outs, stream.squares_TR, interpret=interpret, **_normed(stream, eps))[0]


def add(x_MK: jax.Array, kernel: Packed, h_ME: jax.Array, gain_E: jax.Array, *, interpret: Any = None) -> Stream:
    """See reference.add."""
    same = jax.ShapeDtypeStruct(h_ME.shape, h_ME.dtype)
    squares = jax.ShapeDtypeStruct((kernel.shape[1] // COLUMNS, round_up(h_ME.shape[0], 8)), F32)
    return Stream(*_run("add", x_MK, kernel, [same, same, squares], h_ME, gain_E, interpret=interpret))
