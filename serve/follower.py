"""A server's process that is not the first of several: it runs what the first one runs, and answers health alone.

Must not know requests: all of them come to the first process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from jaxspec.runtime.hosts import HostLostError, Place
from serve.api.auth import server_credentials
from serve.app import LIVENESS, listen, load_engine, server_options
from serve.checks import check_model
from serve.config import ServerConfig
from serve.ports import PortError, check_port
from serve.telemetry import logs
from serve.telemetry.http import HttpPort

#: Seconds after drain_seconds in which the first process has told the others that all is over.
_LAST_SECONDS = 15.0
_log = logging.getLogger("serve")


class Following:
    """What probes hear of this process.

    Attributes:
      port, metrics_port: the bound ones; metrics_port None: none is served.
    """

    def __init__(self, config: ServerConfig):
        self.state = "starting"
        self._health = health.HealthServicer()
        self._grpc = grpc.server(ThreadPoolExecutor(4), options=server_options(config))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        check_port("port", config.host, config.port)
        self.port = listen(self._grpc, config, server_credentials(config))
        self.metrics_port: int | None = None
        if config.metrics_port is not None:
            probes = {"/health": lambda: (True, self.state), "/ready": lambda: (self.state == "following", self.state)}
            try:
                self.metrics_port = HttpPort(config.host, config.metrics_port, CollectorRegistry(), probes).port
            except OSError as e:
                raise PortError(
                    f"metrics_port: cannot listen on {config.host}:{config.metrics_port}: {e.strerror or e}"
                ) from e
        self.tell("starting")
        self._grpc.start()

    def tell(self, state: str) -> None:
        """Health is SERVING in "following" alone; "liveness" always is."""
        self.state = state
        statuses = health_pb2.HealthCheckResponse
        self._health.set(LIVENESS, statuses.SERVING)
        self._health.set("", statuses.SERVING if state == "following" else statuses.NOT_SERVING)


def follow(config: ServerConfig, place: Place) -> int:
    """Runs until the first process ends its engine; returns the exit code. The caller then ends this process.

    SIGTERM and SIGINT are the first process's to obey, which may still drain: this one ends with it, or when that takes
    too long. A second signal ends it at once.
    """
    logs.configure(config.log_level, config.log_format, log_prompts=config.log_prompts)
    began = time.monotonic()
    try:
        check_model(config)
        told = Following(config)
    except (ValueError, PortError) as e:
        return _failed(str(e), 2 if isinstance(e, ValueError) else 1)
    _obey_signals(config, told)
    metrics = "" if told.metrics_port is None else f", metrics on {config.host}:{told.metrics_port}"
    print(f"listening on {config.host}:{told.port}{metrics}", flush=True)
    try:
        engine = load_engine(config, lambda ready, total: None)
        told.tell("following")
        seconds = time.monotonic() - began
        print(
            f"following process 0 of {place.num_processes} as process {place.process_id} after {seconds:.1f} s",
            flush=True,
        )
        engine.follow()
    except ValueError as e:
        return _failed(str(e), 2)
    except HostLostError as e:
        return _failed(str(e), 1)
    except Exception as e:
        _log.critical("the engine died", exc_info=e)
        return _failed(f"the engine died: {e}", 1)
    told.tell("stopped")
    return 0


def _obey_signals(config: ServerConfig, told: Following) -> None:
    came: list[int] = []

    def on_signal(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 1 or told.state == "starting":
            os._exit(128 + number)
        last = threading.Timer(config.drain_seconds + _LAST_SECONDS, lambda: os._exit(128 + number))
        last.daemon = True
        last.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _failed(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code
