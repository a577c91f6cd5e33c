"""The log: one object a line, a line a request, and no client's text in it unless asked for."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from serve.app import Server
from serve.client import AsyncClient, ServerError
from serve.config import ServerConfig
from serve.core.errors import invalid
from serve.telemetry import logs

BASE: dict[str, Any] = dict(host="127.0.0.1", port=0, metrics_port=None, withdrawal_seconds=0.0)
#: Words that no message of the server's own contains.
CANARY = "canarybird"


class Log(io.StringIO):
    """What was logged: all of it, whenever it is asked."""

    handler: logs.QueuedHandler | None = None

    def getvalue(self) -> str:
        assert self.handler is not None and self.handler.drain(30)
        return super().getvalue()


@pytest.fixture
def configured() -> Iterator[Callable[..., io.StringIO]]:
    """Makes the process's log the server's, and puts everything back."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    chatty = {name: logging.getLogger(name).level for name in logs.CHATTY}

    def configure(level: str = "info", form: str = "json", **options: Any) -> io.StringIO:
        stream = Log()
        stream.handler = logs.configure(level, form, stream=stream, **options)
        return stream

    yield configure
    for handler in root.handlers:
        if isinstance(handler, logs.QueuedHandler):
            handler.close()
    root.handlers[:], root.level = before
    logging.captureWarnings(False)
    for name, value in chatty.items():
        logging.getLogger(name).setLevel(value)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_events_are_objects(configured: Callable[..., io.StringIO]):
    stream = configured()
    log = logging.getLogger("serve")
    logs.event(log, logging.INFO, "request", request_id="a", route=None, ttft_ms=1.5, finish=["stop"])
    logs.event(log, logging.DEBUG, "too small")
    log.warning("said %s\nover two lines", "ü")
    first, second = lines(stream)
    assert first["time"].endswith("Z") and "T" in first["time"]
    del first["time"], second["time"]
    assert first == {"level": "info", "event": "request", "request_id": "a", "ttft_ms": 1.5, "finish": ["stop"]}
    assert second == {"level": "warning", "event": "log", "logger": "serve", "message": "said ü\nover two lines"}


def test_text_is_a_line_too(configured: Callable[..., io.StringIO]):
    stream = configured(form="text")
    logs.event(logging.getLogger("serve"), logging.INFO, "request", request_id="a b", ttft_ms=1.23456789, n=2, empty="")
    _, rest = stream.getvalue().strip().split(" ", 1)
    assert rest == 'info    request request_id="a b" ttft_ms=1.23457 n=2 empty=""'


def test_libraries_are_quiet(configured: Callable[..., io.StringIO]):
    stream = configured(level="debug")
    for name in ("jax._src.compiler", "grpc", "asyncio", "jaxspec.engine"):
        logging.getLogger(name).info("from %s", name)
    logging.getLogger("jax").warning("careful")
    assert [line["message"] for line in lines(stream)] == ["from jaxspec.engine", "careful"]


def test_exceptions_are_told_without_what_a_client_sent():
    def failing(error: Exception) -> BaseException:
        try:
            try:
                raise ValueError(f"got {CANARY}")
            except ValueError as e:
                raise error from e
        except Exception as e:
            return e

    told = logs.describe(failing(RuntimeError("device lost")))
    assert "RuntimeError: device lost" in told and "ValueError" in told and "test_logs.py" in told
    assert CANARY not in told
    assert CANARY not in logs.describe(failing(invalid(f"got {CANARY}")))
    assert CANARY in logs.describe(failing(RuntimeError("x")), log_prompts=True)


async def exercise(server: Server, kit: Any) -> None:
    """Requests of every fate, all of which carry the canary."""
    options: dict[str, Any] = dict(temperature=0.0, max_tokens=6)
    words = {
        "stop": CANARY, "regex": f"({CANARY}", "json_schema": json.dumps({"type": CANARY}), "route": f"{CANARY} 1",
        "request_id": f"{CANARY} 2", "lark": f"start: {CANARY}", "choice": [CANARY, ""],
    }  # fmt: skip
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        await client.generate(CANARY, route="code", request_id="good", **options)
        async for _ in client.stream([{"role": "user", "content": CANARY}], n=2, **options):
            pass
        for name, value in words.items():
            given: Any = {**options, name: value}
            try:
                await client.generate(CANARY, **given)
            except ServerError as e:
                assert e.code.name in ("INVALID_ARGUMENT", "INTERNAL")
        for call in (
            client.generate(CANARY, model=CANARY),
            client.generate([{"role": "user", "content": CANARY}], variables={"self": CANARY}),
            client.generate(CANARY * 100),
            client.tokenize(""),
            client.detokenize([99]),
        ):
            with pytest.raises(ServerError):
                await call

        async def broken(*_: Any) -> Any:
            raise ValueError(f"got {CANARY}")

        server.generator.start = broken  # type: ignore[method-assign]
        with pytest.raises(ServerError, match="internal error"):
            await client.generate(CANARY)


