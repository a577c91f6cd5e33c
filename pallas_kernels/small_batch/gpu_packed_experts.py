"""Experts in few bits for few rows on Mosaic GPU: each that any row uses is read once, packed, with its scales.

Two launches (`packed_experts` has their specification in plain XLA): gate and up of an expert for its rows, with biases
and what gates make of ups; and its down. XLA says before which rows each expert has (`packed_experts.plan`), and sums a
row's experts after, weighted, in the order of the choice. Where a kernel has chosen the experts (`experts.choose`) the
first launch divides by the norm's root mean square as well, and a third sums a row's experts and adds the residual, in
the order of their numbers. A program has a tile of 32 pairs of columns of one expert
(gate and up; a column of either half of down's), which two warpgroups share: they take turns at its inputs
(`packed_walk`, as all products of packed weights). Up to 8 rows of the pass stand beside one another for every expert;
of more each expert has its own, copied together, in slots of 8 to 32: what an expert's second slot reads lies in the
second-level cache. A row's bits depend on neither.
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

from pallas_kernels import overlap
from pallas_kernels.small_batch import experts, mosaic, packed, packed_experts, unpack
from pallas_kernels.small_batch.experts import Choice
from pallas_kernels.small_batch.mosaic import F32, SUMS, along_rows, flipped, load
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.packed_experts import PIECE, Gates
from pallas_kernels.small_batch.packed_walk import COLUMNS, HALF, Walk
from pallas_kernels.small_batch.reference import TILE, Stream

#: Inputs of a line in which one row lies in shared memory: what experts' widths are multiples of.
_LINE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel(Walk):
    """One launch; `shape` has the rows of a slot, and an expert's inputs as they are packed.

    Attributes:
      kind: "up" or "down". slots_in_use: experts, or their pieces, that there may be. every: whether rows are the same
        for all of them; else each slot has its own, one slot after the other.
      gates: see packed_experts.mix. biased: whether columns have a bias.
      padded: whether results have PIECE rows for each slot, whatever its own.
    """

    kind: Literal["up", "down"]
    slots_in_use: int
    every: bool
    gates: Gates | None = None
    biased: bool = False
    padded: bool = False

    @property
    def name(self) -> str:
        return f"{self.dtype}_experts_{self.kind}"

    @property
    def parts(self) -> int:
        """See Walk."""
        return 2

    @property
    def teams(self) -> int:
        """See Walk."""
        return 2

    @property
    def neighbours(self) -> int:
        """See Walk."""
        return 2

    @property
    def across(self) -> int:
        """Programs of a slot."""
        return self.columns // (2 * COLUMNS)

    @property
    def programs(self) -> int:
        return self.slots_in_use * self.across

    @property
    def early(self) -> int:
        """Steps of a ring whose weights are asked for before the kernel before has ended: that is gate and up, which
        began when the choice of experts was there."""
        return self.stages if self.kind == "down" and overlap.overlaps(self.interpret) else 0

    def beside(self, rows_dtype: Any) -> dict[str, Any]:
        """See Walk."""
        out = self.sums() | self.norm()
        if self.alone:
            out["x"] = plgpu.SMEM((self.shape[1] // _LINE, _LINE), rows_dtype)
        out["ready"] = plgpu.Barrier(num_barriers=1, num_arrivals=2 + self.alone)
        out["out"] = plgpu.SMEM((2 if self.kind == "down" else 1, self.rows, COLUMNS), rows_dtype)
        return out

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """A warpgroup of a program."""
        if not self.early:
            overlap.wait(self.interpret)
            overlap.begin(self.interpret)
        program = lax.axis_index("program")
        slot, tile = lax.div(program, self.across), lax.rem(program, self.across)
        expert = ins[3][slot]
        begins = slot * self.shape[0], slot * (PIECE if self.padded else self.shape[0])
        pl.when(expert >= 0)(lambda: self.one(program, expert, tile, begins, ins, outs, shared))

    def one(
        self, program: Any, expert: Any, tile: Any, begins: tuple[Any, Any], ins: Any, outs: Any, shared: Any
    ) -> None:
        """A tile of a slot in use.

        Args:
          begins: the first of the slot's rows, and of its results.
        """
        begin, to = begins
        x, w_BNK, scale_XGN, _, *beside = ins
        normed = self.eps is not None
        squares_TR, bias_XN = beside[:normed], beside[normed:]
        team = lax.axis_index("team")
        mine, ready = self.turns(team), shared["ready"].at[0]
        columns = tile * COLUMNS, self.columns // 2 + tile * COLUMNS
        first = program * 0 if self.every else begin

        def copy_rows(turn: Any, slot: Any) -> None:
            if not self.alone:
                source = x.at[pl.ds(first, self.rows), self.stretch(turn, team)]
                plgpu.copy_gmem_to_smem(source, shared["x"].at[slot], shared["full"].at[slot])

        def copy_weights(turn: Any, slot: Any) -> None:
            source = w_BNK.at[pl.ds(expert * 2, 2), pl.ds(columns[0], COLUMNS), self.stretch(turn, team)]
            plgpu.copy_gmem_to_smem(source, shared["w"].at[slot], shared["full"].at[slot])

        def copy(turn: Any, slot: Any) -> None:
            """Of a turn; what lies in the second-level cache first."""
            copy_rows(turn, slot)
            copy_weights(turn, slot)

        def copy_scales() -> None:
            for part, column in enumerate(columns):
                source = scale_XGN.at[expert, :, pl.ds(column, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, shared["scale"].at[0, part], ready)

        if self.early:
            pl.when(team == 0)(copy_scales)
            self.fill(team, mine, copy_weights, end=self.early)
            overlap.wait(self.interpret)
            overlap.begin(self.interpret)

        @pl.when(team == 0)
        def _() -> None:
            if self.alone:  # to whole blocks: the copy engine fills what the row does not have with zeros
                lines = pl.ds(program * 0, self.shape[1] // _LINE)
                plgpu.copy_gmem_to_smem(x.at[first, lines], shared["x"], ready)
            if not self.early:
                copy_scales()
            for ref in squares_TR:
                self.copy_norm(ref, shared)

        if not self.alone:
            self.fill(team, mine, copy_rows, end=self.early)
        self.fill(team, mine, copy, begin=self.early)
        # Too few bytes for the copy engine.
        biases = [
            load(ref.at[expert, pl.ds(c, COLUMNS)], HALF.reduce(1)).astype(F32) for ref in bias_XN for c in columns
        ]
        plgpu.barrier_wait(ready)
        self.add_squares(team, shared)
        total = self.total(team, mine, copy, shared)
        self.join(team, total, shared, lambda: self.finish(columns, to, outs, shared, biases, x.dtype))

    def finish(self, columns: Any, begin: Any, outs: Any, shared: Any, biases: Any, dtype: Any) -> None:
        """From the sums to the results."""
        along = lambda v: plgpu.layout_cast(lax.broadcast_in_dim(v, (COLUMNS, self.rows), (0,)), HALF)
        parts = self.totals(0, shared, HALF)
        if self.dtype == packed.FLOAT4:
            parts = [y * 2.0**packed.EXPONENT for y in parts]
        elif self.groups == 1:
            scales = [load(shared["scale"].at[0, i, 0], HALF.reduce(1)) for i in range(2)]
            parts = [y * along(scale) for y, scale in zip(parts, scales, strict=True)]
        if self.eps is not None:
            self.wait_norm(shared)
            inverse = self.inverse_rms(shared)
            inverse = plgpu.layout_cast(lax.broadcast_in_dim(inverse, (COLUMNS, self.rows), (1,)), HALF)
            parts = [y * inverse for y in parts]
        # As XLA does: products are rounded to the rows' dtype, and what follows is computed in float32.
        rounded = lambda y: y.astype(dtype).astype(F32)
        parts = [rounded(y) for y in parts]
        if self.biased:
            parts = [rounded(y + along(bias)) for y, bias in zip(parts, biases, strict=True)]
        if self.kind == "up":
            parts = [self.gated(*parts)]
        out, each = shared["out"], PIECE if self.padded else self.shape[0]
        for i, y in enumerate(parts):
            mosaic.write(flipped(out.at[i]), y.astype(dtype))
        plgpu.commit_smem()
        for i in range(len(parts)):
            target = outs[0].at[pl.ds(begin, each), pl.ds(columns[i], COLUMNS)]
            plgpu.copy_smem_to_gmem(out.at[i, pl.ds(0, each)], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """See packed_experts.activated."""
        if self.gates is None:
            return gate * lax.logistic(gate) * up
        limit, sharpness = self.gates
        gate, up = jnp.minimum(gate, limit), jnp.maximum(jnp.minimum(up, limit), -limit)
        return (up + 1.0) * gate * lax.logistic(gate * sharpness)


def _run(
    kind: Literal["up", "down"], x: jax.Array, weight: Packed, experts_S: jax.Array, slots: int, rows: int,
    bias: jax.Array | None = None, *, every: bool, gates: Gates | None = None, squares: jax.Array | None = None,
    eps: float | None = None, padded: bool = False, interpret: Any,
) -> jax.Array:  # fmt: skip
    """A launch: the results' rows of one of both products.

    Args:
      experts_S: of each slot, at least `slots`. rows: of a slot.
      squares, eps: of a norm before (see reference.Stream).
    """
    count, columns, inputs = weight.values.shape
    kernel = _Kernel(
        kind=kind, dtype=weight.kind, shape=(rows, inputs), columns=columns, groups=weight.groups, slots_in_use=slots,
        every=every, gates=gates, biased=bias is not None, padded=padded, interpret=interpret is not None, eps=eps,
        squares=0 if squares is None else squares.shape[0], width=x.shape[1],
    )  # fmt: skip
    results = slots * (PIECE if padded else rows), columns // (2 if kind == "up" else 1)
    out = jax.ShapeDtypeStruct(results, x.dtype)
    x = x.reshape(x.shape[0], -1, _LINE) if kernel.alone else x
    values = weight.values.reshape(2 * count, columns // 2, inputs)
    ins = x, values, weight.scale, experts_S, *(array for array in (squares, bias) if array is not None)
    return mosaic.launch(kernel, (out,), *ins, interpret=interpret)[0]


def mix(
    x_ME: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array, gate_up: Packed, down: Packed, *,
    gates: Gates | None = None, gate_up_bias: jax.Array | None = None, down_bias: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """See packed_experts.mix."""
    m, k = experts_MK.shape
    rows = packed_experts.slot_rows(m, k, gate_up)
    plan = packed_experts.plan(experts_MK, gate_up.values.shape[0], rows)
    if plan.sources_Q is not None:
        x_ME = jnp.take(x_ME, plan.sources_Q, axis=0, mode="fill", fill_value=0)
    slots = plan.experts_S.shape[0]
    run = functools.partial(_run, experts_S=plan.experts_S, slots=slots, rows=rows, interpret=interpret)
    hidden_QF = run("up", x_ME, gate_up, bias=gate_up_bias, every=plan.sources_Q is None, gates=gates)
    y_QE = run("down", hidden_QF, down, bias=down_bias, every=False, gates=None)
    return packed_experts.weighed(jnp.take(y_QE, plan.places_MK, axis=0, mode="clip"), weights_MK)


def mix_chosen(
    stream: Stream, choice: Choice, per_token: int, gate_up: Packed, down: Packed, gain_E: jax.Array, eps: float, *,
    interpret: Any = None,
) -> Stream:  # fmt: skip
    """See packed_experts.mix_chosen."""
    (m, width), count = stream.h_ME.shape, gate_up.values.shape[0]
    assert m <= PIECE, m
    slots = experts.slots(m, per_token, count)
    run = functools.partial(_run, experts_S=choice.order_X, slots=slots, rows=m, interpret=interpret)
    hidden_QF = run("up", stream.scaled_ME, gate_up, every=True, squares=stream.squares_TR, eps=eps)
    y_QE = run("down", hidden_QF, down, every=False, padded=True)
    finish = _Finish(m, width, slots, count, interpret is not None)
    same = jax.ShapeDtypeStruct((m, width), stream.h_ME.dtype)
    squares = jax.ShapeDtypeStruct((width // TILE, PIECE), F32)
    ins = stream.h_ME, y_QE.reshape(slots, PIECE, -1), choice.order_X, choice.weights_XR, gain_E
    return Stream(*mosaic.launch(finish, (same, same, squares), *ins, interpret=interpret))


@dataclasses.dataclass(frozen=True)
class _Finish:
    """The stream with the experts' results added, weighted and summed in the order of their numbers.

    Attributes:
      rows: M, at most PIECE. width: E. slots: experts that may be in use. count: of experts.
      interpret: whether registers are pretended.
    """

    rows: int
    width: int
    slots: int
    count: int
    interpret: bool

    name, teams = "packed_experts_finish", 1

    @property
    def programs(self) -> int:
        return self.width // TILE

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        return {
            "parts": plgpu.SMEM((self.slots, PIECE, TILE), dtype),
            "order": plgpu.SMEM((self.count,), jnp.int32),
            "weights": plgpu.SMEM((self.count, PIECE), F32),
            "ready": plgpu.Barrier(num_barriers=1, num_arrivals=5),
            **mosaic.added(PIECE, dtype),
        }

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel."""
        h_ME, y_SRE, order_X, weights_XR, gain_E = ins
        program = lax.axis_index("program")
        own, ready = pl.ds(program * TILE, TILE), shared["ready"].at[0]
        plgpu.copy_gmem_to_smem(order_X, shared["order"], ready)
        plgpu.copy_gmem_to_smem(weights_XR, shared["weights"], ready)
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)
        plgpu.copy_gmem_to_smem(y_SRE.at[:, :, own], shared["parts"], ready)
        plgpu.copy_gmem_to_smem(h_ME.at[mosaic.all_rows(program, self.rows, PIECE), own], shared["h"], ready)
        plgpu.copy_gmem_to_smem(gain_E.at[own], shared["gain"], ready)
        plgpu.barrier_wait(ready)
        times = functools.partial(unpack.times, layout=SUMS, interpret=self.interpret)
        several = math.gcd(self.slots, PIECE)

        def add(turn: Any, total: jax.Array) -> jax.Array:
            for i in range(several):
                slot = turn * several + i
                expert = shared["order"][slot]
                used = jnp.where(expert >= 0, 1.0, 0.0)
                weights = along_rows(load(shared["weights"].at[jnp.maximum(expert, 0)], SUMS.reduce(0)) * used)
                y = load(flipped(shared["parts"].at[slot]), SUMS).astype(F32)
                # What no expert wrote, or of rows that are none, may be anything.
                total = total + jnp.where(weights != 0.0, times(y, weights), 0.0)
            return total

        start = plgpu.layout_cast(jnp.zeros((TILE, PIECE), F32), SUMS)
        total = lax.fori_loop(0, self.slots // several, add, start)
        mosaic.add_and_store(program, total.astype(h_ME.dtype).astype(F32), outs, shared, self.rows, times)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


__all__ = ["mix", "mix_chosen"]
