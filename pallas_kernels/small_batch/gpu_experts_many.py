"""A mixture of experts for many rows on Mosaic GPU: each row is multiplied by its own experts and no others.

Three launches (`packed_experts` has their specification in plain XLA): rows are brought to their slots; gate and up
with biases and what gates make of ups; and down. Slots have up to 128 rows of one expert, and a tile is 64 pairs of
columns of a slot: one of two warpgroups has the gates and the other the ups, or each 64 of down's columns. A third
brings rows and weights through a ring. Programs live as long as the kernel: the ring is filled with the next tile's
while this one's results are written. Weights are bfloat16 [in, out], which wgmma reads as they lie, or packed ones,
which are expanded in registers (as in `gpu_packed_many`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import gpu_packed_many, mosaic, packed, packed_experts, unpack
from pallas_kernels.small_batch.mosaic import F32, SUMS, flipped, load
from pallas_kernels.small_batch.packed import BLOCK, FLOAT4, Packed
from pallas_kernels.small_batch.packed_experts import PIECE, Gates
from pallas_kernels.small_batch.reference import TILE

#: Warpgroups that multiply, of 64 columns each; another one copies.
_TEAMS = 2
#: Rows of a slot at most: two sums [64, rows] of a warpgroup fit into its registers; and where scales are of a quarter
#: of a block of inputs, whose sums the compiler has side by side.
_MOST_ROWS, _MOST_OF_QUARTERS = 128, 64
_MAX_STAGES = 6
#: Bytes of an expert's weights up to which what one of its slots has read is still in the second-level cache when the
#: next one wants it, a slot's tiles all done before: a third of Hopper's 50 MB.
_CACHED = 16 << 20
#: Inputs up to which there is room for PIECE rows.
_WIDEST = 14336
#: What weights that are not packed are called in kernels' names.
_WHOLE = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """One launch.

    Attributes:
      kind: "up" or "down". dtype: of the weights, `Packed.kind` or bfloat16. shape: (rows of a slot, inputs of the
        weights). columns: of the results. groups: of scales, 0 of none. slots: that there may be.
      by_slots: whether a tile of all slots comes after the other, not the tiles of one slot after the other.
      gates: see packed_experts.mix. interpret: whether it is pretended.
    """

    kind: Literal["up", "down"]
    dtype: str
    shape: tuple[int, int]
    columns: int
    groups: int
    slots: int
    by_slots: bool = False
    gates: Gates | None = None
    interpret: bool = False

    teams = _TEAMS + 1

    @property
    def name(self) -> str:
        return f"{self.dtype}_experts_many_{self.kind}"

    @property
    def across(self) -> int:
        """Tiles of a slot."""
        return -(-self.columns // (TILE if self.kind == "up" else TILE * _TEAMS))

    @property
    def weights(self) -> int:
        """Columns of an expert's weights."""
        return self.columns * (2 if self.kind == "up" else 1)

    @property
    def programs(self) -> int:
        return min(mosaic.MULTIPROCESSORS, self.slots * self.across)

    @property
    def steps(self) -> int:
        """Blocks of inputs of a tile."""
        return -(-self.shape[1] // BLOCK)

    @property
    def by_blocks(self) -> bool:
        """Whether scales come with the weights, not once for all inputs."""
        return self.dtype != _WHOLE and (self.groups > 1 or unpack.has_words(self.dtype))

    @property
    def pieces(self) -> int:
        """Of a block, that have scales of their own."""
        return packed.pieces(self.shape[1], self.groups)

    def scratch(self, rows_dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        rows, whole = self.shape[0], self.dtype == _WHOLE
        out: dict[str, Any] = {"out": plgpu.SMEM((_TEAMS, rows, TILE), rows_dtype)}
        taken = TILE * BLOCK * 2 if whole else TILE * unpack.row_bytes(self.dtype) + (1024 if self.by_blocks else 0)
        step = BLOCK * rows * 2 + _TEAMS * taken
        stages = max(1, min(_MAX_STAGES, mosaic.room(out) // step))
        if whole:
            w = plgpu.SMEM((stages, _TEAMS, BLOCK, TILE), rows_dtype, transforms=mosaic.tiled(TILE))
        else:
            stored = unpack.stored(self.dtype)
            shape = (stages, _TEAMS, 2, TILE // 2, BLOCK)
            w = plgpu.SMEM(shape, stored, transforms=unpack.transforms(stored))
        scale = jnp.int32 if unpack.has_words(self.dtype) else F32
        scales = {"scale": plgpu.SMEM((stages, _TEAMS, 2, self.pieces, TILE // 2), scale)} if self.by_blocks else {}
        copies = 1 + _TEAMS * (1 + (min(self.pieces, 2) if scales else 0))
        lie = unpack.rows_transforms(min(64, BLOCK // self.pieces))
        return {
            "x": plgpu.SMEM((stages, rows, BLOCK), rows_dtype, transforms=lie),
            "w": w, **scales, **out,
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
            "free": plgpu.Barrier(num_barriers=stages, num_arrivals=_TEAMS),
            "given": plgpu.Barrier(num_barriers=1, num_arrivals=1),
            "taken": plgpu.Barrier(num_barriers=1, num_arrivals=1),
        }  # fmt: skip

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """A warpgroup of a program, which has every so manieth tile of the slots in use."""
        team, program = lax.axis_index("team"), lax.axis_index("program")
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)
        used = ins[4][0]
        mine = lax.div(used * self.across - program + (self.programs - 1), self.programs)

        def each(one: Callable[[Any, Any, Any, Any], None]) -> None:
            """Of every tile its turn, its slot, the slot's expert and the tile's number."""

            def turn(i: Any, _: Any) -> tuple[()]:
                number = program + i * self.programs
                slot, tile = lax.div(number, self.across), lax.rem(number, self.across)
                if self.by_slots:
                    tile, slot = lax.div(number, used), lax.rem(number, used)
                one(i, slot, ins[3][slot], tile)
                return ()

            lax.fori_loop(0, mine, turn, ())

        @pl.when(team == _TEAMS)
        def _() -> None:
            plgpu.set_max_registers(gpu_packed_many.FEW, action="decrease")
            each(lambda i, slot, expert, tile: self.bring(i, slot, expert, tile, ins, shared))

        @pl.when(team < _TEAMS)
        def _() -> None:
            plgpu.set_max_registers(gpu_packed_many.MANY, action="increase")
            each(lambda i, slot, expert, tile: self.one(i, slot, expert, tile, team, ins, outs, shared))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def column(self, tile: Any, team: Any) -> Any:
        """The first that a warpgroup multiplies by; of an odd number of stretches both have the last one."""
        if self.kind == "up":
            return team * self.columns + tile * TILE
        return jnp.minimum((tile * _TEAMS + team) * TILE, self.columns - TILE)

    def bring(self, i: Any, slot: Any, expert: Any, tile: Any, ins: Sequence[Any], shared: dict[str, Any]) -> None:
        """All steps of a tile, each as soon as its place is free."""
        x_QK, weights, scale = ins[:3]
        stages, rows = shared["x"].shape[0], pl.ds(slot * self.shape[0], self.shape[0])

        def step(s: Any, _: Any) -> tuple[()]:
            turn = i * self.steps + s
            at, inputs = lax.rem(turn, stages), pl.ds(s * BLOCK, BLOCK)
            full = shared["full"].at[at]
            pl.when(turn >= stages)(lambda: plgpu.barrier_wait(shared["free"].at[at]))
            plgpu.copy_gmem_to_smem(x_QK.at[rows, inputs], shared["x"].at[at], full)
            for team in range(_TEAMS):
                column, to = self.column(tile, team), shared["w"].at[at, team]
                if self.dtype == _WHOLE:
                    plgpu.copy_gmem_to_smem(weights.at[expert, inputs, pl.ds(column, TILE)], to, full)
                    continue
                own = lax.div(column, TILE // 2)
                begin = expert * (self.weights // (TILE // 2)) + own
                plgpu.copy_gmem_to_smem(weights.at[pl.ds(begin, 2), :, inputs], to, full)
                if self.by_blocks and self.pieces == 1:
                    plgpu.copy_gmem_to_smem(scale.at[expert, s, pl.ds(own, 2)], shared["scale"].at[at, team], full)
                elif self.by_blocks:  # as they lie, each half of the columns has its pieces
                    groups = pl.ds(s * self.pieces, self.pieces)
                    for part in range(2):
                        source = scale.at[expert, groups, own + part, 0]
                        plgpu.copy_gmem_to_smem(source, shared["scale"].at[at, team, part], full)
            return ()

        lax.fori_loop(0, self.steps, step, ())

    def one(
        self, i: Any, slot: Any, expert: Any, tile: Any, team: Any, ins: Sequence[Any], outs: Sequence[Any],
        shared: dict[str, Any],
    ) -> None:  # fmt: skip
        """A warpgroup's part of a tile."""
        x_QK, _, scale_XGN, _, _, *bias_XN = ins
        dtype, vector = x_QK.dtype, SUMS.reduce(1)
        along = lambda v: mosaic.along_columns(v, self.shape[0])
        # As XLA does: products are rounded to the rows' dtype, and what follows is computed in float32.
        rounded = lambda y: y.astype(dtype).astype(F32)
        own = pl.ds(self.column(tile, team), TILE)
        # Asked for before the products that they wait for: too few bytes for the copy engine.
        once = self.groups == 1 and not self.by_blocks
        scales = [load(scale_XGN.at[expert, 0, own], vector)] if once else []
        biases = [load(ref.at[expert, own], vector).astype(F32) for ref in bias_XN]
        total = self.total(i, team, shared)
        if self.dtype == FLOAT4:
            total = total * 2.0**packed.EXPONENT
        for scale in scales:
            total = total * along(scale)
        total = rounded(total)
        for bias in biases:
            total = rounded(total + along(bias))
        to = shared["out"].at[team]
        rows = pl.ds(slot * self.shape[0], self.shape[0])

        def store(y: jax.Array, column: Any) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
            mosaic.write(flipped(to), y.astype(dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(to, outs[0].at[rows, pl.ds(column, TILE)])

        if self.kind == "down":
            twice = (tile * _TEAMS + team) * TILE >= self.columns
            pl.when(jnp.logical_not(twice))(lambda: store(total, self.column(tile, team)))
            return

        @pl.when(team == 1)
        def _() -> None:
            pl.when(i > 0)(lambda: plgpu.barrier_wait(shared["taken"].at[0]))
            mosaic.write(flipped(to), total.astype(dtype))
            plgpu.barrier_arrive(shared["given"].at[0])

        @pl.when(team == 0)
        def _() -> None:
            plgpu.barrier_wait(shared["given"].at[0])
            up = load(flipped(shared["out"].at[1]), SUMS).astype(F32)
            store(packed_experts.gated(total, up, self.gates), tile * TILE)
            plgpu.barrier_arrive(shared["taken"].at[0])  # now that what was read has been written

    def total(self, i: Any, team: Any, shared: dict[str, Any]) -> jax.Array:
        """The sums of a warpgroup's columns, float32 [64, rows]."""
        return (self.as_they_lie if self.dtype == _WHOLE else self.expanded)(i, team, shared)

    def as_they_lie(self, i: Any, team: Any, shared: dict[str, Any]) -> jax.Array:
        """Of bfloat16: a step's products are made while the next one is waited for."""
        stages = shared["x"].shape[0]

        def sums(acc: Any) -> jax.Array:
            def step(s: Any, _: Any) -> tuple[()]:
                turn = i * self.steps + s
                at = lax.rem(turn, stages)
                plgpu.barrier_wait(shared["full"].at[at])
                plgpu.wgmma(acc, flipped(shared["w"].at[at, team]), flipped(shared["x"].at[at]))
                plgpu.wgmma_wait(1)
                before = lax.rem(turn + (stages - 1), stages)
                pl.when(s > 0)(lambda: plgpu.barrier_arrive(shared["free"].at[before]))
                return ()

            lax.fori_loop(0, self.steps, step, ())
            found = acc[...]
            plgpu.barrier_arrive(shared["free"].at[lax.rem((i + 1) * self.steps - 1, stages)])
            return found

        return pl.run_scoped(sums, plgpu.WGMMAAccumulatorRef((TILE, self.shape[0]), F32))

    def expanded(self, i: Any, team: Any, shared: dict[str, Any]) -> jax.Array:
        """Of few bits: one warpgroup expands while the other one multiplies."""
        stages, rows = shared["x"].shape[0], self.shape[0]

        def step(s: Any, total: jax.Array) -> jax.Array:
            at = lax.rem(i * self.steps + s, stages)
            plgpu.barrier_wait(shared["full"].at[at])
            scales = shared["scale"].at[at, team] if self.by_blocks else None
            size = BLOCK // self.pieces
            for piece in range(self.pieces):
                one = dict(piece=piece, pieces=self.pieces)
                weights = unpack.expanded(shared["w"].at[at, team], self.dtype, self.interpret, scales, **one)
                x = shared["x"].at[at, :, pl.ds(piece * size, size)]
                sums = unpack.multiplied(weights, x, self.interpret)
                if self.by_blocks and self.dtype != FLOAT4:
                    scale = unpack.row_scales(scales, s * 0, self.interpret, arrive=True, **one)
                    sums = sums * mosaic.along_columns(scale, rows)
                total = total + sums
            if self.interpret:  # its reads are not wgmma's
                plgpu.commit_smem()
            plgpu.barrier_arrive(shared["free"].at[at])
            return total

        return lax.fori_loop(0, self.steps, step, plgpu.layout_cast(jnp.zeros((TILE, rows), F32), SUMS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gather:
    """Rows at their places in slots; what is at places without a row is undefined.

    Attributes:
      places: of all slots. shape: of a row, in lines. interpret: whether it is pretended.
    """

    places: int
    shape: tuple[int, int]
    interpret: bool = False

    name, teams = "experts_rows", 1

    @property
    def programs(self) -> int:
        return self.places // PIECE

    def scratch(self, rows_dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        return {
            "rows": plgpu.SMEM((PIECE, *self.shape), rows_dtype),
            "there": plgpu.Barrier(num_barriers=1, num_arrivals=PIECE),
        }

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """Eight places, of which the first have rows."""
        x_MEl, sources_Q = ins
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)
        begin, rows = lax.axis_index("program") * PIECE, x_MEl.shape[0]
        sources = [sources_Q[begin + i] for i in range(PIECE)]

        @pl.when(sources[0] < rows)
        def _() -> None:
            for i, source in enumerate(sources):
                own = x_MEl.at[jnp.minimum(source, rows - 1)]
                plgpu.copy_gmem_to_smem(own, shared["rows"].at[i], shared["there"].at[0])
            plgpu.barrier_wait(shared["there"].at[0])
            for i, source in enumerate(sources):

                @pl.when(source < rows)
                def _(i: int = i) -> None:
                    plgpu.copy_smem_to_gmem(shared["rows"].at[i], outs[0].at[begin + i])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _at_places(x_ME: jax.Array, sources_Q: jax.Array, interpret: Any) -> jax.Array:
    """Rows where `packed_experts.Plan` says, [Q, E]."""
    lines = x_ME.shape[1] // TILE, TILE
    kernel = _Gather(places=len(sources_Q), shape=lines, interpret=interpret is not None)
    out = jax.ShapeDtypeStruct((len(sources_Q), *lines), x_ME.dtype)
    (x_QEl,) = mosaic.launch(kernel, (out,), x_ME.reshape(-1, *lines), sources_Q, interpret=interpret)
    return x_QEl.reshape(-1, x_ME.shape[1])


def refusal(width: int, inner: int) -> str | None:
    """Why experts of such widths are not served, or None; of packed ones `packed_experts` says it, too."""
    if width % TILE or inner % TILE:
        return f"experts must be multiples of {TILE} wide, got {width} and {inner}"
    return None if width <= _WIDEST else f"rows must be at most {_WIDEST} wide, got {width}"


def slot_rows(m: int, per_token: int, count: int, most: int = _MOST_ROWS) -> int:
    """Rows of a slot: so many that most experts need one, or as few as rows that they have on average fill."""
    mean = m * per_token / count
    likely = mean + 2 * math.sqrt(mean)  # random choices scatter by the root
    pieces = -(-likely // most)
    return max(8, round_up(math.ceil(likely / pieces), 8))


def _run(
    kind: Literal["up", "down"], x_QK: jax.Array, weight: jax.Array | Packed, experts_S: jax.Array, used_1: jax.Array,
    rows: int, bias: jax.Array | None, gates: Gates | None, interpret: Any,
) -> jax.Array:  # fmt: skip
    """A launch: the results' rows of one of both products."""
    whole = not isinstance(weight, Packed)
    count, inputs, outputs = weight.shape if whole else (len(weight.values), *weight.shape)
    columns, row_bytes = outputs // (2 if kind == "up" else 1), 2 * BLOCK if whole else unpack.row_bytes(weight.kind)
    kernel = _Kernel(
        kind=kind, dtype=_WHOLE if whole else weight.kind, shape=(rows, inputs), columns=columns,
        groups=0 if whole else weight.groups, slots=len(experts_S), gates=gates,
        by_slots=inputs * outputs * row_bytes > _CACHED * BLOCK, interpret=interpret is not None,
    )  # fmt: skip
    half = TILE // 2
    if whole:
        values, scale = weight, used_1
    else:
        values = weight.values.reshape(-1, half, inputs)
        scale = weight.scale
        if kernel.by_blocks:
            scale = scale.reshape(count, weight.groups, outputs // half, 1, half)
    out = jax.ShapeDtypeStruct((x_QK.shape[0], columns), x_QK.dtype)
    ins = x_QK, values, scale, experts_S, used_1, *(() if bias is None else (bias,))
    return mosaic.launch(kernel, (out,), *ins, interpret=interpret)[0]


def mix(
    x_ME: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array, gate_up: jax.Array | Packed,
    down: jax.Array | Packed, *, gates: Gates | None = None, gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """See packed_experts.mix; experts may be of bfloat16 as well, and rows must be more than PIECE."""
    (m, k), count = experts_MK.shape, len(gate_up.values if isinstance(gate_up, Packed) else gate_up)
    quarters = any(isinstance(w, Packed) and packed.pieces(w.shape[0], w.groups) == 4 for w in (gate_up, down))
    rows = slot_rows(m, k, count, _MOST_OF_QUARTERS if quarters else _MOST_ROWS)
    plan = packed_experts.plan(experts_MK, count, rows)
    assert plan.sources_Q is not None
    x_QE = _at_places(x_ME, plan.sources_Q, interpret)
    used_1 = jnp.sum(plan.experts_S >= 0, dtype=jnp.int32)[None]
    run = functools.partial(_run, experts_S=plan.experts_S, used_1=used_1, rows=rows, interpret=interpret)
    hidden_QF = run("up", x_QE, gate_up, bias=gate_up_bias, gates=gates)
    y_QE = run("down", hidden_QF, down, bias=down_bias, gates=None)
    return packed_experts.weighed(jnp.take(y_QE, plan.places_MK, axis=0, mode="clip"), weights_MK)


__all__ = ["mix", "refusal"]
