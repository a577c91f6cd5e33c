"""One verify budget for a whole batch, spent on the drafts that are likeliest to survive.

Owns the rule: all drafts of all requests compete by survival, the probability that they are accepted with all before
them, and the budget is the one with the most expected tokens a second (DSpark, arXiv 2607.05147, section 3.2; vLLM's
adaptive verification). Survival falls along a chain, so what is chosen is closed under ancestors. Costs are those of
compiled shapes, a staircase: every shape is looked at, not only as long as the next one is better. Under coupled
verification any choice is exact. Must not know how survival is estimated, nor JAX.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a round verifies.

    Attributes:
      tokens: of the shape that runs, the requests' own last tokens included.
      drafts: of them, how many are drafts.
      expected: tokens that the batch is expected to gain.
      goodput: expected tokens a second; -1 where the round would take longer than it may.
    """

    tokens: int
    drafts: int
    expected: float
    goodput: float


def best_budget(
    survivals: Sequence[Sequence[float]], seconds: Mapping[int, float], longest: float | None = None
) -> Budget:
    """The shape with the most expected tokens a second; the smallest of those that tie.

    Args:
      survivals: of each request's drafts, falling; shorter where a request may draft less.
      seconds: of a whole round (drafting included) by its tokens, for every shape that is compiled.
      longest: seconds that a round may take (AdaSpec's rule: a request that accepts nothing gets one token in it).
        Where every shape takes longer, the quickest.

    Raises:
      ValueError: no shape holds one token of each request.
    """
    rows = len(survivals)
    fits = sorted(tokens for tokens in seconds if tokens >= rows)
    if not rows or not fits:
        raise ValueError(f"no shape holds a token of each of {rows} requests, only {sorted(seconds)} tokens")
    ranked = sorted((s for chain in survivals for s in chain), reverse=True)
    expected, drafts, best = float(rows), 0, None
    for tokens in fits:
        room = min(tokens - rows, len(ranked))
        expected += sum(ranked[drafts:room])
        drafts = room
        late = longest is not None and seconds[tokens] > longest
        found = Budget(tokens, drafts, expected, -1.0 if late else expected / seconds[tokens])
        quicker = late and best is not None and best.goodput < 0 and seconds[tokens] < seconds[best.tokens]
        if best is None or found.goodput > best.goodput or quicker:
            best = found
    assert best is not None
    return best


def spend(survivals: Sequence[Sequence[float]], drafts: int) -> list[int]:
    """How many drafts of each request are verified when so many are in all: the likeliest, ties by depth, then row."""
    lengths = [0] * len(survivals)
    heads = [(-chain[0], 0, row) for row, chain in enumerate(survivals) if chain]
    heapq.heapify(heads)
    for _ in range(min(drafts, sum(len(chain) for chain in survivals))):
        _, depth, row = heapq.heappop(heads)
        lengths[row] = depth + 1
        if depth + 1 < len(survivals[row]):
            heapq.heappush(heads, (-survivals[row][depth + 1], depth + 1, row))
    return lengths
