"""The default kind of policy: which tiers and budgets it can choose, and how it is built."""

from __future__ import annotations

from jaxspec.adaptive.arms import Arm, packed_tokens
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.goodput import GoodputPolicy
from jaxspec.adaptive.kind import PolicyKind, Room, Running, Settings
from jaxspec.adaptive.policy import TierPolicy
from jaxspec.tier import Tier

#: The least padded batch size that has budgets where the user names none.
_LEAST_BATCH = 8
#: Drafts by which a chain is at least deeper than its budget: so much the easy rows take of the others. What deeper
#: chains draft beyond is little, is paid by all and goes to those that need it least.
_ROOM = 1


class Goodput(PolicyKind):
    """The tiers that a user names, or chains and trees of the depths that pay on this device; some also packed.

    Of a chain and a tree of the same depth the tree is packed: what a budget leaves of it is as many tokens to verify,
    and it has more to choose from. Budgets spread what is verified over the rows of a batch, which takes several: at
    small batch sizes there are none.
    """

    name = "adaptive"
    fields = frozenset({"candidate_steps", "candidate_budgets", "tiers"})
    needs_costs = heeds_tpot = True

    def check(self, settings: Settings) -> None:
        if settings.candidate_budgets and settings.verification != "coupled":
            raise ValueError(
                f"candidate_budgets {settings.candidate_budgets} need 'coupled' verification, which is exact whatever "
                f"is verified, got {settings.verification!r}"
            )
        # Depths that are not named are the engine's, and some of them are deep enough.
        named = settings.tiers or [settings.tier(step) for step in settings.candidate_steps or (2,) if step]
        if settings.candidate_budgets and not any(not t.lookup and t.num_nodes > 2 for t in named):
            raise ValueError(
                f"candidate_budgets {settings.candidate_budgets} need a tier of at least 2 drafts to leave some out, "
                f"got {[tier.name for tier in named]}"
            )

    def _tiers(self, settings: Settings, room: Room) -> tuple[Tier, ...]:
        if settings.tiers is not None:
            return settings.tiers
        steps = room.steps if settings.candidate_steps is None else settings.candidate_steps
        return (*(settings.tier(step) for step in sorted({0, *steps})), *(Tier(d, lookup=True) for d in room.lookups))

    def _packed(self, settings: Settings, room: Room) -> list[Arm]:
        """Each budget with the shallowest chain from which it leaves enough out; of trees with the deepest."""
        tiers = sorted(tier for tier in self._tiers(settings, room) if not tier.lookup and tier.num_nodes > 2)
        if not tiers or settings.verification != "coupled":
            return []
        named = room.budgets if settings.candidate_budgets is None else settings.candidate_budgets
        deepest = tiers[-1]
        enough = lambda tier, budget: tier.is_chain and tier.depth >= budget + _ROOM
        fitting = lambda budget: next((tier for tier in tiers if deepest.is_chain and enough(tier, budget)), deepest)
        return [Arm(tier, budget) for budget in sorted(named) if budget < (tier := fitting(budget)).num_nodes - 1]

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        return dict.fromkeys(self._tiers(settings, room), room.buckets)

    def budgets(self, settings: Settings, room: Room) -> dict[tuple[Tier, int], tuple[int, ...]]:
        least = _LEAST_BATCH if settings.candidate_budgets is None else 1
        found: dict[tuple[Tier, int], set[int]] = {}
        for arm in self._packed(settings, room):
            for bucket in room.buckets:
                if bucket >= least:
                    found.setdefault((arm.tier, bucket), set()).add(packed_tokens(arm.tier, bucket, arm.budget or 0.0))
        return {key: tuple(sorted(tokens)) for key, tokens in found.items()}

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> GoodputPolicy:
        assert cost is not None
        packed = self._packed(settings, room)
        return GoodputPolicy(self._tiers(settings, room), cost, buckets=room.buckets, packed=packed)

    def switch(self, running: Running, depth: int | None) -> TierPolicy:
        """That of a file too, which adapts as well."""
        if not running.kind.chooses or len(running.compiled) < 2:
            raise ValueError(
                f"policy {self.name!r} needs tiers to choose among; this server was started with policy "
                f"{running.named!r} and has {[tier.name for tier in running.compiled]}"
            )
        return running.renew()


KIND = Goodput()
