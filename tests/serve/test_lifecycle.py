"""Hangs and recovery, death, and the three phases of a drain."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from serve.core.errors import unavailable


def test_a_hang_fails_what_is_live_and_ends_when_the_step_returns(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with kit.serving(watchdog_seconds=1.0) as stack:
            states: list[str] = []
            stack.lifecycle.on_change.append(states.append)
            live = await stack.start_held(*(kit.job([1, 2, i], max_tokens=100) for i in range(6)))
            starting = asyncio.create_task(stack.start([5], request_id="late"))
            call = asyncio.create_task(stack.engine.call(lambda engine: 1))
            await asyncio.sleep(0)
            await kit.eventually(lambda: stack.lifecycle.state == "stalled")
            for waiting in (*map(kit.read, live), starting, call, stack.start([6]), stack.engine.call(lambda e: 1)):
                assert (await kit.fails(waiting, "UNAVAILABLE")).reason == "stalled"
            assert states == ["stalled"] and stack.generator.live == 0
            stack.facade.release()
            await kit.eventually(lambda: stack.lifecycle.state == "serving")
            assert states == ["stalled", "serving"]
            await stack.settled()
            assert set(stack.metrics.reasons) == {"unavailable"}
            assert len((await kit.read(await stack.start([5], request_id="late"))).tokens[0]) == 20

    with caplog.at_level(logging.WARNING, "serve"):
        kit.run(story())
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_a_hang_costs_liveness_only_when_it_lasts(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with kit.serving(watchdog_seconds=0.5) as stack:
            news: list[tuple[str, bool]] = []
            stack.lifecycle.on_change.append(lambda state: news.append((state, stack.lifecycle.alive)))
            stack.lifecycle.on_alive.append(lambda alive: news.append((stack.lifecycle.state, alive)))
            (generation,) = await stack.start_held(kit.job([1, 2, 3], max_tokens=100))
            began = time.monotonic()
            await kit.eventually(lambda: not stack.lifecycle.alive)
            assert time.monotonic() - began > 1.4 and stack.lifecycle.state == "stalled"
            await kit.eventually(lambda: len(news) == 2)
            stack.facade.release()
            await kit.eventually(lambda: stack.lifecycle.state == "serving")
            await kit.fails(kit.read(generation), "UNAVAILABLE")
            await stack.settled()
            assert news[:2] == [("stalled", True), ("stalled", False)]
            assert len(news) == 4 and ("serving", True) in news[2:] and stack.lifecycle.alive

    with caplog.at_level(logging.ERROR, "serve"):
        kit.run(story())
    assert len(caplog.records) == 2


def test_slow_steps_are_no_hang(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(watchdog_seconds=4.0) as stack:
            states: list[str] = []
            stack.lifecycle.on_change.append(states.append)
            stack.facade.hook = lambda: time.sleep(0.05)
            result = await kit.read(await stack.start([1, 2, 3], max_tokens=20, max_depth=0))
            assert len(result.tokens[0]) == 20 and states == []
            await asyncio.sleep(1.2)  # and an idle engine is not at work
            assert stack.lifecycle.state == "serving"

    kit.run(story())


def test_death_leaves_nobody_waiting(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            states: list[str] = []
            stack.lifecycle.on_change.append(states.append)
            alive: list[bool] = []
            stack.lifecycle.on_alive.append(alive.append)
            live = await stack.start_held(*(kit.job([1, 2, i], max_tokens=100, n=2) for i in range(5)))
            starting = asyncio.create_task(stack.start([5]))
            call = asyncio.create_task(stack.engine.call(lambda engine: 1))
            await asyncio.sleep(0.05)
            stack.facade.error = RuntimeError("the device is lost")
            stack.facade.release()
            for waiting in (*map(kit.read, live), starting, call):
                assert (await kit.fails(waiting, "UNAVAILABLE")).reason == "dead"
            for later in (stack.start([6]), stack.engine.call(lambda engine: 1), stack.engine.ready()):
                assert (await kit.fails(later, "UNAVAILABLE")).reason == "dead"
            assert alive == [False]
            assert states == ["dead"] and isinstance(stack.engine.error, RuntimeError)
            assert await stack.generator.abort(["job-1"]) == 0
            assert stack.generator.live == stack.generator.in_engine == 0 and not stack.generator._by_id
            assert stack.metrics.reasons == ["error"] * 10
            await asyncio.wait_for(stack.lifecycle.drain(), 10)

    with caplog.at_level(logging.ERROR, "serve"):
        kit.run(story())
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None
    assert "the device is lost" in caplog.text


def test_a_drain_accepts_then_refuses_then_lets_finish(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(withdrawal_seconds=1.0, drain_seconds=60) as stack:
            states: list[str] = []
            stack.lifecycle.on_change.append(states.append)
            stack.facade.hook = lambda: time.sleep(0.01)
            before = await stack.start([1, 2, 3], max_tokens=100)
            drain = asyncio.create_task(stack.lifecycle.drain())
            await kit.eventually(lambda: stack.lifecycle.state == "draining")
            during = await stack.start([4, 5], max_tokens=100)
            assert states == ["draining"]
            await kit.eventually(lambda: stack.generator._refusal is not None)
            for _ in range(2):
                assert (await kit.fails(stack.start([6]), "UNAVAILABLE")).reason == "draining"
            assert not drain.done()  # neither has been read to its end
            results = await asyncio.gather(kit.read(before), kit.read(during))
            assert [len(result.tokens[0]) for result in results] == [100, 100]
            await drain
            assert stack.lifecycle.state == "draining" and states == ["draining"]
            await stack.settled()
            await asyncio.wait_for(stack.lifecycle.drain(), 10)  # there is nothing left to do

    kit.run(story())


def test_a_drain_aborts_what_is_left_at_its_deadline(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(withdrawal_seconds=60, drain_seconds=60) as stack:
            stack.facade.hook = lambda: time.sleep(0.05)
            generations = [await stack.start([1, 2, i], max_tokens=100) for i in range(6)]
            readers = [asyncio.create_task(kit.read(generation)) for generation in generations]
            first = asyncio.create_task(stack.lifecycle.drain())
            await asyncio.sleep(0.05)
            assert not first.done()
            await asyncio.wait_for(stack.lifecycle.drain(0.1), 20)  # a later call may only shorten it
            await asyncio.wait_for(first, 5)
            for reader in readers:
                assert (await kit.fails(reader, "UNAVAILABLE")).reason == "draining"
            await stack.settled()
            assert stack.metrics.reasons == ["unavailable"] * 6
            await kit.fails(stack.start([6]), "UNAVAILABLE")

    kit.run(story())


def test_a_longer_grace_does_not_extend_a_drain(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            stack.facade.hook = lambda: time.sleep(0.05)
            reader = asyncio.create_task(kit.read(await stack.start([1, 2, 3], max_tokens=100)))
            await asyncio.gather(stack.lifecycle.drain(0.1), stack.lifecycle.drain(1000.0))
            await kit.fails(reader, "UNAVAILABLE")

    kit.run(story())


def test_a_caller_that_leaves_does_not_end_the_drain(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(withdrawal_seconds=0.1) as stack:
            caller = asyncio.create_task(stack.lifecycle.drain())
            await kit.eventually(lambda: stack.lifecycle.state == "draining")
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            await stack.lifecycle.drain()
            assert (await kit.fails(stack.start([1]), "UNAVAILABLE")).reason == "draining"

    kit.run(story())


def test_errors_of_many_readers_are_their_own(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            generations = [await stack.start([1, 2, i], max_tokens=100) for i in range(3)]
            stack.generator.fail_all(unavailable("gone", "test"))
            errors = [await kit.fails(kit.read(generation), "UNAVAILABLE") for generation in generations]
            assert len(set(map(id, errors))) == 3
            await stack.settled()

    kit.run(story())
