"""What packed rounds are called with besides, and what the host reads of their drafts.

Must not know executables, requests or policies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.adaptive.policy import DraftLabels
from jaxspec.speculation.layouts import Budget, PackedDrafts, plain_calibration
from jaxspec.tier import Choice, Tier


class Spending:
    """Calibrations and `Budget`s on the device, kept there, for they seldom change.

    Args:
      put: brings an array of the host to the device. depth: of the deepest tier.
    """

    def __init__(self, put: Callable[[Any], jax.Array], depth: int):
        self._put, self._depth = put, depth
        self._even: dict[int, jax.Array] = {}
        self._calibrations: dict[Any, jax.Array] = {}

    def __call__(
        self, choice: Choice, bucket: int, weights: Sequence[float] | None = None
    ) -> tuple[jax.Array | np.ndarray, ...]:
        """The arguments for a round of so many rows, if it is packed; ValueError for a calibration that is none.

        Args:
          weights: what a token of each row is worth; None: of all the same.
        """
        if choice.tokens is None:
            return ()
        if weights is not None:
            given = Budget(Budget.even(bucket))
            given.weight_B[: len(weights)] = weights
            return self._calibration(choice.calibration), given.array
        if bucket not in self._even:
            self._even[bucket] = self._put(Budget.even(bucket))
        return self._calibration(choice.calibration), self._even[bucket]

    def _calibration(self, fit: tuple[tuple[float, float], ...]) -> jax.Array:
        if fit not in self._calibrations:
            whole = plain_calibration(self._depth)
            if len(fit) > self._depth or any(len(pair) != 2 for pair in fit):
                raise ValueError(f"a calibration is a (slope, intercept) for each of {self._depth} depths, got {fit}")
            for at, pair in enumerate(fit):
                whole[at] = pair
            if len(self._calibrations) > 64:
                self._calibrations.clear()
            self._calibrations[fit] = self._put(whole)
        return self._calibrations[fit]


def labels(packed: np.ndarray, tier: Tier) -> DraftLabels:
    """What became of the drafts of a packed round, from its rows."""
    told = PackedDrafts.behind(packed, tier.depth + 1)
    depth, verified, known, right = (x.astype(np.uint8).tobytes() for x in told[1:5])
    parents = None if tier.is_chain else array("H", told.parent_BM.astype(np.uint16).tobytes())
    confidence = array("f", told.confidence_BM.tobytes())
    return DraftLabels(told.confidence_BM.shape[1], confidence, depth, verified, known, right, parents)
