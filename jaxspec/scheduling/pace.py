"""How many rounds one dispatch runs: several where a round of the device is shorter than the host's part of one.

A device that is quicker than its host idles between rounds. Several rounds in one executable give the host that much
longer for what it has to do once for each dispatch; their results come as many rounds late. Standard library only. Must
not know executables, policies or requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

#: Rounds of a dispatch, where that pays and nobody says how many.
USUAL_ROUNDS = 4
#: Host's part of a round from which several pay, by the device's. Below 1, because the host's scatters.
_PAYS = 0.5
#: Longest that a dispatch may take, in seconds: by so much results come late, and an abort waits.
_LATEST = 0.01
#: Dispatches from which a mean counts, those over which it runs, and dispatches of several rounds between two of one.
_ENOUGH, _OVER, _AGAIN = 8, 32, 256
#: More than the host's seconds for a round and each of its rows should be, and the bytes that a device reads in one: to
#: tell without measuring for which batch sizes several rounds need not be compiled.
_HOST_SECONDS, _HOST_SECONDS_A_ROW, _BYTES_A_SECOND = 300e-6, 7e-6, 5e12


def may_pay(weight_bytes: int, bucket: int) -> bool:
    """Whether the host could need as long for a round as counts, of a model that reads so many bytes on each device."""
    return _HOST_SECONDS + bucket * _HOST_SECONDS_A_ROW >= _PAYS * weight_bytes / _BYTES_A_SECOND


@dataclasses.dataclass
class _Means:
    """Of one kind of round: seconds of the host for a dispatch of one, and of a round all in all.

    Attributes:
      alone: dispatches of one round so far, as far as they count. since: those of several, since the last of one.
    """

    host: float = 0.0
    round: float = 0.0
    alone: int = 0
    since: int = 0


class Pace:
    """Says before each dispatch how many rounds it may run, from what those before took.

    Args:
      most: rounds of a dispatch that are compiled.
      measured: False: always `most`.
    """

    def __init__(self, most: int, *, measured: bool) -> None:
        self.most, self._measured = most, measured
        self._means: dict[Hashable, _Means] = {}
        self._latest: Hashable = None
        self._before = 0

    def rounds(self) -> int:
        """For the next dispatch, taken to be of the same kind as the latest."""
        if self.most == 1 or not self._measured:
            return self.most
        means = self._means.get(self._latest)
        if means is None or means.alone < _ENOUGH or means.since >= _AGAIN or means.round * self.most > _LATEST:
            return 1
        return self.most if means.host >= _PAYS * means.round else 1

    def took(self, kind: Hashable, rounds: int, seconds: float, waited: float) -> None:
        """A dispatch among others of a kind (a tier in a bucket).

        Args:
          rounds: that it ran.
          seconds: from the result before to its own. waited: those of them that the host did nothing.
        """
        if self.most == 1 or not self._measured:
            return
        before, self._before, self._latest = self._before, rounds, kind
        means = self._means.setdefault(kind, _Means())
        if rounds > 1:
            means.since += 1
        elif before == 1:  # else the host has also read the results of several
            means.alone, means.since = min(means.alone + 1, _OVER), 0
            means.host += (seconds - waited - means.host) / means.alone
        # What a round takes is known better where the device sets the pace.
        means.round += (seconds / rounds - means.round) / max(1, means.alone)
