"""From what a router has picked to the rows that packed experts read, and from their results to the stream.

Two launches around those of `gpu_packed_experts`. Of more than a group of rows `_Plan` finds which rows each expert
has, in slots of PIECE, and copies them together: a slot is a program's, and each finds all slots anew, which is less
than telling one another. `_Finish` finds the results of a group's rows, weighs and sums them in the order of the
choice, and adds them to the stream, a tile of features and a group to each program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import mosaic, unpack
from pallas_kernels.small_batch.experts import GROUP, MOST_PICKED, Picks
from pallas_kernels.small_batch.mosaic import F32, SUMS, along_columns, along_rows, flipped, load
from pallas_kernels.small_batch.packed_experts import PIECE
from pallas_kernels.small_batch.reference import TILE, Stream

#: Pairs of a group's rows and their experts.
_PAIRS = GROUP * MOST_PICKED
assert _PAIRS == TILE and GROUP == PIECE  # as the layout of sums has them


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=SUMS)


def _zeros(shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, F32), SUMS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Rows copied together for their experts' slots [slots * PIECE, lines, TILE], the inverse of their root mean
    squares [slots, TILE], of which PIECE count, each slot's expert, and how many slots are before each expert's.

    Attributes:
      rows: R, whole groups. width: E. slots: that there may be. count: of experts. per_token: of a row.
      tiles: of sums of squares, which `sharers` add up each a share of (see Walk.sharers).
    """

    rows: int
    width: int
    slots: int
    count: int
    per_token: int
    tiles: int
    sharers: int
    eps: float
    interpret: bool

    name, teams = "packed_experts_plan", 1

    @property
    def programs(self) -> int:
        return self.slots

    @property
    def groups(self) -> int:
        """Of rows."""
        return self.rows // GROUP

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        return {
            "picks": plgpu.SMEM((self.groups, _PAIRS), jnp.int32),
            "squares": plgpu.SMEM((self.tiles, self.rows), F32),
            "shares": plgpu.SMEM((self.sharers, self.rows), F32),
            "chosen": plgpu.SMEM((self.count, TILE), F32),
            "slots": plgpu.SMEM((self.count,), F32),
            "begins": plgpu.SMEM((self.count,), F32),
            "before": plgpu.SMEM((self.count,), jnp.int32),
            "order": plgpu.SMEM((round_up(self.slots, TILE),), jnp.int32),
            "expert": plgpu.SMEM((GROUP,), jnp.int32),
            "sources": plgpu.SMEM((TILE,), jnp.int32),
            "inverse": plgpu.SMEM((TILE,), F32),
            "x": plgpu.SMEM((PIECE, self.width // TILE, TILE), dtype),
            "ready": plgpu.Barrier(num_barriers=1, num_arrivals=2),
            "there": plgpu.Barrier(num_barriers=1, num_arrivals=PIECE),
        }

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel."""
        _, squares_TR, picks_GP = ins
        program, ready = lax.axis_index("program"), shared["ready"].at[0]
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)
        plgpu.copy_gmem_to_smem(picks_GP, shared["picks"], ready)
        plgpu.copy_gmem_to_smem(squares_TR, shared["squares"], ready)
        plgpu.barrier_wait(ready)
        self.find(shared)

        @pl.when(program == 0)
        def _() -> None:
            self.order(shared)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(shared["order"], outs[2])
            plgpu.copy_smem_to_gmem(shared["before"], outs[3])

        shape = self.count, GROUP
        begins, slots = (along_columns(load(shared[name], SUMS.reduce(1)), GROUP) for name in ("begins", "slots"))
        mine = self.here(begins, slots, program)
        expert = jnp.max(jnp.where(mine, _iota(shape, 0), -1), axis=0)
        mosaic.write(shared["expert"], expert)
        expert = shared["expert"][0]
        pl.when(expert >= 0)(lambda: self.bring(ins, outs, shared, program, expert))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def find(self, shared: dict[str, Any]) -> None:
        """Which rows each expert has, its slots, and those before."""
        shape = self.count, GROUP
        experts, rows = _iota(shape, 0), _zeros(shape)
        for group in range(TILE // GROUP):
            own = _zeros(shape)
            for i in range(self.per_token if group < self.groups else 0):
                picked = load(shared["picks"].at[group, pl.ds(i * GROUP, GROUP)], SUMS.reduce(0))
                own = jnp.where(experts == along_rows(picked, self.count), 1.0, own)
            mosaic.write(shared["chosen"].at[:, pl.ds(group * GROUP, GROUP)], own)
            rows = rows + own
        rows_X = jnp.sum(rows, axis=1)
        slots_X = jnp.zeros_like(rows_X)
        for i in range(0, self.rows, PIECE):
            slots_X = slots_X + jnp.where(rows_X > i, 1.0, 0.0)
        mosaic.write(shared["slots"], slots_X)
        slots = along_rows(load(shared["slots"], SUMS.reduce(0)))
        for part in range(0, self.count, TILE):
            shape = TILE, self.count
            begins = jnp.sum(jnp.where(_iota(shape, 1) < _iota(shape, 0) + part, slots, 0.0), axis=1)
            mosaic.write(shared["begins"].at[pl.ds(part, TILE)], begins)
            mosaic.write(shared["before"].at[pl.ds(part, TILE)], begins.astype(jnp.int32))

    def here(self, begins: jax.Array, slots: jax.Array, at: Any) -> jax.Array:
        """Whether a slot is one of an expert's."""
        ahead = begins.astype(jnp.int32)
        return (ahead <= at) & (at < ahead + slots.astype(jnp.int32))

    def order(self, shared: dict[str, Any]) -> None:
        """Each slot's expert."""
        shape = TILE, self.count
        begins, slots = (along_rows(load(shared[name], SUMS.reduce(0))) for name in ("begins", "slots"))
        for part in range(0, round_up(self.slots, TILE), TILE):
            mine = self.here(begins, slots, _iota(shape, 0) + part)
            found = jnp.sum(jnp.where(mine, (_iota(shape, 1) + 1).astype(F32), 0.0), axis=1)
            mosaic.write(shared["order"].at[pl.ds(part, TILE)], found.astype(jnp.int32) - 1)

    def bring(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any], slot: Any, expert: Any) -> None:
        """The rows of a slot."""
        shape = TILE, self.rows
        begin = (slot - shared["before"][expert]) * PIECE
        chosen_R = load(shared["chosen"].at[expert, pl.ds(0, self.rows)], SUMS.reduce(0))
        earlier = along_columns(load(shared["chosen"].at[expert], SUMS.reduce(1)), self.rows)
        rank_R = jnp.sum(jnp.where(_iota(shape, 0) < _iota(shape, 1), earlier, 0.0), axis=0)
        wanted = (_iota(shape, 0) + begin).astype(F32)
        mine = (along_rows(rank_R) == wanted) & (along_rows(chosen_R) > 0.0)
        sources = jnp.sum(jnp.where(mine, (_iota(shape, 1) + 1).astype(F32), 0.0), axis=1)
        mosaic.write(shared["sources"], sources.astype(jnp.int32))
        for i in range(PIECE):  # where there is none any row: its results are nobody's
            row = jnp.maximum(shared["sources"][i] - 1, 0)
            plgpu.copy_gmem_to_smem(ins[0].at[row], shared["x"].at[i], shared["there"].at[0])
        # In the order in which kernels that norm their own rows add.
        each = self.tiles // self.sharers
        for i in range(self.sharers):
            share = mosaic.summed_tiles(shared["squares"], i * each, each, SUMS.reduce(0))
            mosaic.write(shared["shares"].at[i], share)
        inverse = along_rows(mosaic.inverse_rms(shared["shares"], self.width, self.eps, SUMS.reduce(0)))
        mosaic.write(shared["inverse"], jnp.sum(jnp.where(mine, inverse, 0.0), axis=1))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared["inverse"], outs[1].at[slot])  # less the copy engine does not take
        plgpu.barrier_wait(shared["there"].at[0])
        plgpu.copy_smem_to_gmem(shared["x"], outs[0].at[pl.ds(slot * PIECE, PIECE)])


