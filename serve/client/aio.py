"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message

from serve.client.connection import Connection, Tries
from serve.client.messages import (
    ChatOptions,
    Event,
    Options,
    Prompt,
    Result,
    build_request,
    fill_prompt,
    read_event,
    read_result,
)
from serve.proto import admin_pb2, generation_pb2
from serve.proto.services import ADMIN, GENERATION, Stub


class AsyncClient:
    """`Client` for asyncio: the same calls, awaited. Make and use it within one event loop.

    Args:
      target: "host:port".
      **connection: see Connection.
    """

    def __init__(self, target: str = "localhost:50051", **connection: Any) -> None:
        self._connection = Connection(target, **connection)
        self._channel: grpc.aio.Channel = self._connection.channel(grpc.aio)
        self._generation, self._admin = Stub(GENERATION, self._channel), Stub(ADMIN, self._channel)

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Result:
        """All completions of a prompt, at once."""
        return read_result(await self._call(self._generation.Generate, build_request(prompt, options), timeout))

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncIterator[Event]:
        """A PromptInfo, then Deltas, then a Finished for each completion. Closing the iterator ends the request."""
        return self._events(build_request(prompt, options), timeout)

    async def _events(self, request: generation_pb2.GenerateRequest, timeout: float | None) -> AsyncIterator[Event]:
        tries = Tries(self._connection, timeout)
        while True:
            call: Any = self._generation.GenerateStream(request, **tries.options)
            begun = False
            try:
                async for message in call:
                    begun = True
                    yield read_event(message)
                return
            except grpc.RpcError as e:
                pause = tries.pause(e, begun=begun)
            finally:
                call.cancel()
            await asyncio.sleep(pause)

    async def abort(self, *request_ids: str, timeout: float | None = None) -> int:
        """Ends requests by id; returns how many of them were live."""
        request = generation_pb2.AbortRequest(request_ids=request_ids)
        return (await self._call(self._generation.Abort, request, timeout)).aborted

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None, timeout: float | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[int]:  # fmt: skip
        """Token ids of a text or a conversation; add_generation_prompt and variables are for the latter."""
        request = generation_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
        fill_prompt(request, prompt, **chat)
        return list((await self._call(self._generation.Tokenize, request, timeout)).ids)

    async def detokenize(
        self, ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """The text of token ids."""
        request = generation_pb2.DetokenizeRequest(ids=ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._generation.Detokenize, request, timeout)).text

    async def server_info(self, *, timeout: float | None = None) -> admin_pb2.GetServerInfoResponse:
        """What is served, how it speculates, and how it fares."""
        return await self._call(self._admin.GetServerInfo, admin_pb2.GetServerInfoRequest(), timeout)

    async def loads(self, *, timeout: float | None = None) -> admin_pb2.GetLoadsResponse:
        """How busy the server is."""
        return await self._call(self._admin.GetLoads, admin_pb2.GetLoadsRequest(), timeout)

    async def drain(self, grace_seconds: float | None = None, *, timeout: float | None = None) -> None:
        """Lets the server finish what runs and then end; returns at once."""
        await self._call(self._admin.Drain, admin_pb2.DrainRequest(grace_seconds=grace_seconds), timeout)

    async def flush_cache(self, *, timeout: float | None = None) -> int:
        """Forgets cached prefixes; returns the pages that this freed."""
        return (await self._call(self._admin.FlushCache, admin_pb2.FlushCacheRequest(), timeout)).freed_pages

    async def set_speculation(
        self, policy: str, depth: int | None = None, *, timeout: float | None = None
    ) -> list[str]:
        """Which policy ("adaptive", "static", "off") chooses from the next round on; returns its tiers."""
        request = admin_pb2.SetSpeculationRequest(policy=policy, depth=depth)
        return list((await self._call(self._admin.SetSpeculation, request, timeout)).tiers)

    async def update_drafter(self, directory: str, *, trial: bool | None = None, timeout: float | None = None) -> int:
        """Other weights for the drafter, from a directory on the server's host; returns their version."""
        request = admin_pb2.UpdateDrafterRequest(directory=directory, trial=trial)
        return (await self._call(self._admin.UpdateDrafter, request, timeout)).version

    async def close(self) -> None:
        """Ends the connection and every call on it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Callable[..., Any], request: Message, timeout: float | None) -> Any:
        tries = Tries(self._connection, timeout)
        while True:
            try:
                return await method(request, **tries.options)
            except grpc.RpcError as e:
                pause = tries.pause(e)
            await asyncio.sleep(pause)
