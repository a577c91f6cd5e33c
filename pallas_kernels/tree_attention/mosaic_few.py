"""What attention with equal bits does to a block of 64 keys, by whomever: bring it, score it, add it to the sums.

Of these `gpu_mosaic` makes the kernel whose programs walk along items, and `mosaic_near` the one whose clusters keep a
request to themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import mosaic_rows
from pallas_kernels.tree_attention.mosaic_launch import SUMS, Launch
from pallas_kernels.tree_attention.mosaic_plan import BLOCK, FEW, GROUP
from pallas_kernels.tree_attention.mosaic_rows import MASKED, ROWS, div, rem

#: Entries of a page table that are read at a time.
READ = 4
LOG2E = math.log2(math.e)
#: A value for each row of wgmma's sums.
ROW = SUMS.reduce(1)
_F32 = jnp.float32

#: Sums, maxima and weights of a tile's rows.
Sums = tuple[jax.Array, jax.Array, jax.Array]


class Few(Launch):
    """A launch for few rows."""

    @property
    def nothing(self) -> Sums:
        """Sums over no key."""
        full = lambda shape, value, layout: self.cast(jnp.full(shape, value, _F32), layout)
        return full((ROWS, self.head_dim), 0.0, SUMS), full((ROWS,), MASKED, ROW), full((ROWS,), 0.0, ROW)

    def numbers(self, block: Callable[[Any], Any], b: Any, begin: Any, ins: dict[str, Any]) -> tuple[Any, ...]:
        """Pages of a few blocks of a request, `block` of their places from `begin` on, or anything where it has none.

        Under load a read of the page table takes as long as memory needs for all that was asked for before: so it is
        read a few blocks ahead.
        """
        last = ins["table"].shape[1] - 1
        columns = (jnp.clip(div(block(begin + k) * BLOCK, self.page), 0, last) for k in range(READ))
        return tuple(ins["table"][b, column] + ins["first"] for column in columns)

    def bring_block(
        self, team: Any, step: Any, j: Any, head: Any, length: Any, numbers: tuple[Any, ...], k: Any,
        ins: dict[str, Any], shared: dict[str, Any],
    ) -> None:  # fmt: skip
        """A block's keys and values to the ring; of one without a page's tokens nothing, as new ones fill it.

        Args:
          length: of the request's prefix. numbers: pages of a few blocks, of which this is the k-th.
        """
        slot, held, number = team * self.stages + rem(step, self.stages), j * BLOCK < length, numbers[0]
        for i in range(1, READ):
            number = jnp.where(k == i, numbers[i], number)
        rows = pl.ds(rem(j * BLOCK, self.page), BLOCK) if self.page > BLOCK else pl.ds(0, BLOCK)
        to, full = shared["kv"].at[slot], shared["full"].at[slot]
        source = ins["pages"].at[number, head, rows, pl.ds(0, 2 * self.channels)]
        pl.when(held)(lambda: plgpu.copy_gmem_to_smem(source, to, full))
        pl.when(jnp.logical_not(held))(lambda: plgpu.barrier_arrive(full))

    def some(self, block: Callable[..., Any], first: Any, end: Any, i: Any, step: Any) -> tuple[Any, ...]:
        """Where the ring is then, and sums of those blocks of a few, the request's i-th, that [first, end) has.

        Args:
          block: `self.block`, but for its last arguments. step: the ring's, and what is known of blocks to come.
        """
        low, high = jnp.maximum(first, i * FEW), jnp.minimum(end, (i + 1) * FEW)
        return lax.fori_loop(low, high, block, (step, *self.nothing))

    def grouped(self, block: Callable[..., Any], first: Any, end: Any, i: Any, step: Any) -> tuple[Any, ...]:
        """The same of the i-th group."""
        few = GROUP // FEW
        low, high = jnp.maximum(div(first, FEW), i * few), jnp.minimum(div(end + FEW - 1, FEW), (i + 1) * few)
        some = functools.partial(self.some, block, first, end)
        return lax.fori_loop(low, high, functools.partial(self.behind, some, low), (step, *self.nothing))

    def behind(self, of: Callable[..., Any], low: Any, i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sums of what is to come, added to those before; nothing is before the one at `low`."""
        step, *more = of(i, carry[0])
        first = lambda sums, more: more
        return step, *lax.cond(i > low, self.add, first, tuple(carry[1:]), tuple(more))

    def add(self, sums: tuple[Any, ...], more: tuple[Any, ...]) -> tuple[Any, ...]:
        """The sums, maxima and weights of rows over more keys; of the first ones nothing changes."""
        (acc, top, total), (acc_j, top_j, total_j) = sums, more
        new = jnp.maximum(top, top_j)
        keep, weight = jnp.exp2(top - new), jnp.exp2(top_j - new)
        along = lambda x: lax.broadcast_in_dim(x, (ROWS, self.head_dim), (0,))
        acc = self.fused(acc_j, along(weight), acc, along(keep), SUMS)
        return acc, new, self.fused(total_j, weight, total, keep, ROW)

    def block(
        self, unit: tuple[Any, ...], team: Any, ins: dict[str, Any], shared: dict[str, Any], q: Any,
        loaded: Sequence[jax.Array] | None, ask: Callable[[Any, Any], Any], j: Any, carry: tuple[Any, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Adds one block of keys; of new tokens those that are `loaded`, if they are.

        Args:
          ask: brings another block to a step's slot; takes and returns what it knows of those to come.
        """
        head, tile, _, b, _, _, length = unit
        (step, ahead), *sums = carry
        # The place of the first new token, and of the first token that the window of the first query shows.
        place = length if self.causal else div(length + BLOCK - 1, BLOCK) * BLOCK
        lowest = jnp.int32(0) if self.window is None else length - self.window + 1
        slot, begin = team * self.stages + rem(step, self.stages), j * BLOCK
        k, v = self.slot(shared, slot)
        ends = (begin + BLOCK > length) | (begin < lowest)
        latest = ins["latest"][b] if self.apart else lowest + self.nodes  # where the last window begins
        hides = ends if self.window is None else ends | (begin < latest)
        plgpu.barrier_wait(shared["full"].at[slot])

        @pl.when(ends)
        def _() -> None:
            at = self.first_new(b, head)
            # Of values what is hidden weighs 0, but 0 * NaN is NaN: a broken draft must not reach its siblings.
            self.put(
                [k, v], [ins["k"], ins["v"]], self.news, at, (b, head), place - begin, self.entries,
                keep=(lowest - begin, length - begin), finite=True, loaded=loaded,
            )  # fmt: skip
            plgpu.commit_smem()

        along = lambda x: lax.broadcast_in_dim(x, (ROWS, BLOCK), (0,))

        def hide(s: jax.Array) -> jax.Array:
            key = self.iota((ROWS, BLOCK), 1, SUMS)
            old = key < length - begin
            if self.apart:
                first = plgpu.load(ins["lowest"].at[b, tile], layout=ROW, optimized=False)  # pyright: ignore[reportCallIssue]
                old = old & (key >= along(first - begin))
            if self.causal:
                row = self.iota((ROWS,), 0, ROW)
                row = div(row, 16) * 8 + rem(row, 8) if self.spread else tile * ROWS + row
                last = length - begin + div(row, self.group)  # where a row's own token is in the block
                seen = key <= along(last)
                if self.apart:
                    seen = old | (seen & (key >= length - begin))
                elif self.window is not None:
                    seen = seen & (key > along(last - self.window))
            else:
                seen = old | self.sees(ins["words"], b, tile, key + (begin - place))
            return jnp.where(seen, s, -jnp.inf)

        s = self.scores(q, k)
        if self.soft_cap is not None:  # as of wide attention
            power = jnp.exp2(s * (2 * LOG2E * self.factor / self.soft_cap))
            s = self.soft_cap - (2 * self.soft_cap) / (1.0 + power)
        s = lax.cond(hides, hide, lambda s: s, s)
        scale = LOG2E * (self.factor if self.soft_cap is None else 1.0)
        top = jnp.maximum(self.times(jnp.max(s, axis=1), scale, ROW), MASKED)
        p = jnp.exp2(self.scaled(s, scale, along(top)))
        if self.spread and not self.interpret:
            p = mosaic_rows.first_rows(p)
        more = self.weighted(p.astype(v.dtype), v), top, jnp.sum(p, axis=1)
        if self.interpret:  # its reads are not wgmma's, nor those of a warpgroup that meets before it asks
            plgpu.commit_smem()
        return (step + 1, ask(step, ahead)), *self.add(tuple(sums), more)

    def sees(self, words: Any, b: Any, tile: Any, entry: jax.Array) -> jax.Array:
        """Whether rows see entries [64, 64]; words [B, W, tiles, 64] uint32 hold a row's bits."""
        seen = None
        for w in range(-(-self.entries // 32)):
            word = plgpu.load(words.at[b, w, tile], layout=ROW, optimized=False)  # pyright: ignore[reportCallIssue]
            word = lax.broadcast_in_dim(word, (ROWS, BLOCK), (0,))
            at = entry - 32 * w
            inside = (at >= 0) & (at < 32)
            bit = lax.shift_right_logical(word, jnp.where(inside, at, 0).astype(jnp.uint32)) & jnp.uint32(1)
            found = inside & (bit != 0)
            seen = found if seen is None else seen | found
        assert seen is not None
        return seen
