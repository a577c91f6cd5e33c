"""Generations: outputs are the offline engine's, and every way to end one leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import re
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from jaxspec.events import Delta
from jaxspec.request import FinishReason, Request, RequestStatus, SamplingParams
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.text.grammar import GrammarSpec
from jaxspec.text.matcher import Matcher
from serve.config import ServerConfig
from serve.core.jobs import Chat


def mixed() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded, one and several completions, prompts below and above a prefill chunk."""
    rng = np.random.default_rng(0)
    prompt = lambda n: rng.integers(0, 12, n).tolist()
    long = dict(max_tokens=36, ignore_eos=True)
    return [
        (prompt(5), SamplingParams(temperature=0, **long)),
        (prompt(40), SamplingParams(temperature=0, logprobs=2, **long)),
        (prompt(9), SamplingParams(temperature=1.0, seed=3, n=3, **long)),
        (prompt(3), SamplingParams(temperature=0.8, seed=2**32 - 1, n=2, max_tokens=36)),
        (prompt(6), SamplingParams(temperature=1.0, seed=5, logprobs=0, stop=["ab", "c"], max_tokens=50)),
        (prompt(17), SamplingParams(temperature=0, stop_token_ids=[3, 5], max_tokens=50)),
        (prompt(1), SamplingParams(temperature=0, max_tokens=1)),
        (prompt(8), SamplingParams(temperature=0.7, seed=8, repetition_penalty=1.3, max_tokens=30)),
    ]


def agrees(result: Any, expected: Any) -> None:
    """Tokens, text, log-probabilities and reasons are those of the offline engine."""
    for i, output in enumerate(expected):
        completion = output.outputs[0]
        end = result.ends[i].output.outputs[0]
        assert (result.tokens[i], result.text[i]) == (completion.token_ids, completion.text)
        assert (end.finish_reason, end.stop_reason) == (completion.finish_reason, completion.stop_reason)
        assert len(result.logprobs[i]) == len(completion.logprobs or [])
        for got, wanted in zip(result.logprobs[i], completion.logprobs or [], strict=True):
            assert list(got) == list(wanted)
            np.testing.assert_allclose(
                [entry.logprob for entry in got.values()], [entry.logprob for entry in wanted.values()], atol=1e-4
            )


@pytest.mark.parametrize("interval", [0.0, 20.0])
def test_outputs_are_the_offline_engines(kit: Any, interval: float) -> None:
    requests = mixed()
    expected = kit.offline(requests)

    async def story() -> None:
        async with kit.serving(stream_interval_ms=interval) as stack:
            starts = [stack.generator.start(kit.job(prompt, **vars(params))) for prompt, params in requests]
            generations = await asyncio.gather(*starts)
            results = await asyncio.gather(*(kit.read(generation) for generation in generations))
            for result, output, generation, (prompt, params) in zip(
                results, expected, generations, requests, strict=True
            ):
                agrees(result, output)
                assert generation.prompt_token_ids == prompt
                assert params.seed is None or generation.seed == params.seed
            await stack.settled()
            total = sum(params.n for _, params in requests)
            assert len(stack.metrics.finished) == total and set(stack.metrics.reasons) <= {"stop", "length"}
            assert sum(count for _, count, _ in stack.metrics.tokens) == sum(
                len(tokens) for result in results for tokens in result.tokens
            )
            firsts = [job.request_id for job, _, gap in stack.metrics.tokens if gap is None]
            assert len(firsts) == total
            assert not stack.metrics.refused and stack.metrics.rounds

    kit.run(story())


