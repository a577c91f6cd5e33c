"""Observers that hurt nobody: what fails in one is logged, once a kind, and whoever told it goes on.

Metrics and logs are told from the engine's step and from the middle of requests; a bug in them must end neither.
Thread-safe, as what is wrapped is. Must not know what observers do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jaxspec.adaptive.policy import RoundStats
from jaxspec.request import RequestMetrics
from jaxspec.stats import EngineStats
from serve.core.jobs import Job
from serve.core.tickets import Metrics

_log = logging.getLogger("serve")


class Guard:
    """Calls functions that must not fail.

    Attributes:
      failures: how many have.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._logged: set[str] = set()

    def __call__(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """`function(*args)`; its first exception under this name is logged."""
        try:
            function(*args)
        except Exception as e:
            self.failures += 1
            if name not in self._logged:
                self._logged.add(name)
                _log.error("%s failed; it goes on, and this is not logged again", name, exc_info=e)


class GuardedMetrics:
    """Metrics behind a guard.

    Attributes:
      guard: theirs.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.guard = Guard()
        self._metrics = metrics

    def on_round(self, stats: RoundStats) -> None:
        self.guard("on_round", self._metrics.on_round, stats)

    def on_stats(self, stats: EngineStats, pages: int) -> None:
        self.guard("on_stats", self._metrics.on_stats, stats, pages)

    def on_tokens(self, job: Job, count: int, gap_seconds: float | None) -> None:
        self.guard("on_tokens", self._metrics.on_tokens, job, count, gap_seconds)

    def on_finished(self, job: Job, reason: str, prompt_tokens: int, metrics: RequestMetrics) -> None:
        self.guard("on_finished", self._metrics.on_finished, job, reason, prompt_tokens, metrics)

    def on_refused(self, code: str, reason: str) -> None:
        self.guard("on_refused", self._metrics.on_refused, code, reason)
