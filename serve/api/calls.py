"""What calls of every service share: what none may exceed, and how they end: with a status, together with their
generation, or against a reader that stalls.

Must not know messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import grpc

from serve.api.requests import Limits
from serve.config import ServerConfig
from serve.core.completion import Completion
from serve.core.engine_client import EngineClient
from serve.core.errors import StatusError
from serve.core.observers import Metrics
from serve.telemetry.logs import event

T = TypeVar("T")
#: Tokens and logprobs of a message that is made on the event loop: well below a millisecond.
_AT_ONCE = 256
_log = logging.getLogger("serve")
_STALLED = StatusError(
    grpc.StatusCode.CANCELLED, "the stream was left unread for longer than the server's stall_seconds"
)
Translate = Callable[[StatusError], StatusError]
#: How long such a status waits for its reader. A later one finds what gRPC had taken in, and no status.
_FAREWELL_SECONDS = 60.0
#: Statuses on their way to readers that do not read.
_farewells: set[asyncio.Task[None]] = set()


@contextlib.contextmanager
def counting_refusals(metrics: Metrics) -> Iterator[None]:
    """Counts and logs a StatusError that comes out of it.

    For the translation of messages alone: the generator counts what it refuses itself.
    """
    try:
        yield
    except StatusError as e:
        metrics.on_refused(e.code.name, e.reason)
        event(_log, logging.INFO, "refused", status=e.code.name, reason=e.reason)
        raise


def limits_of(engine: EngineClient, config: ServerConfig) -> Limits:
    """What no message can exceed.

    Raises:
      StatusError: UNAVAILABLE; the engine is not built, and nobody knows.
    """
    facts = engine.known()
    longest = 1 if facts.tokenizer is None else facts.tokenizer.longest_token
    return Limits(
        tokens=facts.sizes.max_seq_len,
        characters=facts.sizes.max_seq_len * longest,
        default_tokens=min(facts.sizes.max_seq_len, config.max_output_tokens or facts.sizes.max_seq_len),
        answer_bytes=config.max_message_mib * 2**20,
    )


async def made(size: int, make: Callable[[], T]) -> T:
    """What `make` returns; on a thread where it is large, so that other calls go on meanwhile.

    Args:
      size: tokens and logprobs.
    """
    return make() if size <= _AT_ONCE else await asyncio.to_thread(make)


@contextlib.asynccontextmanager
async def answering(context: Any, translate: Translate = lambda error: error) -> AsyncIterator[None]:
    """Around all that a call does: an exception ends it with a status.

    Args:
      translate: what clients are told of a StatusError.
    """
    try:
        yield
    except grpc.aio.AbortError:  # it has ended already
        raise
    except Exception as error:
        await abort_call(context, translate(error) if isinstance(error, StatusError) else error)


async def abort_call(context: Any, error: Exception) -> None:
    """Ends a call with the status of `error`; what is no StatusError is a bug, of which clients hear no details.

    Raises:
      grpc.aio.AbortError: always.
    """
    if not isinstance(error, StatusError):
        _log.error("a call failed", exc_info=error)
        error = StatusError(grpc.StatusCode.INTERNAL, "internal error")
    await context.abort_with_status(error.status())


def end_together(context: Any, generation: Completion, translate: Translate = lambda error: error) -> None:
    """From now on the end of the call closes the generation, and a reader that stalls ends the call.

    Args as `breaking_off`.
    """
    generation.on_stall = breaking_off(context, translate)
    context.add_done_callback(lambda _: generation.delivered())


def breaking_off(context: Any, translate: Translate = lambda error: error) -> Callable[[], None]:
    """What ends this call when its reader has stalled.

    To be called by the handler, in the call's own task. A write that the client never takes cannot be told to end, but
    the task around it can; gRPC would then send no status at all, so that is sent beside it, and arrives if the client
    reads after all. gRPC takes none while a message is still on its way: then the client finds what had been taken in.

    Args:
      translate: what clients are told of the StatusError.
    """
    task = asyncio.current_task()
    assert task is not None

    async def say() -> None:
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError, grpc.aio.UsageError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await context.abort_with_status(translate(_STALLED).status())

    def end() -> None:
        farewell = asyncio.ensure_future(say())
        _farewells.add(farewell)
        farewell.add_done_callback(_farewells.discard)
        task.cancel()

    return end
