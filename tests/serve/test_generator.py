"""Generations: outputs are the offline engine's, and what can never run is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from jaxspec.request import FinishReason, Request, RequestStatus, SamplingParams
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.text.grammar import GrammarSpec
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
                kit.agrees(result, output)
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
            stack.facade.idle = True
            starting = asyncio.create_task(stack.start("bcd", request_id="x", max_tokens=60))
            await asyncio.sleep(0)  # still being tokenized
            await kit.fails(stack.start([1], request_id="x"), "ALREADY_EXISTS")
            generation = await starting
            await kit.fails(stack.start([1], request_id="x"), "ALREADY_EXISTS")
            stack.facade.idle = False
            assert len((await kit.read(generation)).tokens[0]) == 60
            again = await stack.start([1], request_id="x", max_tokens=90)
            again.close()  # free at once, whatever the engine has heard so far
            third = await stack.start([1], request_id="x")
            again.close()
            assert len((await kit.read(third)).tokens[0]) == 20
            await stack.settled()
            assert stack.metrics.refused == [("ALREADY_EXISTS", "already_exists")] * 2

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


def test_preemption_changes_no_token(kit: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=95, ignore_eos=True)
    requests = [([1, 2, i] * 5, params) for i in range(5)]  # 14 of 30 pages each: two and a bit at a time
    expected = kit.offline(requests)

    async def story() -> None:
        async with kit.serving() as stack:
            generations = await stack.start_held(*(kit.job(prompt, **vars(p)) for prompt, p in requests))
            stack.facade.release()
            results = await asyncio.gather(*(kit.read(generation) for generation in generations))
            for result, output in zip(results, expected, strict=True):
                kit.agrees(result, output)
            assert sum(end.output.metrics.preemptions for result in results for end in result.ends) > 0
            await stack.settled()

    kit.run(story())
