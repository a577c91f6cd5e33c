"""A running estimate of how many drafts get accepted, from what finished rounds report.

Owns the statistics only: what a round costs and which tier to choose is the policies' business. Must not know JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxspec.adaptive.policy import RoundStats
from jaxspec.tier import Tier

#: Rows that an estimate is worth after it went unobserved for long: kept, but this many new rows overrule it.
STALE_ROWS = 4.0
#: The same for positions after the first: less, so that they follow the first one when it turns out to have changed.
_STALE_ROWS_DEEPER = 1.0
#: Rows that the estimate is worth from which another one starts (a shallower position, a nearby bucket, the prior).
_PRIOR_ROWS = 2.0
#: Of the rates of other tiers' drafts, what is assumed of those of a tier that only looks up; and the rows that this is
#: worth, so few that a probe or two overrule it.
_LOOKUP, _LOOKUP_ROWS = 0.5, 1.0
#: How much faster than other evidence that of look-ups decays: a text repeats, or it does not.
_LOOKUP_PACE = 3
#: How much faster than evidence decays, what is assumed without any follows what is seen.
_START_PACE = 2
#: How much faster than evidence decays what no round can confirm, for none drafts.
_UNSEEN_PACE = 2
#: Share of the evidence that a round of however many rows leaves.
_LEAST_KEPT = 0.94
#: Shifts of acceptance's logits that are told apart, and the place of none.
_SHIFTS = np.asarray([-5.0, -3.5, -2.5, -1.7, -1.0, -0.5, 0.0, 0.5, 1.0, 1.7, 2.5, 3.5, 5.0])
_NONE = len(_SHIFTS) // 2
_SHIFTED = _SHIFTS[:, None]
#: How likely a change is in a round, and to what the evidence says.
_HAZARD, _BACK = 1 / 200, 0.4
_JUMPS = np.where(_SHIFTS == 0, _BACK, (1 - _BACK) / (len(_SHIFTS) - 1))
#: What a round's evidence counts of as many trials of their own: texts go on being easy or hard for some rounds.
_TEMPER = 0.7
#: Probability of no shift above which rates are left as they are, and below which a change is certain.
_QUIET, _CERTAIN = 0.9, 0.01


def breadth(tier: Tier) -> float:
    """How many first candidates a level of the tier is worth: 1 for a chain, the root of the mean width for a tree.

    With acceptance r of the first candidate, a level is modelled to hold an accepted one with 1 - (1 - r)^breadth.
    """
    return math.sqrt(min(tier.topk, (tier.num_nodes - 1) / tier.depth)) if tier.depth else 1.0


def survival(tier: Tier, rates: Sequence[float]) -> list[float]:
    """Probability that a row of the tier accepts at least 1, 2, ... depth drafts, given each position's rate."""
    power, alive, out = breadth(tier), 1.0, []
    for rate in rates[: tier.depth]:
        alive *= 1 - (1 - rate) ** power
        out.append(alive)
    return out


def _at_least(accepted: Sequence[int], depth: int) -> list[int]:
    """How many rows accepted at least 0, 1, ... depth drafts."""
    left, out = len(accepted), []
    counted = bytes(accepted) if depth < 256 else accepted  # the same, quicker to search
    for i in range(depth + 1):
        out.append(left)
        left -= counted.count(i)
    return out


def _stale_rows(index: int) -> float:
    return _STALE_ROWS_DEEPER if index else STALE_ROWS


