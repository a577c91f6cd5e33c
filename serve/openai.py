"""python -m serve.openai: this server and the smg gateway in front of it, an OpenAI-compatible HTTP API in one command.

Starts `python -m serve`, waits until it is healthy, starts smg, waits until it lists the model and has its tokenizer,
and stops both, the gateway first, when it is told to or when one of them ends. The server listens on loopback, for the
gateway alone. On Linux both end with this process even where it is killed (serve.core.tied); elsewhere a SIGKILL leaves
them running. Needs the extra "smg". Must not import JAX or the engine: it only runs processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxspec import cli
from serve.__main__ import parser as serve_parser
from serve.__main__ import resolve
from serve.config import FLAGS_ELSEWHERE, ServerConfig, check_host
from serve.ports import PortError, check_port

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.2
#: The first and the last port that Linux picks by itself; and the least that is picked here.
_PICKED, _LEAST_PORT = Path("/proc/sys/net/ipv4/ip_local_port_range"), 10_000
#: What the gateway, the server's only client, routes by; --no-kv-events takes it back.
_DEFAULT_FLAGS = ("--kv-events",)
#: Processes of one machine need no proxy, whatever the environment says.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _StopError(Exception):
    """A signal came, or a process ended."""


class Pair:
    """The two processes.

    Args:
      http_host, http_port: where the gateway listens; port 0 picks a free one.
      grpc_port: where the server listens, on loopback; 0 picks a free one.
      serve: further arguments of `python -m serve`.
      gateway: further arguments of `smg launch`.
    """

    def __init__(
        self, http_host: str, http_port: int, grpc_port: int, serve: Sequence[str], gateway: Sequence[str]
    ) -> None:
        self.http_host, self.http_port = http_host, http_port or free_port()
        self.grpc_port = grpc_port or free_port()
        self._serve, self._gateway = list(serve), list(gateway)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()

    @property
    def url(self) -> str:
        """What an OpenAI client takes as its base_url."""
        host = _LOOPBACK if self.http_host in ("0.0.0.0", "::") else self.http_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.http_port}/v1"

    def run(self) -> int:
        """Starts both, waits for a signal or for one of them to end, and stops both; the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        status = 1
        try:
            self._start("server", "serve", *self._serve, "--host", _LOOPBACK, "--port", str(self.grpc_port))
            self._wait("server", self._server_ready)
            self._start("gateway", "smg", "launch", *self._gateway_arguments(), *self._gateway)
            self._wait("gateway", self._gateway_ready)
            print(f"ready: {self.url}", flush=True)
            while True:
                self._pause()
        except _StopError as e:
            print(f"stopping: {e}", file=sys.stderr, flush=True)
            status = 0 if self._stop.is_set() else 1
        finally:
            self._end()
        return status

    def _gateway_arguments(self) -> list[str]:
        return [
            "--worker-urls", f"grpc://{_LOOPBACK}:{self.grpc_port}",
            "--host", self.http_host, "--port", str(self.http_port),
            "--prometheus-host", _LOOPBACK, "--prometheus-port", str(free_port()),
            "--worker-startup-check-interval", "1", "--log-level", "warn",
        ]  # fmt: skip

    def _start(self, name: str, *arguments: str) -> None:
        # In a session of its own: Ctrl-C reaches this process alone, which then stops them in order.
        command = [sys.executable, "-m", "serve.core.tied", str(os.getpid()), *arguments]
        self._processes[name] = subprocess.Popen(command, start_new_session=True)

    def _pause(self) -> None:
        if self._stop.wait(_POLL_SECONDS):
            raise _StopError("asked to")
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise _StopError(f"the {name} ended with status {process.returncode}")

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        print(f"waiting for the {name}", file=sys.stderr, flush=True)
        while not ready():
            self._pause()

    def _server_ready(self) -> bool:
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"{_LOOPBACK}:{self.grpc_port}", options) as channel:
            try:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            except grpc.RpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def _gateway_ready(self) -> bool:
        # The model is listed a moment before its tokenizer is there, and requests between the two fail.
        return bool(self._get("models", "data")) and bool(self._get("tokenizers", "tokenizers"))

    def _get(self, path: str, field: str) -> list[object]:
        try:
            with _OPENER.open(f"{self.url}/{path}", timeout=5) as answer:
                return json.load(answer)[field]
        except (OSError, urllib.error.URLError, ValueError, KeyError):
            return []

    def _on_signal(self, number: int, frame: object) -> None:
        if self._stop.is_set():
            for process in self._processes.values():
                process.kill()
        self._stop.set()

    def _end(self) -> None:
        """The gateway first, which lets its requests finish, then the server."""
        for name in ("gateway", "server"):
            process = self._processes.get(name)
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait()


