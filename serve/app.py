"""The whole server: the engine in its process, the services on their port, and what they share, put together.

Composition only. Must not know messages, nor how a command line is read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxspec.assemble import build_engine
from jaxspec.engine import Engine
from jaxspec.remembered import check_readable
from jaxspec.resolve import resolve_model
from jaxspec.runtime.hosts import Place, join
from jaxspec.text.tokenizer import Tokenizer
from serve.api.admin import AdminServicer, described
from serve.api.auth import AdminInterceptor, TokenInterceptor, read_tokens, server_credentials
from serve.api.generation import GenerationServicer
from serve.api.health import SERVICE as HEALTH
from serve.api.health import HealthServicer
from serve.checks import check_model, warn_of_open_door
from serve.config import AUTO, ServerConfig
from serve.core.commands import OnCompiled
from serve.core.engine_client import EngineClient, Link, ThreadLink
from serve.core.engine_process import Child, ProcessLink
from serve.core.generator import Generator
from serve.core.lifecycle import Lifecycle
from serve.ports import PortError, check_port
from serve.proto.services import ADMIN, GENERATION, add_to
from serve.telemetry import logs
from serve.telemetry.http import Probe
from serve.telemetry.metrics import ServerMetrics
from serve.telemetry.requests import request_log

#: Name in grpc.health.v1 that says whether the process is worth keeping; see Lifecycle.alive.
LIVENESS = "liveness"
#: Seconds in which calls that are over get their last message out when the server stops, and in which calls that were
#: on their way when the engine died are still answered.
_FAREWELL_SECONDS, _LAST_CALLS_SECONDS = 1.0, 0.5
#: Seconds that a step of the engine may take to end when the server stops.
_STOP_SECONDS = 10.0
#: Calls a connection may have open, at least; its age after which clients are asked to connect anew (an hour).
_LEAST_STREAMS, _CONNECTION_AGE_MS = 1024, 3_600_000
_INT32_MAX = 2**31 - 1
_log = logging.getLogger("serve")


class Server:
    """A server; use it within one event loop. As a context manager it is warm, and stops at the end.

    Args:
      config: see ServerConfig.
      build: makes the engine, on a thread of this process; None: what the configuration names is loaded in a process of
        its own, which shares neither the interpreter nor its lock with the calls.
      link: the way to the engine in place of both.
      child: the process to load it in, started before; None: one is started.

    Attributes:
      port, metrics_port: the bound ones, from `start` on; metrics_port None: none is served.
    """

    def __init__(
        self, config: ServerConfig, *, build: Callable[[], Engine] | None = None, link: Link | None = None,
        child: Child | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.port, self.metrics_port = 0, None
        self.metrics = ServerMetrics(config.served_name)
        self._loads = build is None and link is None
        if link is None:
            thread = lambda build: ThreadLink(lambda on_compiled: build(), described)
            link = link_to(config, child) if build is None else thread(build)
        self.engine = EngineClient(link)
        self._tracer: Any = None
        self._grpc: grpc.aio.Server | None = None
        self._health = HealthServicer()
        self._names: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._engine_started = False

    async def start(self) -> None:
        """Listens, and begins to load the model; returns at once.

        Health is NOT_SERVING until it is warm, under every service's name and ""; under "liveness", which asks whether
        the process is worth keeping, it is SERVING at once.

        Raises:
          ValueError: certificates, tokens, an endpoint, a model, a drafter or a policy that cannot be used.
          PortError: a port that is taken or may not be used.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def __aenter__(self) -> Self:
        """The server, warm."""
        await self.start()
        try:
            await self.ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        config = self.config
        credentials = server_credentials(config)
        interceptors: list[Any] = [_CountUndecodable(lambda: self.metrics.on_refused("UNKNOWN", "undecodable"))]
        observers = [request_log(config.log_prompts)]
        if config.otlp_endpoint is not None:
            from serve.telemetry.tracing import TraceInterceptor, Tracer

            self._tracer = Tracer.to_collector(config.served_name, config.otlp_endpoint)
            interceptors.append(TraceInterceptor())
            observers.append(self._tracer.start)
        interceptors[:0] = self._guards()
        self.generator = Generator(self.engine, config, self.metrics, observers)
        self.lifecycle = Lifecycle(self.engine, self.generator, config)
        self.lifecycle.on_change.append(self._on_change)
        self.lifecycle.on_alive.append(lambda alive: self._tell_health())
        if self._loads:
            check_model(config)
            check_readable(config.speculation.suffix_corpus_files)
        check_port("port", config.host, config.port)
        self._grpc = grpc.aio.server(interceptors=interceptors, options=server_options(config))
        self._register(self._grpc)
        self._tell_health()
        self.port = listen(self._grpc, config, credentials)
        if config.metrics_port is not None:
            try:
                self.metrics_port = self.metrics.serve(config.host, config.metrics_port, self._probes())
            except OSError as e:
                raise PortError(
                    f"metrics_port: cannot listen on {config.host}:{config.metrics_port}: {e.strerror or e}; 0 picks a "
                    "free port, and none serves no metrics"
                ) from e
        warn_of_open_door(config, self.port)
        self.metrics.on_state("starting")
        await self._grpc.start()
        self.engine.start()
        self._engine_started = True
        self.lifecycle.start()

    def _guards(self) -> list[grpc.aio.ServerInterceptor]:
        """Who may call, and who may change the server: an administrator's token is everybody's too."""
        config, refused = self.config, self.metrics.on_refused
        admins = [] if config.admin_token_file is None else read_tokens(config.admin_token_file, "admin_token_file")
        guards: list[grpc.aio.ServerInterceptor] = []
        if config.auth_token_file is not None:
            tokens = [*read_tokens(config.auth_token_file), *admins]
            guards.append(TokenInterceptor(tokens, lambda: refused("UNAUTHENTICATED", "token")))
        guards.append(AdminInterceptor(admins, lambda: refused("PERMISSION_DENIED", "admin")))
        return guards

    def _register(self, server: grpc.aio.Server) -> None:
        config = self.config
        add_to(server, GENERATION, GenerationServicer(self.generator, self.engine, self.metrics, config))
        add_to(server, ADMIN, AdminServicer(self.engine, self.generator, self.lifecycle, config, self.begin_drain))
        self._names = [GENERATION.full_name, ADMIN.full_name]
        if importlib.util.find_spec("smg_grpc_proto") is not None:
            from serve.vllm import servicer as vllm

            vllm.add_to(server, vllm.VllmServicer(self.generator, self.lifecycle, config, self.engine, self.metrics))
            self._names.append(vllm.SERVICE)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if config.reflection:
            names = [*self._names, HEALTH, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, server)

    async def ready(self) -> None:
        """Returns when the model is warm.

        Raises:
          StatusError: UNAVAILABLE; it could not be loaded (`error` says why), or the server was stopped.
        """
        await self.engine.ready()

    @property
    def error(self) -> BaseException | None:
        """What the engine died of."""
        return self.engine.error

    def begin_drain(self, grace_seconds: float | None = None) -> None:
        """Begins to drain and returns; `wait` says when all is over."""
        self._keep(asyncio.ensure_future(self.drain(grace_seconds)))

    async def drain(self, grace_seconds: float | None = None) -> None:
        """Lets requests finish (see Lifecycle.drain), then stops. A server that is not warm yet has none."""
        if self.engine.state != "starting":
            await self.lifecycle.drain(grace_seconds)
        await self.stop()

    async def stop(self) -> None:
        """Ends everything now; requests under way fail with UNAVAILABLE. May be called again."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._grpc is not None:  # made after the generator and the lifecycle
            self.generator.close()
            await self._grpc.stop(_FAREWELL_SECONDS)
            self.lifecycle.close()
        if self._engine_started:
            # Nothing waits for what loads: its process is ended, a thread is left behind and ends with this process.
            loading = self.engine.state == "starting"
            await self.engine.stop(timeout=0.0 if loading else _STOP_SECONDS)
        await asyncio.to_thread(self._close_outlets)
        self._over.set()

    def _close_outlets(self) -> None:
        self.metrics.close()
        if self._tracer is not None:
            self._tracer.close()

    async def wait(self) -> None:
        """Returns when the server was stopped or drained, or its engine has died."""
        await self._over.wait()

    # Health.

    def _on_change(self, state: str) -> None:
        _log.info("the server is %s", state)
        self.metrics.on_state(state)
        self._tell_health()
        if state == "dead":
            self._keep(asyncio.ensure_future(self._bury()))

    async def _bury(self) -> None:
        # gRPC cancels calls that it has not taken in when it stops: those on their way shall hear why they end.
        await asyncio.sleep(_LAST_CALLS_SECONDS)
        await self.stop()

    def _tell_health(self) -> None:
        for name in ("", *self._names):
            self._health.set(name, self.lifecycle.state == "serving")
        self._health.set(LIVENESS, self.lifecycle.alive)

    def _probes(self) -> dict[str, Probe]:
        """What HTTP probes may ask, with the rules of gRPC's health; see there which threads call them."""
        lifecycle = self.lifecycle

        def ready() -> tuple[bool, str]:
            state = lifecycle.state
            return state == "serving", state

        return {"/health": lambda: (lifecycle.alive, lifecycle.state), "/ready": ready}

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _CountUndecodable(grpc.aio.ServerInterceptor):
    """Counts messages that are none; gRPC answers them with UNKNOWN by itself."""

    def __init__(self, on_undecodable: Callable[[], None]) -> None:
        self._on_undecodable = on_undecodable

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode = handler.request_deserializer

        def counting(data: bytes) -> Any:
            try:
                return decode(data)
            except DecodeError:
                self._on_undecodable()
                raise

        return handler._replace(request_deserializer=counting)


