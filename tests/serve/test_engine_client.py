"""The engine's thread: who steps, who waits for whom, and what the loop hears."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import threading
import time
from typing import Any

import pytest

from jaxspec.events import Delta, Finished, Started
from jaxspec.llm import Prepared
from jaxspec.request import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from serve.core.admission import Place
from serve.core.commands import Abort, Add, Built, Command, Stop, Turn
from serve.core.completion import Choice, Completion, Deadlines, Ended, Taken
from serve.core.engine_core import SNAPSHOT_SECONDS, EngineCore
from serve.core.errors import StatusError
from serve.core.live import LiveChoices
from serve.core.observers import Guard, Meter


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
            generations = await asyncio.gather(*(stack.start([1, 2, i], max_tokens=40) for i in range(4)))
            await asyncio.gather(*(kit.read(generation) for generation in generations))
            # And when it falls idle, which it may do for the first time only now.
            assert 0 < len(calls) <= stack.facade.steps + 2

    kit.run(story())


def test_jobs_that_do_not_stream_are_heard_of_at_the_end_only(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            streamed = await kit.read(await stack.start([1, 2, 3], max_tokens=40, logprobs=1))
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
            assert built.wait(30)
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


def test_an_engine_that_cannot_be_built_is_dead(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Any:
        raise ValueError("no such checkpoint")

    async def story() -> None:
        async with kit.serving(build=build, wait=False) as stack:
            assert (await kit.fails(stack.engine.ready(), "UNAVAILABLE")).reason == "dead"
            assert stack.lifecycle.state == "dead" and isinstance(stack.engine.error, ValueError)
            await kit.fails(stack.engine.call(lambda engine: 1), "UNAVAILABLE")
            await kit.fails(stack.start([1]), "UNAVAILABLE")

    with caplog.at_level(logging.CRITICAL, "serve"):
        kit.run(story())
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None
    assert "no such checkpoint" in caplog.text


def test_stop_ends_what_is_live_and_can_be_repeated(kit: Any) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            generations = [await stack.start([1, 2, 3], max_tokens=100) for _ in range(6)]
            await stack.engine.stop()
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
            running = await stack.start([1], max_tokens=100)
            add = kit.engine.add

            def counted(tokens: Any, params: Any, **options: Any) -> str:
                if not order or order[-1] is not tokens:
                    order.append(tokens)
                taken.append((stack.facade.steps, len(order), len(tokens)))
                return add(tokens, params, **options)

            with monkeypatch.context() as patch:
                patch.setattr(kit.engine, "add", counted)
                waiting: list[int] = []
                stack.facade.hook = lambda: waiting.append(stack.engine.snapshot.waiting)
                stack.facade.hold()
                await kit.eventually(stack.facade.held.is_set)
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
            assert next(filter(None, waiting)) >= len(taken) - 12  # also those that have not been taken in
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
            aborted = await stack.start([1, 2, 3], max_tokens=100)
            assert await stack.generator.abort([aborted.job.request_id]) == 1
            await kit.fails(kit.read(aborted), "CANCELLED")
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
            generation = await stack.start([1, 2, 3], max_tokens=100)

            def broken(*args: Any) -> None:
                raise RuntimeError("the account is broken too")

            monkeypatch.setattr(stack.engine._live, "bury", broken)
            stack.facade.error = RuntimeError("the device is lost")
            assert (await kit.fails(kit.read(generation), "UNAVAILABLE")).reason == "dead"
            assert stack.lifecycle.state == "dead" and str(stack.engine.error) == "the device is lost"

    with caplog.at_level(logging.ERROR, "serve"):
        kit.run(story(), 20.0)
    assert [record.levelname for record in caplog.records] == ["CRITICAL", "ERROR"]


def test_what_exists_when_the_engine_is_built_is_no_garbage(kit: Any) -> None:
    told: list[Any] = []
    core = EngineCore(lambda on_compiled: kit.clean(), lambda engine: "what it is like", told.append, freeze=True)
    core.commands.put(Stop())
    try:
        core.run()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
    assert isinstance(told[0], Built) and told[0].description == "what it is like"


# Live completions, with a clock of their own.


class Counter:
    """Metrics that are not under test."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def ended(name: str, reason: FinishReason) -> Finished:
    completion = CompletionOutput(0, [], "", reason)
    return Finished(name, 0, reason, RequestOutput(name, None, [], [completion], RequestMetrics()))


