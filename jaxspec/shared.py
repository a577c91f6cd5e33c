"""One engine for many threads: turns in the order of asking, steps by whoever waits, events to those who own them.

An engine is for one thread at a time. Here a thread takes a turn: for one function, or to step until it has what it
waits for. While it steps, the others wait for their own events, not for the engine: each is woken when it has heard
something, and the one that steps hands over when it is done. Nobody runs in between turns, and nothing is held that
another thread, or the garbage collector, could wait for: the lock inside guards the queue alone, never a step.

Must not know prompts, texts or event loops.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol, TypeVar

from jaxspec.engine import Engine
from jaxspec.events import Event, Finished

T = TypeVar("T")


class Listener(Protocol):
    """Who owns requests. Both are called within a turn, from any thread: they must neither wait nor raise."""

    def take(self, event: Event) -> None:
        """What a step says of one of its requests."""

    def fail(self, error: Exception) -> None:
        """Nothing more comes of its requests."""


class _Uninterrupted:
    """Holds Ctrl-C back in the main thread: a step that is cut in two may have given its buffers away for nothing.

    It is as if the key were pressed at the end. Pressed twice it comes through, as a step may hang.
    """

    _handler: Any = None
    _came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._came is not None:
            self._handler(signum, frame)
        self._came = signum, frame

    def __exit__(self, *exc_info: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)


class _Turn:
    """A thread in the queue or at the engine; `wake` is released once, when it may go on.

    Attributes:
      settled: whether it need not wait any longer; None: it wants the engine for one function.
    """

    def __init__(self, settled: Callable[[], bool] | None):
        self.settled = settled
        self.thread = threading.get_ident()
        self.wake = threading.Lock()
        self.wake.acquire()


class SharedEngine:
    """Serialises the use of an engine. Every method is for any thread.

    Args:
      engine: whoever else uses it has to be alone, or within `call`.
    """

    def __init__(self, engine: Engine):
        self._engine: Engine | None = engine
        self._listeners: weakref.WeakValueDictionary[str, Listener] = weakref.WeakValueDictionary()
        self._abandoned: deque[str] = deque()
        self._broken: Exception | None = None
        self._lock = threading.Lock()  # of the two below; never held during a step, nor while waiting
        self._holder: _Turn | None = None  # None: nobody is in the queue either
        self._queue: dict[_Turn, None] = {}  # in order

    @property
    def engine(self) -> Engine:
        """The engine itself.

        Raises:
          RuntimeError: it was closed, or a step has left it in a state that cannot be mended.
        """
        engine = self._engine
        if engine is None:
            raise RuntimeError("this LLM is closed")
        if self._broken is not None:
            raise RuntimeError(f"this LLM's engine failed and cannot go on: {self._broken!r}") from self._broken
        return engine

    def call(self, function: Callable[[Engine], T]) -> T:
        """What `function` returns or raises, run between two steps, or within the step that this thread is in.

        Raises:
          RuntimeError: as `engine`.
        """
        if self._inside():
            return function(self.engine)
        turn = _Turn(None)
        try:
            self._enter(turn)
            with _Uninterrupted():
                self._drain(self.engine)
                return function(self.engine)
        finally:
            self._leave(turn)

    def listen(self, listener: Listener, request_ids: Iterable[str]) -> None:
        """Within `call`: the owner of requests, held weakly, hears of them until they end."""
        for request_id in request_ids:
            self._listeners[request_id] = listener

    def advance(self, settled: Callable[[], bool]) -> None:
        """Waits while others step, and steps when it is this thread's turn; returns once `settled`, or before.

        Args:
          settled: whether there is nothing to wait for. Any thread calls it; it must neither wait nor raise.

        Raises:
          Exception: what a step of this thread raised. Every listener with live requests has heard of it by `fail`,
            the requests are aborted and nothing they left behind is reused.
          RuntimeError: as `engine`, or this thread is within a step already.
        """
        if self._inside():
            raise RuntimeError("tokens were asked for from within a step of the same LLM")
        turn = _Turn(settled)
        try:
            self._enter(turn)
            # Functions that wait go first, then whoever asked before this thread asks again.
            while self._holder is turn and not settled():
                with _Uninterrupted():
                    self._step(self.engine)
                if self._asked():
                    return
        finally:
            self._leave(turn)

    def release(self, request_ids: Iterable[str]) -> None:
        """Aborts requests without waiting: now where nobody has a turn, else before the next step or function."""
        self.abandon(request_ids)
        turn = _Turn(None)
        try:
            if self._lock.acquire(blocking=False):  # a finalizer may close a stream within any line of this thread
                try:
                    if self._holder is None:
                        self._holder = turn
                finally:
                    self._lock.release()
            if self._holder is turn and self._engine is not None:
                self._drain(self._engine)
        finally:
            if self._holder is turn:
                self._leave(turn)

    def abandon(self, request_ids: Iterable[str]) -> None:
        """Aborts requests before the next step or function. For finalizers: touches nothing but a queue."""
        self._abandoned.extend(request_ids)

    def close(self, error: Exception) -> None:
        """Between two steps: fails whoever listens and lets go of the engine. Idempotent."""

        def end(engine: Engine) -> None:
            self._fail(engine, error)
            engine.close()
            self._engine = None

        if self._engine is not None:
            try:
                self.call(end)
            except RuntimeError:  # closed by another thread meanwhile, or broken: nobody listens any more
                self._engine = None

    # Turns.

    def _inside(self) -> bool:
        holder = self._holder
        return holder is not None and holder.thread == threading.get_ident()

    def _enter(self, turn: _Turn) -> None:
        """Returns with the turn, or without it once settled."""
        with self._lock:
            if turn.settled is not None and turn.settled():  # by a step that ended before this thread was in the queue
                return
            if self._holder is None:
                self._holder = turn
                return
            self._queue[turn] = None
        turn.wake.acquire()

    def _leave(self, turn: _Turn) -> None:
        """Out of the queue; the turn, if it was this one's, goes to the next."""
        with self._lock:
            self._queue.pop(turn, None)
            if self._holder is not turn:
                return
            self._wake_settled()
            self._holder = next(iter(self._queue), None)
            if self._holder is not None:
                del self._queue[self._holder]
                self._holder.wake.release()

    def _wake_settled(self) -> None:
        """With the lock: those who need no turn any more go."""
        for turn in [turn for turn in self._queue if turn.settled is not None and turn.settled()]:
            del self._queue[turn]
            turn.wake.release()

    def _asked(self) -> bool:
        """Wakes those who are settled; whether a function waits."""
        with self._lock:
            self._wake_settled()
            return any(turn.settled is None for turn in self._queue)

    # With the turn.

    def _step(self, engine: Engine) -> None:
        """One step, its events handed to those they belong to."""
        self._drain(engine)
        try:
            for event in engine.step():
                listener = self._listeners.get(event.request_id)
                if listener is not None:
                    listener.take(event)
                if isinstance(event, Finished):
                    self._listeners.pop(event.request_id, None)
        except BaseException as error:
            self._fail(engine, error)
            raise

    def _drain(self, engine: Engine) -> None:
        try:
            self._abort_abandoned(engine)
        except BaseException as error:
            self._fail(engine, error)
            raise

    def _abort_abandoned(self, engine: Engine) -> None:
        while self._abandoned:
            engine.abort(self._abandoned[0])
            self._abandoned.popleft()  # after it: an interrupt loses none

    def _fail(self, engine: Engine, error: BaseException) -> None:
        """Ends every request that is listened for: what was lost of a step that failed, nobody knows.

        An interrupt that came through is the own thread's; the others hear that there was one.
        """
        if not isinstance(error, Exception):
            told = RuntimeError(f"a step was interrupted in another thread: {error!r}")
            told.__cause__ = error
        else:
            told = error
        self._abandoned.extend(list(self._listeners))
        for listener in {id(listener): listener for listener in list(self._listeners.values())}.values():
            listener.fail(told)
        self._listeners.clear()
        try:
            self._abort_abandoned(engine)
            engine.flush_prefix_cache()  # pages may be known that the step has never written
        except Exception as e:
            self._broken = e
            self._abandoned.clear()
