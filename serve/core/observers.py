"""What is told of requests and of the engine, and to whom: metrics of every step, observers of every request's end.

Observers hurt nobody: they are called from the engine's step and from the middle of requests, and a bug in one must
end neither. Must not know what they do with it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, Protocol

import grpc

from jaxspec.adaptive.policy import RoundStats
from jaxspec.request import RequestMetrics, RequestOutput
from jaxspec.stats import EngineStats
from serve.core.errors import StatusError
from serve.core.jobs import Job

P = ParamSpec("P")
#: Seconds over which the rate of tokens is taken, and the parts of a second in which they are counted.
RATE_SECONDS = 10
_PARTS = 10
_log = logging.getLogger("serve")


class Metrics(Protocol):
    """What is counted of requests; `serve.telemetry.metrics.ServerMetrics` says what each call means."""

    def on_round(self, stats: RoundStats) -> None: ...
    def on_compiled(self, ready: int, total: int) -> None: ...
    def on_stats(self, stats: EngineStats, pages: int) -> None: ...
    def on_tokens(self, job: Job, count: int, gap_seconds: float | None) -> None: ...
    def on_finished(self, job: Job, reason: str, prompt_tokens: int, metrics: RequestMetrics) -> None: ...
    def on_refused(self, code: str, reason: str) -> None: ...
    def on_other_chat(self) -> None: ...


@dataclasses.dataclass
class Record:
    """What became of a job, whatever protocol it came by.

    Attributes:
      code, error: its status; error None where there was none, or the client left.
      prompt_tokens, seed: None where it ended before they were known.
      output_tokens: handed to the servicer, over all completions.
      outputs: of the completions that ended by themselves, in that order.
      first_after: seconds from the start to the first tokens; None: there were none.
      seconds: from the start to the end.
      tier_switches: of the engine meanwhile.
    """

    job: Job
    code: grpc.StatusCode = grpc.StatusCode.OK
    error: StatusError | None = None
    prompt_tokens: int | None = None
    seed: int | None = None
    output_tokens: int = 0
    outputs: list[RequestOutput] = dataclasses.field(default_factory=list)
    first_after: float | None = None
    seconds: float = 0.0
    tier_switches: int = 0

    @property
    def metrics(self) -> list[RequestMetrics]:
        return [output.metrics for output in self.outputs]

    @property
    def reasons(self) -> list[str]:
        """Why completions ended."""
        return [str(output.finish_reason) for output in self.outputs]

    @property
    def total(self) -> RequestMetrics:
        """What those completions cost together."""
        return RequestMetrics.total(self.metrics)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.first_after if (known := self.total.ttft) is None else known

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first, the mean over completions."""
        times = [m.tpot for m in self.metrics if m.tpot is not None]
        return sum(times) / len(times) if times else None


#: Hears that a job came; what it returns hears what became of it.
Observer = Callable[[Job], Callable[[Record], None]]


class Guard:
    """Calls functions that must not fail. For any thread.

    Attributes:
      failures: how many have.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._logged: set[str] = set()

    def __call__(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """`function(*args)`; its first exception under its name is logged."""
        try:
            function(*args, **kwargs)
        except Exception as e:
            self.failures += 1
            name = getattr(function, "__name__", repr(function))
            if name not in self._logged:
                self._logged.add(name)
                _log.error("%s failed; it goes on, and this is not logged again", name, exc_info=e)


class Meter:
    """The few numbers that are told when somebody asks: tokens a second and the mean accepted length. For any thread.

    Args:
      clock: seconds; injected so that tests own the time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._counts: deque[tuple[int, int]] = deque()  # part of time, tokens; oldest first
        self._rounds = self._accepted = 0

    def add_tokens(self, count: int) -> None:
        """Tokens came."""
        with self._lock:
            self._counts.append((self._forget(), count))

    def add_finished(self, metrics: RequestMetrics) -> None:
        """A completion has ended."""
        with self._lock:
            self._rounds += metrics.rounds
            self._accepted += metrics.accepted

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of the last RATE_SECONDS, a second."""
        with self._lock:
            self._forget()
            return sum(count for _, count in self._counts) / RATE_SECONDS

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round over all completions that ended, the bonus included; 0.0 before the first."""
        with self._lock:
            return (self._accepted + self._rounds) / self._rounds if self._rounds else 0.0

    def _forget(self) -> int:
        """Drops what is too old; returns the current part of time."""
        part = int(self._clock() * _PARTS)
        while self._counts and self._counts[0][0] <= part - RATE_SECONDS * _PARTS:
            self._counts.popleft()
        return part
