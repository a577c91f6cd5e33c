"""Between the engine's news and one reader: chunks that have not been taken are merged, so nobody waits for anybody.

A reader that is slow costs at most the memory of its own output. Event loop only; must not know the engine or gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from jaxspec.request import FinishReason, Logprob, RequestMetrics
from serve.core.errors import StatusError


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """How a completion ended.

    Attributes:
      reason: STOP or LENGTH.
      stop_reason: the stop token or stop string; None for the end of sequence and other reasons.
      metrics: what it cost.
      output_token_ids, text: all of it.
    """

    reason: FinishReason
    stop_reason: int | str | None
    metrics: RequestMetrics
    output_token_ids: list[int]
    text: str


@dataclasses.dataclass(slots=True)
class Chunk:
    """What was added to a completion since the reader's last chunk of it.

    Attributes:
      index: which completion.
      token_ids, text: whole characters; a chunk may have tokens and no text.
      logprobs: an entry for each token, where asked for.
      finish: on the completion's last chunk.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]] | None = None
    finish: Finish | None = None


class Mailbox:
    """Chunks of a generation's completions, for one reader.

    Args:
      completions: how many there are; reading ends when the last chunk of each was taken.
      clock: seconds; injected so that tests own the time.
    """

    def __init__(self, completions: int, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._waiting: dict[int, Chunk] = {}  # by index, the longest untaken first
        self._texts: dict[int, list[str]] = {}
        self._unfinished = completions
        self._error: StatusError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._idle_since: float | None = None  # there is, or was, something to take, and the reader does not come

    def put(self, chunk: Chunk) -> None:
        """Adds news of a completion; merged into what waits."""
        waiting = self._waiting.get(chunk.index)
        if waiting is None:
            if self._idle_since is None and self._waiter is None:
                self._idle_since = self._clock()
            self._waiting[chunk.index] = chunk
            self._texts[chunk.index] = [chunk.text]
        else:
            waiting.token_ids += chunk.token_ids
            self._texts[chunk.index].append(chunk.text)
            if chunk.logprobs is not None:
                waiting.logprobs = (waiting.logprobs or []) + chunk.logprobs
            waiting.finish = chunk.finish
        self._wake()

    def fail(self, error: StatusError, *, drop: bool = False) -> None:
        """The reader gets what waits, unless that is dropped, and then the error. Only the first error counts."""
        if self._error is None:
            self._error = error
        if drop:
            self._waiting.clear()
            self._texts.clear()
        self._wake()

    def stalled(self, now: float, seconds: float) -> bool:
        """Whether the reader has been away for `seconds`: since its last chunk, or since the first one waits for it.

        Also with nothing waiting: a reader that took the last chunk and is never done with it holds that chunk.
        """
        return self._idle_since is not None and now - self._idle_since >= seconds

    async def take(self) -> Chunk | None:
        """The next chunk, when there is one; None after the last.

        Raises:
          StatusError: what the generation failed with.
        """
        assert self._waiter is None, "a generation has one reader"
        self._idle_since = None
        try:
            return await self._next()
        finally:
            self._idle_since = self._clock()

    async def _next(self) -> Chunk | None:
        while not self._waiting:
            if not self._unfinished:
                return None
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        index, chunk = next(iter(self._waiting.items()))
        del self._waiting[index]
        chunk.text = "".join(self._texts.pop(index))
        if chunk.finish is not None:
            self._unfinished -= 1
        return chunk

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
