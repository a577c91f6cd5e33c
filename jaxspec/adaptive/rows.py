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
        self._owner = np.full(64, -1, np.int64)
        self._hits, self._trials = np.zeros(64), np.zeros(64)
        self._middle = 0.5
        self._seen, self._noise, self._rounds, self._read = 0.0, 0.0, 0, 0

    def forget(self) -> None:
        """Acceptance has changed."""
        self._trials[:] = self._hits[:] = 0.0

    def read(self, stats: RoundStats) -> None:
        """Takes a drafting round that says whose its drafts are; not every one of a large batch."""
        count, depth, drafts = len(stats.num_accepted), stats.tier.depth, stats.drafts
        if not count or not depth or stats.tier.lookup or len(stats.rows) != count:
            return
        self._rounds += 1
        if count > _SMALL and self._rounds % _SOME:
            return
        if stats.tokens is None:
            accepted = stats.num_accepted
            self.observe(stats.rows, accepted, [a + 1 if a < depth else depth for a in accepted])
        elif drafts is not None and len(drafts.known) == count * drafts.nodes:
            known, right = (np.frombuffer(x, np.uint8).reshape(count, -1) for x in (drafts.known, drafts.right))
            self.observe(stats.rows, right.sum(axis=1), known.sum(axis=1))

    def observe(
        self, rows: Sequence[int], accepted: Sequence[int] | np.ndarray, tried: Sequence[int] | np.ndarray
    ) -> None:
        """Takes a round.

        Args:
          rows: numbers of the requests, as in `RoundStats.rows`. accepted, tried: drafts of each that were right, and
            that would have shown it.
        """
        owner = np.asarray(rows, np.int64)
        place = owner & ((1 << PLACE) - 1)
        most = int(place.max(initial=0))
        if most >= len(self._owner):
            more = most + 1 - len(self._owner)
            self._owner = np.concatenate([self._owner, np.full(more, -1, np.int64)])
            self._hits, self._trials = (np.concatenate([x, np.zeros(more)]) for x in (self._hits, self._trials))
        old = np.where(self._owner[place] == owner, _KEPT, 0.0)
        self._owner[place] = owner
        self._hits[place] = hits = self._hits[place] * old + accepted
        self._trials[place] = trials = self._trials[place] * old + tried
        self._read += 1
        if self._read % _EVERY == 0:
            self._split(hits, trials)

    def better(self, rows: Sequence[int]) -> np.ndarray:
        """Which of the requests are of the better half."""
        place = np.asarray(rows, np.int64) & ((1 << PLACE) - 1)
        if int(place.max(initial=0)) >= len(self._owner):
            return np.zeros(len(place), bool)
        return self._hits[place] >= self._middle * self._trials[place]

    def _split(self, hits: np.ndarray, trials: np.ndarray) -> None:
        known = trials >= _TRIALS
        count = int(np.count_nonzero(known))
        if count < _LEAST:
            return
        hits, trials = hits[known], trials[known]
        mean = float(hits.sum() / trials.sum())
        rate = (hits + mean) / (trials + 1)
        # What is seen of their differences, and what chance alone would show.
        self._seen += (1 - _KEPT_SPREAD) * (float(rate.var()) * count / (count - 1) - self._seen)
        chance = mean * (1 - mean) * float((trials / (trials + 1) ** 2).mean())
        self._noise += (1 - _KEPT_SPREAD) * (chance - self._noise)
        real = max(0.0, 1 - self._noise / self._seen) if self._seen > 0 else 0.0
        rate.sort()
        self._middle = float(rate[count // 2])
        low, high = float(rate[: count // 2].mean()), float(rate[(count + 1) // 2 :].mean())
        self.halves = mean + real * (low - mean), mean + real * (high - mean)
