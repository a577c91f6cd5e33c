"""One LLM in several threads: each call gets what it gets alone, calls share the batch, and every end is an end."""

from __future__ import annotations

import dataclasses
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.events import Delta, Event, Finished
from jaxspec.request import FinishReason, RequestOutput
from jaxspec.shared import SharedEngine
from jaxspec.tier import Tier

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=50)
#: More than anything here takes, and less than a test may take: a call that hangs fails the test.
SECONDS = 240


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """Afterwards nothing runs, nobody waits, and all pages are free or only cached."""
    step = tiny_llm.engine.step
    yield tiny_llm
    vars(tiny_llm.engine).pop("step", None)
    assert tiny_llm.engine.step == step
    shared, stats = tiny_llm.shared, tiny_llm.stats
    assert (stats.running, stats.waiting) == (0, 0)
    assert shared._holder is None and not shared._queue and not shared._abandoned
    while tiny_llm.engine.has_work:
        tiny_llm.engine.step()
    assert stats.free_pages + stats.cached_pages == tiny_llm.engine.facts.sizes.num_pages


@pytest.fixture
def other(llm: LLM) -> LLM:
    """A second LLM over the same engine, to be closed or broken."""
    made = LLM.__new__(LLM)
    vars(made).update(vars(llm), shared=SharedEngine(llm.engine))
    return made


class Threads:
    """Functions in threads of their own, and what they return or raise."""

    def __init__(self, *functions: Callable[[], Any]):
        self.results: list[Any] = [None] * len(functions)
        self._threads = [threading.Thread(target=self._run, args=item, daemon=True) for item in enumerate(functions)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, function: Callable[[], Any]) -> None:
        try:
            self.results[index] = function()
        except BaseException as e:
            self.results[index] = e

    def join(self) -> list[Any]:
        ends = time.monotonic() + SECONDS
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"
        return self.results


def eventually(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.001)


def planted(llm: LLM, before: Callable[[int], None]) -> None:
    """`before` hears the number of each step, within it."""
    engine, count = llm.engine, iter(range(10_000))

    def wrapped() -> list[Event]:
        before(next(count))
        return type(engine).step(engine)

    engine.step = wrapped  # the fixture takes it away


def token_ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.outputs] for output in outputs]


def streamed(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[list[int]]]:
    found = [[[] for _ in range(params.n)] for _ in prompts]
    for position, event in llm.stream(prompts, params):
        found[position][event.index] += tokens_of(event)
    return found


def tokens_of(event: Delta | Finished) -> list[int]:
    return event.token_ids if isinstance(event, Delta) else []


def left(llm: LLM, prompts: list[str], params: SamplingParams, way: int) -> list[list[list[int]]]:
    """The first event of a stream that is closed, dropped, or dropped as a part of a cycle."""
    stream = llm.stream(prompts, params)
    position, event = next(stream)
    if way == 0:
        stream.close()  # type: ignore[attr-defined]
    elif way == 1:
        loop: list[Any] = [stream]
        loop.append(loop)
    return [[[position, event.index, *tokens_of(event)]]]


def test_every_call_gets_what_it_gets_alone(llm: LLM):
    """Greedy and seeded, one and many prompts, whole, streamed and abandoned; several to a slot."""
    seeded = [SamplingParams(temperature=1.0, seed=s, n=1 + s % 2, max_tokens=14, ignore_eos=True) for s in range(4)]
    stop = dataclasses.replace(GREEDY, max_tokens=20, stop=("ab", "k"))
    calls: list[Callable[[], Any]] = []
    for i in range(8):
        prompts = [("abc", "lkj", "dd", "fgh", "cab")[(i + j) % 5] for j in range(1 + i % 3)]
        params = [GREEDY, stop, *seeded][i % 6]
        calls.append(lambda p=prompts, s=params: token_ids(llm.generate(p, s, use_tqdm=False)))
        calls.append(lambda p=prompts, s=params: streamed(llm, p, s))
        calls.append(lambda p=prompts[:1], i=i: left(llm, p, GREEDY, i % 3))
    before = llm.stats.compilations_after_warmup
    expected = [call() for call in calls]

    def some(start: int) -> list[Any]:
        order = [*range(start, len(calls)), *range(start)]
        return [(i, calls[i]()) for i in order[::2]]

    for results in Threads(*(lambda s=start: some(s) for start in range(0, 24, 4))).join():
        assert not isinstance(results, BaseException), results
        for i, result in results:
            assert result == expected[i], f"call {i}"
    gc.collect()
    assert llm.stats.compilations_after_warmup == before


