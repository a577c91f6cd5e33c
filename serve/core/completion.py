"""One request from its start to its end: its time limits, its completions, what its reader has not taken, its record.

Must not know gRPC calls or messages, nor who runs it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from jaxspec.events import Delta, Event, Finished
from jaxspec.prepared import Prepared
from jaxspec.request import CompletionOutput, ErrorKind, FinishReason
from serve.config import ServerConfig
from serve.core.admission import Place
from serve.core.errors import StatusError, deadline_passed, unavailable
from serve.core.jobs import Job
from serve.core.observers import Record

#: Seconds by which two clocks may differ about a deadline.
_CLOCKS = 0.005
#: Ends that a client asked for: nobody was refused.
_CLIENTS_WISH = frozenset({"closed", "aborted"})


class Stage(enum.Enum):
    """How far a request is: (when its time was over, what it waited for until then)."""

    PREPARING = "before it was prepared", "to be prepared"
    WAITING = "before it could start", "for a slot"
    RUNNING = "after it had started", ""


@dataclasses.dataclass(frozen=True, slots=True)
class Deadlines:
    """When a request is ended, on time.monotonic's clock: unless it has a slot, in any case, and by its client."""

    queue: float
    run: float
    client: float

    @classmethod
    def of(cls, config: ServerConfig, began: float, client: float | None = None) -> Deadlines:
        """Of a request that came at `began`."""
        return cls(began + config.queue_seconds, began + config.run_seconds, float("inf") if client is None else client)

    def until(self, stage: Stage) -> float:
        """When it is ended if it stays at this stage."""
        limit = min(self.run, self.client)
        return limit if stage is Stage.RUNNING else min(limit, self.queue)

    def error(self, stage: Stage, now: float) -> StatusError:
        """Why it ends, whose time at this stage is over."""
        when, waited_for = stage.value
        if self.client <= now:
            return deadline_passed(f"the request's deadline passed {when}")
        message, reason = f"the request took longer than the server's run_seconds ({when})", "run_seconds"
        if self.run > now:
            message = f"the request waited longer than the server's queue_seconds {waited_for}"
            reason = "queue_seconds"
        return StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, message, reason=reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """The engine has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """The last news of a completion that did not finish by itself.

    Attributes:
      error: why; None: the loop asked for it, or the thread stops.
    """

    error: StatusError | None


News = Event | Taken | Ended


@dataclasses.dataclass(slots=True, eq=False)
class Choice:
    """One of a request's completions. Event loop only.

    Attributes:
      request: whose it is.
      place: what admission counts for it.
      id: the engine's name for it, never used twice, whatever clients call their requests; "" until it has one.
      started: it had a slot. ended: nothing more comes.
      cut: its end was asked for: what metrics count that as, and its last news, whatever the engine ends it with.
      held: what its reader has not heard yet. sent_at: when it last heard something. token_at: when tokens came last.
    """

    request: Completion
    place: Place
    id: str = ""
    started: bool = False
    ended: bool = False
    cut: tuple[str, Ended] | None = None
    held: list[Delta] = dataclasses.field(default_factory=list)
    sent_at: float | None = None
    token_at: float | None = None

    @property
    def stage(self) -> Stage:
        return Stage.RUNNING if self.started else Stage.WAITING


class Buffer:
    """What one reader has not taken; merged when it comes, so nobody waits for anybody. Event loop only.

    A reader that is slow costs at most the memory of its own output.

    Args:
      completions: how many there are; reading ends when each was taken to its end.
      clock: seconds; injected so that tests own the time.
    """

    def __init__(self, completions: int, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._waiting: dict[int, list[Delta | Finished]] = {}  # by index, the longest untaken first
        self._unfinished = completions
        self._error: StatusError | None = None
        self._news, self._reading = asyncio.Event(), False
        self._idle_since: float | None = None  # there is, or was, something to take, and the reader does not come

    def put(self, event: Delta | Finished) -> None:
        """Adds news of a completion."""
        if event.index not in self._waiting:
            if self._idle_since is None and not self._reading:
                self._idle_since = self._clock()
            self._waiting[event.index] = []
        self._waiting[event.index].append(event)
        self._news.set()

    def fail(self, error: StatusError, *, drop: bool = False) -> None:
        """The reader gets what waits, unless that is dropped, and then the error. Only the first error counts."""
        if self._error is None:
            self._error = error
        if drop:
            self._waiting.clear()
        self._news.set()

    def stalled(self, now: float, seconds: float) -> bool:
        """Whether the reader has been away for `seconds`: since it last took something, or since something waits.

        Also with nothing waiting: a reader that took the last event and is never done with it holds that event.
        """
        return self._idle_since is not None and now - self._idle_since >= seconds

    async def take(self) -> Delta | Finished | None:
        """All that was added to a completion, or its end, when there is something; None after the last end.

        Raises:
          StatusError: what the request failed with.
        """
        assert not self._reading, "a request has one reader"
        self._idle_since, self._reading = None, True
        try:
            return await self._next()
        finally:
            self._idle_since, self._reading = self._clock(), False

    async def _next(self) -> Delta | Finished | None:
        while not self._waiting:
            if not self._unfinished:
                return None
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        index, events = next(iter(self._waiting.items()))
        end = events.pop() if isinstance(events[-1], Finished) else None
        if end is not None and events:
            self._waiting[index] = [end]  # the next to be taken
        else:
            del self._waiting[index]
        if not events:
            self._unfinished -= 1
            return end
        return _merged([event for event in events if isinstance(event, Delta)])


def _merged(deltas: list[Delta]) -> Delta:
    first = deltas[0]
    if len(deltas) == 1:
        return first
    return Delta(
        first.request_id,
        first.index,
        [token for delta in deltas for token in delta.token_ids],
        "".join([delta.text for delta in deltas]),
        None if first.logprobs is None else [entry for delta in deltas for entry in delta.logprobs or ()],
    )


class Keeper(Protocol):
    """Who keeps account of requests."""

    def end_early(self, request: Completion, cause: str) -> None:
        """The engine's part of it is not wanted any more."""

    def forget(self, request: Completion) -> None:
        """Its reader is done."""

    def count_refusal(self, error: StatusError) -> None:
        """It was refused, or broken off."""


