"""jaxspec.v1.GenerationService from its start to its end: health, liveness, failures inside, and ports in use."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sockets import BASE, GREEDY, LONG, collected, failure, served

from serve.app import Server
from serve.client import AsyncClient, Finished, ServerError
from serve.config import ServerConfig
from serve.ports import PortError


def test_an_engine_that_dies(kit: Any, caplog: pytest.LogCaptureFixture):
    async def story() -> None:
        facade = kit.clean()
        server = Server(ServerConfig(**BASE), build=lambda: facade)
        await server.start()
        await server.ready()
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            facade.idle = True
            stream = client.stream("abc", **LONG)
            await anext(stream)
            facade.error = RuntimeError("out of luck")
            facade.idle = False
            with pytest.raises(ServerError) as ended:
                async for _ in stream:
                    pass
            assert ended.value.code is grpc.StatusCode.UNAVAILABLE
            await server.wait()
            assert str(server.error) == "out of luck"
            assert (await failure(client.generate("abc", **GREEDY))).code is grpc.StatusCode.UNAVAILABLE
        await server.stop()

    with caplog.at_level(logging.CRITICAL, "serve"):
        kit.run(story())
    assert "the engine died" in caplog.text


def test_a_failure_inside_is_internal_and_says_nothing(kit: Any, monkeypatch: pytest.MonkeyPatch):
    async def story() -> None:
        async with served(kit) as (server, client):

            async def broken(*_: Any, **__: Any) -> Any:
                raise KeyError("secret")

            with monkeypatch.context() as patch:
                patch.setattr(server.generator, "start", broken)
                patch.setattr(server.generator, "tokenize", broken)
                patch.setattr(server.generator, "detokenize", broken)
                for call in (
                    client.generate("abc"), collected(client.stream("abc")), client.tokenize("abc"),
                    client.detokenize([1]),
                ):  # fmt: skip
                    error = await failure(call)
                    assert error.code is grpc.StatusCode.INTERNAL and error.message == "internal error"
            await client.generate("abc", **GREEDY)

    kit.run(story())


def test_health_follows_the_engine(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def build() -> Any:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(100)
            return facade

        server = Server(ServerConfig(**BASE), build=build)
        await server.start()
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            AsyncClient(f"127.0.0.1:{server.port}") as client,
        ):
            stub = health_pb2_grpc.HealthStub(channel)

            async def statuses() -> set[int]:
                names = ["", "jaxspec.v1.GenerationService", "jaxspec.v1.AdminService"]
                if importlib.util.find_spec("smg_grpc_proto") is not None:
                    names.append("vllm.grpc.engine.VllmEngine")
                return {(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names}

            async def liveness() -> int:
                return (await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))).status

            serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
            assert await statuses() == {not_serving} and await liveness() == serving
            assert (await failure(client.generate("abc"))).code is grpc.StatusCode.UNAVAILABLE
            assert (await failure(client.tokenize("abc"))).code is grpc.StatusCode.UNAVAILABLE
            gate.set()
            await server.ready()
            await client.generate("abc", **GREEDY)
            assert await statuses() == {serving} and await liveness() == serving
            facade.hold(2)
            stream = client.stream("abc", **LONG)
            await anext(stream)
            draining = asyncio.ensure_future(server.drain(200.0))
            await kit.eventually(lambda: server.lifecycle.state == "draining")
            assert await statuses() == {not_serving} and await liveness() == serving
            await kit.eventually(lambda: server.generator._refusal is not None)
            assert (await failure(client.generate("abc"))).code is grpc.StatusCode.UNAVAILABLE
            facade.release()
            ends = [event async for event in stream if isinstance(event, Finished)]
            assert len(ends) == 1  # what ran was allowed to finish
            await draining
            await server.wait()

    kit.run(story())


def test_liveness_is_lost_by_a_hang_that_lasts_and_by_death(kit: Any, clock: Any):
    async def story() -> None:
        facade = kit.clean()
        async with (
            Server(ServerConfig(**BASE, watchdog_seconds=100.0), build=lambda: facade) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            AsyncClient(f"127.0.0.1:{server.port}") as client,
        ):
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "liveness")]
            read = lambda watch: asyncio.wait_for(watch.read(), 120)
            serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
            ready, live = watches
            assert [(await read(watch)).status for watch in watches] == [serving] * 2
            facade.hold()
            lost = asyncio.ensure_future(failure(client.generate("abc", **LONG)))
            await kit.eventually(facade.held.is_set)
            clock.ahead += 101
            assert (await read(ready)).status == not_serving
            assert (await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == serving
            clock.ahead += 201
            assert (await read(live)).status == not_serving
            assert (await lost).code is grpc.StatusCode.UNAVAILABLE
            facade.release()
            assert [(await read(watch)).status for watch in watches] == [serving] * 2
            facade.error = RuntimeError("the device is lost")
            lost = asyncio.ensure_future(failure(client.generate("abc", **LONG)))
            assert [(await read(watch)).status for watch in watches] == [not_serving] * 2
            await lost
            await server.wait()

    kit.run(story())


def test_a_port_in_use_is_an_error(kit: Any):
    async def story() -> None:
        async with served(kit) as (server, _):
            second = Server(ServerConfig(**{**BASE, "port": server.port}), build=kit.clean)
            with pytest.raises(PortError, match=f"port: cannot listen on 127.0.0.1:{server.port}"):
                await second.start()
            async with served(kit, metrics_port=0) as (first, _):
                assert first.metrics_port
                third = Server(ServerConfig(**{**BASE, "metrics_port": first.metrics_port}), build=kit.clean)
                with pytest.raises(PortError, match="metrics_port: cannot listen"):
                    await third.start()

    kit.run(story())
