"""Thousands of requests, random, malformed and hostile, over a socket: each status is one that is documented.

The same 2,000 in every run; 10,000 others in each run with --exhaustive, which prints the --hypothesis-seed that makes
them again. Both protocols. Never an engine death, never INTERNAL, UNKNOWN for undecodable bytes and nothing else;
afterwards pages and tables are at rest.
"""

from __future__ import annotations

import asyncio
import collections
import random
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from operations import BATCH, LASTING, OPERATIONS, STREAMS, Code, Operation, as_constraint, as_grammar
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from serve.app import Server
from serve.config import ServerConfig
from serve.core import grammar_child
from serve.proto import admin_pb2
from serve.proto import generation_pb2 as pb
from serve.proto.services import ADMIN, GENERATION, Stub

#: Examples of BATCH requests: with --exhaustive, and without.
EXAMPLES, FIXED_EXAMPLES = 200, 40
#: Hostile grammars (see conftest.py) that are sent, likewise: each takes as long as the server lets it.
HOSTILE_SENT, FEW_HOSTILE_SENT = 30, 6


class Target:
    """A server with its clients on a loop of its own, so that examples can come one by one.

    Attributes:
      codes: how often each status was heard.
      generated: output tokens that clients got.
    """

    def __init__(self, facade: Any):
        self.facade = facade
        self.compilations = facade.stats.compilations_after_warmup
        self.codes: collections.Counter[Code] = collections.Counter()
        self.by_service: collections.Counter[str] = collections.Counter()
        self.generated = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fuzzed server")
        self._thread.start()
        self.run(self._start())

    def run(self, story: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(story, self._loop).result(600)

    async def _start(self) -> None:
        config = ServerConfig(
            host="127.0.0.1", port=0, metrics_port=0, withdrawal_seconds=0.0, max_waiting=40, log_level="error",
            kv_events=True,
        )  # fmt: skip
        self.server = Server(config, build=lambda: self.facade)
        await self.server.start()
        await self.server.ready()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.admin = Stub(ADMIN, self.channel)
        self._stubs = {
            "generation": Stub(GENERATION, self.channel),
            "admin": self.admin,
            "vllm": vllm_grpc.VllmEngineStub(self.channel),
        }
        self.tasks = len(asyncio.all_tasks())

    def close(self) -> None:
        async def end() -> None:
            await self.channel.close()
            await self.server.stop()

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(100)
        self._loop.close()

    async def send(self, operation: Operation) -> Code:
        """The status of an operation."""
        code = await self._send(operation)
        self.codes[code] += 1
        self.by_service[operation.service] += 1
        return code

    async def _send(self, operation: Operation) -> Code:
        if operation.service == "bytes":
            make = self.channel.unary_stream if operation.method in STREAMS else self.channel.unary_unary
            call = make(operation.method)(operation.request, timeout=operation.timeout)
        else:
            method = getattr(self._stubs[operation.service], operation.method)
            call = method(operation.request, timeout=operation.timeout)
        try:
            if not isinstance(call, grpc.aio.UnaryStreamCall):
                self._count(await call)
                return Code.OK
            received = 0
            while operation.reads is None or received < operation.reads:
                message = await call.read()
                if message is grpc.aio.EOF:
                    return await call.code()
                self._count(message)
                received += 1
            call.cancel()
            return Code.CANCELLED
        except grpc.aio.AioRpcError as e:
            assert e.details(), (e.code(), operation)
            return e.code()

    def _count(self, message: Any) -> None:
        match message:
            case pb.GenerateStreamResponse():
                self.generated += len(message.delta.token_ids)
            case pb.GenerateResponse():
                self.generated += sum(len(c.token_ids) for c in message.completions)
            case vllm.GenerateResponse():
                self.generated += len(message.chunk.token_ids)

    async def at_rest(self) -> None:
        """Waits until nothing of the requests is left."""
        async with asyncio.timeout(120):
            while True:
                loads = await self.admin.GetLoads(admin_pb2.GetLoadsRequest())
                info = await self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
                memory = info.memory
                idle = loads.running_requests == loads.waiting_requests == 0
                if idle and memory.free_pages + memory.cached_pages == memory.pages:
                    break
                await asyncio.sleep(0.02)
        assert info.compilations_after_warmup == self.compilations
        generator, live = self.server.generator, self.server.engine._live
        assert generator.live == generator.in_engine == 0 and not generator._by_id
        assert not (live._live or live._holding or live._submitted)
        async with asyncio.timeout(120):  # calls that were left end a little later
            while len(asyncio.all_tasks()) > self.tasks + 2:
                await asyncio.sleep(0.02)

    async def attack(self, operations: list[Operation]) -> None:
        """Sends all of them at once, and checks what comes back."""
        codes = await asyncio.gather(*(self.send(operation) for operation in operations))
        wrong = [(code, op) for code, op in zip(codes, operations, strict=True) if code not in op.allowed]
        assert not wrong, f"{len(wrong)} of {len(codes)}, such as {wrong[:2]}"
        assert self.server.lifecycle.state == "serving"


#: What came before may matter, so nothing is shrunk; `attack` shows what went wrong.
COMMON: dict[str, Any] = dict(
    deadline=None, database=None, phases=(Phase.generate,), verbosity=Verbosity.quiet,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip


@pytest.fixture(scope="module")
def target(writing_engine: Any) -> Iterator[Target]:
    target = Target(writing_engine)
    yield target
    target.close()


def test_thousands_of_requests_get_statuses_that_are_explained(target: Target, request: pytest.FixtureRequest):
    examples, number = FIXED_EXAMPLES, 0
    if request.config.getoption("--exhaustive"):
        given_seed = request.config.getoption("--hypothesis-seed")
        examples, number = EXAMPLES, random.randrange(2**32) if given_seed is None else int(given_seed)
        print(f"--exhaustive --hypothesis-seed={number}")

    @seed(number)
    @settings(max_examples=examples, **COMMON)
    @given(operations=OPERATIONS)
    def attack(operations: list[Operation]) -> None:
        target.run(target.attack(operations))

    attack()
    sent = sum(target.codes.values())
    assert sent >= examples * BATCH
    for code in (Code.OK, Code.INVALID_ARGUMENT, Code.CANCELLED, Code.UNKNOWN, Code.UNIMPLEMENTED):
        assert target.codes[code] > sent / 200, target.codes
    assert target.by_service["generation"] > sent / 4 and target.by_service["vllm"] > sent / 8, target.by_service
    assert target.generated > sent / 8  # half of what a quiet machine gives: clients leave, and deadlines pass
    target.run(target.at_rest())


@pytest.mark.slow
def test_hostile_grammars_in_between_are_served_or_refused(
    target: Target, writing_kit: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """By both protocols, all at once, among ordinary requests: their clients wait as long as it takes."""
    monkeypatch.setattr(grammar_child, "PATIENCE_SECONDS", 200.0)
    sent = HOSTILE_SENT if request.config.getoption("--exhaustive") else FEW_HOSTILE_SENT
    grammars = [next(iter(grammar.items())) for grammar in writing_kit.hostile_grammars().values()]
    operations: list[Operation] = []
    for i in range(sent):
        constraint = grammars[i % len(grammars)]
        if i % 2:
            message: Any = pb.GenerateRequest(
                text="ab", sampling=pb.Sampling(temperature=0.0, max_tokens=8), grammar=as_grammar(constraint)
            )
            operations.append(Operation("generation", "Generate", message))
        else:
            params = vllm.SamplingParams(temperature=0.0, max_tokens=8, **as_constraint(constraint))
            message = vllm.GenerateRequest(text="ab", sampling_params=params)
            operations.append(Operation("vllm", "Generate", message, allowed=LASTING))
        ordinary = pb.GenerateRequest(text="abc", sampling=pb.Sampling(max_tokens=8))
        operations.append(Operation("generation", "GenerateStream", ordinary, 300.0, None, frozenset({Code.OK})))
    target.run(target.attack(operations))
    target.run(target.at_rest())
