"""Warm-up: executables come from threads, the most urgent first, while the engine may already run.

Owns the threads, their order and their priority. Must not know what an executable is for, nor run one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.adaptive.cost import Costed
from jaxspec.runtime.compile import Compilation, check_mappings, memory_mappings, uncounted
from jaxspec.runtime.executables import ExecutableStore, kept_once

#: How far threads that compile in the background stand back (nice), and the processor seconds by which one of XLA's
#: own threads is known to compile.
_NICE, _COMPILES_SECONDS = 10, 0.2
#: What the system calls the threads in which XLA runs executables on CPUs: another engine's shall not stand back.
_RUNS = "tf_XLAEigen"
#: Seconds between two looks at whether the process is about to end.
_LOOK_SECONDS = 0.1
#: Seconds between two lines of the log that say how far a warm-up is.
TOLD_SECONDS = 10.0
#: What the names of this module's threads begin with.
_NAME = "warm-up"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WarmupConfig:
    """How a runner's executables come.

    Attributes:
      progress: show a bar while waiting for them; or what is called with how many have come, of how many in all.
      cache: directory in which they are kept for the next process; None: nowhere.
      background: wait only for what a request needs; `Runner.advance` takes in what comes later.
      times: `Runner.advance` also times the rounds.
      known: seconds of rounds that it need not time.
    """

    progress: bool | Callable[[int, int], None]
    cache: Path | None = None
    background: bool = False
    times: bool = False
    known: Mapping[Costed, float] = dataclasses.field(default_factory=dict)


class Warmup:
    """Compilations that threads work through in their order.

    Threads are no daemons, because XLA aborts a process that ends while it compiles; when no other thread keeps the
    process from ending they finish what is being compiled and leave the rest.

    Args:
      compilations: the most urgent first.
      first: how many of them may begin before `give_way`, so that no other disturbs those; None: all.
      store: where executables of earlier processes lie, and these are to lie.
      threads: by default one a core, at most 16.

    Attributes:
      total: how many there are.
      error: the first of the errors that kept executables from coming; None as long as there is none.
    """

    def __init__(
        self, compilations: Sequence[Compilation], first: int | None = None, *, store: ExecutableStore | None = None,
        threads: int | None = None,
    ):  # fmt: skip
        self.total = len(compilations)
        self.error: BaseException | None = None
        self._left, self._store = deque(compilations), store
        self._allowed = len(compilations) if first is None else first
        self._arrived: dict[Any, Any] = {}  # in order
        self._failed: set[Any] = set()
        self._wanted: Collection[Any] | None = None  # of those not begun; None: all
        self._rest_from = math.inf  # on time.monotonic's clock
        self._changed = threading.Condition()
        self._stopped, self._compiled = False, 0
        self._mappings, self._processor = memory_mappings(), _processor_seconds()
        self._once = contextlib.ExitStack()
        if store is not None:
            self._once.enter_context(kept_once())
        count = min(threads or min(16, os.cpu_count() or 1), len(compilations))
        self._working, self._in_hand = count, 0
        self._threads = [threading.Thread(target=self._work, name=f"{_NAME}-{i}") for i in range(count)]
        self._nice = 0
        for thread in self._threads:
            thread.start()

    def wait(self, keys: Collection[Any]) -> Generator[tuple[Any, Any], None, None]:
        """(key, executable) of some as they come; the caller waits, and Python collects no garbage.

        Raises:
          ValueError: the system does not allow this process as many memory mappings as the executables need.
          Exception: what one of these raised.
        """
        left, progress = set(keys), Progress()
        come = lambda: self._failed & left or self._arrived.keys() & left or self._stopped
        with _without_collection():
            while left:
                progress.tell(len(keys) - len(left), len(keys), "needed to start")
                with self._changed:
                    while not self._changed.wait_for(come, timeout=1.0):
                        progress.tell(len(keys) - len(left), len(keys), "needed to start")
                    if self.error is not None and (self._failed & left or not self._arrived.keys() & left):
                        raise self.error
                    key = next(key for key in self._arrived if key in left)
                    executable = self._arrived.pop(key)
                left.discard(key)
                yield key, executable

    def take(self) -> tuple[Any, Any] | None:
        """The next (key, executable), or None where none has come."""
        with self._changed:
            key = next(iter(self._arrived), None)
            return None if key is None else (key, self._arrived.pop(key))

    @property
    def over(self) -> bool:
        """Whether nothing will come any more."""
        with self._changed:
            return not self._left and not self._in_hand and not self._arrived

    @property
    def compiling(self) -> bool:
        """Whether something is in hand, or left that is not stored."""
        with self._changed:
            stored = lambda compilation: self._store is not None and compilation.fingerprint in self._store
            return bool(self._in_hand) or not all(map(stored, self._left))

    def give_way(self, after: float = 0.0) -> None:
        """After so many seconds all may begin, and use what others leave of the processor (on Linux).

        Elsewhere they use it as before. To be called before anything else ran beside them: XLA compiles in threads of
        its own, which are known by the time that they have used so far.
        """
        self._nice = _NICE
        before, ours = self._processor, {thread.native_id for thread in threading.enumerate()}
        for thread, seconds in _processor_seconds().items():
            if thread not in ours and seconds - before.get(thread, 0.0) >= _COMPILES_SECONDS:
                _stand_back(thread)
        with self._changed:
            self._rest_from = time.monotonic() + after
            self._changed.notify_all()

    def hurry(self) -> None:
        """What was to begin some time after `give_way` may begin now."""
        with self._changed:
            self._rest_from = min(self._rest_from, time.monotonic())
            self._changed.notify_all()

    def attend(self, advance: Callable[[], bool | None]) -> None:
        """Calls `advance` from a thread of its own: at once again after True, soon after False, until None."""

        def attending() -> None:
            while not _process_ends():
                more = advance()
                if more is None:
                    return
                if not more:
                    with self._changed:
                        self._changed.wait_for(lambda: self._arrived, timeout=_LOOK_SECONDS)
                    time.sleep(0.005)  # whoever steps the engine comes first

        threading.Thread(target=attending, name=_NAME).start()

    def stop(self) -> None:
        """Ends after what is being compiled; nothing waits for it."""
        with self._changed:
            self._stopped = True
            self._left.clear()
            self._changed.notify_all()

    def finish(self, keys: Collection[Any]) -> None:
        """Ends after these and what is being compiled; the caller waits, and they are stored."""
        with self._changed:
            self._wanted = keys
            self._left = deque(compilation for compilation in self._left if compilation.key in keys)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _ends(self) -> bool:
        """Whether nobody wants what is not being compiled yet."""
        return self._stopped or _process_ends()

    def _next(self) -> Compilation | None:
        with self._changed:
            while True:
                if self._ends():
                    self.stop()
                if not self._left:
                    return None
                if time.monotonic() >= self._rest_from:
                    self._allowed = self.total
                if len(self._left) > self.total - self._allowed:
                    self._in_hand += 1
                    return self._left.popleft()
                self._changed.wait(_LOOK_SECONDS)

    def _work(self) -> None:
        nice = 0
        try:
            with uncounted():
                while (compilation := self._next()) is not None:
                    if nice != self._nice:
                        nice = self._nice
                        _stand_back(threading.get_native_id())
                    self._run(compilation)
        finally:
            with self._changed:
                self._working -= 1
                last = not self._working
                self._changed.notify_all()
            if last:
                self._once.close()

    def _run(self, compilation: Compilation) -> None:
        def lower() -> Any:
            unwanted = self._wanted is not None and compilation.key not in self._wanted
            if unwanted or self._ends():  # others were traced before, one at a time
                raise _EndedError
            return compilation.lower()

        try:
            executable = dataclasses.replace(compilation, lower=lower).compiled(self._store)
        except BaseException as e:
            with self._changed:
                if not isinstance(e, _EndedError):
                    self.error = self.error or e
                    self._failed.add(compilation.key)
                self._in_hand -= 1
                self._changed.notify_all()
            return
        with self._changed:
            self._in_hand -= 1
            self._arrived[compilation.key] = executable
            self._compiled += 1
            try:
                check_mappings(self._mappings, self._compiled, self.total)
            except ValueError as e:
                self.error = self.error or e
                self.stop()
            self._changed.notify_all()


class Progress:
    """Says in the log how far a warm-up is, every TOLD_SECONDS and not sooner, however often it is asked to."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()

    def tell(self, ready: int, total: int, what: str) -> None:
        """So many executables of a total are ready; `what` says which."""
        now = time.monotonic()
        if now - self._told >= TOLD_SECONDS:
            self._told = now
            _log.info("compiling for %.0f s: %d of %d executables %s", now - self._began, ready, total, what)


class _EndedError(Exception):
    """A compilation is not begun any more."""


def _process_ends() -> bool:
    """Whether only warm-ups keep the process from ending. The main thread may be over long before the last other."""
    return not any(
        thread.is_alive() and not thread.daemon and not thread.name.startswith(_NAME)
        for thread in threading.enumerate()
    )


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Tracing makes millions of objects that live on; looking through them again and again costs a quarter."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _processor_seconds() -> dict[int, float]:
    """Processor seconds of each thread that may compile so far; empty where the system does not tell."""
    seconds: dict[int, float] = {}
    try:
        tick = os.sysconf("SC_CLK_TCK")
        for task in Path("/proc/self/task").iterdir():
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _RUNS:
                continue
            fields = rest.split()
            seconds[int(task.name)] = (int(fields[11]) + int(fields[12])) / tick
    except (OSError, ValueError, AttributeError):
        return {}
    return seconds


def _stand_back(thread: int) -> None:
    """Lowers a thread's priority, where threads have one of their own."""
    if not Path("/proc/self/task").exists():
        return
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    except OSError as e:
        _log.debug("thread %d keeps its priority: %s", thread, e)
