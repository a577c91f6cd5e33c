"""The engine as the event loop sees it: its state, what is asked of it, and the news that come back.

The engine's side (serve.core.engine_core) runs where a link puts it: on a thread of this process, or in a process of
its own (serve.core.engine_process). Neither side ever waits for the other. Must not know gRPC, streams or why a request
was admitted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from jaxspec.facts import EngineFacts
from jaxspec.stats import EngineStats
from serve.core.commands import Built, Call, Command, Compiled, Died, Message, OnCompiled, Say, Stop, Turn
from serve.core.completion import Choice, Completion, News
from serve.core.engine_core import EngineCore
from serve.core.errors import unavailable
from serve.core.live import LiveChoices
from serve.core.observers import Guard, Meter, Metrics

if TYPE_CHECKING:
    from jaxspec.engine import Engine

T = TypeVar("T")
State = Literal["starting", "serving", "stalled", "dead", "stopped"]
_log = logging.getLogger("serve")


class Link(Protocol):
    """The way to the engine's side and back. Event loop only."""

    def start(self, hear: Say) -> None:
        """Begins to build the engine; from then on `hear` hears every message, in order and on the loop."""
        ...

    def post(self, command: Command) -> None:
        """Takes a command there; never waits."""
        ...

    @property
    def alive(self) -> bool:
        """The engine's side has not ended."""
        ...

    def cut(self) -> None:
        """Ends the engine's side as far as that can be done, whatever it does."""
        ...


class ThreadLink:
    """To a thread of this process, for programs that hold the engine themselves.

    Args:
      build, describe: see EngineCore.
    """

    def __init__(self, build: Callable[[OnCompiled], Engine], describe: Callable[[Engine], Any] = lambda engine: None):
        self._core = EngineCore(build, describe, self._say)
        self._thread = threading.Thread(target=self._core.run, name="engine", daemon=True)

    def start(self, hear: Say) -> None:
        self._loop, self._hear = asyncio.get_running_loop(), hear
        self._thread.start()

    def post(self, command: Command) -> None:
        self._core.commands.put(command)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def cut(self) -> None:
        """Nothing: a thread cannot be interrupted, and ends with the process."""

    def _say(self, message: Message) -> None:
        try:
            self._loop.call_soon_threadsafe(self._hear, message)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self._core.commands.put(Stop())  # nobody is left to serve


