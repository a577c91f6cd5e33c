"""From a drafter's confidence to the probability that its token is accepted, fitted while rounds run.

Owns the fits: for each draft position a logistic curve over the confidence's logit. What a confidence is (a drafter's
own probability, a margin, counts) does not matter as long as more of it means more. A draft that was not verified, or
lies behind one that was refused, has no label: it is left out, and not counted as refused. So labels are missing by
confidence alone, which a curve over confidence can bear; but where nothing unsure is verified nothing is learnt of it,
and somebody has to verify a small share anyway. Must not know costs, nor JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Confidences are kept this far from 0 and 1.
_CLIP = 1e-4
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
      slope, level: the fit. rows, hits: labels behind it, and those that were accepted.
    """

    def __init__(self) -> None:
        self.slope, self.level = 1.0, 0.0
        self.rows = self.hits = 0.0
        # Information about slope and level, and between them.
        self._ss, self._sl, self._ll = _SLOPE_ROWS, 0.0, _LEVEL_ROWS

    def predict(self, x: float) -> float:
        return _sigmoid(self.slope * x + self.level)

    def fade(self, factor: float) -> None:
        self.rows *= factor
        self.hits *= factor
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
        self.rows += 1
        self.hits += accepted


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

    def rates(self, confidences: Sequence[float]) -> list[float]:
        """The probability at each position; a confidence that is no number counts as the position's mean."""
        return [self._rate(i, confidence) for i, confidence in enumerate(confidences[: len(self._curves)])]

    def survivals(self, confidences: Sequence[float]) -> list[float]:
        """The probability that each draft of a chain is accepted, with all before it."""
        alive, out = 1.0, []
        for rate in self.rates(confidences):
            alive *= rate
            out.append(alive)
        return out

    def observe(self, rows: Sequence[tuple[Sequence[float], int, int]]) -> None:
        """Learns from a round.

        Args:
          rows: of each request its confidences, how many of its drafts were verified, and how many accepted.

        Raises:
          ValueError: more accepted than verified, or more verified than drafted.
        """
        for confidences, verified, accepted in rows:
            if not 0 <= accepted <= verified <= len(confidences):
                raise ValueError(
                    f"accepted {accepted}, verified {verified} and drafted {len(confidences)} tokens must ascend"
                )
        labels = [0] * len(self._curves)
        for confidences, verified, accepted in rows:
            # Those accepted, and the one that ended it, if it was verified.
            for i in range(min(accepted + 1, verified, len(self._curves))):
                curve, confidence = self._curves[i], confidences[i]
                if math.isfinite(confidence):
                    curve.learn(_logit(confidence), i < accepted)
                    labels[i] += 1
        for curve, count in zip(self._curves, labels, strict=True):
            if count:
                curve.fade(0.5 ** (count / self._half_life))

    def _rate(self, i: int, confidence: float) -> float:
        curve = self._curves[i]
        if math.isfinite(confidence):
            return curve.predict(_logit(confidence))
        return (curve.hits + 0.5) / (curve.rows + 1)


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
