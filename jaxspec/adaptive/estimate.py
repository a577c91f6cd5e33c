"""What rounds cost now: a measured table taken as evidence with errors, and corrected by the seconds of rounds.

Owns estimates of seconds per arm and bucket and how sure they are. A table was perhaps measured beside other work, so
each entry may be wrong by itself, those of all drafting tiers by one factor, and all of a bucket by another. A timed
round therefore corrects its own entry at once, and tiers that nobody ran move with their family. Must not know JAX.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from jaxspec.adaptive.arms import Arm
from jaxspec.adaptive.cost import Costed, CostTable
from jaxspec.tier import PLAIN, Tier

#: Standard deviations of a table's errors in log seconds: a bucket's, its drafting tiers', and an entry's own.
_COMMON, _FAMILY, _OWN = 0.5, 0.6, 0.4
#: Deviations from a line, in log seconds, that chains of a table may show for all of them to be believed more; and
#: the standard deviation of their own errors then.
_STRAIGHT, _ON_LINE = 0.15, 0.13
#: Variance of an entry's own error in a table that proved right.
_TRUSTED = 0.075**2
#: Variances by which costs drift from one round to the next: of the bucket (contexts grow, other work comes and goes),
#: and of each entry.
_COMMON_DRIFT, _OWN_DRIFT = 1e-3, 3e-6
#: Variances that are added where costs have changed all at once: of the bucket, and of each entry.
_COMMON_JUMP, _OWN_JUMP = 0.25, 0.01
#: Noise of one timed round in log seconds: at first, and the bounds of what is learnt of it, with its step.
_NOISE, _LEAST_NOISE, _MOST_NOISE, _NOISE_STEP = 0.15, 0.01, 0.4, 0.05
_NOISE_ROUNDS = 2
#: Standard deviations beyond which a round is not taken at its word: what disturbs a round makes it slower only.
_SLOWER, _FASTER = 2.0, 4.0
#: Noises by which a round is slower than believed that should be confirmed. The first of all that draft should be if it
#: does not make drafts cheaper by so much (in log seconds): all others are judged by it.
_DOUBTFUL, _DOUBTED = 3.0, 0.2
#: Standard deviation that a plain round right after one that drafted has besides, where it is slower than believed: on
#: two cores it takes up to 1.4 times what the next ones take (caches, and the host is still busy with more tokens).
AFTER_DRAFTS = 0.35
#: Of an entry, what is left of it at least at a shorter context than the table's.
_LEAST_SHORT = 0.2
#: Of the seconds of a round and another pass, what is the round's at least.
_LEAST_LEFT = 0.25
#: How much of what a nearby bucket learnt holds for one that was never timed.
_BORROWED = 0.8
#: Standard deviations of what was learnt before a start: from which it is not kept, and what it has at least then; and
#: the share of its difference from the new table by which it is doubted; and by how much (in log seconds) an entry's
#: first round may be off before none of the bucket's is believed any more.
_VAGUE, _AGED, _DISPUTED, _FOREIGN = 0.5, 0.03, 0.25, 0.35


class CostEstimate:
    """Seconds of rounds by arm and bucket, and how much a look at one would tell.

    Args:
      arms: of which costs may be known, plain decoding first and packed ones last.
      buckets: padded batch sizes.
      table: what is known by now.
      enabled: False takes the table as it is, for good.
    """

    def __init__(self, arms: Sequence[Arm], buckets: Sequence[int], table: CostTable, enabled: bool = True) -> None:
        assert arms[0] == Arm(PLAIN)
        self._enabled = enabled
        # Where two budgets come to the same tokens, the first of them stands for both.
        self._index = {b: {(arm.tier, arm.tokens(b)): i for i, arm in reversed([*enumerate(arms)])} for b in buckets}
        self._noise, self._heard = _NOISE**2, _NOISE_ROUNDS
        self._blocks = {bucket: _Block(arms) for bucket in buckets}
        self._timed: list[int] = []  # buckets with timed rounds
        self._context, self._growth = table.context, table.growth
        self._unit: tuple[int, float] | None = None  # the smallest bucket with plain decoding, and its seconds
        for (tier, bucket, tokens), seconds in table.rounds.items():
            self.learn(tier, bucket, seconds, tokens)

    def arm(self, tier: Tier, bucket: int, tokens: int | None = None) -> int | None:
        """The index of the arm that runs as such a round; None: no arm does."""
        return self._index.get(bucket, {}).get((tier, tokens))

    def knows(self, tier: Tier, bucket: int, tokens: int | None = None) -> bool:
        """Whether the round has a cost."""
        i = self.arm(tier, bucket, tokens)
        return i is not None and self._blocks[bucket].table[i] is not None

    def logs(self, bucket: int, context: float | None = None) -> list[float]:
        """Logarithms of the seconds of a round of each arm; without meaning where there is no cost to start from.

        Args:
          context: committed tokens of the batch; None: the table's.
        """
        block = self._blocks[bucket]
        if not block.rounds and not block.borrowed and self._timed:
            block.borrow(self._blocks[min(self._timed, key=lambda b: (abs(math.log2(b / bucket)), b))])
        more = self._more(bucket, context)
        if not more:
            return block.mean
        return [mean + _longer(more, start) for mean, start in zip(block.mean, block.start, strict=True)]

    def _more(self, bucket: int, context: float | None) -> float:
        """Seconds by which the table's rounds of a batch with so many context tokens are longer."""
        if context is None or self._unit is None or not self._growth:
            return 0.0
        return self._growth * self._unit[1] * (context - bucket * self._context)

    def seconds(self, tier: Tier, bucket: int, tokens: int | None = None, context: float | None = None) -> float:
        """Seconds of one round; ValueError where there is no cost to start from."""
        i = self.arm(tier, bucket, tokens)
        if i is None or not self.knows(tier, bucket, tokens):
            raise ValueError(f"no cost of {tier} in bucket {bucket} is known")
        return math.exp(self.logs(bucket, context)[i])

    def news(self, arm: int, than: int, bucket: int, rounds: int = 1) -> float:
        """How far (standard deviation) so many rounds of an arm may move its log seconds relative to another's.

        0 as long as no round was timed: perhaps none ever is. Arms are given by their index.
        """
        if not self._timed:
            return 0.0
        known = self._blocks[bucket].cov[arm]
        return abs(known[arm] - known[than]) / math.sqrt(known[arm] + self._noise / rounds)

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Takes a new measurement for the table. As far as rounds have not told better, it moves the estimates."""
        if tier == PLAIN and (self._unit is None or bucket <= self._unit[0]):
            self._unit = bucket, seconds
        i = self.arm(tier, bucket, tokens)
        if i is not None:
            self._blocks[bucket].learn(i, math.log(seconds))

    def learnt(self) -> dict[Costed, tuple[float, float]]:
        """Seconds of rounds that are known by now, and their errors; see `learnt.Learnt`."""
        out: dict[Costed, tuple[float, float]] = {}
        for bucket, block in self._blocks.items():
            for (tier, tokens), i in self._index[bucket].items():
                told = block.rounds and block.table[i] is not None  # else it has no level to start from
                known = (block.mean[i], block.error(i)) if told else block.before[i]
                if known is not None and known[1] < _VAGUE:
                    out[tier, bucket, tokens] = math.exp(known[0]), known[1]
        return out

    def recall(self, seconds: Mapping[Costed, tuple[float, float]]) -> None:
        """Before the first timed round: takes what `learnt` said in place of the table, but for a common factor."""
        for (tier, bucket, tokens), (value, error) in seconds.items():
            i = self.arm(tier, bucket, tokens)
            if i is not None:
                self._blocks[bucket].before[i] = math.log(value), max(error, _AGED)
        for block in self._blocks.values():
            block.begin()

    def observe(
        self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None, *, context: float | None = None,
        after_drafts: float = 0.0,
    ) -> bool:  # fmt: skip
        """Takes the positive seconds of one round; a round that has no cost is ignored.

        Args:
          context: see `logs`.
          after_drafts: of plain rounds, the share of them that come right after one that drafted.

        Returns:
          Whether the round was so much slower than believed that another should confirm it.
        """
        i = self.arm(tier, bucket, tokens)
        if not self._enabled or not 0 < seconds < math.inf or i is None or not self.knows(tier, bucket, tokens):
            return False
        self.logs(bucket)  # borrows
        block = self._blocks[bucket]
        if not block.rounds:
            self._timed.append(bucket)
        told = math.log(seconds) - _longer(self._more(bucket, context), block.start[i])
        surprise = told - block.mean[i]
        if block.before[i] is not None and not block.seen[i] and abs(surprise) > _FOREIGN:
            block.forget()
            surprise = told - block.mean[i]
        if after_drafts and surprise > 0:
            block.observe(i, surprise, self._noise + (AFTER_DRAFTS * after_drafts) ** 2, False)
            return False
        if block.cov[i][i] < self._noise + 2 * _COMMON_DRIFT:
            self._heard += 1
            step = max(_NOISE_STEP, 1 / self._heard)
            noise = self._noise + step * (min(surprise * surprise, 9 * self._noise) - self._noise)
            self._noise = max(_LEAST_NOISE**2, min(_MOST_NOISE**2, noise))
        doubtful = surprise > _DOUBTFUL * math.sqrt(self._noise) or (surprise > -_DOUBTED and block.is_first_draft(i))
        block.observe(i, surprise, self._noise, doubtful)
        return doubtful

    def observe_with(
        self, tier: Tier, bucket: int, seconds: float, other: float, error: float, tokens: int | None = None,
        context: float | None = None,
    ) -> tuple[float, float]:  # fmt: skip
        """Takes the seconds of one round together with those of another pass.

        Args:
          context: see `logs`.
          other, error: what that pass is believed to take, in seconds, and the standard deviation of its error.

        Returns:
          The same as the round leaves them.
        """
        i = self.arm(tier, bucket, tokens)
        if not self._enabled or not 0 < seconds < math.inf or i is None or not self.knows(tier, bucket, tokens):
            return other, error
        self.logs(bucket)  # borrows
        block = self._blocks[bucket]
        if not block.rounds:
            return other, error  # of which nothing is known yet
        longer = _longer(self._more(bucket, context), block.start[i])
        own = math.exp(block.mean[i] + longer)
        unsure = own * own * block.cov[i][i] + seconds * seconds * self._noise
        share = error * error / (error * error + unsure)
        left = max(_LEAST_LEFT * seconds, seconds - other)
        noise = self._noise + (error / left) ** 2
        if noise < _MOST_NOISE**2:
            block.observe(i, math.log(left) - longer - block.mean[i], noise, False)
        return other + share * (seconds - own - other), error * math.sqrt(1 - share)


class _Block:
    """The estimates of one bucket, Gaussian in log seconds.

    Attributes:
      table: log seconds as measured; None where there is none.
      before: log seconds as they were learnt before the start, and the standard deviation of their error.
      start: the same in order (see `_start_from`). own: variance of each entry's own error.
      mean: what is believed. cov: its covariance.
      seen: which entries' rounds were timed. trusted: whether these fitted the table.
      rounds: timed rounds seen. doubt: how many of the latest ones in a row were far too slow (or, negative, too fast).
      borrowed: whether the start was corrected by what another bucket learnt.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._tiers, self._drafts = [arm.tier for arm in arms], [arm.tier.depth > 0 for arm in arms]
        self._whole = [arm.is_whole for arm in arms]
        self.table: list[float | None] = [None] * len(arms)
        self.before: list[tuple[float, float] | None] = [None] * len(arms)
        self.seen = [False] * len(arms)
        self.rounds = self.doubt = 0
        self.borrowed = self.trusted = False
        self.begin()

    def begin(self) -> None:
        """What is believed before the first round."""
        self.start, self.own = self._start_from(_OWN**2)
        self.mean = self.start[:]
        # What was learnt before, of plain decoding too, tells how drafts compare with it.
        told = self.before[0] is not None
        self._shared = [drafts and not (told and b) for drafts, b in zip(self._drafts, self.before, strict=True)]
        self.cov = [
            [_COMMON**2 + _FAMILY**2 * (a and b) + self.own[i] * (i == j) for j, b in enumerate(self._shared)]
            for i, a in enumerate(self._shared)
        ]

    def forget(self) -> None:
        """What was learnt before the start, and from the few rounds since, was of another time."""
        self.before = [None] * len(self.before)
        self.seen = [False] * len(self.seen)
        self.rounds = self.doubt = 0
        self.trusted = False
        self.begin()

    def error(self, i: int) -> float:
        """Standard deviation of an entry's log seconds relative to those of the one that is known best."""
        timed = [j for j, seen in enumerate(self.seen) if seen]
        if not timed:
            return math.inf
        cov, best = self.cov, min(timed, key=lambda j: (self.cov[j][j], j))
        return math.sqrt(max(0.0, cov[i][i] + cov[best][best] - 2 * cov[i][best]))

    def learn(self, i: int, seconds: float) -> None:
        """Takes log seconds for the table."""
        new, self.table[i] = self.table[i] is None, seconds
        start, own = self._start_from(_OWN**2 if not self.trusted else _TRUSTED)
        for j, (variance, before) in enumerate(zip(own, self.own, strict=True)):
            self.cov[j][j] += variance - before if not self.seen[j] else max(0.0, variance - before)
        if self.rounds and not new:
            self.cov[i][i] += own[i]  # the old one may have been right for another time
        for j, (value, before) in enumerate(zip(start, self.start, strict=True)):
            prior = _COMMON**2 + self._shared[j] * _FAMILY**2 + own[j]
            self.mean[j] += (value - before) * (min(1.0, self.cov[j][j] / prior) if self.rounds and not new else 1.0)
        self.start, self.own = start, own

    def _start_from(self, own_error: float) -> tuple[list[float], list[float]]:
        """The table with its whole chains in order, since deeper ones do more; and what each may be wrong by itself.

        An entry that does not fit the others is believed less, and all are believed more that lie on a line.
        """
        pairs = zip(self._tiers, self._whole, strict=True)
        chains = [tier.is_chain and not tier.lookup and whole for tier, whole in pairs]
        table, errors = self._recalled()
        known = [(i, x) for i, x in enumerate(table) if x is not None and chains[i]]
        start = [0.0 if x is None else x for x in table]
        own = [own_error if whole else _OWN**2 for whole in self._whole]
        drafting = [(i, x) for i, x in known if self._drafts[i]]
        if len(drafting) == 2 and known[0][0] == 0:
            # Two are on a line whatever they are: plain decoding tells whether they are on its.
            off = _off_line([(self._tiers[i].depth, math.exp(x)) for i, x in known])
            if max(map(abs, off)) < _STRAIGHT:
                for i, _ in drafting:
                    own[i] = min(own[i], _ON_LINE**2)
        if len(drafting) > 2:
            off = _off_line([(self._tiers[i].depth, math.exp(x)) for i, x in drafting])
            if max(map(abs, off)) < _STRAIGHT:
                for i, _ in drafting:
                    own[i] = min(own[i], _ON_LINE**2)
            for (i, _), odd in zip(drafting, off, strict=True):
                own[i] += odd**2
        for (i, x), value in zip(known, _increasing([x for _, x in known]), strict=True):
            start[i] = value
            own[i] += (x - value) ** 2
        return start, [x if error is None else error**2 for x, error in zip(own, errors, strict=True)]

    def _recalled(self) -> tuple[list[float | None], list[float | None]]:
        """The table with what was learnt before in its entries' place, on the new table's level; and its errors.

        A table is measured in seconds, perhaps beside other work; what rounds taught took hundreds of them.
        """
        pairs = [*zip(self.table, self.before, strict=True)]
        apart = [x - old[0] for x, old in pairs if x is not None and old is not None]
        if not apart:
            return self.table, [None] * len(pairs)
        level = statistics.median(apart)
        doubt = lambda x, old: math.hypot(old[1], _DISPUTED * (x - old[0] - level))
        told = [x is not None and old is not None for x, old in pairs]
        table = [old[0] + level if told[i] and old else x for i, (x, old) in enumerate(pairs)]
        return table, [doubt(x, old) if told[i] else None for i, (x, old) in enumerate(pairs)]

    def observe(self, i: int, surprise: float, noise: float, doubtful: bool) -> None:
        """Takes a round by how much its log seconds exceed the mean; a doubtful one makes nothing surer."""
        drift, own = _COMMON_DRIFT, _OWN_DRIFT
        if not self.seen[i]:
            self._drift()
            drift = own = 0.0  # done
            self._first(i, surprise, noise)
        variance = self.cov[i][i] + drift + own + noise
        limit = (_SLOWER if surprise > 0 else _FASTER) * math.sqrt(variance)
        blur = surprise if doubtful else max(0.0, abs(surprise) - limit)
        if abs(surprise) > limit:
            self.doubt = max(self.doubt, 0) + 1 if surprise > 0 else min(self.doubt, 0) - 1
            if abs(self.doubt) > 1:
                if drift:
                    self._drift()
                    drift = own = 0.0
                self._jump()
                variance = self.cov[i][i] + noise
            surprise = math.copysign(limit, surprise)
        else:
            self.doubt = 0
        # What is let go of and what is learnt in one pass over the covariance.
        column = [x + drift for x in self.cov[i]]
        column[i] += own
        gain, shrink = surprise / variance, 1 / (variance + blur**2)
        self.mean = [mean + part * gain for mean, part in zip(self.mean, column, strict=True)]
        for j, row in enumerate(self.cov):
            part = column[j] * shrink
            sure = row[j] + drift + own - part * column[j]
            row[:] = [x + drift - part * c for x, c in zip(row, column, strict=True)]
            row[j] = sure
        self.rounds += 1

    def is_first_draft(self, i: int) -> bool:
        """Whether no round of a drafting tier was timed, now or in what was learnt before, and this one drafts."""
        known = (
            d and (seen or old is not None) for d, seen, old in zip(self._drafts, self.seen, self.before, strict=True)
        )
        return self._drafts[i] and not any(known)

    def _first(self, i: int, surprise: float, noise: float) -> None:
        """Hears of an entry's first round: a second drafting tier that fits speaks for those that nobody ran.

        Not for packed rounds: they are other programs.
        """
        if self._drafts[i] and self._whole[i] and not self.is_first_draft(i):
            fits = noise <= _NOISE**2 and abs(surprise) < 2 * math.sqrt(noise + _TRUSTED)
            if fits and not self.trusted:
                self.trusted = True
                for j, drafts in enumerate(self._drafts):
                    if drafts and self._whole[j] and not self.seen[j] and j != i:
                        sure = max(0.0, min(self.own[j], _OWN**2) - _TRUSTED)
                        self.cov[j][j] -= sure
                        self.own[j] -= sure
        self.seen[i] = True

    def _drift(self) -> None:
        """Lets go of a little of what is known."""
        for i, row in enumerate(self.cov):
            row[:] = [x + _COMMON_DRIFT for x in row]
            row[i] += _OWN_DRIFT

    def _jump(self) -> None:
        """Costs have changed: most likely all of them."""
        self.doubt = 0
        for i, row in enumerate(self.cov):
            row[:] = [x + _COMMON_JUMP for x in row]
            row[i] += _OWN_JUMP

    def borrow(self, donor: _Block) -> None:
        """Starts from what a nearby bucket learnt of the table's common errors."""
        shifts = [m - s for m, s in zip(donor.mean, donor.start, strict=True)]
        drafting = [
            x for x, drafts, t in zip(shifts, donor._drafts, donor.table, strict=True) if drafts and t is not None
        ]
        family = sum(drafting) / len(drafting) - shifts[0] if drafting else 0.0
        self.mean = [m + _BORROWED * (shifts[0] + family * d) for m, d in zip(self.mean, self._shared, strict=True)]
        self.borrowed = True


def _longer(more: float, start: float) -> float:
    """By how much log seconds grow from `start` with so many seconds more, or less."""
    return math.log(max(_LEAST_SHORT, 1 + more * math.exp(-start))) if more else 0.0


def _increasing(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls, by squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def _off_line(points: Sequence[tuple[int, float]]) -> list[float]:
    """How far each (depth, seconds) lies from the line of them all (Theil and Sen's), in log seconds.

    Of three points that are on no line each may be the wrong one, so all are as far off as the one that is most.
    """
    slopes = sorted((y - v) / (x - u) for n, (x, y) in enumerate(points) for u, v in points[:n])
    slope = max(0.0, slopes[len(slopes) // 2])
    level = sorted(y - slope * x for x, y in points)[len(points) // 2]
    off = [math.log(y / (level + slope * x)) if level + slope * x > 0 else 0.0 for x, y in points]
    return off if len(points) > 3 else [max(map(abs, off))] * len(points)
