"""From a drafter's confidence to the probability that its token is accepted, fitted while rounds run.

Owns the fits: for each draft position a logistic curve over the confidence's logit, which learns slowly, and a level
that all positions share, which follows texts as they become harder or easier. What a confidence is (a drafter's own
probability, a margin, counts) does not matter as long as more of it means more. A draft whose parent was not
reached, for it was refused or not verified, has no label: it is left out, and not counted as refused. So labels are
missing by confidence alone, which a curve over confidence can bear; and the first draft that a budget cuts off has one
all the same, since the target's token in its place is known. Must not know costs, nor JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxspec.adaptive.policy import DraftLabels

#: Confidences are kept this far from 0 and 1.
_CLIP = 1e-4
#: Logits beyond which nothing is told apart.
_FAR = 50.0
#: Weight of the start (the confidence taken at its word) in rows, for the slope and for the level.
_SLOPE_ROWS, _LEVEL_ROWS = 4.0, 1.0
#: Of the shared level: least information that it goes by, and labels of any position after which the rest counts half,
#: but not before so many rounds.
_SHARED, _SOON, _ROUNDS = 8.0, 60.0, 4


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

    def fade(self, factor: float) -> None:
        self._ss = max(_SLOPE_ROWS, self._ss * factor)
        self._sl *= factor
        self._ll = max(_LEVEL_ROWS, self._ll * factor)

    def learn(self, ss: float, sl: float, ll: float, slope: float, level: float) -> float:
        """Labels of a round: a step of Newton's method on what they add to the likelihood.

        Args:
          ss, sl, ll: information about slope and level, and between them. slope, level: the likelihood's gradient.

        Returns:
          What is left of the gradient by the level.
        """
        self._ss += ss
        self._sl += sl
        self._ll += ll
        det = self._ss * self._ll - self._sl * self._sl
        steeper = max(-self.slope, (self._ll * slope - self._sl * level) / det)
        higher = (self._ss * level - self._sl * slope) / det
        self.slope, self.level = self.slope + steeper, self.level + higher
        return level - sl * steeper - ll * higher


class Calibration:
    """Probabilities of acceptance of drafts, given that those before them were accepted.

    Args:
      depth: draft positions, at least 1.
      half_life: labels of a position after which evidence counts half.

    Raises:
      ValueError: either is below 1.
    """

    def __init__(self, depth: int, half_life: float = 150.0) -> None:
        if depth < 1 or not half_life >= 1:
            raise ValueError(f"depth and half_life must be at least 1, got {depth} and {half_life}")
        self._curves = [_Curve() for _ in range(depth)]
        self._half_life = half_life
        self._shared, self._information = 0.0, _SHARED

    @property
    def fits(self) -> tuple[tuple[float, float], ...]:
        """Slope and level of each position."""
        return tuple((curve.slope, curve.level + self._shared) for curve in self._curves)

    def recall(self, fits: Sequence[tuple[float, float]]) -> None:
        """Begins with these fits of the first positions, as little sure of them as of any start."""
        for curve, (slope, level) in zip(self._curves, fits, strict=False):
            curve.slope, curve.level = slope, level

    def rate(self, position: int, confidence: float) -> float:
        """The probability at a position, from 0; beyond the last as there. No number, or none above 0, means never."""
        if not confidence > 0:
            return 0.0
        curve = self._curves[min(position, len(self._curves) - 1)]
        return _sigmoid(curve.slope * _logit(confidence) + curve.level + self._shared)

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

    def observe(self, drafts: DraftLabels, rows: slice = slice(None)) -> np.ndarray:
        """Learns from the drafts of a round whose tokens are known: those that were reached, verified or not.

        Args:
          rows: those to learn from.

        Returns:
          The probability of each of their drafts, as it was believed before, [rows, nodes].
        """
        nodes, count = drafts.nodes, len(self._curves)
        table = lambda values, kind: np.frombuffer(values, kind).reshape(-1, nodes)[rows]
        sure, depth = table(drafts.confidence, np.float32), table(drafts.depth, np.uint8)
        known, right = table(drafts.known, np.uint8) != 0, table(drafts.right, np.uint8) != 0
        told = sure > 0
        inside = np.where(told, sure, 0.5).astype(np.float64).clip(_CLIP, 1 - _CLIP)
        x = np.log(inside / (1 - inside))
        at = np.minimum(depth.astype(np.intp), count) - 1
        fits = np.asarray(self.fits)[at]
        p = 1 / (1 + np.exp(-(fits[..., 0] * x + fits[..., 1]).clip(-_FAR, _FAR)))
        known &= told
        at, x, p_known, hit = at[known], x[known], p[known], right[known]
        weight, error = np.maximum(1e-3, p_known * (1 - p_known)), hit - p_known
        sums = [
            np.bincount(at, values, count).tolist()
            for values in (weight * x * x, weight * x, weight, error * x, error, np.ones(len(at)))
        ]
        left = 0.0
        for curve, *evidence, labels in zip(self._curves, *sums, strict=True):
            if labels:
                left += curve.learn(*evidence)
                curve.fade(0.5 ** (labels / self._half_life))
        # What the curves do not explain of the round.
        self._information += sum(sums[2])
        self._shared += left / self._information
        self._information = max(_SHARED, self._information * 0.5 ** min(len(at) / _SOON, 1 / _ROUNDS))
        return np.where(told, p, 0.0)


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


def chance_error(predicted: Sequence[float], bins: int = 10) -> float:
    """The calibration error that as many perfectly calibrated predictions are expected to show, by chance alone.

    Outcomes are taken as independent and the gap of each bin as normal; ValueError where there is nothing.
    """
    if not predicted:
        raise ValueError("needs predictions, got none")
    variance = [0.0] * bins
    for p in predicted:
        variance[min(bins - 1, int(p * bins))] += p * (1 - p)
    return math.sqrt(2 / math.pi) * sum(map(math.sqrt, variance)) / len(predicted)
