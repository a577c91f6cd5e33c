"""Tiny engines that are served: compiled once a session, put on a thread of its own by every test, and looked at."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quick
from faults import ChattyFacade, EngineFacade
from stories import Stories, eventually
from tiny_engines import (
    ALPHABET,
    EOS,
    TREE,
    VOCAB,
    WRITTEN,
    build_tiny_engine,
    build_writing_engine,
    text_of,
    tiny_tokenizer,
)

from jaxspec.adaptive.policy import RoundStats
from jaxspec.engine import Engine
from jaxspec.events import Delta, Finished
from jaxspec.request import RequestMetrics, RequestOutput, SamplingParams
from jaxspec.stats import EngineStats
from serve.config import ServerConfig
from serve.core.completion import Completion
from serve.core.engine_client import EngineClient, ThreadLink
from serve.core.errors import StatusError
from serve.core.generator import Generator
from serve.core.jobs import Job
from serve.core.lifecycle import Lifecycle

pytest.register_assert_rewrite("gateway", "sockets", "wires")

_ids = itertools.count()
_JOB_FIELDS = {field.name for field in dataclasses.fields(Job)}


def job(prompt: Any, **options: Any) -> Job:
    """A greedy job of a text, a conversation or token ids; options are the job's and its sampling parameters'."""
    own = {name: options.pop(name) for name in list(options) if name in _JOB_FIELDS}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **options})
    prompt = tuple(prompt) if isinstance(prompt, list) else prompt
    return Job(**{"request_id": f"job-{next(_ids)}", "prompt": prompt, "params": params, **own})


def hostile_grammars() -> dict[str, dict[str, Any]]:
    """Grammars within every limit of size that cost compilers or parsers dearly: kind of a GrammarSpec and its value.

    Enumerations, chains and ambiguity as in CVE-2025-58446; all of them are legal.
    """
    letters = "abcdefghijkl"
    words = [f"{letters[i % 12]}{letters[i // 12 % 12]}{letters[i // 144 % 12]}{i}" for i in range(12_000)]
    references: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2999)}
    references["d2999"] = {"type": "string"}
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(2999))
    doubling = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60))
    either = {f"p{i}": {"anyOf": [{"type": "string"}, {"enum": [f"x{j}" for j in range(30)]}]} for i in range(150)}
    as_json: dict[str, Any] = {
        "an enumeration of 12,000": {"enum": words},
        "a chain of 3000 references": {"$defs": references, "$ref": "#/$defs/d0"},
        "multiples of a large prime": {"type": "integer", "multipleOf": 9999991},
        "a string of a billion": {"type": "string", "minLength": 10**9},
        "an array of a billion": {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
        "150 optional alternatives": {"type": "object", "properties": either},
        "patterns that all have to match": {"allOf": [{"type": "string", "pattern": f"^.*{c}.{{9}}$"} for c in "abcd"]},
    }
    return {
        **{name: {"json_schema": json.dumps(schema)} for name, schema in as_json.items()},
        "arrays in arrays": {"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000},
        "4096 choices": {"choice": words[:4096]},
        "a chain of 3000 rules": {"lark": f'start: r0\n{rules}r2999: "a"'},
        "a text of 2**60 letters": {"lark": f'start: r0\n{doubling}r60: "a"'},
        "exponentially many readings": {"lark": "start: e\ne: e | e e | e e e | /[a-z]/ | /[a-z]+/ e"},
        "repetitions of repetitions": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        "a large automaton": {"regex": "(a|b)*a(a|b){24}c"},
    }


def resident_bytes() -> int:
    """Memory of this process that is in use: the allocator gives back what it keeps for later."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclasses.dataclass
