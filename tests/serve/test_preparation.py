"""Threads that prepare: what they count, what closing them says, and that no text keeps the process from ending."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from chats import SWITCH, tokenizer

from jaxspec.facts import EngineFacts
from jaxspec.request import SamplingParams
from jaxspec.sizes import Sizes
from jaxspec.text.grammar import GrammarSpec
from serve.__main__ import _BUSY
from serve.core.jobs import Chat, Job
from serve.core.preparation import Preparation, _Threads

ROOT = Path(__file__).resolve().parents[2]


class Slow:
    """A tokenizer that waits until it is told to go on."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def encode(self, text: str, **options: Any) -> list[int]:
        assert self.go.wait(60)
        if text == "bad":
            raise ValueError("a bad text")
        return [len(text)]


class Engine:
    """As much of an EngineClient as preparation sees."""

    def __init__(self) -> None:
        self.tokenizer = Slow()
        sizes = Sizes(4, 50, 8, 13, 3, 100, 16)
        tokenizer: Any = self.tokenizer
        self.facts = EngineFacts(sizes, (4,), 13, True, frozenset(), tokenizer, None)

    def known(self) -> EngineFacts:
        return self.facts


def test_a_place_is_free_when_the_thread_is_done(stories: Any) -> None:
    async def story() -> None:
        engine = Engine()
        preparation = Preparation(engine, None, 4)  # pyright: ignore[reportArgumentType]
        asking = [asyncio.ensure_future(preparation.encode("a" * i, True)) for i in range(1, 5)]
        await stories.eventually(lambda: len(preparation._text._calls) == 2)
        error = await stories.fails(preparation.encode("b", True), "RESOURCE_EXHAUSTED")
        assert error.reason == "preparing" and "4 texts" in error.message
        for task in asking[:3]:  # two of them run, one waits
            task.cancel()
        await asyncio.gather(*asking[:3], return_exceptions=True)
        assert preparation.preparing == 3
        bad = asyncio.ensure_future(preparation.encode("bad", True))
        engine.tokenizer.go.set()
        assert await asking[3] == [4]
        assert "a bad text" in (await stories.fails(bad, "INVALID_ARGUMENT")).message
        await stories.eventually(lambda: preparation.preparing == 0)
        names = {thread.name for thread in threading.enumerate()} - {threading.main_thread().name}
        assert "text" in names and {thread.name for thread in preparation._text._threads} <= _BUSY
        preparation.close()
        await stories.eventually(lambda: not any(thread.is_alive() for thread in preparation._text._threads))

    stories.run(story())


def test_chats_unlike_those_that_the_drafter_learned_from_are_told(stories: Any) -> None:
    """Those that the server writes by their arguments, those of a gateway by their end; other texts are none."""
    told: list[str] = []
    chat = lambda variables: Chat(({"role": "user", "content": "b"},), variables=variables)
    ids = lambda text: tuple(map(ord, text))

    async def story() -> None:
        engine = Engine()
        sizes = dataclasses.replace(engine.facts.sizes, max_seq_len=80)
        engine.facts = dataclasses.replace(
            engine.facts, tokenizer=tokenizer(SWITCH), vocab_size=256, sizes=sizes, chats=[{"enable_thinking": False}]
        )
        preparation = Preparation(engine, None, 4, told.append)  # pyright: ignore[reportArgumentType]
        for prompt, unlike in (
            (chat({"enable_thinking": False}), False), (chat({}), True), (ids("[user]b[assistant]"), True),
            (ids("[user]b[assistant]<t></t>"), False), (ids("b"), False), ("b", False),
        ):  # fmt: skip
            told.clear()
            await preparation.prepare(Job("r", prompt, SamplingParams(max_tokens=4)))
            assert len(told) == unlike, prompt
        preparation.close()

    stories.run(story())


