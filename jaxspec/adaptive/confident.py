"""What policies share that decide by the latest confidences: chains under budgets, their costs, and what was drafted.

A round's shape is chosen before its drafts are known, so these policies see the confidences of the latest packed round
of the bucket, one or two rounds old (vLLM's adaptive verification does the same); which nodes are verified the device
decides by the live ones. Every round that drafts is packed, if only to its full size, for packed rounds alone tell
confidences. Must not know JAX.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxspec.adaptive.arms import Arm
from jaxspec.adaptive.calibration import Calibration
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.estimate import CostEstimate
from jaxspec.adaptive.kind import PolicyKind, Room, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import PLAIN, Choice, Tier

#: Rows of a round of which confidences are kept, evenly among all.
_ROWS = 32


class ConfidentPolicy(abc.ABC):
    """Chooses a chain and its tokens by the confidences of the bucket's latest round.

    Args:
      arms: packed chains.
      cost: seconds of plain decoding and of the arms, as far as they are known; `learn` brings others.
      buckets: padded batch sizes.
      calibrated: whether confidences are fitted to what gets accepted; False takes them at their word.

    Raises:
      ValueError: an arm that is no packed chain.
    """

    def __init__(
        self, arms: Sequence[Arm], cost: CostTable, buckets: Sequence[int], *, calibrated: bool = False
    ) -> None:
        for arm in arms:
            if arm.is_whole or not arm.tier.is_chain:
                raise ValueError(f"needs chains under budgets, got {arm}")
        self.tiers: tuple[Tier, ...] = tuple(sorted({PLAIN, *(arm.tier for arm in arms)}))
        self._arms = list(arms)
        self._cost = CostEstimate([Arm(PLAIN), *arms], sorted({*buckets, *cost.buckets}), cost)
        self._calibration = Calibration(max(1, self.tiers[-1].depth)) if calibrated else None
        self._latest: dict[int, list[list[float]]] = {}

    @abc.abstractmethod
    def choose(self, view: BatchView, shapes: Mapping[int, Mapping[int, float]]) -> Choice:
        """The round's shape.

        Args:
          shapes: seconds of packed rounds by depth and tokens, as far as they are known; never empty.
        """

    def select(self, view: BatchView) -> Tier | Choice:
        """The policy's choice; plain decoding as long as no packed round is known."""
        shapes: dict[int, dict[int, float]] = {}
        for arm in self._arms:
            tokens = arm.tokens(view.bucket)
            if self._cost.knows(arm.tier, view.bucket, tokens):
                assert tokens is not None
                shapes.setdefault(arm.tier.depth, {})[tokens] = self._cost.seconds(arm.tier, view.bucket, tokens)
        return self.choose(view, shapes) if shapes else PLAIN

    def plain(self, bucket: int) -> float | None:
        """Seconds of plain decoding; None where they are not known."""
        return self._cost.seconds(PLAIN, bucket) if self._cost.knows(PLAIN, bucket) else None

    def rates(self, view: BatchView) -> list[list[float]] | None:
        """For each request of the batch how probable each draft is, given those before; None before the first round.

        Of a round of other requests, or of some rows alone, they are repeated.
        """
        rows = self._latest.get(view.bucket)
        if not rows:
            return None
        fitted = rows if self._calibration is None else [self._calibration.rates(row) for row in rows]
        return [fitted[i % len(fitted)] for i in range(view.batch_size)]

    def survivals(self, view: BatchView) -> list[list[float]] | None:
        """For each request the probability that each draft is accepted with all before it; see `rates`."""
        rates, out = self.rates(view), []
        for row in rates or ():
            alive, chain = 1.0, []
            for rate in row:
                alive *= rate
                chain.append(alive)
            out.append(chain)
        return out if rates is not None else None

    def packed(self, depth: int, tokens: int) -> Choice:
        """The choice of a chain under a budget, with the calibration."""
        fits = () if self._calibration is None else self._calibration.fits
        return Choice(Tier(depth), tokens, tuple((round(a, 2), round(b, 2)) for a, b in fits[:depth]))

    def observe(self, stats: RoundStats) -> None:
        """Keeps a packed round's confidences, and learns what rounds cost and confidences mean."""
        if stats.seconds > 0:
            self._cost.observe(stats.tier, stats.bucket, stats.seconds, stats.tokens)
        drafts = stats.drafts
        if drafts is None or not drafts.nodes or not stats.tier.is_chain or not stats.batch_size:
            return
        count = len(drafts.confidence) // drafts.nodes
        chosen = range(0, count, max(1, count // _ROWS))
        at = lambda row: slice(row * drafts.nodes, (row + 1) * drafts.nodes)
        self._latest[stats.bucket] = [[max(0.0, c) for c in drafts.confidence[at(row)]] for row in chosen]
        if self._calibration is not None:
            self._calibration.observe(drafts, slice(None, None, chosen.step))
        self.hear(stats)

    def hear(self, stats: RoundStats) -> None:
        """What else a policy learns from a packed round."""
        return None

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Takes a measured cost."""
        self._cost.learn(tier, bucket, seconds, tokens)

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """All buckets for its tiers, none for another."""
        return tuple(buckets) if tier in self.tiers else ()


class ConfidentKind(PolicyKind):
    """A kind of such policies: which chains, and under which budgets.

    Attributes:
      deepest: only the deepest chain.
      prunes: whether it verifies less than it drafts.
    """

    fields: ClassVar[frozenset[str]] = frozenset({"candidate_steps", "candidate_budgets"})
    needs_costs = True
    deepest: ClassVar[bool] = False
    prunes: ClassVar[bool] = True

    def check(self, settings: Settings) -> None:
        if settings.verification != "coupled":
            raise ValueError(
                f"policy {self.name!r} needs 'coupled' verification, which is exact whatever is verified, "
                f"got {settings.verification!r}"
            )
        if settings.candidate_steps is not None and not any(settings.candidate_steps):
            raise ValueError(f"policy {self.name!r} needs a depth, got candidate_steps {settings.candidate_steps}")

    def arms(self, settings: Settings, room: Room) -> list[Arm]:
        """Every chain under each budget that leaves something out, and under one that leaves out nothing."""
        steps = room.steps if settings.candidate_steps is None else settings.candidate_steps
        chains = sorted({settings.tier(step) for step in steps if step})
        if not all(tier.is_chain for tier in chains):
            raise ValueError(f"policy {self.name!r} drafts chains only, got {[tier.name for tier in chains]}")
        named = room.budgets if settings.candidate_budgets is None else settings.candidate_budgets
        return [
            Arm(tier, budget)
            for tier in (chains[-1:] if self.deepest else chains)
            for budget in (*(b for b in sorted(named) if self.prunes and b < tier.depth), float(tier.depth))
        ]

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        return dict.fromkeys(sorted({PLAIN, *(arm.tier for arm in self.arms(settings, room))}), room.buckets)

    def budgets(self, settings: Settings, room: Room) -> dict[tuple[Tier, int], tuple[int, ...]]:
        found: dict[tuple[Tier, int], set[int]] = {}
        for arm in self.arms(settings, room):
            for bucket in room.buckets:
                tokens = arm.tokens(bucket)
                assert tokens is not None
                found.setdefault((arm.tier, bucket), set()).add(tokens)
        return {key: tuple(sorted(tokens)) for key, tokens in found.items()}
