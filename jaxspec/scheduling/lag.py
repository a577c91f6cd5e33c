"""How far a drafter's cache lags behind the committed text: when it has to catch up, and what may be reused.

Standard library only. Must not know how a drafter keeps its cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxspec.request import Request


@dataclasses.dataclass(frozen=True)
class DraftLag:
    """The rule for a drafter whose cache only rounds that draft, and catching up, bring forward.

    Where it lacks entries, the pages that generated tokens filled are no prefix to reuse.

    Attributes:
      window: committed tokens that a draft consumes by itself.
      catch_up_tokens: those before them that catching up consumes.
    """

    window: int
    catch_up_tokens: int

    def before_round(self, requests: Sequence[Request], depth: int, *, can_catch_up: bool) -> bool:
        """Whether the drafter is to catch up before a round that drafts `depth` tokens; counts that round."""
        behind = depth > 0 and any(request.drafter_lag > self.window for request in requests)
        lost = behind and not can_catch_up
        for request in requests:
            if lost and request.drafter_lag > self.window:
                request.cacheable_generated = False
            request.drafter_lag = depth + 1 if depth else request.drafter_lag + 1
            if request.drafter_lag > self.window + self.catch_up_tokens:
                request.cacheable_generated = False
        return behind and not lost
