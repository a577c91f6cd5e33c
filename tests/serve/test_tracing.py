"""Spans: one a request, under the caller's, with what became of it; and nothing at all where nobody asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from serve.app import Server
from serve.client import AsyncClient, ServerError, build_request
from serve.config import ServerConfig
from serve.proto.services import GENERATION, Stub
from serve.telemetry import tracing

export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="spans need the extra 'otel'")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = dict(
    host="127.0.0.1", port=0, metrics_port=None, withdrawal_seconds=0.0, otlp_endpoint="http://127.0.0.1:1"
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is exported, instead of sending it to the endpoint."""
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr(tracing.Tracer, "to_collector", classmethod(lambda cls, model, endpoint: cls(model, exporter)))
    return exporter


def test_a_span_a_request(kit: Any, spans: Any):
    async def story() -> None:
        server = Server(ServerConfig(**BASE, served_model_name="tiny"), build=kit.clean)
        async with server, AsyncClient(f"127.0.0.1:{server.port}") as client:
            await client.generate(
                "ghighi",
                request_id="one",
                n=2,
                seed=3,
                temperature=0.1,
                max_tokens=8,
                ignore_eos=True,
                route="code",
            )
            with pytest.raises(ServerError):
                await client.generate("ghi" * 50, request_id="two")
            stream = client.stream([{"role": "user", "content": "ghi"}], request_id="three", ignore_eos=True)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await kit.eventually(lambda: server.generator.live == 0)

    kit.run(story())
    done = {span.attributes["gen_ai.response.id"]: span for span in spans.get_finished_spans()}
    assert set(done) == {"one", "two", "three"}
    one = done["one"]
    assert one.name == "text_completion tiny" and one.kind.name == "SERVER" and one.parent is None
    wanted = {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "tiny", "gen_ai.request.temperature": 0.1,
        "gen_ai.request.choice.count": 2, "gen_ai.request.seed": 3, "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 16, "gen_ai.response.finish_reasons": ("length", "length"),
        "jaxspec.route": "code", "rpc.grpc.status_code": 0,
    }  # fmt: skip
    assert {name: one.attributes[name] for name in wanted} == wanted
    assert 1 <= one.attributes["jaxspec.speculation.mean_acceptance_length"] <= 4
    assert one.attributes["jaxspec.tier_switches"] >= 0
    assert sum(value for name, value in one.attributes.items() if name.startswith("jaxspec.tier_rounds.")) > 0
    assert one.attributes["gen_ai.server.time_to_first_token"] > 0
    first = next(event for event in one.events if event.name == "first_token")
    assert one.start_time <= first.timestamp <= one.end_time
    assert done["two"].attributes["error.type"] == "INVALID_ARGUMENT" and not done["two"].status.is_ok
    assert done["three"].name == "chat tiny" and done["three"].attributes["error.type"] == "CANCELLED"
    # No digits of an id, as "abc" would be now and then.
    assert "ghi" not in str([span.to_json() for span in done.values()])


def test_the_callers_trace_goes_on(kit: Any, spans: Any):
    async def story() -> None:
        async with (
            Server(ServerConfig(**BASE), build=kit.clean) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            stub = Stub(GENERATION, channel)
            request = build_request("abc", {"temperature": 0.0, "max_tokens": 2})
            metadata = [("traceparent", f"00-{TRACE}-{PARENT}-01")]
            # Calls at the same time must not see each other's headers.
            await asyncio.gather(
                stub.Generate(request, metadata=metadata), stub.Generate(request), stub.Generate(request)
            )

    kit.run(story())
    traced = [span for span in spans.get_finished_spans() if span.parent is not None]
    assert len(spans.get_finished_spans()) == 3 and len(traced) == 1
    assert f"{traced[0].context.trace_id:032x}" == TRACE and f"{traced[0].parent.span_id:016x}" == PARENT


def test_a_collector_that_is_not_there_costs_nobody_anything(kit: Any, caplog: pytest.LogCaptureFixture):
    async def story() -> None:
        server = Server(ServerConfig(**BASE), build=kit.clean)
        async with server, AsyncClient(f"127.0.0.1:{server.port}") as client:
            assert (await client.generate("abc", temperature=0.0, max_tokens=2)).token_ids

    kit.run(story())


def test_without_the_extra_the_server_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)

    async def story() -> None:
        with pytest.raises(ValueError, match="otlp_endpoint 'http://127.0.0.1:1' needs the extra 'otel'"):
            await Server(ServerConfig(**BASE)).start()

    asyncio.run(story())


def test_nothing_is_imported_where_nobody_asked():
    code = "import sys, serve.app, serve.__main__; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert out.stdout.strip() == "[]"
