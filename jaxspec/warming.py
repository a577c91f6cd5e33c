"""The rest of an engine's warm-up: a piece of it between two steps, or whenever nobody steps.

Must not know requests or policies: whoever owns the engine hears what was timed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping

from jaxspec.adaptive.cost import Costed
from jaxspec.runtime.runner import Runner
from jaxspec.runtime.warmup import Progress

#: While the engine works and warms up: steps for each piece of warming up, and the seconds without a step after which
#: its own thread goes on although there is work: a stream may rest, and what it left in flight may never be read.
_STEPS_PER_PIECE, _RESTS_SECONDS = 2, 0.1
#: Of the time of requests, what goes into timing again what was timed before.
_AGAIN = 0.05
_log = logging.getLogger(__name__)


class BackgroundWarmup:
    """Keeps steps and pieces of the warm-up apart.

    Args:
      runner: compiles and times.
      began: when building the engine began, on time.perf_counter's clock.
      on_piece: hears of every piece, with the seconds of the rounds that it timed.
      has_work: whether the engine has something to step for.

    Attributes:
      startup_seconds: until the first request could be served.
    """

    def __init__(
        self, runner: Runner, began: float, on_piece: Callable[[Mapping[Costed, float]], None],
        has_work: Callable[[], bool],
    ):  # fmt: skip
        self._runner, self._began, self._on_piece, self._has_work = runner, began, on_piece, has_work
        self._progress = Progress()
        self._lock = threading.Lock()  # held by a step, or by a piece
        self._steps, self._rests_until = 0, 0.0
        self._step_wanted, self._stepped_at = False, 0.0  # whether a thread is in `step`; when one last was
        self.startup_seconds = time.perf_counter() - began
        self._seconds = self.startup_seconds if runner.warm else None
        if not self.warm:
            _log.info(
                "ready after %.1f s with %d of %d executables; the others are compiled in the background",
                self.startup_seconds, runner.num_ready, runner.num_executables,
            )  # fmt: skip
            runner.attend(functools.partial(_advance_idle, weakref.ref(self)))

    @property
    def warm(self) -> bool:
        """Whether every executable has come."""
        return self._seconds is not None

    @property
    def seconds(self) -> float:
        """Until everything was ready, or so far."""
        return time.perf_counter() - self._began if self._seconds is None else self._seconds

    def wait(self) -> None:
        """Returns when every executable has come and was timed; steps may be taken meanwhile, by other threads."""
        if not self.warm:
            self._runner.hurry_warmup()
        while not self.warm:
            if not _advance_idle(lambda: self):
                time.sleep(0.01)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the engine: no piece runs meanwhile, but now and then one before it."""
        self._step_wanted = True
        try:
            with self._lock:
                if not self.warm and self._steps % _STEPS_PER_PIECE == 0 and self._may_advance():
                    began = time.perf_counter()
                    self._advance()
                    ended = time.perf_counter()
                    self._rests_until = ended + (ended - began) / _AGAIN
                self._steps += 1
                yield
        finally:
            self._stepped_at, self._step_wanted = time.perf_counter(), False

    def _may_advance(self) -> bool:
        """Whether the next piece is worth what requests wait for it."""
        hurts = self._runner.times_again and self._has_work()
        return not hurts or time.perf_counter() >= self._rests_until

    def _advance(self) -> bool:
        """One piece; whether there was anything to do. What fails ends the warm-up, and no request."""
        runner = self._runner
        self._progress.tell(runner.num_ready, runner.num_executables, "are ready")
        known = dict(runner.costs)
        try:
            if not runner.advance():
                if runner.warm and not self.warm:
                    self._end(runner.warmup_error)
                return False
            self._on_piece({key: seconds for key, seconds in runner.costs.items() if known.get(key) != seconds})
        except Exception as e:
            self._end(e)
            return False
        return True

    def _end(self, error: BaseException | None) -> None:
        self._seconds = self.seconds
        have = f"{self._runner.num_ready} of {self._runner.num_executables} executables"
        if error is None:
            _log.info("warm after %.1f s: %s", self._seconds, have)
        else:
            self._runner.stop_warmup()
            _log.warning("the warm-up ends after %.1f s with %s: %s", self._seconds, have, error)


def _advance_idle(warmup: Callable[[], BackgroundWarmup | None]) -> bool | None:
    """A piece of the warm-up of an engine that nobody steps: for Warmup.attend, which outlives no engine."""
    alive = warmup()
    if alive is None or alive.warm:
        return None
    if alive._step_wanted or (alive._has_work() and time.perf_counter() - alive._stepped_at < _RESTS_SECONDS):
        return False
    with alive._lock:
        return alive._advance()
