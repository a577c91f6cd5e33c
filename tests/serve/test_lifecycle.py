"""Hangs and recovery, death, and the three phases of a drain."""

from __future__ import annotations

import asyncio
import logging
import time
import types
from typing import Any

import pytest

from serve.core.errors import unavailable
from serve.core.looks import Looks


def test_a_hang_fails_what_is_live_and_ends_when_the_step_returns(
    kit: Any, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with kit.serving(watchdog_seconds=100.0, queue_seconds=500.0) as stack:
            states: list[str] = []
            stack.lifecycle.on_change.append(states.append)
            live = await stack.start_held(*(kit.job([1, 2, i], max_tokens=100) for i in range(6)))
            starting = asyncio.create_task(stack.start([5], request_id="late"))
            call = asyncio.create_task(stack.engine.call(lambda engine: 1))
            await asyncio.sleep(0)
            clock.ahead += 101
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


def test_a_hang_costs_liveness_only_when_it_lasts(kit: Any, clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with kit.serving(watchdog_seconds=100.0, queue_seconds=500.0) as stack:
            news: list[tuple[str, bool]] = []
            stack.lifecycle.on_change.append(lambda state: news.append((state, stack.lifecycle.alive)))
            stack.lifecycle.on_alive.append(lambda alive: news.append((stack.lifecycle.state, alive)))
            (generation,) = await stack.start_held(kit.job([1, 2, 3], max_tokens=100))
            clock.ahead += 200
            await kit.eventually(lambda: stack.lifecycle.state == "stalled")
            assert stack.lifecycle.alive
            clock.ahead += 101
            assert not stack.lifecycle.alive
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


def test_slow_steps_are_no_hang(kit: Any, clock: Any) -> None:
    limits: Any = dict(queue_seconds=1e6, run_seconds=1e6, stall_seconds=1e6)

    async def story() -> None:
        async with kit.serving(watchdog_seconds=1e4, **limits) as stack:
            states: list[str] = []
            stack.lifecycle.on_change.append(states.append)
            (generation,) = await stack.start_held(kit.job([1, 2, 3], max_tokens=100, max_depth=0))
            reading = asyncio.create_task(kit.read(generation))
            look = stack.lifecycle._check_step  # as its timer does, about every second
            for _ in range(10):  # each of them takes long, and all of them nine times as long as one may
                clock.ahead += 9e3
                look()
                stack.facade.advance()
                await kit.eventually(stack.facade.held.is_set)
                await kit.eventually(lambda: stack.engine.step_seconds < 5e3)
            stack.facade.release()
            assert len((await reading).tokens[0]) == 100
            await kit.eventually(lambda: stack.engine.step_seconds == 0)
            clock.ahead += 1e5  # and an idle engine is not at work
            look()
            assert states == [] and stack.lifecycle.state == "serving"

    kit.run(story())


def test_a_process_that_stood_still_takes_nothing_for_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that comes late says nothing, but one of two does."""
    now, seen, timers = 0.0, list[float](), list[tuple[float, Any]]()

    def call_later(seconds: float, callback: Any) -> Any:
        timers.append((now + seconds, callback))
        return types.SimpleNamespace(when=lambda when=now + seconds: when, cancel=timers.clear)

    monkeypatch.setattr(
        asyncio, "get_running_loop", lambda: types.SimpleNamespace(time=lambda: now, call_later=call_later)
    )
    looks = Looks(lambda: (seen.append(now), looks.schedule())[0], 1.0)
    looks.schedule()
    looks.schedule()
    for late in (0.0, 0.9, 1.1, 0.0, 5.0, 5.0, 5.0, 0.5):
        ((due, callback),) = timers
        timers.clear()
        now = due + late
        callback()
    assert seen == pytest.approx([1.0, 2.9, 6.0, 18.0, 25.5])
    looks.cancel()
    assert not timers


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
            await asyncio.wait_for(stack.lifecycle.drain(), 100)

    with caplog.at_level(logging.ERROR, "serve"):
        kit.run(story())
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None
    assert "the device is lost" in caplog.text


def test_a_drain_accepts_then_refuses_then_lets_finish(kit: Any, clock: Any) -> None:
    limits: Any = dict(drain_seconds=1e4, queue_seconds=1e4, run_seconds=1e4, stall_seconds=1e4, watchdog_seconds=1e4)

    async def story() -> None:
        async with kit.serving(withdrawal_seconds=100.0, **limits) as stack:
            states: list[str] = []
            stack.lifecycle.on_change.append(states.append)
            stack.facade.hook = lambda: time.sleep(0.01)
            before = await stack.start([1, 2, 3], max_tokens=100)
            drain = asyncio.create_task(stack.lifecycle.drain())
            await kit.eventually(lambda: stack.lifecycle.state == "draining")
            during = await stack.start([4, 5], max_tokens=100)
            assert states == ["draining"]
            clock.ahead += 101
            again = asyncio.create_task(stack.lifecycle.drain())  # looks at the time
            await kit.eventually(lambda: stack.generator._refusal is not None)
            for _ in range(2):
                assert (await kit.fails(stack.start([6]), "UNAVAILABLE")).reason == "draining"
            assert not drain.done() and not again.done()  # neither has been read to its end
            results = await asyncio.gather(kit.read(before), kit.read(during))
            assert [len(result.tokens[0]) for result in results] == [100, 100]
            await asyncio.gather(drain, again)
            assert stack.lifecycle.state == "draining" and states == ["draining"]
            await stack.settled()
            await asyncio.wait_for(stack.lifecycle.drain(), 100)  # there is nothing left to do

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
            await stack.lifecycle.drain(0.1)  # a later call may only shorten it
            await first
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
