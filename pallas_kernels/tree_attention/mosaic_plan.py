"""Which blocks of which requests are computed by whom: items, by the lengths and the shapes alone.

An item is a block, a few, a group of blocks or a whole request, which changes nothing of the results: sums are added in
one order, blocks to a few, these to groups, and groups one after the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.sizes import round_up

#: Tokens of a block; blocks whose sums are added up first, and blocks of a group, whose sums are added up next.
BLOCK, FEW, GROUP = 64, 4, 16
#: Items are single blocks up to so many for each warpgroup that computes, and groups beyond so many times 4 blocks.
_SINGLE, _QUARTER = 1.5, 4
#: Share of the warpgroups' turns that whole requests must fill to be items.
_EVEN = 0.9
#: Bytes of partial sums from which on a request is one item.
_PARTIAL = 48 << 20
_I32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What items may be, by the shapes alone.

    Attributes:
      units: KV heads times tiles of an item. threads: warpgroups that compute at once.
      blocks: most of one request. whole: whether a request is one item. straight: whether the items are the requests
        in their order, each from its first token on, as all are computed at once.
    """

    units: int
    threads: int
    blocks: int
    whole: bool
    straight: bool = False

    @classmethod
    def of(cls, kernel: Any, capacity: int, whole: bool | None = None) -> Sizes:
        blocks = -(-(round_up(capacity, BLOCK) + kernel.entries) // BLOCK)
        units = kernel.kv_heads * kernel.tiles
        threads = kernel.teams * kernel.programs
        if whole is None:
            partial = kernel.batch * -(-blocks // GROUP) * units * kernel.height * kernel.head_dim * 4
            turns = -(-kernel.batch * units // threads)
            even = kernel.batch * units >= _EVEN * turns * threads
            whole = bool(partial > _PARTIAL or (even and kernel.tiles == 1))
        straight = whole and kernel.window is None and kernel.batch * units <= threads
        return cls(units, threads, blocks, whole, straight)

    @property
    def most(self) -> tuple[int, int]:
        """Blocks of all requests up to which items are single blocks, and up to which a few."""
        return int(_SINGLE * self.threads) // self.units, FEW * _QUARTER * self.threads // self.units

    def items(self, batch: int) -> int:
        """Most items."""
        if self.whole:
            return batch
        single, few = self.most
        # A request may begin and end within a few: a window moves both.
        return max(single, few // FEW + 2 * batch, batch * -(-self.blocks // GROUP))


def plan(length_B: jax.Array, news: int, sizes: Sizes, window: int | None, causal: bool) -> tuple[jax.Array, ...]:
    """Which items hold tokens that some query sees: each request's last, the shortest first, then the full ones.

    Of `straight` sizes they are the requests in their order.

    Warpgroups take them in this order, so those that have one more than others began with a short one, and new tokens
    are put into their blocks while memory brings the next.

    Of the arrays it depends on the lengths alone, so that all layers of a window have one (`reference.Shared`). An item
    is a block, a few, a group or a whole request, which changes nothing of the results.

    Args:
      news: new tokens T.

    Returns:
      items int32 [4, most]: request, first block, end of the blocks, the prefix's length; how many there are [1];
      and [5, B]: numbers of each request's first item and of the end of its items, where its long items begin among
      all, where its last one is, and blocks of an item.
    """
    length_B = length_B.astype(_I32)
    count, low_B = length_B.shape[0], jnp.zeros_like(length_B)
    blocks_B = -(-length_B // BLOCK)
    ends_B = -(-(length_B + news) // BLOCK) if causal else blocks_B + -(-news // BLOCK)
    if window is not None:
        low_B = jnp.maximum(length_B - window + 1, 0) // BLOCK
    index_B = jnp.arange(count, dtype=_I32)
    if sizes.straight:
        ends = [low_B, low_B + 1, low_B + count, index_B, low_B + max(GROUP, sizes.blocks)]
        return jnp.stack([index_B, low_B, ends_B, length_B]), jnp.full((1,), count, _I32), jnp.stack(ends)
    if sizes.whole:
        per = jnp.full((), max(GROUP, sizes.blocks), _I32)
    else:
        total, (single, few) = (ends_B - low_B).sum(dtype=_I32), sizes.most
        per = jnp.where(total <= single, 1, jnp.where(total <= few, FEW, GROUP)).astype(_I32)
    first_B, end_B = low_B // per, -(-ends_B // per)
    long_B = end_B - first_B - 1
    sum_B = jnp.where(index_B[None, :] <= index_B[:, None], long_B[None, :], 0).sum(axis=1, dtype=_I32)
    size_B = ends_B - jnp.maximum((end_B - 1) * per, low_B)
    shorter = size_B[None, :] < size_B[:, None]
    before = shorter | ((size_B[None, :] == size_B[:, None]) & (index_B[None, :] < index_B[:, None]))
    rank_B = before.sum(axis=1, dtype=_I32)
    at = jnp.arange(sizes.items(count), dtype=_I32)
    is_long, full = at >= count, at - count
    b = jnp.minimum((full[:, None] >= sum_B[None, :]).sum(axis=1, dtype=_I32), count - 1)
    of_rank = jnp.where(rank_B[None, :] == at[:, None], index_B[None, :], 0).sum(axis=1, dtype=_I32)
    b = jnp.where(is_long, b, of_rank)
    item = jnp.where(is_long, full - (sum_B - long_B)[b] + first_B[b], end_B[b] - 1)
    first, end = jnp.maximum(item * per, low_B[b]), jnp.minimum((item + 1) * per, ends_B[b])
    ends = jnp.stack([first_B, end_B, count + sum_B - long_B, rank_B, jnp.full_like(first_B, per)])
    return jnp.stack([b, first, end, length_B[b]]), sum_B[-1:] + count, ends