class Account:
    """Live completions of requests that nobody reads, one each; `said` is what the loop hears of each."""

    def __init__(self, kit: Any, interval: float | None = None, metrics: Any = None):
        self.kit = kit
        self.posted: list[Command] = []
        self.aborted: list[str] = []
        self.live = LiveChoices(metrics or Counter(), Guard(), Meter(), self.posted.append, interval)

    def add(self, deadlines: Deadlines | None = None, **options: Any) -> Completion:
        job = self.kit.job([1, 2], seed=0, **options)
        far = time.monotonic() + 1000
        nobody: Any = None
        request = Completion(job, deadlines or Deadlines(far, far, float("inf")), nobody, nobody)
        request.prepared = Prepared(None, [1, 2], job.params, None)
        request.choices = [Choice(request, Place(1, 2))]
        self.live.submit(request)
        self.obey()
        return request

    def obey(self) -> None:
        """As the engine's side does."""
        while self.posted:
            match self.posted.pop(0):
                case Add(names):
                    self.live.hear(Turn(added=[names[0]]))
                case Abort(names):
                    self.aborted += names
                    self.live.hear(Turn(events=[ended(name, FinishReason.ABORT) for name in names]))

    def step(self, now: float, *events: Any) -> None:
        self.live.hear(Turn(ended_at=now, events=list(events)))

    def abort(self, request: Completion) -> None:
        self.live.abort(request, "abort")
        self.obey()

    def expire(self, now: float) -> None:
        self.live.expire(now)
        self.obey()

    def said(self) -> list[tuple[str, Any]]:
        return [(choice.id, news) for choice, news in self.live.news()]


def started(name: str) -> Started:
    return Started(name, 0, 0, 0.0)


@pytest.mark.parametrize(("asked", "told"), [(None, None), (20.0, 0.02)])
def test_the_time_per_token_that_a_client_asks_for_reaches_the_engine(kit: Any, asked: float, told: float) -> None:
    account, obey = Account(kit), Account.obey
    adds: list[Any] = []
    account.obey = lambda: (adds.extend(account.posted), obey(account))[1]
    account.add(tpot_ms=asked)
    assert [add.tpot for add in adds] == [told]


def test_tokens_of_a_stream_are_kept_for_the_interval(kit: Any) -> None:
    account = Account(kit, 0.05)
    request = account.add()
    account.step(9.9, started("0.0"))
    assert account.said() == [("0.0", Taken()), ("0.0", started("0.0"))]

    def step(now: float, *tokens: int) -> list[int]:
        account.step(now, *([Delta("0.0", 0, list(tokens), "x" * len(tokens))] if tokens else []))
        return [token for _, delta in account.said() for token in delta.token_ids]

    assert step(10.0, 1) == [1]  # the first at once
    assert step(10.01, 2) == [] == step(10.02, 3, 4)
    assert step(10.051, 5) == [2, 3, 4, 5]
    assert step(10.06, 6) == []
    assert step(10.12) == [6]  # also when nothing is added, as while it is preempted
    assert step(10.13, 7) == []
    account.step(10.14, ended("0.0", FinishReason.LENGTH))
    (_, last), (_, end) = account.said()
    assert last.token_ids == [7] and end == ended("0.0", FinishReason.LENGTH)  # the last at once
    assert len(account.live) == 0
    account.abort(request)
    assert not account.said() and not account.aborted


