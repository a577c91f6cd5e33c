"""The HTTP port: paths, methods and statuses by themselves, then what probes hear through a server's life."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.registry import CollectorRegistry

from serve.app import Server
from serve.config import ServerConfig
from serve.telemetry.http import HttpPort
from serve.telemetry.metrics import ServerMetrics

Answer = tuple[int, dict[str, str], str]


def ask(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def said() -> dict[str, tuple[bool, str]]:
    """What the probes of `port` answer."""
    return {"/health": (True, "starting"), "/ready": (False, "starting")}


@pytest.fixture
def port(said: dict[str, tuple[bool, str]]) -> Iterator[int]:
    metrics = ServerMetrics("demo")
    made = HttpPort("127.0.0.1", 0, metrics.registry, {path: lambda path=path: said[path] for path in said})
    yield made.port
    made.close()


def test_probes_answer_by_status_and_with_a_word(port: int, said: dict[str, tuple[bool, str]]) -> None:
    assert ask(port, "/health")[::2] == (200, "starting\n")
    assert ask(port, "/ready")[::2] == (503, "starting\n")
    said["/health"], said["/ready"] = (False, "dead"), (True, "serving")
    assert ask(port, "/health")[::2] == (503, "dead\n")
    status, headers, body = ask(port, "/ready?verbose=1")
    assert (status, body) == (200, "serving\n")
    assert headers["cache-control"] == "no-store" and headers["content-type"].startswith("text/plain")


def test_metrics_have_their_own_path(port: int) -> None:
    status, headers, body = ask(port, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain") and "vllm:num_requests_running" in body
    assert ask(port, "/metrics", Accept="application/openmetrics-text")[1]["content-type"].startswith(
        "application/openmetrics-text"
    )


@pytest.mark.parametrize("path", ["/", "/healthz", "/health/", "/metrics/x", "/METRICS", "/favicon.ico"])
def test_everything_else_is_not_found(port: int, path: str) -> None:
    assert ask(port, path)[::2] == (404, "there are /health, /metrics, /ready\n")


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready", "/none"])
def test_head_is_get_without_its_body(port: int, path: str) -> None:
    status, headers, body = ask(port, path)
    again = ask(port, path, "HEAD")
    assert (again[0], again[2]) == (status, "")
    assert headers.keys() == again[1].keys() and int(again[1]["content-length"]) > 0
    if path != "/metrics":  # whose numbers change
        assert again[1]["content-length"] == headers["content-length"] == str(len(body))


@pytest.mark.parametrize("path", ["/metrics", "/ready"])
def test_other_methods_are_refused(port: int, path: str) -> None:
    status, headers, _ = ask(port, path, "POST")
    assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_clients_that_hang_stop_no_other(port: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(port, "/health")[0])) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 20
    for connection in silent:
        connection.close()


def test_a_port_of_ipv6() -> None:
    try:
        made = HttpPort("::1", 0, CollectorRegistry(), {})
    except OSError:
        pytest.skip("this machine has no IPv6")
    made.close()


def test_probes_follow_the_server(kit: Any) -> None:
    async def story() -> None:
        facade, build = kit.clean(), threading.Event()

        def slow() -> Any:
            assert build.wait(100)
            return facade

        config = ServerConfig(host="127.0.0.1", port=0, metrics_port=0, watchdog_seconds=1.0, withdrawal_seconds=0.0)
        server = Server(config, build=slow)
        await server.start()
        heard = lambda path: asyncio.to_thread(lambda: ask(server.metrics_port or 0, path)[::2])
        both = lambda: asyncio.gather(heard("/health"), heard("/ready"))
        try:
            assert await both() == [(200, "starting\n"), (503, "starting\n")]
            build.set()
            await server.ready()
            assert await both() == [(200, "serving\n"), (200, "serving\n")]
            facade.idle = True
            live = await server.generator.start(kit.job([1, 2, 3], max_tokens=100))
            await facade.end_idling()
            await kit.eventually(lambda: server.lifecycle.state == "stalled")
            assert (await heard("/ready")) == (503, "stalled\n")
            await kit.eventually(lambda: not server.lifecycle.alive)
            assert (await heard("/health")) == (503, "stalled\n")
            live.close()
            facade.release()
            await kit.eventually(lambda: server.lifecycle.state == "serving")
            assert await both() == [(200, "serving\n"), (200, "serving\n")]
        finally:
            facade.release()
            await server.stop()
        with pytest.raises(OSError):
            await heard("/health")

    kit.run(story())
