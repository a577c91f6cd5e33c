"""Whether the rounds of a bucket go on as they did, so that most of them need neither thought nor study.

In a large batch a single round tells much, and what it tells is soon known: while nothing changes, one round in eight
is decided and studied in full, and the others are only compared with what is expected. Of plain decoding a round tells
nothing but its seconds, whatever the batch: of a small one every second is looked at. The first that differs ends that.
Must not know policies' rules, nor JAX.
"""

from __future__ import annotations

import dataclasses
import math
import operator

from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import Choice, Tier, as_choice

#: Requests from which a round tells enough; decisions in a row that must have been alike; what is left of that after a
#: round that differs; and of how many rounds one is looked at, and of plain ones of fewer requests.
_LEAST, _CALM, _DISTURBED, _EVERY, _EVERY_PLAIN = 16, 12, 9, 8, 2
#: How far a round's accepted drafts may be off, in standard deviations of their mean; the same of a sum over rounds,
#: and what that keeps of itself; and how far its log seconds.
_ODD, _DRIFT, _KEPT, _SLOW = 3.0, 5.0, 0.8, 0.3
#: How far what is expected may be from what it was of late for that to be settled, and how fast the latter follows.
_SETTLED, _FOLLOWS = 0.02, 0.1


@dataclasses.dataclass
class Steady:
    """Of one bucket.

    Attributes:
      calm: decisions in a row that were alike. left: rounds that the last one still stands for.
      choice: the last one. tokens, seconds: what a round of it gives a request, and takes.
      heard: its rounds whose results have come. drift: by how much these were off of late. late: tokens as they were.
      every: of how many rounds one is looked at. plain: whether the last decision was plain decoding.
      passed: rounds since the last that was studied.
    """

    calm: int = 0
    left: int = 0
    choice: Tier | Choice | None = None
    tokens: float = 0.0
    seconds: float = 0.0
    heard: int = 0
    drift: float = 0.0
    late: float = 0.0
    every: int = _EVERY
    plain: bool = False
    passed: int = 0

    def repeats(self, view: BatchView, rounds: int) -> bool:
        """Whether the last decision stands for this dispatch as well, of so many rounds; counts it."""
        rows = view.batch_size * rounds
        if self.left <= 0 or view.tpot is not None or (rows < _LEAST and not self.plain):
            return False
        self.left -= 1
        return True

    def decided(self, choice: Tier | Choice, rows: int, tokens: float, seconds: float) -> None:
        """A dispatch was decided that is no probe; so many rows its rounds have together."""
        if self.choice is None or as_choice(choice)[:2] != as_choice(self.choice)[:2]:
            self.calm, self.late, self.drift = 0, tokens, 0.0
        self.late += _FOLLOWS * (tokens - self.late)
        if abs(tokens - self.late) > _SETTLED * tokens:
            self.disturb()
        self.calm, self.choice, self.tokens, self.seconds = self.calm + 1, choice, tokens, seconds
        self.plain = as_choice(choice).tier.depth == 0
        self.every = _EVERY if rows >= _LEAST else _EVERY_PLAIN
        self.left = self.every - 1 if self.calm > _CALM else 0

    def studied(self) -> int:
        """Rounds that the one stands for which is studied now: those since the one before, itself included."""
        passed, self.passed = self.passed, 0
        return passed

    def disturb(self) -> None:
        """Something happened: the next rounds are looked at."""
        self.calm, self.left = min(self.calm, _DISTURBED), 0

    def is_usual(self, stats: RoundStats, *, timed: bool) -> bool:
        """Whether a round needs no study; one that differs disturbs.

        Args:
          timed: whether its seconds count.
        """
        rows, self.passed = len(stats.num_accepted), self.passed + stats.dispatched
        if self.calm <= _CALM or self.choice is None or (rows < _LEAST and not self.plain):
            return False
        ran = as_choice(self.choice)
        if (ran.tier, ran.tokens) != (stats.tier, stats.tokens):
            return False
        if self.plain:
            if timed and abs(math.log(stats.seconds / self.seconds)) > _SLOW:
                self.disturb()
                return False
            self.heard += 1
            return self.heard % self.every != 0
        mean = sum(stats.num_accepted) / rows
        spread = sum(map(operator.mul, stats.num_accepted, stats.num_accepted)) / rows - mean * mean
        slow = math.log(stats.seconds / self.seconds) if timed else 0.0
        off = (mean + 1 - self.tokens) / math.sqrt((spread + 1e-3) / rows)
        self.drift = _KEPT * self.drift + off
        if abs(off) > _ODD or abs(self.drift) > _DRIFT or abs(slow) > _SLOW:
            self.drift = 0.0
            self.disturb()
            return False
        self.heard += 1
        return self.heard % self.every != 0