@pytest.mark.parametrize("how", ["abort", "error"])
def test_what_is_kept_of_a_stream_that_breaks_off_is_lost(kit: Any, how: str) -> None:
    account = Account(kit, 0.05)
    request = account.add()
    account.step(10.0, started("0.0"), Delta("0.0", 0, [1], "x"))
    account.step(10.01, Delta("0.0", 0, [2], "x"))
    account.said()
    if how == "abort":
        account.abort(request)
        account.abort(request)
        assert account.said() == [("0.0", Ended(None))] and account.aborted == ["0.0"]
    else:
        account.step(10.02, ended("0.0", FinishReason.ERROR))
        assert account.said() == [("0.0", ended("0.0", FinishReason.ERROR))]
    assert len(account.live) == 0 and not account.live._holding


def test_all_streams_together_make_so_many_messages_a_second(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.core.live.MESSAGES_PER_SECOND", 20)
    account, names = Account(kit), ["0.0", "1.0", "2.0"]
    made = [account.add(stream=name != "2.0") for name in names]
    account.step(9.9, *map(started, names))
    assert all(request.choices[0].started for request in made)
    account.said()

    def step(now: float, *names: str) -> list[str]:
        account.step(now, *(Delta(name, 0, [1], "x") for name in names))
        return list(dict(account.said()))

    both = ("0.0", "1.0")
    assert step(10.0, *both, "2.0") == ["0.0", "1.0"]  # the one that is not streamed costs none
    assert step(10.06, *both) == [] and step(10.101, *both) == ["0.0", "1.0"]  # two share 20 a second
    for request in made[1:]:
        account.abort(request)
    assert len(account.said()) == 2
    assert step(10.14, "0.0") == [] and step(10.152, "0.0") == ["0.0"]  # and one has them to itself


@pytest.mark.parametrize("interval", [0.0, 0.05])
def test_each_delta_keeps_its_logprobs_and_a_step_has_its_own_gap(kit: Any, interval: float) -> None:
    class Gaps(Counter):
        def __init__(self) -> None:
            self.seen: list[tuple[int, float | None]] = []

        def on_tokens(self, job: Any, count: int, gap: float | None) -> None:
            self.seen.append((count, gap))

    gaps = Gaps()
    account = Account(kit, interval, gaps)
    account.add(logprobs=0)
    account.said()
    heard: list[tuple[list[int], list[int]]] = []
    # A step may bring a completion several deltas.
    for now, parts in ((10.0, [[1], [2]]), (11.0, [[3, 4], [5]]), (12.0, [[], [6]]), (13.0, [[7]])):
        account.step(now, *(Delta("0.0", 0, part, "x", [{t: Logprob(t, -1.0)} for t in part]) for part in parts))
        heard += [(delta.token_ids, [t for e in delta.logprobs for t in e]) for _, delta in account.said()]
    assert [t for tokens, _ in heard for t in tokens] == [1, 2, 3, 4, 5, 6, 7]
    assert all(tokens == logprobs for tokens, logprobs in heard) and len(heard) >= 4
    assert gaps.seen == [(2, None), (3, 1.0), (1, 1.0), (1, 1.0)]


@pytest.mark.parametrize("slot", [False, True])
@pytest.mark.parametrize(
    ("field", "reason"), [("queue", "queue_seconds"), ("run", "run_seconds"), ("client", "deadline")]
)
def test_time_limits_are_those_of_where_the_completion_is(kit: Any, slot: bool, field: str, reason: str) -> None:
    limit = time.monotonic() + 500
    account = Account(kit)
    account.add(deadlines=dataclasses.replace(Deadlines(limit + 500, limit + 500, float("inf")), **{field: limit}))
    if slot:
        account.step(1.0, started("0.0"))
    account.said()
    account.expire(limit - 1)
    assert not account.aborted
    account.expire(limit)
    if slot and field == "queue":
        assert not account.aborted and not account.said()
        return
    ((_, end),) = account.said()
    assert isinstance(end.error, StatusError) and account.aborted == ["0.0"]
    assert (end.error.code.name, end.error.reason) == ("DEADLINE_EXCEEDED", reason)


def test_what_has_no_time_left_is_never_added(kit: Any) -> None:
    account = Account(kit)
    now = time.monotonic()
    account.add(deadlines=Deadlines(now + 9, now + 9, now - 1))
    ((_, end),) = account.said()
    assert end.error.reason == "deadline" and not account.posted and len(account.live) == 0
