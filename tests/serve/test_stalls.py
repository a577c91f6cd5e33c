"""Output that a client never reads, although its connection lives: bounded in time and number, whatever holds it."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from serve.api.calls import end_together
from serve.app import Server, server_options
from serve.client import build_request
from serve.config import ServerConfig
from serve.proto import generation_pb2 as pb
from serve.vllm.messages import lasting

#: Large enough to fill a window of 64 KiB several times.
LARGE: Any = {"temperature": 1.0, "max_tokens": 100, "ignore_eos": True, "n": 64, "logprobs": 12}
#: The client's window does not grow by itself.
NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


def stream(channel: Any) -> Any:
    method = channel.unary_stream(
        "/jaxspec.v1.GenerationService/GenerateStream",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateStreamResponse.FromString,
    )
    return method(build_request("abc", LARGE))


def unary(channel: Any) -> Any:
    """The same answer as one message, called as a stream: such a client need not read it."""
    method = channel.unary_stream(
        "/jaxspec.v1.GenerationService/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    return method(build_request("abc", LARGE))


def held(channel: Any) -> Any:
    """The gateway's protocol without streaming: messages that leave once all are there."""
    vllm = pytest.importorskip("smg_grpc_proto").vllm_engine_pb2
    method = channel.unary_stream(
        "/vllm.grpc.engine.VllmEngine/Generate",
        request_serializer=vllm.GenerateRequest.SerializeToString,
        response_deserializer=vllm.GenerateResponse.FromString,
    )
    sampling = vllm.SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True, n=64, logprobs=12)
    return method(vllm.GenerateRequest(text="abc", sampling_params=sampling))


@pytest.mark.parametrize("ask", [stream, unary, held])
def test_nothing_of_an_unread_answer_is_left_while_the_client_stays(kit: Any, ask: Callable[[Any], Any]) -> None:
    async def story() -> None:
        facade = kit.clean()
        config = ServerConfig(
            host="127.0.0.1", port=0, metrics_port=None, withdrawal_seconds=0.0, stall_seconds=0.5, max_waiting=256
        )
        async with (
            Server(config, build=lambda: facade) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=NARROW) as channel,
        ):
            call = ask(channel)
            await kit.eventually(lambda: server.generator.live == 1)
            name = lambda task: getattr(task.get_coro(), "__qualname__", "")
            handlers = lambda: [task for task in asyncio.all_tasks() if name(task) == "_handle_exceptions"]
            await kit.eventually(lambda: bool(handlers()))
            # The engine is done long before anything is read.
            await kit.eventually(lambda: server.generator.in_engine == 0)
            await kit.eventually(lambda: server.generator.live == 0)
            await kit.eventually(lambda: not handlers())
            text = b"".join(
                line for line in _scrape(server).splitlines(True) if line.startswith(b"jaxspec:refused_requests")
            )
            assert b'reason="stalled_reader"' in text
            call.cancel()

    kit.run(story())


@pytest.mark.parametrize(("translate", "code"), [(None, 1), (lasting, 10)])  # CANCELLED, ABORTED
def test_whoever_stalled_is_told_in_the_protocol_s_own_words(kit: Any, translate: Any, code: int) -> None:
    class Context:
        told: Any = None

        async def abort_with_status(self, status: Any) -> None:
            self.told = status

        def add_done_callback(self, callback: Any) -> None:
            pass

    async def story() -> None:
        context, generation = Context(), types.SimpleNamespace(on_stall=None)

        async def handler() -> None:
            end_together(context, generation, *([] if translate is None else [translate]))  # pyright: ignore
            await asyncio.sleep(1e9)  # a write that the client never takes

        task = asyncio.create_task(handler())
        await kit.eventually(lambda: generation.on_stall is not None)
        generation.on_stall()
        with pytest.raises(asyncio.CancelledError):
            await task
        await kit.eventually(lambda: context.told is not None)
        assert context.told.code.value[0] == code and "stall_seconds" in context.told.details

    kit.run(story())


def _scrape(server: Server) -> bytes:
    from prometheus_client import generate_latest

    return generate_latest(server.metrics.registry)


def test_calls_of_a_connection_are_bounded_above_what_admission_lets_in(kit: Any) -> None:
    for config in (ServerConfig(), ServerConfig(max_waiting=5000)):
        options = dict(server_options(config))
        assert options["grpc.max_concurrent_streams"] >= max(1024, 2 * config.max_waiting)
        grace = options["grpc.max_connection_age_grace_ms"] / 1e3
        assert grace >= config.run_seconds + config.stall_seconds  # no request under way is cut
    assert 0 < dict(server_options(ServerConfig(run_seconds=1e9)))["grpc.max_connection_age_grace_ms"] < 2**31


def test_a_connection_that_grows_old_ends_without_harm(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.app._CONNECTION_AGE_MS", 300)

    async def story() -> None:
        facade = kit.clean()
        facade.hook = lambda: time.sleep(0.02)
        config = ServerConfig(host="127.0.0.1", port=0, metrics_port=None, withdrawal_seconds=0.0)
        async with (
            Server(config, build=lambda: facade) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            method: Any = channel.unary_unary(
                "/jaxspec.v1.GenerationService/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            for _ in range(2):  # each outlives a connection's age
                request = build_request("abc", {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True})
                assert len((await method(request)).completions[0].token_ids) == 60

    kit.run(story())