def link_to(config: ServerConfig, child: Child | None) -> Link:
    """The way to a process with the engine that a configuration names."""
    return ProcessLink(functools.partial(load_engine, config), described, child)


def place_of(config: ServerConfig) -> Place | None:
    """Which process of how many this is; None: the only one.

    Raises:
      ValueError: it is to be found out, and cannot be.
    """
    if config.coordinator is None:
        return None
    if config.coordinator == AUTO:
        return Place.detect()
    assert config.num_processes is not None and config.process_id is not None
    return Place(config.coordinator, config.num_processes, config.process_id)


def load_engine(config: ServerConfig, on_compiled: OnCompiled) -> Engine:
    """The engine that a configuration names, ready to serve; in the process that is to have it, whose log it sets up.

    Args:
      on_compiled: hears how many executables have come, of how many in all, until it is.

    Raises:
      ValueError: what cannot be loaded or does not fit together.
    """
    logs.configure(config.log_level, config.log_format, log_prompts=config.log_prompts)
    _log.info("loading the model %s", config.served_name)
    engine = config.engine
    if (place := place_of(config)) is not None:
        _log.info("this is process %d of %d, the first at %s", place.process_id, place.num_processes, place.coordinator)
        join(place)
    if not Tokenizer.is_in(resolve_model(config.model)):
        _log.warning("the model has no tokenizer: prompts must be token ids, and answers have no text")
        engine = dataclasses.replace(engine, skip_tokenizer_init=True)
    return build_engine(
        config.model, config.drafter, config.speculation, engine, progress=on_compiled, together=place is not None
    )