def test_no_prompt_reaches_the_log(kit: Any, configured: Callable[..., io.StringIO]):
    stream = configured(level="debug")

    async def story() -> None:
        async with Server(ServerConfig(**BASE), build=kit.clean) as server:
            await exercise(server, kit)

    kit.run(story())
    written = stream.getvalue()
    assert CANARY not in written
    events = [line for line in lines(stream) if line["event"] == "request"]
    good = next(line for line in events if line["request_id"] == "good")
    assert good["status"] == "OK" and good["route"] == "code" and good["finish"] == ["length"]
    assert good["prompt_tokens"] == len(CANARY) and good["output_tokens"] == 6
    assert good["ttft_ms"] > 0 and good["tpot_ms"] > 0 and good["accepted_length"] >= 1
    assert {line["status"] for line in events} >= {"OK", "INVALID_ARGUMENT"}
    assert any(line["event"] == "refused" and line["status"] == "NOT_FOUND" for line in lines(stream))
    failed = next(line for line in lines(stream) if "exception" in line)
    assert "ValueError" in failed["exception"] and failed["level"] == "error"


def test_prompts_are_logged_when_asked_for(kit: Any, configured: Callable[..., io.StringIO]):
    stream = configured(log_prompts=True)

    async def story() -> None:
        async with Server(ServerConfig(**BASE, log_prompts=True), build=kit.clean) as server:
            async with AsyncClient(f"127.0.0.1:{server.port}") as client:
                result = await client.generate("abc", temperature=0.0, max_tokens=6)
                with pytest.raises(ServerError):
                    await client.generate("a" * 120)
            good, bad = (line for line in lines(stream) if line["event"] == "request")
            assert (good["prompt"], good["output"]) == ("abc", result.text)
            assert "max_seq_len" in bad["message"]

    kit.run(story())


def test_bytes_that_are_no_message_leave_no_trace_back(kit: Any, configured: Callable[..., io.StringIO]):
    stream = configured()

    async def story() -> None:
        async with (
            Server(ServerConfig(**BASE), build=kit.clean) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            for _ in range(3):
                with pytest.raises(grpc.RpcError):
                    await channel.unary_unary("/jaxspec.v1.GenerationService/Generate")(CANARY.encode())

    kit.run(story())
    assert "DecodeError" not in stream.getvalue() and CANARY not in stream.getvalue()


def test_a_pipe_that_nobody_reads_stops_nobody(monkeypatch: pytest.MonkeyPatch, configured: Callable[..., Any]):
    monkeypatch.setattr(logs.QueuedHandler.__init__, "__defaults__", (50,))
    source, sink = os.pipe()
    with os.fdopen(source, "rb") as reading, os.fdopen(sink, "w") as stream:
        handler = logs.configure("info", "json", stream=stream)
        began = time.monotonic()
        for i in range(400):
            logs.event(logging.getLogger("serve"), logging.INFO, "request", number=i, padding="x" * 4000)
        handler.flush()
        assert time.monotonic() - began < 60 and handler.dropped > 300
        assert not handler.drain(0.05)  # nor does it wait at the end
        monkeypatch.setattr(logs.QueuedHandler.drain, "__defaults__", (0.05,))
        handler.close()
        written: list[dict[str, Any]] = []
        lost = lambda: sum(entry["count"] for entry in written if entry["event"] == "log_records_dropped")
        while lost() < handler.dropped:
            written.append(json.loads(reading.readline()))
        numbers = [entry["number"] for entry in written if entry["event"] == "request"]
        assert numbers == sorted(set(numbers)) and len(numbers) <= 400 - handler.dropped
        threading.Thread(target=reading.read, daemon=True).start()
        assert handler.drain(30)


def test_a_record_is_as_it_was_when_it_was_logged(configured: Callable[..., Any]):
    stream, changing = configured(), ["before"]
    with stream.handler._waiting.mutex:  # the writer cannot come by one
        record = logging.LogRecord("serve", logging.INFO, "", 0, "said %s", (changing,), None)
        copied: list[logging.LogRecord] = []
        stream.handler._waiting.put_nowait, put = copied.append, stream.handler._waiting.put_nowait
        stream.handler.emit(record)
        stream.handler._waiting.put_nowait = put
    changing[0] = "after"
    put(copied[0])
    assert [line["message"] for line in lines(stream)][-1] == "said ['before']"


def test_what_waits_is_written_at_the_end_of_the_process():
    code = (
        "import logging, sys; from serve.telemetry import logs; logs.configure('info', 'json');"
        "[logging.getLogger('serve').info('record %d', i) for i in range(500)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == [f"record {i}" for i in range(500)]


def test_a_process_ends_although_nobody_reads_its_log():
    code = (
        "import logging, sys; from serve.telemetry import logs; logs.FLUSH_SECONDS = 0.2;"
        "logs.QueuedHandler.drain.__defaults__ = (0.2,); logs.configure('info', 'json');"
        "[logging.getLogger('serve').info('x' * 1000) for i in range(500)]"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        assert process.wait(200) == 0
    finally:
        process.kill()
        assert process.stderr is not None
        process.stderr.close()
