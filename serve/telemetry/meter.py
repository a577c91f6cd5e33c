"""The metrics once more, as the few numbers that AdminService tells: tokens a second and the mean accepted length.

Must not know gRPC or the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from jaxspec.request import RequestMetrics
from serve.telemetry.metrics import Labelled, ServerMetrics

#: Seconds over which the rate is taken, and the parts of a second in which tokens are counted.
WINDOW_SECONDS = 10
_PARTS = 10


class MeteredMetrics(ServerMetrics):
    """ServerMetrics that can also be asked. Thread-safe, as those are.

    Args:
      clock: seconds; injected so that tests own the time.
    """

    def __init__(self, model_name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(model_name)
        self._meter_clock = clock
        self._meter_lock = threading.Lock()
        self._meter_counts: deque[list[int]] = deque()  # [part of time, tokens], oldest first
        self._meter_rounds = self._meter_accepted = 0

    def on_tokens(self, job: Labelled, count: int, gap_seconds: float | None) -> None:
        super().on_tokens(job, count, gap_seconds)
        with self._meter_lock:
            part = self._forget()
            if self._meter_counts and self._meter_counts[-1][0] == part:
                self._meter_counts[-1][1] += count
            else:
                self._meter_counts.append([part, count])

    def on_finished(self, job: Labelled, reason: str, prompt_tokens: int, metrics: RequestMetrics) -> None:
        super().on_finished(job, reason, prompt_tokens, metrics)
        with self._meter_lock:
            self._meter_rounds += metrics.rounds
            self._meter_accepted += metrics.accepted

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of the last WINDOW_SECONDS, a second."""
        with self._meter_lock:
            self._forget()
            return sum(count for _, count in self._meter_counts) / WINDOW_SECONDS

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round over all completions that ended, the bonus included; 0.0 before the first."""
        with self._meter_lock:
            return (self._meter_accepted + self._meter_rounds) / self._meter_rounds if self._meter_rounds else 0.0

    def _forget(self) -> int:
        """Drops what is too old; returns the current part of time."""
        part = int(self._meter_clock() * _PARTS)
        while self._meter_counts and self._meter_counts[0][0] <= part - WINDOW_SECONDS * _PARTS:
            self._meter_counts.popleft()
        return part
