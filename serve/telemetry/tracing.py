"""A span a request, by OpenTelemetry: only where `otlp_endpoint` is set, and only with the extra "otel".

Owns the span's name and attributes (the gen_ai semantic conventions where they say something, jaxspec.* besides) and
the caller's trace context. Never carries prompts, outputs or stop strings. Must not know servicers.
"""

from __future__ import annotations

import contextvars
import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from serve.core.jobs import Chat, Job
from serve.core.observers import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

#: The W3C headers of the call that this task answers.
_headers: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("trace_headers", default=None)
#: A collector that does not answer holds up the server's end for so long.
_EXPORT_SECONDS = 3
_CARRIED = ("traceparent", "tracestate")


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Keeps a call's traceparent and tracestate for the span that its handler opens."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        details: Any = handler_call_details
        metadata = details.invocation_metadata or ()
        _headers.set({key: value for key, value in metadata if key in _CARRIED and isinstance(value, str)})
        return await continuation(handler_call_details)


class Tracer:
    """Opens spans and exports them in the background.

    Args:
      model: the served name.
      exporter: where finished spans go; see `to_collector`.

    Raises:
      ValueError: the extra "otel" is not installed.
    """

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxspec"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxspec.serve")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, model: str, endpoint: str) -> Tracer:
        """A tracer that exports to an OTLP collector over gRPC; http:// is plain text, https:// TLS.

        Raises:
          ValueError: the extra "otel" is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        except ImportError as e:
            raise ValueError(
                f"otlp_endpoint {endpoint!r} needs the extra 'otel' (pip install -e '.[otel]'): {e}"
            ) from e
        return cls(
            model, OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_SECONDS)
        )

    def start(self, job: Job) -> Callable[[Record], None]:
        """Opens a request's span, under the caller's where the call brought one; what is returned closes it."""
        from opentelemetry.trace import SpanKind

        operation = "chat" if isinstance(job.prompt, Chat) else "text_completion"
        params = job.params
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jaxspec",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": job.request_id,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "jaxspec.route": job.route,
            "jaxspec.priority": job.priority,
        }
        if job.max_depth is not None:
            attributes["jaxspec.speculation.max_depth"] = job.max_depth
        if job.grammar is not None:
            attributes["gen_ai.output.type"] = "json" if job.grammar.kind.startswith("json") else "text"
            attributes["jaxspec.grammar"] = job.grammar.kind
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(_headers.get() or {}),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        return functools.partial(_finish, span)

    def close(self) -> None:
        """Exports what is left."""
        self._provider.shutdown()


def _finish(span: Span, record: Record) -> None:
    """Says what became of the request, and closes the span."""
    from opentelemetry.trace import StatusCode

    total = record.total
    attributes = {
        "rpc.grpc.status_code": record.code.value[0],
        "error.type": None if record.code is grpc.StatusCode.OK else record.code.name,
        "gen_ai.request.seed": record.seed,
        "gen_ai.response.finish_reasons": record.reasons or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": total.cached_prompt_tokens,
        "gen_ai.server.time_to_first_token": record.ttft,
        "gen_ai.server.time_per_output_token": record.tpot,
        "jaxspec.speculation.mean_acceptance_length": total.mean_accepted_length if total.rounds else None,
        "jaxspec.speculation.draft_acceptance_rate": total.acceptance_rate if total.drafted else None,
        "jaxspec.tier_switches": record.tier_switches,
        "jaxspec.preemptions": total.preemptions,
        **{f"jaxspec.tier_rounds.{name}": count for name, count in total.tier_rounds.items()},
    }
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, value)
    # The engine's clock is monotonic, the span's is not.
    offset = time.time() - time.monotonic()
    for m in record.metrics:
        for name, moment in (("scheduled", m.first_scheduled_time), ("first_token", m.first_token_time)):
            if moment is not None:
                span.add_event(name, timestamp=int((moment + offset) * 1e9))
    if record.code is not grpc.StatusCode.OK:
        span.set_status(StatusCode.ERROR, record.code.name)
    span.end()
