"""AsyncLLM: what LLM gives, for tasks that share the batch; every way to end one frees its slot and tells who waits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from jaxspec import LLM, AsyncLLM, SamplingParams
from jaxspec.request import FinishReason, RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=50)
SECONDS = 240


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """Afterwards nothing runs, no thread is left, and all pages are free or only cached."""
    yield tiny_llm
    vars(tiny_llm.engine).pop("step", None)
    eventually(lambda: not stepping())
    stats = tiny_llm.stats
    assert (stats.running, stats.waiting) == (0, 0)
    assert tiny_llm.shared._holder is None and not tiny_llm.shared._queue
    while tiny_llm.engine.has_work:
        tiny_llm.engine.step()
    assert stats.free_pages + stats.cached_pages == tiny_llm.engine.facts.sizes.num_pages


def stepping() -> bool:
    return any(thread.name == "AsyncLLM" for thread in threading.enumerate())


def eventually(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.001)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, SECONDS))


def planted(llm: LLM, before: Callable[[int], None]) -> None:
    engine, count = llm.engine, iter(range(10_000))

    def wrapped() -> Any:
        before(next(count))
        return type(engine).step(engine)

    engine.step = wrapped  # the fixture takes it away


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams | None = None, *args: Any) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params, *args)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def completions(output: RequestOutput) -> list[Any]:
    return [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]


def test_twenty_at_once_give_what_they_give_offline(llm: LLM):
    """Greedy and seeded, stop strings, log-probabilities, several completions; in one batch."""
    params = [
        GREEDY, dataclasses.replace(GREEDY, stop=("ab", "k"), max_tokens=20),
        *(SamplingParams(temperature=1.0, seed=s, n=1 + s % 2, max_tokens=14, logprobs=1) for s in range(3)),
    ]  # fmt: skip
    work = [(("abc", "lkj", [3, 3], "fgh")[i % 4], params[i % 5]) for i in range(20)]
    before = llm.stats.rounds
    expected = [llm.generate(prompt, p)[0] for prompt, p in work]
    alone = llm.stats.rounds - before

    async def main() -> list[RequestOutput]:
        server = AsyncLLM.of(llm)
        return await asyncio.gather(*(last(server, prompt, p, f"mine-{i}") for i, (prompt, p) in enumerate(work)))

    before, compiled = llm.stats.rounds, llm.stats.compilations_after_warmup
    outputs = run(main())
    for i, (output, whole) in enumerate(zip(outputs, expected, strict=True)):
        assert completions(output) == completions(whole)
        assert (output.request_id, output.prompt) == (f"mine-{i}", whole.prompt)
        assert output.prompt_token_ids == whole.prompt_token_ids
        m = output.metrics
        assert m.output_tokens == sum(len(c.token_ids) for c in output.outputs)
        assert m.ttft is not None and m.rounds == sum(m.acceptance_histogram) > 0
    assert llm.stats.rounds - before < 0.9 * alone, "tasks did not share the batch"
    assert llm.stats.compilations_after_warmup == compiled


def test_outputs_are_cumulative(llm: LLM):
    params = SamplingParams(temperature=1.0, seed=4, n=2, max_tokens=30, ignore_eos=True, logprobs=0)

    outputs: list[RequestOutput] = []

    def before(step: int) -> None:
        if step in (4, 6, 8):
            eventually(lambda: len(outputs) > (step - 4) // 2)  # else one output may tell of many steps

    async def main() -> None:
        async for output in AsyncLLM.of(llm).generate("abc", params):
            outputs.append(output)

    planted(llm, before)
    run(main())
    assert len(outputs) > 3
    for before, after in itertools.pairwise(outputs):
        assert before.metrics.output_tokens <= after.metrics.output_tokens and before.request_id == after.request_id
        for b, a in zip(before.outputs, after.outputs, strict=True):
            assert a.token_ids[: len(b.token_ids)] == b.token_ids and a.text.startswith(b.text)
            assert a.logprobs is not None and b.logprobs is not None
            assert len(b.logprobs) == len(b.token_ids) and a.logprobs[: len(b.logprobs)] == b.logprobs
    assert sum(len(c.token_ids) for c in outputs[0].outputs) < 60 == outputs[-1].metrics.output_tokens
    assert completions(outputs[-1]) == completions(llm.generate("abc", params)[0])


def test_a_slow_consumer_gets_fewer_outputs(llm: LLM):
    """And holds up nobody: outputs of what it missed are never made."""
    (expected,) = llm.generate("abc", LONG)

    async def main() -> list[RequestOutput]:
        outputs = []
        async for output in AsyncLLM.of(llm).generate("abc", LONG):
            outputs.append(output)
            while stepping():
                await asyncio.sleep(0.001)
        return outputs

    outputs = run(main())
    assert len(outputs) <= 2 and completions(outputs[-1]) == completions(expected)


@pytest.mark.parametrize("how", ["cancel", "aclose", "drop", "cancel at once"])
def test_leaving_aborts(llm: LLM, how: str):
    (expected,) = llm.generate("abc", LONG)
    first = threading.Event()

    async def leave(server: AsyncLLM) -> None:
        outputs = server.generate("fgh", dataclasses.replace(LONG, n=3), "leaving")
        if how == "drop":
            async for _ in outputs:
                first.set()
                break
        elif how == "aclose":
            await anext(outputs)
            first.set()
            await outputs.aclose()
        else:
            async for _ in outputs:
                first.set()

    server = AsyncLLM.of(llm)

    def before(step: int) -> None:
        if step == 8:
            eventually(lambda: "leaving" not in server._by_id)

    async def main() -> RequestOutput:
        leaving = asyncio.create_task(leave(server))
        staying = asyncio.create_task(last(server, "abc", LONG))
        if how.startswith("cancel"):
            await asyncio.sleep(0)
            if how == "cancel":
                await asyncio.to_thread(first.wait, SECONDS)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        await asyncio.gather(leaving, return_exceptions=True)
        output = await staying
        while server._by_id:
            await asyncio.sleep(0.001)
        return output

    planted(llm, before)
    rounds = llm.stats.rounds
    assert completions(run(main())) == completions(expected)
    assert llm.stats.rounds - rounds < expected.metrics.rounds + 12 < 1.5 * expected.metrics.rounds
    assert llm.stats.running == 0


def test_abort(llm: LLM):
    """The generator ends with what there is; requests that have not begun end too, and others are passed over."""
    (expected,) = llm.generate("abc", LONG)

    server, aborted_once = AsyncLLM.of(llm), threading.Event()

    def before(step: int) -> None:
        if step == 6:
            eventually(lambda: aborted_once.is_set() or bool(server._stepper._commands))

    async def main() -> list[RequestOutput]:
        planted(llm, before)
        await server.abort("nobody's")
        found = []
        async for output in server.generate("abc", LONG, "mine"):
            found.append(output)
            await server.abort("mine")
            aborted_once.set()
            assert llm.stats.running == 0, "abort returns when the slot is free"
        waiting = [asyncio.create_task(last(server, "abc", dataclasses.replace(LONG, n=2), n)) for n in "ab"]
        await asyncio.sleep(0)
        await server.abort(["a", "b", "nobody's"])
        found += [await task for task in waiting]
        await server.abort("mine")
        found.append(await last(server, "abc", LONG, "mine"))  # the id is free again
        return found

    *early, aborted, a, b, whole = run(main())
    assert [output.finish_reason for output in (aborted, a, b)] == [FinishReason.ABORT] * 3
    assert all(len(output.outputs) == 2 and output.finished for output in (a, b))
    assert expected.token_ids[: len(aborted.token_ids)] == aborted.token_ids != expected.token_ids
    assert all(output.finish_reason is None for output in early)
    assert completions(whole) == completions(expected)


def test_what_cannot_be_honoured_is_refused(llm: LLM):
    bad: list[tuple[Any, Any, str]] = [
        ("", None, "prompt must hold at least 1 token"),
        ([], None, "prompt must hold at least 1 token"),
        (["abc", "d"], None, "prompt must be one text or one list of token ids, got 2 prompts"),
        (3, None, "prompts must be a text, token ids"),
        ("abc", [GREEDY], "sampling_params must be SamplingParams, got list"),
        ("a" * 64, None, "prompt must be shorter than max_seq_len = 64 tokens, got 64"),
        ([99], None, r"prompt token ids must lie in \[0, 13\), got 99"),
    ]

    async def main() -> None:
        server = AsyncLLM.of(llm)
        for prompt, params, message in bad:
            with pytest.raises(ValueError, match=message):
                await last(server, prompt, params, "same")
        with pytest.raises(ValueError, match="priority must be an integer from -100 to 100, got 101"):
            await anext(server.generate("abc", GREEDY, priority=101))
        with pytest.raises(ValueError, match="max_depth must be an integer from 0 to"):
            await anext(server.generate("abc", GREEDY, max_depth=-1))
        first = server.generate("abc", LONG, "same")
        await anext(first)
        with pytest.raises(ValueError, match="request_id must be unique among live requests, got 'same' again"):
            await last(server, "abc", GREEDY, "same")
        assert len((await last(server, "abc")).token_ids) <= 16
        await first.aclose()
        assert not server._by_id

    run(main())


def test_a_step_that_fails_reaches_every_task(llm: LLM):
    (expected,) = llm.generate("abc", LONG)

    def before(step: int) -> None:
        if step == 5:
            raise ArithmeticError("planted")

    async def main() -> RequestOutput:
        server = AsyncLLM.of(llm)
        planted(llm, before)
        failed = await asyncio.gather(*(last(server, p, LONG) for p in ("abc", "fgh", "dd")), return_exceptions=True)
        assert [str(error) for error in failed] == ["planted"] * 3
        return await last(server, "abc", LONG)

    assert completions(run(main())) == completions(expected)


def test_beside_threads_of_the_same_llm(llm: LLM):
    """Whoever steps, the others' tokens come; and a failure in a thread reaches the tasks."""
    expected = [completions(output) for output in llm.generate(["abc", "fgh"], LONG)]

    async def main() -> None:
        server = AsyncLLM.of(llm)
        jobs = []
        for _ in range(4):
            jobs += [asyncio.to_thread(llm.generate, "abc", LONG), last(server, "fgh", LONG)]
        results = await asyncio.gather(*jobs)
        assert [completions(r[0] if isinstance(r, list) else r) for r in results] == expected * 4
        paused = llm.stream("abc", LONG)
        outputs = server.generate("fgh", LONG)
        await anext(outputs)
        planted(llm, lambda step: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(list, paused)
        with pytest.raises(ZeroDivisionError):
            async for _ in outputs:
                pass

    run(main())


def test_shutdown_with_live_requests(llm: LLM):
    entered = threading.Event()

    async def main() -> None:
        async with AsyncLLM.of(llm) as server:

            def before(step: int) -> None:
                if step == 12:
                    entered.set()
                    eventually(lambda: server._stepper._closed)

            planted(llm, before)
            tasks = [asyncio.create_task(last(server, p, LONG)) for p in ("abc", "fgh", "dd", "kk")]
            suspended = server.generate("abc", LONG)
            await anext(suspended)
            await asyncio.to_thread(entered.wait, SECONDS)
        assert not stepping()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, RuntimeError) and str(error) == "this AsyncLLM is shut down"
        with pytest.raises(RuntimeError, match="this AsyncLLM is shut down"):
            async for _ in suspended:
                pass
        server.shutdown()
        await server.abort("nobody's")
        with pytest.raises(RuntimeError, match="this AsyncLLM is shut down"):
            await last(server, "abc")

    run(main())
    assert llm.stats.running == llm.stats.waiting == 0


