"""AdaSpec's linear model of a forward pass: seconds = a * context tokens + g * batch tokens + d (section 4.1).

It says what a measured table says in three numbers, and how badly. Owns the fit and its error. Must not know JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """A fitted model.

    Attributes:
      per_context, per_token, fixed: seconds a context token, a batch token and a pass (a, g and d of the paper).
      r2: share of the measurements' variance that it explains. worst: its greatest relative error.
    """

    per_context: float
    per_token: float
    fixed: float
    r2: float
    worst: float

    def seconds(self, context: float, tokens: float) -> float:
        """Of a pass over so many tokens with so many before them, over all requests."""
        return self.per_context * context + self.per_token * tokens + self.fixed

    def drafting(self, context: float, requests: int, depth: int) -> float:
        """Of `depth` passes of a draft model, one token a request each, behind ever longer contexts (equation 3)."""
        return sum(self.seconds(context + i * requests, requests) for i in range(depth))

    def verifying(self, context: float, requests: int, drafts: int, *, expanded: bool = False) -> float:
        """Of one pass over each request's last token and so many drafts in all.

        Args:
          expanded: whether each token reads its context for itself, as the paper's batch expansion does (equation 4);
            False where a kernel of several queries reads it once.
        """
        tokens = requests + drafts
        return self.seconds(context * tokens / requests if expanded else context, tokens)


def fit(samples: Sequence[tuple[float, float, float]]) -> LinearCost:
    """Least squares over (context tokens, batch tokens, seconds).

    What the samples do not vary, or would make negative, is left out: its coefficient is 0.

    Raises:
      ValueError: no samples, or seconds that are not positive.
    """
    if not samples or not all(0 < seconds < float("inf") for _, _, seconds in samples):
        raise ValueError(f"needs positive finite seconds, got {[s for _, _, s in samples][:8]}")
    best: tuple[float, list[float]] | None = None
    for used in ((0, 1, 2), (1, 2), (0, 2), (2,)):
        found = _least_squares(samples, used)
        if found is None or min(found) < 0:
            continue
        error = sum((s - found[0] * c - found[1] * t - found[2]) ** 2 for c, t, s in samples)
        if best is None or error < best[0]:
            best = error, found
    assert best is not None, "the mean alone always fits"
    error, (per_context, per_token, fixed) = best
    mean = sum(s for _, _, s in samples) / len(samples)
    spread = sum((s - mean) ** 2 for _, _, s in samples)
    worst = max(abs(per_context * c + per_token * t + fixed - s) / s for c, t, s in samples)
    return LinearCost(per_context, per_token, fixed, 1 - error / spread if spread > 0 else 1.0, worst)


def _least_squares(samples: Sequence[tuple[float, float, float]], used: Sequence[int]) -> list[float] | None:
    """Coefficients of context, tokens and 1, of which only those of `used` may differ from 0; None: not determined."""
    scale = [max(abs(sample[k]) for sample in samples) or 1.0 for k in (0, 1)] + [1.0]
    columns = [[(*sample[:2], 1.0)[k] / scale[k] for sample in samples] for k in used]
    rows = [
        [sum(x * y for x, y in zip(a, b, strict=True)) for b in columns]
        + [sum(x * sample[2] for x, sample in zip(a, samples, strict=True))]
        for a in columns
    ]
    n = len(used)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-9 * len(samples):
            return None
        for r in range(n):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    out = [0.0, 0.0, 0.0]
    for i, k in enumerate(used):
        out[k] = rows[i][n] / rows[i][i] / scale[k]
    return out
