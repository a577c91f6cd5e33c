"""Hugging Face's heuristic schedule: two drafts more after a round that accepted all, one less after any other.

`num_assistant_tokens_schedule="heuristic"` of its assisted generation, which knows one request; here a batch counts as
one that accepted all when each of its requests did. It knows no costs and never stops drafting.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import PolicyKind, Room, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import Tier

#: What is added to the number of drafts, and taken from it.
_MORE, _LESS = 2, 1


class HeuristicPolicy:
    """A number of drafts that grows and shrinks, and the deepest tier within it.

    Args:
      tiers: what may be chosen; the deepest comes first.

    Raises:
      ValueError: none of them drafts.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers: tuple[Tier, ...] = tuple(sorted(tier for tier in set(tiers) if tier.depth))
        if not self.tiers:
            raise ValueError(f"the heuristic policy needs a tier that drafts, got {[tier.name for tier in tiers]}")
        self.number = self.tiers[-1].depth

    def select(self, view: BatchView) -> Tier:
        """The deepest tier of at most `number` drafts, or the shallowest."""
        return max((tier for tier in self.tiers if tier.depth <= self.number), default=self.tiers[0])

    def observe(self, stats: RoundStats) -> None:
        """Adds or takes; rounds without drafts or without requests say nothing."""
        if not stats.tier.depth or not stats.num_accepted:
            return
        if min(stats.num_accepted) >= stats.tier.depth:
            self.number = min(self.number + _MORE, self.tiers[-1].depth)
        else:
            self.number = max(1, self.number - _LESS)

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Costs play no part."""

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """All buckets for its tiers, none for another."""
        return tuple(buckets) if tier in self.tiers else ()


class Heuristic(PolicyKind):
    """Over the depths that a user names, or those that an engine has anyway."""

    name = "heuristic"
    fields = frozenset({"candidate_steps", "tiers"})

    def _tiers(self, settings: Settings, room: Room) -> tuple[Tier, ...]:
        steps = room.steps if settings.candidate_steps is None else settings.candidate_steps
        tiers = settings.tiers or [settings.tier(step) for step in steps]
        return tuple(sorted({tier for tier in tiers if tier.depth}))

    def check(self, settings: Settings) -> None:
        if settings.candidate_steps is not None and not any(settings.candidate_steps):
            raise ValueError(f"the heuristic policy always drafts, got candidate_steps {settings.candidate_steps}")

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        return dict.fromkeys(self._tiers(settings, room), room.buckets)

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> HeuristicPolicy:
        return HeuristicPolicy(self._tiers(settings, room))


KIND = Heuristic()