def test_the_first_of_them_is_logged_and_all_are_counted(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with kit.serving() as stack:
            for _ in range(3):
                stack.generator._preparation._on_other_chat("in another mode")
            assert stack.metrics.other_chats == 3

    with caplog.at_level(logging.WARNING, "serve"):
        kit.run(story())
    assert [record.getMessage() for record in caplog.records] == ["in another mode"]


@pytest.mark.parametrize(
    ("asked", "limit", "resolved", "pages"),
    [(7, None, 7, 2), (1000, None, 1000, 13), (None, None, None, 1), (None, 5, 5, 1), (1000, 5, 1000, 13)],
)
def test_lengths_beyond_the_context(
    stories: Any, asked: int | None, limit: int | None, resolved: int | None, pages: int
) -> None:
    """They may need all that the context leaves, no more. A prompt that does not fit is refused."""

    async def story() -> None:
        preparation = Preparation(Engine(), limit, 2)  # pyright: ignore[reportArgumentType]
        job = Job("a", (1, 2, 3), SamplingParams(max_tokens=asked, min_tokens=2), fill_context=asked is None)
        prepared, needed = await preparation.prepare(job)
        assert prepared.params.max_tokens == resolved and prepared.params.seed is not None and needed == pages
        error = await stories.fails(
            preparation.prepare(dataclasses.replace(job, prompt=(1,) * 100)), "INVALID_ARGUMENT"
        )
        assert "prompt must be shorter than max_seq_len = 100 tokens, got 100" in error.message
        preparation.close()

    stories.run(story())


def test_grammars_that_wait_refuse_no_text(stories: Any) -> None:
    class Unknown:
        def known(self, spec: GrammarSpec) -> None:
            return None

    async def story() -> None:
        engine = Engine()
        engine.tokenizer.go.set()
        preparation = Preparation(engine, None, 2)  # pyright: ignore[reportArgumentType]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preparation._grammars, "_threads", [None, None])  # nothing is ever done
            compiler: Any = Unknown()
            waiting = [
                asyncio.ensure_future(preparation._grammars.compile(compiler, GrammarSpec("regex", "a" * i)))
                for i in (1, 2)
            ]
            await asyncio.sleep(0)
            await stories.fails(
                preparation._grammars.compile(compiler, GrammarSpec("regex", "b")), "RESOURCE_EXHAUSTED"
            )
            assert await preparation.encode("abc", True) == [3]
            waiting[0].cancel()
            await asyncio.gather(waiting[0], return_exceptions=True)
            assert preparation.preparing == 1
            preparation.close()
            assert (await stories.fails(waiting[1], "UNAVAILABLE")).reason == "stopped"

    stories.run(story())


def test_closing_tells_whoever_waits_and_whoever_comes(stories: Any) -> None:
    async def story() -> None:
        engine = Engine()
        preparation = Preparation(engine, None, 9)  # pyright: ignore[reportArgumentType]
        asking = [asyncio.ensure_future(preparation.encode("a", True)) for _ in range(4)]
        await stories.eventually(lambda: len(preparation._text._calls) == 2)
        preparation.close()
        preparation.close()
        for task in asking:
            assert (await stories.fails(task, "UNAVAILABLE")).reason == "stopped"
        for late in (preparation.encode("a", True), preparation.decode([1], True)):
            assert (await stories.fails(late, "UNAVAILABLE")).reason == "stopped"
        engine.tokenizer.go.set()
        await stories.eventually(lambda: preparation.preparing == 0)

    stories.run(story())


def test_the_threads_outlive_the_loop_quietly(stories: Any) -> None:
    go = threading.Event()
    made: list[_Threads] = []

    async def story() -> None:
        threads = _Threads(1, "text", 4)
        made.append(threads)
        task = asyncio.ensure_future(threads.run(lambda: go.wait(60)))
        await stories.eventually(lambda: bool(threads._threads) and not threads._calls)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stories.run(story())
    go.set()
    made[0].close()
    made[0]._threads[0].join(100)  # an exception in it would fail the test
    assert not made[0]._threads[0].is_alive()


def test_a_process_ends_while_texts_are_prepared() -> None:
    program = """
import asyncio, time
from serve.core.jobs import Job
from serve.core.preparation import _Threads
async def story():
    task = asyncio.ensure_future(_Threads(1, "text", 4).run(lambda: time.sleep(500)))
    await asyncio.sleep(0.2)
    task.cancel()
asyncio.run(story())
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=400)
