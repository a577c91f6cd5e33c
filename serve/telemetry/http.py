"""The HTTP port: metrics for Prometheus, and probes for whoever speaks no gRPC.

Owns paths, statuses and the threads that answer: one for each connection, so that a client that hangs stops no other,
and none of them is the event loop's. Must not know what is counted, nor what a probe asks.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.registry import CollectorRegistry

METRICS = "/metrics"
#: (whether all is well: 200, else 503; a word that says why). Called on any thread.
Probe = Callable[[], tuple[bool, str]]
#: Seconds after which a connection that says nothing is closed.
_SILENT_SECONDS = 10.0
_log = logging.getLogger("serve")


class HttpPort:
    """Answers GET and HEAD of /metrics and of each probe's path, anything else with 404 or 405, until `close`.

    Args:
      port: 0 takes a free one.
      probes: by path.

    Attributes:
      port: the bound one.

    Raises:
      OSError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, probes: Mapping[str, Probe]) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        kind = type("_Server", (_Server,), {"address_family": family})
        self._server = make_server(str(address[0]), port, application(registry, probes), kind, _Handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def application(registry: CollectorRegistry, probes: Mapping[str, Probe]) -> Callable[[Any, Any], Iterable[bytes]]:
    """The paths as a WSGI application."""
    metrics = make_wsgi_app(registry)

    def text(status: str, line: str, *more: tuple[str, str]) -> tuple[str, list[tuple[str, str]], bytes]:
        return status, [("Content-Type", "text/plain; charset=utf-8"), *more], f"{line}\n".encode()

    def answer(environ: Any) -> tuple[str, list[tuple[str, str]], bytes]:
        path: str = environ["PATH_INFO"]
        if path != METRICS and path not in probes:
            return text("404 Not Found", f"there are {', '.join(sorted((METRICS, *probes)))}")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return text("405 Method Not Allowed", "use GET or HEAD", ("Allow", "GET, HEAD"))
        if path in probes:
            well, word = probes[path]()
            return text("200 OK" if well else "503 Service Unavailable", word, ("Cache-Control", "no-store"))
        begun: list[tuple[str, list[tuple[str, str]]]] = []
        (body,) = metrics({**environ, "REQUEST_METHOD": "GET"}, lambda status, headers: begun.append((status, headers)))
        return *begun[0], body

    def respond(environ: Any, start_response: Any) -> Iterable[bytes]:
        status, headers, body = answer(environ)
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return respond


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # A second server on the port is an error, not a silent share of the requests.
    allow_reuse_port = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection of the HTTP port broke", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: probes come every few seconds."""
