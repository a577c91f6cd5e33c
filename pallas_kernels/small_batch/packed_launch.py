"""Sizes of a launch that multiplies few rows by packed weights, where its columns lie, and its memory (`gpu_packed`).

A tile is 32 columns of the result, or 32 pairs of columns (gate and up, the halves of a head). Where tiles are many a
warpgroup has one; where they are few four warpgroups share one (`packed_walk`). Those of a program may overlap, so that
two warpgroups compute and write the same columns (`span`). A head that is normed is a program's, whose two tiles have
two warpgroups each: its mean square is over both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.small_batch import digits, mosaic, unpack
from pallas_kernels.small_batch.mosaic import F32
from pallas_kernels.small_batch.packed import BLOCK
from pallas_kernels.small_batch.packed_walk import COLUMNS, HALF, Walk, half

Kind = Literal["project", "logits", "heads", "swiglu", "add"]

#: Rows that are served, and bytes of shared memory that small arrays take.
_MOST_ROWS, _MARGIN = 32, 8192
#: Bytes of weights that a program asks for before the kernel before has ended: as many as come while it waits for that
#: kernel's results. More of them stand before these in the memory's queue (docs/benchmarks/rounds.md).
_EARLY = 1 << 16
#: Inputs of a row that is multiplied as integers, at most: more of them leave rings too little.
_MOST_INTEGERS = 16384
#: Columns that tiles may be apart by: the copy engine brings weights in pieces of so many.
_UNIT = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch(Walk):
    """One launch.

    Attributes:
      kind: what is done around the product.
      counts: query, key and value heads, of "heads". head_eps: of the norms of queries and keys, if any.
      biased: whether columns have a bias ("heads").
    """

    kind: Kind
    counts: tuple[int, ...] = ()
    head_eps: float | None = None
    biased: bool = False

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.kind}{'_integers' if self.integers else ''}"

    @property
    def pairs(self) -> bool:
        return self.kind in ("heads", "swiglu")

    @property
    def parts(self) -> int:
        """Stretches of columns of a program."""
        return 2 if self.pairs else 1

    @property
    def tiles(self) -> int:
        """Of a program: warpgroups have one each where columns are many, and share one where they are few.

        Fewer than warpgroups where tables of wide models leave too little for the most rows: a tile's order of sums
        must not depend on how many there are.
        """
        if self.kind not in ("swiglu", "logits"):
            return 1 if self.head_eps is None else 2
        count, rows = self.columns // (COLUMNS * self.parts), _MOST_ROWS
        ring = self.teams * (unpack.ROWS * unpack.row_bytes(self.dtype) + rows * BLOCK * 4 // self.parts)
        each = 4 * (self.parts * self.groups * COLUMNS + rows * (unpack.ROWS + COLUMNS))
        left = mosaic.SHARED - _MARGIN - ring - 4 * rows * self.squares
        return max((n for n in (1, 2, 4) if math.gcd(self.teams, count) % n == 0 and n * each <= left), default=1)

    @property
    def span(self) -> int:
        """Columns of each part that a program has: 32 of a tile, or up to an eighth fewer.

        Tiles then overlap, and more multiprocessors have a program. It gains where values have a byte, but not in half
        bytes (docs/benchmarks/rounds.md).
        """
        whole, columns = COLUMNS * self.tiles, self.columns // self.parts
        half_bytes = unpack.row_bytes(self.dtype) < BLOCK
        if self.kind != "swiglu" or self.tiles == 1 or half_bytes or columns // whole > mosaic.MULTIPROCESSORS:
            return whole
        least = max(-(-columns // (mosaic.MULTIPROCESSORS * _UNIT)) * _UNIT, whole * 7 // 8)
        return next(n for n in range(least, whole + 1, _UNIT) if columns % n == 0)

    @property
    def goes_on(self) -> bool:
        """See Walk: of the output layer's many tiles each would have digits of several rows made anew."""
        return self.kind == "logits" and self.several

    @property
    def laps(self) -> int:
        """Times that programs have tiles, at most."""
        return -(-self._stretches // self.programs)

    def laps_of(self, program: Any) -> Any:
        """The same of one."""
        return (self._stretches - program + self.programs - 1) // self.programs if self.goes_on else 1

    @property
    def programs(self) -> int:
        return min(self._stretches, mosaic.MULTIPROCESSORS) if self.goes_on else self._stretches

    @property
    def _stretches(self) -> int:
        """Of columns of each part."""
        return self.columns // (self.parts * self.span)

    def column(self, tile: Any) -> Any:
        """The first of a tile's, in each part."""
        if self.span == COLUMNS * self.tiles:
            return tile * COLUMNS
        program, own = tile // self.tiles, lax.rem(tile, self.tiles)
        apart = (self.span - COLUMNS) // _UNIT
        return program * self.span + own * apart // (self.tiles - 1) * _UNIT

    @property
    def teams(self) -> int:
        """Warpgroups. The output layer has two programs on a multiprocessor, which hide each other's ends, or one whose
        warpgroups do."""
        return 2 if self.kind == "logits" and not self.goes_on else 4

    @property
    def neighbours(self) -> int:
        """See Walk."""
        if self.kind != "logits" or self.rows > 8 or self.goes_on:
            return 1
        least = 2 * self.stage(2 if self.paired else 1) if self.integers else self.stage(1)
        return 2 if mosaic.room(self.beside(jnp.bfloat16), 2) >= self.teams * least else 1

    @property
    def takes_integers(self) -> bool:
        """Whether rows are so few that they are multiplied as integers: where these leave as many warpgroups to a
        multiprocessor, and rings two steps, or all that there are, and two thirds of their weights. Where
        warpgroups share columns, those of several rows take longer to make than they save."""
        if self.shape[0] > digits.TOGETHER or self.shape[1] > _MOST_INTEGERS or self.dtype not in digits.KINDS:
            return False
        kernel = dataclasses.replace(self, integers=True)
        if kernel.split != self.split or (kernel.several and kernel.split > 1):
            return False
        room = kernel.budget >= min(2, kernel.steps) * kernel.teams * kernel.stage(kernel.depth)
        teams, before = kernel.teams * kernel.neighbours, self.teams * self.neighbours
        return room and teams == before and 3 * kernel.stages * kernel.depth >= 2 * self.stages * self.depth

    @property
    def early(self) -> int:
        """See Walk."""
        step = self.teams * self.depth * unpack.ROWS * unpack.row_bytes(self.dtype)
        return max(1, min(self.stages, _EARLY // step)) if overlap.overlaps(self.interpret) else 0

    @property
    def layout(self) -> Any:
        """Of what is stored: float32 cannot be transposed in vectors."""
        return half(1) if self.kind == "logits" else HALF

    def beside(self, rows_dtype: Any) -> dict[str, Any]:
        """What is there besides the rings."""
        tiles, out = self.tiles, self.sums() | self.norm()
        out["there"] = plgpu.Barrier(num_barriers=1, num_arrivals=self.teams)
        out |= self.whole_row(rows_dtype)
        if self.kind == "heads":
            out["cos"], out["sin"] = (plgpu.SMEM((tiles, COLUMNS, self.rows), F32) for _ in range(2))
            if self.head_eps is not None:
                out["other"] = plgpu.Barrier(num_barriers=1, num_arrivals=1)
        if self.kind == "add":
            out["h"], out["total"] = plgpu.SMEM((self.rows, COLUMNS), rows_dtype), plgpu.SMEM((self.rows,), F32)
        if tables := {"heads": 2, "add": 1}.get(self.kind, 0):
            out["ready"] = plgpu.Barrier(num_barriers=tiles, num_arrivals=tables)
        results = 2 if self.kind == "heads" else 1
        out["out"] = plgpu.SMEM((tiles, results, self.rows, COLUMNS), self.out_dtype(rows_dtype))
        return out

    def out_dtype(self, rows_dtype: Any) -> Any:
        return F32 if self.kind == "logits" else rows_dtype

    def begins(self, tile: Any) -> tuple[Any, ...]:
        """The stretches of 32 columns that a program has."""
        if self.kind == "swiglu":
            return self.column(tile), self.columns // 2 + self.column(tile)
        if self.kind == "heads":
            begin = (tile // 2) * 4 * COLUMNS + lax.rem(tile, 2) * COLUMNS
            return begin, begin + 2 * COLUMNS
        return (tile * COLUMNS,)

    def own(self, tile: Any) -> tuple[Any, Any]:
        """The same as slices of the first axes of `viewed`."""
        if self.kind == "heads":
            return pl.ds((tile // 2) * 2, 2), pl.ds(lax.rem(tile, 2) * COLUMNS, COLUMNS)
        return pl.ds(tile * 0, self.parts), pl.ds(self.column(tile), COLUMNS)

    def viewed(self, values_NK: jax.Array) -> jax.Array:
        """Weights such that one copy brings a program's columns."""
        n, k = values_NK.shape
        return values_NK.reshape(n // (2 * COLUMNS) if self.kind == "heads" else self.parts, -1, k)


def room_refusal(kind: Kind, dtype: str, shape: tuple[int, int], groups: int, *, normed: bool = False) -> str | None:
    """Why a program has no room beside the scales of a kernel [in, out], or None.

    Args:
      dtype: of the values, as `Packed.kind`. groups: of packed scales. normed: whether heads are.
    """
    before: dict[str, Any] = {}
    if kind in ("project", "heads", "swiglu"):
        before = dict(eps=1.0, squares=shape[0] // COLUMNS, width=shape[0])
    for rows in (1, _MOST_ROWS):
        kernel = Launch(
            kind=kind, dtype=dtype, shape=(rows, shape[0]), columns=shape[1], groups=groups,
            head_eps=1.0 if normed else None, **before,
        )  # fmt: skip
        if kernel.budget < kernel.teams * kernel.stage(1):
            return f"{groups} groups of scales leave no room for {rows} rows of {shape[0]} features"
    return None
