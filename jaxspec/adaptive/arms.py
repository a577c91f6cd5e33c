"""What a policy chooses among: tiers, each whole or under a budget. An arm means the same in every bucket."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxspec.tier import Choice, Tier


def packed_tokens(tier: Tier, bucket: int, budget: float) -> int:
    """Nodes of a packed round, roots included: the budget of drafted ones a row, of `bucket` rows, rounded up."""
    return min(bucket + math.ceil(budget * bucket), bucket * tier.num_nodes)


@dataclasses.dataclass(frozen=True)
class Arm:
    """A tier, and how much of it is verified.

    Attributes:
      budget: drafted nodes that are verified of a row of the padded batch, on average; None: all.
    """

    tier: Tier
    budget: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every node is verified."""
        return self.budget is None

    def tokens(self, bucket: int) -> int | None:
        """Packed tokens in a bucket; None where every node is verified."""
        return None if self.budget is None else packed_tokens(self.tier, bucket, self.budget)

    def choice(self, bucket: int, calibration: tuple[tuple[float, float], ...] = ()) -> Tier | Choice:
        """What a policy answers that chooses it."""
        tokens = self.tokens(bucket)
        return self.tier if tokens is None else Choice(self.tier, tokens, calibration)


def whole(tiers: Sequence[Tier]) -> list[Arm]:
    """Tiers without budgets."""
    return [Arm(tier) for tier in tiers]
