"""What a verify budget keeps of the drafts that would be accepted: learnt from the labels of packed rounds.

A packed round says of every drafted node how sure the drafter was, verified or not. Calibrated and multiplied along the
row these are survivals; the likeliest n of a batch hold a share of their sum, and that share is what a budget of n
keeps of what a whole round would accept. Owns the calibration, the shares, and what a round whose budget cut drafts off
would have accepted without it. Chains only: labels do not name parents. Must not know costs, nor JAX.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.adaptive.arms import Arm
from jaxspec.adaptive.calibration import Calibration
from jaxspec.adaptive.policy import DraftLabels

#: Nodes of a round that are looked at, of a larger one some rows, which take turns, and of large rounds only each
#: eighth once a bucket has told something: the host has little time.
_NODES, _SMALL, _EVERY, _SETTLED = 64, 32, 8, 20
#: Rounds that are looked at closely where something may have changed.
_CLOSE = 4
#: Weight of a new round in a share that is known, and rounds after which what is known of a bucket is stale.
_NEW, _STALE = 0.2, 50
#: Labelled rounds between two changes of the calibration that the device is told, and digits of its numbers.
_REFIT, _DIGITS = 25, 2


class Yields:
    """Calibrated confidences, and the share that each packed arm keeps, by bucket.

    Args:
      arms: every arm of a policy; shares are kept of those that are packed chains.
      buckets: padded batch sizes.
    """

    def __init__(self, arms: Sequence[Arm], buckets: Sequence[int]) -> None:
        self._arms = [(i, arm) for i, arm in enumerate(arms) if not arm.is_whole and arm.tier.is_chain]
        depth = max([1, *(arm.tier.depth for _, arm in self._arms)])
        self.calibration = Calibration(depth)
        self._shares: dict[int, dict[int, float]] = {bucket: {} for bucket in buckets}
        self._age: dict[int, int] = {}
        self._rounds, self._turn = 0, 0
        self._heard: dict[int, int] = dict.fromkeys(buckets, 0)
        self._fits: tuple[tuple[float, float], ...] = ()

    @property
    def fits(self) -> tuple[tuple[float, float], ...]:
        """The calibration as a Choice takes it. It changes seldom, for each is brought to the device."""
        return self._fits

    def share(self, arm: int, bucket: int) -> float | None:
        """The part of a whole round's accepted drafts that the arm keeps; None where no round has told."""
        return self._shares[bucket].get(arm)

    def age(self, bucket: int) -> int | None:
        """Rounds of the bucket since one told its shares; None where none has."""
        return self._age.get(bucket)

    def wait(self, bucket: int) -> None:
        """A round of the bucket told nothing."""
        if bucket in self._age:
            self._age[bucket] += 1

    def attend(self, bucket: int) -> None:
        """Something has perhaps changed: every one of the next rounds is looked at."""
        self._heard[bucket] = min(self._heard[bucket], _SETTLED - _CLOSE)

    def forget(self) -> None:
        """Acceptance has changed: the next round's shares replace all."""
        self._age = {bucket: _STALE for bucket in self._age}

    def observe(self, drafts: DraftLabels, depth: int, bucket: int) -> list[float] | None:
        """Takes a packed round of a chain of this depth; not all of a large one, nor every one of them.

        Returns:
          How many of the rows that were looked at would have accepted at least 0, 1, ... drafts had all been verified:
          counted where it is known, expected where it is not. None of a round that is not looked at.
        """
        nodes = drafts.nodes
        rows = len(drafts.confidence) // nodes if nodes else 0
        self._heard[bucket] += 1
        heard = self._heard[bucket]
        if not rows or (heard > _SETTLED and heard % _EVERY and rows * nodes > _SMALL and self._age.get(bucket) == 0):
            return None
        step = max(1, round(rows * nodes / _NODES))
        chosen = range(self._turn % step, rows, step)
        self._turn += 1
        beyond, by_depth = [float(len(chosen)), *[0.0] * depth], [[] for _ in range(depth)]
        known, right, rates = drafts.known, drafts.right, self.calibration.observe(drafts, chosen)
        at = 0
        for row in chosen:
            alive = happened = 1.0
            for i, node in enumerate(range(row * nodes, row * nodes + depth)):
                p = rates[at + i]
                alive *= p
                happened *= right[node] if known[node] else p
                by_depth[i].append(alive)
                beyond[i + 1] += happened
            at += nodes
        self._learn_shares(by_depth, rows, len(chosen), bucket)
        self._rounds += 1
        if self._rounds % _REFIT == 0 or self._rounds in (2, 5, 10):
            self._fits = tuple((round(a, _DIGITS), round(b, _DIGITS)) for a, b in self.calibration.fits)
        return beyond

    def _learn_shares(self, by_depth: Sequence[Sequence[float]], rows: int, looked: int, bucket: int) -> None:
        shares, age = self._shares[bucket], self._age.get(bucket, _STALE)
        new = 1.0 if age >= _STALE else max(_NEW, age / _STALE)
        ranked: dict[int, list[float]] = {}
        for i, arm in self._arms:
            depth, tokens = arm.tier.depth, arm.tokens(bucket)
            if depth > len(by_depth) or tokens is None:
                continue
            if depth not in ranked:
                ranked[depth] = sorted((s for level in by_depth[:depth] for s in level), reverse=True)
            values = ranked[depth]
            kept, whole = sum(values[: round((tokens - bucket) * looked / rows)]), sum(values)
            share = kept / whole if whole > 0 else 1.0
            shares[i] = share if i not in shares else shares[i] + new * (share - shares[i])
        self._age[bucket] = 0


def guess(survivals: Sequence[float], drafts: float, informed: float) -> float:
    """The share that so many drafts a row keep, given the mean survival at each position.

    Args:
      informed: 0: confidences tell nothing, so that every row is verified as deep as the others; 1: they tell all, so
        that what is verified is accepted.
    """
    whole = sum(survivals)
    if whole <= 0:
        return 1.0
    blind = sum(s * max(0.0, min(1.0, drafts - i)) for i, s in enumerate(survivals))
    return (blind + informed * (min(whole, drafts) - blind)) / whole
