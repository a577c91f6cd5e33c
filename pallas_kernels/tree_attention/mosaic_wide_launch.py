"""Sizes of a launch of wide attention, its memory, and operations of which the interpreter has its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import mosaic_rows, mosaic_scores, mosaic_sums, mosaic_tiles
from pallas_kernels.tree_attention.mosaic_rows import ROWS, Source, div, rem

_F32, _I32 = jnp.float32, jnp.int32
#: How wgmma's sums lie in registers, and a value for each of their rows.
SUMS = plgpu.Layout.WGMMA
ROW = SUMS.reduce(1)
#: Channels of a program that merges, and stretches that it reads ahead.
PART, AHEAD = 32, 5


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
      batch, nodes, entries, heads, kv_heads, head_dim, page: B, N, T, H, G, C in whole tiles and tokens a page.
      channels: of a head in pages (mosaic_heads).
      causal: without a mask. window: whether there is one. factor, soft_cap: of scores.
      splits, keys, teams, members, stages: see Blocks.
      interpret: whether registers are pretended.
    """

    batch: int
    nodes: int
    entries: int
    heads: int
    kv_heads: int
    head_dim: int
    channels: int
    page: int
    causal: bool
    window: bool
    factor: float
    soft_cap: float | None
    sinks: bool
    splits: int
    keys: int
    teams: int
    members: int
    stages: int
    interpret: bool

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.nodes * self.group

    @property
    def blocks(self) -> int:
        """Of query rows: clusters of a request's KV head and stretch."""
        return -(-self.rows // (ROWS * self.teams * self.members))

    @property
    def tiles(self) -> int:
        """Of 64 query rows."""
        return self.blocks * self.members * self.teams

    @property
    def turns(self) -> bool:
        """Whether computing warpgroups take turns."""
        return self.teams == 2

    @property
    def clusters(self) -> int:
        """Of programs, all together."""
        return self.batch * self.kv_heads * self.blocks * self.splits

    @property
    def piece(self) -> int:
        """Keys that one copy brings."""
        return min(self.page, self.keys)

    @property
    def pieces(self) -> int:
        return self.keys // self.piece

    @property
    def queries(self) -> Source:
        """Where a KV head's rows lie among queries and results [B, N, H, C], in values."""
        return Source(self.group, self.heads * self.head_dim, self.head_dim)

    def base(self, b: Any, head: Any) -> Any:
        """Where a KV head's first row lies there."""
        return (b * (self.nodes * self.heads) + head * self.group) * self.head_dim

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        shape = lambda count, rows: plgpu.SMEM((count, rows, self.head_dim), dtype, transforms=mosaic_rows.tiled())
        full = lambda count: plgpu.Barrier(num_barriers=count, num_arrivals=self.pieces)
        ring: dict[str, Any] = {"num_barriers": self.stages, "num_arrivals": self.teams}
        # A copy for all members waits until each of them has done with the slot.
        empty = lambda: (
            plgpu.ClusterBarrier(collective_axes=("member",), **ring) if self.shares else plgpu.Barrier(**ring)
        )
        found = {
            "q": shape(self.teams, ROWS), "k": shape(self.stages, self.keys), "v": shape(self.stages, self.keys),
            "k_full": full(self.stages), "v_full": full(2 * self.stages), "k_empty": empty(), "v_empty": empty(),
        }  # fmt: skip
        return found | ({"turn": plgpu.Barrier(num_barriers=2)} if self.turns and self.interpret else {})

    @property
    def shares(self) -> bool:
        """Whether a cluster's members share copies; the interpreter's have their own."""
        return self.members > 1 and not self.interpret

    def copy(self, source: Any, to: Any, barrier: Any) -> None:
        """To shared memory, of each member of the cluster if it has several."""
        plgpu.copy_gmem_to_smem(source, to, barrier, collective_axes="member" if self.shares else None)

    def take_turn(self, team: Any, shared: dict[str, Any]) -> None:
        """Waits until the other computing warpgroup has passed the turn."""
        if self.turns and self.interpret:
            plgpu.barrier_wait(shared["turn"].at[team])
        elif self.turns:
            mosaic_tiles.barrier("sync", team)

    def pass_turn(self, team: Any, shared: dict[str, Any]) -> None:
        if self.turns and self.interpret:
            plgpu.barrier_arrive(shared["turn"].at[1 - team])
        elif self.turns:
            mosaic_tiles.barrier("arrive", 1 - team)

    def uniform(self, x: Any) -> Any:
        """See mosaic_rows.uniform."""
        return x if self.interpret else mosaic_rows.uniform(x)

    def next(self, slot: Any) -> Any:
        """The ring's slot after this one; by a division compilers would lose track of what is uniform."""
        return jnp.where(slot == self.stages - 1, 0, slot + 1)

    def row_numbers(self) -> jax.Array:
        """0 to 63, a value for each row of a tile."""
        if self.interpret:
            return lax.broadcasted_iota(_I32, (ROWS,), 0)
        return plgpu.broadcasted_iota(_I32, (ROWS,), 0, layout=ROW)

    def cast(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def vector(self, ref: Any) -> jax.Array:
        """A value for each of 64 rows."""
        if self.interpret:
            return ref[...]
        return plgpu.load(ref, layout=ROW, optimized=False)  # pyright: ignore[reportCallIssue]

    def along(self, x: jax.Array, count: int) -> jax.Array:
        """Rows' values, the same in each of so many columns."""
        return lax.broadcast_in_dim(x, (ROWS, count), (0,))

    def scores(self, q: Any, k: Any, begun: Callable[[], None]) -> jax.Array:
        """Queries [64, C] times keys [keys, C]: [64, keys]; `begun` is called before they are there."""
        if self.interpret:
            a, b = q[...].astype(_F32), k[...].astype(_F32)
            begun()
            return lax.dot_general(a, b, (((1,), (1,)), ((), ())))

        def run(out: Any) -> jax.Array:
            plgpu.wgmma(out, q, k.transpose((1, 0)))
            begun()
            return out[...]

        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((ROWS, self.keys), _F32))

    def weighted(self, acc: jax.Array, p: jax.Array, v: Any) -> jax.Array:
        """Sums [64, C] and weights [64, keys] times values [keys, C]."""
        if self.interpret:
            return acc + lax.dot_general(p.astype(_F32), v[...].astype(_F32), (((1,), (0,)), ((), ())))
        out = plgpu.WGMMAAccumulatorRef.init(acc)
        return pl.run_state(lambda out: plgpu.wgmma(out, p, v))(out)  # pyright: ignore[reportReturnType]

    def prefetch(self, table: Any, b: Any) -> None:
        """Has the numbers of a request's first pages brought nearer while its length is read."""
        if not self.interpret:
            mosaic_tiles.prefetch(table, b * table.shape[1])

    def fill(self, tile: Any, ref: Any, b: Any, head: Any, number: Any) -> None:
        """A tile's queries; zeros behind the last."""
        first = number * ROWS
        if not self.interpret:
            mosaic_tiles.fill(tile, ref, self.queries, self.base(b, head), first, self.rows)
            return
        own = lax.dynamic_slice_in_dim(ref[b], head * self.group, self.group, axis=1).reshape(-1, self.head_dim)
        at = first + jnp.arange(ROWS)
        tile[...] = jnp.where((at < self.rows)[:, None], own[jnp.clip(at, 0, self.rows - 1)], 0)

    def bits(self, mask: Any, b: Any, tile: Any, begin: Any, count: int) -> tuple[jax.Array, ...]:
        """See mosaic_scores.bits."""
        if not self.interpret:
            return mosaic_scores.bits(mask, b, tile, self.group, begin, count)
        node = jnp.minimum((tile * ROWS + jnp.arange(ROWS)) // self.group, self.nodes - 1)
        entry = begin + jnp.arange(32 * count)
        seen = mask[b][node][:, jnp.minimum(entry, self.entries - 1)] & (entry < self.entries)[None]
        of_words = seen.astype(jnp.uint32).reshape(ROWS, count, 32) << jnp.arange(32, dtype=jnp.uint32)[None, None]
        words = of_words.sum(axis=2, dtype=jnp.uint32)
        return tuple(words[:, i] for i in range(count))

    def hide(self, s: jax.Array, words: Sequence[jax.Array]) -> jax.Array:
        """See mosaic_scores.hide."""
        if not self.interpret:
            return mosaic_scores.hide(s, words)
        bits = jnp.stack(words, axis=1)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & jnp.uint32(1)
        return jnp.where(bits.reshape(s.shape) != 0, s, -jnp.inf)

    def weights(
        self, s: jax.Array, acc: jax.Array, top: jax.Array, total: jax.Array, scale: float, dtype: Any
    ) -> tuple[jax.Array, ...]:
        """See mosaic_scores.weights; here a row has one thread, and `total` is the row's."""
        if not self.interpret:
            return mosaic_scores.weights(s, acc, top, total, scale, dtype)
        most = jnp.max(s, axis=1) * scale
        new = jnp.where(most > top + mosaic_scores.SLACK, most, top)
        p, keep = jnp.exp2(s * scale - self.along(new, s.shape[1])), jnp.exp2(top - new)
        return p.astype(dtype), acc * self.along(keep, acc.shape[1]), new, total * keep + jnp.sum(p, axis=1)

    def begun(self, total: jax.Array) -> jax.Array:
        """Rows' weights [64] as of their threads, for `weights`."""
        return total if self.interpret else total * (1.0 / mosaic_scores.SHARERS)

    def settle(self, total: jax.Array) -> jax.Array:
        """Threads' weights as of rows."""
        return total if self.interpret else mosaic_scores.settle(total)

    def clean(self, tile: Any, keep: tuple[Any, Any]) -> None:
        """See mosaic_tiles.clean."""
        if not self.interpret:
            mosaic_tiles.clean(tile, keep)
            return
        at, values = jnp.arange(ROWS), tile[...]
        kept = ((at >= keep[0]) & (at < keep[1]))[:, None] & jnp.isfinite(values)
        tile[...] = jnp.where(kept, values, 0)

    def put(self, ref: Any, values: jax.Array, b: Any, head: Any, number: Any, part: Any = 0) -> None:
        """A tile's results, or its channels from PART * part on."""
        first = number * ROWS
        if not self.interpret:
            mosaic_tiles.put(ref, values, self.queries, self.base(b, head) + part * PART, first, self.rows)
            return
        for i in range(ROWS):
            row = first + i

            @pl.when(row < self.rows)
            def _(i: int = i, row: Any = row) -> None:
                at = b, div(row, self.group), head * self.group + rem(row, self.group)
                ref.at[*at, pl.ds(part * PART, values.shape[1])][...] = values[i]

    def drain(self, tile: Any, ref: Any, values: jax.Array, b: Any, head: Any, number: Any) -> None:
        """Results, by way of a tile that nobody reads any more."""
        if self.interpret:
            self.put(ref, values, b, head, number)
            return
        tile[...] = values
        plgpu.commit_smem()
        mosaic_tiles.drain(tile, ref, self.queries, self.base(b, head), number * ROWS, self.rows)

    def fetch(self, refs: tuple[Any, ...], at: Any, number: Any, part: Any) -> tuple[jax.Array, ...]:
        """A tile's partial sums [64, PART] of channels from PART * part on, maxima and weights [64]."""
        if not self.interpret:
            count, columns = self.rows - number * ROWS, (part * PART, PART)
            return mosaic_sums.fetch(refs, self.head_dim, at * ROWS, count, columns=columns)
        acc, *vectors = refs
        return acc[at, :, pl.ds(part * PART, PART)], *(ref[at] for ref in vectors)

    def spill(self, refs: tuple[Any, ...], sums: tuple[Any, ...], at: Any, number: Any) -> None:
        """Writes what `fetch` reads, of the rows in use."""
        if not self.interpret:
            mosaic_sums.spill(refs, sums, at * ROWS, self.rows - number * ROWS)
            return
        for ref, value in zip(refs, sums, strict=True):
            ref.at[at][...] = value

    def bring_new(self, ref: Any, b: Any, first: Any, head: Any, to: Any, barrier: Any) -> None:
        """A request's entries from `first` on, of [B, T, G, C]; what lies behind its last may be anything."""
        if not self.interpret:
            self.copy(ref.at[b, pl.ds(first, self.piece), head], to, barrier)
            return
        at = jnp.minimum(first + jnp.arange(self.piece), ref.shape[1] - 1)
        to[...] = lax.dynamic_index_in_dim(ref[b], head, axis=1, keepdims=False)[at]
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