def free_port() -> int:
    """A TCP port that nobody has now, and that the kernel gives to nobody who does not name one.

    It may be minutes until it is listened on; a port that the kernel picks could be a client's by then.
    """
    try:
        first = int(_PICKED.read_text().split()[0])
    except OSError:  # not Linux
        first = 0
    named = range(_LEAST_PORT, first)
    for port in random.sample(named, min(len(named), 100)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((_LOOPBACK, port))
            return port
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return probe.getsockname()[1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serve.openai",
        description="The server and an OpenAI-compatible HTTP gateway (smg). Further flags go to `python -m serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--http-host", default=_LOOPBACK, help="address of the HTTP API (default: %(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, help="its port; 0 picks a free one (default: 8000)")
    parser.add_argument("--chat-template", help="template file for a checkpoint that has none")
    parser.add_argument(
        "--gateway-args",
        default="",
        metavar="ARGS",
        help='further flags of `smg launch`, as one text: "--log-level warn"',
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    cli.tell_in_a_line(parser)
    options, serve = parser.parse_known_args(arguments)

    def refuse(message: str) -> NoReturn:
        parser.error(message)

    serve = [*_DEFAULT_FLAGS, *serve]
    given = vars(cli.parse(serve_parser(), serve, FLAGS_ELSEWHERE))
    print_config = given.pop("print_config", False)
    try:
        config = resolve(given)
    except ValueError as e:
        refuse(str(e))
    for name in ("tls_cert", "auth_token_file"):
        if getattr(config, name) is not None:
            refuse(
                f"{name} must not be given here, where the gateway reaches the server on loopback, in the clear; run "
                "`python -m serve` and `smg launch` yourself"
            )
    default = ServerConfig()
    if config.host != _LOOPBACK:
        refuse(f"host must be {_LOOPBACK} here, where only the gateway calls, got {config.host}; see --http-host")
    if config.withdrawal_seconds == default.withdrawal_seconds:
        # The gateway has ended before the server is told to: nobody has to notice that it withdraws.
        serve += ["--withdrawal-seconds", "0"]
        config = dataclasses.replace(config, withdrawal_seconds=0.0)
    try:
        check_host("--http-host", "--http-port", options.http_host)
    except ValueError as e:
        refuse(str(e))
    if not 0 <= options.http_port <= 65535:
        refuse(f"--http-port must be from 0 to 65535, got {options.http_port}")
    if print_config:
        print(config.to_yaml(), end="")
        return 0
    for package in ("smg", "smg_grpc_proto"):
        if importlib.util.find_spec(package) is None:
            refuse(f"{package} is not installed; pip install -e '.[smg]'")
    try:
        check_port("--http-port", options.http_host, options.http_port, "--http-host")
    except PortError as e:
        parser.exit(1, f"{parser.prog}: error: {e}\n")
    gateway = shlex.split(options.gateway_args)
    if options.chat_template is not None:
        gateway += ["--chat-template", options.chat_template]
    return Pair(options.http_host, options.http_port, config.port, serve, gateway).run()


if __name__ == "__main__":
    sys.exit(main())
