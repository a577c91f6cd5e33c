"""What each round gave and how long it took, found out as its result is read.

Must not know policies or requests: whoever owns it tells those who decide.
"""

from __future__ import annotations

import time

from jaxspec.adaptive.policy import PLACE, RoundStats
from jaxspec.runtime.results import Pending, Result
from jaxspec.scheduling.pace import Pace
from jaxspec.scheduling.plan import DecodeRows
from jaxspec.tier import Tier

#: Rounds whose seconds show that a request began or ended: the one meanwhile, whose result is read late for it, and the
#: next, which seems the quicker.
_SHOWS = 2


class RoundWatch:
    """Counts and times rounds.

    Attributes:
      rounds, dispatches: read so far.
      experts: that rounds have touched, of all layers.
      round_seconds: of the latest round that was timed.
    """

    def __init__(self) -> None:
        self.rounds = self.dispatches = self.experts = 0
        self.round_seconds = 0.0
        self._eventful = 0  # rounds until the latest request that began or ended no longer shows in their seconds
        self._collected_at = 0.0

    def disturbed(self) -> None:
        """A request began or ended, or a prompt is computed."""
        self._eventful = _SHOWS

    def prompt(self) -> None:
        """A prompt's result was read."""
        self._collected_at = time.perf_counter()

    def round(
        self, pending: Pending, rows: DecodeRows, tier: Tier, result: Result, waited: float, pace: Pace
    ) -> list[RoundStats]:
        """The rounds of a dispatch, whose result was read just now.

        Args:
          rows, tier: of pending.
          waited: seconds for the result.
          pace: is told how long they took, where that is known.
        """
        now = time.perf_counter()
        if pending.timed and pending.dispatched_at < self._collected_at:
            seconds = now - self._collected_at
            pace.took((tier, pending.bucket), rows.rounds, seconds, waited, quiet=not self._eventful)
        self._eventful = max(0, self._eventful - 1)
        self.rounds += rows.rounds
        self.dispatches += 1
        since = (now - max(pending.dispatched_at, self._collected_at)) / rows.rounds
        seconds, entered = since if pending.timed else 0.0, since if pending.entered else 0.0
        self._collected_at = now
        if pending.timed:
            self.round_seconds = seconds
        counts_RB = result.counts_RB if rows.caps_B is None else result.counts_RB * (rows.caps_B >= tier.depth)
        numbers = tuple((rows.slots_B + (rows.stamps_B << PLACE)).tolist())
        whole, told = bool(counts_RB.all()), numbers
        stats: list[RoundStats] = []
        for accepted, touched in zip(map(tuple, (counts_RB - 1).tolist()), result.touched_R, strict=True):
            if not whole:
                told = tuple(number for number, count in zip(numbers, accepted, strict=True) if count >= 0)
                accepted = tuple(count for count in accepted if count >= 0)
            one = RoundStats(
                tier=tier,
                batch_size=len(rows),
                bucket=pending.bucket,
                num_accepted=accepted,
                seconds=seconds,
                context_tokens=pending.context_tokens,
                tokens=pending.tokens,
                drafts=result.drafts,
                dispatched=rows.rounds,
                rows=told,
                experts=touched,
                entered=entered,
            )
            self.experts += touched
            stats.append(one)
        return stats
