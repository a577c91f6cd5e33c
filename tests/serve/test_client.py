"""serve.client: both clients against a server, what they refuse themselves, and retries."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from sockets import reachable

from jaxspec import generate
from serve.client import (
    AsyncClient,
    Client,
    Delta,
    Finished,
    Options,
    PromptInfo,
    Result,
    ServerError,
    build_request,
    connection,
)
from serve.client.__main__ import _request, parser
from serve.core.errors import StatusError
from serve.proto import generation_pb2 as pb
from serve.proto.services import GENERATION, add_to

ROOT = Path(__file__).resolve().parents[2]
GREEDY: Options = {"temperature": 0.0, "max_tokens": 8}
LONG: Options = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}


def test_both_clients_say_the_same(kit: Any):
    def blocking(target: str) -> list[Any]:
        with Client(target) as client:
            result = client.generate("abc", seed=1, n=2, logprobs=1, max_tokens=8)
            events = list(client.stream("abc", seed=1, max_tokens=8))
            with pytest.raises(ServerError) as error:
                client.generate("a" * 120, timeout=30.0)
            with pytest.raises(ServerError) as streamed:
                list(client.stream("a" * 120))
            return [
                result.completions, events[1:], (error.value.code, streamed.value.code), client.tokenize("abc"),
                client.tokenize([{"role": "user", "content": "b"}], add_generation_prompt=False),
                client.detokenize([1, 2]), client.abort("x"), client.server_info().model,
                client.loads().max_running_requests, client.set_speculation("static", 1), client.flush_cache() > 0,
            ]  # fmt: skip

    async def awaited(target: str) -> list[Any]:
        async with AsyncClient(target) as client:
            result = await client.generate("abc", seed=1, n=2, logprobs=1, max_tokens=8)
            events = [event async for event in client.stream("abc", seed=1, max_tokens=8)]
            with pytest.raises(ServerError) as error:
                await client.generate("a" * 120, timeout=30.0)
            with pytest.raises(ServerError) as streamed:
                async for _ in client.stream("a" * 120):
                    pass
            return [
                result.completions, events[1:], (error.value.code, streamed.value.code), await client.tokenize("abc"),
                await client.tokenize([{"role": "user", "content": "b"}], add_generation_prompt=False),
                await client.detokenize([1, 2]), await client.abort("x"), (await client.server_info()).model,
                (await client.loads()).max_running_requests, await client.set_speculation("static", 1),
                await client.flush_cache() > 0,
            ]  # fmt: skip

    async def story() -> None:
        async with reachable(kit) as (target, _):
            ours, theirs = await awaited(target), await asyncio.to_thread(blocking, target)
        for mine, other in zip(ours[2:], theirs[2:], strict=True):
            assert mine == other
        assert [c.token_ids for c in ours[0]] == [c.token_ids for c in theirs[0]]
        # Of the same tokens; the last bits depend on the tiers that ran.
        ids = [[[(e.token_id, e.rank) for e in t] for c in side[0] for t in c.logprobs] for side in (ours, theirs)]
        assert ids[0] == ids[1] and len(ours[0][0].logprobs) == 8
        texts = ["".join(e.text for e in side[1] if isinstance(e, Delta)) for side in (ours, theirs)]
        assert texts[0] == texts[1] == ours[0][0].text
        assert ours[2] == (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT)

    kit.run(story())


def test_leaving_a_stream_ends_the_request(kit: Any):
    def blocking(target: str) -> None:
        with Client(target) as client:
            stream = client.stream("abc", **LONG)
            assert isinstance(next(stream), PromptInfo)
            stream.close()  # type: ignore[attr-defined]

    async def story() -> None:
        async with reachable(kit) as (target, facade):
            facade.hook = lambda: time.sleep(0.02)
            await asyncio.to_thread(blocking, target)
            await kit.eventually(lambda: not facade.has_work)
            async with AsyncClient(target) as client:
                async for event in client.stream("abc", **LONG):
                    if isinstance(event, Delta):
                        break
                # Collected or closed, the generator cancels its call.
            await kit.eventually(lambda: not facade.has_work)

    kit.run(story())


class Busy:
    """Refuses so often, then answers."""

    def __init__(self, refusals: int, retry_seconds: float | None) -> None:
        self.left, self.retry_seconds, self.deadlines = refusals, retry_seconds, []

    def _refuse(self, context: Any) -> None:
        self.deadlines.append(context.time_remaining())
        if self.left:
            self.left -= 1
            error = StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", self.retry_seconds)
            context.abort_with_status(error.status())

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802
        self._refuse(context)
        return pb.GenerateResponse(prompt=pb.PromptInfo(request_id="x"))

    def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateStreamResponse]:  # noqa: N802
        self._refuse(context)
        yield pb.GenerateStreamResponse(prompt=pb.PromptInfo(request_id="x"))


@contextlib.contextmanager
def busy(refusals: int, retry_seconds: float | None) -> Iterator[tuple[str, Busy]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = Busy(refusals, retry_seconds)
    add_to(server, GENERATION, servicer)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        server.stop(0).wait()


def sync_generate(target: str, **connection: Any) -> str:
    with Client(target, **connection) as client:
        return client.generate("a", timeout=30.0).prompt.request_id


def sync_stream(target: str, **connection: Any) -> str:
    with Client(target, **connection) as client:
        events = list(client.stream("a", timeout=30.0))
        assert isinstance(events[0], PromptInfo)
        return events[0].request_id


def async_generate(target: str, **connection: Any) -> str:
    async def story() -> str:
        async with AsyncClient(target, **connection) as client:
            return (await client.generate("a", timeout=30.0)).prompt.request_id

    return asyncio.run(story())


def async_stream(target: str, **connection: Any) -> str:
    async def story() -> str:
        async with AsyncClient(target, **connection) as client:
            events = [event async for event in client.stream("a", timeout=30.0)]
            assert isinstance(events[0], PromptInfo)
            return events[0].request_id

    return asyncio.run(story())


@pytest.mark.parametrize("call", [sync_generate, sync_stream, async_generate, async_stream])
def test_retries_wait_as_the_server_says(call: Callable[..., str]):
    with busy(2, 0.05) as (target, servicer):
        with pytest.raises(ServerError) as refused:  # off by default
            call(target)
        assert refused.value.retry_after == pytest.approx(0.05) and servicer.left == 1
    with busy(2, 0.05) as (target, servicer):
        assert call(target, retries=2) == "x"
        assert len(servicer.deadlines) == 3
    with busy(3, 0.05) as (target, servicer):
        with pytest.raises(ServerError):
            call(target, retries=2)
        assert servicer.left == 0
    with busy(1, None) as (target, servicer):  # full for good, as an oversize message is
        with pytest.raises(ServerError) as refused:
            call(target, retries=5)
        assert len(servicer.deadlines) == 1 and not refused.value.may_retry
    with busy(1, 60.0) as (target, servicer):  # longer than the caller has
        with pytest.raises(ServerError):
            call(target, retries=5)
        assert len(servicer.deadlines) == 1


def test_a_server_that_stops_is_away_for_calls_on_their_way():
    """gRPC ends those that the server's loop has not come to as CANCELLED; nobody has cancelled them."""

    class Draining:
        async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

    connected = threading.Semaphore(0)

    def ask(target: str) -> ServerError:
        with Client(target) as client, pytest.raises(ServerError) as caught:
            grpc.channel_ready_future(client._channel).result(100)
            connected.release()
            client.generate("a", timeout=100.0)
        return caught.value

    async def story() -> list[ServerError]:
        server = grpc.aio.server()
        add_to(server, GENERATION, Draining())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with futures.ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask, f"127.0.0.1:{port}") for _ in range(4)]
            for _ in asking:
                connected.acquire()
            time.sleep(0.5)  # the loop has other things to do meanwhile
            await server.stop(1.0)
            return [await asyncio.wrap_future(call) for call in asking]

    errors = asyncio.run(story())
    assert {error.code for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert "the server stopped before it took the call in" in {error.message for error in errors}


def test_all_tries_share_one_time_limit(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(connection.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(connection, "read_error", lambda failed: failed)
    full: Any = ServerError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", 2.0)
    tries = connection.Tries(connection.Connection("x", token="t", retries=9), 5.0)
    assert tries.options == {"timeout": 5.0, "metadata": [("authorization", "Bearer t")]}
    assert tries.pause(full) == 2.0
    now[0] = 102.5
    assert (tries.options["timeout"], tries.pause(full)) == (2.5, 2.0)
    with pytest.raises(ServerError, match="full"):  # what has begun cannot be tried again
        tries.pause(full, begun=True)
    now[0] = 103.0
    assert tries.options["timeout"] == 2.0
    with pytest.raises(ServerError, match="full"):
        tries.pause(full)
    now[0] = 200.0
    assert tries.options["timeout"] == 0.0
    endless = connection.Tries(connection.Connection("x", retries=1), None)
    assert (endless.options["timeout"], endless.pause(full)) == (None, 2.0)
    with pytest.raises(ServerError, match="full"):
        endless.pause(full)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("a", {"temprature": 1.0}, r"\['temprature'\]; for 'temprature' say 'temperature'; known are"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "a text or a list of text parts, got .*image_url"),
        ([{"role": "user", "content": 3}], {}, "a message's content must be a text or a list of text parts, got 3"),
        ("a", {"temperature": "hot"}, "^temperature must be a number, got 'hot'$"),
        ("a", {"n": -1}, "^n must be an integer from 0 to 4294967295, got -1$"),
        ("a", {"seed": 2**32}, "^seed must be an integer from 0 to 4294967295, got 4294967296$"),
        ("a", {"seed": 1.5}, "^seed must be an integer from 0 to 4294967295, got 1.5$"),
        ("a", {"max_tokens": True}, "^max_tokens must be an integer from 0 to 4294967295, got True$"),
        ("a", {"top_k": 2**31}, "^top_k must be an integer from -2147483648 to 2147483647, got 2147483648$"),
        *(
            (
                "a",
                {"allowed_token_ids": value},
                rf"^allowed_token_ids must be a list of at least one .*, got {re.escape(repr(value))}$",
            )
            for value in (3, (), {1: 2})
        ),
        ("a", {"stop_token_ids": [-1]}, r"^stop_token_ids must be a list of integers from 0 to .*, got \[-1\]$"),
        ("a", {"stop": [3]}, r"^stop must be a text or a list of texts, got \[3\]$"),
        ("a", {"logit_bias": {-1: 1.0}}, r"^logit_bias must be numbers by token id, .* 4294967295, got \{-1: 1.0\}$"),
        ("a", {"json_schema": [1]}, r"^json_schema must be a JSON schema, as a text or a mapping, got \[1\]$"),
        ("a", {"ignore_eos": "yes"}, "^ignore_eos must be True or False, got 'yes'$"),
        ([-1], {}, "a prompt's token ids must be integers from 0 to 4294967295: .*-1"),
        (3, {}, "a prompt is a text, a list of token ids or a list of messages, got 3"),
        (b"a", {}, "a prompt is a text, a list of token ids or a list of messages, got b'a'"),
        ("a", {"regex": "a", "lark": "b"}, "at most one of json_schema, json_object, regex, lark, choice"),
        ("a", {"variables": {}}, "are for conversations, and the prompt is none"),
        ([1, "b"], {}, "a prompt is a text, a list of token ids or a list of messages"),
        ([{"role": "user", "content": "a", "name": "b"}], {}, r"a message has 'role' and 'content', got \['name'\]"),
        ([{"role": "user", "content": "a"}, 3], {}, "a prompt is a text"),
        ("\ud800", {}, "a prompt is a text"),
    ],
)
def test_what_no_message_can_say(prompt: Any, options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        build_request(prompt, options)


def test_connections_are_checked(tmp_path: Path):
    with pytest.raises(ValueError, match="tls_cert and tls_key must be given together"):
        Client("localhost:1", tls_cert="a")
    with pytest.raises(ValueError, match="cannot read"):
        Client("localhost:1", tls_ca=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="retries must be at least 0, got -1"):
        Client("localhost:1", retries=-1)


def test_parts_of_a_message_are_lines():
    parts = [{"type": "text", "text": "a"}, "b"]
    request = build_request([{"role": "user", "content": parts}, {"role": "assistant"}])
    assert [m.content for m in request.chat.messages] == ["a\nb", ""]


def test_results_are_plain():
    result = Result(PromptInfo("a", "m", 1, 2), ())
    assert result == Result(PromptInfo("a", "m", 1, 2), ())
    error = ServerError(grpc.StatusCode.NOT_FOUND, "no")
    assert (str(error), error.may_retry) == ("NOT_FOUND: no", False)


def test_the_client_needs_no_jax():
    code = "import sys, serve.client; print([m for m in ('jax', 'jaxspec', 'numpy') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert out.stdout.strip() == "[]"


def test_the_library_adds_no_defaults_and_the_command_those_of_generate():
    """What is absent on the wire is the server's to fill in; the command is `python -m jaxspec.generate` from afar."""
    assert build_request("abc", {}) == pb.GenerateRequest(text="abc")
    offline = generate.parser().parse_args(["abc"])
    prompt, options = _request(parser().parse_args(["abc"]))
    assert (prompt, options) == ("abc", {"temperature": 0.0, "max_tokens": 128})
    assert (options.get("temperature"), options.get("max_tokens")) == (offline.temperature, offline.max_tokens)


def test_options_of_others_are_told_ours():
    with pytest.raises(ValueError, match=r"unknown options \['guided_json', 'temperatur'\]; for 'guided_json' say "
                       "'json_schema'; for 'temperatur' say 'temperature'; known are"):  # fmt: skip
        build_request("abc", {"guided_json": "{}", "temperatur": 1})  # type: ignore[typeddict-unknown-key]


def test_events_tell_their_kind(kit: Any):
    async def story() -> None:
        async with reachable(kit) as (target, _), AsyncClient(target) as client:
            events = [event async for event in client.stream("abcab", stop_token_ids=[1], temperature=0.0)]
            assert isinstance(events[0], PromptInfo) and isinstance(events[-1], Finished)
            assert (events[-1].reason, events[-1].stop_reason) == ("stop", 1)

    kit.run(story())
