"""Generations: from a job to its chunks, and every way in which that can end early.

Protocol-neutral: servicers translate messages into jobs and chunks into messages. Event loop only. Must not know gRPC
calls or messages.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from jaxspec.request import CompletionOutput, ErrorKind, FinishReason
from jaxspec.text.tokenizer import Tokenizer
from serve.core.admission import Admission, default_waiting_pages
from serve.core.engine_thread import EngineThread, State
from serve.core.errors import StatusError, deadline_passed, invalid, unavailable
from serve.core.guarded import GuardedMetrics
from serve.core.jobs import Chat, Job, Running
from serve.core.preparation import Preparation
from serve.core.streams import Chunk, Finish, Mailbox
from serve.core.tickets import Metrics, Ticket, Update

if TYPE_CHECKING:
    from serve.config import ServerConfig

T = TypeVar("T")
__all__ = ["Chunk", "Finish", "Generation", "Generator"]

#: Jobs that may be being prepared at once, besides as many as may queue.
_MORE_PREPARING = 64
#: Ends that a client asked for: nobody was refused.
_CLIENTS_WISH = frozenset({"closed", "aborted"})


class Generation(AsyncIterator[Chunk]):
    """A job under way. Iterate over it once, and `close` it in any case.

    Iteration raises StatusError: CANCELLED (aborted by id, or a reader that stalled), DEADLINE_EXCEEDED, INTERNAL
    (logits that are not finite), UNAVAILABLE (the engine died or hangs, or the server had to go).

    Attributes:
      job: as given.
      prompt_token_ids: what the engine sees.
      seed: of completion 0, chosen here where the job named none; it reproduces the output.
      on_stall: called when the reader was found stalled. The servicer ends its call with it, which may be suspended
        in a write that the client never lets through. Whoever sets it calls `delivered` when the call is over.
    """

    def __init__(self, generator: Generator, job: Job):
        self.job = job
        self.prompt_token_ids: list[int] = []
        self.seed = 0
        self.on_stall: Callable[[], None] | None = None
        self._generator = generator
        self._mailbox = Mailbox(job.params.n)
        self._tickets: list[Ticket] = []
        self._left: set[str] = set()  # tickets whose end the engine has not reported
        self._error: StatusError | None = None
        self._decided = asyncio.Event()  # the engine took it, or it failed
        self._taken = False

    async def __anext__(self) -> Chunk:
        try:
            chunk = await self._mailbox.take()
        except StatusError:
            self.close()
            raise
        if chunk is None:
            self.close()
            raise StopAsyncIteration
        return chunk

    def close(self) -> None:
        """Aborts what is left. May be called any number of times, before and after the end.

        Where a call delivers the output, that is unread until `delivered`: the last write may still stall.
        """
        if self.job.deadline is not None and time.monotonic() >= self.job.deadline:
            # gRPC ends such a call without a word; it may do so before the engine's thread looks.
            error, cause = deadline_passed("the request's deadline passed"), "timeout"
        else:
            error = StatusError(grpc.StatusCode.CANCELLED, "the request was closed", reason="closed")
            cause = "abort"
        self._fail(error, drop=True, cause=cause)
        if self.on_stall is None:
            self._generator._forget(self)

    def delivered(self) -> None:
        """The call is over, whatever became of it: nothing of the generation is left."""
        self.on_stall = None
        self.close()

    @property
    def _over(self) -> bool:
        """Every completion has ended, or the whole has failed."""
        return self._error is not None or (bool(self._tickets) and not self._left)

    def _fail(self, error: StatusError, *, drop: bool = False, cause: str = "abort") -> bool:
        """Ends it early: its completions are aborted and its reader hears of it. False if it was over before.

        Args:
          drop: the reader does not get what waits for it either.
          cause: counted as the finish reason of its completions.
        """
        fresh = not self._over
        if fresh:
            self._generator._abort(self, cause)
            if error.reason not in _CLIENTS_WISH:
                self._generator._count_refusal(error)
        if self._error is None:
            self._error = error
        self._mailbox.fail(error, drop=drop)
        self._decided.set()
        return fresh

    def _stall(self, seconds: float) -> None:
        message = f"the client left output unread for {seconds:g} seconds"
        error = StatusError(grpc.StatusCode.CANCELLED, message, reason="stalled_reader")
        if not self._fail(error, drop=True):
            self._generator._count_refusal(error)  # finished, and its output is lost all the same
        self._generator._forget(self)
        if self.on_stall is not None:
            self.on_stall()

    def _hear(self, update: Update) -> None:
        """Takes in what the engine says of one completion."""
        self._taken = self._taken or not update.ended
        self._decided.set()
        finish = None
        if update.output is not None:
            completion = update.output.outputs[0]
            if completion.finish_reason is FinishReason.ERROR:
                self._fail(_engine_error(completion))
            else:
                assert completion.finish_reason is not None
                metrics = update.output.metrics
                finish = Finish(
                    completion.finish_reason, completion.stop_reason, metrics, completion.token_ids, completion.text
                )
        elif update.ended:
            # Without a reason of its own it was asked for, by this generation or by the thread as it stops.
            self._fail(update.error or unavailable("the server is stopped", "stopped"))
        if self._error is None and (update.token_ids or update.text or finish is not None):
            index = update.ticket.index
            self._mailbox.put(Chunk(index, update.token_ids, update.text, update.logprobs, finish))


class Generator:
    """Starts generations and keeps account of them.

    Args:
      engine: not started yet; the generator listens to it.
      config: limits.
      metrics: counts.

    Attributes:
      on_idle: called whenever `live` falls to 0.
    """

    def __init__(self, engine: EngineThread, config: ServerConfig, metrics: Metrics):
        self.on_idle: Callable[[], None] | None = None
        metrics = GuardedMetrics(metrics)
        self._engine, self._config, self._metrics = engine, config, metrics
        self._admission: Admission | None = None
        self._by_id: dict[str, Generation] = {}  # by the client's id, until it is over
        self._open: set[Generation] = set()  # until the reader is done
        self._unread: set[Generation] = set()  # those that are over
        self._serials = itertools.count()
        self._preparation = Preparation(engine, config.max_output_tokens, config.max_waiting + _MORE_PREPARING)
        self._refusal: StatusError | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        interval = config.stream_interval_ms
        engine.attach(metrics, self._on_updates, None if interval is None else interval / 1e3)
        engine.subscribe(self._on_state)

    # What servicers ask for.

    async def start(self, job: Job) -> Running:
        """Admits a job and gives it to the engine.

        Raises:
          StatusError: INVALID_ARGUMENT (it can never be honoured), ALREADY_EXISTS (its id is live),
            RESOURCE_EXHAUSTED (the queue is full, or too much finished output is unread), DEADLINE_EXCEEDED, CANCELLED
            (aborted meanwhile), or UNAVAILABLE (starting, draining, hanging, dead). Nothing of the job is left behind,
            nor when the caller is cancelled.
        """
        try:
            self._check_open()
            if job.request_id in self._by_id:
                message = f"request_id must be unique among live requests, got {job.request_id!r} again"
                raise StatusError(grpc.StatusCode.ALREADY_EXISTS, message)
            self._check_priority(job.priority)
            self._check_unread()
        except StatusError as e:
            self._count_refusal(e)
            raise
        generation = self._by_id[job.request_id] = Generation(self, job)
        self._open.add(generation)
        self._schedule_sweep()
        try:
            await self._begin(generation)
        except BaseException as e:  # also CancelledError: the engine must not keep an orphan
            if isinstance(e, StatusError):
                generation._fail(e)
            generation.close()
            raise
        return generation

    async def abort(self, request_ids: Iterable[str]) -> int:
        """Ends generations with CANCELLED; returns how many were live. Others are no error."""
        error = StatusError(grpc.StatusCode.CANCELLED, "the request was aborted", reason="aborted")
        live = [self._by_id[name] for name in dict.fromkeys(request_ids) if name in self._by_id]
        return sum(generation._fail(error.again()) for generation in live)

    async def tokenize(self, prompt: str | Chat, add_special_tokens: bool = True) -> list[int]:
        """Token ids as `start` would see them.

        Raises:
          StatusError: INVALID_ARGUMENT, UNAVAILABLE (starting or stopped), RESOURCE_EXHAUSTED (too many at once),
            DEADLINE_EXCEEDED (it waited longer than queue_seconds).
        """
        return await self._in_time(self._preparation.encode(prompt, add_special_tokens), time.monotonic())

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; those that the model has and the tokenizer does not have none.

        Raises:
          StatusError: as `tokenize`.
        """
        return await self._in_time(self._preparation.decode(ids, skip_special_tokens), time.monotonic())

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's; None where there is none, or the engine is not built yet."""
        return None if self._engine.facts is None else self._engine.facts.tokenizer

    # What the server's life asks for.

    @property
    def live(self) -> int:
        """Generations that are being started or read."""
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
        """Ends every generation with this error."""
        for generation in list(self._open):
            generation._fail(error.again(), cause="unavailable")

    def close(self) -> None:
        """Ends what is left, and the threads for text. The engine's is not touched."""
        self.refuse(unavailable("the server is stopped", "stopped"))
        self.fail_all(unavailable("the server is stopped", "stopped"))
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        self._preparation.close()

    # From a job to tickets.

    def _check_open(self) -> None:
        self._engine.check()
        if self._refusal is not None:
            raise self._refusal.again()

    def _check_priority(self, priority: int) -> None:
        """Refuses what would let some clients starve the others: see ServerConfig.max_priority.

        vLLM takes any integer, because there it only orders the queue. Clamped, it would be honoured in part and nobody
        told: two requests that their client ranked would queue as equals. So it is refused, with the range.
        """
        limit = self._config.max_priority
        if not -limit <= priority <= limit:
            raise invalid(f"priority must be an integer from -{limit} to {limit} (lower runs first), got {priority}")

    def _check_unread(self) -> None:
        """Bounds output that has left the engine, and so admission's account: as much as that lets in."""
        if self._admission is not None and len(self._unread) >= self._admission.max_live:
            message = f"{len(self._unread)} finished requests wait for their clients to read them"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, 1.0, reason="unread")

    async def _begin(self, generation: Generation) -> None:
        job, config, began = generation.job, self._config, time.monotonic()
        if job.deadline is not None and job.deadline <= began:
            raise deadline_passed("the request's deadline had passed when it came")
        deadline = float("inf") if job.deadline is None else job.deadline
        prepared = await self._in_time(self._preparation.prepare(job), began, deadline)
        if generation._error is not None:  # aborted, or the engine went away, while this was prepared
            raise generation._error
        params = prepared.params
        assert self._admission is not None and params.seed is not None
        generation.prompt_token_ids, generation.seed = prepared.tokens, params.seed
        serial = next(self._serials)
        ids = [f"{serial}.{index}" for index in range(params.n)]
        self._admission.enter(ids, prepared.pages, len(prepared.tokens))
        generation._left.update(ids)
        generation._tickets = [
            Ticket(
                id=name,
                job=job,
                params=params,
                prompt_token_ids=prepared.tokens,
                index=index,
                grammar=prepared.grammar,
                arrived=began,
                queue_until=began + config.queue_seconds,
                run_until=began + config.run_seconds,
                deadline=deadline,
                owner=generation,
            )
            for index, name in enumerate(ids)
        ]
        self._engine.submit(generation._tickets)
        await generation._decided.wait()
        if generation._error is not None and not generation._taken:  # else its reader hears of it
            raise generation._error

    async def _in_time(self, preparing: Awaitable[T], began: float, deadline: float = float("inf")) -> T:
        """What the preparation returns, which has to be there within a request's time limits.

        Raises:
          StatusError: DEADLINE_EXCEEDED; the preparation is cancelled.
        """
        limits = {
            "deadline": (deadline, "the request's deadline passed before it was prepared"),
            "run_seconds": (
                began + self._config.run_seconds,
                "the request took longer than the server's run_seconds (before it was prepared)",
            ),
            "queue_seconds": (
                began + self._config.queue_seconds,
                "the request waited longer than the server's queue_seconds to be prepared",
            ),
        }
        reason, (until, message) = min(limits.items(), key=lambda limit: limit[1][0])
        try:
            async with asyncio.timeout(until - time.monotonic()):
                return await preparing
        except TimeoutError:
            raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, message, reason=reason) from None

    # News, and what generations report.

    def _on_state(self, state: State) -> None:
        if state == "serving":
            if self._admission is None:
                facts, config = self._preparation.facts, self._config
                pages = config.max_waiting_pages
                if pages is None:
                    pages = default_waiting_pages(facts.sizes.max_batch_size, config.max_waiting, facts.sizes.num_pages)
                self._admission = Admission(facts.sizes.max_batch_size, config.max_waiting, pages)
            return
        errors = {"stalled": "the engine hangs", "dead": "the engine died", "stopped": "the server is stopped"}
        self.fail_all(unavailable(errors[state], state))
        if state != "stalled":
            self._admission = None  # no engine, no account of it

    def _on_updates(self, updates: list[Update]) -> None:
        if self._admission is None:  # a step that hung has returned after the server was stopped
            return
        for update in updates:
            ticket = update.ticket
            generation: Generation = ticket.owner
            if update.started:
                self._admission.started(ticket.id)
            generation._hear(update)
            if update.ended:
                self._admission.ended(ticket.id)
                generation._left.discard(ticket.id)
                if generation._over:
                    self._release(generation)

    def _abort(self, generation: Generation, cause: str) -> None:
        """Gives the engine's part of it up."""
        self._release(generation)
        if generation._left and self._engine.state in ("serving", "stalled"):
            self._engine.abort(generation._tickets, cause)

    def _release(self, generation: Generation) -> None:
        """It is over. The client's id is free at once: the engine knows the completions by other names."""
        name = generation.job.request_id
        if self._by_id.get(name) is generation:
            del self._by_id[name]
        if generation in self._open:
            self._unread.add(generation)

    def _forget(self, generation: Generation) -> None:
        if generation in self._open:
            self._open.remove(generation)
            self._unread.discard(generation)
            if not self._open and self.on_idle is not None:
                self.on_idle()

    def _count_refusal(self, error: StatusError) -> None:
        self._metrics.on_refused(error.code.name, error.reason)

    def _schedule_sweep(self) -> None:
        if self._sweep_timer is None and self._open:
            delay = min(1.0, self._config.stall_seconds / 4)
            self._sweep_timer = asyncio.get_running_loop().call_later(delay, self._sweep)

    def _sweep(self) -> None:
        """Ends generations whose readers stall: one timer for all of them."""
        self._sweep_timer = None
        now, limit = time.monotonic(), self._config.stall_seconds
        for generation in [g for g in self._open if g._mailbox.stalled(now, limit)]:
            generation._stall(limit)
        self._schedule_sweep()


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
