"""The policy that never changes its mind. Also the baseline that every other policy is measured against."""

from __future__ import annotations

from jaxspec.adaptive.arms import packed_tokens
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import PolicyKind, Room, Running, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import PLAIN, Choice, Tier


class StaticPolicy:
    """Runs one tier at every batch size; `StaticPolicy(PLAIN)` turns speculation off.

    Args:
      budget: drafted nodes that are verified of a row of the padded batch, on average; None: all.
    """

    def __init__(self, tier: Tier, budget: float | None = None) -> None:
        self.tier, self.budget = tier, budget
        self.tiers: tuple[Tier, ...] = (tier,)

    def select(self, view: BatchView) -> Tier | Choice:
        """The one tier."""
        if self.budget is None:
            return self.tier
        return Choice(self.tier, packed_tokens(self.tier, view.bucket, self.budget))

    def observe(self, stats: RoundStats) -> None:
        """Nothing to learn."""

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Nothing to learn."""

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """All buckets for the one tier, none for another."""
        return tuple(buckets) if tier == self.tier else ()


class Static(PolicyKind):
    """The tier that a user names, three draft tokens deep where none is said."""

    name = "static"
    fields = frozenset({"depth", "budget"})
    chooses = False
    switched_by_depth = True

    def check(self, settings: Settings) -> None:
        tier = self._tier(settings)
        if settings.budget is None:
            return
        if settings.verification != "coupled":
            raise ValueError(
                f"budget {settings.budget} needs 'coupled' verification, which is exact whatever is verified, "
                f"got {settings.verification!r}"
            )
        if tier.depth == 0:
            raise ValueError(f"budget {settings.budget} is for drafted tokens, got depth 0")

    def _tier(self, settings: Settings) -> Tier:
        return settings.tier(3 if settings.depth is None else settings.depth)

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        return {self._tier(settings): room.buckets}

    def budgets(self, settings: Settings, room: Room) -> dict[tuple[Tier, int], tuple[int, ...]]:
        tier, budget = self._tier(settings), settings.budget
        if budget is None:
            return {}
        return {(tier, bucket): (packed_tokens(tier, bucket, budget),) for bucket in room.buckets}

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> StaticPolicy:
        return StaticPolicy(self._tier(settings), settings.budget)

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
    fields = frozenset({"depth"})
    drafts = False
    switched_by_depth = False

    def check(self, settings: Settings) -> None:
        return None

    def _tier(self, settings: Settings) -> Tier:
        return PLAIN


KIND, OFF = Static(), Off()
