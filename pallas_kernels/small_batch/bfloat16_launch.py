"""Sizes of a launch that multiplies by weights of bfloat16, and what it needs of shared memory (`gpu_bfloat16`)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import mosaic, pairs
from pallas_kernels.small_batch.mosaic import F32
from pallas_kernels.small_batch.reference import FEW_ROWS, TILE

Kind = Literal["project", "logits", "heads", "swiglu", "add"]

#: Rows that the kernels serve.
MOST_ROWS = 128
_MAX_STAGES = 11
#: Rows up to which a program has a head to itself.
_ALONE = 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a kernel walks.

    Attributes:
      rows: a multiple of 8. teams: warpgroups that multiply. parts: tiles of 64 columns that each owns at a time.
      members: programs that share a tile. halves: of the rows, each of which one of them makes an end of; or 1, and
        the first does of all. depth: rows of weights in a step. steps: of a program's walk.
      tiles: of all programs. programs: each has every so manieth tile; those that share one are one.
    """

    rows: int
    teams: int
    parts: int
    members: int
    halves: int
    depth: int
    steps: int
    tiles: int
    programs: int

    @classmethod
    def of(cls, kind: Kind, m: int, k: int, columns: int) -> Sizes:
        rows, teams, parts, members, inputs = round_up(m, 8), 1, 1, 1, k
        tiles, most = columns // TILE, mosaic.MULTIPROCESSORS
        if kind == "swiglu":
            tiles, parts = tiles // 2, 2
            teams = 2 if tiles > most and tiles % 2 == 0 else 1
            tiles //= teams
        elif kind == "heads":
            tiles //= 2
            # Of few rows one program has both halves in less time than two have to exchange them.
            parts, members = (1, 2) if 2 * tiles <= most and rows > _ALONE else (2, 1)
        elif kind != "logits" and 2 * tiles <= most and k % (2 * TILE) == 0:
            members, inputs = 2, k // 2
        if members == 2 and rows > FEW_ROWS:
            rows = round_up(rows, 16)
        halves = members if rows % 16 == 0 else 1
        if kind == "heads" and halves == 1:
            parts, members = 2, 1
        depth = 64 if kind == "swiglu" or inputs % 128 or rows > FEW_ROWS else 128
        turns = -(-tiles // most) if kind in ("swiglu", "logits") else 1
        return cls(rows, teams, parts, members, halves, depth, inputs // depth, tiles, -(-tiles // turns))


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
      kind: what is done around the product. sizes: how it walks. shape: (M, K) of the rows.
      eps: of the norm before, over `squares` tiles; None where there is none.
      counts: query, key and value heads, of "heads". head_eps: of the norms of queries and keys, if any.
      biased: whether columns have a bias ("heads"). flip: whether weights lie [in, out], not [out, in].
      interpret: whether registers are pretended.
    """

    kind: Kind
    sizes: Sizes
    shape: tuple[int, int]
    eps: float | None = None
    squares: int = 0
    counts: tuple[int, ...] = ()
    head_eps: float | None = None
    biased: bool = False
    flip: bool = True
    interpret: bool = False

    @property
    def name(self) -> str:
        return self.kind

    @property
    def programs(self) -> int:
        return self.sizes.programs

    @property
    def teams(self) -> int:
        """Warpgroups: the last one copies."""
        return self.sizes.teams + 1

    @property
    def many(self) -> bool:
        """Whether rows are too many for some tables."""
        return self.sizes.rows > FEW_ROWS

    @property
    def shared(self) -> bool:
        """Whether two programs share the inputs of a tile."""
        return self.sizes.members == 2 and self.kind != "heads"

    @property
    def ended(self) -> int:
        """Rows that a program makes an end of."""
        return self.sizes.rows // self.sizes.halves

    @property
    def summing(self) -> int:
        """Bytes that sums across lanes take."""
        return mosaic.SUMMING if self.kind in ("heads", "add") else 0

    def tables(self, dtype: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of what is read besides rows and weights, in the order of the arguments."""
        rows, kinds = self.ended, {}
        if self.eps is not None:
            kinds["squares"] = (self.squares, rows), F32
        if self.kind == "heads":
            kinds["cos"] = kinds["sin"] = (TILE, rows), F32
        if self.biased:
            kinds["bias"] = (2 * TILE,), dtype
        if self.head_eps is not None:
            kinds["gains"] = (2 * TILE,), dtype
        if self.kind == "add":
            kinds["h"], kinds["gain"] = ((rows, TILE), dtype), ((TILE,), dtype)
        return kinds

    def kept(self, dtype: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Those of `tables` that shared memory has; of many rows its ring needs the room."""
        left = ("squares", "cos", "sin") if self.many else ()
        return {name: of for name, of in self.tables(dtype).items() if name not in left}

    @functools.cached_property
    def stages(self) -> int:
        """Of the ring: as many as there is room for."""
        s = self.sizes
        step = s.depth * (s.teams * s.parts * TILE + s.rows) * 2
        fit = mosaic.room(self.beside(jnp.bfloat16), summing=self.summing) // step
        return max(2, min(_MAX_STAGES, fit, s.steps))

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        s = self.sizes
        tile, lanes = ((s.depth, TILE), TILE) if self.flip else ((TILE, s.depth), s.depth)
        parts = s.teams * s.parts
        return {
            "x": plgpu.SMEM((self.stages, s.rows, s.depth), dtype, transforms=mosaic.tiled(s.depth)),
            "w": plgpu.SMEM((self.stages, parts, *tile), dtype, transforms=mosaic.tiled(lanes)),
            "full": plgpu.Barrier(num_barriers=self.stages, num_arrivals=parts + 1),
            "free": plgpu.Barrier(num_barriers=self.stages, num_arrivals=s.teams),
            **self.beside(dtype),
        }

    def beside(self, dtype: Any) -> dict[str, Any]:
        """What is there besides the ring."""
        s = self.sizes
        wide = F32 if self.kind == "logits" else dtype
        count = 2 if self.kind == "heads" else s.teams
        out: dict[str, Any] = {"out": plgpu.SMEM((count, self.ended, TILE), wide)}
        if self.kind == "logits":
            out["wide"] = plgpu.SMEM((TILE, s.rows), F32)
        if self.kind == "add":
            out = mosaic.added(self.ended, dtype)
        kept = self.kept(dtype)
        out |= {name: plgpu.SMEM(shape, kind) for name, (shape, kind) in kept.items()}
        if kept:
            out["ready"] = plgpu.Barrier(num_barriers=1, num_arrivals=len(kept))
        if self.many and self.eps is not None:
            out |= {"inverse": plgpu.SMEM((MOST_ROWS,), F32), "normed": plgpu.Barrier()}
        return out | (pairs.scratch(self.ended, self.interpret) if s.members == 2 else {})

    def column(self, tile: Any, member: Any, part: Any) -> Any:
        """Where a part of a tile begins among the weights' columns."""
        s = self.sizes
        if self.kind == "swiglu":  # gate and up of a warpgroup, then of the other
            team, up = part // 2, part % 2
            return (tile * s.teams + team) * TILE + up * (s.tiles * s.teams * TILE)
        if self.kind == "heads":
            return tile * 2 * TILE + (part if s.members == 1 else member) * TILE
        return tile * TILE
