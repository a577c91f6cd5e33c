"""Generations that end before their texts do: every way leaves nothing behind, and slow readers lose nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import time
import weakref
from typing import Any

import numpy as np
import pytest

from jaxspec.events import Delta
from jaxspec.request import FinishReason, SamplingParams
from jaxspec.text.grammar import GrammarSpec
from jaxspec.text.matcher import Matcher


def test_cancelled_while_queued_in_prefill_and_in_decode(kit: Any) -> None:
    reference = [([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))]
    expected = kit.offline(reference)[0]

    async def story() -> None:
        async with kit.serving() as stack:
            finished = stack.metrics.finished
            (neighbour,) = await stack.start_held(kit.job([1, 2, 3], max_tokens=60))
            # In prefill: three more chunks would follow.
            start = asyncio.create_task(stack.start([5] * 60, max_tokens=50))
            await kit.eventually(lambda: stack.generator.in_engine == 2)
            stack.facade.advance(2)
            generation = await start
            await kit.eventually(stack.facade.held.is_set)
            generation.close()
            stack.facade.release()
            await kit.eventually(lambda: len(finished) >= 1)  # the neighbour may be done as well
            (_, reason, prompt, metrics) = finished[0]
            assert (reason, prompt, metrics.first_token_time) == ("abort", 60, None)
            kit.agrees(await kit.read(neighbour), expected)
            # In decode.
            stack.facade.hold(3)
            generation = await stack.start([6, 7], max_tokens=100)
            assert (await anext(generation)).token_ids
            generation.close()
            generation.close()
            stack.facade.release()
            await kit.eventually(lambda: len(finished) == 3)
            assert 0 < finished[2][3].output_tokens < 100
            with pytest.raises(Exception) as caught:
                await anext(generation)
            assert caught.value.code.name == "CANCELLED"  # pyright: ignore[reportAttributeAccessIssue]
            # In the queue.
            *running, queued = await stack.start_held(*(kit.job([1, i], max_tokens=100) for i in range(5)))
            queued.close()
            stack.facade.release()
            await kit.eventually(lambda: len(finished) >= 4)
            assert finished[3][3].first_scheduled_time is None
            for generation in running:
                generation.close()
            await stack.settled()
            assert stack.generator.live == 0 and not stack.metrics.refused

    kit.run(story())


@pytest.mark.parametrize("prompt", ["bcd", [1, 2, 3]])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
def test_a_start_that_is_cancelled_leaves_no_orphan(kit: Any, prompt: Any, turns: int) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            stack.facade.hold()
            first = asyncio.create_task(stack.start([1]))
            await kit.eventually(stack.facade.held.is_set)
            starting = asyncio.create_task(stack.start(prompt, n=2, max_tokens=100))
            for _ in range(turns):
                await asyncio.sleep(0.002)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert stack.generator.live == 1
            stack.facade.release()
            await kit.read(await first)
            await stack.settled()
            assert stack.generator.live == 0

    kit.run(story())


def test_closed_before_the_first_iteration_and_never_iterated(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            generation = await stack.start([1, 2], max_tokens=100, n=3)
            generation.close()
            await stack.settled()
            assert stack.metrics.reasons == ["abort"] * 3
            done = await stack.start([1, 2], max_tokens=3)
            await kit.eventually(lambda: stack.generator.in_engine == 0)
            done.close()  # after its end, unread
            await stack.settled()
            assert stack.generator.live == 0 and stack.metrics.reasons == ["abort"] * 3 + ["length"]

    kit.run(story())


def test_closing_wakes_a_reader(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            (generation,) = await stack.start_held(kit.job([1, 2], max_tokens=100))
            reader = asyncio.create_task(kit.read(generation))
            await asyncio.sleep(0.01)
            generation.close()
            await kit.fails(reader, "CANCELLED")
            stack.facade.release()
            await stack.settled()

    kit.run(story())


def test_abort_by_id_is_idempotent_in_a_storm(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(max_waiting_pages=1000) as stack:
            g = stack.generator
            jobs = [kit.job([1, i], request_id=f"r{i}", max_tokens=100, n=2) for i in range(8)]
            generations = await stack.start_held(*jobs)
            stack.facade.advance(6)  # some run, some wait
            await kit.eventually(stack.facade.held.is_set)
            readers = [asyncio.create_task(kit.read(generation)) for generation in generations]
            names = [f"r{i}" for i in range(8)]
            assert await g.abort(["nobody"]) == 0
            assert await g.abort(["r0", "r0", "nobody"]) == 1
            counts = await asyncio.gather(*(g.abort(names) for _ in range(50)))
            assert sum(counts) == 7
            for reader in readers:
                assert (await kit.fails(reader, "CANCELLED")).reason == "aborted"
            stack.facade.release()
            await stack.settled()
            assert stack.metrics.reasons == ["abort"] * 16 and not stack.metrics.refused
            # While it is being started.
            stack.facade.hold()
            waiting = asyncio.create_task(stack.start([1], request_id="a"))
            await kit.eventually(stack.facade.held.is_set)
            text = asyncio.create_task(stack.start("bcd", request_id="b"))
            await asyncio.sleep(0)
            assert await g.abort(["a", "b"]) == 2 and await g.abort(["a", "b"]) == 0
            await kit.fails(waiting, "CANCELLED")
            await kit.fails(text, "CANCELLED")
            stack.facade.release()
            await stack.settled()

    kit.run(story())


def test_a_slow_reader_slows_nobody_and_loses_nothing(kit: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=1)
    expected = kit.offline([([1, 2, 3], params), ([4, 5], params)])

    async def story() -> None:
        async with kit.serving() as stack:
            slow = await stack.generator.start(kit.job([1, 2, 3], **vars(params)))
            quick = await stack.generator.start(kit.job([4, 5], **vars(params)))
            kit.agrees(await kit.read(quick), expected[1])
            # The engine has finished it although nothing was read, and one merged delta is all that waits.
            await kit.eventually(lambda: stack.generator.in_engine == 0)
            assert stack.generator.live == 1
            result = await kit.read(slow)
            assert result.deltas == 1
            kit.agrees(result, expected[0])

    kit.run(story())


def test_a_stalled_reader_is_cancelled_and_its_pages_are_freed(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(stall_seconds=0.3) as stack:
            ended: list[str] = []
            stack.facade.hook = lambda: time.sleep(0.05)
            stuck = await stack.start([1, 2, 3], max_tokens=100, n=2)
            stuck.on_stall = lambda: ended.append("stuck")
            reading = asyncio.create_task(kit.read(await stack.start([4], max_tokens=20, max_depth=0)))
            await kit.eventually(lambda: ended == ["stuck"])
            assert (await kit.fails(kit.read(stuck), "CANCELLED")).reason == "stalled_reader"
            assert len((await reading).tokens[0]) == 20  # whoever reads is never stalled
            await stack.settled()
            assert stack.metrics.reasons.count("abort") == 2
            assert stack.metrics.refused == [("CANCELLED", "stalled_reader")]
            # Also where the engine is done with it: the output must not lie about for ever.
            stack.facade.hook = None
            done = await stack.start([1], max_tokens=3)
            done.on_stall = lambda: ended.append("done")
            await kit.eventually(lambda: ended == ["stuck", "done"])
            await kit.fails(kit.read(done), "CANCELLED")
            assert stack.generator.live == 0

    kit.run(story())


def test_a_reader_that_waits_for_the_engine_is_not_stalled(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(stall_seconds=0.1) as stack:
            (generation,) = await stack.start_held(kit.job([1, 2, 3], max_tokens=10))
            reader = asyncio.create_task(kit.read(generation))
            await asyncio.sleep(0.5)
            stack.facade.release()
            assert len((await reader).tokens[0]) == 10

    kit.run(story())


def test_logits_that_are_not_finite_fail_their_own_generation_alone(kit: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = kit.offline([([1, 2, 3], params)])[0]

    async def story() -> None:
        facade = kit.clean()
        poisoned: set[str] = set()
        real = facade.runner.collect

        def collect(pending: Any) -> Any:
            bad = lambda request: request.request_id in poisoned and len(request.output_token_ids) > 5
            result = real(pending)
            finite_B = result.finite_B & np.asarray([not bad(request) for request in pending.requests])
            return dataclasses.replace(result, finite_B=finite_B)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(facade.runner, "collect", collect)
            async with kit.serving() as stack:
                bad = await stack.start([7, 7], max_tokens=100, n=3)
                poisoned.add(bad.choices[1].id)
                good = await stack.generator.start(kit.job([1, 2, 3], **vars(params)))
                error = await kit.fails(kit.read(bad), "INTERNAL")
                assert error.reason == "not_finite" and "finite" in error.message
                kit.agrees(await kit.read(good), expected)
                await stack.settled()
                assert sorted(stack.metrics.reasons) == ["abort", "abort", "error", "length"]

    kit.run(story())


def test_a_grammar_that_fails_in_flight_is_the_clients_fault(kit: Any) -> None:
    def take(matcher: Matcher, tokens: list[int]) -> int:
        matcher.error = "no such rule"
        return 0

    async def story() -> None:
        async with kit.serving() as stack:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Matcher, "take", take)
                grammar = GrammarSpec("regex", "(abc|def){3}")
                reading = kit.read(await stack.start([1], grammar=grammar, ignore_eos=False))
                neighbour = kit.read(await stack.start([1]))
                error = await kit.fails(reading, "INVALID_ARGUMENT")
                assert (error.reason, error.message) == ("grammar", "the grammar failed: no such rule")
                assert len((await neighbour).tokens[0]) == 20
            await stack.settled()

    kit.run(story())


def test_five_hundred_random_operations_leak_nothing(kit: Any) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(12) for _ in range(rng.choice([1, 3, 20, 50]))] for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = kit.offline([(p, params) for p in prompts])
    expected = {tuple(p): out[0].token_ids for p, out in zip(prompts, outputs, strict=True)}
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    whole = 0

    async def one(stack: Any, number: int) -> None:
        nonlocal whole
        prompt, n, length = rng.choice(prompts), rng.choice([1, 1, 1, 2, 4]), rng.choice([1, 5, 40])
        deadline = time.monotonic() + rng.choice([0.01, 0.1]) if rng.random() < 0.15 else None
        options = dict(request_id=f"r{number % 37}", n=n, max_tokens=length, deadline=deadline, stream=number % 5 > 0)
        source = kit.text_of(prompt) if rng.random() < 0.3 else prompt
        if rng.random() < 0.1:
            await stack.generator.abort([f"r{rng.randrange(37)}"])
        try:
            starting = asyncio.ensure_future(stack.start(source, **options))
            if rng.random() < 0.1:
                await asyncio.sleep(rng.choice([0, 0.001]))
                starting.cancel()
            generation = await starting
        except (kit.status_error, asyncio.CancelledError):
            return
        alive.add(generation)
        tokens: list[list[int]] = [[] for _ in range(n)]
        left = rng.choice([0, 1, 3, 10**9, 10**9, 10**9])
        try:
            async for event in generation:
                if isinstance(event, Delta) or number % 5 == 0:  # the latter are not streamed
                    part = event if isinstance(event, Delta) else event.output
                    tokens[event.index] += part.token_ids
                left -= 1
                if left <= 0:
                    break
            else:
                assert tokens == [expected[tuple(prompt)][:length]] * n
                whole += 1
        except kit.status_error as error:
            assert error.code.name in ("CANCELLED", "DEADLINE_EXCEEDED")
        finally:
            generation.close()

    async def story() -> None:
        async with kit.serving(max_waiting=20) as stack:
            pending: set[asyncio.Task[None]] = set()
            for number in range(500):
                pending.add(asyncio.create_task(one(stack, number)))
                if len(pending) >= 12:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
            await asyncio.gather(*pending)
            await stack.settled()
            assert stack.generator.live == 0 and not stack.engine._live.news() and not stack.engine._calls
            assert stack.engine.state == "serving" and whole > 50
            admitted = {id(metrics) for *_, metrics in stack.metrics.finished}
            assert len(admitted) == len(stack.metrics.finished)  # each completion ended once
            assert set(stack.metrics.reasons) == {str(r) for r in (FinishReason.LENGTH, FinishReason.ABORT)} | (
                {"timeout"} & set(stack.metrics.reasons)
            )
            pending.clear()
            gc.collect()
            assert not list(alive)

    kit.run(story(), seconds=120)
