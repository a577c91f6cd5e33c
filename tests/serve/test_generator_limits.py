"""What bounds generations: their time, from when they arrive, and the room of the queue and of what nobody reads."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import pytest


def test_finished_output_that_nobody_reads_is_bounded(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(max_waiting=2) as stack:  # and 4 slots
            unread = []
            for _ in range(6):
                unread.append(await stack.start([1], max_tokens=1))
                await kit.eventually(lambda: stack.generator.in_engine == 0)
            error = await kit.fails(stack.start([1], max_tokens=1), "RESOURCE_EXHAUSTED")
            assert error.reason == "unread" and error.retry_seconds is not None
            assert len((await kit.read(unread[0])).tokens[0]) == 1
            assert len((await kit.read(await stack.start([1], max_tokens=2))).tokens[0]) == 2
            for generation in unread:
                generation.close()
            assert stack.generator.live == 0
            await stack.settled()

    kit.run(story())


def test_output_is_unread_until_its_call_is_over(kit: Any, clock: Any) -> None:
    async def story() -> None:
        async with kit.serving(stall_seconds=1000.0) as stack:
            sweep = stack.generator._sweep  # as its timer does, about every second
            ended: list[str] = []
            delivered = await stack.start([1], max_tokens=1)
            delivered.on_stall = lambda: ended.append("delivered")
            stuck = await stack.start([1], max_tokens=1)
            stuck.on_stall = lambda: ended.append("stuck")
            for generation in (delivered, stuck):
                await kit.read(generation)  # to its end, and closed, while the last write is under way
            assert stack.generator.live == 2
            delivered.delivered()
            assert stack.generator.live == 1
            sweep()
            assert not ended
            clock.ahead += 1000
            sweep()
            assert ended == ["stuck"]
            assert stack.generator.live == 0
            assert stack.metrics.refused == [("CANCELLED", "stalled_reader")]
            stuck.delivered()
            clock.ahead += 1000
            sweep()
            assert ended == ["stuck"]

    kit.run(story())


def test_deadlines_and_time_outs(kit: Any, clock: Any) -> None:
    async def story() -> None:
        async with kit.serving(**limits) as stack:
            now = clock.monotonic
            error = await kit.fails(stack.start([1], deadline=now() - 0.1), "DEADLINE_EXCEEDED")
            assert error.reason == "deadline" and stack.facade.steps == 0

            async def advance(steps: int) -> None:
                stack.facade.advance(steps)
                await kit.eventually(stack.facade.held.is_set)

            running = await stack.start_held(*(kit.job([1, i], max_tokens=100, max_depth=0) for i in range(4)))
            readers = [asyncio.create_task(kit.read(generation)) for generation in running]
            await advance(12)
            stack.facade.idle = True
            stack.facade.release()
            queued, hurried = await stack.start_held(
                kit.job([9], max_tokens=5), kit.job([8], max_tokens=5, deadline=now() + 150)
            )
            for generation, reason, seconds in ((hurried, "deadline", 160), (queued, "queue_seconds", 50)):
                clock.ahead += seconds
                reading = asyncio.create_task(kit.read(generation))
                while not reading.done():  # the loop sees the time after one step, the engine hears before the next
                    await advance(1)
                assert (await kit.fails(reading, "DEADLINE_EXCEEDED")).reason == reason
            for _, reason, _, metrics in stack.metrics.finished:
                assert reason == "timeout" and metrics.first_scheduled_time is None and metrics.output_tokens == 0
            assert len(stack.metrics.finished) == 2
            clock.ahead += 200
            stack.facade.release()
            for reader in readers:
                assert (await kit.fails(reader, "DEADLINE_EXCEEDED")).reason == "run_seconds"
            await stack.settled()
            assert stack.metrics.reasons == ["timeout"] * 6
            assert all(metrics.output_tokens > 0 for *_, metrics in stack.metrics.finished[2:])
            # A deadline in mid-stream.
            (cut,) = await stack.start_held(kit.job([1], max_tokens=100, max_depth=0, deadline=now() + 150))
            await advance(12)
            clock.ahead += 160
            stack.facade.release()
            assert (await kit.fails(kit.read(cut), "DEADLINE_EXCEEDED")).reason == "deadline"
            await stack.settled()
            assert stack.metrics.finished[-1][3].output_tokens > 0

    limits: Any = dict(queue_seconds=200.0, run_seconds=400.0, watchdog_seconds=1e6, stall_seconds=1e6)
    kit.run(story())


def test_a_call_that_its_deadline_ends_counts_as_late(kit: Any) -> None:
    """gRPC cancels it without a word, and may do so before the engine's thread has looked at the time.

    Or before the deadline that it told: it sends 9.91 seconds as 10.
    """

    async def story() -> None:
        async with kit.serving() as stack:
            late, rounded, before, left = await stack.start_held(
                *(kit.job([i], max_tokens=50, max_depth=0, deadline=time.monotonic() + 600) for i in (1, 2, 3, 4))
            )
            late.job = dataclasses.replace(late.job, deadline=time.monotonic())
            for request, seconds in ((rounded, 0.08), (before, 60)):
                request.arrived = time.monotonic() - 9.9
                request.job = dataclasses.replace(request.job, deadline=time.monotonic() + seconds)
            for request in (late, rounded, before, left):
                request.close()
            stack.facade.release()
            await stack.settled()
            assert sorted(stack.metrics.reasons) == ["abort", "abort", "timeout", "timeout"]
            assert stack.metrics.refused == [("DEADLINE_EXCEEDED", "deadline")] * 2

    kit.run(story())


def test_a_request_arrives_before_it_is_prepared(kit: Any) -> None:
    class Slow:
        def encode(self, text: str, **options: Any) -> list[int]:
            time.sleep(0.2)
            return [1]

    async def story() -> None:
        async with kit.serving() as stack:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stack.engine, "facts", dataclasses.replace(stack.engine.facts, tokenizer=Slow()))
                await kit.read(await stack.start("a", max_tokens=2))
            *_, metrics = stack.metrics.finished[0]
            assert metrics.first_scheduled_time - metrics.arrival_time >= 0.2 and metrics.ttft > 0.2
            await stack.settled()

    kit.run(story())


def test_time_limits_cover_the_preparation(kit: Any) -> None:
    go, begun = threading.Event(), []

    class Slow:
        def encode(self, text: str, **options: Any) -> list[int]:
            begun.append(text)
            assert go.wait(60)
            return [1]

    async def story() -> None:
        async with kit.serving(queue_seconds=0.5, run_seconds=30.0) as stack:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stack.engine, "facts", dataclasses.replace(stack.engine.facts, tokenizer=Slow()))
                starts = (
                    stack.start("a"),
                    stack.start("a", deadline=time.monotonic() + 0.2),
                    stack.generator.tokenize("a"),
                )
                errors = await asyncio.gather(*(kit.fails(start, "DEADLINE_EXCEEDED") for start in starts))
                assert [error.reason for error in errors] == ["queue_seconds", "deadline", "queue_seconds"]
                # Those that the threads are at still count; a thread may have had no time to begin.
                await kit.eventually(lambda: stack.generator._preparation.preparing == len(begun))
                assert stack.generator.live == 0 and len(begun) <= 2
                go.set()
                await kit.eventually(lambda: stack.generator._preparation.preparing == 0)
            assert not stack.metrics.finished
            await stack.settled()

    kit.run(story())


def test_a_server_that_stops_says_so_to_what_is_being_prepared(kit: Any) -> None:
    go = threading.Event()

    class Slow:
        def encode(self, text: str, **options: Any) -> list[int]:
            assert go.wait(60)
            return [1]

    async def story() -> None:
        async with kit.serving() as stack:
            patched = dataclasses.replace(stack.engine.facts, tokenizer=Slow())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stack.engine, "facts", patched)
                calls = [stack.start("a"), stack.generator.tokenize("a"), stack.generator.tokenize("b")]
                asked = [asyncio.ensure_future(call) for call in calls]
                await asyncio.sleep(0.05)
                stack.generator.close()
                for call in [*asked, stack.start("a"), stack.generator.tokenize("a")]:
                    assert (await kit.fails(call, "UNAVAILABLE")).reason == "stopped"
                go.set()
                await kit.eventually(lambda: stack.generator._preparation.preparing == 0)

    kit.run(story())


def test_a_burst_cannot_overshoot_the_queue(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(max_waiting=3) as stack:
            stack.facade.idle = True
            starts = [stack.start([1, 2], max_tokens=100) for _ in range(40)]
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
            admitted = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
            refused = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            assert len(admitted) == 4 + 3
            assert {error.code.name for error in refused} == {"RESOURCE_EXHAUSTED"}  # pyright: ignore
            stack.facade.idle = False
            results = await asyncio.gather(*(kit.read(generation) for generation in admitted))
            assert all(len(result.tokens[0]) == 100 for result in results)  # whoever is in, stays in
            await stack.settled()

    kit.run(story())


def test_the_pages_of_the_queue_are_bounded(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(max_waiting_pages=30) as stack:
            stack.facade.hook = lambda: time.sleep(0.05)
            running = [await stack.start([i], max_tokens=100, max_depth=0) for i in range(4)]
            await kit.eventually(lambda: stack.generator._admission.waiting == 0)
            queued = [await stack.start([i], max_tokens=100) for i in range(2)]  # 14 pages each
            assert (await kit.fails(stack.start([1], max_tokens=100), "RESOURCE_EXHAUSTED")).reason == "queue_pages"
            queued.append(await stack.start([1], max_tokens=3))
            for generation in running + queued:
                generation.close()
            await stack.settled()

    kit.run(story())


def test_requests_without_a_length_count_with_their_prompts(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(max_waiting_pages=30) as stack:
            stack.facade.hook = lambda: time.sleep(0.05)
            running = [await stack.start([i], max_tokens=100, max_depth=0) for i in range(4)]
            await kit.eventually(lambda: stack.generator._admission.waiting == 0)
            queued = [await stack.start([i] * 20, fill_context=True, n=2) for i in range(3)]  # 16 pages, 4 counted
            assert stack.generator._admission.waiting_pages == 24 and stack.generator.waiting_prompt_tokens == 120
            stack.facade.hook = None
            for generation in running:
                generation.close()
            assert [len(tokens) for g in queued for tokens in (await kit.read(g)).tokens] == [100] * 6
            assert stack.generator.waiting_prompt_tokens == 0
            await stack.settled()

    kit.run(story())