class Recorder:
    """Metrics that only remember."""

    rounds: list[RoundStats] = dataclasses.field(default_factory=list)
    stats: list[EngineStats] = dataclasses.field(default_factory=list)
    tokens: list[tuple[Job, int, float | None]] = dataclasses.field(default_factory=list)
    finished: list[tuple[Job, str, int, RequestMetrics]] = dataclasses.field(default_factory=list)
    refused: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    other_chats: int = 0

    def on_round(self, stats: RoundStats) -> None:
        self.rounds.append(stats)

    def on_compiled(self, ready: int, total: int) -> None:
        self.compiled = ready, total

    def on_stats(self, stats: EngineStats, pages: int) -> None:
        assert stats.free_pages + stats.cached_pages <= pages
        self.stats.append(stats)

    def on_tokens(self, job: Job, count: int, gap_seconds: float | None) -> None:
        assert count > 0 and (gap_seconds is None or gap_seconds >= 0)
        self.tokens.append((job, count, gap_seconds))

    def on_finished(self, job: Job, reason: str, prompt_tokens: int, metrics: RequestMetrics) -> None:
        self.finished.append((job, reason, prompt_tokens, metrics))

    def on_refused(self, code: str, reason: str) -> None:
        self.refused.append((code, reason))

    def on_other_chat(self) -> None:
        self.other_chats += 1

    @property
    def reasons(self) -> list[str]:
        """Why completions ended, in order."""
        return [str(reason) for _, reason, _, _ in self.finished]


@dataclasses.dataclass
class Stack:
    """A serving engine without gRPC."""

    facade: EngineFacade
    engine: EngineClient
    generator: Generator
    lifecycle: Lifecycle
    metrics: Recorder
    config: ServerConfig

    async def settled(self) -> None:
        """Returns when the engine has nothing left; checks that pages and tables are at their baseline."""
        generator = self.generator
        # Texts of requests that were given up are prepared to their end.
        await eventually(lambda: generator.in_engine == 0 and generator._preparation.preparing == 0)
        stats = await self.engine.call(lambda engine: engine.stats)
        assert stats.running == stats.waiting == 0
        assert stats.free_pages + stats.cached_pages == self.facade.facts.sizes.num_pages
        live, admission = self.engine._live, generator._admission
        assert not (live._live or live._holding or live._submitted)
        assert not generator._by_id and not self.engine._calls
        assert admission is not None and (admission.waiting, admission.waiting_pages) == (0, 0)

    async def start(self, prompt: Any, **options: Any) -> Completion:
        """Starts a job; options are the job's and its sampling parameters'."""
        return await self.generator.start(job(prompt, **options))

    async def start_held(self, *jobs: Job) -> list[Completion]:
        """Starts jobs that the engine then has, and has done nothing for: it is held before its first step."""
        self.facade.idle = True
        generations = await asyncio.gather(*(self.generator.start(job) for job in jobs))
        await self.facade.end_idling()
        return generations


@dataclasses.dataclass
class Result:
    """A request, read to its end.

    Attributes:
      tokens, text, logprobs: by completion, joined from the deltas, or from the ends of a job that is not streamed.
      ends: by completion.
      deltas: how many there were.
    """

    tokens: list[list[int]]
    text: list[str]
    logprobs: list[list[Any]]
    ends: list[Finished]
    deltas: int = 0


async def read(request: Completion) -> Result:
    """Everything, checked for consistency."""
    n = request.job.params.n
    result = Result([[] for _ in range(n)], [""] * n, [[] for _ in range(n)], [])
    ends: dict[int, Finished] = {}
    try:
        async for event in request:
            assert event.index not in ends, "an event after the last"
            if isinstance(event, Finished):
                ends[event.index] = event
            result.deltas += isinstance(event, Delta)
            if isinstance(event, Delta) or not request.job.stream:
                part = event if isinstance(event, Delta) else event.output.outputs[0]
                assert part.token_ids or part.text, "an empty delta"
                result.tokens[event.index] += part.token_ids
                result.text[event.index] += part.text
                result.logprobs[event.index] += part.logprobs or []
    finally:
        request.close()
    result.ends = [ends[i] for i in range(n)]
    for i, end in enumerate(result.ends):
        assert end.output.token_ids == result.tokens[i] and end.output.text == result.text[i]
        assert end.output.metrics.output_tokens == len(result.tokens[i])
    return result


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


