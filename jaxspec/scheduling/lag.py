"""How far a drafter's cache lags behind the committed text: when it has to catch up, and what may be reused.

NumPy and the standard library only. Must not know how a drafter keeps its cache.
"""

from __future__ import annotations

import numpy as np

from jaxspec.scheduling.plan import DecodeRows


class DraftLag:
    """Keeps count for a drafter whose cache only rounds that draft, and catching up, bring forward.

    Where it lacks entries, the pages that generated tokens filled are no prefix to reuse. Before a request's first
    round one token is unseen: the prefill's.

    Args:
      window: committed tokens that a draft consumes by itself.
      catch_up_tokens: those before them that catching up consumes.
      slots: of the engine.
    """

    def __init__(self, window: int, catch_up_tokens: int, slots: int):
        self.window, self.catch_up_tokens = window, catch_up_tokens
        #: Most committed tokens that the drafter has not consumed, and the stamps of the slots that they are of.
        self._lag_S, self._stamp_S = np.ones(slots, np.int64), np.full(slots, -1, np.int64)

    def before_round(self, rows: DecodeRows, depth: int, *, can_catch_up: bool, elsewhere: bool = False) -> bool:
        """Whether the drafter is to catch up before rounds of `depth` drafts each; counts those rounds.

        Args:
          elsewhere: the drafts are another's, and this drafter takes in nothing.
        """
        drafts = depth > 0 and not elsewhere
        slots = rows.slots_B
        lag_B = np.where(self._stamp_S[slots] == rows.stamps_B, self._lag_S[slots], 1)
        late_B = lag_B > self.window
        behind = drafts and bool(late_B.any())
        lost = behind and not can_catch_up
        lag_B = np.full_like(lag_B, depth + 1) if drafts else lag_B + (depth + 1) * rows.rounds
        self._lag_S[slots], self._stamp_S[slots] = lag_B, rows.stamps_B
        spoilt_B = lag_B > self.window + self.catch_up_tokens
        for row in np.flatnonzero(spoilt_B | late_B if lost else spoilt_B).tolist():
            rows.requests[row].cacheable_generated = False
        return behind and not lost
