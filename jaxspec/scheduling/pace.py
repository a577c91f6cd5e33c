"""How many rounds one dispatch runs: several where a round of the device is shorter than the host's part of one.

A device that is quicker than its host idles between rounds. Several rounds in one executable give the host that much
longer for what it has to do once for each dispatch; their results come as many rounds late. Standard library only. Must
not know executables, policies or requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

#: Rounds of a dispatch, where that pays and nobody says how many.
USUAL_ROUNDS = 4
#: Host's part of a round from which several pay, by the device's. Below 1, because the host's scatters.
_PAYS = 0.5
#: Longest that a dispatch may take, in seconds: by so much results come late, and an abort waits.
_LATEST = 0.01
#: Dispatches from which a mean counts, those over which it runs, and dispatches of several rounds between two of one.
_ENOUGH, _OVER, _AGAIN = 8, 32, 256
#: What several rounds are taken to save while that is not measured: enough for them to be tried where they cost little.
_UNKNOWN = 0.05
#: Rows in rounds over which the share of texts that stop is a mean.
_ROWS = 4096
#: More than the host's seconds for a round and each of its rows should be, and the bytes that a device reads in one: to
#: tell without measuring for which batch sizes several rounds need not be compiled.
_HOST_SECONDS, _HOST_SECONDS_A_ROW, _BYTES_A_SECOND = 300e-6, 7e-6, 5e12


class Repeats(NamedTuple):
    """How many rounds the next dispatch may run, and what is known of its kind.

    Attributes:
      rounds: of the dispatch.
      saved: share of a single round's time that each of several takes less.
      tokens: that a round gives a row, on average.
      stops: share of the rows whose texts end in a round before their length does.
    """

    rounds: int = 1
    saved: float = 1.0
    tokens: float = 1.0
    stops: float = 0.0


#: A single round.
ALONE = Repeats()


def may_pay(weight_bytes: int, bucket: int) -> bool:
    """Whether the host could need as long for a round as counts, of a model that reads so many bytes on each device."""
    return _HOST_SECONDS + bucket * _HOST_SECONDS_A_ROW >= _PAYS * weight_bytes / _BYTES_A_SECOND


@dataclasses.dataclass
class _Means:
    """Of one kind of round, in seconds.

    Attributes:
      host: of the host, for a dispatch of one. round: of a round, all in all. single, several: of a round in a dispatch
        of one, and of several.
      alone, repeated: dispatches of one round so far, and of several, as far as they count.
      since: dispatches of several since the last of one. unseen: dispatches of one since the last of several.
      tokens: that a round gives a row.
    """

    host: float = 0.0
    round: float = 0.0
    single: float = 0.0
    several: float = 0.0
    alone: int = 0
    repeated: int = 0
    since: int = 0
    unseen: int = 0
    tokens: float = 1.0

    def saved(self, most: int) -> float:
        """Share of a single round's time that each of `most` takes less; while that is not known, a little of it."""
        if self.single <= 0:
            return _UNKNOWN
        if self.repeated < _ENOUGH:
            return min(_UNKNOWN, self.host / self.single * (1 - 1 / most))
        return 1 - self.several / self.single


class Pace:
    """Says before each dispatch how many rounds it may run, from what those before took and gave.

    Args:
      most: rounds of a dispatch that are compiled.
      measured: False: always `most`.
    """

    def __init__(self, most: int, *, measured: bool) -> None:
        self.most, self._measured = most, measured
        self._means: dict[Hashable, _Means] = {}
        self._latest: Hashable = None
        self._known: Hashable = None  # the latest kind of which enough single rounds were timed
        self._before = self._run = 0  # rounds of the dispatch before; dispatches of the latest kind in a row
        self._seconds = 0.0  # of the latest dispatch, for each of its rounds
        self._rows = self._stopped = 0.0

    def repeats(self) -> Repeats:
        """For the next dispatch, taken to be of the same kind as the latest.

        Of a kind that has hardly run what is known of the one before holds: most are only tried, and a round alone
        among others of several would take much longer than it need.
        """
        if self.most == 1 or not self._measured:
            return Repeats(self.most)
        latest, means = self._means.get(self._latest, _Means()), self._means.get(self._known)
        if latest.alone >= _ENOUGH:
            means = latest
        elif self._run >= _ENOUGH:
            return ALONE  # it is more than tried: its own host's part is measured
        elif self._seconds * self.most > _LATEST:
            return ALONE
        if means is None or means.since >= _AGAIN or means.round * self.most > _LATEST:
            return ALONE
        if means.host < _PAYS * means.round:
            return ALONE
        return Repeats(self.most, means.saved(self.most), means.tokens, self._stopped / max(1.0, self._rows))

    def took(self, kind: Hashable, rounds: int, seconds: float, waited: float, *, quiet: bool = True) -> None:
        """A dispatch among others of a kind (a tier in a bucket).

        Args:
          rounds: that it ran.
          seconds: from the result before to its own. waited: those of them that the host did nothing.
          quiet: whether no request began or ended meanwhile. What that takes of the host comes once for each request,
            and while others wait mostly beside single rounds, which would then seem the slower for it.
        """
        if self.most == 1 or not self._measured:
            return
        self._run = self._run + 1 if kind == self._latest else 1
        before, self._before, self._latest, self._seconds = self._before, rounds, kind, seconds / rounds
        if not quiet:
            return
        means = self._means.setdefault(kind, _Means())
        if rounds > 1:
            means.since, means.unseen = means.since + 1, 0
            means.repeated = min(means.repeated + 1, _OVER)
            means.several += (seconds / rounds - means.several) / means.repeated
        elif before == 1:  # else the host has also read the results of several
            means.alone, means.since = min(means.alone + 1, _OVER), 0
            means.host += (seconds - waited - means.host) / means.alone
            means.single += (seconds - means.single) / means.alone
            means.unseen += 1
            if means.unseen >= _AGAIN:
                means.repeated = 0
        if means.alone >= _ENOUGH:
            self._known = kind
        # What a round takes is known better where the device sets the pace.
        means.round += (seconds / rounds - means.round) / max(1, means.alone)

    def gave(self, kind: Hashable, row_rounds: int, tokens: int, stopped: int) -> None:
        """What a dispatch of a kind gave.

        Args:
          row_rounds: rounds of each row that gave it something, over all rows. tokens: in them.
          stopped: rows whose texts ended before their length.
        """
        if self.most == 1 or not self._measured or not row_rounds:
            return
        means = self._means.get(kind)
        if means is not None:
            means.tokens += (tokens / row_rounds - means.tokens) / 8
        keep = max(0.0, 1 - row_rounds / _ROWS)
        self._rows, self._stopped = keep * self._rows + row_rounds, keep * self._stopped + stopped