class _Evidence:
    """Counts of rows for each draft position (index 0 is the first): still alive there, and accepted there."""

    def __init__(self, depth: int) -> None:
        self.reached = [0.0] * depth
        self.accepted = [0.0] * depth

    def add(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        """Counts one round, from the first position on."""
        for i, (alive, hits) in enumerate(zip(reached, accepted, strict=True)):
            self.reached[i] += alive
            self.accepted[i] += hits

    def decay(self, factor: float, observed: int) -> None:
        """Scales all positions; those from index `observed` on not below the rows that stale evidence is worth."""
        for i, rows in enumerate(self.reached):
            if rows > 0:
                scale = factor if i < observed else max(factor, min(1.0, _stale_rows(i) / rows))
                self.reached[i] = rows * scale
                self.accepted[i] *= scale

    def clear(self) -> None:
        self.reached = [0.0] * len(self.reached)
        self.accepted = [0.0] * len(self.accepted)

    def rates(self, base: Sequence[float] | None, prior: float) -> list[float]:
        """Smoothed rates; without a base, each position starts from the one before it and the first from `prior`."""
        rates: list[float] = []
        for i, (reached, accepted) in enumerate(zip(self.reached, self.accepted, strict=True)):
            start = base[i] if base is not None else (rates[-1] if rates else prior)
            # Where everything is accepted the sums differ by their rounding, and a rate must not exceed 1.
            rates.append(min(1.0, (accepted + _PRIOR_ROWS * start) / (reached + _PRIOR_ROWS)))
        return rates


class _Shifts:
    """How far acceptance has moved from what the evidence says: a filter over shifts of the logits of all rates.

    The forward recursion of a hidden Markov chain that stays where it is or jumps, to no shift or to any (Bayesian
    change detection, Adams and MacKay's arXiv 0710.3742, with levels on a grid in place of run lengths). Before a
    change is certain, what is expected is the mean over the shifts: a lucky streak moves it a little, and for a while.

    Attributes:
      weights: probability of each of _SHIFTS. since: rounds that are no evidence yet, for a change is likelier than
        none.
    """

    def __init__(self, depth: int) -> None:
        self.since = _Evidence(depth)
        self._unseen = 0.0
        self._settle()

    def _settle(self) -> None:
        self.weights = np.where(_SHIFTS == 0, 1.0, 0.0)

    @property
    def quiet(self) -> bool:
        """Whether rates are what the evidence says."""
        return self.weights[_NONE] > _QUIET

    def wait(self, rounds: float) -> None:
        """Rounds passed that showed nothing."""
        self._unseen += rounds

    def observe(self, rates: Sequence[float], reached: Sequence[float], accepted: Sequence[float]) -> bool:
        """Takes a round, and says whether acceptance has certainly changed.

        Args:
          rates: of the positions, as the evidence says. reached, accepted: rows at each of the first ones.
        """
        self.since.add(reached, accepted)
        hits, tried = np.asarray(accepted), np.asarray(reached)
        x = _SHIFTED + _logits(rates[: len(hits)])
        sure = -np.log1p(np.exp(-x))  # log of the rate; of its complement it is less by x
        told = (sure @ tried - x @ (tried - hits)) * _TEMPER
        jumps = 1 - (1 - _HAZARD) ** (1 + self._unseen)
        self._unseen = 0.0
        weights = (self.weights * (1 - jumps) + jumps * _JUMPS) * np.exp(told - told.max())
        self.weights = weights / weights.sum()
        return bool(self.weights[_NONE] < _CERTAIN)

    @property
    def doubtful(self) -> bool:
        """Whether a change is likelier than none."""
        return self.weights[_NONE] < 0.5

    def shifted(self, rates: Sequence[float]) -> list[float]:
        """Rates, each given that the drafts before were accepted, where the evidence says `rates`."""
        alive = np.cumprod(1 / (1 + np.exp(-_SHIFTED - _logits(rates))), axis=1)
        mean = (self.weights @ alive).tolist()
        return [after / before for before, after in zip([1.0, *mean], mean, strict=False)]

    def begin(self) -> None:
        """Starts anew."""
        self.since.clear()
        self._settle()


def _logits(rates: Sequence[float]) -> np.ndarray:
    # Of so few numbers a list is made sooner than an array.
    inside = [min(0.995, max(0.005, rate)) for rate in rates]
    return np.asarray([math.log(rate / (1 - rate)) for rate in inside])


@dataclasses.dataclass
class _OwnMean:
    """Decayed rows and accepted drafts of one tier."""

    rows: float = 0.0
    accepted: float = 0.0

    def add(self, rows: float, accepted: float) -> None:
        """Counts a round."""
        self.rows += rows
        self.accepted += accepted

    def decay(self, factor: float) -> None:
        self.rows *= factor
        self.accepted *= factor


class _BucketEvidence:
    """All that one bucket saw."""

    def __init__(self, depth: int) -> None:
        self.main = _Evidence(depth)
        self.own: dict[Tier, _OwnMean] = {}

    @property
    def rows(self) -> float:
        return self.main.reached[0]

    def mean(self, tier: Tier) -> _OwnMean:
        return self.own.setdefault(tier, _OwnMean())

    def decay(self, factor: float, observed: int) -> None:
        self.main.decay(factor, observed)
        for tier, mean in self.own.items():
            mean.decay(factor**_LOOKUP_PACE if tier.lookup else factor)


class AcceptanceModel:
    """Acceptance of each draft position, given that the ones before it were accepted, in each bucket.

    Evidence halves every `half_life` observed rows. What contradicts it moves the rates at once as far as a change is
    likely (see `_Shifts`); once one is certain, the rows since then replace all evidence. Acceptance mostly depends on
    the text, so a bucket without data takes the rates of the nearest one that has some; a position without data takes
    the rate of the position before it. A row of a tree tells of its first candidates in expectation (one step of EM).
    Each tree tier also keeps its own mean. A tier that only looks up has nothing but its own mean: its drafts are
    another source's, of which the others tell little, and of the others it tells nothing.

    Args:
      depth: the deepest tier, at least 1.
      buckets: padded batch sizes.
      half_life: rows (one request in one drafting round).
      prior_rate: acceptance assumed before anything is known.
    """

    def __init__(self, depth: int, buckets: Sequence[int], half_life: float, prior_rate: float) -> None:
        assert depth >= 1
        self._depth = depth
        self._half_life = half_life
        self._start_rate = prior_rate
        self._seen = {bucket: _BucketEvidence(depth) for bucket in buckets}
        self._shifts = _Shifts(depth)
        self._rates: dict[int, tuple[float, ...]] = {}
        self._tolds: dict[int, tuple[float, ...]] = {}
        self._chains: dict[int, list[float]] = {}

    @property
    def blank(self) -> bool:
        """Whether nothing was ever seen."""
        return not any(seen.rows for seen in self._seen.values())

    def rates(self, bucket: int) -> tuple[float, ...]:
        """The estimate for each position up to the deepest tier's."""
        known = self._rates.get(bucket)
        if known is None:
            told = self._told(bucket)
            known = self._rates[bucket] = told if self._shifts.quiet else tuple(self._shifts.shifted(told))
        return known

    def _told(self, bucket: int) -> tuple[float, ...]:
        """What the evidence says, if nothing has changed."""
        known = self._tolds.get(bucket)
        if known is None:
            donors = [b for b, seen in self._seen.items() if b != bucket and seen.rows >= _PRIOR_ROWS]
            base = None
            if donors:
                nearest = min(donors, key=lambda b: (abs(math.log2(b / bucket)), b))
                base = self._seen[nearest].main.rates(None, self._start_rate)
            known = self._tolds[bucket] = tuple(self._seen[bucket].main.rates(base, self._start_rate))
        return known

    def hopeful_rates(self, bucket: int, known: int, hope: float) -> list[float]:
        """The rates, but `hope` (or more) for positions after the first `known`, as far as their evidence is stale."""
        rates = list(self.rates(bucket))
        reached = self._seen[bucket].main.reached
        for i in range(known, self._depth):
            fresh = max(0.0, reached[i] - _stale_rows(i))
            rates[i] = max(rates[i], (fresh * rates[i] + STALE_ROWS * hope) / (fresh + STALE_ROWS))
        return rates

    def tokens(self, tier: Tier, bucket: int, rates: Sequence[float] | None = None) -> float:
        """Tokens that a request gains from one round of the tier, the bonus token included.

        Args:
          rates: to ask what if; None for the estimate.
        """
        if tier.is_chain and not tier.lookup and rates is None:
            return self.chain_tokens(bucket)[tier.depth]
        if tier.lookup and rates is None:
            rates = [_LOOKUP * rate for rate in self.rates(bucket)]
        accepted = sum(survival(tier, self.rates(bucket) if rates is None else rates))
        mean = self._seen[bucket].own.get(tier)
        if mean is not None:
            start = _LOOKUP_ROWS if tier.lookup else STALE_ROWS
            accepted = (mean.accepted + start * accepted) / (mean.rows + start)
        return 1 + accepted

    def chain_tokens(self, bucket: int) -> list[float]:
        """Tokens that a request gains from a round of a chain of each depth, from 0."""
        known = self._chains.get(bucket)
        if known is None:
            alive, tokens = 1.0, [1.0]
            for rate in self.rates(bucket):
                alive *= rate
                tokens.append(tokens[-1] + alive)
            known = self._chains[bucket] = tokens
        return known

    def observe(self, stats: RoundStats, beyond: Sequence[float] | None = None) -> bool:
        """Learns from a finished drafting round.

        Args:
          beyond: where not every draft was verified: how many rows would have accepted at least 0, 1, ... of them.

        Returns:
          Whether acceptance has changed, so that what was known before is forgotten.
        """
        tier, depth = stats.tier, min(stats.tier.depth, self._depth)
        beyond = _at_least(stats.num_accepted, depth) if beyond is None else beyond[: depth + 1]
        rows = beyond[0]
        if not rows or not depth:
            return False
        accepted = sum(beyond[1:])
        if tier.lookup:
            self.age(rows)
            self._seen[stats.bucket].mean(tier).add(rows, accepted)
            return False
        rates, power = self.rates(stats.bucket), breadth(tier)
        # A tree's hit may be a candidate other than the first: credit the first with its expected share.
        wide = [1 - (1 - rate) ** power for rate in rates[:depth]]
        hits = [n * (rate / hit if hit > 0 else 1.0) for n, rate, hit in zip(beyond[1:], rates, wide, strict=False)]

        if stats.dispatched > 1:
            self._shifts.wait(stats.dispatched - 1)
        changed = self._shifts.observe(self._told(stats.bucket), beyond[:-1], hits)
        factor = max(_LEAST_KEPT**stats.dispatched, 0.5 ** (rows / self._half_life))
        own = self._seen[stats.bucket]
        for seen in self._seen.values():
            if seen.rows > 0:
                seen.decay(factor, depth if seen is own else self._depth)
        self._start_rate += (hits[0] / rows - self._start_rate) * (1 - factor**_START_PACE)
        if changed:
            # What the other buckets know is older than the change.
            now = self._shifts.shifted(self._told(stats.bucket))
            self._seen = {bucket: _BucketEvidence(self._depth) for bucket in self._seen}
            own = self._seen[stats.bucket]
            own.main, self._shifts.since = self._shifts.since, own.main
            self._shifts.begin()
            self._start_rate = now[0]
        elif not self._shifts.doubtful:
            own.main.add(self._shifts.since.reached, self._shifts.since.accepted)
            self._shifts.since.clear()
        if not tier.is_chain:
            own.mean(tier).add(rows, accepted)
        self._rates.clear()
        self._tolds.clear()
        self._chains.clear()
        return changed

    def learnt(self) -> tuple[dict[int, tuple[float, ...]], dict[tuple[Tier, int], float], float]:
        """Rates by bucket as deep as they are known, own means by tier and bucket, and the start; see `Learnt`."""
        rates, means = {}, {}
        for bucket, seen in self._seen.items():
            known = sum(rows >= 1 for rows in seen.main.reached)
            if known:
                rates[bucket] = self.rates(bucket)[:known]
            for tier, mean in seen.own.items():
                if mean.rows >= 1:
                    means[tier, bucket] = mean.accepted / mean.rows
        return rates, means, self._start_rate

    def recall(
        self, rates: Mapping[int, Sequence[float]], means: Mapping[tuple[Tier, int], float], start: float | None
    ) -> None:
        """Before the first round: takes what `learnt` said for evidence that is stale."""
        for bucket, values in rates.items():
            if bucket in self._seen:
                for i, rate in enumerate(values[: self._depth]):
                    self._seen[bucket].main.reached[i] = _stale_rows(i)
                    self._seen[bucket].main.accepted[i] = rate * _stale_rows(i)
        for (tier, bucket), mean in means.items():
            if bucket in self._seen and tier.depth <= self._depth:
                self._seen[bucket].mean(tier).add(STALE_ROWS, min(mean, float(tier.depth)) * STALE_ROWS)
        self._start_rate = self._start_rate if start is None else start
        self._rates.clear()
        self._tolds.clear()
        self._chains.clear()

    def age(self, rows: float) -> None:
        """Counts a plain round: it shows nothing of acceptance, so the estimate keeps its value and loses weight."""
        self._shifts.wait(1)
        factor = 0.5 ** (_UNSEEN_PACE * rows / self._half_life)
        for seen in self._seen.values():
            if seen.rows > 0:
                seen.decay(factor, observed=0)
        self._rates.clear()
        self._tolds.clear()
        self._chains.clear()