def plan(
    stream: Stream, picks: Picks, slots: int, per_token: int, count: int, sharers: int, eps: float, *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """See `_Plan`: (rows [slots * PIECE, E], inverse, order, begins); of slots without rows anything."""
    rows, width = stream.scaled_ME.shape
    assert rows <= TILE, rows
    kernel = _Plan(
        rows=rows, width=width, slots=slots, count=count, per_token=per_token, tiles=stream.squares_TR.shape[0],
        sharers=sharers, eps=eps, interpret=interpret is not None,
    )  # fmt: skip
    lines = width // TILE, TILE
    outs = (
        jax.ShapeDtypeStruct((slots * PIECE, *lines), stream.scaled_ME.dtype),
        jax.ShapeDtypeStruct((slots, TILE), F32),
        jax.ShapeDtypeStruct((round_up(slots, TILE),), jnp.int32),
        jax.ShapeDtypeStruct((count,), jnp.int32),
    )
    ins = stream.scaled_ME.reshape(rows, *lines), stream.squares_TR, picks.experts_GP
    x, *others = mosaic.launch(kernel, outs, *ins, interpret=interpret)
    return (x.reshape(slots * PIECE, width), *others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Finish:
    """The stream with what picked experts gave added, weighed.

    Attributes:
      rows: M, at most GROUP or whole groups: of one the slots are its experts, in their order. width: E.
      count: of experts. per_token: of a row. every: whether each slot has all rows.
    """

    rows: int
    width: int
    count: int
    per_token: int
    every: bool
    interpret: bool

    name, teams = "packed_experts_finish", 1

    @property
    def groups(self) -> int:
        """Of rows."""
        return round_up(self.rows, GROUP) // GROUP

    @property
    def programs(self) -> int:
        return self.groups * (self.width // TILE)

    @property
    def here(self) -> int:
        """Rows of a group."""
        return min(self.rows, GROUP)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        copies = 1 if self.rows == 1 else self.per_token * self.here
        lists = {
            "picks": plgpu.SMEM((self.groups, _PAIRS), jnp.int32),
            "begins": plgpu.SMEM((self.count,), jnp.int32),
            "places": plgpu.SMEM((_PAIRS,), jnp.int32),
        }
        return {
            **(lists if self.rows > 1 else {}),
            "weights": plgpu.SMEM((_PAIRS,), F32),
            "parts": plgpu.SMEM((self.per_token, GROUP, TILE), dtype),
            "listed": plgpu.Barrier(num_barriers=1, num_arrivals=1 if self.rows == 1 else 3),
            "ready": plgpu.Barrier(num_barriers=1, num_arrivals=copies + 2),
            **mosaic.added(GROUP, dtype),
        }

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel."""
        h_ME, results, gain_E, weights_GP, *lists = ins
        program, tiles = lax.axis_index("program"), self.width // TILE
        group, tile = lax.div(program, tiles), lax.rem(program, tiles)
        own, listed, ready = pl.ds(tile * TILE, TILE), shared["listed"].at[0], shared["ready"].at[0]
        # The choice was there before the kernels began that this one waits for.
        plgpu.copy_gmem_to_smem(weights_GP.at[group], shared["weights"], listed)
        for name, ref in zip(("picks", "begins"), lists, strict=False):
            plgpu.copy_gmem_to_smem(ref, shared[name], listed)
        plgpu.barrier_wait(listed)
        if self.rows > 1:
            self.place(group, shared)
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)
        mine = pl.ds(group * GROUP, GROUP)  # of fewer rows the copy engine fills up with zeros
        plgpu.copy_gmem_to_smem(h_ME.at[mine, own], shared["h"], ready)
        plgpu.copy_gmem_to_smem(gain_E.at[own], shared["gain"], ready)

        def bring(at: Any, _: Any) -> tuple[()]:
            pick, row = lax.div(at, jnp.int32(self.here)), lax.rem(at, jnp.int32(self.here))
            source = results.at[shared["places"][pick * GROUP + row], tile]
            plgpu.copy_gmem_to_smem(source, shared["parts"].at[pick, row], ready)
            return ()

        if self.rows == 1:
            plgpu.copy_gmem_to_smem(results.at[:, :, own], shared["parts"], ready)
        else:
            lax.fori_loop(0, self.per_token * self.here, bring, ())
        plgpu.barrier_wait(ready)
        times = functools.partial(unpack.times, layout=SUMS, interpret=self.interpret)
        total = _zeros((TILE, GROUP))
        for i in range(self.per_token):
            at = pl.ds(i * GROUP, GROUP)
            weights = load(shared["weights"].at[at], SUMS.reduce(0))
            if lists:  # else there is one row, and others are not stored
                there = load(shared["picks"].at[group, at], SUMS.reduce(0)) >= 0
                weights = jnp.where(there, weights, 0.0)
            weights = along_rows(weights)
            y = load(flipped(shared["parts"].at[i]), SUMS).astype(F32)
            # What no expert wrote, or of rows that are none, may be anything.
            total = total + jnp.where(weights != 0.0, times(y, weights), 0.0)
        targets = [out.at[pl.ds(group * GROUP, self.here)] for out in outs[:2]]
        targets.append(outs[2].at[:, pl.ds(group * GROUP, GROUP)])
        mosaic.add_and_store(tile, total.astype(h_ME.dtype).astype(F32), targets, shared, self.here, times)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def place(self, group: Any, shared: dict[str, Any]) -> None:
        """Where the results of the group's pairs are."""
        shape = _PAIRS, GROUP
        row = lax.rem(_iota(shape, 0), jnp.int32(GROUP))
        own_P = load(shared["picks"].at[group], SUMS.reduce(1))
        if self.every:
            rank_P = jnp.sum(jnp.where(_iota(shape, 1) < row, 1.0, 0.0), axis=1)
        else:
            own, ranks = along_columns(own_P, GROUP), _zeros(shape)
            for other in range(self.groups):
                earlier, same = _iota(shape, 1) + other * GROUP < row + group * GROUP, _zeros(shape)
                for i in range(self.per_token):
                    at = pl.ds(i * GROUP, GROUP)
                    picked = along_rows(load(shared["picks"].at[other, at], SUMS.reduce(0)))
                    same = jnp.where(own == picked, 1.0, same)  # once, as `_Plan` counts it
                ranks = ranks + jnp.where(earlier, same, 0.0)
            rank_P = jnp.sum(ranks, axis=1)
        shape, begin_P = (_PAIRS, TILE), jnp.zeros_like(rank_P)
        for part in range(0, self.count, TILE):
            begins = load(shared["begins"].at[pl.ds(part, TILE)], SUMS.reduce(0)).astype(F32)
            mine = along_columns(own_P, TILE) == _iota(shape, 1) + part
            begin_P = begin_P + jnp.sum(jnp.where(mine, along_rows(begins), 0.0), axis=1)
        mosaic.write(shared["places"], (begin_P * PIECE + rank_P).astype(jnp.int32))


def finish(
    stream: Stream, y_QE: jax.Array, picks: Picks, begins_X: jax.Array | None, per_token: int, gain_E: jax.Array, *,
    every: bool, interpret: Any = None,
) -> Stream:  # fmt: skip
    """See `_Finish`; `y_QE` has PIECE rows for each slot. `begins_X`: None of one row."""
    m, width = stream.h_ME.shape
    lists = () if begins_X is None else (picks.experts_GP, begins_X)
    assert (m == 1) == (not lists), m
    kernel = _Finish(
        rows=m, width=width, count=0 if begins_X is None else begins_X.shape[0], per_token=per_token, every=every,
        interpret=interpret is not None,
    )  # fmt: skip
    same = jax.ShapeDtypeStruct((m, width), stream.h_ME.dtype)
    squares = jax.ShapeDtypeStruct((width // TILE, round_up(m, GROUP)), F32)
    y = y_QE.reshape(-1, PIECE, width) if m == 1 else y_QE.reshape(-1, width // TILE, TILE)
    ins = stream.h_ME, y, gain_E, picks.weights_GP, *lists
    return Stream(*mosaic.launch(kernel, (same, same, squares), *ins, interpret=interpret))


__all__ = ["finish", "plan"]
