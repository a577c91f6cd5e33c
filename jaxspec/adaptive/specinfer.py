"""SpecInfer* of AdaSpec's evaluation: SpecInfer's fixed token tree with a width of 1, a chain of its depth."""

from __future__ import annotations

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import PolicyKind, Room, Settings
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.tier import Tier

#: Steps of SpecInfer's expansion (1, 1, 3, 1, 1, 1, 1, 1), arXiv 2305.09781.
_DEPTH = 8


class SpecInfer(PolicyKind):
    """`depth` names another number of steps, as drafters that go less deep need."""

    name = "specinfer"
    fields = frozenset({"depth"})
    chooses = False

    def check(self, settings: Settings) -> None:
        if not self._tier(settings).is_chain or settings.depth == 0:
            raise ValueError(f"policy {self.name!r} drafts a chain, got {self._tier(settings)}")

    def _tier(self, settings: Settings) -> Tier:
        return settings.tier(_DEPTH if settings.depth is None else settings.depth)

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        return {self._tier(settings): room.buckets}

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> StaticPolicy:
        return StaticPolicy(self._tier(settings))


KIND = SpecInfer()