class Kit(Stories):
    """What tests of served engines share.

    Attributes:
      engine: the tiny one, unless it says otherwise.
      written, tree: of the one that can write JSON: its characters by token, and its only tier that drafts.
    """

    written, tree = WRITTEN, TREE
    resident_bytes, hostile_grammars = staticmethod(resident_bytes), staticmethod(hostile_grammars)
    alphabet, eos, vocab = ALPHABET, EOS, VOCAB
    read, agrees = staticmethod(read), staticmethod(agrees)
    job, text_of, tiny_tokenizer = staticmethod(job), staticmethod(text_of), staticmethod(tiny_tokenizer)
    build_tiny_engine = staticmethod(build_tiny_engine)
    facade, recorder, stack_type, status_error = EngineFacade, Recorder, Stack, StatusError
    chatty_facade = ChattyFacade

    def __init__(self, engine: Engine):
        self.engine = engine

    def clean(self) -> EngineFacade:
        """The session's engine, idle, with an empty prefix cache, behind a fresh facade."""
        for request_id in list(self.engine.scheduler._by_id):
            self.engine.abort(request_id)
        while self.engine.has_work:
            self.engine.step()
        self.engine.flush_prefix_cache()
        self.engine.use_policy(self.engine.new_policy())
        self.engine.on_round = None
        return EngineFacade(self.engine)

    @contextlib.asynccontextmanager
    async def serving(
        self, *, metrics: Any = None, build: Callable[[], Any] | None = None, wait: bool = True, **config: Any
    ) -> AsyncIterator[Stack]:
        """A stack on this loop, with config's defaults but short times where a test would wait for them."""
        facade = self.clean()
        settings = ServerConfig(**{"withdrawal_seconds": 0.0, **config})
        recorder = Recorder() if metrics is None else metrics
        engine = EngineClient(ThreadLink(lambda _: facade if build is None else build()))
        generator = Generator(engine, settings, recorder)
        stack = Stack(facade, engine, generator, Lifecycle(engine, generator, settings), recorder, settings)
        engine.start()
        stack.lifecycle.start()
        try:
            if wait:
                await engine.ready()
            yield stack
            if metrics is None:
                assert not engine.guard.failures, "the recorder found something wrong"
        finally:
            facade.release()
            stack.lifecycle.close()
            generator.close()
            await engine.stop()

    def offline(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[list[RequestOutput]]:
        """What the engine makes of each request when nothing is served, one at a time: n outputs each."""
        self.clean()
        results = []
        for prompt, params in requests:
            ids = [self.engine.add(prompt, params, index=i) for i in range(params.n)]
            outputs: dict[str, RequestOutput] = {}
            while self.engine.has_work:
                outputs |= {e.request_id: e.output for e in self.engine.step() if isinstance(e, Finished)}
            results.append([outputs[i] for i in ids])
        return results


@pytest.fixture(scope="session")
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of a process that compiles the demo: quickly, or with --exhaustive as users do."""
    return {**os.environ, **({} if request.config.getoption("--exhaustive") else quick.QUICKLY)}


class Clock:
    """`time` as a served engine sees it: its monotonic clock can be put forward by `ahead` seconds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of requests, steps and drains. A step that is held grows old by it, and so does output that nobody has read yet:
    give watchdog_seconds and stall_seconds more than that."""
    clock = Clock()
    for module in ("engine_client", "generator", "completion", "lifecycle", "live"):
        monkeypatch.setattr(f"serve.core.{module}.time", clock)
    return clock


@pytest.fixture(scope="session")
def stories() -> Stories:
    return Stories()


@pytest.fixture(scope="session")
def serve_engine(kept_executables: Path) -> Engine:
    """Built once; tests reach it through `kit`."""
    return build_tiny_engine(compile_cache=kept_executables)


@pytest.fixture
def kit(serve_engine: Engine) -> Kit:
    return Kit(serve_engine)


@pytest.fixture
def expected(kit: Any) -> Callable[..., list[int]]:
    """The tokens that the engine gives offline."""
    known: dict[Any, list[int]] = {}

    def of(prompt: str | list[int] = "abc", **sampling: Any) -> list[int]:
        fields = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True} | sampling
        tokens = [kit.alphabet.index(letter) for letter in prompt] if isinstance(prompt, str) else prompt
        key = (tuple(tokens), repr(fields))
        if key not in known:
            known[key] = kit.offline([(tokens, SamplingParams(**fields))])[0][0].token_ids
        return known[key]

    return of


@pytest.fixture
def kit_of() -> type[Kit]:
    """Makes the kit of another engine."""
    return Kit


@pytest.fixture(scope="session")
def writing_engine(kept_executables: Path) -> Engine:
    """Built once; tests reach it through `writing_kit`."""
    return build_writing_engine(kept_executables)


@pytest.fixture
def writing_kit(writing_engine: Engine) -> Kit:
    """The kit around the engine that can write JSON."""
    return Kit(writing_engine)