def test_two_threads_share_every_round(llm: LLM):
    alone = []
    for prompt in ("abc", "fgh"):
        before = llm.stats.rounds
        alone.append((token_ids(llm.generate(prompt, LONG)), llm.stats.rounds - before))
    running: list[int] = []
    both = threading.Barrier(2)

    def step(number: int) -> None:
        if number == 0:
            eventually(lambda: bool(llm.shared._queue))  # the other one wants to submit
        running.append(llm.engine.scheduler.stats.running)

    planted(llm, step)

    def call(prompt: str) -> Any:
        stream = llm.stream(prompt, LONG)
        both.wait(SECONDS)
        return [[[token for _, event in stream for token in tokens_of(event)]]]

    before = llm.stats.rounds
    assert Threads(lambda: call("abc"), lambda: call("fgh")).join() == [tokens for tokens, _ in alone]
    assert max(running) == 2
    longest = max(rounds for _, rounds in alone)
    assert longest <= llm.stats.rounds - before <= longest + 3 < sum(rounds for _, rounds in alone)


def test_a_function_waits_for_one_step_only(llm: LLM):
    """Also while the thread that steps has long to go: it does not take the engine again before those who asked."""
    events: list[str] = []
    entered = threading.Event()

    def before(step: int) -> None:
        if step == 4:
            entered.set()
            eventually(lambda: bool(llm.shared._queue))
        events.append(f"step {step}")

    planted(llm, before)
    calling = Threads(lambda: llm.generate("abc", LONG))
    assert entered.wait(SECONDS)
    assert llm.shared.call(lambda engine: events.append("function")) is None
    calling.join()
    assert events.index("function") == events.index("step 4") + 1 and len(events) > 10


def test_what_is_done_waits_for_nobody(llm: LLM):
    """A call returns with its last token, though the thread that steps has long to go."""
    entered, done = threading.Event(), threading.Event()
    waited: list[bool] = []

    def before(step: int) -> None:
        if step == 1:
            entered.set()
            eventually(lambda: bool(llm.shared._queue))
        if step == 12:
            waited.append(done.wait(SECONDS))

    planted(llm, before)
    calling = Threads(lambda: llm.generate("abc", LONG))
    assert entered.wait(SECONDS)
    assert len(llm.generate("fgh", dataclasses.replace(LONG, max_tokens=3))[0].token_ids) == 3
    done.set()
    calling.join()
    assert waited == [True]


def test_policies_counters_and_flushes_beside_generation(llm: LLM):
    expected = token_ids(llm.generate(["abc", "lkj"], LONG))
    done = threading.Event()

    def meddle() -> int:
        rounds = [0]
        while len(rounds) < 2 or not done.is_set():
            llm.use_policy(StaticPolicy(Tier(3)))
            assert llm.flush_prefix_cache() >= 0
            stats = llm.stats
            rounds.append(stats.rounds)
            assert stats.running + stats.waiting <= 4 and stats.rounds_by_tier.keys() <= {"chain-3"}
        assert rounds == sorted(rounds)
        return len(rounds)

    meddling = Threads(meddle, meddle)
    calls = Threads(*[lambda: token_ids(llm.generate(["abc", "lkj"], LONG, use_tqdm=False))] * 2).join()
    done.set()
    assert calls == [expected] * 2
    assert all(isinstance(count, int) for count in meddling.join())
    llm.use_policy(llm.engine.new_policy())


