"""The policy that never changes its mind. Also the baseline that every other policy is measured against."""

from __future__ import annotations

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import PolicyKind, Room, Running, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import PLAIN, Tier


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


class Static(PolicyKind):
    """The tier that a user names, three draft tokens deep where none is said."""

    name = "static"
    fields = frozenset({"depth"})
    chooses = False
    switched_by_depth = True

    def check(self, settings: Settings) -> None:
        self._tier(settings)

    def _tier(self, settings: Settings) -> Tier:
        return settings.tier(3 if settings.depth is None else settings.depth)

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        return {self._tier(settings): room.buckets}

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> StaticPolicy:
        return StaticPolicy(self._tier(settings))

    def switch(self, running: Running, depth: int | None) -> StaticPolicy:
        what = f"policy {self.name!r} (tier {PLAIN.name})" if depth is None else f"depth {depth}"
        found = [tier for tier in running.compiled if tier.depth == (depth or 0)]
        if not found:
            raise ValueError(
                f"{what} needs a compiled tier, and this server has {[tier.name for tier in running.compiled]}"
            )
        return StaticPolicy(found[0])  # chains sort before trees


class Off(Static):
    """Plain decoding, whatever depth is named besides."""

    name = "off"
    drafts = False
    switched_by_depth = False

    def check(self, settings: Settings) -> None:
        return None

    def _tier(self, settings: Settings) -> Tier:
        return PLAIN


KIND, OFF = Static(), Off()
