"""What the gateway sends by vLLM's protocol, and the service that it is sent to."""

from __future__ import annotations

import contextlib
import types
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc

from serve.vllm import servicer as vllm

#: What smg 1.13 sends for a completion of which the client said nothing but prompt and model.
PLAIN = dict(top_p=1.0, repetition_penalty=1.0, skip_special_tokens=True, spaces_between_special_tokens=True, n=1)
GREEDY = dict(PLAIN, temperature=0.0, ignore_eos=True)
LONG = dict(GREEDY, max_tokens=100)


def request(stream: bool = True, ids: tuple[int, ...] = (1, 2, 3), name: str = "r", **sampling: Any) -> Any:
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
    )


@contextlib.asynccontextmanager
async def service(kit: Any, **config: Any) -> AsyncIterator[tuple[Any, Any]]:
    """(stack, stub) over TCP."""
    async with kit.serving(**config) as stack:
        stack.engine.meter = types.SimpleNamespace(tokens_per_second=12.5)
        server = grpc.aio.server()
        vllm.add_to(
            server,
            vllm.VllmServicer(stack.generator, stack.lifecycle, stack.config, stack.engine, stack.metrics),
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield stack, rpc.VllmEngineStub(channel)
        await server.stop(None)


async def collect(call: Any) -> tuple[list[Any], list[Any]]:
    """(chunks, completions) of a call, in order."""
    chunks, completions = [], []
    async for message in call:
        if message.HasField("chunk"):  # those of one completion may follow another's end
            assert message.chunk.index not in [complete.index for complete in completions]
        (chunks if message.HasField("chunk") else completions).append(getattr(message, message.WhichOneof("response")))
    return chunks, completions


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """How a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (collect(call) if hasattr(call, "__aiter__") else call)
    return error.value
