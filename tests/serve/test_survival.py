"""What a generation server must survive, over a real socket: one test for each kind of harm.

After each: the engine lives, pages and tables are back at their baseline, and what ran beside it is unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from jaxspec.adaptive.estimate import CostEstimate
from jaxspec.request import SamplingParams
from jaxspec.tier import PLAIN
from serve.app import Server
from serve.config import ServerConfig
from serve.proto import admin_pb2, generation_pb2
from serve.proto import generation_pb2 as pb
from serve.proto.services import ADMIN, GENERATION, Stub

IA, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
Code = grpc.StatusCode
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Wire:
    """A served tiny engine, and stubs that talk to it.

    Attributes:
      facade: the engine with faults (see conftest).
      ends: of every completion that the engine had: its request's id, why it ended, and its output's length.
      compilations: the process's, when this began.
    """

    kit: Any
    facade: Any
    server: Server
    channel: grpc.aio.Channel
    ends: list[tuple[str, str, int]]

    def __post_init__(self) -> None:
        self.generation = Stub(GENERATION, self.channel)
        self.admin = Stub(ADMIN, self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.generator = self.server.generator
        self.compilations = self.facade.stats.compilations_after_warmup

    async def status(self, request: pb.GenerateRequest, **call: Any) -> grpc.aio.AioRpcError:
        """The error that a request ends with; the same by stream."""
        errors = []
        for answer in (self.generation.Generate(request, **call), self.read(request, **call)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
            errors.append(caught.value)
        one, other = errors
        assert one.code() is other.code()
        # A deadline may pass at the client or at the server, each with words of its own.
        assert one.details() == other.details() or one.code() is Code.DEADLINE_EXCEEDED
        return one

    async def read(self, request: pb.GenerateRequest, **call: Any) -> list[int]:
        """The tokens of a stream of one completion."""
        tokens: list[int] = []
        async for message in self.generation.GenerateStream(request, **call):
            tokens += message.delta.token_ids
        return tokens

    async def serving(self) -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest())
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def idle(self) -> admin_pb2.GetServerInfoResponse:
        """Waits until nothing runs; every page is then free or cached."""
        async with asyncio.timeout(30):
            while True:
                loads = await self.admin.GetLoads(admin_pb2.GetLoadsRequest())
                info = await self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
                memory = info.memory
                free = memory.free_pages + memory.cached_pages == memory.pages
                if loads.running_requests == loads.waiting_requests == 0 and free:
                    assert info.compilations_after_warmup == self.compilations
                    return info
                await asyncio.sleep(0.01)

    async def live(self, count: int) -> None:
        """Waits until so many requests are live."""
        await self.kit.eventually(lambda: self.generator.live == count)

    async def held(self) -> None:
        """Waits until a step is held."""
        await self.kit.eventually(self.facade.held.is_set)

    async def advance(self, steps: int) -> None:
        """So many steps of an engine that is held, and what they bring; then it is held again."""
        self.facade.advance(steps)
        await self.held()
        await asyncio.sleep(0.02)  # the loop hears of a step right behind it


def ask(text: str = "abc", *, n: int | None = None, **sampling: Any) -> pb.GenerateRequest:
    fields = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True} | sampling
    given = {name: value for name, value in fields.items() if value is not None}
    return pb.GenerateRequest(text=text, n=n, sampling=pb.Sampling(**given))


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


@contextlib.asynccontextmanager
async def served(kit: Any, facade: Any = None, **config: Any) -> AsyncIterator[Wire]:
    facade = kit.clean() if facade is None else facade
    settings = {
        "host": "127.0.0.1", "port": 0, "metrics_port": None, "withdrawal_seconds": 0.0, "log_level": "error",
        "max_waiting_pages": 1000,
    }  # fmt: skip
    server = Server(ServerConfig(**settings | config), build=lambda: facade)
    ends: list[tuple[str, str, int]] = []
    count = server.metrics.on_finished

    def on_finished(job: Any, reason: str, prompt_tokens: int, metrics: Any) -> None:
        ends.append((job.request_id, str(reason), metrics.output_tokens))
        count(job, reason, prompt_tokens, metrics)

    server.metrics.on_finished = on_finished
    await server.start()
    try:
        await server.ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Wire(kit, facade, server, channel, ends)
    finally:
        facade.release()
        await server.stop()


def survives(
    kit: Any, expected: Any, harm: Callable[[Wire], Awaitable[None]], *, held: bool = False, **config: Any
) -> None:
    """Runs `harm` beside a request, and checks the request, the pages, and one more request.

    Args:
      held: `harm` finds that request in the engine, and no step runs unless it says so.
    """

    async def story() -> None:
        async with served(kit, **config) as wire:
            if held:
                wire.facade.hold()
            beside = asyncio.create_task(wire.read(ask("abcabc", max_tokens=100)))
            if held:
                await wire.held()
            await harm(wire)
            wire.facade.release()
            assert await beside == companion
            await wire.idle()
            assert await wire.serving()
            assert await wire.read(ask("cab")) == after

    companion, after = expected("abcabc", max_tokens=100), expected("cab")
    kit.run(story())


# Requests that can never be honoured.

TOKENS = lambda *ids: pb.GenerateRequest(tokens=pb.TokenIds(ids=ids), sampling=pb.Sampling(max_tokens=4))
GRAMMAR = lambda **form: pb.GenerateRequest(text="abc", grammar=pb.Grammar(**form))
REFUSED: dict[str, tuple[pb.GenerateRequest, str]] = {
    "no input": (pb.GenerateRequest(), "input must be exactly one of"),
    "empty text": (ask(""), "at least 1 token"),
    "no tokens": (TOKENS(), "at least 1 token"),
    "a token beyond the vocabulary": (TOKENS(1, 13), "13"),
    "the largest token": (TOKENS(2**32 - 1), "4294967295"),
    "no room for a token": (ask("a" * 120, max_tokens=1), "120"),
    "a prompt longer than the context": (ask("a" * 5000, max_tokens=None), "120"),
    "max_tokens 0": (ask(max_tokens=0), "max_tokens"),
    "max_tokens beyond int32": (ask(max_tokens=2**32 - 1), "max_tokens"),
    "a million completions": (ask(n=1_000_000), "n must be an integer from 1 to 64"),
    "no completion": (ask(n=0), "n must be"),
    "temperature NaN": (ask(temperature=math.nan), "temperature must be a finite number"),
    "temperature infinite": (ask(temperature=math.inf), "temperature"),
    "temperature negative": (ask(temperature=-0.5), "temperature"),
    "top_p NaN": (ask(top_p=math.nan), "top_p"),
    "top_p infinite": (ask(top_p=math.inf), "top_p"),
    "top_p negative": (ask(top_p=-1.0), "top_p"),
    "top_p 0": (ask(top_p=0.0), "top_p"),
    "an empty stop string": (ask(stop=[""]), "stop must hold non-empty strings"),
    "many stop strings": (ask(stop=["a"] * 65), "stop may have at most 64"),
    "a huge stop string": (ask(stop=["a" * 1_000_000]), "stop"),
    "many stop tokens": (ask(stop_token_ids=[1] * 33), "stop_token_ids"),
    "a stop token beyond the vocabulary": (ask(stop_token_ids=[13]), "13"),
    "a bias beyond the vocabulary": (ask(logit_bias={13: 1.0}), "13"),
    "an infinite bias": (ask(logit_bias={1: math.inf}), "logit_bias"),
    "many alternatives": (ask(logprobs=21), "logprobs must be an integer from 0 to 20"),
    "alternatives beyond int32": (ask(logprobs=2**32 - 1), "logprobs"),
    "min_tokens over max_tokens": (ask(min_tokens=61), "min_tokens"),
    "repetition_penalty 0": (ask(repetition_penalty=0.0), "repetition_penalty"),
    "a penalty NaN": (ask(presence_penalty=math.nan), "presence_penalty"),
    "an invalid regex": (GRAMMAR(regex="a(b"), "regex"),
    "an invalid schema": (GRAMMAR(json_schema='{"type": "nothing"}'), "schema"),
    "a schema that is no JSON": (GRAMMAR(json_schema="{"), "schema"),
    "a grammar that fails at its first mask": (GRAMMAR(json_schema='{"$ref": "#"}'), "schema"),
    "an invalid Lark grammar": (GRAMMAR(lark="start: nothing"), "lark"),
    "a regex without end": (GRAMMAR(regex="(" * 10_000), "regex"),
    "a grammar without form": (pb.GenerateRequest(text="abc", grammar=pb.Grammar()), "grammar"),
    "no choices": (GRAMMAR(choice=pb.Choice()), "choice"),
    "a route with spaces": (pb.GenerateRequest(text="abc", route="my route"), "route"),
    "an SLO of NaN": (pb.GenerateRequest(text="abc", slo=pb.Slo(tpot_ms=math.nan)), "tpot_ms"),
    "a priority out of range": (pb.GenerateRequest(text="abc", priority=101), "priority"),
    "a chat without messages": (pb.GenerateRequest(chat=pb.Chat()), "messages"),
}


def test_what_can_never_be_honoured_is_an_invalid_argument(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        for name, (request, words) in REFUSED.items():
            error = await wire.status(request)
            assert error.code() is IA and words in str(error.details()), (name, error.code(), error.details())
        info = await wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        assert info.state == "serving"

    survives(kit, expected, harm)


def test_grammars_beyond_the_limits_are_invalid_arguments(kit: Any, expected: Any):
    choices = lambda *options: GRAMMAR(choice=pb.Choice(options=options))
    wrong = {
        "4097 choices": (choices(*(str(i) for i in range(4097))), "4096"),
        "a choice of 1025 bytes": (choices("a" * 1025), "1024"),
        "choices of more than 256 KiB": (choices(*(f"{i:01000}" for i in range(263))), "262144"),
        "a schema of more than 256 KiB": (GRAMMAR(json_schema='{"enum": ["' + "a" * 2**18 + '"]}'), "262144"),
        "an expression of more than 256 KiB": (GRAMMAR(regex="a" * (2**18 + 1)), "262144"),
    }

    async def harm(wire: Wire) -> None:
        for name, (request, words) in wrong.items():
            error = await wire.status(request)
            assert error.code() is IA and words in str(error.details()), (name, error.code(), error.details())

    survives(kit, expected, harm)


#: Seconds in which any grammar is served or refused, and which others may have to wait for a token meanwhile.
GRAMMAR_SECONDS, GAP_SECONDS = 60.0, 5.0


def test_hostile_grammars_end_soon_and_harm_nobody(writing_kit: Any):
    """Within the limits of size, and dear all the same: a result or INVALID_ARGUMENT, while others go on."""

    async def attack(wire: Wire, kind: str, value: Any) -> None:
        request = ask("abc", max_tokens=60, ignore_eos=False)
        grammar = pb.Grammar(**{kind: pb.Choice(options=value) if kind == "choice" else value})
        request.grammar.CopyFrom(grammar)
        try:
            answer = await wire.generation.Generate(request, timeout=GRAMMAR_SECONDS)
            assert answer.completions[0].token_ids
            assert kind != "choice" or answer.completions[0].text in value
        except grpc.aio.AioRpcError as e:
            assert e.code() is IA and e.details(), (e.code(), e.details())

    async def story() -> None:
        async with served(writing_kit) as wire:
            others = Others(wire)
            before = writing_kit.resident_bytes()
            for name, grammar in writing_kit.hostile_grammars().items():
                began = time.monotonic()
                await attack(wire, *next(iter(grammar.items())))
                seconds[name] = time.monotonic() - began, others.take_longest_gap()
            await others.stop(offline)
            assert all(gap < GAP_SECONDS for _, gap in seconds.values()), seconds
            assert writing_kit.resident_bytes() - before < 512 * 2**20
            # Grammars are still served.
            request = ask("abc", ignore_eos=False)
            request.grammar.CopyFrom(pb.Grammar(regex="[a-f]{4}"))
            assert re.fullmatch("[a-f]{4}", (await wire.generation.Generate(request)).completions[0].text)
            assert await wire.serving()
            await wire.idle()

    seconds: dict[str, tuple[float, float]] = {}
    prompt = [writing_kit.written.index(letter) for letter in Others.PROMPT]
    offline = writing_kit.offline([(prompt, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))])
    offline = offline[0][0].token_ids
    writing_kit.run(story(), 150)


class Others:
    """A client that has one stream after another, and knows how long it waited for the next token."""

    PROMPT = "others"

    def __init__(self, wire: Wire):
        self._wire, self._stopping = wire, False
        self._outputs: list[list[int]] = []
        self._longest = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        last = time.monotonic()
        while not self._stopping:
            tokens: list[int] = []
            async for message in self._wire.generation.GenerateStream(ask(self.PROMPT, max_tokens=200)):
                tokens += message.delta.token_ids
                now = time.monotonic()
                self._longest, last = max(self._longest, now - last), now
            self._outputs.append(tokens)

    def take_longest_gap(self) -> float:
        """The longest wait since the last call, in seconds."""
        longest, self._longest = self._longest, 0.0
        return longest

    async def stop(self, expected: list[int]) -> None:
        """Ends with the stream under way; every output must have been this one."""
        self._stopping = True
        await self._task
        assert self._outputs and all(tokens == expected for tokens in self._outputs)


def test_another_model_is_not_found(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        error = await wire.status(pb.GenerateRequest(text="abc", model="another"))
        assert error.code() is Code.NOT_FOUND and "'demo'" in str(error.details())

    survives(kit, expected, harm)


def test_a_prompt_larger_than_the_whole_pool_is_an_invalid_argument(kit: Any):
    """And not an invitation to try again."""

    async def story() -> None:
        few = dict(tiers=(PLAIN,), num_pages=8, batch_buckets=(4,), compile_cache=False)
        facade = kit.facade(kit.build_tiny_engine(**few))
        async with served(kit, facade) as wire:
            error = await wire.status(ask("a" * 70, max_tokens=20))
            assert error.code() is IA and "pages" in str(error.details())
            assert len(await wire.read(ask("a" * 30, max_tokens=20))) == 20
            await wire.idle()

    kit.run(story(), 120)


def test_an_id_in_use_already_exists(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        request = ask(max_tokens=100)
        request.request_id = "mine"
        wire.facade.hold()
        first = asyncio.create_task(wire.read(request))
        await wire.live(2)
        error = await wire.status(request)
        assert error.code() is Code.ALREADY_EXISTS and "mine" in str(error.details())
        wire.facade.release()
        tokens = await first
        assert await wire.read(request) == tokens, "the id is free again"

    survives(kit, expected, harm)


def test_oversize_messages_are_resource_exhausted(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        error = await wire.status(ask("a" * (2 << 20)))
        assert error.code() is EXHAUSTED

    survives(kit, expected, harm, max_message_mib=1)


def test_bytes_that_are_no_message_are_unknown_and_counted(kit: Any, expected: Any):
    """gRPC answers them itself, before any handler: the one use of UNKNOWN."""

    async def harm(wire: Wire) -> None:
        sent = 0
        for services in (generation_pb2, admin_pb2, vllm_engine_pb2):
            for service in services.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    make = wire.channel.unary_stream if method.server_streaming else wire.channel.unary_unary
                    for garbage in (b"\xff\xfe garbage \x01", b"\x00", b"\x0a\xff"):
                        call = make(f"/{service.full_name}/{method.name}")(garbage)
                        with pytest.raises(grpc.aio.AioRpcError) as caught:
                            await (call.read() if method.server_streaming else call)
                        assert caught.value.code() is Code.UNKNOWN, (method.full_name, garbage, caught.value)
                        sent += 1
        assert refused == [("UNKNOWN", "undecodable")] * sent and sent > 40

    refused: list[tuple[str, str]] = []

    async def counted(wire: Wire) -> None:
        count = wire.server.metrics.on_refused
        wire.server.metrics.on_refused = lambda code, reason: (refused.append((code, reason)), count(code, reason))[1]
        await harm(wire)

    survives(kit, expected, counted)


# Load.


def test_a_full_queue_says_when_to_try_again(kit: Any, expected: Any):
    async def story() -> None:
        async with served(kit, max_waiting=3) as wire:
            wire.facade.hold()
            requests = [asyncio.create_task(wire.read(ask("abc"[i % 3] * 3))) for i in range(4 + 3)]
            await wire.live(7)
            for attempt in (wire.generation.Generate(ask()), wire.read(ask())):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await attempt
                assert caught.value.code() is EXHAUSTED
                status = rpc_status.from_call(caught.value)
                info = error_details_pb2.RetryInfo()
                assert status is not None and status.details[0].Unpack(info)
                assert 0.1 <= info.retry_delay.ToTimedelta().total_seconds() <= 30
            assert await wire.serving(), "a full queue is no failure"
            wire.facade.release()
            for i, task in enumerate(requests):
                assert await task == tokens[i % 3]
            await wire.idle()

    tokens = [expected(letter * 3) for letter in "abc"]
    kit.run(story())


def test_deadlines_before_and_in_the_queue_cost_no_prefill(kit: Any, expected: Any):
    async def story() -> None:
        async with served(kit) as wire:
            wire.facade.hold()
            running = [asyncio.create_task(wire.read(ask("abc"))) for _ in range(4)]
            await wire.held()
            for prompt, timeout in (("lll", 1e-4), ("kkkkk", 0.2)):
                assert (await wire.status(ask(prompt), timeout=timeout)).code() is Code.DEADLINE_EXCEEDED
            wire.facade.release()
            for task in running:
                assert await task == tokens
            await wire.idle()
            assert not any(11 in prompt or 10 in prompt for prompt in prefilled)

    tokens = expected("abc")
    prefilled: list[list[int]] = []
    runner = kit.engine.runner
    prefill = runner.prefill
    runner.prefill = lambda work: (
        prefilled.extend(list(chunk.request.prompt_token_ids) for chunk in work.chunks) or prefill(work)
    )
    try:
        kit.run(story())
    finally:
        del runner.prefill


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
@pytest.mark.parametrize("how", ["cancel", "disconnect", "abort"])
def test_whoever_leaves_frees_the_pages_within_two_steps(kit: Any, expected: Any, where: str, how: str):
    """One step may be under way, and in the next nothing of them is left; nor do they come to their 70 tokens."""

    async def harm(wire: Wire) -> None:
        generator, engine, scheduler = wire.generator, kit.engine, kit.engine.scheduler
        names = [f"leaver-{i}" for i in range(8 if where == "queue" else 2)]

        def there() -> bool:
            if generator.in_engine < 1 + len(names):
                return False
            prefilling = scheduler._prefilling
            if where == "queue":
                return engine.stats.waiting >= 5
            if where == "prefill":
                return any(0 < request.num_computed < 48 for request in prefilling)
            return not prefilling and len(scheduler._running) == 3 and all(r.output_token_ids for r in live())

        live = lambda: list(scheduler._by_id.values())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{wire.server.port}") as channel:
            stub = Stub(GENERATION, channel)
            requests = [ask("abcd" * 12, max_tokens=70) for _ in names]
            for name, request in zip(names, requests, strict=True):
                request.request_id = name
            calls = [stub.GenerateStream(request) for request in requests]
            readers = [asyncio.create_task(_tokens(call)) for call in calls]
            await kit.eventually(lambda: generator.in_engine == 1 + len(names))
            while not there():
                await wire.advance(1)
            if how == "cancel":
                for call in calls:
                    call.cancel()
            elif how == "disconnect":
                await channel.close()
            else:
                answer = await wire.generation.Abort(pb.AbortRequest(request_ids=names))
                assert answer.aborted == len(names)
            await wire.live(1)
            ends = await asyncio.gather(*readers, return_exceptions=True)
        for end in ends:
            assert isinstance(end, asyncio.CancelledError | grpc.aio.AioRpcError), end
            if how == "abort":
                assert isinstance(end, grpc.aio.AioRpcError)
                assert end.code() is Code.CANCELLED and "aborted" in str(end.details())
        assert there() and generator.in_engine == 1 + len(names), "no step was done meanwhile"
        await wire.advance(2)
        assert generator.in_engine == 1
        stats = engine.stats
        assert (stats.running, stats.waiting) == (1, 0)
        pages = wire.server.engine.facts.sizes.pages_for(6 + 100)
        assert engine.facts.sizes.num_pages - stats.free_pages - stats.cached_pages <= pages
        assert sorted((name, reason) for name, reason, _ in wire.ends) == [(name, "abort") for name in names]
        assert all(count < 70 for _, _, count in wire.ends)
        assert where != "decode" or all(count > 0 for _, _, count in wire.ends)

    survives(kit, expected, harm, held=True)


async def _tokens(call: Any) -> list[int]:
    tokens: list[int] = []
    async for message in call:
        tokens += message.delta.token_ids
    return tokens


def test_abort_storms_are_idempotent(kit: Any, expected: Any):
    """Every request is aborted once, however often and from wherever it is asked for, and its name is free at once."""

    async def harm(wire: Wire) -> None:
        requests = [ask("abc", max_tokens=80) for _ in range(20)]
        for i, request in enumerate(requests):
            request.request_id = f"storm-{i}"
        calls = [asyncio.create_task(wire.read(request)) for request in requests]
        await kit.eventually(lambda: wire.generator.in_engine == 21)
        await wire.advance(6)  # some run, some wait
        assert kit.engine.stats.waiting > 0
        ids = [request.request_id for request in requests]
        storm = pb.AbortRequest(request_ids=[*ids, "never-seen", *ids])
        answers = await asyncio.gather(*(wire.generation.Abort(storm) for _ in range(50)))
        assert sum(answer.aborted for answer in answers) == 20
        vllm = vllm_engine_pb2_grpc.VllmEngineStub(wire.channel)
        await asyncio.gather(*(vllm.Abort(vllm_engine_pb2.AbortRequest(request_ids=ids)) for _ in range(50)))
        for end in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(end, grpc.aio.AioRpcError) and end.code() is Code.CANCELLED
        assert (await wire.generation.Abort(storm)).aborted == 0
        again = asyncio.create_task(wire.read(requests[0]))
        await wire.live(2)
        await wire.advance(2)
        assert sorted((name, reason) for name, reason, _ in wire.ends) == sorted((name, "abort") for name in ids)
        assert all(count < 80 for _, _, count in wire.ends)
        wire.facade.release()
        assert await again == tokens

    tokens = expected("abc", max_tokens=80)
    survives(kit, expected, harm, held=True)


def test_a_reader_that_stalls_is_ended_and_delays_nobody(kit: Any, expected: Any):
    """The output is large, and the client's window small: what it does not read stays with the server."""

    async def harm(wire: Wire) -> None:
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{wire.server.port}", options=options) as channel:
            request = ask("abc", n=64, max_tokens=100, logprobs=12, temperature=1.0)
            call = Stub(GENERATION, channel).GenerateStream(request)
            await call.read()
            first = ask("cab")
            first.priority = -5
            assert await wire.read(first) == other
            await wire.live(0)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() is Code.CANCELLED
        assert any(reason == "abort" for _, reason, _ in wire.ends), "nothing was left to end"

    other = expected("cab")
    survives(kit, expected, harm, stall_seconds=1.0)


