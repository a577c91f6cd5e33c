"""How warpgroups on Hopper walk along the inputs of packed weights, and add up what they find.

A tile is two stretches of 32 columns, or 32 columns of which two warps have the even blocks of 128 inputs and two the
odd ones. A warpgroup has a tile, or several share one and take turns at its inputs. Each has a ring of its own, expands
a block in registers and multiplies it by the rows (`unpack`). A block's sums are scaled and added in float32, a
warpgroup's blocks in their order, then the warpgroups', then even and odd: the same whatever the number of rows. Up to
four may be multiplied as integers instead (`digits`), whose blocks half of the warps may have by twos. Where rows are
normed before, their division by the root mean square comes after the product.

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
from pallas_kernels.small_batch import digit_products, digits, lines, mosaic, shares, unpack
from pallas_kernels.small_batch.mosaic import F32, SUMS, load
from pallas_kernels.small_batch.packed import BLOCK, FLOAT4, pieces

#: Columns of a stretch.
COLUMNS = 32
_MAX_STAGES = 8
#: Blocks of a step.
_DEPTHS = 1, 2, 4
#: Rows from which on wgmma multiplies.
_WIDE = 16
#: Inputs up to which one row lies in shared memory whole, as integers a longer one, too; else it comes with weights,
#: for all would wait for it.
_ALONE = 4096
#: Rows that threads bring, for the first steps.
_FEW = 8
#: Lines of a block of one row (see lines).
_LINES = BLOCK * 2 // 16


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
      integers: whether the rows, up to four, are multiplied as integers.
      eps: of the norm before, over `squares` tiles of `width` features; None where there is none.
    """

    dtype: str
    shape: tuple[int, int]
    columns: int
    groups: int
    interpret: bool = False
    integers: bool = False
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

    @property
    def goes_on(self) -> bool:
        """Whether programs have tiles after those that they begin with, each warpgroup its own."""
        return False

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
        """Whether rows do not come with weights: one that lies in shared memory whole, or integers of several."""
        return self.integers or (self.shape[0] == 1 and self.shape[1] <= _ALONE)

    @property
    def own_row(self) -> bool:
        """Whether a warpgroup needs but a part of each row as integers: it makes them for itself."""
        return self.integers and self.tiles == 1

    @property
    def several(self) -> bool:
        """Whether there are several rows of integers: threads read what they make them of."""
        return self.integers and self.shape[0] > 1

    def row_share(self, team: Any, turn: Any = 0) -> digits.Share:
        """Of rows that are integers a warpgroup's, or of one alone."""
        if self.own_row:
            return digits.Share(team, self.split, self.unit * (2 // self.parts), turn, self.shape[0])
        each = min(digits.AT_ONCE, -(-self.shape[1] // (BLOCK * self.teams)))
        return digits.Share(team, self.teams, each, turn, self.shape[0])

    def read_rows(self, source: Any, team: Any) -> Any:
        """What a warpgroup makes digits of, in registers, of several rows."""
        if self.several:
            return digit_products.read(self.by_digits, source, self.row_share(team), interpret=self.interpret)
        return None

    def make_share(self, team: Any, turn: Any, shared: dict[str, Any]) -> None:
        """Makes a turn of a warpgroup's digits of a row alone."""
        refs = shared["x"], shared["digits"], shared["factors"]
        digit_products.make(self.by_digits, *refs, self.row_share(team, turn), interpret=self.interpret)

    @property
    def wide(self) -> bool:
        """Whether wgmma multiplies, which reads rows once for a warpgroup where mma reads them for each of its warps.

        Both give the same bits on Hopper. Where warps have different inputs wgmma would multiply all of them twice, and
        rows lie in pieces of 64 inputs.
        """
        return self.parts == 2 and self.rows >= _WIDE and self.pieces <= 2

    @property
    def paired(self) -> bool:
        """Whether a line of weights in shared memory is two blocks of 4 bits, which one warp multiplies."""
        return self.integers and self.unit > 1 and unpack.row_bytes(self.dtype) < BLOCK

    @property
    def by_digits(self) -> digits.Step:
        """How a step is multiplied as integers."""
        return self._step_of(self.depth)

    def _step_of(self, depth: int) -> digits.Step:
        pieces = 0 if self.once else self.pieces
        return digits.Step(
            kind=self.dtype, depth=depth, parts=self.parts, pieces=pieces, paired=self.paired, rows=self.shape[0]
        )

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
        least = 2 if self.paired else 1
        depths = [n for n in _DEPTHS if self.unit % n == 0 and n >= least]
        fits = [n for n in depths if 2 * self.stage(n) * self.teams <= self.budget]
        return max(fits, default=min(depths))

    def stage(self, depth: int) -> int:
        """Bytes of a step."""
        rows = 0 if self.alone else self.rows * BLOCK * 4 // self.parts
        return depth * (unpack.ROWS * unpack.row_bytes(self.dtype) + rows)

    @functools.cached_property
    def budget(self) -> int:
        """Bytes of shared memory for the rings."""
        return mosaic.room(self.beside(jnp.bfloat16), self.neighbours)

    @property
    def steps(self) -> int:
        """Of a warpgroup, at most."""
        return -(-self.blocks // (self.split * self.depth))

    @property
    def stages(self) -> int:
        return max(1, min(_MAX_STAGES, self.budget // (self.stage(self.depth) * self.teams), self.steps))

    @property
    def ahead(self) -> int:
        """Steps whose rows threads bring, of up to 8: they come sooner than by the copy engine, and all wait for the
        first ones."""
        return min(self.stages, max(self.early, 1)) if not self.alone and self.shape[0] <= _FEW else 0

    @property
    def early(self) -> int:
        """Steps of a ring whose weights are asked for before the kernel before has ended."""
        return 0

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
        transforms = digits.transforms(self.dtype, self.paired) if self.integers else unpack.transforms(dtype)
        return {
            **({} if self.alone else {"x": x}),
            "w": plgpu.SMEM((ring, self.parts, COLUMNS, self.inputs), dtype, transforms=transforms),
            "full": plgpu.Barrier(num_barriers=ring, num_arrivals=1 if self.alone else 2),
            **self.beside(rows_dtype),
        }

    def sums(self) -> dict[str, Any]:
        """What of `beside` every walk needs: scales are float32, or words."""
        scale = jnp.int32 if unpack.has_words(self.dtype) else F32
        out: dict[str, Any] = {
            "sums": plgpu.SMEM((self.slots, unpack.ROWS, self.rows), F32),
            "scale": plgpu.SMEM(((1 + self.goes_on) * self.tiles, self.parts, self.groups, COLUMNS), scale),
        }
        if self.split > 1:
            arrivals = self.split // 2
            out |= {name: plgpu.Barrier(num_barriers=self.tiles, num_arrivals=arrivals) for name in ("half", "summed")}
        return out

    def whole_row(self, rows_dtype: Any) -> dict[str, Any]:
        """What of `beside` rows need that do not come with weights."""
        if not self.alone:
            return {}
        blocks = self.shape[1] // BLOCK
        out: dict[str, Any] = {} if self.several else {"x": plgpu.SMEM((blocks, BLOCK), rows_dtype)}
        if self.integers:
            out |= digits.scratch(self._step_of(1), blocks)
            if not self.own_row or self.eps is not None:
                name = "squared" if self.own_row else "made"
                out[name] = plgpu.Barrier(num_barriers=1, num_arrivals=self.teams)
        return out

    def make_digits(self, team: Any, source: Any, words: Any, shared: dict[str, Any]) -> None:
        """Each warpgroup a share of the digits, of what its threads have brought, or of `read_rows`."""
        if not self.integers:
            return
        if self.several:
            refs = shared["digits"], shared["factors"], self.row_share(team)
            digit_products.make_all(self.by_digits, source, words, *refs, interpret=self.interpret)
        else:
            digit_products.meet(self.interpret)
            self.make_share(team, 0, shared)
            turns = 1 if self.own_row else self.row_share(team).turns(self.shape[1] // BLOCK)
            for turn in range(1, turns):  # of its own row a warpgroup makes the rest while weights come
                self.make_share(team, turn, shared)
        if self.own_row:
            digit_products.meet(self.interpret)
        else:
            plgpu.barrier_arrive(shared["made"].at[0])

    @staticmethod
    def wait_digits(shared: dict[str, Any]) -> None:
        """Returns when all warpgroups' digits are there; once."""
        if "made" in shared:
            plgpu.barrier_wait(shared["made"].at[0])

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

    def bring_rows(self, source: Any, team: Any, mine: Any, turn_of: Any, shared: dict[str, Any]) -> None:
        """Asks for up to 8 rows of a warpgroup's first steps."""
        for turn in range(self.ahead):

            @pl.when(turn < mine)
            def _(turn: int = turn) -> None:
                x = source.at[:, self.stretch(jnp.int32(turn), turn_of)]
                lines.copy_rows(x, shared["x"].at[team * self.stages + turn], interpret=self.interpret)

    def rows_came(self, team: Any, mine: Any, shared: dict[str, Any]) -> None:
        """What the copy engine says of rows that it brings, of those that its threads have."""
        if not self.ahead:
            return
        plgpu.commit_smem()  # threads meet, and the copy engine writes there later
        for turn in range(self.ahead):

            @pl.when(turn < mine)
            def _(turn: int = turn) -> None:
                plgpu.barrier_arrive(shared["full"].at[team * self.stages + turn])

    def bring_row(self, source: Any, target: Any, team: Any) -> None:
        """Asks for a warpgroup's share of a row that is alone."""
        if not self.integers:
            self.bring(source, target, team)
            return
        own = self.row_share(team)
        lines.copy(source, target, own.number, own.of, each=own.each * _LINES, interpret=self.interpret)

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

    def total(
        self, team: Any, mine: Any, copy: Callable[[Any, Any], None], shared: dict[str, Any], lap: Any = 0,
        laps: Any = 1,
    ) -> jax.Array:  # fmt: skip
        """A warpgroup's sums, float32 [64, rows] in `layout_of_sums`; `copy` brings a step of the ring's life into a
        slot, which is that of so many tiles one after the other (laps)."""
        own, turn_of, rows = team // self.split, lax.rem(team, self.split), self.rows
        scales, before, every = shared["scale"].at[own], lap * mine, laps * mine

        def step(turn: Any, total: jax.Array) -> jax.Array:
            slot = team * self.stages + lax.rem(before + turn, self.stages)
            if self.own_row and not self.several:
                self.make_ahead(team, turn, shared)
            plgpu.barrier_wait(shared["full"].at[slot])
            if self.integers:
                tile, refs = shared["w"].at[slot], (shared["digits"], shared["factors"])
                first, interpret = self.first(turn, turn_of), self.interpret
                total = digit_products.products(self.by_digits, total, tile, *refs, scales, first, interpret=interpret)
            for i, sums in enumerate([] if self.integers else self.products(turn, turn_of, slot, scales, shared)):
                if not self.once and self.dtype != FLOAT4:
                    block, piece = self.first(turn, turn_of) + i // self.pieces, i % self.pieces
                    scale = unpack.row_scales(scales, block, self.interpret, piece=piece, pieces=self.pieces)
                    scale = lax.broadcast_in_dim(scale, (unpack.ROWS, rows), (0,))
                    sums = unpack.times(sums, scale, SUMS, self.interpret)
                total = total + sums
            if self.interpret:  # its reads are not those of a warpgroup that meets before it asks
                plgpu.commit_smem()

            ahead = before + turn + self.stages

            @pl.when(ahead < every)
            def _() -> None:
                copy(ahead, slot)

            return total

        width = digits.TOGETHER if self.integers else rows
        start = plgpu.layout_cast(jnp.zeros((unpack.ROWS, width), F32), self.layout_of_sums)
        return lax.fori_loop(0, mine, step, start)

    @property
    def layout_of_sums(self) -> Any:
        """Of a warpgroup's."""
        return digit_products.OWN if self.integers else SUMS

    def make_ahead(self, team: Any, turn: Any, shared: dict[str, Any]) -> None:
        """Before a step that begins with the digits of a turn of the warpgroup's share: makes those of the turn after,
        while weights come."""
        steps = max(1, digits.AT_ONCE // self.by_digits.blocks)
        turns = self.row_share(team).turns(self.shape[1] // BLOCK)
        if turns == 1:
            return

        @pl.when((lax.rem(turn, steps) == 0) & (turn // steps + 1 < turns))
        def _() -> None:
            self.make_share(team, turn // steps + 1, shared)
            digit_products.meet(self.interpret)

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
        if self.integers:
            sums = sums.at[:, :, pl.ds(0, digits.TOGETHER)]
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
            mosaic.write(mine, total + load(mine, self.layout_of_sums))
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
