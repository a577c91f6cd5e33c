"""AdaSpec's rules (SoCC '25, section 5): how deep to draft, which drafts to verify, and what a round is worth.

The paper's algorithms over chains, with confidences for acceptance rates as it has them. Its loops stop at the first
step that does not gain, as its costs are a line; where shapes are compiled costs are a staircase, on which that halts
too early: `budget.best_budget` looks at every shape instead. Must not know how costs are measured, nor JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxspec.adaptive.budget import spend

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
