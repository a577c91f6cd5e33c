"""Experts in few bits for few rows on Mosaic GPU: each that any row uses is read once, packed, with its scales.

Two launches (`packed_experts` has their specification in plain XLA): gate and up of an expert for its rows, with biases
and what gates make of ups; and its down. XLA says before which rows each expert has (`packed_experts.plan`), and sums a
row's experts after, weighted, in the order of the choice. Where a kernel has picked the experts (`experts.pick`) the
first launch divides by the norm's root mean square as well, and kernels find the rows and sum the results, too
(`gpu_picks`). A program has a tile of 32 pairs of columns of one expert (gate and up; a column of either half of
down's), which two warpgroups share: they take turns at its inputs (`packed_walk`, as all products of packed weights).
Up to 8 rows of the pass stand beside one another for every expert; of more each expert has its own, copied together, in
slots of 8: what an expert's second slot reads lies in the second-level cache. A row's bits depend on neither.
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
from pallas_kernels.small_batch import experts, gpu_picks, mosaic, packed, packed_experts
from pallas_kernels.small_batch.experts import GROUP, Picks
from pallas_kernels.small_batch.mosaic import F32, flipped, load
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.packed_experts import PIECE, Gates
from pallas_kernels.small_batch.packed_walk import COLUMNS, HALF, Walk
from pallas_kernels.small_batch.reference import Stream

#: Inputs of a line in which one row lies in shared memory: what experts' widths are multiples of.
_LINE = 64
#: Warpgroups of a program.
_TEAMS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel(Walk):
    """One launch; `shape` has the rows of a slot, and an expert's inputs as they are packed.

    Attributes:
      kind: "up" or "down". slots_in_use: experts, or their pieces, that there may be. every: whether rows are the same
        for all of them; else each slot has its own, one slot after the other.
      gates: see packed_experts.mix. biased: whether columns have a bias.
      padded: whether results have PIECE rows for each slot, whatever its own.
      inverse: whether rows are divided by their root mean squares, whose inverses each slot has.
      stride: from one slot's expert to the next one's, where they are listed.
    """

    kind: Literal["up", "down"]
    slots_in_use: int
    every: bool
    gates: Gates | None = None
    biased: bool = False
    padded: bool = False
    inverse: bool = False
    stride: int = 1

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
        return _TEAMS

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
        out["ready"] = plgpu.Barrier(num_barriers=1, num_arrivals=2 + self.alone + (self.eps is not None))
        out["out"] = plgpu.SMEM((2 if self.kind == "down" else 1, self.rows, COLUMNS), rows_dtype)
        return out

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """A warpgroup of a program."""
        if not self.early:
            overlap.wait(self.interpret)
            overlap.begin(self.interpret)
        program = lax.axis_index("program")
        slot, tile = lax.div(program, self.across), lax.rem(program, self.across)
        expert = ins[3][slot * self.stride]
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
        squares_TR, beside = beside[:normed], beside[normed:]
        inverse_ST, bias_XN = beside[: self.inverse], beside[self.inverse :]
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
                plgpu.copy_gmem_to_smem(ref, shared["squares"], ready)

        if not self.alone:
            self.fill(team, mine, copy_rows, end=self.early)
        self.fill(team, mine, copy, begin=self.early)
        # Too few bytes for the copy engine.
        biases = [
            load(ref.at[expert, pl.ds(c, COLUMNS)], HALF.reduce(1)).astype(F32) for ref in bias_XN for c in columns
        ]
        own = pl.ds(0, self.rows)
        inverses = [load(ref.at[lax.div(program, self.across), own], HALF.reduce(0)) for ref in inverse_ST]
        plgpu.barrier_wait(ready)
        self.add_squares(team, shared)
        total = self.total(team, mine, copy, shared)
        self.join(team, total, shared, lambda: self.finish(columns, to, outs, shared, biases, inverses, x.dtype))

    def finish(
        self, columns: Any, begin: Any, outs: Any, shared: Any, biases: Any, inverses: Any, dtype: Any
    ) -> None:  # fmt: skip
        """From the sums to the results."""
        along = lambda v: plgpu.layout_cast(lax.broadcast_in_dim(v, (COLUMNS, self.rows), (0,)), HALF)
        parts = self.totals(0, shared, HALF)
        if self.dtype == packed.FLOAT4:
            parts = [y * 2.0**packed.EXPONENT for y in parts]
        elif self.once:
            scales = [load(shared["scale"].at[0, i, 0], HALF.reduce(1)) for i in range(2)]
            parts = [y * along(scale) for y, scale in zip(parts, scales, strict=True)]
        if self.eps is not None:
            self.wait_norm(shared)
            inverses = [self.inverse_rms(shared)]
        for inverse in inverses:
            inverse = plgpu.layout_cast(lax.broadcast_in_dim(inverse, (COLUMNS, self.rows), (1,)), HALF)
            parts = [y * inverse for y in parts]
        # As XLA does: products are rounded to the rows' dtype, and what follows is computed in float32.
        rounded = lambda y: y.astype(dtype).astype(F32)
        parts = [rounded(y) for y in parts]
        if self.biased:
            parts = [rounded(y + along(bias)) for y, bias in zip(parts, biases, strict=True)]
        if self.kind == "up":
            parts = [packed_experts.gated(parts[0], parts[1], self.gates)]
        out, each = shared["out"], PIECE if self.padded else self.shape[0]
        for i, y in enumerate(parts):
            mosaic.write(flipped(out.at[i]), y.astype(dtype))
        plgpu.commit_smem()
        for i in range(len(parts)):
            target = outs[0].at[pl.ds(begin, each), pl.ds(columns[i], COLUMNS)]
            plgpu.copy_smem_to_gmem(out.at[i, pl.ds(0, each)], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _run(
    kind: Literal["up", "down"], x: jax.Array, weight: Packed, experts_S: jax.Array, slots: int, rows: int,
    bias: jax.Array | None = None, *, every: bool, gates: Gates | None = None, squares: jax.Array | None = None,
    eps: float | None = None, inverse: jax.Array | None = None, padded: bool = False, stride: int = 1, interpret: Any,
) -> jax.Array:  # fmt: skip
    """A launch: the results' rows of one of both products.

    Args:
      experts_S: of each slot, at least `slots`, `stride` apart. rows: of a slot.
      squares, eps: of a norm before (see reference.Stream). inverse: of the slots' rows, instead.
    """
    count, columns, inputs = weight.values.shape
    kernel = _Kernel(
        kind=kind, dtype=weight.kind, shape=(rows, inputs), columns=columns, groups=weight.groups, slots_in_use=slots,
        every=every, gates=gates, biased=bias is not None, padded=padded, interpret=interpret is not None, eps=eps,
        squares=0 if squares is None else squares.shape[0], width=x.shape[1], inverse=inverse is not None,
        stride=stride,
    )  # fmt: skip
    results = slots * (PIECE if padded else rows), columns // (2 if kind == "up" else 1)
    out = jax.ShapeDtypeStruct(results, x.dtype)
    x = x.reshape(x.shape[0], -1, _LINE) if kernel.alone else x
    values = weight.values.reshape(2 * count, columns // 2, inputs)
    ins = x, values, weight.scale, experts_S, *(array for array in (squares, inverse, bias) if array is not None)
    return mosaic.launch(kernel, (out,), *ins, interpret=interpret)[0]


def mix(
    x_ME: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array, gate_up: Packed, down: Packed, *,
    gates: Gates | None = None, gate_up_bias: jax.Array | None = None, down_bias: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """See packed_experts.mix."""
    rows = min(len(experts_MK), PIECE)
    plan = packed_experts.plan(experts_MK, gate_up.values.shape[0], rows)
    if plan.sources_Q is not None:
        x_ME = jnp.take(x_ME, plan.sources_Q, axis=0, mode="fill", fill_value=0)
    slots = plan.experts_S.shape[0]
    run = functools.partial(_run, experts_S=plan.experts_S, slots=slots, rows=rows, interpret=interpret)
    hidden_QF = run("up", x_ME, gate_up, bias=gate_up_bias, every=plan.sources_Q is None, gates=gates)
    y_QE = run("down", hidden_QF, down, bias=down_bias, every=False, gates=None)
    return packed_experts.weighed(jnp.take(y_QE, plan.places_MK, axis=0, mode="clip"), weights_MK)


def mix_picked(
    stream: Stream, picks: Picks, per_token: int, gate_up: Packed, down: Packed, gain_E: jax.Array, eps: float, *,
    interpret: Any = None,
) -> Stream:  # fmt: skip
    """See packed_experts.mix_picked."""
    m, count, tiles = stream.h_ME.shape[0], gate_up.values.shape[0], stream.squares_TR.shape[0]
    order_S, begins_X, stride = picks.order_X, picks.begins_X, 1
    norm: dict[str, Any] = {"squares": stream.squares_TR, "eps": eps}
    x_QE, slots, every = stream.scaled_ME, experts.slots(m, per_token, count), m <= GROUP
    if m == 1:
        order_S, stride = picks.experts_GP.reshape(-1), GROUP
    elif not every:
        slots = packed_experts.most_slots(m, per_token, count, PIECE)
        x_QE, inverse_ST, order_S, begins_X = gpu_picks.plan(
            stream, picks, slots, per_token, count, math.gcd(_TEAMS, tiles), eps, interpret=interpret
        )  # fmt: skip
        norm = {"inverse": inverse_ST}
    assert order_S is not None
    run = functools.partial(
        _run, experts_S=order_S, slots=slots, rows=min(m, PIECE), stride=stride, interpret=interpret
    )  # fmt: skip
    hidden_QF = run("up", x_QE, gate_up, every=every, **norm)
    y_QE = run("down", hidden_QF, down, every=False, padded=True)
    return gpu_picks.finish(stream, y_QE, picks, begins_X, per_token, gain_E, every=every, interpret=interpret)


__all__ = ["mix", "mix_picked"]
