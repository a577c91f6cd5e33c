"""One depth for all, and the verify budget of most expected tokens a second: vLLM's adaptive verification, and DSpark.

Each row drafts to the same depth; the budget is the compiled shape with the best (requests + the survivals that fit) /
seconds, from calibrated confidences of the round before (DSpark, arXiv 2607.05147, sections 3.2 and 5.2). As there, the
first rounds verify everything, so that the calibration is not censored, and drafting is never given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from jaxspec.adaptive.budget import best_budget
from jaxspec.adaptive.confident import ConfidentKind, ConfidentPolicy
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import Room, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import Choice

#: Packed rounds of a bucket that verify everything at first.
_FIRST = 30


class SurvivalPolicy(ConfidentPolicy):
    """See the module; its arms are those of one depth."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, calibrated=True, **kwargs)
        self._heard: Counter[int] = Counter()

    def choose(self, view: BatchView, shapes: Mapping[int, Mapping[int, float]]) -> Choice:
        """The deepest chain under the best budget."""
        depth = max(shapes)
        survivals = None if self._heard[view.bucket] < _FIRST else self.survivals(view)
        if survivals is None:
            return self.packed(depth, max(shapes[depth]))
        # Padding rows take a token each.
        padding = view.bucket - view.batch_size
        fits = {tokens - padding: seconds for tokens, seconds in shapes[depth].items()}
        return self.packed(depth, best_budget(survivals, fits, view.tpot).tokens + padding)

    def hear(self, stats: RoundStats) -> None:
        """Counts."""
        self._heard[stats.bucket] += 1


class Survival(ConfidentKind):
    """The deepest of the depths that a user names, or that an engine has anyway."""

    name = "survival"
    deepest = heeds_tpot = True

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> SurvivalPolicy:
        assert cost is not None
        return SurvivalPolicy(self.arms(settings, room), cost, room.buckets)


KIND = Survival()