def test_when_pages_run_out_requests_wait_and_say_the_same(kit: Any, expected: Any):
    """Four requests of 15 pages each in a pool of 30."""

    async def story() -> None:
        async with served(kit) as wire:
            outputs = await asyncio.gather(*(wire.read(ask(p, max_tokens=90)) for p in prompts))
            assert outputs == tokens
            await wire.idle()
            assert kit.engine.stats.preemptions > before

    prompts = ["abcdabcdabcd", "bcdebcdebcde", "cdefcdefcdefcdef", "defgdefgdefg"]
    tokens = [expected(prompt, max_tokens=90) for prompt in prompts]
    before = kit.engine.stats.preemptions
    kit.run(story())


# What the model and the drafter can do to it.


def test_penalties_go_together_with_speculation(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        assert await wire.read(ask("abab", **shape)) == tokens
        off = ask("abab", **shape)
        off.speculation.enabled = False
        assert await wire.read(off) == tokens

    shape = dict(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.25)
    tokens = expected("abab", **shape)
    survives(kit, expected, harm)


#: "g", which no sound output beside them holds.
POISONED = 6


def test_logits_that_are_not_finite_end_one_request_alone(kit: Any, expected: Any, monkeypatch: pytest.MonkeyPatch):
    """NaN in the embedding of a token: in a prompt, and after some tokens of an output."""

    async def harm(wire: Wire) -> None:
        for request in (ask("gabc"), ask("a" * 30 + "g" + "a" * 10), ask("abc", logit_bias={POISONED: 100.0})):
            error = await wire.status(request)
            assert error.code() is Code.INTERNAL and "finite" in str(error.details())
        assert {reason for name, reason, _ in wire.ends} <= {"error", "length"}
        assert sum(reason == "error" for _, reason, _ in wire.ends) == 6

    outputs = expected("abcabc", max_tokens=100), expected("cab")
    assert not any(POISONED in tokens for tokens in outputs)
    sound = kit.engine.runner.target
    poisoned = jax.tree.map(lambda x: x, sound)
    rows = np.array(poisoned["embedding"][...])
    rows[POISONED] = np.nan
    poisoned["embedding"].set_value(jnp.asarray(rows))
    monkeypatch.setattr(kit.engine.runner, "target", poisoned)
    survives(kit, expected, harm)


@pytest.mark.parametrize("fault", ["NaN", "infinite", "random", "constant"])
def test_a_drafter_that_fails_costs_speed_only(writing_kit: Any, monkeypatch: pytest.MonkeyPatch, fault: str):
    """Weights of a draft model that are none: every output is plain decoding's, and drafting is given up."""
    spoil = {
        "NaN": lambda x: jnp.full_like(x, jnp.nan),
        "infinite": lambda x: jnp.full_like(x, jnp.inf),
        "random": lambda x: 100 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype),
        "constant": jnp.zeros_like,
    }[fault]
    shapes: list[dict[str, Any]] = [dict(), dict(temperature=1.0, seed=3), dict(presence_penalty=0.5, max_tokens=90)]
    asked = [ask(prompt, **shape) for prompt in ("ahdkb", "12, 13, 14, ") for shape in shapes]

    # What a busy machine's rounds take shall not decide: of a tiny model, a tree may come out cheaper than a token.
    monkeypatch.setattr(CostEstimate, "observe", lambda *_: False)
    runner = writing_kit.engine.runner
    spoilt = jax.block_until_ready(jax.tree.map(spoil, runner.draft_params))

    async def outputs(wire: Wire, speculation: bool) -> list[list[int]]:
        requests = [pb.GenerateRequest.FromString(request.SerializeToString()) for request in asked]
        for request in requests:
            request.speculation.enabled = speculation
        return await asyncio.gather(*(wire.read(request) for request in requests))

    async def story() -> None:
        async with served(writing_kit) as wire:
            plain = await outputs(wire, False)
            monkeypatch.setattr(runner, "draft_params", spoilt)
            await wire.admin.SetSpeculation(admin_pb2.SetSpeculationRequest(policy="static", depth=3))
            over = asyncio.Event()
            health = asyncio.create_task(_always(wire.serving, over))
            assert await outputs(wire, True) == plain
            answer = await wire.generation.Generate(asked[0])
            stats = answer.completions[0].finished.speculation
            assert stats.num_draft_tokens > 0 and stats.num_accepted_draft_tokens < stats.num_draft_tokens / 4
            # The adaptive policy decides that drafts do not pay.
            await wire.admin.SetSpeculation(admin_pb2.SetSpeculationRequest(policy="adaptive"))
            for _ in range(3):
                assert await outputs(wire, True) == plain
            info = await wire.idle()
            assert info.rounds_by_tier["off"] > info.rounds_by_tier[writing_kit.tree.name]
            while info.active_tier != "off":  # it was trying again, as it does now and then
                await wire.read(asked[0])
                info = await wire.idle()
            over.set()
            await health

    writing_kit.run(story(), 60)


