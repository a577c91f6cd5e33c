"""A router for few rows on Mosaic GPU: which experts rows use, and their weights.

Two launches (`experts` has their specification in plain XLA): a router's product in pieces of its inputs (`_Route`);
from their sum each row's best experts, their weights, and the list of those in use (`_Choose`), or each group's picks.
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
from pallas_kernels.small_batch import mosaic
from pallas_kernels.small_batch.experts import GROUP, MOST_PICKED, Choice, Picks
from pallas_kernels.small_batch.mosaic import F32, SUMS, along_rows, load
from pallas_kernels.small_batch.reference import TILE, Stream

#: Inputs that a program of the router takes.
_PIECE = 128


@dataclasses.dataclass(frozen=True)
class _Route:
    """The router's sums over each piece of its inputs, [pieces, X, R].

    Attributes:
      shape: (M, K) of the rows. count: of experts. interpret: see gpu._Kernel.
    """

    shape: tuple[int, int]
    count: int
    interpret: bool = False

    name, teams = "route", 1

    @property
    def programs(self) -> int:
        return self.shape[1] // _PIECE

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        rows, parts = round_up(self.shape[0], 8), self.count // TILE
        return {
            "x": plgpu.SMEM((1, rows, _PIECE), dtype, transforms=mosaic.tiled(_PIECE)),
            "w": plgpu.SMEM((1, parts, _PIECE, TILE), dtype, transforms=mosaic.tiled(TILE)),
            "full": plgpu.Barrier(num_barriers=1, num_arrivals=parts + 1),
            "out": plgpu.SMEM((self.count, rows), F32),
        }

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel."""
        (x_MK, w_KX), program = ins, lax.axis_index("program")
        rows, parts = round_up(self.shape[0], 8), self.count // TILE
        inputs = pl.ds(program * _PIECE, _PIECE)
        for part in range(parts):
            source = w_KX.at[inputs, pl.ds(part * TILE, TILE)]
            plgpu.copy_gmem_to_smem(source, shared["w"].at[0, part], shared["full"].at[0])
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)
        source = x_MK.at[mosaic.all_rows(program, self.shape[0], rows), inputs]
        plgpu.copy_gmem_to_smem(source, shared["x"].at[0], shared["full"].at[0])
        run = lambda *totals: mosaic.walk(totals, shared, 1, lambda *_: None)
        sums = pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((TILE, rows), F32)] * parts)
        for part, total in enumerate(sums):
            mosaic.write(shared["out"].at[pl.ds(part * TILE, TILE)], total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared["out"], outs[0].at[program])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class _Choose:
    """A `Choice` of the sums of `_Route`, or `Picks`: then each group of rows is a program's.

    Attributes:
      rows: M. width: features of a row. tiles: of sums of squares. pieces: of the router's sums. count: of experts.
      lists: whether Picks are wanted. ordered: whether with the experts in use by number.
    """

    rows: int
    width: int
    tiles: int
    pieces: int
    count: int
    per_token: int
    normalised: bool
    eps: float
    interpret: bool = False
    lists: bool = False
    ordered: bool = True

    name, teams = "choose", 1

    @property
    def programs(self) -> int:
        return self.groups if self.lists else 1

    @property
    def groups(self) -> int:
        """Of rows."""
        return round_up(self.rows, GROUP) // GROUP

    def scratch(self, _: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        rows, picks = self.groups * GROUP, GROUP * MOST_PICKED
        lists = {"picks": plgpu.SMEM((picks,), jnp.int32), "shares": plgpu.SMEM((picks,), F32)}
        return {
            **(lists if self.lists else {"weights": plgpu.SMEM((self.count, rows), F32)}),
            "squares": plgpu.SMEM((self.tiles, rows), F32),
            "used": plgpu.SMEM((self.count,), F32),
            "rank": plgpu.SMEM((self.count,), F32),
            "order": plgpu.SMEM((self.count,), jnp.int32),
            "ranks": plgpu.SMEM((self.count,), jnp.int32),
            "ready": plgpu.Barrier(num_barriers=1, num_arrivals=1),
        }

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel."""
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)
        sums_PXR, squares_TR = ins
        plgpu.copy_gmem_to_smem(squares_TR, shared["squares"], shared["ready"].at[0])
        plgpu.barrier_wait(shared["ready"].at[0])

        if self.lists:
            program = lax.axis_index("program")
            used = self.group(program * GROUP, sums_PXR, shared)
            if self.ordered:
                mosaic.write(shared["used"], used)
                self.compact(shared)
            plgpu.commit_smem()
            for name, out in zip(("picks", "shares"), outs, strict=False):
                plgpu.copy_smem_to_gmem(shared[name], out.at[program])
            for name, out in zip(("order", "ranks"), outs[2:], strict=False):
                plgpu.copy_smem_to_gmem(shared[name], out)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return

        def group(i: Any, used: jax.Array) -> jax.Array:
            return jnp.maximum(used, self.group(i * GROUP, sums_PXR, shared))

        start = plgpu.layout_cast(jnp.zeros((self.count,), F32), SUMS.reduce(1))
        mosaic.write(shared["used"], lax.fori_loop(0, self.groups, group, start))
        self.compact(shared)
        plgpu.commit_smem()
        for name, out in zip(("order", "ranks", "weights"), outs, strict=True):
            plgpu.copy_smem_to_gmem(shared[name], out)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def group(self, begin: Any, sums_PXR: Any, shared: dict[str, Any]) -> jax.Array:
        """The weights of some rows; which experts any of them uses, 1 or 0."""
        shape, own = (self.count, GROUP), pl.ds(begin, GROUP)
        rows_of = functools.partial(along_rows, columns=self.count)
        logits = load(sums_PXR.at[0, :, own], SUMS)
        for piece in range(1, self.pieces):
            logits = logits + load(sums_PXR.at[piece, :, own], SUMS)
        inverse = mosaic.inverse_rms(shared["squares"].at[:, own], self.width, self.eps, SUMS.reduce(0))
        logits = logits * rows_of(inverse)
        before = (self.count - plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=SUMS)).astype(F32)
        there = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=SUMS) + begin < self.rows
        left, chosen, tops = logits, jnp.zeros_like(logits), []
        for i in range(self.per_token):  # of equals the first, as lax.top_k
            tops.append(jnp.max(left, axis=0))
            first = jnp.where(left == rows_of(tops[-1]), before, 0.0)
            if self.lists:  # rows that are none have expert -1, and where logits are NaN any expert is as good
                first = jnp.maximum(jnp.max(jnp.where(there, first, self.count + 1.0), axis=0), 1.0)
                mosaic.write(shared["picks"].at[pl.ds(i * GROUP, GROUP)], (self.count - first).astype(jnp.int32))
            else:
                first = jnp.max(first, axis=0)
            hit = before == rows_of(first)
            left, chosen = jnp.where(hit, -jnp.inf, left), jnp.where(hit, 1.0, chosen)
        chosen = jnp.where(there, chosen, 0.0)
        likely = jnp.exp(logits - rows_of(tops[0]))
        mine = jnp.where(chosen > 0.0, likely, 0.0)
        total = jnp.sum(mine if self.normalised else likely, axis=0)
        if self.lists:
            for i, top in enumerate(tops):
                mosaic.write(shared["shares"].at[pl.ds(i * GROUP, GROUP)], jnp.exp(top - tops[0]) / total)
            along = lambda value, dtype: plgpu.layout_cast(jnp.full((GROUP,), value, dtype), SUMS.reduce(0))
            for i in range(self.per_token, MOST_PICKED):
                mosaic.write(shared["picks"].at[pl.ds(i * GROUP, GROUP)], along(-1, jnp.int32))
                mosaic.write(shared["shares"].at[pl.ds(i * GROUP, GROUP)], along(0.0, F32))
        else:
            mosaic.write(shared["weights"].at[:, own], jnp.where(there, mine / rows_of(total), 0.0))
        return jnp.max(chosen, axis=1)

    def compact(self, shared: dict[str, Any]) -> None:
        """From which experts are in use to their list, in order, and how many there are up to each, or before it."""
        count, part = self.count, (TILE, self.count)
        along = plgpu.broadcasted_iota(jnp.int32, part, 1, layout=SUMS)
        used = along_rows(load(shared["used"], SUMS.reduce(0)))
        for begin in range(0, count, TILE):
            down = plgpu.broadcasted_iota(jnp.int32, part, 0, layout=SUMS) + begin
            rank = jnp.sum(jnp.where(along <= down, used, 0.0), axis=1)
            mosaic.write(shared["rank"].at[pl.ds(begin, TILE)], rank)
            if self.lists:
                rank = rank - load(shared["used"].at[pl.ds(begin, TILE)], SUMS.reduce(1))
            mosaic.write(shared["ranks"].at[pl.ds(begin, TILE)], rank.astype(jnp.int32))
        rank = along_rows(load(shared["rank"], SUMS.reduce(0)))
        for begin in range(0, count, TILE):
            place = plgpu.broadcasted_iota(jnp.int32, part, 0, layout=SUMS) + begin
            mine = (rank == (place + 1).astype(F32)) & (used > 0.0)
            found = jnp.sum(jnp.where(mine, (along + 1).astype(F32), 0.0), axis=1)
            mosaic.write(shared["order"].at[pl.ds(begin, TILE)], found.astype(jnp.int32) - 1)


def choose(
    stream: Stream, router_EX: jax.Array, eps: float, per_token: int, rows: int, *, normalised: bool = True,
    interpret: Any = None,
) -> Choice:  # fmt: skip
    """See experts.choose."""
    ins, kernel = _routed(stream, router_EX, interpret)
    kernel = kernel(rows, per_token=per_token, normalised=normalised, eps=eps)
    list_X = jax.ShapeDtypeStruct((kernel.count,), jnp.int32)
    weights_XR = jax.ShapeDtypeStruct((kernel.count, ins[0].shape[2]), F32)
    return Choice(*mosaic.launch(kernel, (list_X, list_X, weights_XR), *ins, interpret=interpret))


def pick(
    stream: Stream, router_EX: jax.Array, eps: float, per_token: int, rows: int, *, normalised: bool = True,
    interpret: Any = None,
) -> Picks:  # fmt: skip
    """See experts.pick."""
    assert per_token <= MOST_PICKED, per_token
    ins, kernel = _routed(stream, router_EX, interpret)
    kernel = kernel(rows, per_token=per_token, normalised=normalised, eps=eps, lists=True)
    groups, m = ins[0].shape[2] // GROUP, stream.h_ME.shape[0]
    kernel = dataclasses.replace(kernel, ordered=groups == 1 and m > 1)
    lists = [jax.ShapeDtypeStruct((groups, GROUP * MOST_PICKED), kind) for kind in (jnp.int32, F32)]
    by_number = [jax.ShapeDtypeStruct((kernel.count,), jnp.int32)] * (2 if kernel.ordered else 0)
    return Picks(*mosaic.launch(kernel, (*lists, *by_number), *ins, interpret=interpret))


def _routed(stream: Stream, router_EX: jax.Array, interpret: Any) -> tuple[tuple[jax.Array, ...], Any]:
    """What `_Choose` reads, and how to make one for so many rows."""
    (m, k), count = stream.scaled_ME.shape, router_EX.shape[1]
    mosaic.check_rows(m)
    route = _Route((m, k), count, interpret is not None)
    sums = jax.ShapeDtypeStruct((route.programs, count, round_up(m, GROUP)), F32)
    [sums_PXR] = mosaic.launch(route, (sums,), stream.scaled_ME, router_EX, interpret=interpret)
    make = functools.partial(
        _Choose, width=k, tiles=stream.squares_TR.shape[0], pieces=route.programs, count=count,
        interpret=interpret is not None,
    )  # fmt: skip
    return (sums_PXR, stream.squares_TR), make


__all__ = ["choose", "pick"]
