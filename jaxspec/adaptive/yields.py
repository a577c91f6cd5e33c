"""What a verify budget keeps of the drafts that would be accepted: learnt from the labels of packed rounds.

A packed round says of every drafted node how sure the drafter was, verified or not. Calibrated and multiplied along the
path these are survivals; the likeliest n of a batch hold a share of their sum, and that share is what a budget of n
keeps of what a whole round would accept, of chains and of trees, whose paths exclude one another. Owns the calibration,
the shares, and what a round whose budget cut drafts off would have accepted without it. Must not know costs, nor JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxspec.adaptive.arms import Arm
from jaxspec.adaptive.calibration import Calibration
from jaxspec.adaptive.cost import Costed
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
      arms: every arm of a policy; shares are kept of those that are packed.
      buckets: padded batch sizes.
    """

    def __init__(self, arms: Sequence[Arm], buckets: Sequence[int]) -> None:
        self._arms = [(i, arm) for i, arm in enumerate(arms) if not arm.is_whole]
        depth = max([1, *(arm.tier.depth for _, arm in self._arms)])
        self.calibration = Calibration(depth)
        self._shares: dict[int, dict[int, tuple[float, float]]] = {bucket: {} for bucket in buckets}
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
        found = self._shares[bucket].get(arm)
        return None if found is None else found[0]

    def tilt(self, arm: int, bucket: int) -> float | None:
        """How many of the accepted drafts that the arm keeps are of the better half of the rows, relative to a mean
        row's; None where no round has told."""
        found = self._shares[bucket].get(arm)
        return None if found is None else found[1]

    def learnt(self) -> tuple[dict[Costed, tuple[float, float]], tuple[tuple[float, float], ...]]:
        """Shares and tilts of packed rounds, and the calibration's curves; see `Learnt`."""
        shares: dict[Costed, tuple[float, float]] = {}
        for i, arm in self._arms:
            for bucket, found in self._shares.items():
                if i in found:
                    share, tilt = found[i]
                    shares[arm.tier, bucket, arm.tokens(bucket)] = min(1.0, share), min(2.0, tilt)
        return shares, self.calibration.fits if self._rounds else ()

    def recall(self, shares: Mapping[Costed, tuple[float, float]], curves: Sequence[tuple[float, float]]) -> None:
        """Before the first round: takes what `learnt` said until a round tells better."""
        self.calibration.recall(curves)
        if curves:
            self._fits = self._rounded()
        for i, arm in self._arms:
            for bucket, found in self._shares.items():
                told = shares.get((arm.tier, bucket, arm.tokens(bucket)))
                if told is not None:
                    found[i], self._age[bucket] = told, _STALE

    def _rounded(self) -> tuple[tuple[float, float], ...]:
        return tuple((round(a, _DIGITS), round(b, _DIGITS)) for a, b in self.calibration.fits)

    def age(self, bucket: int) -> int | None:
        """Rounds of the bucket since one told its shares; None where none has."""
        return self._age.get(bucket)

    def wait(self, bucket: int, rounds: int = 1) -> None:
        """Rounds of the bucket told nothing."""
        if bucket in self._age:
            self._age[bucket] += rounds

    def attend(self, bucket: int) -> None:
        """Something has perhaps changed: every one of the next rounds is looked at."""
        self._heard[bucket] = min(self._heard[bucket], _SETTLED - _CLOSE)

    def forget(self) -> None:
        """Acceptance has changed: the next round's shares replace all."""
        self._age = {bucket: _STALE for bucket in self._age}

    def observe(
        self, drafts: DraftLabels, depth: int, bucket: int, better: np.ndarray | None = None
    ) -> list[float] | None:
        """Takes a packed round of a tier of this depth; not every one of the large ones.

        Args:
          better: which rows are of the half that accepts more, if that is known.

        Returns:
          How many rows would have accepted at least 0, 1, ... drafts had all been verified: counted where it is known,
          expected where it is not. None of a round that is not looked at.
        """
        nodes = drafts.nodes
        rows = len(drafts.confidence) // nodes if nodes else 0
        self._heard[bucket] += 1
        heard = self._heard[bucket]
        if not rows or (heard > _SETTLED and heard % _EVERY and rows * nodes > _SMALL and self._age.get(bucket) == 0):
            return None
        rates = self.calibration.observe(drafts)
        known, right = (np.frombuffer(x, np.uint8).reshape(rows, nodes) for x in (drafts.known, drafts.right))
        happens = np.where(known != 0, right, rates)
        if drafts.parent is None:
            happened, alive = (np.cumprod(x[:, :depth], axis=1) for x in (happens, rates))
        else:
            parent, level = np.asarray(drafts.parent).reshape(rows, nodes), np.frombuffer(drafts.depth, np.uint8)
            alive = _along(parent, rates)
            reached = _by_depth(level.reshape(rows, nodes), _along(parent, happens), depth)
            # Of siblings one at most is right, which calibrated rates need not respect.
            happened = np.minimum.accumulate(np.minimum(reached, 1.0), axis=1)
        self._learn_shares(alive, depth, bucket, better, is_tree=drafts.parent is not None)
        self._rounds += 1
        if self._rounds % _REFIT == 0 or self._rounds in (2, 5, 10):
            self._fits = self._rounded()
        return [float(rows), *happened.sum(axis=0).tolist()]

    def _learn_shares(
        self, alive_RN: np.ndarray, depth: int, bucket: int, better: np.ndarray | None, *, is_tree: bool
    ) -> None:
        """Of chains a round tells of all that are no deeper, of trees of its own alone."""
        shares, age = self._shares[bucket], self._age.get(bucket, _STALE)
        new = 1.0 if age >= _STALE else max(_NEW, age / _STALE)
        rows, nodes = alive_RN.shape
        for i, arm in self._arms:
            count, tokens = arm.tier.num_nodes - 1, arm.tokens(bucket)
            same = (arm.tier.depth, count) == (depth, nodes) if is_tree else arm.tier.is_chain and count <= nodes
            if not same or tokens is None:
                continue
            flat = alive_RN[:, :count].ravel()
            taken = min(tokens - bucket, len(flat))
            likeliest = np.argpartition(flat, len(flat) - taken)[len(flat) - taken :]
            kept = flat[likeliest]
            whole, part = float(flat.sum()), float(kept.sum())
            good = part / 2
            if better is not None:
                # As many rows in each half: what is kept of a mean row of it.
                own = max(1, np.count_nonzero(better)) / rows
                good = float(kept @ better[likeliest // count]) / (2 * own)
            share = part / whole if whole > 0 else 1.0
            tilt = 2 * good / part if part > 0 else 1.0
            old = shares.get(i, (share, tilt))
            shares[i] = old[0] + new * (share - old[0]), old[1] + new * (tilt - old[1])
        self._age[bucket] = 0


def _along(parent_RN: np.ndarray, rate_RN: np.ndarray) -> np.ndarray:
    """Products of the rates along the path to each node, [rows, nodes]; parents count from 1, and 0 is the root."""
    rows, nodes = rate_RN.shape
    out, every = np.ones((rows, nodes + 1)), np.arange(rows)
    for node in range(nodes):
        out[:, node + 1] = out[every, parent_RN[:, node]] * rate_RN[:, node]
    return out[:, 1:]


def _by_depth(depth_RN: np.ndarray, value_RN: np.ndarray, depth: int) -> np.ndarray:
    """Sums over the nodes of each depth, from 1, [rows, depth]."""
    return np.stack([np.where(depth_RN == d + 1, value_RN, 0.0).sum(axis=1) for d in range(depth)], axis=1)


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
