"""How warpgroups on Hopper walk along the inputs of packed weights, and add up what they find.

A tile is two stretches of 32 columns, or 32 columns of which two warps have the even blocks of 128 inputs and two the
odd ones. A warpgroup has a tile, or several share one and take turns at its inputs. Each has a ring of its own, expands
a block in registers and multiplies it by the rows (`unpack`). A block's sums are scaled and added in float32, a
warpgroup's blocks in their order, then the warpgroups', then even and odd: the same whatever the number of rows. Where
rows are normed before, their division by the root mean square comes after the product.

Owns the rings, the loop, the sums and the mean squares. Must not know what stands after a product.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import lines, mosaic, shares, unpack
from pallas_kernels.small_batch.mosaic import F32, SUMS, load
from pallas_kernels.small_batch.packed import BLOCK, FLOAT4, pieces

#: Columns of a stretch.
COLUMNS = 32
_MAX_STAGES = 8
#: Blocks of a step.
_DEPTHS = 1, 2, 4
#: Rows from which on wgmma multiplies.
_WIDE = 16
#: Inputs up to which one row lies in shared memory whole; a longer one, which all would wait for, comes with weights.
_ALONE = 4096


def half(vector: int) -> Any:
    """[32, rows] over a warpgroup, as `SUMS` but for half of their rows, in vectors of 1 or 2 along them."""
    tiling = plgpu.Tiling(((COLUMNS, 8), (8, 8), (2,), (1,))[: 4 if vector == 1 else 3])
    shift = 1 if vector == 1 else 0
    return plgpu.Layout.TILED(tiling, warp_dims=(-5 - shift,), lane_dims=(-3 - shift, -2 - shift), vector_dim=-1)


HALF = half(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """One launch over packed weights.

    Attributes:
      dtype: of the values, as `Packed.kind`. shape: (M, K) of the rows, the most that a program has. columns: of the
        kernel. groups: of scales. interpret: whether registers are pretended.
      eps: of the norm before, over `squares` tiles of `width` features; None where there is none.
    """

    dtype: str
    shape: tuple[int, int]
    columns: int
    groups: int
    interpret: bool = False
    eps: float | None = None
    squares: int = 0
    width: int = 0

    @property
    def parts(self) -> int:
        """Stretches of columns of a tile."""
        raise NotImplementedError

    @property
    def teams(self) -> int:
        """Warpgroups."""
        raise NotImplementedError

    @property
    def tiles(self) -> int:
        """Of a program."""
        return 1

    @property
    def neighbours(self) -> int:
        """Programs that shall fit into a multiprocessor's shared memory."""
        return 1

    def beside(self, rows_dtype: Any) -> dict[str, Any]:
        """What is in shared memory besides the rings."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        return round_up(self.shape[0], 8)

    @property
    def inputs(self) -> int:
        """Of a step."""
        return self.depth * BLOCK * (2 // self.parts)

    @property
    def blocks(self) -> int:
        """Of inputs, that two of a warpgroup's warps have; of all warpgroups of a tile together."""
        return self.shape[1] * self.parts // (BLOCK * 2)

    @property
    def split(self) -> int:
        """Warpgroups of a tile, which take turns at its inputs."""
        return self.teams // self.tiles

    @property
    def alone(self) -> bool:
        """Whether there is one row, which lies in shared memory whole."""
        return self.shape[0] == 1 and self.shape[1] <= _ALONE

    @property
    def wide(self) -> bool:
        """Whether wgmma multiplies, which reads rows once for a warpgroup where mma reads them for each of its warps.

        Both give the same bits on Hopper. Where warps have different inputs wgmma would multiply all of them twice, and
        rows lie in pieces of 64 inputs.
        """
        return self.parts == 2 and self.rows >= _WIDE and self.pieces <= 2

    @property
    def pieces(self) -> int:
        """Of a block, that have scales of their own."""
        return pieces(self.shape[1], self.groups)

    @property
    def unit(self) -> int:
        """Blocks that a warpgroup takes at its turn, of this shape whatever the rows; all have as many turns."""
        return max((n for n in _DEPTHS if self.blocks % (n * self.split) == 0), default=1)

    @property
    def depth(self) -> int:
        """Blocks of a step."""
        fits = [n for n in _DEPTHS if self.unit % n == 0 and 2 * self.stage(n) * self.teams <= self.budget]
        return max(fits, default=1)

    def stage(self, depth: int) -> int:
        """Bytes of a step."""
        rows = 0 if self.alone else self.rows * BLOCK * 4 // self.parts
        return depth * (unpack.ROWS * unpack.row_bytes(self.dtype) + rows)

    @functools.cached_property
    def budget(self) -> int:
        """Bytes of shared memory for the rings."""
        return mosaic.room(self.beside(jnp.bfloat16), self.neighbours)

    @property
    def stages(self) -> int:
        steps = -(-self.blocks // (self.split * self.depth))
        return max(1, min(_MAX_STAGES, self.budget // (self.stage(self.depth) * self.teams), steps))

    @property
    def slots(self) -> int:
        """Of sums: half of a tile's warpgroups leave theirs to the other half."""
        return self.tiles * max(1, self.split // 2)

    @property
    def once(self) -> bool:
        """Whether scales are of all inputs, for the end of a product."""
        return self.groups == 1 and not unpack.has_words(self.dtype)

    def scratch(self, rows_dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        ring, dtype = self.teams * self.stages, unpack.stored(self.dtype)
        x = plgpu.SMEM((ring, self.rows, self.inputs), rows_dtype, transforms=unpack.rows_transforms())
        return {
            **({} if self.alone else {"x": x}),
            "w": plgpu.SMEM((ring, self.parts, COLUMNS, self.inputs), dtype, transforms=unpack.transforms(dtype)),
            "full": plgpu.Barrier(num_barriers=ring, num_arrivals=1 if self.alone else 2),
            **self.beside(rows_dtype),
        }

    def sums(self) -> dict[str, Any]:
        """What of `beside` every walk needs: scales are float32, or words."""
        scale = jnp.int32 if unpack.has_words(self.dtype) else F32
        out: dict[str, Any] = {
            "sums": plgpu.SMEM((self.slots, unpack.ROWS, self.rows), F32),
            "scale": plgpu.SMEM((self.tiles, self.parts, self.groups, COLUMNS), scale),
        }
        if self.split > 1:
            arrivals = self.split // 2
            out |= {name: plgpu.Barrier(num_barriers=self.tiles, num_arrivals=arrivals) for name in ("half", "summed")}
        return out

    @property
    def sharers(self) -> int:
        """Warpgroups that add up the squares of a norm before."""
        return math.gcd(self.teams, self.squares)

    def norm(self) -> dict[str, Any]:
        """What of `beside` a norm before needs."""
        if self.eps is None:
            return {}
        return {
            "squares": plgpu.SMEM((self.squares, self.rows), F32),
            "shares": plgpu.SMEM((self.sharers, self.rows), F32),
            "added": plgpu.Barrier(num_barriers=1, num_arrivals=self.sharers),
        }

    def add_squares(self, team: Any, shared: dict[str, Any]) -> None:
        """Each warpgroup a share of the squares, which are there."""
        if self.eps is None:
            return

        @pl.when(team < self.sharers)
        def _() -> None:
            count, share = self.squares // self.sharers, shared["shares"].at[team]
            vector, interpret = HALF.reduce(0), self.interpret
            shares.add(shared["squares"], team * count, count, share, vector=vector, interpret=interpret)
            plgpu.barrier_arrive(shared["added"].at[0])

    def wait_norm(self, shared: dict[str, Any]) -> None:
        """Returns when all shares are there; once, before `inverse_rms`."""
        if self.eps is not None:
            plgpu.barrier_wait(shared["added"].at[0])

    def inverse_rms(self, shared: dict[str, Any]) -> jax.Array:
        """Of each row [rows], in the layout of `HALF`'s."""
        assert self.eps is not None
        return mosaic.inverse_rms(shared["shares"], self.width, self.eps, HALF.reduce(0))

    def turns(self, turn_of: Any) -> Any:
        """Steps of a tile's warpgroup of this number."""
        units = self.blocks // self.unit
        return (units - turn_of + self.split - 1) // self.split * (self.unit // self.depth)

    def first(self, turn: Any, turn_of: Any) -> Any:
        """The block that a step begins with."""
        per = self.unit // self.depth
        return ((turn // per) * self.split + turn_of) * self.unit + lax.rem(turn, per) * self.depth

    def stretch(self, turn: Any, turn_of: Any) -> Any:
        """The inputs of a step."""
        return pl.ds(self.first(turn, turn_of) * (2 // self.parts) * BLOCK, self.inputs)

    def fill(
        self, team: Any, mine: Any, copy: Callable[[Any, Any], None], begin: int = 0, end: int | None = None
    ) -> None:
        """Asks for the first steps of a warpgroup's ring, or those from `begin` to `end` of them."""
        for turn in range(begin, self.stages if end is None else end):

            @pl.when(turn < mine)
            def _(turn: int = turn) -> None:
                copy(jnp.int32(turn), team * self.stages + turn)

    def bring(self, source: Any, target: Any, team: Any) -> None:
        """Asks for a warpgroup's share of what the program has in common."""
        lines.copy(source, target, team, self.teams, interpret=self.interpret)

    def bring_scales(
        self, scale_GN: Any, begins: Sequence[Any], own: Any, share: tuple[Any, int], shared: dict[str, Any]
    ) -> None:
        """Asks for a share, of so many, of a tile's scales, whose stretches of columns begin there."""
        for part, begin in enumerate(begins):
            source, target = scale_GN.at[:, pl.ds(begin, COLUMNS)], shared["scale"].at[own, part]
            lines.copy(source, target, *share, interpret=self.interpret)

    def total(self, team: Any, mine: Any, copy: Callable[[Any, Any], None], shared: dict[str, Any]) -> jax.Array:
        """The sums of a warpgroup's steps, float32 [64, rows]; `copy` brings a step into a slot."""
        own, turn_of, rows = team // self.split, lax.rem(team, self.split), self.rows
        scales = shared["scale"].at[own]

        def step(turn: Any, total: jax.Array) -> jax.Array:
            slot = team * self.stages + lax.rem(turn, self.stages)
            plgpu.barrier_wait(shared["full"].at[slot])
            for i, sums in enumerate(self.products(turn, turn_of, slot, scales, shared)):
                if not self.once and self.dtype != FLOAT4:
                    block, piece = self.first(turn, turn_of) + i // self.pieces, i % self.pieces
                    scale = unpack.row_scales(scales, block, self.interpret, piece=piece, pieces=self.pieces)
                    scale = lax.broadcast_in_dim(scale, (unpack.ROWS, rows), (0,))
                    sums = unpack.times(sums, scale, SUMS, self.interpret)
                total = total + sums
            if self.interpret:  # its reads are not those of a warpgroup that meets before it asks
                plgpu.commit_smem()

            @pl.when(turn + self.stages < mine)
            def _() -> None:
                copy(turn + self.stages, slot)

            return total

        start = plgpu.layout_cast(jnp.zeros((unpack.ROWS, rows), F32), SUMS)
        return lax.fori_loop(0, mine, step, start)

    def products(self, turn: Any, turn_of: Any, slot: Any, scales: Any, shared: dict[str, Any]) -> list[jax.Array]:
        """Of each block of a step that lies in a slot, or of each of its pieces, the sums, float32 [64, rows]."""
        tile, first = shared["w"].at[slot], self.first(turn, turn_of)
        if self.wide:
            found, size = [], BLOCK // self.pieces
            for i in range(self.depth * self.pieces):
                block, piece = divmod(i, self.pieces)
                weights = unpack.expanded(
                    tile, self.dtype, self.interpret, scales, number=first + block, block=block, blocks=self.depth,
                    piece=piece, pieces=self.pieces,
                )  # fmt: skip
                x = shared["x"].at[slot, :, pl.ds(i * size, size)]
                found.append(unpack.multiplied(weights, x, self.interpret))
            return found
        begin = first if self.alone or unpack.has_words(self.dtype) else None
        x = shared["x"] if self.alone else shared["x"].at[slot]
        return unpack.products(
            tile, x, self.dtype, self.depth, self.rows, begin, alone=self.alone, scales=scales,
            interpret=self.interpret, pieces=self.pieces,
        )  # fmt: skip

    def join(self, team: Any, total: jax.Array, shared: dict[str, Any], finish: Callable[[], None]) -> None:
        """Leaves the sums of a tile's warpgroups in shared memory, for one of them to finish."""
        own, turn_of, sums = team // self.split, lax.rem(team, self.split), shared["sums"]
        if self.split == 1:
            mosaic.write(sums.at[own], total)
            finish()
            return
        # Half of a tile's warpgroups leave their sums to the others, which add their own.
        others = self.split // 2

        @pl.when(turn_of >= others)
        def _() -> None:
            mosaic.write(sums.at[own * others + turn_of - others], total)
            plgpu.barrier_arrive(shared["half"].at[own])

        @pl.when(turn_of < others)
        def _() -> None:
            plgpu.barrier_wait(shared["half"].at[own])
            mine = sums.at[own * others + turn_of]
            mosaic.write(mine, total + load(mine, SUMS))
            plgpu.barrier_arrive(shared["summed"].at[own])

        @pl.when(turn_of == 0)
        def _() -> None:
            plgpu.barrier_wait(shared["summed"].at[own])
            finish()

    def totals(self, own: Any, shared: dict[str, Any], layout: Any) -> list[jax.Array]:
        """The finished sums of a tile's stretches of columns, or of its even and odd inputs, each [32, rows]."""
        found, slots = [], self.slots // self.tiles
        for part in range(2):
            at = pl.ds(part * COLUMNS, COLUMNS)
            total = load(shared["sums"].at[own * slots, at], layout)
            for slot in range(1, slots):
                total = total + load(shared["sums"].at[own * slots + slot, at], layout)
            found.append(total)
        return found
