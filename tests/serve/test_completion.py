"""A buffer merges what its reader has not taken, and loses nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from jaxspec.events import Delta, Finished
from jaxspec.request import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from serve.core.completion import Buffer, Deadlines, Stage
from serve.core.errors import StatusError

ENDS = [
    Finished(
        "r", i, FinishReason.LENGTH, RequestOutput("r", None, [1], [CompletionOutput(i, [], "")], RequestMetrics())
    )
    for i in range(2)
]
ERROR = StatusError(grpc.StatusCode.UNAVAILABLE, "gone")


def test_untaken_deltas_are_merged_by_completion(kit: Any) -> None:
    async def story() -> None:
        box = Buffer(2)
        one, two, three = ({t: Logprob(t, -0.5)} for t in (1, 2, 3))
        box.put(Delta("r", 0, [1], "a", [one]))
        box.put(Delta("r", 1, [7], "", None))
        box.put(Delta("r", 0, [2, 3], "bc", [two, three]))
        first = await box.take()
        assert first == Delta("r", 0, [1, 2, 3], "abc", [one, two, three])
        box.put(ENDS[0])
        assert await box.take() == Delta("r", 1, [7], "")  # the longest untaken comes first
        assert await box.take() == ENDS[0]
        box.put(Delta("r", 1, [8], "h"))
        box.put(Delta("r", 1, [9], "i"))
        box.put(ENDS[1])
        assert await box.take() == Delta("r", 1, [8, 9], "hi")
        assert await box.take() == ENDS[1]
        assert await box.take() is None and await box.take() is None

    kit.run(story())


def test_a_waiting_reader_is_woken(kit: Any) -> None:
    async def story() -> None:
        box = Buffer(1)
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.put(Delta("r", 0, [1], "a"))
        box.put(Delta("r", 0, [2], "b"))
        assert await reader == Delta("r", 0, [1, 2], "ab")
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        box.put(Delta("r", 0, [3], "c"))
        box.put(ENDS[0])  # a cancelled reader takes nothing away
        assert await box.take() == Delta("r", 0, [3], "c")
        assert await box.take() == ENDS[0]

    kit.run(story())


def test_a_failure_comes_after_what_waits_unless_that_is_dropped(kit: Any) -> None:
    async def story() -> None:
        box = Buffer(1)
        box.put(Delta("r", 0, [1], "a"))
        box.fail(ERROR)
        box.fail(StatusError(grpc.StatusCode.CANCELLED, "later"))
        assert await box.take() == Delta("r", 0, [1], "a")
        for _ in range(2):
            with pytest.raises(StatusError) as caught:
                await box.take()
            assert caught.value is ERROR
        box = Buffer(1)
        box.put(Delta("r", 0, [1], "a"))
        box.fail(ERROR, drop=True)
        with pytest.raises(StatusError):
            await box.take()
        box = Buffer(1)
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.fail(ERROR)
        with pytest.raises(StatusError):
            await reader
        box = Buffer(1)
        box.put(Delta("r", 0, [1], "a"))
        box.put(ENDS[0])
        assert await box.take() == Delta("r", 0, [1], "a")
        box.fail(ERROR)  # after the end: nobody's business
        assert await box.take() == ENDS[0]
        assert await box.take() is None

    kit.run(story())


def test_a_reader_stalls_when_it_takes_nothing_that_waits(kit: Any) -> None:
    async def story() -> None:
        now = 100.0
        box = Buffer(2, clock=lambda: now)
        assert not box.stalled(1e9, 5)
        box.put(Delta("r", 0, [1], "a"))
        now = 103.0
        box.put(Delta("r", 0, [2], "b"))
        box.put(Delta("r", 1, [3], "c"))
        assert not box.stalled(104.9, 5) and box.stalled(105, 5)
        await box.take()
        assert not box.stalled(107.9, 5) and box.stalled(108, 5)  # the other one still waits
        now = 104.0
        await box.take()
        assert not box.stalled(108.9, 5)
        box.put(Delta("r", 0, [4], "d"))
        assert box.stalled(109, 5)  # what comes meanwhile is no sign of the reader
        box.fail(ERROR, drop=True)
        assert box.stalled(109, 5)

    kit.run(story())


def test_a_reader_that_never_comes_back_from_the_last_event_stalls(kit: Any) -> None:
    async def story() -> None:
        now = 100.0
        box = Buffer(1, clock=lambda: now)
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        assert not box.stalled(1e9, 5)  # it waits for the engine
        box.put(ENDS[0])
        assert not box.stalled(1e9, 5)  # it has been woken
        assert await reader == ENDS[0]
        assert not box.stalled(104.9, 5) and box.stalled(105, 5)
        now = 104.0
        assert await box.take() is None
        assert not box.stalled(108.9, 5) and box.stalled(109, 5)  # and an answer that leaves as a whole

    kit.run(story())


@pytest.mark.parametrize(
    ("deadlines", "messages"),
    [
        (
            (1.0, 9.0, 9.0),
            (
                "the request waited longer than the server's queue_seconds to be prepared",
                "the request waited longer than the server's queue_seconds for a slot",
                None,
            ),
        ),
        (
            (1.0, 1.0, 9.0),
            (
                "the request took longer than the server's run_seconds (before it was prepared)",
                "the request took longer than the server's run_seconds (before it could start)",
                "the request took longer than the server's run_seconds (after it had started)",
            ),
        ),
        (
            (1.0, 1.0, 1.0),
            (
                "the request's deadline passed before it was prepared",
                "the request's deadline passed before it could start",
                "the request's deadline passed after it had started",
            ),
        ),
    ],
)
def test_why_a_time_is_over(deadlines: tuple[float, float, float], messages: tuple[str | None, ...]) -> None:
    limits = Deadlines(*deadlines)
    for stage, message in zip(Stage, messages, strict=True):
        if message is None:
            assert limits.until(stage) == 9.0
            continue
        error = limits.error(stage, 1.0)
        assert limits.until(stage) == 1.0 and (error.code.name, error.message) == ("DEADLINE_EXCEEDED", message)
        assert error.reason == ("queue_seconds", "run_seconds", "deadline")[deadlines.count(1.0) - 1]
