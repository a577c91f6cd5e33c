"""Before a job can queue: its tokens, its grammar, its resolved parameters, and whether it could ever run.

Tokenizers, templates and grammar compilers run in a few threads, never on the event loop; the threads are daemons, so
that no text can keep the process from ending. Must not know completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from jaxspec.prepared import Prepared
from jaxspec.request import SamplingParams
from jaxspec.text.grammar import Grammar, GrammarSpec
from jaxspec.text.modes import ChatModes
from jaxspec.text.tokenizer import Tokenizer
from serve.core.engine_client import EngineClient
from serve.core.errors import StatusError, invalid, unavailable
from serve.core.grammar_trials import GrammarTrials
from serve.core.jobs import Chat, Job, Prompt

T = TypeVar("T")
#: Threads that tokenize and render.
_TEXT_THREADS = 2


class Preparation:
    """The threads, and what they do to jobs.

    Args:
      engine: says what the model is, once it is built.
      max_output_tokens: of jobs that fill the context; None: no further bound.
      max_preparing: texts in their threads or before them, beyond which more are refused; and likewise grammars.
      on_other_chat: hears what is said of a chat in a mode that the drafter did not learn from; no text waits for it.
    """

    def __init__(
        self, engine: EngineClient, max_output_tokens: int | None, max_preparing: int,
        on_other_chat: Callable[[str], None] = lambda told: None,
    ):  # fmt: skip
        self._engine, self._max_output_tokens, self._on_other_chat = engine, max_output_tokens, on_other_chat
        self._chats: ChatModes | None = None
        self._text = _Threads(_TEXT_THREADS, "text", max_preparing)
        self._grammars = GrammarTrials(max_preparing)

    @property
    def preparing(self) -> int:
        """Texts and grammars under way; what nobody waits for any more counts until its thread is done with it."""
        return self._text.pending + self._grammars.pending

    async def prepare(self, job: Job) -> tuple[Prepared, int]:
        """Everything that can be found out about a job without the engine's thread. May be cancelled.

        Returns:
          It with a seed, and the pages that a completion may come to need. Where the client named no
          length that is what the prompt needs: the context that it may fill says nothing of how much it will.

        Raises:
          StatusError: INVALID_ARGUMENT; RESOURCE_EXHAUSTED, too much is being prepared; UNAVAILABLE, no model yet, or
            closed.
        """
        facts = self._engine.known()
        tokens = await self.encode(job.prompt, job.add_special_tokens)
        try:
            params = self._resolve(job)
            # The engine looks again; but what can never run must not be told that the queue is full.
            allowed = facts.sizes.allowed(len(tokens), params.max_tokens)
            tokens = facts.checked(tokens)
            facts.check(params, None)
        except ValueError as e:
            raise invalid(str(e)) from e
        if (told := await self._other_chat(job.prompt, tokens)) is not None:
            self._on_other_chat(told)
        grammar = None if job.grammar is None else await self._compile(job.grammar)
        pages = facts.sizes.pages_for(len(tokens) + (1 if job.fill_context else allowed))
        return Prepared(None, tokens, params, grammar), pages

    async def encode(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        """The token ids of a prompt; StatusError as `prepare`."""
        if isinstance(prompt, tuple):
            return list(prompt)
        if not prompt:
            raise invalid("prompt must not be empty, got ''")
        tokenizer, longest = self._need_tokenizer(), self._engine.known().sizes.max_seq_len

        def encode() -> list[int]:
            if isinstance(prompt, Chat):
                text = tokenizer.apply_chat_template(
                    prompt.messages, add_generation_prompt=prompt.add_generation_prompt, **prompt.variables
                )
                return tokenizer.encode(text, add_special_tokens=False, max_tokens=longest)
            return tokenizer.encode(prompt, add_special_tokens=add_special_tokens, max_tokens=longest)

        return await self._in_thread(encode)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids; StatusError as `prepare`."""
        tokenizer, facts = self._need_tokenizer(), self._engine.known()

        def decode() -> str:
            return tokenizer.decode(facts.checked(ids, "token ids"), skip_special_tokens=skip_special_tokens)

        return await self._in_thread(decode)

    def close(self) -> None:
        """Lets the threads go, without waiting for what they do: whoever does hears UNAVAILABLE."""
        self._text.close()
        self._grammars.close()

    async def _other_chat(self, prompt: Prompt, tokens: Sequence[int]) -> str | None:
        """What is said of a chat in a mode that the drafter did not learn from; None: it is in one, or nothing tells.

        A gateway writes conversations itself: of those the end of the prompt tells.
        """
        facts = self._engine.known()
        if not facts.chats:
            return None
        if self._chats is None:
            self._chats = await self._in_thread(lambda: ChatModes(facts.chats, facts.tokenizer))
        chats = self._chats
        if not isinstance(prompt, Chat):
            return chats.told() if chats.opens_unlike(tokens) else None
        unlike = await self._in_thread(lambda: chats.unlike(prompt.variables))
        return chats.told(prompt.variables) if unlike else None

    def _need_tokenizer(self) -> Tokenizer:
        tokenizer = self._engine.known().tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer: prompts must be token ids, and there is no text")
        return tokenizer

    def _resolve(self, job: Job) -> SamplingParams:
        """The job's parameters with a seed, and with the server's limit where the client named none."""
        changes: dict[str, int | None] = {} if job.params.seed is not None else {"seed": secrets.randbits(32)}
        if job.fill_context:
            changes["max_tokens"] = self._max_output_tokens
        return dataclasses.replace(job.params, **changes) if changes else job.params

    async def _compile(self, spec: GrammarSpec) -> Grammar:
        grammars = self._engine.known().grammars
        if grammars is None:
            raise invalid("this server was started without structured output, and the request has a grammar")
        return await self._grammars.compile(grammars, spec)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """What `function` returns; its ValueError is the client's fault."""
        try:
            return await self._text.run(function)
        except ValueError as e:
            raise invalid(str(e)) from e


