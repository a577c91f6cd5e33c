"""A mixture of experts for few rows on Mosaic GPU: every expert that any row uses is read once, and no other.

Three launches behind a choice of `gpu_router` (`experts` has their specification in plain XLA): gate and up of one
expert in use for all rows, SwiGLU, and the rows' weights of that expert, zero where they do not use it (`_Up`); the
products with the experts' down, summed over experts in registers, a share of every expert's inner width each (`_Down`);
the sum of the shares and the residual (`_Finish`). A row meets its experts in the order of their numbers, and others
add zeros, so its bits do not depend on the rows beside it.
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

from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import experts, mosaic, unpack
from pallas_kernels.small_batch.experts import Choice
from pallas_kernels.small_batch.mosaic import F32, SUMS, along_rows, flipped, load
from pallas_kernels.small_batch.reference import TILE, Stream

#: Slots of a ring where programs share a multiprocessor, and of any.
_SHARED_STAGES, _MAX_STAGES = 6, 11


@dataclasses.dataclass(frozen=True)
class _Up:
    """Gate and up of the experts in use, and what SwiGLU and rows' weights make of them, [slots, M, F].

    Attributes:
      shape: (M, K) of the rows. inner: F. slots: experts that may be in use. squares: tiles of the norm.
    """

    shape: tuple[int, int]
    inner: int
    slots: int
    eps: float
    squares: int

    name, teams = "experts_up", 1

    @property
    def programs(self) -> int:
        return self.slots * (self.inner // TILE)

    @property
    def stages(self) -> int:
        stage = (2 * TILE + round_up(self.shape[0], 8)) * TILE * 2
        alone = self.programs <= mosaic.MULTIPROCESSORS
        room = mosaic.room(self.beside(jnp.bfloat16)) // stage if alone else _SHARED_STAGES
        return max(2, min(_MAX_STAGES, room, self.shape[1] // TILE))

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        rows = round_up(self.shape[0], 8)
        return {
            "x": plgpu.SMEM((self.stages, rows, TILE), dtype, transforms=mosaic.tiled(TILE)),
            "w": plgpu.SMEM((self.stages, 2, TILE, TILE), dtype, transforms=mosaic.tiled(TILE)),
            "full": plgpu.Barrier(num_barriers=self.stages, num_arrivals=3),
            **self.beside(dtype),
        }

    def beside(self, dtype: Any) -> dict[str, Any]:
        """What is there besides the ring."""
        rows = round_up(self.shape[0], 8)
        return {
            "out": plgpu.SMEM((rows, TILE), dtype),
            "squares": plgpu.SMEM((self.squares, rows), F32),
            "ready": plgpu.Barrier(num_barriers=1, num_arrivals=1),
        }

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel."""
        program = lax.axis_index("program")
        across = self.inner // TILE
        expert = ins[2][lax.div(program, across)]

        @pl.when(expert >= 0)
        def _() -> None:
            self.one(program, expert, lax.rem(program, across), ins, outs, shared)

    def one(self, program: Any, expert: Any, tile: Any, ins: Any, outs: Any, shared: dict[str, Any]) -> None:
        """A tile of an expert in use."""
        x_MK, w_XKF, _, squares_TR, weights_XR = ins
        m, steps = self.shape[0], self.shape[1] // TILE
        rows = round_up(m, 8)

        def copy(step: Any, slot: Any) -> None:
            inputs = pl.ds(step * TILE, TILE)
            for part in range(2):
                source = w_XKF.at[expert, inputs, pl.ds(part * self.inner + tile * TILE, TILE)]
                plgpu.copy_gmem_to_smem(source, shared["w"].at[slot, part], shared["full"].at[slot])
            source = x_MK.at[mosaic.all_rows(program, m, rows), inputs]
            plgpu.copy_gmem_to_smem(source, shared["x"].at[slot], shared["full"].at[slot])

        plgpu.copy_gmem_to_smem(squares_TR, shared["squares"], shared["ready"].at[0])
        for step in range(self.stages - 1):
            copy(step, step)
        weights = along_rows(load(weights_XR.at[expert], SUMS.reduce(0)))  # too few bytes for the copy engine
        plgpu.barrier_wait(shared["ready"].at[0])
        inverse = mosaic.inverse_rms(shared["squares"], self.shape[1], self.eps, SUMS.reduce(0))

        run = functools.partial(mosaic.walk, shared=shared, steps=steps, copy=copy)
        accumulators = [plgpu.WGMMAAccumulatorRef((TILE, rows), F32)] * 2
        sums = pl.run_scoped(lambda *totals: run(totals), *accumulators)
        gate, up = ((y * along_rows(inverse)).astype(x_MK.dtype).astype(F32) for y in sums)
        # Rows that do not use the expert: whatever it makes of them is none of their business, not even NaN.
        y = jnp.where(weights != 0.0, gate * lax.logistic(gate) * up * weights, 0.0)
        mosaic.write(flipped(shared["out"].at[:, :]), y.astype(x_MK.dtype))
        plgpu.commit_smem()
        target = outs[0].at[lax.div(program, self.inner // TILE), :, pl.ds(tile * TILE, TILE)]
        plgpu.copy_smem_to_gmem(shared["out"].at[pl.ds(0, m)], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class _Down:
    """Sums over the experts in use of each share of their inner width, [shares, E, R].

    Attributes:
      rows: M. width: E. inner: F. count: of experts.
    """

    rows: int
    width: int
    inner: int
    count: int

    name, teams = "experts_down", 1

    @property
    def shares(self) -> int:
        """As many as there are multiprocessors for, and of whole tiles."""
        tiles = self.width // TILE
        fits = [n for n in range(1, self.inner // TILE + 1) if self.inner % (n * TILE) == 0]
        return max([n for n in fits if n * tiles <= mosaic.MULTIPROCESSORS], default=1)

    @property
    def programs(self) -> int:
        return self.shares * (self.width // TILE)

    @property
    def depth(self) -> int:
        """Inputs of a step."""
        share = self.inner // self.shares
        return max(n for n in (64, 128, 192, 256) if share % n == 0)

    @property
    def stages(self) -> int:
        stage = self.depth * (TILE + round_up(self.rows, 8)) * 2
        return max(2, min(_MAX_STAGES, mosaic.room(self.beside()) // stage))

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        rows = round_up(self.rows, 8)
        return {
            "x": plgpu.SMEM((self.stages, rows, self.depth), dtype, transforms=mosaic.tiled(self.depth)),
            "w": plgpu.SMEM((self.stages, 1, self.depth, TILE), dtype, transforms=mosaic.tiled(TILE)),
            "full": plgpu.Barrier(num_barriers=self.stages, num_arrivals=2),
            **self.beside(),
        }

    def beside(self) -> dict[str, Any]:
        """What is there besides the ring."""
        rows = round_up(self.rows, 8)
        return {
            "out": plgpu.SMEM((TILE, rows), F32),
            "order": plgpu.SMEM((self.count,), jnp.int32),
            "ranks": plgpu.SMEM((self.count,), jnp.int32),
            "ready": plgpu.Barrier(num_barriers=1, num_arrivals=2),
        }

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel."""
        hidden_SMF, down_XFE, order_X, ranks_X = ins
        program, tiles = lax.axis_index("program"), self.width // TILE
        share, tile = lax.div(program, tiles), lax.rem(program, tiles)
        rows, each = round_up(self.rows, 8), self.inner // self.shares // self.depth
        for name, ref in (("order", order_X), ("ranks", ranks_X)):
            plgpu.copy_gmem_to_smem(ref, shared[name], shared["ready"].at[0])
        plgpu.barrier_wait(shared["ready"].at[0])
        steps = shared["ranks"][self.count - 1] * each

        def copy(step: Any, slot: Any) -> None:
            at = lax.div(step, each) if each > 1 else step
            inputs = pl.ds(share * (self.inner // self.shares) + (step - at * each) * self.depth, self.depth)
            source = down_XFE.at[shared["order"][at], inputs, pl.ds(tile * TILE, TILE)]
            plgpu.copy_gmem_to_smem(source, shared["w"].at[slot, 0], shared["full"].at[slot])
            source = hidden_SMF.at[at, mosaic.all_rows(program, self.rows, rows), inputs]
            plgpu.copy_gmem_to_smem(source, shared["x"].at[slot], shared["full"].at[slot])

        for step in range(self.stages - 1):
            pl.when(step < steps)(functools.partial(copy, jnp.int32(step), step))
        run = functools.partial(mosaic.walk, shared=shared, steps=steps, copy=copy)
        [total] = pl.run_scoped(lambda *totals: run(totals), plgpu.WGMMAAccumulatorRef((TILE, rows), F32))
        mosaic.write(shared["out"], total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared["out"], outs[0].at[share, pl.ds(tile * TILE, TILE)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class _Finish:
    """The stream with the sum of `_Down`'s shares added.

    Attributes:
      rows: M. width: E. interpret: see gpu._Kernel.
    """

    rows: int
    width: int
    shares: int
    interpret: bool

    name, teams = "experts_finish", 1

    @property
    def programs(self) -> int:
        return self.width // TILE

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        rows = round_up(self.rows, 8)
        return {
            "parts": plgpu.SMEM((self.shares, TILE, rows), F32),
            "ready": plgpu.Barrier(num_barriers=1, num_arrivals=3),
            **mosaic.added(rows, dtype),
        }

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel."""
        h_ME, parts_SER, gain_E = ins
        program = lax.axis_index("program")
        own, ready = pl.ds(program * TILE, TILE), shared["ready"].at[0]
        rows = mosaic.all_rows(program, self.rows, round_up(self.rows, 8))
        plgpu.copy_gmem_to_smem(parts_SER.at[:, own], shared["parts"], ready)
        plgpu.copy_gmem_to_smem(h_ME.at[rows, own], shared["h"], ready)
        plgpu.copy_gmem_to_smem(gain_E.at[own], shared["gain"], ready)
        plgpu.barrier_wait(ready)
        total = load(shared["parts"].at[0], SUMS)
        for share in range(1, self.shares):
            total = total + load(shared["parts"].at[share], SUMS)
        times = functools.partial(unpack.times, layout=SUMS, interpret=self.interpret)
        mosaic.add_and_store(program, total.astype(h_ME.dtype).astype(F32), outs, shared, self.rows, times)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def mix(
    stream: Stream, choice: Choice, gate_up_XEF: jax.Array, down_XFE: jax.Array, gain_E: jax.Array, eps: float,
    per_token: int, *, interpret: Any = None,
) -> Stream:  # fmt: skip
    """See experts.mix."""
    (m, k), (count, inner, width) = stream.scaled_ME.shape, down_XFE.shape
    slots = experts.slots(m, per_token, count)
    up = _Up((m, k), inner, slots, eps, stream.squares_TR.shape[0])
    hidden = jax.ShapeDtypeStruct((slots, m, inner), stream.h_ME.dtype)
    beside = choice.order_X, stream.squares_TR, choice.weights_XR
    [hidden_SMF] = mosaic.launch(up, (hidden,), stream.scaled_ME, gate_up_XEF, *beside, interpret=interpret)
    down = _Down(m, width, inner, count)
    parts = jax.ShapeDtypeStruct((down.shares, width, round_up(m, 8)), F32)
    beside = choice.order_X, choice.ranks_X
    [parts_SER] = mosaic.launch(down, (parts,), hidden_SMF, down_XFE, *beside, interpret=interpret)
    same = jax.ShapeDtypeStruct((m, width), stream.h_ME.dtype)
    squares = jax.ShapeDtypeStruct((width // TILE, round_up(m, 8)), F32)
    finish = _Finish(m, width, down.shares, interpret is not None)
    ins = stream.h_ME, parts_SER, gain_E
    return Stream(*mosaic.launch(finish, (same, same, squares), *ins, interpret=interpret))
