"""Requests: from a job to its completion, who keeps account of it, and every way in which it can end early.

Protocol-neutral: servicers translate messages into jobs and events into messages. Event loop only. Must not know gRPC
calls or messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import grpc

from jaxspec.events import Finished, Started
from serve.config import ServerConfig
from serve.core.admission import Admission, default_waiting_pages
from serve.core.completion import Choice, Completion, Deadlines, Ended, News, Stage
from serve.core.engine_client import EngineClient, State
from serve.core.errors import StatusError, deadline_passed, invalid, unavailable
from serve.core.jobs import Chat, Job
from serve.core.looks import Looks
from serve.core.observers import Metrics, Observer, Record
from serve.core.preparation import Preparation

T = TypeVar("T")
#: Jobs that may be being prepared at once, besides as many as may queue.
_MORE_PREPARING = 64
_log = logging.getLogger("serve")


class Generator:
    """Starts requests and keeps account of them.

    Args:
      engine: not started yet; the generator listens to it.
      config: limits.
      metrics: counts.
      observers: hear of every job, and what became of it.

    Attributes:
      on_idle: called whenever `live` falls to 0.
    """

    def __init__(
        self, engine: EngineClient, config: ServerConfig, metrics: Metrics, observers: Sequence[Observer] = ()
    ):
        self.on_idle: Callable[[], None] | None = None
        self._engine, self._config, self._metrics, self._observers = engine, config, metrics, observers
        self._admission: Admission | None = None
        self._by_id: dict[str, Completion] = {}  # by the client's id, until it is over
        self._open: set[Completion] = set()  # until the reader is done
        self._preparation = Preparation(
            engine, config.max_output_tokens, config.max_waiting + _MORE_PREPARING, self._on_other_chat
        )
        self._told_of_chats = False
        self._refusal: StatusError | None = None
        self._sweeps = Looks(self._sweep, min(1.0, config.stall_seconds / 4))
        interval = config.stream_interval_ms
        engine.attach(metrics, self._on_news, None if interval is None else interval / 1e3)
        engine.subscribe(self._on_state)

    # What servicers ask for.

    async def start(self, job: Job) -> Completion:
        """Admits a job and gives it to the engine.

        Raises:
          StatusError: INVALID_ARGUMENT (it can never be honoured), ALREADY_EXISTS (its id is live),
            RESOURCE_EXHAUSTED (the queue is full, or too much finished output is unread), DEADLINE_EXCEEDED, CANCELLED
            (aborted meanwhile), or UNAVAILABLE (starting, draining, hanging, dead). Nothing of the job is left behind,
            nor when the caller is cancelled.
        """
        deadlines = Deadlines.of(self._config, time.monotonic(), job.deadline)
        request = Completion(job, deadlines, self, self._observed(job))
        try:
            self._check(job)
            self._by_id[job.request_id] = request
            self._open.add(request)
            self._sweeps.schedule()
            await self._begin(request)
        except BaseException as e:  # also CancelledError: the engine must not keep an orphan
            if isinstance(e, StatusError):
                request.fail(e)
                request.end_record(e.code, e)
            request.close()
            raise
        if request.record is not None:
            request.record.prompt_tokens, request.record.seed = len(request.prompt_token_ids), request.seed
        return request

    async def abort(self, request_ids: Iterable[str]) -> int:
        """Ends requests with CANCELLED; returns how many were live. Others are no error."""
        error = StatusError(grpc.StatusCode.CANCELLED, "the request was aborted", reason="aborted")
        live = [self._by_id[name] for name in dict.fromkeys(request_ids) if name in self._by_id]
        return sum(request.fail(error.again()) for request in live)

    async def tokenize(self, prompt: str | Chat, add_special_tokens: bool = True) -> list[int]:
        """Token ids as `start` would see them.

        Raises:
          StatusError: INVALID_ARGUMENT, UNAVAILABLE (starting or stopped), RESOURCE_EXHAUSTED (too many at once),
            DEADLINE_EXCEEDED (it waited longer than queue_seconds).
        """
        return await self._in_time(self._preparation.encode(prompt, add_special_tokens))

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; those that the model has and the tokenizer does not have none.

        Raises:
          StatusError: as `tokenize`.
        """
        return await self._in_time(self._preparation.decode(ids, skip_special_tokens))

    # What the server's life asks for.

    @property
    def live(self) -> int:
        """Requests that are being started or read."""
        return len(self._open)

    @property
    def in_engine(self) -> int:
        """Completions that the engine has, also when nobody reads them any more: they hold slots and pages."""
        return 0 if self._admission is None else self._admission.live

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens of the completions that have had no slot yet: at most what is to be prefilled for them.

        Those that the prefix cache will spare are counted, and the prompt of n completions n times. A preempted
        completion has had its slot.
        """
        return 0 if self._admission is None else self._admission.waiting_prompt_tokens

    def refuse(self, error: StatusError) -> None:
        """From now on `start` raises this."""
        self._refusal = error

    def fail_all(self, error: StatusError) -> None:
        """Ends every request with this error."""
        for request in list(self._open):
            request.fail(error.again(), cause="unavailable")

    def close(self) -> None:
        """Ends what is left, and the threads for text. The engine's is not touched."""
        self.refuse(unavailable("the server is stopped", "stopped"))
        self.fail_all(unavailable("the server is stopped", "stopped"))
        self._sweeps.cancel()
        self._preparation.close()

    # From a job to the engine.

    def _check(self, job: Job) -> None:
        """What needs no look at the prompt.

        A priority beyond max_priority would let some clients starve the others. vLLM takes any integer, because there
        it only orders the queue. Clamped, it would be honoured in part and nobody told: two requests that their client
        ranked would queue as equals. So it is refused, with the range.
        """
        self._engine.check()
        if self._refusal is not None:
            raise self._refusal.again()
        if job.request_id in self._by_id:
            message = f"request_id must be unique among live requests, got {job.request_id!r} again"
            raise StatusError(grpc.StatusCode.ALREADY_EXISTS, message)
        limit = self._config.max_priority
        if not -limit <= job.priority <= limit:
            raise invalid(
                f"priority must be an integer from -{limit} to {limit} (lower runs first), got {job.priority}"
            )
        # Output that has left the engine, and so admission's account, is bounded: as much as that lets in.
        unread = sum(request.over for request in self._open)
        if self._admission is not None and unread >= self._admission.max_live:
            message = f"{unread} finished requests wait for their clients to read them"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, 1.0, reason="unread")

    async def _begin(self, request: Completion) -> None:
        job = request.job
        if request.deadlines.client <= request.arrived:
            raise deadline_passed("the request's deadline had passed when it came")
        prepared, pages = await self._in_time(self._preparation.prepare(job), request.deadlines)
        if request.error is not None:  # aborted, or the engine went away, while this was prepared
            raise request.error
        assert self._admission is not None
        places = self._admission.enter(job.params.n, pages, len(prepared.tokens))
        request.prepared, request.left = prepared, len(places)
        request.choices = [Choice(request, place) for place in places]
        self._engine.submit(request)
        await request.decided.wait()
        if request.error is not None and not request.taken:  # else its reader hears of it
            raise request.error

    async def _in_time(self, preparing: Awaitable[T], deadlines: Deadlines | None = None) -> T:
        """What the preparation returns, which has to be there within a request's time limits.

        Raises:
          StatusError: DEADLINE_EXCEEDED; the preparation is cancelled.
        """
        deadlines = deadlines or Deadlines.of(self._config, time.monotonic())
        until = deadlines.until(Stage.PREPARING)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                return await preparing
        except TimeoutError:
            raise deadlines.error(Stage.PREPARING, until) from None

    # News, and what requests report.

    def _on_state(self, state: State) -> None:
        if state == "serving":
            if self._admission is None:
                sizes, config = self._engine.known().sizes, self._config
                pages = config.max_waiting_pages
                if pages is None:
                    pages = default_waiting_pages(sizes.slots, config.max_waiting, sizes.num_pages)
                self._admission = Admission(sizes.slots, config.max_waiting, pages)
            return
        errors = {"stalled": "the engine hangs", "dead": "the engine died", "stopped": "the server is stopped"}
        self.fail_all(unavailable(errors[state], state))
        if state != "stalled":
            self._admission = None  # no engine, no account of it

    def _on_news(self, news: Sequence[tuple[Choice, News]]) -> None:
        admission = self._admission
        if admission is None:  # a step that hung has returned after the server was stopped
            return
        for choice, event in news:
            request = choice.request
            if isinstance(event, Started):
                admission.started(choice.place)
            request.hear(event)
            if isinstance(event, Finished | Ended):
                admission.ended(choice.place)
                request.left -= 1
                if request.over:
                    self._release(request)

    def end_early(self, request: Completion, cause: str) -> None:
        """Gives the engine's part of it up."""
        self._release(request)
        if request.left and self._engine.state in ("serving", "stalled"):
            self._engine.abort(request, cause)

    def _release(self, request: Completion) -> None:
        """It is over. The client's id is free at once: the engine knows the completions by other names."""
        if self._by_id.get(request.job.request_id) is request:
            del self._by_id[request.job.request_id]

    def forget(self, request: Completion) -> None:
        if request in self._open:
            self._open.remove(request)
            if not self._open and self.on_idle is not None:
                self.on_idle()

    def count_refusal(self, error: StatusError) -> None:
        self._engine.guard(self._metrics.on_refused, error.code.name, error.reason)

    def _on_other_chat(self, told: str) -> None:
        """A chat in a mode that the drafter did not learn from: all are counted, the first is told."""
        self._engine.guard(self._metrics.on_other_chat)
        if not self._told_of_chats:
            self._told_of_chats = True
            _log.warning("%s", told)

    def _observed(self, job: Job) -> Callable[[Record], None]:
        """Tells the observers of the job; what it returns tells them of its end."""
        ends: list[Callable[[Record], None]] = []
        for observer in self._observers:
            self._engine.guard(lambda observer=observer: ends.append(observer(job)))
        before = self._switches()

        def tell(record: Record) -> None:
            record.tier_switches = max(0, self._switches() - before)
            for end in ends:
                self._engine.guard(end, record)

        return tell

    def _switches(self) -> int:
        return 0 if self._engine.snapshot is None else self._engine.snapshot.switches

    def _sweep(self) -> None:
        """Ends requests whose readers stall: one timer for all of them, while there are any."""
        now = time.monotonic()
        for request in list(self._open):
            request.end_if_stalled(now, self._config.stall_seconds)
        if self._open:
            self._sweeps.schedule()
