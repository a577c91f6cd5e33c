"""AsyncLLM: LLM for asyncio. Tasks share the batch; a thread steps the engine while there is work.

The thread owns nothing but a queue of what is asked for: it is one more user of the engine, beside the threads that
call the same LLM. The event loop never waits for a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any, Self

from jaxspec.engine import Engine
from jaxspec.events import Delta, Event, Finished
from jaxspec.llm import LLM
from jaxspec.names import tells_arguments
from jaxspec.prepared import Prepared
from jaxspec.prompts import CALL_ELSEWHERE, Prompt
from jaxspec.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from jaxspec.shared import SharedEngine
from jaxspec.text.grammar import GrammarLike
from jaxspec.text.tokenizer import Tokenizer


class AsyncLLM:
    """A language model for asyncio, in the shape of vLLM's AsyncLLM.

        async with AsyncLLM("demo") as llm:
            async for output in llm.generate("def main():", SamplingParams(max_tokens=64), "request-1"):
                print(output.text)

    For tasks of any event loop, and beside threads that use the same LLM (`of`). Building the engine takes seconds to
    minutes and is done here: build it before the loop runs, or in a thread of its own.

    Args:
      model, *args, **kwargs: as LLM.

    Attributes:
      llm: what it runs on; its `stats`, `use_policy` and `flush_prefix_cache` wait for the step under way.

    Raises:
      ValueError: as LLM.
    """

    def __init__(self, model: str | Path = "demo", *args: Any, **kwargs: Any):
        self._begin(LLM(model, *args, **kwargs), owns=True)

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Over an LLM that others use too, and that `shutdown` leaves open."""
        self = cls.__new__(cls)
        self._begin(llm, owns=False)
        return self

    def _begin(self, llm: LLM, *, owns: bool) -> None:
        self.llm, self._owns = llm, owns
        self._stepper = _Stepper(llm.shared)
        self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}
        self._by_id: dict[str, _Stream] = {}

    def __repr__(self) -> str:
        return f"Async{self.llm!r}"

    @tells_arguments(CALL_ELSEWHERE)
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        grammar: GrammarLike | None = None,
        priority: int = 0,
        tpot: float | None = None,
        max_depth: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the prompt's output as it grows.

        Each RequestOutput is cumulative, as vLLM's are by default: every completion with all its tokens, text and
        log-probabilities so far, and what they have cost. A consumer that is slower than the engine gets fewer of them.
        The last one is `finished`. The request is queued when the first one is asked for; cancelling the task, and
        closing or dropping the generator, aborts it.

        Args:
          prompt: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
          sampling_params: None is SamplingParams().
          request_id: unique among live requests, for `abort` and the outputs; None: one is made up.
          grammar: what the text has to be, as LLM.generate takes it. Needs AsyncLLM(structured_output=True).
          priority: lower runs first, -100 to 100.
          tpot: seconds a token after the first that it asks for, as LLM.generate's.
          max_depth: most drafts accepted in a round, as LLM.generate's.

        Raises:
          ValueError: a prompt, parameters or a request id that cannot be honoured.
          RuntimeError: the AsyncLLM was shut down, or its LLM closed.
          Exception: what a step raised; it ends every live request.
        """
        arrival_time = time.monotonic()
        name = uuid.uuid4().hex if request_id is None else request_id
        stream = _Stream(name, self._stepper, self._mailbox())
        if self._by_id.setdefault(name, stream) is not stream:
            raise ValueError(f"request_id must be unique among live requests, got {name!r} again")
        try:
            # A long text or a large grammar takes a while.
            prepared = await asyncio.to_thread(self._prepare, prompt, sampling_params, grammar)
            stream.start(prepared, arrival_time, priority, tpot, max_depth)
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            del self._by_id[name]
            stream.abandon()

    async def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, awaited as vLLM's is; its chat template makes conversations prompts.

        Raises:
          ValueError: as LLM.tokenizer.
        """
        return self.llm.tokenizer

    def _mailbox(self) -> _Mailbox:
        loop = asyncio.get_running_loop()
        if loop not in self._mailboxes:
            open_ones = {other: box for other, box in tuple(self._mailboxes.items()) if not other.is_closed()}
            self._mailboxes = {**open_ones, loop: _Mailbox(loop)}
        return self._mailboxes[loop]

    def _prepare(self, prompt: Prompt, params: SamplingParams | None, grammar: GrammarLike | None) -> Prepared:
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        prepared = self.llm.prepare(prompt, params, grammar)
        if not prepared:
            raise ValueError(f"prompt must hold at least 1 token, got {prompt!r}")
        if len(prepared) > 1:
            raise ValueError(f"prompt must be one text or one list of token ids, got {len(prepared)} prompts")
        return prepared[0]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; returns when their slots are free.

        Their generators yield a last output with FinishReason.ABORT. What has ended, or nobody knows, is passed over.
        """
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        for stream in [self._by_id[name] for name in names if name in self._by_id]:
            await stream.abort()

    def shutdown(self, timeout: float | None = None) -> None:
        """Fails live requests with RuntimeError, ends the thread, and closes an LLM that was built here. Idempotent.

        Args:
          timeout: seconds to wait for the step under way; None waits for its end. An LLM whose step hangs longer is
            left open.
        """
        if self._stepper.close(timeout) and self._owns:
            self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.shutdown)


class _Mailbox:
    """Wakes the streams of one loop, with about one call a step however many they are."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._full: deque[_Stream] = deque()
        self._called = False

    def put(self, stream: _Stream) -> bool:
        """From any thread; False where the loop is closed."""
        self._full.append(stream)
        if not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                return False
        return not self._loop.is_closed()

    def _empty(self) -> None:
        self._called = False  # first: whoever finds it set has put before what follows
        while self._full:
            self._full.popleft().wake()


