"""The policy that is named by an SGLang-style JSON file: a moving average of accepted drafts (see `ema`)."""

from __future__ import annotations

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.ema import AdaptiveSpeculativeParams, EmaPolicy
from jaxspec.adaptive.kind import PolicyKind, Room, Settings
from jaxspec.tier import Tier


class Sglang(PolicyKind):
    """`depth` is the step that its slots start with."""

    name = "sglang"
    fields = frozenset({"depth"})

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        policy = self.build(settings, room, None)
        reached = {tier: policy.buckets_for(tier, room.buckets) for tier in policy.tiers}
        return {tier: buckets for tier, buckets in reached.items() if buckets}

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> EmaPolicy:
        params = AdaptiveSpeculativeParams(settings.resolved_policy, settings.depth, room.buckets)
        return EmaPolicy(params, {step: settings.tier(step) for step in params.candidate_steps})


KIND = Sglang()
