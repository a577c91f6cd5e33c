"""Phases of constant acceptance and batch size, played against a policy, whose regret is exact: all is known.

Expected tokens a second of the tiers that ran are set against those of the best tier. Costs are in plain steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

from jaxspec.adaptive import (
    BatchView,
    CostTable,
    RoundStats,
    TierPolicy,
)
from jaxspec.tier import Tier

#: Seconds by depth, as measured on two CPU cores: `COSTS[bucket][depth]`.
COSTS = {
    1: [1.0, 1.45, 1.6, 1.8, 2.05, 2.4],
    4: [1.0, 1.6, 1.85, 2.2, 2.6, 3.1],
    16: [1.0, 1.9, 2.5, 3.0, 3.6, 4.3],
}
CHAINS = [Tier(d) for d in range(6)]


def table(costs: dict[int, list[float]]) -> CostTable:
    return CostTable({(Tier(d), b): s for b, row in costs.items() for d, s in enumerate(row)})


def tokens(rates: Sequence[float], depth: int) -> float:
    """Expected tokens of a chain's round."""
    total, alive = 1.0, 1.0
    for rate in rates[:depth]:
        alive *= rate
        total += alive
    return total


@dataclasses.dataclass
class Phase:
    """A stretch of constant acceptance and batch size, and what a policy did in it."""

    rates: Sequence[float]
    batch: int
    rounds: int
    tiers: list[Tier] = dataclasses.field(default_factory=list)
    goodput: float = 0.0
    best: float = 0.0

    @property
    def regret(self) -> float:
        return 1 - self.goodput / self.best

    @property
    def switches(self) -> int:
        return sum(a != b for a, b in itertools.pairwise(self.tiers))


def flat(rate: float) -> list[float]:
    return [rate] * 5


def simulate(
    policy: TierPolicy,
    phases: Sequence[tuple[Sequence[float], int, int]],
    seed: int,
    costs: dict[int, list[float]] = COSTS,
    late: int = 1,
    timed: Callable[[random.Random, Tier], float] | None = None,
    entry: float = 0.0,
) -> list[Phase]:
    """Runs phases of (rates, batch, rounds); feedback arrives `late` rounds late.

    Args:
      entry: seconds of the pass in which the drafter takes in what it has missed, before the first draft after others.
    """
    chance, pending, done, lag = random.Random(seed), [], [], 1
    for rates, batch, rounds in phases:
        phase = Phase(rates, batch, rounds)
        gained = spent = 0.0
        for _ in range(rounds):
            tier = policy.select(BatchView(batch, batch))
            accepted = []
            for _ in range(batch):
                count = 0
                while count < tier.depth and chance.random() < rates[count]:
                    count += 1
                accepted.append(count)
            seconds, takes = costs[batch][tier.depth], timed(chance, tier) if timed else 0.0
            told = {"seconds": seconds * takes}
            if entry and tier.depth and lag > len(costs[batch]):
                seconds += entry
                told = {"entered": seconds * takes}
            lag = tier.depth + 1 + (0 if tier.depth else lag)
            pending.append(RoundStats(tier, batch, batch, tuple(accepted), **told))
            while len(pending) > late:
                policy.observe(pending.pop(0))
            phase.tiers.append(tier)
            gained += tokens(rates, tier.depth)
            spent += seconds
        phase.goodput = gained / spent
        phase.best = max(tokens(rates, d) / s for d, s in enumerate(costs[batch]))
        done.append(phase)
    return done
