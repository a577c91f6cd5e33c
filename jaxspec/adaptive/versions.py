"""Which of two versions of a drafter's weights runs: they take turns for a while, and the one that drafts better stays.

Compared are tokens a round at equal choices (tier and budget), so that it does not matter which of the two the policy
happened to draft more with. Must not know weights, requests or JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence

#: Rounds that draft, of a version's turn. A draft cache keeps what the other one wrote in its turns, alike for both.
TURN = 16
#: Rounds of single requests, of each version at the same choice, before anything is decided, and after which it is.
LEAST, MOST = 200, 4000
#: A version is rolled back that brings fewer tokens a round than the one before it, by more than this share.
MARGIN = 0.03
#: Before MOST rounds only a difference of so many standard errors decides.
SURE = 4.0
#: A new trial of the same two: after so many rounds, where tokens a round have fallen by this share since the last.
RETRY, FALL = 20_000, 0.1


@dataclasses.dataclass
class _Count:
    """Rounds of single requests, and what they accepted."""

    rounds: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, accepted: Sequence[int]) -> None:
        self.rounds += len(accepted)
        self.total += sum(accepted)
        self.squares += sum(count * count for count in accepted)

    @property
    def tokens(self) -> float:
        """A round's, the target's own included."""
        return 1.0 + self.total / self.rounds

    @property
    def error(self) -> float:
        """Squared standard error of `tokens`, as if rounds were independent."""
        mean = self.total / self.rounds
        return (self.squares / self.rounds - mean * mean) / self.rounds


#: By tier and whatever else rounds must have in common to be compared.
_Counts = dict[Hashable, _Count]


@dataclasses.dataclass(frozen=True)
class _Difference:
    """How two versions compare.

    Attributes:
      rounds: of single requests, that each has at equal choices.
      share: by which the first brings more tokens a round than the second, of the second's.
      errors: the same in standard errors.
    """

    rounds: int
    share: float
    errors: float

    @classmethod
    def of(cls, new: _Counts, old: _Counts) -> _Difference:
        """Means at each choice weigh as many rounds as both have of it."""
        both = [(new[key], old[key], min(new[key].rounds, old[key].rounds)) for key in new.keys() & old.keys()]
        weight = sum(rounds for *_, rounds in both)
        if not weight:
            return cls(0, 0.0, 0.0)
        gain = sum(rounds * (a.tokens - b.tokens) for a, b, rounds in both) / weight
        usual = sum(rounds * b.tokens for _, b, rounds in both) / weight
        error = math.sqrt(sum((rounds / weight) ** 2 * (a.error + b.error) for a, b, rounds in both))
        return cls(weight, gain / usual, gain / error if error else math.copysign(math.inf, gain) if gain else 0.0)


class Versions:
    """The version that is served, the one kept beside it, and the trial between them.

    A trial gives both turns of TURN rounds. It ends when either is better by SURE standard errors after LEAST rounds of
    single requests each, or after MOST: then the newer one stays unless it brings fewer tokens a round by more than
    MARGIN. The loser is kept. When tokens a round have fallen by FALL since the last trial, RETRY rounds after it at
    the earliest, the two are tried again: the traffic may have gone back to what the other was trained for.

    Attributes:
      served: the version that runs outside of trials, and the older one within. other: the one beside it, or None.
      trying: whether the two take turns.
      updates, rollbacks: versions that came; trials that ended with the older one.
    """

    def __init__(self, first: int = 1):
        self.served, self.other, self.trying = first, None, False
        self.updates = self.rollbacks = 0
        self._newest, self._left, self._turn = first, 0, first
        self._counts: dict[int, _Counts] = {}
        self._level: _Counts = {}
        self._since = 0

    def __iter__(self) -> Iterator[int]:
        """The versions whose weights are needed."""
        return iter(version for version in (self.served, self.other) if version is not None)

    def introduce(self, *, trial: bool = True) -> int:
        """The number of a version that has come, which takes turns with the served one, or takes its place at once.

        A version that was on trial, or kept, gives way to it.
        """
        self._newest += 1
        self.updates += 1
        if trial:
            self.other = self._newest
            self._try()
        else:
            self.served, self.other = self._newest, self.served
            self._end({})
        return self._newest

    def next(self, rounds: int) -> int:
        """The version of the next `rounds` rounds, which draft."""
        if not self.trying or self.other is None:
            return self.served
        if self._left <= 0:
            self._turn = self.other if self._turn == self.served else self.served
            self._left = TURN
        self._left -= rounds
        return self._turn

    def observe(self, version: int, choice: Hashable, accepted: Sequence[int]) -> None:
        """Drafts that the rows of a finished round accepted; what a version accepted that is gone counts for nothing.

        Args:
          choice: what rounds have in common that may be compared.
        """
        if not accepted or version not in self:
            return
        if self.trying:
            self._counts.setdefault(version, {}).setdefault(choice, _Count()).add(accepted)
            self._decide()
        elif version == self.served:
            self._since += len(accepted)
            self._counts.setdefault(version, {}).setdefault(choice, _Count()).add(accepted)
            self._look_back()

    def _try(self) -> None:
        self.trying, self._left, self._turn, self._counts = True, 0, self.served, {}

    def _end(self, level: _Counts) -> None:
        self.trying, self._counts, self._level, self._since = False, {}, level, 0

    def _decide(self) -> None:
        assert self.other is not None
        newer, older = max(self.served, self.other), min(self.served, self.other)
        difference = _Difference.of(self._counts.get(newer, {}), self._counts.get(older, {}))
        sure = difference.rounds >= LEAST and abs(difference.errors) >= SURE
        if not sure and difference.rounds < MOST:
            return
        keep = difference.share > 0 if sure else difference.share >= -MARGIN
        self.rollbacks += not keep
        self.served, self.other = (newer, older) if keep else (older, newer)
        self._end(self._counts[self.served])

    def _look_back(self) -> None:
        """Every MOST rounds: whether tokens a round have fallen since the last trial."""
        recent = self._counts[self.served]
        if sum(count.rounds for count in recent.values()) < MOST:
            return
        self._counts = {}
        if not self._level:
            self._level = recent
            return
        difference = _Difference.of(recent, self._level)
        if self.other is not None and self._since >= RETRY and difference.rounds and difference.share <= -FALL:
            self._try()
