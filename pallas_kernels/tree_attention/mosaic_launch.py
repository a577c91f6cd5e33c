"""Sizes of a launch of attention with equal bits, its memory, and operations of which the interpreter has its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sizes import round_up
from pallas_kernels.tree_attention import mosaic_heads, mosaic_rows, mosaic_sums
from pallas_kernels.tree_attention.mosaic_plan import BLOCK
from pallas_kernels.tree_attention.mosaic_rows import ROWS, Source, div, rem

#: Of shared memory: a program's bytes, those for barriers, and blocks of a ring at most.
SHARED, ROOM, MAX_STAGES = 232448, 2560, 6
_F32, _I32 = jnp.float32, jnp.int32
#: How wgmma's sums lie in registers.
SUMS = plgpu.Layout.WGMMA
#: Threads of a warpgroup.
LANES = 128


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
      batch, nodes, entries, heads, kv_heads, channels, page: B, N, T, H, G, C and tokens a page.
      causal: without a mask. factor, soft_cap: of scores. programs: at once. teams: warpgroups of a program.
      interpret: whether registers are pretended. direct: whether a request is one item, whose sums are its result.
      straight, mixed: see mosaic_plan.Sizes. settled: whether what is not this layer's may be read early
        (reference.Shared). apart: whether rows' windows begin where an array says, not each a token behind the last
        one's.
    """

    batch: int
    nodes: int
    entries: int
    heads: int
    kv_heads: int
    channels: int
    page: int
    causal: bool
    window: int | None
    factor: float
    programs: int
    teams: int
    interpret: bool
    direct: bool = False
    straight: bool = False
    mixed: bool = False
    settled: bool = False
    soft_cap: float | None = None
    apart: bool = False

    @property
    def head_dim(self) -> int:
        """Channels that are computed (mosaic_heads): of results the last ones, of queries the first, with zeros."""
        return mosaic_heads.whole(self.channels)

    @property
    def lead(self) -> int:
        """Channels of sums before those of the result: of the keys that lie before a page's values."""
        return self.head_dim - self.channels

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.nodes * self.group

    @property
    def tiles(self) -> int:
        """Of 64 query rows."""
        return -(-self.rows // ROWS)

    @property
    def spread(self) -> bool:
        """Whether rows stand apart in their tile (mosaic_rows.spread_row)."""
        return self.rows <= ROWS // 2

    @property
    def stages(self) -> int:
        """Blocks of a ring."""
        taken = 2 * ROWS * self.head_dim
        return min(MAX_STAGES, ((SHARED - ROOM) // self.teams - taken) // (4 * BLOCK * self.channels))

    @property
    def queries(self) -> Source:
        """Where a tile's rows lie among queries [B, N, H, C], in values."""
        return Source(self.group, self.heads * self.channels, self.channels)

    @property
    def height(self) -> int:
        """Rows of a tile's partial sums, of which those in use are written and read."""
        return round_up(self.rows, 8) if self.tiles == 1 else ROWS

    @property
    def news(self) -> Source:
        """Where new tokens lie among [B, T, G, C], in values."""
        return Source(1, self.kv_heads * self.channels, 0)

    def first_row(self, b: Any, head: Any) -> Any:
        """Where a KV head's first query row lies among [B, N, H, C], in values."""
        return (b * (self.nodes * self.heads) + head * self.group) * self.channels

    def first_new(self, b: Any, head: Any) -> Any:
        """Where its first new token lies among [B, T, G, C]."""
        return (b * (self.entries * self.kv_heads) + head) * self.channels

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        tile = lambda count, width: plgpu.SMEM((count, ROWS, width), dtype, transforms=mosaic_rows.tiled())
        slots = self.teams * self.stages
        return {
            "q": tile(self.teams, self.head_dim), "kv": tile(slots, 2 * self.channels),
            "full": plgpu.Barrier(num_barriers=slots),
        }  # fmt: skip

    def slot(self, shared: dict[str, Any], slot: Any) -> tuple[Any, Any]:
        """Keys and values of a ring's slot, [64, head_dim] each, side by side as pages have them.

        Of heads that are no whole tiles the two share one, which is why `put` leaves columns beside a row's.
        """
        return tuple(shared["kv"].at[slot, :, pl.ds(begin, self.head_dim)] for begin in (0, self.channels - self.lead))

    def iota(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        if self.interpret:
            return lax.broadcasted_iota(_I32, shape, axis)
        return plgpu.broadcasted_iota(_I32, shape, axis, layout=layout)

    def cast(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def times(self, x: jax.Array, value: float, layout: Any) -> jax.Array:
        return mosaic_sums.fused(
            "times", x, self.cast(jnp.full_like(x, value), layout), layout=layout, pretend=self.interpret
        )

    def scaled(self, s: jax.Array, value: float, top: jax.Array) -> jax.Array:
        """s * value - top, rounded once."""
        return mosaic_sums.fused(
            "scaled", s, self.cast(jnp.full_like(s, value), SUMS), top, layout=SUMS, pretend=self.interpret
        )

    def fused(self, a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, layout: Any) -> jax.Array:
        """a * b + c * d, the second product rounded before it is added."""
        return mosaic_sums.fused("sum", a, b, c, d, layout=layout, pretend=self.interpret)

    def scores(self, q: Any, k: Any) -> jax.Array:
        """Queries [64, C] times keys [64, C]: [64, 64]."""
        if self.interpret:
            a, b = q[...].astype(_F32), k[...].astype(_F32)
            return lax.dot_general(a, b, (((1,), (1,)), ((), ())))

        def run(out: Any) -> jax.Array:
            plgpu.wgmma(out, q, k.transpose((1, 0)))
            return out[...]

        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((ROWS, BLOCK), _F32))

    def weighted(self, p: jax.Array, v: Any) -> jax.Array:
        """Weights [64, 64] times values [64, C]."""
        if self.interpret:
            return lax.dot_general(p.astype(_F32), v[...].astype(_F32), (((1,), (0,)), ((), ())))

        def run(out: Any) -> jax.Array:
            plgpu.wgmma(out, p, v)
            return out[...]

        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((ROWS, self.head_dim), _F32))

    def put(
        self, tiles: list[Any], refs: list[Any], source: Source, base: Any, at: tuple[Any, Any], first: Any, count: int,
        keep: tuple[Any, Any] | None = None, finite: bool = False, spread: bool = False,
        loaded: Sequence[jax.Array] | None = None,
    ) -> None:  # fmt: skip
        """mosaic_rows.put of queries, or of keys and values; `at` is the request and the KV head."""
        leads = (0, self.lead)[: len(tiles)]
        if not self.interpret:
            mosaic_rows.put(
                tiles, refs, source, self.channels, base, first, count, leads=leads, keep=keep, finite=finite,
                spread=spread, loaded=loaded,
            )  # fmt: skip
            return
        b, head = at
        heads = self.group if source.outer == self.heads * self.channels and source.group == self.group else 1
        i = jnp.arange(ROWS)
        r = jnp.where(i % 16 < 8, i // 16 * 8 + i % 8, count) if spread else i - first
        live = (r >= 0) & (r < count)
        for tile, ref, lead in zip(tiles, refs, leads, strict=True):
            own = lax.dynamic_slice_in_dim(ref[b], head * heads, heads, axis=1).reshape(-1, self.channels)
            before, others, behind = jnp.split(tile[...], [lead, lead + self.channels], axis=1)
            rows = own[jnp.clip(r, 0, count - 1)]
            if finite and tile is tiles[-1]:
                rows = jnp.where(jnp.isfinite(rows), rows, 0)
            if keep is not None and tile is tiles[-1]:
                others = jnp.where(((i >= keep[0]) & (i < keep[1]))[:, None], others, 0)
            tile[...] = jnp.concatenate([before, jnp.where(live[:, None], rows, others), behind], axis=1)

    def clear_queries(self, tile: Any) -> None:
        """Zeros for a tile's columns behind queries, which `put` leaves: once, before the first queries."""
        if not self.lead:
            return
        if self.interpret:
            tile[...] = jnp.zeros(tile.shape, tile.dtype)
        else:
            mosaic_rows.clear(tile, self.channels)

    @property
    def early(self) -> bool:
        """Whether a thread reads its part of the new tokens before the first block: some come so late that whoever
        asks for them then waits for all that memory has been asked for before."""
        return self.causal and self.entries <= mosaic_rows.pieces(self.channels)

    def load(self, refs: list[Any], source: Source, base: Any, count: int) -> Sequence[jax.Array] | None:
        """mosaic_rows.load."""
        return None if self.interpret else mosaic_rows.load(refs, source, self.channels, base, count)

    def fetch(self, refs: tuple[Any, ...], at: Any, tile: Any) -> tuple[jax.Array, ...]:
        """Partial sums [64, C], maxima and weights [64] of the tile's rows."""
        if not self.interpret:
            base, count = at * self.height, self.rows - tile * ROWS
            return mosaic_sums.fetch(refs, self.head_dim, base, count, spread=self.spread)
        found = [ref[at] for ref in refs]
        return tuple(jnp.zeros((ROWS, *x.shape[1:]), x.dtype).at[self.places].set(x) for x in found)

    def spill(self, refs: tuple[Any, ...], sums: tuple[Any, ...], at: Any, tile: Any) -> None:
        """Writes what `fetch` reads."""
        if not self.interpret:
            mosaic_sums.spill(refs, sums, at * self.height, self.rows - tile * ROWS, spread=self.spread)
            return
        for ref, value in zip(refs, sums, strict=True):
            ref.at[at][...] = value[self.places]

    def store(self, out: Any, value: jax.Array, base: Any, at: tuple[Any, Any]) -> None:
        """The only tile's rows to the result [B, N, H, C]; `at` is the request and the KV head."""
        if not self.interpret:
            mosaic_sums.store(out, value, self.queries, base, self.rows, spread=self.spread, lead=self.lead)
            return
        b, head = at
        rows = value[self.places][: self.rows, self.lead :].reshape(self.nodes, self.group, self.channels)
        out.at[b, :, pl.ds(head * self.group, self.group), :][...] = rows

    @property
    def places(self) -> jax.Array:
        """Where a tile's rows stand."""
        rows = jnp.arange(self.height)
        return mosaic_rows.spread_row(rows) if self.spread else rows

    @property
    def width(self) -> int:
        """Channels of a thread that adds up items, whose warpgroup has query heads of one node only: one while there
        are multiprocessors without a warpgroup, as it holds the sums of several items."""
        values = self.batch * self.nodes * self.heads * self.head_dim
        fits = [x for x in (4, 2, 1) if self.heads * self.head_dim % (x * LANES) == 0]
        return next((x for x in fits if values >= x * LANES * self.programs), 1)

    def gather(self, refs: tuple[Any, ...], bases: Sequence[Any], first: Any) -> Sequence[jax.Array]:
        """mosaic_sums.gather."""
        if not self.interpret:
            return mosaic_sums.gather(refs, self.head_dim, self.width, bases, first)
        rows = [div(first + base, self.height) for base in bases], [rem(first + base, self.height) for base in bases]
        acc = jnp.concatenate([refs[0][at] for at in zip(*rows, strict=True)]).reshape(-1, self.width)
        vectors = (jnp.stack([ref[at] for at in zip(*rows, strict=True)]) for ref in refs[1:])
        return *acc.T, *(jnp.repeat(x, LANES // len(bases)) for x in vectors)

    def write(self, ref: Any, values: Sequence[jax.Array], program: Any) -> None:
        """mosaic_sums.write to a row of [programs, values]."""
        if self.interpret:
            rows = jnp.stack(values, axis=1).reshape(-1, self.head_dim)[:, self.lead :]
            ref.at[program][...] = rows.reshape(-1).astype(ref.dtype)
        else:
            mosaic_sums.write(ref, values, program * ref.shape[1], self.head_dim, self.lead)