@dataclasses.dataclass
class _Command:
    """What is asked of the thread.

    Attributes:
      run: with the engine, between two steps.
      refuse: instead, where there is no engine, and after `run` has raised.
    """

    run: Callable[[Engine], None]
    refuse: Callable[[BaseException], None]


class _Stepper:
    """The thread: runs commands, and steps the engine while streams are live. It ends when there is nothing to do, and
    is no daemon: the end of the interpreter must not cut off a step.

    Attributes:
      live: streams with requests; they leave it when they end, in whichever thread that is.
    """

    def __init__(self, shared: SharedEngine):
        self.shared = shared
        self.live: set[_Stream] = set()
        self._commands: deque[_Command] = deque()
        self._lock = threading.Lock()  # of the two below
        self._thread: threading.Thread | None = None
        self._closed = False

    def post(self, command: _Command) -> None:
        """Has it run soon.

        Raises:
          RuntimeError: after `close`.
        """
        with self._lock:
            if self._closed:
                raise _shut_down()
            self._post(command)

    def close(self, timeout: float | None) -> bool:
        """Fails live streams; whether the thread has ended within `timeout` seconds."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._post(_Command(self._cut, lambda error: None))
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def _cut(self, engine: Engine) -> None:
        for stream in tuple(self.live):
            stream.fail(_shut_down())
            stream.end(engine)

    def _post(self, command: _Command) -> None:
        self._commands.append(command)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="AsyncLLM")
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._commands and not self.live:
                    self._thread = None
                    return
            if self._commands:
                try:
                    self.shared.call(self._obey)
                except BaseException as error:  # closed, or broken
                    while self._commands:
                        self._commands.popleft().refuse(error)
            else:
                try:
                    self.shared.advance(self._settled)
                except BaseException as error:  # mostly they have heard of it
                    for stream in tuple(self.live):
                        stream.fail(error)

    def _settled(self) -> bool:
        return bool(self._commands) or not self.live

    def _obey(self, engine: Engine) -> None:
        while self._commands:
            command = self._commands.popleft()
            try:
                command.run(engine)
            except Exception as error:
                command.refuse(error)


class _Stream:
    """One prompt between the engine and the task that awaits it: whoever steps queues the news, the task adds them up.

    Args:
      name: the user's request id.
    """

    def __init__(self, name: str, stepper: _Stepper, mailbox: _Mailbox):
        self._name, self._stepper, self._mailbox = name, stepper, mailbox
        self._news: deque[tuple[Delta | Finished, RequestMetrics]] = deque()
        self._error: BaseException | None = None
        # Of whoever has the engine:
        self._engine: Engine | None = None
        self._left: set[str] = set()  # live requests
        self._aborted = False
        # Of the task:
        self._event = asyncio.Event()
        self._prepared: Prepared | None = None
        self._parts: list[CompletionOutput] = []
        self._metrics: list[RequestMetrics] = []

    # The task's side.

    def start(
        self, prepared: Prepared, arrival_time: float, priority: int, tpot: float | None, max_depth: int | None
    ) -> None:
        """Gives the prompt to the engine.

        Raises:
          RuntimeError: it was shut down.
        """
        n, logprobs = prepared.params.n, prepared.params.logprobs
        self._parts = [CompletionOutput(i, [], "", logprobs=None if logprobs is None else []) for i in range(n)]
        self._metrics = [RequestMetrics(arrival_time=arrival_time) for _ in range(n)]

        def add(engine: Engine) -> None:
            ids = prepared.add(engine, arrival_time, priority, tpot, max_depth)
            self._engine, self._left = engine, set(ids)
            self._stepper.live.add(self)
            self._stepper.shared.listen(self, ids)
            if self._aborted:
                self.end(engine)

        self._stepper.post(_Command(add, self.fail))
        self._prepared = prepared

    async def next(self) -> RequestOutput:
        """The output as it stands, once it has grown."""
        assert self._prepared is not None
        while not self._news:
            if self._error is not None:
                raise self._error
            await self._event.wait()
            self._event.clear()
        while self._news:
            self._add_up(*self._news.popleft())
        parts = [
            dataclasses.replace(
                part, token_ids=[*part.token_ids], logprobs=None if part.logprobs is None else [*part.logprobs]
            )
            for part in self._parts
        ]
        metrics = RequestMetrics.total(self._metrics)
        return RequestOutput(self._name, self._prepared.text, [*self._prepared.tokens], parts, metrics)

    def _add_up(self, event: Delta | Finished, metrics: RequestMetrics) -> None:
        self._metrics[event.index] = metrics
        if isinstance(event, Finished):
            (self._parts[event.index],) = event.output.outputs
            return
        part = self._parts[event.index]
        part.token_ids += event.token_ids
        part.text += event.text
        if part.logprobs is not None:
            part.logprobs += event.logprobs or ()

    def wake(self) -> None:
        """There is news, or an error."""
        self._event.set()

    async def abort(self) -> None:
        """Ends it where it is; returns when that is done."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell(error: BaseException | None = None) -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(done.set)

        def end(engine: Engine) -> None:
            self._aborted = True  # also what is not begun yet
            self.end(engine)
            tell()

        with contextlib.suppress(RuntimeError):  # shut down: it has ended
            self._stepper.post(_Command(end, tell))
            await done.wait()

    def abandon(self) -> None:
        """Nobody awaits it any more."""
        if self._prepared is not None and self._error is None and any(p.finish_reason is None for p in self._parts):
            with contextlib.suppress(RuntimeError):
                self._stepper.post(_Command(self.end, lambda error: None))

    # With the engine.

    def take(self, event: Event) -> None:
        """Queues an event for the task."""
        if event.request_id not in self._left:
            return
        assert self._engine is not None
        match event:
            case Finished():
                self._left.discard(event.request_id)
                self._news.append((event, event.output.metrics))
                self._told()
            case Delta():
                metrics = self._engine.metrics(event.request_id)
                if metrics is not None:  # else it has ended in the same step: what follows says all
                    self._news.append((event, metrics))
                    self._told()

    def fail(self, error: BaseException) -> None:
        """What is queued comes, then the error."""
        self._error = error
        self._told()
        self._stepper.live.discard(self)

    def end(self, engine: Engine) -> None:
        """Aborts what is left; the task hears of it, unless it has heard of an error."""
        for request_id in tuple(self._left):
            finished = engine.abort(request_id)
            if finished is not None and self._error is None:
                self.take(finished)
        self._left.clear()
        self._stepper.live.discard(self)

    def _told(self) -> None:
        if not self._mailbox.put(self):  # the loop is closed: nobody will ever ask for it
            self._stepper.shared.abandon(tuple(self._left))
            self._left.clear()
        if not self._left:
            self._stepper.live.discard(self)


def _shut_down() -> RuntimeError:
    return RuntimeError("this AsyncLLM is shut down")
