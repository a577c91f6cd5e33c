"""The engine's thread: who steps, who waits for whom, and what the loop hears."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import Any

import pytest

from serve.core.commands import Built, Stop
from serve.core.engine_core import SNAPSHOT_SECONDS, EngineCore
from serve.core.errors import StatusError


def test_one_thread_builds_and_steps_and_it_is_not_the_loops(kit: Any) -> None:
    seen: set[int] = set()

    async def story() -> None:
        facade = kit.clean()
        facade.hook = lambda: seen.add(threading.get_ident())

        def build() -> Any:
            seen.add(threading.get_ident())
            return facade

        async with kit.serving(build=build) as stack:
            await kit.read(await stack.start([1, 2, 3]))
            assert seen == {await stack.engine.call(lambda engine: threading.get_ident())}
            assert threading.get_ident() not in seen

    kit.run(story())


def test_calls_run_between_steps_and_give_back_results_and_errors(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            assert await stack.engine.call(lambda engine: engine.facts.sizes.max_seq_len) == 120
            with pytest.raises(ZeroDivisionError):
                await stack.engine.call(lambda engine: 1 // 0)
            generation = await stack.start([1, 2, 3], max_tokens=60)
            results = await asyncio.gather(*(stack.engine.call(lambda engine, i=i: i) for i in range(50)))
            assert results == list(range(50))
            await kit.read(generation)
            caller = asyncio.create_task(stack.engine.call(lambda engine: 1))
            await asyncio.sleep(0)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            await stack.settled()

    kit.run(story())


def test_an_idle_thread_sleeps(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            await kit.read(await stack.start([1, 2, 3]))
            await stack.settled()
            await stack.engine.call(lambda engine: None)
            await kit.eventually(lambda: stack.engine.step_seconds == 0)
            steps, published = stack.facade.steps, len(stack.metrics.stats)
            await asyncio.sleep(3 * SNAPSHOT_SECONDS)
            assert (stack.facade.steps, len(stack.metrics.stats)) == (steps, published)
            assert stack.engine.step_seconds == 0
            assert stack.engine.snapshot == stack.metrics.stats[-1] and stack.engine.snapshot.running == 0

    kit.run(story())


def test_a_step_wakes_the_loop_at_most_once(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            loop, calls = asyncio.get_running_loop(), []
            original = loop.call_soon_threadsafe

            def counted(*args: Any, **kwargs: Any) -> Any:
                if threading.current_thread().name == "engine":
                    calls.append(1)
                return original(*args, **kwargs)

            monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
            generations = await stack.start_held(*(kit.job([1, 2, i], max_tokens=40) for i in range(4)))
            stack.facade.release()
            await asyncio.gather(*(kit.read(generation) for generation in generations))
            # And when it falls idle, which it may do for the first time only now.
            assert 0 < len(calls) <= stack.facade.steps + 2

    kit.run(story())


def test_jobs_that_do_not_stream_are_heard_of_at_the_end_only(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            (generation,) = await stack.start_held(kit.job([1, 2, 3], max_tokens=40, logprobs=1))
            reading = asyncio.create_task(kit.read(generation))
            stack.facade.advance(3)
            await kit.eventually(stack.facade.held.is_set)
            await asyncio.sleep(0)  # what was said before has been taken
            stack.facade.release()
            streamed = await reading
            whole = await kit.read(await stack.start([1, 2, 3], max_tokens=40, logprobs=1, stream=False))
            assert whole.deltas == 0 and streamed.deltas > 1
            assert (whole.tokens, whole.text) == (streamed.tokens, streamed.text)
            for heard, told in zip(whole.logprobs[0], streamed.logprobs[0], strict=True):
                assert heard.keys() == told.keys()  # their values round as the rounds' shapes do
                for token in heard:
                    assert heard[token].logprob == pytest.approx(told[token].logprob, abs=1e-4)

    kit.run(story())


def test_it_cannot_be_asked_before_it_is_built(kit: Any) -> None:
    async def story() -> None:
        built, facade = threading.Event(), kit.clean()

        def build() -> Any:
            assert built.wait(100)
            return facade

        async with kit.serving(build=build, wait=False, watchdog_seconds=0.02) as stack:
            assert stack.engine.state == stack.lifecycle.state == "starting" and stack.engine.facts is None
            for attempt in (stack.engine.call(lambda engine: 1), stack.start([1])):
                assert (await kit.fails(attempt, "UNAVAILABLE")).reason == "starting"
            await kit.fails(stack.generator.tokenize("ab"), "UNAVAILABLE")
            await asyncio.sleep(0.2)  # building takes longer than any step may
            assert stack.lifecycle.state == "starting"
            built.set()
            await stack.engine.ready()
            assert stack.engine.state == "serving" and stack.engine.snapshot is not None

    kit.run(story())


@pytest.mark.parametrize(
    "error", [ValueError("no such checkpoint"), RuntimeError("no such device")], ids=["configuration", "device"]
)
def test_an_engine_that_cannot_be_built_is_dead(kit: Any, caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    """What is wrong with its configuration is said in a line, anything else with the traceback."""

    def build() -> Any:
        raise error

    async def story() -> None:
        async with kit.serving(build=build, wait=False) as stack:
            assert (await kit.fails(stack.engine.ready(), "UNAVAILABLE")).reason == "dead"
            assert stack.lifecycle.state == "dead" and stack.engine.error is error
            await kit.fails(stack.engine.call(lambda engine: 1), "UNAVAILABLE")
            await kit.fails(stack.start([1]), "UNAVAILABLE")

    with caplog.at_level(logging.CRITICAL, "serve"):
        kit.run(story())
    (record,) = caplog.records
    assert (record.exc_info is None) == isinstance(error, ValueError) and str(error) in caplog.text


def test_stop_ends_what_is_live_and_can_be_repeated(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            generations = await stack.start_held(*(kit.job([1, 2, 3], max_tokens=100) for _ in range(6)))
            stack.facade.advance(6)  # some run, some wait
            await kit.eventually(stack.facade.held.is_set)
            stopping = asyncio.create_task(stack.engine.stop())
            await asyncio.sleep(0)
            stack.facade.release()
            await stopping
            await stack.engine.stop()
            assert stack.engine.state == "stopped"
            for generation in generations:
                assert (await kit.fails(kit.read(generation), "UNAVAILABLE")).reason == "stopped"
            await kit.fails(stack.engine.call(lambda engine: 1), "UNAVAILABLE")
            assert stack.metrics.reasons == ["unavailable"] * 6
            stats = kit.engine.stats
            assert stats.free_pages + stats.cached_pages == kit.engine.facts.sizes.num_pages
            assert stack.generator.live == stack.generator.in_engine == 0

    kit.run(story())


def test_a_burst_is_taken_in_by_and_by_in_order_and_whole(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.core.engine_core.INTAKE_COMPLETIONS", 4)
    monkeypatch.setattr("serve.core.engine_core.INTAKE_TOKENS", 40)
    monkeypatch.setattr("serve.core.engine_core.SNAPSHOT_SECONDS", 0.0)

    async def story() -> None:
        async with kit.serving() as stack:
            taken: list[tuple[int, int, int]] = []  # turn, which prompt, its size
            order: list[list[int]] = []
            (running,) = await stack.start_held(kit.job([1], max_tokens=100))
            add = kit.engine.add

            def counted(tokens: Any, params: Any, **options: Any) -> str:
                if not order or order[-1] is not tokens:
                    order.append(tokens)
                taken.append((stack.facade.steps, len(order), len(tokens)))
                return add(tokens, params, **options)

            with monkeypatch.context() as patch:
                patch.setattr(kit.engine, "add", counted)
                jobs = [kit.job([i % 12] * (30 if i % 5 == 0 else 3), max_tokens=2, n=1 + i % 3) for i in range(20)]
                jobs.append(kit.job([1] * 60, max_tokens=2, n=6))  # more than a turn's share, and yet one prompt
                gone = kit.job([2], max_tokens=2)
                starts = [asyncio.create_task(stack.generator.start(job)) for job in (*jobs, gone)]
                await kit.eventually(lambda: len(stack.generator._open) == len(jobs) + 2)
                await asyncio.sleep(0.05)
                assert await stack.generator.abort([gone.request_id]) == 1  # before the engine has heard of it
                stack.facade.release()
                *generations, error = await asyncio.gather(*starts, return_exceptions=True)
                assert isinstance(error, StatusError) and error.reason == "aborted"
                results = await asyncio.gather(*(kit.read(generation) for generation in generations))
            assert [len(result.tokens) for result in results] == [job.params.n for job in jobs]
            assert order == [list(job.prompt) for job in jobs]
            assert len(taken) == sum(job.params.n for job in jobs)  # the aborted one never reached it
            waiting = max(stats.waiting for stats in stack.metrics.stats)
            assert waiting >= len(taken) - 12  # also those that have not been taken in
            by_turn: dict[int, list[tuple[int, int]]] = {}
            for turn, prompt, size in taken:
                by_turn.setdefault(turn, []).append((prompt, size))
            for shares in by_turn.values():
                one_prompt = len({prompt for prompt, _ in shares}) == 1
                assert one_prompt or (len(shares) <= 4 and sum(size for _, size in shares) <= 40)
            assert len(by_turn) > 8
            await kit.read(running)
            await stack.settled()

    kit.run(story())


def test_what_was_submitted_and_not_taken_in_ends_with_the_thread(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.core.engine_core.INTAKE_COMPLETIONS", 1)

    async def story() -> None:
        async with kit.serving() as stack:
            stack.facade.hold()
            starts = [asyncio.create_task(stack.start([1, i], max_tokens=50)) for i in range(6)]
            await kit.eventually(stack.facade.held.is_set)
            stopping = asyncio.create_task(stack.engine.stop())
            await asyncio.sleep(0.05)
            stack.facade.release()
            for start in starts[1:]:
                assert (await kit.fails(start, "UNAVAILABLE")).reason == "stopped"
            await stopping
            await kit.fails(kit.read(await starts[0]), "UNAVAILABLE")
            assert stack.generator.live == 0 and not stack.engine._link.alive

    kit.run(story())


def test_observers_that_fail_end_nothing(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            def fail(*args: Any) -> None:
                raise RuntimeError(f"{name} is broken")

            fail.__name__ = name
            return fail

    async def story() -> None:
        async with kit.serving(metrics=Broken()) as stack:
            result = await kit.read(await stack.start([1, 2, 3], max_tokens=30))
            assert len(result.tokens[0]) == 30
            (aborted,) = await stack.start_held(kit.job([1, 2, 3], max_tokens=100))
            assert await stack.generator.abort([aborted.job.request_id]) == 1
            await kit.fails(kit.read(aborted), "CANCELLED")
            stack.facade.release()
            await kit.fails(stack.start([]), "INVALID_ARGUMENT")
            await stack.settled()
            assert stack.engine.state == "serving"

    with caplog.at_level(logging.ERROR, "serve"):
        kit.run(story())
    messages = sorted(record.getMessage().split()[0] for record in caplog.records)
    assert messages == ["on_finished", "on_refused", "on_round", "on_stats", "on_tokens"]  # each once


def test_death_is_told_whatever_fails_on_the_way(
    kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            (generation,) = await stack.start_held(kit.job([1, 2, 3], max_tokens=100))

            def broken(*args: Any) -> None:
                raise RuntimeError("the account is broken too")

            monkeypatch.setattr(stack.engine._live, "bury", broken)
            stack.facade.error = RuntimeError("the device is lost")
            stack.facade.release()
            assert (await kit.fails(kit.read(generation), "UNAVAILABLE")).reason == "dead"
            assert stack.lifecycle.state == "dead" and str(stack.engine.error) == "the device is lost"

    with caplog.at_level(logging.ERROR, "serve"):
        kit.run(story())
    assert [record.levelname for record in caplog.records] == ["CRITICAL", "ERROR"]


def test_what_exists_when_the_engine_is_built_is_no_garbage(kit: Any) -> None:
    told: list[Any] = []
    core = EngineCore(lambda on_compiled: kit.clean(), lambda engine: "what it is like", told.append, freeze=True)
    core.commands.put(Stop())
    existing: list[Any] = [[]]
    collected = lambda: any(one is existing for one in gc.get_objects())  # frozen ones are left out
    assert collected()
    core.run()
    assert not collected() and gc.get_freeze_count() > 10_000
    assert isinstance(told[0], Built) and told[0].description == "what it is like"
