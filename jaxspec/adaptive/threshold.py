"""Hugging Face's confidence threshold: draft as long as the drafter is sure enough, whatever it costs.

`assistant_confidence_threshold` of its assisted generation, which stops a draft at the first token below it, and fits
the threshold to what rounds accepted: the value of least (false positives + 3 false negatives), as rates. A batch goes
by its mean confidence, as AdaSpec's baseline does. The depth is set before the drafts are made, so it is what the round
before would have stopped at; the first rounds, and one now and then, draft to the end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from jaxspec.adaptive.confident import ConfidentKind, ConfidentPolicy
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import Room, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import Choice

#: Where it starts, and what a false negative weighs beside a false positive; both Hugging Face's.
_START, _MISSED = 0.4, 3.0
#: Labels that a fit is made from, and how many must be there and be new before the next one.
_LABELS, _REFIT = 2000, 100
#: Rounds of which one drafts to the end: positions that nobody drafts have no confidence.
_DEEP = 16


class ThresholdPolicy(ConfidentPolicy):
    """See the module; its arms are chains that are verified whole.

    Attributes:
      threshold: of the mean confidence of a position.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.threshold = _START
        self._labels: deque[tuple[float, bool]] = deque(maxlen=_LABELS)
        self._new, self._rounds = 0, Counter[int]()

    def choose(self, view: BatchView, shapes: Mapping[int, Mapping[int, float]]) -> Choice:
        """The depth that the latest confidences would have stopped at."""
        self._rounds[view.bucket] += 1
        rates, depths = self.rates(view), sorted(shapes)
        wanted = depths[-1] if rates is None or self._rounds[view.bucket] % _DEEP == 0 else self._stop(rates)
        depth = max((d for d in depths if d <= wanted), default=depths[0])
        return self.packed(depth, max(shapes[depth]))

    def _stop(self, rates: Sequence[Sequence[float]]) -> int:
        depth = 0
        for level in zip(*rates, strict=False):
            depth += 1
            if sum(level) < self.threshold * len(level):
                break
        else:
            depth = self.tiers[-1].depth  # a shallow round that was sure to its end goes on
        return depth

    def hear(self, stats: RoundStats) -> None:
        """Fits the threshold anew when enough labels have come."""
        drafts = stats.drafts
        assert drafts is not None
        told = [
            (c, bool(right))
            for c, known, right in zip(drafts.confidence, drafts.known, drafts.right, strict=True)
            if known
        ]
        self._labels.extend(told)
        self._new += len(told)
        if self._new >= _REFIT:
            self._new, self.threshold = 0, refit(self._labels, self.threshold)


def refit(labels: Sequence[tuple[float, bool]], before: float) -> float:
    """The threshold of least false positive rate plus three times the false negative rate; `before` where one has none.

    Args:
      labels: (confidence, whether the target chose the token).
    """
    hits = sum(right for _, right in labels)
    misses = len(labels) - hits
    if not hits or not misses:
        return before
    best, found = _MISSED + 1, before
    below_hits = below_misses = 0
    for confidence, right in sorted(labels):
        # Drafts at this confidence and above count as taken.
        error = (misses - below_misses) / misses + _MISSED * below_hits / hits
        if error < best:
            best, found = error, confidence
        below_hits, below_misses = below_hits + right, below_misses + (not right)
    return found


class Threshold(ConfidentKind):
    """Over the depths that a user names, or those that an engine has anyway."""

    name = "threshold"
    fields = frozenset({"candidate_steps"})
    prunes = False

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> ThresholdPolicy:
        assert cost is not None
        return ThresholdPolicy(self.arms(settings, room), cost, room.buckets)


KIND = Threshold()