@dataclasses.dataclass(eq=False)
class _Call(Generic[T]):
    """A function on its way to a thread, and who waits for what it returns."""

    function: Callable[[], T]
    done: asyncio.Future[T]


class _Threads:
    """A few daemon threads that run functions for the event loop, first come, first served.

    Args:
      max_pending: functions that wait or run; more are refused.

    Attributes:
      pending: how many do. One that runs counts until it returns, also when nobody waits for it any more.
    """

    def __init__(self, count: int, name: str, max_pending: int):
        self.pending = 0
        self._count, self._name, self._max_pending = count, name, max_pending
        self._changed = threading.Condition()
        self._calls: deque[_Call[Any]] = deque()  # under the condition's lock
        self._closed = False
        self._waiting: set[asyncio.Future[Any]] = set()
        self._threads: list[threading.Thread] = []

    async def run(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises.

        Raises:
          StatusError: RESOURCE_EXHAUSTED, too many are pending; UNAVAILABLE, closed.
        """
        if self._closed:
            raise unavailable("the server is stopped", "stopped")
        if self.pending >= self._max_pending:
            message = f"{self.pending} texts are being tokenized"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, 1.0, reason="preparing")
        loop = asyncio.get_running_loop()
        call = _Call(function, loop.create_future())
        self.pending += 1
        self._waiting.add(call.done)
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, args=(loop,), name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            return await call.done
        finally:
            self._waiting.discard(call.done)
            with self._changed, contextlib.suppress(ValueError):  # it has begun
                self._calls.remove(call)
                self.pending -= 1

    def close(self) -> None:
        """The threads end when they are done with what they do; whoever waits hears UNAVAILABLE. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for done in self._waiting:
            if not done.done():
                done.set_exception(unavailable("the server is stopped", "stopped"))

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (call := self._next()) is not None:
            result, error = None, None
            try:
                result = call.function()
            except Exception as e:
                error = e
            except BaseException as e:  # a panic of the library's must not take the thread
                error = RuntimeError(f"{type(e).__name__}: {e}")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._settle, call, result, error)
            del call, result, error  # a thread that waits holds nobody's text

    def _next(self) -> _Call[Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._calls)
            return None if self._closed else self._calls.popleft()

    def _settle(self, call: _Call[Any], result: Any, error: Exception | None) -> None:
        self.pending -= 1
        if call.done.done():
            return
        if error is None:
            call.done.set_result(result)
        else:
            call.done.set_exception(error)
