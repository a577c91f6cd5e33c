"""How unlike the requests of a batch are, and what that takes from an arm that serves the easy ones.

Whoever accepts much is done sooner, and gives its place to whoever comes next: so a batch fills with requests that
accept little, and the more so the more a tier favours the others. Tokens a second of the batch at hand therefore
promise more than a server can keep. What it keeps is what the tokens of all requests take, hard ones included: with
lengths l(r) of a round for each request r, an arm in place of the current one makes every request's rounds
l_current(r) / l_arm(r) times as many, and the mean of that over the batch at hand (in which hard ones have gathered
already) is what the whole load takes. Owns each request's acceptance, and the halves of the batch by it. Must not know
costs, nor JAX.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.adaptive.policy import PLACE, RoundStats

#: Share of a request's evidence that a round leaves, and of what is known of how unlike requests are.
_KEPT, _KEPT_SPREAD = 0.98, 0.95
#: Trials from which a request is looked at, and requests that it takes to say anything.
_TRIALS, _LEAST = 4.0, 4
#: Requests of a batch of which every round is read; of larger ones one in so many. Readings between two looks at them.
_SMALL, _SOME, _EVERY = 16, 4, 2


class Rows:
    """The acceptance of each request of a bucket's batches.

    Attributes:
      halves: acceptance of drafts of the poorer and the better half, as far as that is no chance; equal at first.
    """

    def __init__(self) -> None:
        self.halves = (0.5, 0.5)
        self._known: dict[int, list[float]] = {}  # by place: the request's number, its hits, its trials
        self._middle = 0.5
        self._seen, self._noise, self._rounds, self._read = 0.0, 0.0, 0, 0

    def forget(self) -> None:
        """Acceptance has changed."""
        for row in self._known.values():
            row[1] = row[2] = 0.0

    def read(self, stats: RoundStats) -> None:
        """Takes a drafting round that says whose its drafts are; not every one of a large batch."""
        count, depth, drafts = len(stats.num_accepted), stats.tier.depth, stats.drafts
        if not count or not depth or stats.tier.lookup or len(stats.rows) != count:
            return
        self._rounds += 1
        if stats.batch_size > _SMALL and self._rounds % _SOME:
            return
        if stats.tokens is None:
            accepted = stats.num_accepted
            self.observe(stats.rows, accepted, [a + 1 if a < depth else depth for a in accepted])
        elif drafts is not None and len(drafts.known) == count * drafts.nodes:
            known, right = (np.frombuffer(x, np.uint8).reshape(count, -1) for x in (drafts.known, drafts.right))
            self.observe(stats.rows, right.sum(axis=1).tolist(), known.sum(axis=1).tolist())

    def observe(self, rows: Sequence[int], accepted: Sequence[int], tried: Sequence[int]) -> None:
        """Takes a round.

        Args:
          rows: numbers of the requests, as in `RoundStats.rows`. accepted, tried: drafts of each that were right, and
            that would have shown it.
        """
        known, mask = self._known, (1 << PLACE) - 1
        seen: dict[int, list[float]] = {}  # of several rounds of a dispatch each request once
        for number, hits, trials in zip(rows, accepted, tried, strict=True):
            row = known.get(number & mask)
            if row is None or row[0] != number:
                row = known[number & mask] = [float(number), float(hits), float(trials)]
            else:
                row[1] = row[1] * _KEPT + hits
                row[2] = row[2] * _KEPT + trials
            seen[number] = row
        self._read += 1
        if self._read % _EVERY == 0:
            self._split([(hits, trials) for _, hits, trials in seen.values() if trials >= _TRIALS])

    def better(self, rows: Sequence[int]) -> np.ndarray:
        """Which of the requests are of the better half; those of whom nothing is known are, unless it is so of all."""
        mask, nothing = (1 << PLACE) - 1, (0, 0.0, 0.0)
        found = [self._known.get(number & mask, nothing) for number in rows]
        if all(row is nothing for row in found):
            return np.zeros(len(found), bool)
        return np.asarray([hits >= self._middle * trials for _, hits, trials in found])

    def _split(self, known: Sequence[tuple[float, float]]) -> None:
        """Takes hits and trials of those requests of a round of whom enough is known."""
        count = len(known)
        if count < _LEAST:
            return
        mean = sum(hits for hits, _ in known) / sum(trials for _, trials in known)
        rates = sorted((hits + mean) / (trials + 1) for hits, trials in known)
        middle = sum(rates) / count
        # What is seen of their differences, and what chance alone would show.
        differ = sum((rate - middle) * (rate - middle) for rate in rates) / (count - 1)
        self._seen += (1 - _KEPT_SPREAD) * (differ - self._seen)
        chance = mean * (1 - mean) * sum(trials / ((trials + 1) * (trials + 1)) for _, trials in known) / count
        self._noise += (1 - _KEPT_SPREAD) * (chance - self._noise)
        real = max(0.0, 1 - self._noise / self._seen) if self._seen > 0 else 0.0
        self._middle = rates[count // 2]
        half = count // 2
        low, high = sum(rates[:half]) / half, sum(rates[count - half :]) / half
        self.halves = mean + real * (low - mean), mean + real * (high - mean)
