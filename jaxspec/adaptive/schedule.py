"""A fixed depth for each batch size: vLLM's `num_speculative_tokens_per_batch_size`.

Keyed by the requests that decode, never by prompts that are under way, so that those cannot flip it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import PolicyKind, Room, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import Tier

#: Of vLLM's speculative configuration, and of SpeculationConfig.
FIELD = "num_speculative_tokens_per_batch_size"
#: Most draft tokens of an entry.
_DEEPEST = 32


def checked(entries: object) -> tuple[tuple[int, int, int], ...]:
    """Entries (least batch size, greatest batch size, draft tokens), ascending.

    Raises:
      ValueError: entries that are malformed, overlap, or leave out batch size 1.
    """
    what = "(least batch size, greatest batch size, draft tokens)"
    form = f"{FIELD} must hold {what}, ascending from 1, at most {_DEEPEST} draft tokens"
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ValueError(f"{form}, got {entries!r}")
    after = 0
    for entry in entries:
        whole = isinstance(entry, Sequence) and len(entry) == 3
        if not whole or any(isinstance(x, bool) or not isinstance(x, int) for x in entry):
            raise ValueError(f"{form}, got {entry!r}")
        least, greatest, drafts = entry
        if not after < least <= greatest or not 0 <= drafts <= _DEEPEST or (not after and least != 1):
            raise ValueError(f"{form}, got {entry!r} after batch size {after}")
        after = greatest
    return tuple((least, greatest, drafts) for least, greatest, drafts in entries)


class SchedulePolicy:
    """The entry of the batch size; in a gap, and beyond the last entry, that of the entry below.

    Args:
      entries: see `checked`.
      tiers: the tier of each number of draft tokens.
      buckets: padded batch sizes.
    """

    def __init__(self, entries: Sequence[tuple[int, int, int]], tiers: dict[int, Tier], buckets: Sequence[int]) -> None:
        self._least = [least for least, _, _ in entries]
        self._tiers = [tiers[drafts] for _, _, drafts in entries]
        self._buckets = tuple(sorted(buckets))
        self.tiers: tuple[Tier, ...] = tuple(sorted({tier for b in self._buckets for tier in self._within(b)}))

    def _within(self, bucket: int) -> set[Tier]:
        """What the batch sizes that are padded to the bucket select."""
        below = max((b for b in self._buckets if b < bucket), default=0)
        first, last = (bisect.bisect_right(self._least, size) - 1 for size in (below + 1, bucket))
        return set(self._tiers[first : last + 1])

    def select(self, view: BatchView) -> Tier:
        """The tier of the batch size."""
        return self._tiers[bisect.bisect_right(self._least, view.batch_size) - 1]

    def observe(self, stats: RoundStats) -> None:
        """Nothing to learn."""

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Nothing to learn."""

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `buckets` in which a batch size selects the tier."""
        return tuple(b for b in buckets if tier in self._within(b))


class Schedule(PolicyKind):
    """The schedule that a user gives."""

    name = "schedule"
    fields = frozenset({FIELD})

    def check(self, settings: Settings) -> None:
        if settings.num_speculative_tokens_per_batch_size is None:
            raise ValueError(f"the schedule policy needs {FIELD}, such as [[1, 4, 5], [5, 16, 2], [17, 64, 0]]")
        for _, _, drafts in checked(settings.num_speculative_tokens_per_batch_size):
            settings.tier(drafts)

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        policy = self.build(settings, room, None)
        return {tier: policy.buckets_for(tier, room.buckets) for tier in policy.tiers}

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> SchedulePolicy:
        entries = settings.num_speculative_tokens_per_batch_size
        assert entries is not None
        return SchedulePolicy(entries, {drafts: settings.tier(drafts) for _, _, drafts in entries}, room.buckets)


KIND = Schedule()
