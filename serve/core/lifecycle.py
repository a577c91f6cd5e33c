"""The server's life between ready and gone: the watchdog over the engine's steps, and the drain.

Event loop only. Must not know gRPC: whoever serves health listens to `on_change`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Literal

from serve.config import ServerConfig
from serve.core.engine_client import EngineClient
from serve.core.engine_client import State as EngineState
from serve.core.errors import unavailable
from serve.core.generator import Generator
from serve.core.looks import Looks

State = Literal["starting", "serving", "draining", "stalled", "dead", "stopped"]
#: A step that has taken so many times watchdog_seconds is not expected back: a new process is sooner of use.
_HOPELESS = 3
#: Seconds that aborted readers have to leave, once the drain's time is over.
_LEAVE_SECONDS = 1.0
_log = logging.getLogger("serve")


class Lifecycle:
    """What state the server is in, and how it ends.

    Args:
      engine, generator, config: not started yet.

    Attributes:
      on_change: callbacks that hear every new state, on the loop. Health is SERVING in "serving" alone.
      on_alive: callbacks that hear every change of `alive`, on the loop.
    """

    def __init__(self, engine: EngineClient, generator: Generator, config: ServerConfig):
        self.on_change: list[Callable[[State], None]] = []
        self.on_alive: list[Callable[[bool], None]] = []
        self._engine, self._generator, self._config = engine, generator, config
        self._watch = Looks(self._check_step, min(1.0, config.watchdog_seconds / 4))
        self._drain: asyncio.Task[None] | None = None
        self._drain_ends = float("inf")
        self._poke = asyncio.Event()
        self._last: State = self.state
        self._last_alive = self.alive
        engine.subscribe(self._on_engine)
        generator.on_idle = self._poke.set

    @property
    def state(self) -> State:
        """The engine's, and "draining" from the first `drain` on unless the engine is worse off."""
        if self._drain is not None and self._engine.state in ("starting", "serving"):
            return "draining"
        return self._engine.state

    @property
    def alive(self) -> bool:
        """The process is worth keeping: true while it loads, serves and drains, however busy it is.

        False when the engine has died, and while a step has taken more than three times watchdog_seconds. A step that
        hangs for less costs readiness alone: a restart would take the compiled executables and the prefix cache from a
        server that may recover by itself. Loading has no limit here; a start-up probe sets one.
        """
        if self._engine.state == "stalled":
            return self._engine.step_seconds <= _HOPELESS * self._config.watchdog_seconds
        return self._engine.state != "dead"

    def start(self) -> None:
        """Begins to watch the engine's steps."""
        self._watch.schedule()

    def close(self) -> None:
        """Watches no longer, and gives a drain up."""
        self._watch.cancel()
        if self._drain is not None:
            self._drain.cancel()

    async def drain(self, grace: float | None = None) -> None:
        """Ends the server's service: returns when nothing is left to do.

        Health goes off at once. For `withdrawal_seconds` requests are still accepted, until balancers have noticed;
        then they are refused, and those under way may finish. What is left when the grace is over fails with
        UNAVAILABLE.

        Args:
          grace: seconds from now, the withdrawal included; None: the configured drain_seconds. A later call joins the
            first one, and can only shorten its time.
        """
        now = time.monotonic()
        self._drain_ends = min(self._drain_ends, now + (self._config.drain_seconds if grace is None else grace))
        if self._drain is None:
            self._drain = asyncio.create_task(self._run_drain(now), name="drain")
            self._notice()
        else:
            self._poke.set()
        await asyncio.shield(self._drain)

    async def _run_drain(self, began: float) -> None:
        _log.info("draining: %d requests are live", self._generator.live)
        await self._until(lambda: min(began + self._config.withdrawal_seconds, self._drain_ends))
        error = unavailable("the server is shutting down", "draining")
        self._generator.refuse(error)
        idle = lambda: self._generator.live == 0
        await self._until(lambda: self._drain_ends, idle)
        if not idle():
            _log.warning("the drain's time is over: %d requests are aborted", self._generator.live)
            self._generator.fail_all(error)
            leave = time.monotonic() + _LEAVE_SECONDS
            await self._until(lambda: leave, idle)
        _log.info("drained")

    async def _until(self, ends: Callable[[], float], done: Callable[[], bool] = lambda: False) -> None:
        """Waits for a time, which a later `drain` may bring forward, or until it is done."""
        while not done() and (left := ends() - time.monotonic()) > 0:
            self._poke.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._poke.wait()

    # The watchdog.

    def _check_step(self) -> None:
        age = self._engine.step_seconds
        if self._engine.state == "serving" and age > self._config.watchdog_seconds:
            _log.error("a step of the engine has taken %.1f seconds: no health until it returns", age)
            self._engine.mark_stalled()
        if self.alive != self._last_alive:
            if not self.alive:
                _log.error("the step has taken %.1f seconds: the process is no longer reported alive", age)
            self._notice()
        self._watch.schedule()

    def _on_engine(self, state: EngineState) -> None:
        if state == "serving" and self._last == "stalled":
            _log.warning("the engine's step returned: serving again")
        self._notice()

    def _notice(self) -> None:
        if self.state != self._last:
            self._last = self.state
            for callback in self.on_change:
                callback(self._last)
        if self.alive != self._last_alive:
            self._last_alive = self.alive
            for callback in self.on_alive:
                callback(self._last_alive)