@pytest.mark.parametrize("error", [ArithmeticError("planted"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_step_that_fails_ends_every_call(llm: LLM, error: BaseException):
    """What it had in hand is lost: no call may go on without it. The next ones find a clean engine."""
    expected = token_ids(llm.generate(["abc", "fgh", "dd"], LONG))
    paused = llm.stream("dd", LONG)
    next(paused)
    calls = [lambda: llm.generate("abc", LONG), lambda: list(llm.stream("fgh", LONG)), lambda: llm.generate("kk", LONG)]

    def before(step: int) -> None:
        if step == 0:
            eventually(lambda: len(llm.shared._queue) >= 2)  # the others want to submit
        if step == 5:
            raise error

    planted(llm, before)
    results = Threads(*calls).join()
    if isinstance(error, Exception):
        assert results == [error] * 3
        with pytest.raises(ArithmeticError, match="planted"):
            list(paused)
    else:
        assert results.count(error) == 1, results
        told = [result for result in results if result is not error]
        assert all(type(e) is RuntimeError and "a step was interrupted in another thread" in str(e) for e in told)
        with pytest.raises(RuntimeError, match="interrupted") as caught:
            list(paused)
        assert caught.value.__cause__ is error
        with pytest.raises(RuntimeError, match="interrupted"):
            next(paused)  # not the end of a text
    assert llm.stats.running == llm.stats.cached_pages == 0
    assert token_ids(llm.generate(["abc", "fgh", "dd"], LONG)) == expected


def test_an_interrupt_of_a_call_that_waits(llm: LLM):
    """Ctrl-C in the main thread, while another steps: that one goes on, and the slot is free."""
    expected = token_ids(llm.generate("abc", LONG))
    entered, go_on = threading.Event(), threading.Event()
    waited: list[bool] = []

    def before(step: int) -> None:
        if step == 3:
            entered.set()
            waited.append(go_on.wait(SECONDS))

    mine = llm.stream("fgh", LONG)
    planted(llm, before)
    calling = Threads(lambda: token_ids(llm.generate("abc", LONG)))
    entered.wait(SECONDS)
    main = threading.get_ident()
    assert main == threading.main_thread().ident

    def interrupt() -> None:
        eventually(lambda: any(turn.thread == main for turn in llm.shared._queue))
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = Threads(interrupt)
    with pytest.raises(KeyboardInterrupt):
        while True:  # deltas of the steps before
            next(mine)
    interrupting.join()
    mine.close()  # type: ignore[attr-defined]  # does not wait for the step
    go_on.set()
    assert calling.join() == [expected] and waited == [True]
    assert list(mine) == []


def test_ctrl_c_within_a_step_comes_after_it(llm: LLM):
    """The step is whole, so that the calls of other threads lose nothing; a second one does not wait."""
    expected = token_ids(llm.generate("abc", LONG))
    assert threading.current_thread() is threading.main_thread()
    ended: list[int] = []
    stream, mine = llm.stream("abc", LONG), llm.stream("fgh", LONG)
    engine = llm.engine

    def interrupted() -> list[Event]:
        signal.raise_signal(signal.SIGINT)
        events = type(engine).step(engine)
        ended.append(len(events))
        return events

    engine.step = interrupted
    handler = signal.getsignal(signal.SIGINT)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            while True:
                next(mine)
        assert signal.getsignal(signal.SIGINT) == handler
    assert len(ended) == 3
    vars(engine).pop("step")
    mine.close()  # type: ignore[attr-defined]
    tokens = [token for _, event in stream for token in tokens_of(event)]
    assert [[tokens]] == expected

    def twice() -> list[Event]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was held back")

    stream, engine.step = llm.stream("abc", LONG), twice
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert signal.getsignal(signal.SIGINT) == handler


def test_collecting_abandoned_streams_within_a_step(llm: LLM):
    """Their finalizers run in the thread that has the engine, also those that close them in so many words."""
    expected = token_ids(llm.generate("abc", LONG))
    kept: list[Any] = []

    def within(stream: Any) -> Iterator[Any]:
        try:
            yield next(stream)
        finally:
            stream.close()

    for wrap in (lambda stream: stream, within):
        cycle: list[Any] = [wrap(llm.stream("fgh", LONG))]
        next(cycle[0])
        cycle.append(cycle)
        kept.append(cycle)
    del cycle
    running: list[tuple[int, int]] = []

    def before(step: int) -> None:
        stats = llm.engine.scheduler.stats
        running.append((stats.running, stats.waiting))
        if step == 3:
            kept.clear()
            gc.collect()

    planted(llm, before)
    assert Threads(lambda: token_ids(llm.generate("abc", LONG))).join() == [expected]
    assert running[3:6] == [(2, 1), (0, 1), (1, 0)]


def test_within_a_step_of_the_same_thread(llm: LLM):
    """Counters can be read there; asking for tokens is refused, where it can only hang."""
    expected = token_ids(llm.generate("abc", GREEDY))
    seen: list[Any] = []

    def within(_: Any) -> None:
        seen.append(llm.stats.running)
        with pytest.raises(RuntimeError, match="from within a step of the same LLM"):
            llm.generate("fgh", GREEDY)

    llm.engine.on_round = within
    try:
        assert Threads(lambda: token_ids(llm.generate("abc", GREEDY))).join() == [expected]
    finally:
        llm.engine.on_round = None
    assert seen and seen[0] == 1


def test_one_stream_for_several_threads(llm: LLM):
    (output,) = llm.generate("abc", LONG)
    stream = llm.stream("abc", LONG)
    parts = Threads(*[lambda: list(stream)] * 3).join()
    events = [event for part in parts for _, event in part]
    assert sorted(token for event in events for token in tokens_of(event)) == sorted(output.token_ids)
    assert [event.output.token_ids for event in events if isinstance(event, Finished)] == [output.token_ids]


def test_closing_ends_calls_and_then_everything_is_refused(llm: LLM, other: LLM):
    entered, main = threading.Event(), threading.get_ident()

    def before(step: int) -> None:
        if step == 3:
            entered.set()
            eventually(lambda: any(turn.thread == main for turn in other.shared._queue))

    with other as same:
        assert same is other
        expected = token_ids(same.generate("abc", GREEDY))
        planted(other, before)
        paused = other.stream("dd", LONG)
        calls = Threads(*[lambda: [other.generate("abc", LONG) for _ in range(200)]] * 2)
        entered.wait(SECONDS)
    for error in calls.join():
        assert isinstance(error, RuntimeError) and "closed" in str(error)
    other.close()
    with pytest.raises(RuntimeError, match="this LLM was closed while the call ran"):
        list(paused)  # after what had come before
    uses: list[Callable[[], Any]] = [
        lambda: other.generate("abc", GREEDY), lambda: other.stream("abc"), lambda: other.stats, lambda: other.engine,
        lambda: other.tokenizer, other.flush_prefix_cache,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            use()
    paused.close()  # type: ignore[attr-defined]
    assert token_ids(llm.generate("abc", GREEDY)) == expected  # the engine lives on in the other one


def test_an_engine_that_cannot_be_mended(llm: LLM, other: LLM, monkeypatch: pytest.MonkeyPatch):
    """A step fails, and so does freeing what it ran: clear errors, not hangs, for whoever comes."""
    stream = other.stream("abc", LONG)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "abort", lambda request_id: 1 / 0)
        planted(other, lambda step: 1 // 0 if step == 2 else None)
        with pytest.raises(ZeroDivisionError):
            list(stream)
    for use in (lambda: other.generate("abc"), lambda: other.stats, lambda: next(stream)):
        with pytest.raises((RuntimeError, ZeroDivisionError), match=r"cannot go on: ZeroDivisionError|by zero"):
            use()
    other.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        _ = other.stats
    for request_id in list(llm.engine._live):
        assert llm.engine.abort(request_id).reason is FinishReason.ABORT  # type: ignore[union-attr]
