"""The Python client of a jaxspec server: `Client` and its asyncio twin `AsyncClient`.

    from serve.client import Client
    with Client("localhost:50051") as client:
        print(client.generate("def main():", temperature=0, max_tokens=64).text)

Needs grpcio and protobuf, neither JAX nor the engine.
"""

from __future__ import annotations

from serve.client.aio import AsyncClient
from serve.client.messages import (
    Completion,
    Delta,
    Event,
    Finished,
    Options,
    Prompt,
    PromptInfo,
    Result,
    ServerError,
    TokenLogprob,
    build_request,
)
from serve.client.sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "Delta",
    "Event",
    "Finished",
    "Options",
    "Prompt",
    "PromptInfo",
    "Result",
    "ServerError",
    "TokenLogprob",
    "build_request",
]
