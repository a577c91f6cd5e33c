"""grpc.health.v1.Health: Check and Watch of any number of names by any number of watchers.

Our own, because that of grpcio-health-checking tells the watchers of a name nothing more once one of them has left.
Event loop only. Must not know what a name stands for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_PB: Any = health_pb2
SERVICE: str = _PB.DESCRIPTOR.services_by_name["Health"].full_name


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The service; it knows the names that were set."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()

    def set(self, name: str, serving: bool) -> None:
        """From now on `name` is SERVING or NOT_SERVING; watchers hear of changes."""
        self._serving[name] = serving
        self._changed.set()
        self._changed.clear()

    async def Check(self, request: Any, context: Any) -> Any:
        """NOT_FOUND for names that were never set."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:80]!r}")
        return self._answer(request.service)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The present status, then every change until the client leaves; SERVICE_UNKNOWN until the name is set."""
        last: Any = None
        while True:
            answer = self._answer(request.service)
            if answer != last:
                last = answer
                yield answer
            else:
                await self._changed.wait()

    def _answer(self, name: str) -> Any:
        statuses = _PB.HealthCheckResponse
        known = {True: statuses.SERVING, False: statuses.NOT_SERVING, None: statuses.SERVICE_UNKNOWN}
        return statuses(status=known[self._serving.get(name)])
