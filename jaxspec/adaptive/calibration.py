"""From a drafter's confidence to the probability that its token is accepted, fitted while rounds run.

Owns the fits: for each draft position a logistic curve over the confidence's logit. What a confidence is (a drafter's
own probability, a margin, counts) does not matter as long as more of it means more. A draft whose parent was not
reached, for it was refused or not verified, has no label: it is left out, and not counted as refused. So labels are
missing by confidence alone, which a curve over confidence can bear; and the first draft that a budget cuts off has one
all the same, since the target's token in its place is known. Must not know costs, nor JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jaxspec.adaptive.policy import DraftLabels

#: Confidences are kept this far from 0 and 1.
_CLIP = 1e-4
#: Logits beyond which nothing is told apart.
_FAR = 50.0
#: Weight of the start (the confidence taken at its word) in rows, for the slope and for the level.
_SLOPE_ROWS, _LEVEL_ROWS = 4.0, 1.0


def _logit(confidence: float) -> float:
    p = min(1 - _CLIP, max(_CLIP, confidence))
    return math.log(p / (1 - p))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


class _Curve:
    """p = sigmoid(slope * logit(confidence) + level), by Newton steps over evidence that fades.

    Attributes:
      slope, level: the fit.
    """

    def __init__(self) -> None:
        self.slope, self.level = 1.0, 0.0
        # Information about slope and level, and between them.
        self._ss, self._sl, self._ll = _SLOPE_ROWS, 0.0, _LEVEL_ROWS

    def predict(self, x: float) -> float:
        return _sigmoid(self.slope * x + self.level)

    def fade(self, factor: float) -> None:
        self._ss = max(_SLOPE_ROWS, self._ss * factor)
        self._sl *= factor
        self._ll = max(_LEVEL_ROWS, self._ll * factor)

    def learn(self, x: float, accepted: bool) -> None:
        """One label: a step of Newton's method on what it adds to the likelihood."""
        p = self.predict(x)
        weight = max(1e-3, p * (1 - p))
        self._ss += weight * x * x
        self._sl += weight * x
        self._ll += weight
        error, det = accepted - p, self._ss * self._ll - self._sl * self._sl
        self.slope = max(0.0, self.slope + error * (self._ll * x - self._sl) / det)
        self.level += error * (self._ss - self._sl * x) / det


class Calibration:
    """Probabilities of acceptance of drafts, given that those before them were accepted.

    Args:
      depth: draft positions, at least 1.
      half_life: labels of a position after which evidence counts half.

    Raises:
      ValueError: either is below 1.
    """

    def __init__(self, depth: int, half_life: float = 1000.0) -> None:
        if depth < 1 or not half_life >= 1:
            raise ValueError(f"depth and half_life must be at least 1, got {depth} and {half_life}")
        self._curves = [_Curve() for _ in range(depth)]
        self._half_life = half_life

    @property
    def fits(self) -> tuple[tuple[float, float], ...]:
        """Slope and level of each position."""
        return tuple((curve.slope, curve.level) for curve in self._curves)

    def rate(self, position: int, confidence: float) -> float:
        """The probability at a position, from 0; beyond the last as there. No number, or none above 0, means never."""
        if not confidence > 0:
            return 0.0
        return self._curves[min(position, len(self._curves) - 1)].predict(_logit(confidence))

    def rates(self, confidences: Sequence[float]) -> list[float]:
        """The probability at each position of a chain."""
        return [self.rate(i, confidence) for i, confidence in enumerate(confidences)]

    def survivals(self, confidences: Sequence[float]) -> list[float]:
        """The probability that each draft of a chain is accepted, with all before it."""
        alive, out = 1.0, []
        for rate in self.rates(confidences):
            alive *= rate
            out.append(alive)
        return out

    def observe(self, drafts: DraftLabels, rows: Iterable[int] | None = None) -> list[float]:
        """Learns from the drafts of a round whose tokens are known: those that were reached, verified or not.

        Args:
          rows: those to learn from; None: all.

        Returns:
          The probability of each of their drafts, as it was believed before, row after row.
        """
        nodes, confidence, known, right = drafts.nodes, drafts.confidence, drafts.known, drafts.right
        every = range(len(confidence) // nodes if nodes else 0)
        last, fits, rates = len(self._curves) - 1, self.fits, []
        labels: list[list[tuple[float, int]]] = [[] for _ in self._curves]
        log, exp, add = math.log, math.exp, rates.append
        for row in every if rows is None else rows:
            for node in range(row * nodes, (row + 1) * nodes):
                sure = confidence[node]
                if not sure > 0:
                    add(0.0)
                    continue
                sure = _CLIP if sure < _CLIP else min(sure, 1 - _CLIP)
                at, x = min(drafts.depth[node] - 1, last), log(sure / (1 - sure))
                slope, level = fits[at]
                add(1 / (1 + exp(-max(-_FAR, min(_FAR, slope * x + level)))))
                if known[node]:
                    labels[at].append((x, right[node]))
        for curve, told in zip(self._curves, labels, strict=True):
            for x, hit in told:
                curve.learn(x, bool(hit))
            if told:
                curve.fade(0.5 ** (len(told) / self._half_life))
        return rates


def calibration_error(predicted: Sequence[float], accepted: Sequence[bool], bins: int = 10) -> float:
    """Expected calibration error: the mean gap between predictions and outcomes over bins of equal width.

    Raises:
      ValueError: lengths that differ, or nothing to compare.
    """
    if len(predicted) != len(accepted) or not predicted:
        raise ValueError(f"needs as many outcomes as predictions, got {len(accepted)} and {len(predicted)}")
    sums = [0.0] * bins
    for p, hit in zip(predicted, accepted, strict=True):
        sums[min(bins - 1, int(p * bins))] += p - hit
    return sum(abs(s) for s in sums) / len(predicted)
