"""What it takes to draft again after rounds without drafts: the drafter's cache first takes in what it has missed.

That pass is as wide as the batch times what may be missing, and can take longer than a plain round (on two cores 1.0
and 1.3 times as long at batch 4 and 16). A round before which it ran tells of both together. Owns what it is believed
to take, in plain rounds, and when it is due. Must not know which arms are tried, nor JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxspec.adaptive.policy import RoundStats

#: In plain rounds: what is assumed before it was seen, of one request, and more with each doubling of the batch, for
#: the pass grows with it and a plain round hardly does; its standard deviation; and how far what another bucket saw may
#: be off, as a share of it, and besides.
_USUAL, _DOUBLED, _ERROR = 0.3, 0.1, 0.5
_BORROWED, _BESIDES = 0.5, 0.1
#: How much less sure each time makes what the times before have told.
_FADING = 1.1


class Entry:
    """The pass before drafts, by bucket.

    Args:
      buckets: padded batch sizes. deepest: tier; a draft consumes by itself what a round of it commits.
    """

    def __init__(self, buckets: Sequence[int], deepest: int) -> None:
        self._window, self._lag, self._timed = deepest + 1, 1, False
        self._known: dict[int, tuple[float, float]] = {}
        self._buckets = tuple(buckets)

    def ran(self, stats: RoundStats) -> None:
        """Counts the finished rounds of a dispatch."""
        took_in, growth = stats.tier.depth and not stats.tier.lookup, stats.tier.depth + 1
        self._lag = growth if took_in else self._lag + growth * stats.dispatched
        self._timed = self._timed or stats.seconds > 0 or stats.entered > 0

    @property
    def due(self) -> bool:
        """Whether rows of which all rounds were seen lack more than a draft consumes by itself; not before any round
        was timed: perhaps none ever is."""
        return self._timed and self._lag > self._window

    def spare(self, depth: int) -> int:
        """Rounds without drafts that may follow rounds of so many before it becomes due."""
        return max(0, self._window - depth - 1)

    def plain_rounds(self, bucket: int) -> tuple[float, float]:
        """What the pass takes where it is due, and the standard deviation of its error, in plain rounds."""
        known = self._known.get(bucket)
        if known is not None or not self._known:
            return known or (_USUAL + _DOUBLED * math.log2(bucket), _ERROR)
        near, _ = self._known[min(self._known, key=lambda b: (abs(math.log2(b / bucket)), b))]
        return near, _BORROWED * near + _BESIDES

    def learn(self, bucket: int, plain_rounds: float, error: float) -> None:
        """Takes what is believed of it after a round that told."""
        self._known[bucket] = max(0.0, plain_rounds), max(0.02, _FADING * error)
