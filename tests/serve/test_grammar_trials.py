"""Grammars that strangers send: each is tried in a process of its own, and costs others little."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.text.grammar import GrammarCompiler, GrammarSpec
from jaxspec.text.matcher import SIMPLER
from jaxspec.text.tokenizer import Tokenizer
from serve.core import grammar_child, grammar_trials
from serve.core.errors import StatusError
from serve.core.grammar_trials import GrammarTrials

WRITTEN = "abcdefghijklmnopqrstuvwxyz0123456789-"
#: Takes minutes and gigabytes.
ENDLESS = [GrammarSpec("json_schema", json.dumps({"type": "integer", "multipleOf": 9999991 + 4 * i})) for i in range(9)]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    backend = Backend(models.BPE({character: i for i, character in enumerate(WRITTEN)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return GrammarCompiler(Tokenizer(backend, eos_token_ids=[len(WRITTEN)]), len(WRITTEN) + 1)


@pytest.fixture
def trials(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarTrials]:
    monkeypatch.setattr(grammar_child, "COMPILE_SECONDS", 1.0)
    monkeypatch.setattr(grammar_child, "PATIENCE_SECONDS", 200.0)
    made = GrammarTrials(8)
    yield made
    made.close()
    for thread in made._threads:
        thread.join(100)
        assert not thread.is_alive()


async def warmed(trials: GrammarTrials, compiler: GrammarCompiler, spec: str = "a") -> None:
    """Both children are up."""
    compiler.shrink(0)
    await trials.compile(compiler, GrammarSpec("regex", spec))
    async with asyncio.timeout(120):
        while len(trials._children) < grammar_trials.CHILDREN or not all(c._process for c in trials._children):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # the tokenizer is loaded


async def timed(awaitable: Any) -> tuple[float, Any]:
    began = time.monotonic()
    try:
        result = await awaitable
    except Exception as e:
        result = e
    return time.monotonic() - began, result


def test_what_takes_too_long_is_refused_and_the_next_grammar_is_not(
    stories: Any, compiler: GrammarCompiler, trials: GrammarTrials
) -> None:
    async def story() -> None:
        await warmed(trials, compiler)
        seconds, error = await timed(trials.compile(compiler, ENDLESS[0]))
        assert isinstance(error, StatusError) and error.code.name == "INVALID_ARGUMENT", error
        assert error.message == f"the json_schema takes more than 2 s to compile; {SIMPLER}"
        assert seconds > 0.9
        grammar = await trials.compile(compiler, GrammarSpec("regex", "(ab)+"))
        assert grammar is compiler.known(grammar.spec) and grammar.size_bytes > 0
        for wrong in (GrammarSpec("regex", "("), GrammarSpec("json_schema", "{")):
            await stories.fails(trials.compile(compiler, wrong), "INVALID_ARGUMENT")
        assert trials.pending == 0

    stories.run(story())


def test_many_long_ones_delay_the_others_little_and_known_ones_not_at_all(
    stories: Any, compiler: GrammarCompiler, trials: GrammarTrials
) -> None:
    async def story() -> None:
        await warmed(trials, compiler)
        floods = [asyncio.ensure_future(timed(trials.compile(compiler, spec))) for spec in ENDLESS[:6]]
        await stories.eventually(lambda: trials._running_long is not None)
        with pytest.raises(StopIteration):  # known: it waits for nothing
            trials.compile(compiler, GrammarSpec("regex", "a")).send(None)
        # Each of the others runs for SHORT_SECONDS, and its process is started anew; then they wait for each other.
        await trials.compile(compiler, GrammarSpec("regex", "b+c"))
        assert not all(flood.done() for flood in floods)  # it did not wait for all that came before
        # One that many ask for is compiled once; whoever leaves takes what waits along.
        twice = [asyncio.ensure_future(trials.compile(compiler, ENDLESS[8])) for _ in range(2)]
        await asyncio.sleep(0)
        assert trials.pending <= 7
        for task in twice:
            task.cancel()
        await asyncio.gather(*twice, return_exceptions=True)
        for flood in floods[2:]:
            flood.cancel()
        ends = await asyncio.gather(*floods, return_exceptions=True)
        cut = [end for end in ends if isinstance(end, asyncio.CancelledError)]
        assert cut and all("takes more than" in str(end[1]) for end in ends if isinstance(end, tuple))
        await stories.eventually(lambda: trials.pending == 0)

    stories.run(story())


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGSEGV, "nested too deeply"), (signal.SIGABRT, "MiB to compile"), (signal.SIGPROF, "2 s to compile")],
)
def test_a_grammar_that_takes_the_process_is_refused(
    stories: Any,
    compiler: GrammarCompiler,
    trials: GrammarTrials,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    reason: str,
) -> None:
    monkeypatch.setattr(grammar_child, "COMPILE_SECONDS", 30.0)

    async def story() -> None:
        await warmed(trials, compiler)
        before = {child._process.pid for child in trials._children if child._process}
        asking = asyncio.ensure_future(trials.compile(compiler, ENDLESS[1]))
        await stories.eventually(lambda: trials._running_long is not None)
        for pid in before:
            os.kill(pid, number)
        error = await stories.fails(asking, "INVALID_ARGUMENT")
        assert reason in error.message
        # Also the process that was idle is there again for whoever comes next.
        for i in range(3):
            await trials.compile(compiler, GrammarSpec("regex", f"c{{{i + 1}}}"))

    stories.run(story())


def test_a_busy_machine_is_not_the_grammars_fault(
    stories: Any, compiler: GrammarCompiler, trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_child, "PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(grammar_child, "COMPILE_SECONDS", 30.0)

    async def story() -> None:
        await warmed(trials, compiler)
        asking = asyncio.ensure_future(trials.compile(compiler, ENDLESS[1]))
        await stories.eventually(lambda: trials._running_long is not None)
        for child in trials._children:
            if child._process:
                os.kill(child._process.pid, signal.SIGSTOP)
        assert (await stories.fails(asking, "UNAVAILABLE")).reason == "grammar"
        await trials.compile(compiler, GrammarSpec("regex", "(fg)+"))

    stories.run(story())


def test_memory_is_bounded(stories: Any, compiler: GrammarCompiler, trials: GrammarTrials, monkeypatch: Any) -> None:
    monkeypatch.setattr(grammar_child, "COMPILE_SECONDS", 30.0)
    monkeypatch.setattr(grammar_child, "COMPILE_BYTES", 64 * 2**20)
    hungry = GrammarSpec("regex", "(?i)" + r"[\w]{1,50}" * 10_000)

    async def story() -> None:
        assert "256 MiB" in (await stories.fails(trials.compile(compiler, hungry), "INVALID_ARGUMENT")).message
        large = GrammarSpec("regex", "(?i)" + r"[\w]{1,50}" * 400)
        grammar = await trials.compile(compiler, large)
        assert grammar.size_bytes > 5 * 2**20  # as the other process saw it
        # A process that has freed as much before sees nothing of the next one.
        monkeypatch.setattr(grammar_trials, "MAX_HELD_BYTES", grammar.size_bytes - 1)
        error = await stories.fails(trials.compile(compiler, GrammarSpec("regex", "abc")), "RESOURCE_EXHAUSTED")
        assert error.reason == "grammar_memory" and error.retry_seconds is not None
        del grammar
        await trials.compile(compiler, GrammarSpec("regex", "abc"))

    stories.run(story())


def test_too_many_are_refused_and_closing_tells_everybody(
    stories: Any, compiler: GrammarCompiler, trials: GrammarTrials
) -> None:
    async def story() -> None:
        asking = [asyncio.ensure_future(trials.compile(compiler, spec)) for spec in ENDLESS[:8]]
        await asyncio.sleep(0)
        error = await stories.fails(trials.compile(compiler, ENDLESS[8]), "RESOURCE_EXHAUSTED")
        assert "8 grammars" in error.message and error.retry_seconds == 1.0
        await asyncio.sleep(0.2)
        trials.close()
        for task in asking:
            assert (await stories.fails(task, "UNAVAILABLE")).reason == "stopped"
        assert (await stories.fails(trials.compile(compiler, ENDLESS[8]), "UNAVAILABLE")).reason == "stopped"
        assert trials.pending == 0
        processes = [child._process for child in trials._children]
        await stories.eventually(lambda: not any(thread.is_alive() for thread in trials._threads))
        assert all(process is None or process.poll() is not None for process in processes)

    stories.run(story())


def test_a_process_that_does_not_start_is_not_the_clients_fault(
    stories: Any, compiler: GrammarCompiler, trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(grammar_child.sys, "executable", "/bin/false")
            spec = GrammarSpec("regex", "(de)+")
            assert (await stories.fails(trials.compile(compiler, spec), "UNAVAILABLE")).reason == "grammar"
        await trials.compile(compiler, spec)

    stories.run(story())


def test_the_program_imports_no_jax_and_ends_with_its_server() -> None:
    check = "import sys, serve.core.grammar_child; print([m for m in ('jax', 'flax') if m in sys.modules])"
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    out = subprocess.run(
        [sys.executable, "-c", check], cwd=root, capture_output=True, text=True, check=True, timeout=300
    )
    assert out.stdout.strip() == "[]"
    assert not any(thread.name == "grammar" for thread in threading.enumerate())
