"""Where the host's time goes: a stopwatch that is always on. Standard library only."""

from __future__ import annotations

import time

#: Parts of a step; "wait" is for the device, all others are the host's work.
WAIT = "wait"
PARTS = (
    "plan", "policy", "batch array", "call", "prefill", WAIT, "unpack", "stops", "detokenize", "commit", "events",
    "rest",
)  # fmt: skip


class Laps:
    """Adds the time since the lap before to a part; a lap costs 0.2 us.

    Attributes:
      seconds: by part, since this was made.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._at = 0.0

    def start(self) -> float:
        """What was until now is no part of anything; returns time.perf_counter()."""
        self._at = time.perf_counter()
        return self._at

    def lap(self, part: str) -> float:
        """What was since the call before was this part; returns time.perf_counter()."""
        now = time.perf_counter()
        self.seconds[part] += now - self._at
        self._at = now
        return now