async def _always(condition: Callable[[], Awaitable[bool]], over: asyncio.Event) -> None:
    while not over.is_set():
        assert await condition()
        await asyncio.sleep(0.01)


def test_rounds_that_accept_nothing_go_on(kit: Any, expected: Any):
    """Text without repetition gives the n-gram drafter nothing; a static tier drafts in vain all the same."""

    async def harm(wire: Wire) -> None:
        await wire.admin.SetSpeculation(admin_pb2.SetSpeculationRequest(policy="static", depth=3))
        answer = await wire.generation.Generate(ask("ahdkb", temperature=1.0, seed=3, max_tokens=6))
        assert list(answer.completions[0].token_ids) == tokens
        stats = answer.completions[0].finished.speculation
        assert stats.num_draft_tokens > 0 == stats.num_accepted_draft_tokens

    tokens = expected("ahdkb", temperature=1.0, seed=3, max_tokens=6)
    survives(kit, expected, harm)


# The engine and the process.


def test_an_engine_that_dies_takes_no_client_with_it(kit: Any):
    async def story() -> None:
        async with served(kit) as wire:
            wire.facade.hold()
            streams = [asyncio.create_task(wire.read(ask("abc", max_tokens=90))) for _ in range(6)]
            await wire.held()
            await kit.eventually(lambda: wire.server.generator.live == 6)
            wire.facade.error = RuntimeError("the device is gone")
            wire.facade.release()
            for end in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(end, grpc.aio.AioRpcError) and end.code() is Code.UNAVAILABLE
            # Health says so, and then the server ends by itself: the process is to be started anew.
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert not await wire.serving()
            assert (await wire.status(ask())).code() is Code.UNAVAILABLE
            await wire.server.wait()

    kit.run(story())


