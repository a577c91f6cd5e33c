"""grpc.health.v1 over a real channel: what is unknown, what changes, and watchers that come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve.api.health import HealthServicer

PB: Any = health_pb2
ANSWER = PB.HealthCheckResponse


def test_watchers_of_a_name_hear_every_change_whoever_leaves(kit: Any) -> None:
    async def story() -> None:
        servicer, server = HealthServicer(), grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            asked = PB.HealthCheckRequest(service="a")
            status = lambda watch: asyncio.wait_for(watch.read(), 120)
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.Check(asked)
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            watches = [stub.Watch(asked) for _ in range(3)]
            assert [(await status(watch)).status for watch in watches] == [ANSWER.SERVICE_UNKNOWN] * 3
            servicer.set("a", False)
            servicer.set("b", True)
            assert [(await status(watch)).status for watch in watches] == [ANSWER.NOT_SERVING] * 3
            watches.pop().cancel()
            await asyncio.sleep(0.1)  # until the server has heard of it
            servicer.set("a", False)  # no change: nothing to tell
            servicer.set("a", True)
            assert [(await status(watch)).status for watch in watches] == [ANSWER.SERVING] * 2
            assert (await stub.Check(asked)).status == ANSWER.SERVING
            for watch in watches:
                watch.cancel()
        await server.stop(None)

    kit.run(story())