class EngineClient:
    """The engine at the other end of a link. Event loop only.

    States: "starting" until the engine is built, "serving", "stalled" while a step hangs (whoever watches says so:
    `mark_stalled`) and back, "dead" after an exception or the end of its process, "stopped" after `stop`.

    Attributes:
      state: see `subscribe`.
      snapshot: the engine's counters, at most a moment old while it works; None before it is built.
      compiled: executables that have come, and how many there will be, until it is built.
      facts: None before it is built. description: what the link's `describe` said of it; None before it is built.
      error: what it died of.
      guard: around everything that only observes. meter: what the engine writes.
    """

    def __init__(self, link: Link):
        self.state: State = "starting"
        self.snapshot: EngineStats | None = None
        self.compiled: tuple[int, int] = (0, 0)
        self.facts: EngineFacts | None = None
        self.description: Any = None
        self.error: BaseException | None = None
        self.guard, self.meter = Guard(), Meter()
        self._link = link
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._subscribers: list[Callable[[State], None]] = []
        self._sent, self._stalled_call = 0, -1
        self._busy_since: float | None = None
        self._changed = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None

    def attach(
        self, metrics: Metrics, on_news: Callable[[Sequence[tuple[Choice, News]]], None], stream_interval: float | None
    ) -> None:
        """Who counts and who hears of completions; once, before `start`."""
        self._metrics, self._on_news = metrics, on_news
        self._live = LiveChoices(metrics, self.guard, self.meter, self._post, stream_interval)

    def subscribe(self, callback: Callable[[State], None]) -> None:
        """`callback` hears every new state, in the order of subscription."""
        self._subscribers.append(callback)

    def start(self) -> None:
        """Begins to build the engine; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._link.start(self._hear)

    async def ready(self) -> None:
        """Returns when the engine is built.

        Raises:
          StatusError: UNAVAILABLE; it died or was stopped before.
        """
        while self.state == "starting":
            await self._changed.wait()
        self.check()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What `function` returns or raises, run with the engine between two steps.

        Args:
          function: for an engine in a process of its own a function of a module, or a partial of one, and what it takes
            and returns is plain data.

        Raises:
          StatusError: UNAVAILABLE; there is no engine to ask, or there no longer is.
        """
        self.check()
        number = next(self._numbers)
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls[number] = future
        try:
            self._post(Call(number, function))
            return await future
        finally:
            self._calls.pop(number, None)

    def submit(self, request: Completion) -> None:
        """Gives the completions of a request to the engine; news say what became of them."""
        self._live.submit(request)
        self._tell_news()
        self._set_alarm()

    def abort(self, request: Completion, reason: str = "abort") -> None:
        """Ends a request before the next step; news come of each completion that had not ended."""
        self._live.abort(request, reason)

    @property
    def step_seconds(self) -> float:
        """Age of what the engine's side is doing now; 0 while it sleeps or builds."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def mark_stalled(self) -> None:
        """A step hangs: calls fail, subscribers hear "stalled", and "serving" when it returns after all."""
        if self.state != "serving":
            return
        self._enter("stalled")
        # Behind the aborts that subscribers asked for: when it is answered, the pages are free.
        self._stalled_call = next(self._numbers)
        self._post(Call(self._stalled_call, _nothing))

    async def stop(self, timeout: float = 10.0) -> None:
        """Ends every request and the engine's side; returns after `timeout` seconds although a step may hang.

        Idempotent.
        """
        if self.state not in ("dead", "stopped"):
            self._live.abort_all("unavailable")
        self._post(Stop())
        ends = time.monotonic() + timeout
        try:
            while self._link.alive and time.monotonic() < ends:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)  # what it said last
        finally:
            self._link.cut()
        if self._alarm is not None:
            self._alarm.cancel()
        if self.state != "dead":
            self._enter("stopped")

    def check(self) -> None:
        """Raises StatusError UNAVAILABLE unless the engine is serving."""
        if self.state != "serving":
            raise unavailable(_MESSAGES[self.state], self.state)

    def known(self) -> EngineFacts:
        """Its facts; StatusError UNAVAILABLE before it is built."""
        if self.facts is None:
            self.check()
            raise unavailable(_MESSAGES["starting"], "starting")
        return self.facts

    def _post(self, command: Command) -> None:
        self._link.post(command)
        self._sent += 1
        if self._busy_since is None and self.facts is not None:
            self._busy_since = time.monotonic()

    def _enter(self, state: State, after: State | None = None) -> None:
        if self.state == state or (after is not None and self.state != after):
            return
        self.state = state
        if state != "serving":
            for future in list(self._calls.values()):
                if not future.done():
                    future.set_exception(unavailable(_MESSAGES[state], state))
        for callback in self._subscribers:
            callback(state)
        self._changed.set()
        self._changed.clear()

    # What the engine's side says.

    def _hear(self, message: Message) -> None:
        try:
            self._take_in(message)
        except Exception as error:  # requests would hang for ever
            _log.critical("the engine's news cannot be told", exc_info=error)
            self._take_in(Died(error))

    def _take_in(self, message: Message) -> None:
        match message:
            case Turn():
                self._hear_turn(message)
            case Compiled(ready, total):
                self.compiled = ready, total
                self.guard(self._metrics.on_compiled, ready, total)
            case Built():
                self.facts, self.description = message.facts, message.description
                self._publish(message.stats)
                self._enter("serving", after="starting")
            case Died():
                self.error, self._busy_since = message.error, None
                try:
                    self._live.bury("error", message.costs)
                except Exception as e:
                    _log.error("the dead engine's requests could not be counted", exc_info=e)
                self._enter("dead")

    def _hear_turn(self, turn: Turn) -> None:
        self._busy_since = None if turn.idle and turn.obeyed == self._sent else time.monotonic()
        for stats in turn.rounds:
            self.guard(self._metrics.on_round, stats)
        self._live.hear(turn)
        if turn.stats is not None:
            self._publish(turn.stats)
        self._live.expire(time.monotonic())
        for number, returned, value in turn.replies:
            if number == self._stalled_call:
                self._enter("serving", after="stalled")
            future = self._calls.pop(number, None)
            if future is not None and not future.done():
                if returned:
                    future.set_result(value)
                else:
                    future.set_exception(value)
        self._tell_news()

    def _publish(self, stats: EngineStats) -> None:
        assert self.facts is not None
        self.snapshot = stats
        self.guard(self._metrics.on_stats, stats, self.facts.sizes.num_pages)

    def _tell_news(self) -> None:
        news = self._live.news()
        if news:
            self._on_news(news)

    def _set_alarm(self) -> None:
        """Looks at the time limits when the first of them is over; an earlier look costs nothing."""
        if self._alarm is not None:
            if self._alarm.when() <= self._loop.time() + self._live.soonest - time.monotonic():
                return
            self._alarm.cancel()
        left = self._live.soonest - time.monotonic()
        self._alarm = None if left == float("inf") else self._loop.call_later(max(0.0, left), self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._live.expire(time.monotonic())
        self._set_alarm()


def _nothing(engine: Engine) -> None:
    """What is asked to hear that the engine's side still answers."""


_MESSAGES: dict[State, str] = {
    "starting": "the engine is starting",
    "serving": "",
    "stalled": "the engine hangs",
    "dead": "the engine died",
    "stopped": "the server is stopped",
}
