"""A server of the tiny engine over a real socket, a client of it, and what is checked of both."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve.app import Server
from serve.client import AsyncClient, Delta, Event, Finished, Options, PromptInfo, ServerError
from serve.config import ServerConfig

BASE: dict[str, Any] = dict(host="127.0.0.1", port=0, metrics_port=None, withdrawal_seconds=0.0)
GREEDY: Options = {"temperature": 0.0, "max_tokens": 12}
FITS: Options = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
LONG: Options = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}


@contextlib.asynccontextmanager
async def served(kit: Any, facade: Any = None, **config: Any) -> AsyncIterator[tuple[Server, AsyncClient]]:
    """A server and a client of it; pages are back at the baseline when it ends."""
    facade = facade or kit.clean()
    async with Server(ServerConfig(**{**BASE, **config}), build=lambda: facade) as server:
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            yield server, client
        await at_baseline(kit, server)


@contextlib.asynccontextmanager
async def reachable(kit: Any, **config: Any) -> AsyncIterator[tuple[str, Any]]:
    """A server's address, for clients of one's own, and the engine behind it."""
    facade = kit.clean()
    async with Server(ServerConfig(**BASE, **config), build=lambda: facade) as server:
        yield f"127.0.0.1:{server.port}", facade


async def at_baseline(kit: Any, server: Server) -> None:
    """Returns when the engine has nothing left, and all of its pages."""
    await kit.eventually(lambda: server.generator.in_engine == 0 and server.generator.live == 0)
    stats = await server.engine.call(lambda engine: engine.stats)
    assert stats.running == stats.waiting == 0
    assert stats.free_pages + stats.cached_pages == kit.engine.facts.sizes.num_pages


async def collected(events: AsyncIterator[Event]) -> tuple[PromptInfo, dict[int, list[Delta]], dict[int, Finished]]:
    """A stream in its parts; checks the order of its messages."""
    listed = [event async for event in events]
    info = listed[0]
    assert isinstance(info, PromptInfo)
    deltas: dict[int, list[Delta]] = {}
    ends: dict[int, Finished] = {}
    for event in listed[1:]:
        assert not isinstance(event, PromptInfo) and event.index not in ends
        if isinstance(event, Delta):
            assert event.token_ids or event.text
            deltas.setdefault(event.index, []).append(event)
        else:
            ends[event.index] = event
    return info, deltas, ends


async def failure(call: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await call
    return caught.value


def scraped(server: Server, name: str, **labels: str) -> float | None:
    return server.metrics.registry.get_sample_value(
        name, {"model_name": server.config.served_name, "engine": "0", **labels}
    )
