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
#: Items are single blocks up to so many for each warpgroup that computes, and groups beyond so many times 4 blocks, or
#: so many where the lengths say what is cut.
_SINGLE, _QUARTER, _QUARTERS = 1.5, 4, 3
#: Share of the warpgroups' turns that whole requests must fill to be items.
_EVEN = 0.9
#: Bytes of partial sums from which on a request is one item.
_PARTIAL = 48 << 20
#: The same of sums that are only written where requests are cut.
_ROOM = 96 << 20
#: Blocks of a request up to which it matters little that others are shorter.
_SHORT = 24
#: Share of the warpgroups that keep memory busy; while fewer have blocks left, it rests.
_BUSY = 0.55
#: What pieces cost, in blocks: to begin one, and to make the result of all.
_PIECE, _RESULT = 1.5, 4
#: Blocks of a request beyond which it is cut into groups: who adds up its pieces takes them one after the other.
_LONG = 64
_I32, _F32 = jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What items may be, by the shapes alone.

    Attributes:
      units: KV heads times tiles of an item. threads: warpgroups that compute at once.
      blocks: most of one request. whole: whether a request is one item. straight: whether the items are the requests
        in their order, each from its first token on, as all are computed at once. mixed: whether the lengths say if
        requests are one item or are cut, so that nobody waits long for the longest. room: items there are at most, 0
        for any number.
    """

    units: int
    threads: int
    blocks: int
    whole: bool
    straight: bool = False
    mixed: bool = False
    room: int = 0

    @classmethod
    def of(cls, kernel: Any, capacity: int, whole: bool | None = None) -> Sizes:
        blocks = -(-(round_up(capacity, BLOCK) + kernel.entries) // BLOCK)
        units = kernel.kv_heads * kernel.tiles
        threads = kernel.teams * kernel.programs
        item, mixed = units * kernel.height * kernel.head_dim * 4, False
        if whole is None:
            turns = -(-kernel.batch * units // threads)
            even = kernel.batch * units >= _EVEN * turns * threads
            whole = bool(kernel.batch * -(-blocks // GROUP) * item > _PARTIAL or (even and kernel.tiles == 1))
            mixed = whole and kernel.spread and blocks > _SHORT
        if mixed:
            return cls(units, threads, blocks, False, mixed=True, room=max(_ROOM // item, 2 * kernel.batch))
        straight = whole and kernel.window is None and kernel.batch * units <= threads
        return cls(units, threads, blocks, whole, straight)

    @property
    def most(self) -> tuple[int, int]:
        """Blocks of all requests up to which items are single blocks, and up to which a few."""
        quarters = _QUARTERS if self.mixed else _QUARTER
        return int(_SINGLE * self.threads) // self.units, FEW * quarters * self.threads // self.units

    def items(self, batch: int) -> int:
        """Most items."""
        if self.whole:
            return batch
        single, few = self.most
        # A request may begin and end within a few: a window moves both.
        most = max(single, few // FEW + 2 * batch, batch * -(-self.blocks // GROUP))
        return min(most, self.room) if self.room else most


def plan(length_B: jax.Array, news: int, sizes: Sizes, window: int | None, causal: bool) -> tuple[jax.Array, ...]:
    """Which items hold tokens that some query sees: each request's last, the shortest first, then the full ones.

    Warpgroups take them in this order, so those that have one more than others began with a short one, and new tokens
    are put into their blocks while memory brings the next. Of `straight` sizes they are the requests in their order,
    of other whole ones the longest first, and so are the items of `mixed` sizes.

    Of the arrays it depends on the lengths alone, so that all layers of a window have one (`reference.Shared`). An item
    is a block, a few, a group or a whole request, which changes nothing of the results.

    Args:
      news: new tokens T.

    Returns:
      items int32 [5, most]: request, first block, end of the blocks, the prefix's length, how many other items the
      request has; how many there are, and whether all are whole requests [2]; and [5, B]: numbers of each request's
      first item and of the end of its items, where its long items begin among all, where its last one is, and blocks
      of an item.
    """
    length_B = length_B.astype(_I32)
    count, low_B = length_B.shape[0], jnp.zeros_like(length_B)
    blocks_B = -(-length_B // BLOCK)
    ends_B = -(-(length_B + news) // BLOCK) if causal else blocks_B + -(-news // BLOCK)
    if window is not None:
        low_B = jnp.maximum(length_B - window + 1, 0) // BLOCK
    index_B, request = jnp.arange(count, dtype=_I32), max(GROUP, sizes.blocks)
    if sizes.straight:
        ends = [low_B, low_B + 1, low_B + count, index_B, low_B + request]
        items = [index_B, low_B, ends_B, length_B, low_B]
        return jnp.stack(items), jnp.asarray([count, 1], _I32), jnp.stack(ends)
    if sizes.mixed:
        whole, per_B = _of_lengths(low_B, ends_B, sizes)
    else:
        whole = jnp.full((), sizes.whole)
        per = request if sizes.whole else _piece((ends_B - low_B).sum(dtype=_I32), sizes)
        per_B = jnp.broadcast_to(jnp.asarray(per, _I32), (count,))
    first_B, end_B = low_B // per_B, -(-ends_B // per_B)
    long_B = end_B - first_B - 1
    not_after = _before(-per_B) | (index_B[None, :] == index_B[:, None])  # large items first
    sum_B = jnp.where(not_after, long_B[None, :], 0).sum(axis=1, dtype=_I32)
    size_B = ends_B - jnp.maximum((end_B - 1) * per_B, low_B)
    rank_B = _before(-size_B if sizes.whole or sizes.mixed else size_B).sum(axis=1, dtype=_I32)
    fulls, at = long_B.sum(dtype=_I32), jnp.arange(sizes.items(count), dtype=_I32)
    full, last_B = at - count, rank_B
    if sizes.mixed:
        full, last_B = at, rank_B + fulls
    is_long = (full >= 0) & (full < fulls)
    is_full = (full[:, None] < sum_B[None, :]) & (full[:, None] >= (sum_B - long_B)[None, :])
    is_b = jnp.where(is_long[:, None], is_full, last_B[None, :] == at[:, None])
    b = jnp.where(is_b, index_B[None, :], 0).sum(axis=1, dtype=_I32)
    item = jnp.where(is_long, full - (sum_B - long_B)[b] + first_B[b], end_B[b] - 1)
    first, end = jnp.maximum(item * per_B[b], low_B[b]), jnp.minimum((item + 1) * per_B[b], ends_B[b])
    ends = jnp.stack([first_B, end_B, (at - full)[0] + sum_B - long_B, last_B, per_B])
    counts = jnp.stack([fulls + count, whole.astype(_I32)])
    return jnp.stack([b, first, end, length_B[b], long_B[b]]), counts, ends


def _piece(total: jax.Array, sizes: Sizes) -> jax.Array:
    """Blocks of an item, by how many there are in all."""
    single, few = sizes.most
    return jnp.where(total <= single, 1, jnp.where(total <= few, FEW, GROUP)).astype(_I32)


def _before(size_B: jax.Array) -> jax.Array:
    """Whether a number [B] comes after another [, B], the least first, and equal ones in their order."""
    index_B = jnp.arange(size_B.shape[0], dtype=_I32)
    equal = (size_B[None, :] == size_B[:, None]) & (index_B[None, :] < index_B[:, None])
    return equal | (size_B[None, :] < size_B[:, None])


def _of_lengths(low_B: jax.Array, ends_B: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Whether all requests are whole, and blocks of each one's items.

    Whole requests need no sums in memory. So they are whole while those who have the most to do do not let memory rest
    for long: it is busy while some half of the warpgroups ask for blocks.
    """
    size_B, together = ends_B - low_B, sizes.threads / sizes.units
    count, slots = size_B.shape[0], max(int(together), 1)
    mean = size_B.sum(dtype=_F32) / together
    rank_B = _before(-size_B).sum(axis=1, dtype=_I32)

    def rests(first_B: jax.Array) -> jax.Array:
        """How long memory rests, in blocks of all, if those who have the most to do are so many others' first."""
        idle = lambda others_B: jnp.maximum(_BUSY - (others_B.astype(_F32) + 1) / together, 0)
        weight_B = jnp.where(first_B > 0, idle(first_B) - idle(first_B - 1), idle(first_B))
        return (size_B.astype(_F32) * weight_B).sum()

    # Turns go to and fro, so either who began with the longest or who has a last turn has the most to do.
    at_B = rank_B % slots
    at_B = jnp.where(rank_B // slots % 2 == 1, slots - 1 - at_B, at_B)
    rest = jnp.maximum(rests(at_B), rests(slots - 1 - at_B))
    piece = jnp.where(size_B.sum(dtype=_I32) <= sizes.most[1], FEW, GROUP)
    of_pieces = _PIECE * mean / piece.astype(_F32) + piece.astype(_F32) / 2  # some have one more than others
    even = rest <= of_pieces + _RESULT
    piece_B = jnp.where(size_B <= _LONG, piece, GROUP)
    pieces = (-(-ends_B // piece_B) - low_B // piece_B).sum(dtype=_I32)
    whole = even | (pieces > sizes.items(count))
    return whole, jnp.where(whole, max(GROUP, sizes.blocks), piece_B)
