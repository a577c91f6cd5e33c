"""The policy that never changes its mind. Also the baseline that every other policy is measured against."""

from __future__ import annotations

from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import Tier


class StaticPolicy:
    """Runs one tier at every batch size; `StaticPolicy(PLAIN)` turns speculation off."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.tiers: tuple[Tier, ...] = (tier,)

    def select(self, view: BatchView) -> Tier:
        """The one tier."""
        return self.tier

    def observe(self, stats: RoundStats) -> None:
        """Nothing to learn."""

    def learn(self, tier: Tier, bucket: int, seconds: float) -> None:
        """Nothing to learn."""

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """All buckets for the one tier, none for another."""
        return tuple(buckets) if tier == self.tier else ()