def server_options(config: ServerConfig) -> list[tuple[str, Any]]:
    """Of gRPC."""
    size = config.max_message_mib * 2**20
    return [
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        # A second server on the port is an error, not a silent share of the calls.
        ("grpc.so_reuseport", 0),
        # Clients may ping every 10 s while they wait for a token; gRPC's own limit would strike them out at 300 s.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # A client that vanished without a word frees its pages in a minute.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Calls that a client keeps open, read or unread, a connection: more than may be live, so that it is admission
        # that refuses, with a status; beyond it calls wait in the client.
        ("grpc.max_concurrent_streams", max(_LEAST_STREAMS, 2 * config.max_waiting)),
        # What a client never reads stays in gRPC until its connection ends. Connections are renewed before that adds
        # up; the grace covers the longest request, so nothing under way is cut.
        ("grpc.max_connection_age_ms", _CONNECTION_AGE_MS),
        ("grpc.max_connection_age_grace_ms", _grace_ms(config)),
    ]


def _grace_ms(config: ServerConfig) -> int:
    seconds = config.run_seconds + 2 * config.stall_seconds
    return int(min(1e3 * seconds, _INT32_MAX))


def listen(
    server: grpc.aio.Server | grpc.Server, config: ServerConfig, credentials: grpc.ServerCredentials | None
) -> int:
    """Binds the port of a configuration, and returns it.

    Raises:
      PortError: it is taken or may not be used.
    """
    host = f"[{config.host}]" if ":" in config.host and not config.host.startswith("[") else config.host
    address = f"{host}:{config.port}"
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as e:
        hint = " (wrong certificate or key?)" if credentials is not None else ""
        why = f"which is in use, not allowed, or no address of this machine{hint}"
        raise PortError(f"port: cannot listen on {address}, {why}") from e
    return port
