"""Clients of jaxspec.v1.GenerationService that come too often, leave, stall, or ask for too much."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from sockets import FITS, GREEDY, LONG, at_baseline, collected, failure, scraped, served

from serve.api import generation, requests
from serve.api.generation import GenerationServicer
from serve.client import AsyncClient, Options, PromptInfo, ServerError, build_request
from serve.proto.services import GENERATION, Stub


@contextlib.asynccontextmanager
async def one_waits(kit: Any) -> AsyncIterator[tuple[Any, AsyncClient, Any]]:
    """An engine that does nothing, a client of its server, and its stream "one", which has begun."""
    facade = kit.clean()
    async with served(kit, facade) as (_, client):
        facade.idle = True
        stream = client.stream("abc", request_id="one", **LONG)
        assert isinstance(await anext(stream), PromptInfo)
        yield facade, client, stream


def test_the_same_id_twice(kit: Any):
    async def story() -> None:
        async with one_waits(kit) as (facade, client, stream):
            error = await failure(client.generate("abc", request_id="one", **GREEDY))
            assert error.code is grpc.StatusCode.ALREADY_EXISTS
            await stream.aclose()
            await kit.eventually(lambda: not facade.has_work)
            facade.idle = False
            await client.generate("abc", request_id="one", **GREEDY)

    kit.run(story())


def test_a_full_queue_says_when_to_come_back(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        async with served(kit, facade, max_waiting=1) as (_, client):
            facade.idle = True
            streams = [client.stream("abc", **LONG) for _ in range(5)]
            for stream in streams:
                await anext(stream)
            error = await failure(client.generate("abc", **GREEDY))
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.may_retry
            assert error.retry_after is not None and error.retry_after > 0
            for stream in streams:
                await stream.aclose()  # type: ignore[attr-defined]

    kit.run(story())


def test_abort_ends_a_stream_and_may_come_again(kit: Any):
    async def story() -> None:
        async with one_waits(kit) as (_, client, stream):
            assert await client.abort("one", "nobody") == 1
            assert await client.abort("one") == 0
            with pytest.raises(ServerError) as ended:
                async for _ in stream:
                    pass
            assert ended.value.code is grpc.StatusCode.CANCELLED

    kit.run(story())


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
@pytest.mark.parametrize("kind", ["stream", "unary"])
def test_a_client_that_leaves_frees_its_pages(kit: Any, how: str, kind: str):
    async def story() -> None:
        facade = kit.clean()
        async with served(kit, facade) as (server, _):
            facade.hook = lambda: time.sleep(0.05)
            client = AsyncClient(f"127.0.0.1:{server.port}")
            timeout = 0.3 if how == "deadline" else None
            if kind == "stream":
                call = asyncio.ensure_future(collected(client.stream("abc", timeout=timeout, **LONG)))
            else:
                call = asyncio.ensure_future(client.generate("abc", timeout=timeout, **LONG))  # type: ignore[arg-type]
            if how != "deadline":  # that one may pass before
                await kit.eventually(lambda: server.generator.in_engine == 1)
            if how == "cancel":
                call.cancel()
            elif how == "disconnect":
                await client.close()
            with pytest.raises((ServerError, asyncio.CancelledError)) as ended:
                await call
            if how == "deadline":
                assert isinstance(ended.value, ServerError)
                assert ended.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await at_baseline(kit, server)
            await client.close()

    kit.run(story())


def test_a_reader_that_stalls_is_cancelled(kit: Any):
    """gRPC buffers what nobody reads until flow control stops the writer, so the output has to be large."""

    async def story() -> None:
        facade = kit.clean()
        async with served(kit, facade, stall_seconds=0.5) as (server, _):
            options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
                request = build_request("abc", {**LONG, "n": 64, "logprobs": 12, "temperature": 1.0})
                call = Stub(GENERATION, channel).GenerateStream(request)
                await call.read()
                labels = dict(code="CANCELLED", reason="stalled_reader")
                await kit.eventually(lambda: scraped(server, "jaxspec:refused_requests_total", **labels) == 1)
                await at_baseline(kit, server)
                with contextlib.suppress(grpc.RpcError):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                assert await call.code() is grpc.StatusCode.CANCELLED

    kit.run(story())


def test_bytes_that_are_no_message(kit: Any):
    async def story() -> None:
        async with served(kit, max_message_mib=1) as (server, client):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                for method, kind in (("Generate", channel.unary_unary), ("GenerateStream", channel.unary_stream)):
                    call = kind(f"/jaxspec.v1.GenerationService/{method}")(b"\xff\xff\xff")
                    with pytest.raises(grpc.RpcError):
                        if method == "Generate":
                            await call
                        else:
                            await call.read()
                    assert await call.code() is grpc.StatusCode.UNKNOWN
            assert scraped(server, "jaxspec:refused_requests_total", code="UNKNOWN", reason="undecodable") == 2
            error = await failure(client.generate("a" * (2**20 + 10)))
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not error.may_retry
            await client.generate("abc", **GREEDY)

    kit.run(story())


def test_text_and_ids_that_cannot_fit_are_refused(kit: Any, monkeypatch: pytest.MonkeyPatch):
    longest = 120 * len("<eos>")

    async def story() -> None:
        async with served(kit) as (server, client):
            for name in ("start", "tokenize", "detokenize", "abort"):  # refused before any work begins
                monkeypatch.setattr(server.generator, name, None)
            for call in (
                client.tokenize("a" * (longest + 1)),
                client.generate("a" * (longest + 1)),
                client.detokenize([0] * 121),
                client.tokenize([{"role": "user", "content": ""}] * 121),
                client.abort(*[str(i) for i in range(4097)]),
            ):
                error = await failure(call)
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT, error
                assert re.search(r"must be at most 600 characters.*got 601|may have at most \d+ entries", error.message)
            assert scraped(server, "jaxspec:refused_requests_total", code="INVALID_ARGUMENT", reason="invalid") == 5
            monkeypatch.undo()
            assert len(await client.tokenize("a" * longest)) == longest
            assert await client.detokenize([0] * 120) == "a" * 120
            assert await client.abort(*[str(i) for i in range(4096)]) == 0
            # What a template makes of a conversation is only known when it is rendered.
            error = await failure(client.generate([{"role": "user", "content": "a" * (longest + 1)}]))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT and "got 602" in error.message

    kit.run(story())


def test_large_answers_are_made_off_the_event_loop(kit: Any, monkeypatch: pytest.MonkeyPatch):
    threads: list[bool] = []
    loop = threading.get_ident()
    whole, delta = GenerationServicer._whole, generation._delta

    def spied(make: Any) -> Any:
        def call(*args: Any) -> Any:
            threads.append(threading.get_ident() == loop)
            return make(*args)

        return call

    monkeypatch.setattr(GenerationServicer, "_whole", spied(whole))
    monkeypatch.setattr(generation, "_delta", spied(delta))
    large: Options = {**FITS, "logprobs": 12, "n": 2}

    async def story() -> None:
        async with served(kit) as (_, client):
            await client.generate("abc", **GREEDY)
            assert threads == [True]
            result = await client.generate("abc", **large)
            assert threads == [True, False] and len(result.completions[1].logprobs) == 60
            threads.clear()
            await collected(client.stream("abc", **GREEDY))
            assert threads and all(threads)

    kit.run(story())


def test_an_answer_too_large_for_a_message_is_refused_beforehand(kit: Any, monkeypatch: pytest.MonkeyPatch):
    huge: Options = {"n": 64, "max_tokens": 110, "logprobs": 12, "temperature": 1.0, "ignore_eos": True}

    async def story() -> None:
        async with served(kit, max_message_mib=1) as (server, client):
            steps = server.engine.snapshot
            error = await failure(client.generate("abc", **huge))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT and "call GenerateStream" in error.message
            assert server.generator.live == 0 and server.engine.snapshot == steps  # nothing ran for it
            # Texts may turn out longer than a token usually is.
            monkeypatch.setattr(requests, "_TOKEN_BYTES", 0)
            object.__setattr__(server.config, "max_message_mib", 20 / 2**20)
            error = await failure(client.generate("abc", **FITS))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert re.search(r"the answer takes \d+ bytes, .* at most 20.0: call GenerateStream", error.message)

    kit.run(story())
