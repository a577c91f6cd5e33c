"""A mailbox merges what its reader has not taken, and loses nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from jaxspec.request import FinishReason, Logprob, RequestMetrics
from serve.core.errors import StatusError
from serve.core.streams import Chunk, Finish, Mailbox

FINISH = Finish(FinishReason.LENGTH, None, RequestMetrics(), [1, 2, 3], "abc")
ERROR = StatusError(grpc.StatusCode.UNAVAILABLE, "gone")


def test_untaken_chunks_are_merged_by_completion(kit: Any) -> None:
    async def story() -> None:
        box = Mailbox(2)
        one, two, three = ({t: Logprob(t, -0.5)} for t in (1, 2, 3))
        box.put(Chunk(0, [1], "a", [one]))
        box.put(Chunk(1, [7], "", None))
        box.put(Chunk(0, [2, 3], "bc", [two, three]))
        first = await box.take()
        assert first == Chunk(0, [1, 2, 3], "abc", [one, two, three])
        box.put(Chunk(0, [], "", None, FINISH))
        assert await box.take() == Chunk(1, [7], "")  # the longest untaken comes first
        assert await box.take() == Chunk(0, [], "", None, FINISH)
        box.put(Chunk(1, [8], "h"))
        box.put(Chunk(1, [9], "i", None, FINISH))
        assert await box.take() == Chunk(1, [8, 9], "hi", None, FINISH)
        assert await box.take() is None and await box.take() is None

    kit.run(story())


def test_a_waiting_reader_is_woken(kit: Any) -> None:
    async def story() -> None:
        box = Mailbox(1)
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.put(Chunk(0, [1], "a"))
        box.put(Chunk(0, [2], "b"))
        assert await reader == Chunk(0, [1, 2], "ab")
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        box.put(Chunk(0, [3], "c", None, FINISH))  # a cancelled reader takes nothing away
        assert (await box.take()) == Chunk(0, [3], "c", None, FINISH)

    kit.run(story())


def test_a_failure_comes_after_what_waits_unless_that_is_dropped(kit: Any) -> None:
    async def story() -> None:
        box = Mailbox(1)
        box.put(Chunk(0, [1], "a"))
        box.fail(ERROR)
        box.fail(StatusError(grpc.StatusCode.CANCELLED, "later"))
        assert await box.take() == Chunk(0, [1], "a")
        for _ in range(2):
            with pytest.raises(StatusError) as caught:
                await box.take()
            assert caught.value is ERROR
        box = Mailbox(1)
        box.put(Chunk(0, [1], "a"))
        box.fail(ERROR, drop=True)
        with pytest.raises(StatusError):
            await box.take()
        box = Mailbox(1)
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.fail(ERROR)
        with pytest.raises(StatusError):
            await reader
        box = Mailbox(1)
        box.put(Chunk(0, [1], "a", None, FINISH))
        assert (await box.take()) is not None
        box.fail(ERROR)  # after the end: nobody's business
        assert await box.take() is None

    kit.run(story())


def test_a_reader_stalls_when_it_takes_nothing_that_waits(kit: Any) -> None:
    async def story() -> None:
        now = 100.0
        box = Mailbox(2, clock=lambda: now)
        assert not box.stalled(1e9, 5)
        box.put(Chunk(0, [1], "a"))
        now = 103.0
        box.put(Chunk(0, [2], "b"))
        box.put(Chunk(1, [3], "c"))
        assert not box.stalled(104.9, 5) and box.stalled(105, 5)
        await box.take()
        assert not box.stalled(107.9, 5) and box.stalled(108, 5)  # the other one still waits
        now = 104.0
        await box.take()
        assert not box.stalled(108.9, 5)
        box.put(Chunk(0, [4], "d"))
        assert box.stalled(109, 5)  # what comes meanwhile is no sign of the reader
        box.fail(ERROR, drop=True)
        assert box.stalled(109, 5)

    kit.run(story())


def test_a_reader_that_never_comes_back_from_the_last_chunk_stalls(kit: Any) -> None:
    async def story() -> None:
        now = 100.0
        box = Mailbox(1, clock=lambda: now)
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        assert not box.stalled(1e9, 5)  # it waits for the engine
        box.put(Chunk(0, [1], "a", None, FINISH))
        assert not box.stalled(1e9, 5)  # it has been woken
        assert (await reader) is not None
        assert not box.stalled(104.9, 5) and box.stalled(105, 5)
        now = 104.0
        assert await box.take() is None
        assert not box.stalled(108.9, 5) and box.stalled(109, 5)  # and an answer that leaves as a whole

    kit.run(story())