class Completion(AsyncIterator[Delta | Finished]):
    """A job under way, for its servicer. Iterate over it once, and `close` it in any case. Event loop only.

    Iteration gives each completion's deltas and its end, merged where the reader was slow. It raises StatusError:
    CANCELLED (aborted by id, or a reader that stalled), DEADLINE_EXCEEDED, INTERNAL (logits that are not finite),
    UNAVAILABLE (the engine died or hangs, or the server had to go).

    Args:
      tell: hears the record, once.

    Attributes:
      job, deadlines: as given. arrived: when it came (time.monotonic).
      prepared: once it is.
      choices: its completions, from when it was admitted.
      left: those whose end the engine has not reported.
      error: what it failed with.
      record: what becomes of it, until it was told.
      decided: the engine took it, or it failed. taken: the engine took it.
      on_stall: called when the reader was found stalled. The servicer ends its call with it, which may be suspended
        in a write that the client never lets through. Whoever sets it calls `delivered` when the call is over.
    """

    def __init__(self, job: Job, deadlines: Deadlines, keeper: Keeper, tell: Callable[[Record], None]):
        self.job, self.deadlines = job, deadlines
        self.prepared: Prepared | None = None
        self.choices: list[Choice] = []
        self.left = 0
        self.error: StatusError | None = None
        self.record: Record | None = Record(job)
        self.decided, self.taken = asyncio.Event(), False
        self.on_stall: Callable[[], None] | None = None
        self._keeper, self._tell = keeper, tell
        self.arrived = time.monotonic()
        self._buffer = Buffer(job.params.n)

    @property
    def prompt_token_ids(self) -> list[int]:
        """What the engine sees."""
        assert self.prepared is not None
        return self.prepared.tokens

    @property
    def seed(self) -> int:
        """Of completion 0, chosen here where the job named none; it reproduces the output."""
        assert self.prepared is not None and self.prepared.params.seed is not None
        return self.prepared.params.seed

    async def __anext__(self) -> Delta | Finished:
        try:
            event = await self._buffer.take()
        except StatusError as e:
            self.end_record(e.code, e)
            self.close()
            raise
        if event is None:
            self.end_record(grpc.StatusCode.OK)
            self.close()
            raise StopAsyncIteration
        if self.record is not None:
            self._note(self.record, event)
        return event

    def close(self) -> None:
        """Aborts what is left. May be called any number of times, before and after the end.

        Where a call delivers the output, that is unread until `delivered`: the last write may still stall.
        """
        if self._past(time.monotonic()):
            # gRPC ends such a call without a word; it may do so before the engine's thread looks.
            error, cause = deadline_passed("the request's deadline passed"), "timeout"
        else:
            error = StatusError(grpc.StatusCode.CANCELLED, "the request was closed", reason="closed")
            cause = "abort"
        self.fail(error, drop=True, cause=cause)
        self.end_record(grpc.StatusCode.CANCELLED)
        if self.on_stall is None:
            self._keeper.forget(self)

    def delivered(self) -> None:
        """The call is over, whatever became of it: nothing of the request is left."""
        self.on_stall = None
        self.close()

    @property
    def over(self) -> bool:
        """Every completion has ended, or the whole has failed."""
        return self.error is not None or (bool(self.choices) and not self.left)

    def fail(self, error: StatusError, *, drop: bool = False, cause: str = "abort") -> bool:
        """Ends it early: its completions are aborted and its reader hears of it. False if it was over before.

        Args:
          drop: the reader does not get what waits for it either.
          cause: counted as the finish reason of its completions.
        """
        fresh = not self.over
        if fresh:
            self._keeper.end_early(self, cause)
            if error.reason not in _CLIENTS_WISH:
                self._keeper.count_refusal(error)
        if self.error is None:
            self.error = error
        self._buffer.fail(error, drop=drop)
        self.decided.set()
        return fresh

    def end_if_stalled(self, now: float, seconds: float) -> None:
        """Ends it if its reader has left output unread for so long."""
        if not self._buffer.stalled(now, seconds):
            return
        message = f"the client left output unread for {seconds:g} seconds"
        error = StatusError(grpc.StatusCode.CANCELLED, message, reason="stalled_reader")
        if not self.fail(error, drop=True):
            self._keeper.count_refusal(error)  # finished, and its output is lost all the same
        self._keeper.forget(self)
        if self.on_stall is not None:
            self.on_stall()

    def hear(self, news: News) -> None:
        """Takes in what the engine's thread says of one completion."""
        match news:
            case Delta() if self.error is None:
                self._buffer.put(news)
            case Finished():
                completion = news.output.outputs[0]
                if news.reason is FinishReason.ERROR:
                    self.fail(_engine_error(completion))
                elif self.error is None:
                    self._buffer.put(news)
            case Taken():
                self.taken = True
            case Ended():
                # Without a reason of its own it was asked for, by this request or by the thread as it stops.
                self.fail(news.error or unavailable("the server is stopped", "stopped"))
            case _:
                return
        self.decided.set()

    def _past(self, now: float) -> bool:
        """Whether the client's deadline has passed, by its own clock.

        gRPC rounds a timeout up where it sends it, by a hundredth at most: the client ends a call that much sooner.
        """
        deadline = self.job.deadline
        return deadline is not None and now >= deadline - 0.01 * (deadline - self.arrived) - _CLOCKS

    # The record.

    def _note(self, record: Record, event: Delta | Finished) -> None:
        if isinstance(event, Finished):
            record.outputs.append(event.output)
        if isinstance(event, Delta) or not self.job.stream:
            tokens = event.token_ids if isinstance(event, Delta) else event.output.token_ids
            record.output_tokens += len(tokens)
            if tokens and record.first_after is None:
                record.first_after = time.monotonic() - self.arrived

    def end_record(self, code: grpc.StatusCode, error: StatusError | None = None) -> None:
        """The request's one end: what is told of it."""
        record, self.record = self.record, None
        if record is None:
            return
        now = time.monotonic()
        if code is grpc.StatusCode.CANCELLED and error is None and self._past(now):
            code = grpc.StatusCode.DEADLINE_EXCEEDED  # gRPC cancels a call whose deadline passed, without a word
        record.code, record.error, record.seconds = code, error, now - self.arrived
        self._tell(record)


def _engine_error(completion: CompletionOutput) -> StatusError:
    """Of one that the engine ended with FinishReason.ERROR: the model's fault, or the grammar's."""
    message = completion.error or "the engine failed it"
    match completion.error_kind:
        case ErrorKind.GRAMMAR:
            return StatusError(grpc.StatusCode.INVALID_ARGUMENT, message, reason="grammar")
        case ErrorKind.NON_FINITE:
            return StatusError(grpc.StatusCode.INTERNAL, message, reason="not_finite")
        case None:
            return StatusError(grpc.StatusCode.INTERNAL, message)