def test_shutdown_before_any_request(llm: LLM):
    server = AsyncLLM.of(llm)
    server.shutdown()
    server.shutdown(timeout=1.0)
    assert len(llm.generate("abc", GREEDY)) == 1


def test_its_own_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """LLM's arguments; the LLM is closed with it, and a task that it was closed under hears so."""
    monkeypatch.setattr("jaxspec.llm.build_engine", lambda *args, **kwargs: llm.engine)
    (expected,) = llm.generate("abc", GREEDY)

    async def main() -> None:
        async with AsyncLLM("demo", "ngram", max_seq_len=64, progress=False) as server:
            assert completions(await last(server, "abc", GREEDY)) == completions(expected)
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            _ = server.llm.stats
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            await last(server, "abc")
        closed = AsyncLLM(progress=False)
        outputs = closed.generate("abc", LONG)
        planted(llm, lambda step: eventually(lambda: bool(closed.llm.shared._queue)) if step == 6 else None)
        await anext(outputs)
        await asyncio.to_thread(closed.llm.close)
        with pytest.raises(RuntimeError, match="closed while the call ran"):
            async for _ in outputs:
                pass

    run(main())
    with pytest.raises(ValueError, match=r"unknown arguments \['page_sise'\]"):
        AsyncLLM(page_sise=8)


def test_a_loop_that_is_gone(llm: LLM):
    """Nobody is left to cancel anything: what ran for it is aborted, and the thread ends."""
    server = AsyncLLM.of(llm)
    loop, step = asyncio.new_event_loop(), threading.Event()
    planted(llm, lambda number: step.wait(SECONDS) if number == 2 else None)
    outputs = server.generate("abc", dataclasses.replace(LONG, n=4))
    loop.run_until_complete(anext(outputs))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    before = llm.engine.stats.rounds
    step.set()
    eventually(lambda: not stepping())
    assert llm.engine.stats.rounds - before < 10
    with contextlib.suppress(StopIteration):  # its finalizer has no loop to run on
        outputs.aclose().send(None)
    assert completions(run(last(server, "abc", GREEDY))) == completions(llm.generate("abc", GREEDY)[0])