def test_an_engine_that_hangs_is_out_of_service_until_it_returns(kit: Any, expected: Any):
    async def story() -> None:
        async with served(kit, watchdog_seconds=1.0) as wire:
            wire.facade.hold()
            stream = asyncio.create_task(wire.read(ask("abc", max_tokens=90)))
            async with asyncio.timeout(20):
                while await wire.serving():
                    await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream
            assert caught.value.code() is Code.UNAVAILABLE
            assert (await wire.status(ask())).code() is Code.UNAVAILABLE
            wire.facade.release()
            async with asyncio.timeout(20):
                while not await wire.serving():
                    await asyncio.sleep(0.01)
            assert await wire.read(ask("cab")) == tokens
            await wire.idle()

    tokens = expected("cab")
    kit.run(story())


def test_draining_in_mid_stream_ends_what_does_not_finish(kit: Any):
    async def story() -> None:
        async with served(kit) as wire:
            wire.facade.hold()
            stream = asyncio.create_task(wire.read(ask("abc", max_tokens=90)))
            await wire.held()
            drain = asyncio.create_task(wire.server.drain(2.0))
            async with asyncio.timeout(10):
                while await wire.serving():
                    await asyncio.sleep(0.005)
            assert (await wire.status(ask())).code() is Code.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream
            assert caught.value.code() is Code.UNAVAILABLE
            wire.facade.release()
            await drain

    kit.run(story())


def test_nothing_here_can_unpickle():
    """Checkpoints, sockets: no module of ours reads pickles (CVE-2025-24357, CVE-2026-3059).

    Stored executables are programs by their nature, whatever their form: their directory has to be the user's own.
    """
    # The server and the engine's process speak over a pair of sockets that nobody else can open. A Ray cluster runs
    # what whoever reaches it asks for, as its users know.
    trusted = {"jaxspec/runtime/executables.py", "serve/core/engine_process.py", "jaxspec/clusters.py"}
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for package in ("serve", "jaxspec", "pallas_kernels"):
        for path in set((ROOT / package).rglob("*.py")) - {ROOT / name for name in trusted}:
            # Not by the ast module: CPython 3.11 miscounts its recursion where threads take turns.
            for line in re.findall(r"^\s*(?:import|from)\b.*", path.read_text(), re.MULTILINE):
                assert not banned & set(re.findall(r"\w+", line)), path
