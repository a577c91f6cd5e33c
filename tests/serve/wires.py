"""A served tiny engine over a real socket, and what is checked after each harm that is done to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve.app import Server
from serve.config import ServerConfig
from serve.proto import admin_pb2
from serve.proto import generation_pb2 as pb
from serve.proto.services import ADMIN, GENERATION, Stub

IA, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
Code = grpc.StatusCode


@dataclasses.dataclass
class Wire:
    """A served tiny engine, and stubs that talk to it.

    Attributes:
      facade: the engine with faults (see faults.py).
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
        async with asyncio.timeout(120):
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