def test_a_seed_chosen_here_reproduces_the_output(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            first = await stack.start([1, 2, 3], temperature=1.5, n=3, max_tokens=30)
            one = await kit.read(first)
            second = await stack.start([1, 2, 3], temperature=1.5, n=3, max_tokens=30, seed=first.seed)
            assert (await kit.read(second)).tokens == one.tokens
            seeds = {(await stack.start([1], max_tokens=1)).seed for _ in range(8)}
            assert len(seeds) == 8

    kit.run(story())


def test_text_and_conversations(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            g = stack.generator
            chat = Chat(({"role": "user", "content": "bcd"}, {"role": "user", "content": "e"}))
            assert await g.tokenize("bcd") == [1, 2, 3]
            assert await g.tokenize(chat) == [1, 2, 3, 4, 0]
            assert await g.tokenize(Chat(chat.messages, add_generation_prompt=False)) == [1, 2, 3, 4]
            assert await g.detokenize([1, 2, 12, 3]) == "bcd"
            assert await g.detokenize([1, 12], skip_special_tokens=False) == "b<eos>"
            expected = await kit.read(await stack.start([1, 2, 3, 4, 0]))
            for prompt in ("bcdea", chat):
                generation = await stack.start(prompt)
                assert generation.prompt_token_ids == [1, 2, 3, 4, 0]
                assert (await kit.read(generation)).tokens == expected.tokens
            for wrong in (g.tokenize(""), g.detokenize([13]), g.detokenize([-1]), g.tokenize("a\ud800")):
                await kit.fails(wrong, "INVALID_ARGUMENT")
            await kit.fails(g.tokenize(Chat(({"content": "no role"},))), "INVALID_ARGUMENT")
            assert g.live == 0

    kit.run(story())
    with pytest.raises(ValueError, match="at least 1 message"):
        Chat(())
    with pytest.raises(ValueError, match="messages"):
        Chat(({"role": "user"},), variables={"messages": []})


def test_what_can_never_run_is_invalid_also_when_the_queue_is_full(kit: Any) -> None:
    impossible: list[dict[str, Any]] = [
        dict(prompt=[]),
        dict(prompt=""),
        dict(prompt=[13]),
        dict(prompt=[-1]),
        dict(prompt=[1] * 120, max_tokens=1),
        dict(prompt=[1] * 121, fill_context=True),
        dict(prompt=[1], logit_bias={13: 1.0}),
        dict(prompt=[1], stop_token_ids=[99]),
        dict(prompt=[1], n=64),
        dict(prompt=[1], min_tokens=119, max_tokens=119, fill_context=True),
    ]

    async def story() -> None:
        async with kit.serving(max_waiting=1, max_output_tokens=50) as stack:
            stack.facade.idle = True
            live = [await stack.start([1, 2, 3], max_tokens=110) for _ in range(5)]
            for options in impossible:
                await kit.fails(stack.start(options["prompt"], **{k: v for k, v in options.items() if k != "prompt"}),
                                "INVALID_ARGUMENT")  # fmt: skip
            error = await kit.fails(stack.start([1]), "RESOURCE_EXHAUSTED")
            assert error.reason == "queue_full" and error.retry_seconds is not None and error.retry_seconds >= 0.1
            for generation in live:
                generation.close()
            await stack.settled()
            codes = [code for code, _ in stack.metrics.refused]
            assert codes == ["INVALID_ARGUMENT"] * len(impossible) + ["RESOURCE_EXHAUSTED"]

    kit.run(story())


def test_the_engines_own_refusals_are_invalid_and_count_for_nothing(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            error = await kit.fails(stack.start([1], max_depth=-1, n=3), "INVALID_ARGUMENT")
            assert "max_depth" in error.message
            await stack.settled()
            assert not stack.metrics.finished and stack.generator.live == 0

    kit.run(story())


def test_priorities_beyond_the_servers_are_invalid(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            for priority in (-6, 6, -100, 100, 2**31 - 1):
                error = await kit.fails(stack.start([1], priority=priority), "INVALID_ARGUMENT")
                assert "from -5 to 5" in error.message and str(priority) in error.message
            for priority in (-5, 5):
                assert (await kit.read(await stack.start([1], max_tokens=3, priority=priority))).tokens
            assert stack.metrics.refused == [("INVALID_ARGUMENT", "invalid")] * 5
            await stack.settled()
        async with kit.serving(max_priority=0) as stack:
            await kit.fails(stack.start([1], priority=-1), "INVALID_ARGUMENT")

    kit.run(story())


def test_a_steady_flow_of_urgent_requests_starves_nobody(kit: Any) -> None:
    """The arithmetic of ServerConfig.max_priority, on the scheduler's own clock."""
    ordinary, urgent = Request("o", [1], SamplingParams(), 0), Request("u", [1], SamplingParams(), 0)
    config = ServerConfig()
    ordinary.arrival_time, urgent.priority = 1000.0, -config.max_priority
    aging = kit.engine.scheduler.config.aging_seconds
    assert config.max_priority * aging < config.queue_seconds

    def first(arrival: float) -> str:
        urgent.arrival_time = arrival
        scheduler = Scheduler(kit.engine.scheduler.config)
        scheduler.add(ordinary)
        scheduler.add(urgent)
        plan = scheduler.plan()
        name = plan.prefill[0].request.request_id
        for request in (ordinary, urgent):
            scheduler.abort(request.request_id)
            request.status = RequestStatus.WAITING
        return name

    assert first(1000.0 + config.max_priority * aging - 1) == "u"
    assert first(1000.0 + config.max_priority * aging + 1) == "o"


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


def test_output_is_unread_until_its_call_is_over(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving(stall_seconds=0.4) as stack:
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
            await kit.eventually(lambda: ended == ["stuck"])
            assert stack.generator.live == 0
            assert stack.metrics.refused == [("CANCELLED", "stalled_reader")]
            stuck.delivered()
            await asyncio.sleep(0.5)
            assert ended == ["stuck"]

    kit.run(story())


def test_a_context_is_filled_where_no_length_was_given(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            result = await kit.read(await stack.start([1] * 20, fill_context=True, max_tokens=1))
            assert len(result.tokens[0]) == 100
        async with kit.serving(max_output_tokens=7) as stack:
            result = await kit.read(await stack.start([1] * 20, fill_context=True, max_tokens=1))
            assert len(result.tokens[0]) == 7

    kit.run(story())


def test_an_id_is_taken_while_its_generation_lives(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            starting = asyncio.create_task(stack.start("bcd", request_id="x", max_tokens=60))
            await asyncio.sleep(0)  # still being tokenized
            await kit.fails(stack.start([1], request_id="x"), "ALREADY_EXISTS")
            generation = await starting
            await kit.fails(stack.start([1], request_id="x"), "ALREADY_EXISTS")
            assert len((await kit.read(generation)).tokens[0]) == 60
            again = await stack.start([1], request_id="x", max_tokens=90)
            again.close()  # free at once, whatever the engine has heard so far
            third = await stack.start([1], request_id="x")
            again.close()
            assert len((await kit.read(third)).tokens[0]) == 20
            await stack.settled()
            assert stack.metrics.refused == [("ALREADY_EXISTS", "already_exists")] * 2

    kit.run(story())


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
            await kit.eventually(lambda: len(finished) == 1)
            (_, reason, prompt, metrics) = finished[0]
            assert (reason, prompt, metrics.first_token_time) == ("abort", 60, None)
            agrees(await kit.read(neighbour), expected)
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
            generations = [await stack.start([1, i], request_id=f"r{i}", max_tokens=100, n=2) for i in range(8)]
            readers = [asyncio.create_task(kit.read(generation)) for generation in generations]
            names = [f"r{i}" for i in range(8)]
            assert await g.abort(["nobody"]) == 0
            assert await g.abort(["r0", "r0", "nobody"]) == 1
            counts = await asyncio.gather(*(g.abort(names) for _ in range(50)))
            assert sum(counts) == 7
            for reader in readers:
                assert (await kit.fails(reader, "CANCELLED")).reason == "aborted"
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
            agrees(await kit.read(quick), expected[1])
            # The engine has finished it although nothing was read, and one merged delta is all that waits.
            await kit.eventually(lambda: stack.generator.in_engine == 0)
            assert stack.generator.live == 1
            result = await kit.read(slow)
            assert result.deltas == 1
            agrees(result, expected[0])

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
            generation = await stack.start([1, 2, 3], max_tokens=10)
            stack.facade.hold()
            reader = asyncio.create_task(kit.read(generation))
            await asyncio.sleep(0.5)
            stack.facade.release()
            assert len((await reader).tokens[0]) == 10

    kit.run(story())


def test_deadlines_and_time_outs(kit: Any, clock: Any) -> None:
    async def story() -> None:
        async with kit.serving(queue_seconds=200.0, run_seconds=400.0, watchdog_seconds=1e6) as stack:
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

    kit.run(story())


def test_a_call_that_its_deadline_ends_counts_as_late(kit: Any) -> None:
    """gRPC cancels it without a word, and may do so before the engine's thread has looked at the time."""

    async def story() -> None:
        async with kit.serving() as stack:
            late, left = await stack.start_held(
                *(kit.job([i], max_tokens=50, max_depth=0, deadline=time.monotonic() + 600) for i in (1, 2))
            )
            late.job = dataclasses.replace(late.job, deadline=time.monotonic())
            late.close()
            left.close()
            stack.facade.release()
            await stack.settled()
            assert sorted(stack.metrics.reasons) == ["abort", "timeout"]
            assert stack.metrics.refused == [("DEADLINE_EXCEEDED", "deadline")]

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
    go = threading.Event()

    class Slow:
        def encode(self, text: str, **options: Any) -> list[int]:
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
                assert stack.generator.live == 0 and stack.generator._preparation.preparing == 2  # threads are at it
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
                agrees(await kit.read(good), expected)
                await stack.settled()
                assert sorted(stack.metrics.reasons) == ["abort", "abort", "error", "length"]

    kit.run(story())


def test_a_grammar_is_compiled_and_obeyed(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            regex, bad = GrammarSpec("regex", "(abc|def){3}"), GrammarSpec("regex", "(abc")
            result = await kit.read(await stack.start([1], grammar=regex, max_tokens=30, ignore_eos=False, n=2))
            assert all(re.fullmatch("(abc|def){3}", text) for text in result.text)
            assert all(end.reason is FinishReason.STOP for end in result.ends)
            await kit.fails(stack.start([1], grammar=bad), "INVALID_ARGUMENT")
            await stack.settled()
            assert stack.generator.live == 0
            without = dataclasses.replace(stack.engine.facts, grammars=None)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stack.engine, "facts", without)
                await kit.fails(stack.start([1], grammar=regex), "INVALID_ARGUMENT")

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


def test_preemption_changes_no_token(kit: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=95, ignore_eos=True)
    requests = [([1, 2, i] * 5, params) for i in range(5)]  # 14 of 30 pages each: two and a bit at a time
    expected = kit.offline(requests)

    async def story() -> None:
        async with kit.serving() as stack:
            generations = [await stack.generator.start(kit.job(prompt, **vars(p))) for prompt, p in requests]
            results = await asyncio.gather(*(kit.read(generation) for generation in generations))
            for result, output in zip(results, expected, strict=True):
                agrees(result, output)
            assert sum(end.output.metrics.preemptions for result in results for end in result.ends) > 0
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
