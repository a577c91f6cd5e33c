"""The thread that owns the engine: builds it, steps it, and runs what others ask of it between two steps.

The event loop writes to a queue and hears news by one `call_soon_threadsafe` a step; neither ever waits for the other.
Must not know gRPC, streams or why a request was admitted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from jaxspec.engine import Engine
from jaxspec.facts import EngineFacts
from jaxspec.stats import EngineStats
from serve.core.completion import Choice, Completion, News
from serve.core.errors import unavailable
from serve.core.live import LiveChoices
from serve.core.observers import Guard, Meter, Metrics

T = TypeVar("T")
State = Literal["starting", "serving", "stalled", "dead", "stopped"]
#: Seconds between two snapshots of the engine's counters, while it works.
SNAPSHOT_SECONDS = 0.1
_log = logging.getLogger("serve")


class EngineThread:
    """An engine on a thread of its own. Every method is for the event loop that called `start`.

    States: "starting" until the engine is built and warm, "serving", "stalled" while a step hangs (whoever watches
    says so: `mark_stalled`) and back, "dead" after an exception, "stopped" after `stop`.

    Args:
      build: makes the engine, on the thread; may take minutes.
      freeze: take everything that exists once the engine is built out of the garbage collector's sight until `stop`;
        for a process that does nothing else. A full collection over what tracing leaves behind holds every thread for
        about 0.2 seconds.

    Attributes:
      state: changes on the event loop only; see `subscribe`.
      snapshot: the engine's counters, at most SNAPSHOT_SECONDS old while it works; None before it is built.
      compiled: executables that have come, and how many there will be, until it is built.
      facts: None before it is built.
      error: what it died of.
      guard: around everything that only observes. meter: what the engine writes.
    """

    def __init__(self, build: Callable[[], Engine], *, freeze: bool = False):
        self.state: State = "starting"
        self.snapshot: EngineStats | None = None
        self.compiled: tuple[int, int] = (0, 0)
        self.facts: EngineFacts | None = None
        self.error: BaseException | None = None
        self.guard, self.meter = Guard(), Meter()
        self._build, self._freeze = build, freeze
        self._commands: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self._calls: set[asyncio.Future[Any]] = set()
        self._replies: list[Callable[[], None]] = []
        self._subscribers: list[Callable[[State], None]] = []
        self._busy_since: float | None = None
        self._snapshot_at = 0.0
        self._stopping = False
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # The event loop's side.

    def attach(
        self, metrics: Metrics, on_news: Callable[[Sequence[tuple[Choice, News]]], None], stream_interval: float | None
    ) -> None:
        """Who counts (on the thread) and who hears of completions (on the loop); once, before `start`."""
        self._metrics, self._on_news = metrics, on_news
        self._live = LiveChoices(metrics, self.guard, self.meter, stream_interval)

    def subscribe(self, callback: Callable[[State], None]) -> None:
        """`callback` hears every new state, on the loop, in the order of subscription."""
        self._subscribers.append(callback)

    def start(self) -> None:
        """Begins to build the engine; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def ready(self) -> None:
        """Returns when the engine is built and warm.

        Raises:
          StatusError: UNAVAILABLE; it died or was stopped before.
        """
        while self.state == "starting":
            await self._changed.wait()
        self.check()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What `function` returns or raises, run on the thread between two steps.

        Raises:
          StatusError: UNAVAILABLE; there is no engine to ask, or there no longer is.
        """
        self.check()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)

        def command(engine: Engine) -> None:
            try:
                reply = functools.partial(future.set_result, function(engine))
            except Exception as e:
                reply = functools.partial(future.set_exception, e)
            self._replies.append(lambda: None if future.done() else reply())

        self._commands.put(command)
        try:
            return await future
        finally:
            self._calls.discard(future)

    def submit(self, request: Completion) -> None:
        """Gives the completions of a request to the engine; news say what became of them."""
        self._commands.put(lambda engine: self._live.submit(request))

    def abort(self, request: Completion, reason: str = "abort") -> None:
        """Ends a request before the next step; news come of each completion that had not ended."""
        self._commands.put(lambda engine: self._live.abort(engine, request, reason))

    @property
    def step_seconds(self) -> float:
        """Age of what the thread is doing now; 0 while it sleeps or builds."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def mark_stalled(self) -> None:
        """A step hangs: calls fail, subscribers hear "stalled", and "serving" when it returns after all."""
        if self.state == "serving":
            self._enter("stalled")
            # Behind the aborts that subscribers asked for: when it says so, the pages are free.
            self._commands.put(lambda engine: self._tell(lambda: self._enter("serving", after="stalled")))

    async def stop(self, timeout: float = 10.0) -> None:
        """Ends every request and the thread; returns after `timeout` seconds although a step may hang. Idempotent."""
        self._stopping = True
        self._commands.put(lambda engine: None)
        ends = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < ends:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)  # what the thread said last
        if self._freeze:
            gc.unfreeze()  # or this engine, whose parts refer to each other, would never be freed
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

    def _enter(self, state: State, after: State | None = None) -> None:
        if self.state == state or (after is not None and self.state != after):
            return
        self.state = state
        if state != "serving":
            for future in self._calls:
                if not future.done():
                    future.set_exception(unavailable(_MESSAGES[state], state))
        for callback in self._subscribers:
            callback(state)
        self._changed.set()
        self._changed.clear()

    def _deliver(self, replies: Sequence[Callable[[], None]], news: Sequence[tuple[Choice, News]]) -> None:
        for reply in replies:
            reply()
        if news:
            self._on_news(news)

    # The thread's side.

    def _run(self) -> None:
        engine = None
        try:
            engine = self._build()
            if self._freeze:
                gc.collect()
                gc.freeze()
            engine.on_round = lambda stats: self.guard(self._metrics.on_round, stats)
            self.facts = engine.facts
            self._publish(engine)
            self._tell(lambda: self._enter("serving", after="starting"))
            while not self._stopping:
                self._turn(engine)
            self._live.abort_all(engine, "unavailable")
            self._flush()
        except BaseException as error:  # whatever it is: the loop must hear of it
            self._die(engine, error)

    def _turn(self, engine: Engine) -> None:
        """One step, and before it whatever was asked for meanwhile. Sleeps while there is nothing to do."""
        if not engine.has_work and not self._live.has_submitted:
            warm = engine.warm  # before it is published: what is published last says so
            self._publish(engine)
            self._busy_since = None
            try:  # while it warms up, the counters change without a step
                command = self._commands.get(timeout=None if warm else SNAPSHOT_SECONDS)
            except queue.Empty:
                return
            self._busy_since = time.monotonic()
            command(engine)
        else:
            self._busy_since = time.monotonic()
        while not self._commands.empty():
            self._commands.get()(engine)
        self._live.take_in(engine)
        self._live.expire(engine, time.monotonic())
        if engine.has_work:
            events = engine.step()
            now = time.monotonic()
            self._live.after_step(events, now)
            if now - self._snapshot_at >= SNAPSHOT_SECONDS:
                self._publish(engine)
        self._flush()

    def _publish(self, engine: Engine) -> None:
        stats = engine.stats
        self.snapshot = dataclasses.replace(stats, waiting=stats.waiting + self._live.backlog)
        self._snapshot_at = time.monotonic()
        self.guard(self._metrics.on_stats, self.snapshot, engine.facts.sizes.num_pages)

    def _flush(self) -> None:
        news = self._live.news()
        if news or self._replies:
            replies, self._replies = self._replies, []
            self._tell(lambda: self._deliver(replies, news))

    def _tell(self, message: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(message)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self._stopping = True  # nobody is left to serve

    def _die(self, engine: Engine | None, error: BaseException) -> None:
        self.error = error
        self._busy_since = None
        try:
            _log.critical("the engine died", exc_info=error)
            if engine is not None:
                self._live.bury(engine, "error")
        except Exception as e:
            _log.error("the dead engine's requests could not be counted", exc_info=e)
        finally:  # whatever else is broken: requests hang until the loop has heard
            self._tell(lambda: self._enter("dead"))


_MESSAGES: dict[State, str] = {
    "starting": "the engine is starting",
    "serving": "",
    "stalled": "the engine hangs",
    "dead": "the engine died",
    "stopped": "the server is stopped",
}
