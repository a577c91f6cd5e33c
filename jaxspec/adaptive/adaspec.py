"""AdaSpec's rules (SoCC '25, section 5): how deep to draft, which drafts to verify, and what a round is worth.

The paper's algorithms over chains, with confidences for acceptance rates as it has them. Its loops stop at the first
step that does not gain, as its costs are a line; where shapes are compiled costs are a staircase, on which that halts
too early: `budget.best_budget` looks at every shape instead. The kinds at the end run them on packed rounds, whole and
as the paper's two ablations. Must not know how costs are measured, nor JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from jaxspec.adaptive.arms import Arm
from jaxspec.adaptive.budget import best_budget, spend
from jaxspec.adaptive.confident import ConfidentKind, ConfidentPolicy
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import Room, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import PLAIN, Choice

#: Seconds of a round of so many draft passes that verifies so many drafts.
Seconds = Callable[[int, int], float]


def goodput(survivals: Sequence[Sequence[float]], depth: int, seconds: Seconds, longest: float | None = None) -> float:
    """Algorithm 3: expected tokens (each request's own included) a second; -1 for a round that takes too long.

    Args:
      survivals: of each request's drafts that are verified.
      depth: draft passes of the round.
      longest: the objective's seconds a token, if any; a request that accepts nothing gets one in the round.
    """
    takes = seconds(depth, sum(len(chain) for chain in survivals))
    if longest is not None and takes > longest:
        return -1.0
    return sum(1 + sum(chain) for chain in survivals) / takes


class Prior:
    """What a draft's confidence is expected to be before it is made: the mean of those so far.

    Args:
      start: before there are any.
      keep: share that a step leaves of the older ones' weight; 1 never forgets.

    Raises:
      ValueError: a value outside (0, 1].
    """

    def __init__(self, start: float = 0.6, keep: float = 1.0) -> None:
        if not 0 < start <= 1 or not 0 < keep <= 1:
            raise ValueError(f"start and keep must lie in (0, 1], got {start} and {keep}")
        self._sum, self._count, self._keep = start, 1.0, keep

    @property
    def mean(self) -> float:
        return self._sum / self._count

    def observe(self, confidences: Sequence[float]) -> None:
        """Confidences of one draft pass."""
        self._sum = self._keep * self._sum + sum(confidences)
        self._count = self._keep * self._count + len(confidences)


def draft(
    requests: int, step: Callable[[int], Sequence[float]], prior: Prior, deepest: int, seconds: Seconds,
    longest: float | None = None,
) -> list[list[float]]:  # fmt: skip
    """Algorithm 1, the adaptive drafter: predict, execute, correct. Returns each request's survivals.

    A pass runs as long as drafts of the prior's confidence would raise the goodput; what it then really gave is what
    the next one has to beat, and the pass that lowered it stays.

    Args:
      step: runs one more pass and gives each request's confidence.
      deepest: most passes.
    """
    survivals: list[list[float]] = [[] for _ in range(requests)]
    best = goodput(survivals, 0, seconds, longest)
    for depth in range(1, deepest + 1):
        hoped = [[*chain, (chain[-1] if chain else 1.0) * prior.mean] for chain in survivals]
        if goodput(hoped, depth, seconds, longest) <= best:
            break
        confidences = step(depth)
        prior.observe(confidences)
        for chain, confidence in zip(survivals, confidences, strict=True):
            chain.append((chain[-1] if chain else 1.0) * confidence)
        best = goodput(survivals, depth, seconds, longest)
    return survivals


def verify(
    survivals: Sequence[Sequence[float]], depth: int, seconds: Seconds, longest: float | None = None
) -> list[int]:
    """Algorithm 2, the confidence prior verifier: how many drafts of each request are verified.

    The least likely goes as long as that raises the goodput.
    """
    left = sum(len(chain) for chain in survivals)
    lengths = [len(chain) for chain in survivals]
    best = goodput(survivals, depth, seconds, longest)
    while left:
        fewer = spend(survivals, left - 1)
        kept = [chain[:n] for chain, n in zip(survivals, fewer, strict=True)]
        found = goodput(kept, depth, seconds, longest)
        # A round that takes too long is worth nothing: shortening it goes on until it does not.
        if found <= best and best >= 0:
            break
        best, lengths, left = found, fewer, left - 1
    return lengths


class AdaSpecPolicy(ConfidentPolicy):
    """Algorithms 1 and 2 before each round, over the confidences of the round before.

    The paper's drafter decides after every pass whether another one pays; here a round is one program, so its passes
    are played on what the latest round drafted, with the prior where that went less deep. Confidences are taken at
    their word, as in the paper. A verifier that stops at the first step without a gain would halt on the staircase of
    compiled shapes, so it looks at every shape. As in the paper nothing is learnt while nothing is drafted.

    Args:
      arms, cost, buckets: see ConfidentPolicy.
      drafts_less: the adaptive drafter; False drafts as deep as it can.
      verifies_less: the verifier; False verifies everything.
    """

    def __init__(
        self, arms: Sequence[Arm], cost: CostTable, buckets: Sequence[int], *, drafts_less: bool = True,
        verifies_less: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(arms, cost, buckets)
        self._drafts_less, self._verifies_less = drafts_less, verifies_less
        self.prior = Prior()

    def choose(self, view: BatchView, shapes: Mapping[int, Mapping[int, float]]) -> Choice:
        """The depth at which another pass does not pay, and the shape of most goodput at it."""
        padding, deepest = view.bucket - view.batch_size, max(shapes)
        rates, depth = self.rates(view) or [[] for _ in range(view.batch_size)], deepest
        confidences = lambda d: [row[d - 1] if d <= len(row) else self.prior.mean for row in rates]

        def seconds(passes: int, drafts: int) -> float:
            if not passes:
                return self.plain(view.bucket) or math.inf
            # Of the depths that are compiled the next one, and of its shapes the one that holds them.
            depth = min((d for d in shapes if d >= passes), default=deepest)
            needed = padding + view.batch_size + drafts
            return min((s for tokens, s in shapes[depth].items() if tokens >= needed), default=math.inf)

        if self._drafts_less:
            chains = draft(view.batch_size, confidences, Prior(self.prior.mean), deepest, seconds, view.tpot)
            passes = max(map(len, chains), default=0)
            if not passes:
                return Choice(PLAIN)
            depth = min((d for d in shapes if d >= passes), default=deepest)
        fits = {tokens - padding: s for tokens, s in shapes[depth].items()}
        if not self._verifies_less:
            return self.packed(depth, max(shapes[depth]))
        survivals: list[list[float]] = [[] for _ in range(view.batch_size)]
        for level in range(1, depth + 1):
            for chain, confidence in zip(survivals, confidences(level), strict=True):
                chain.append((chain[-1] if chain else 1.0) * confidence)
        return self.packed(depth, best_budget(survivals, fits, view.tpot).tokens + padding)

    def hear(self, stats: RoundStats) -> None:
        """The prior is the mean of all confidences so far."""
        assert stats.drafts is not None
        self.prior.observe([max(0.0, c) for c in stats.drafts.confidence])


class AdaSpec(ConfidentKind):
    """Whole, or one of its two ablations."""

    heeds_tpot = True

    def __init__(self, name: str, *, drafts_less: bool = True, verifies_less: bool = True) -> None:
        self.name, self.deepest, self.prunes = name, not drafts_less, verifies_less  # type: ignore[misc]
        if not verifies_less:
            self.fields = frozenset({"candidate_steps"})  # type: ignore[misc]
        self._parts = {"drafts_less": drafts_less, "verifies_less": verifies_less}

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> AdaSpecPolicy:
        assert cost is not None
        return AdaSpecPolicy(self.arms(settings, room), cost, room.buckets, **self._parts)


KIND = AdaSpec("adaspec")
DRAFTER = AdaSpec("adaspec-drafter", verifies_less=False)
VERIFIER = AdaSpec("adaspec-verifier", drafts_less=False)
