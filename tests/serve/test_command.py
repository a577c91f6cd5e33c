"""python -m serve as a process sees it: the lines that it prints, how it ends, and with which exit code."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxspec.resolve import resolve_model
from serve import __main__ as command
from serve.api.admin import described
from serve.client import AsyncClient, Client, Finished
from serve.config import ServerConfig
from serve.core.engine_client import ThreadLink

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = dict(host="127.0.0.1", port=0, metrics_port=0, withdrawal_seconds=0.0)
DEFAULTS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def port_in(out: str) -> int:
    found = re.match(r"listening on 127.0.0.1:(\d+), metrics on 127.0.0.1:(\d+)\n", out)
    assert found and int(found[1]) != int(found[2]) and int(found[1]) > 0
    return int(found[1])


def listens_to_signals() -> bool:
    return all(signal.getsignal(number) is not default for number, default in DEFAULTS.items())


@pytest.fixture
def facade(kit: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine that `python -m serve` loads."""
    facade = kit.clean()
    here(monkeypatch, lambda: facade)
    return facade


def here(monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any]) -> None:
    """What `python -m serve` loads comes of `build`, on a thread of this process."""
    monkeypatch.setattr("serve.app.link_to", lambda config, child: ThreadLink(lambda _: build(), described))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(kit: Any, facade: Any, number: int, capsys: pytest.CaptureFixture[str]):
    async def story() -> None:
        running = asyncio.ensure_future(command.serve(ServerConfig(**BASE)))
        out = ""
        while "serving" not in out:
            out += capsys.readouterr().out
            await asyncio.sleep(0.01)
        assert re.search(r"\nserving demo after \d+\.\d s\n$", out)
        async with AsyncClient(f"127.0.0.1:{port_in(out)}") as client:
            facade.hook = lambda: time.sleep(0.01)
            stream = client.stream("abc", temperature=0.0, max_tokens=40, ignore_eos=True)
            await anext(stream)
            os.kill(os.getpid(), number)
            ends = [event async for event in stream if isinstance(event, Finished)]
            assert [end.usage.completion_tokens for end in ends] == [40]
        assert await running == 0

    kit.run(story())


def test_a_second_signal_ends_at_once(kit: Any, facade: Any, monkeypatch: pytest.MonkeyPatch):
    codes: list[int] = []

    async def story() -> None:
        running = asyncio.ensure_future(command.serve(ServerConfig(**{**BASE, "withdrawal_seconds": 30.0})))
        await kit.eventually(listens_to_signals)
        monkeypatch.setattr(os, "_exit", codes.append)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert not running.done() and not codes
        os.kill(os.getpid(), signal.SIGINT)
        await kit.eventually(lambda: codes == [128 + signal.SIGINT])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    # What `_exit` would have ended is left behind; the loop ends it.
    asyncio.run(story())


def test_a_signal_ends_the_process_also_where_something_hangs(
    kit: Any, facade: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    codes: list[int] = []

    async def story() -> None:
        running = asyncio.ensure_future(command.serve(ServerConfig(**{**BASE, "drain_seconds": 0.1})))
        out = ""
        while "serving" not in out:
            out += capsys.readouterr().out
            await asyncio.sleep(0.01)
        monkeypatch.setattr(os, "_exit", codes.append)
        monkeypatch.setattr("serve.app.Server.stop", lambda server: asyncio.Event().wait())
        os.kill(os.getpid(), signal.SIGTERM)
        await kit.eventually(lambda: codes == [128 + signal.SIGTERM])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    monkeypatch.setattr(command, "_LAST_SECONDS", 0.2)
    asyncio.run(story())


def test_a_port_in_use(facade: Any, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert asyncio.run(command.serve(ServerConfig(**{**BASE, "port": port}))) == 1
        assert f"error: port: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
        assert asyncio.run(command.serve(ServerConfig(**{**BASE, "metrics_port": port}))) == 1
        error = capsys.readouterr().err
        assert f"error: metrics_port: cannot listen on 127.0.0.1:{port}" in error and error.count("\n") == 1


def test_a_port_in_use_is_told_before_anything_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    real, wrong = command.importlib.import_module, lambda: pytest.fail("the server is imported")
    imported = lambda name, *rest: wrong() if name == "serve.app" else real(name, *rest)
    monkeypatch.setattr(command.importlib, "import_module", imported)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main(["--model", "demo", "--port", str(port)]) == command.FAILED
    out, err = capsys.readouterr()
    assert not out and err == f"error: port: cannot listen on 127.0.0.1:{port}, which is in use\n"


@pytest.mark.parametrize("host", ["nohost.invalid", "no..host"])
def test_a_host_that_is_no_name(facade: Any, host: str, capsys: pytest.CaptureFixture[str]):
    assert asyncio.run(command.serve(ServerConfig(**{**BASE, "host": host}))) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"error: --host: the name '{host}' cannot be resolved: ")
    assert "it takes an address or name of this machine" in err and err.count("\n") == 1


@pytest.mark.parametrize("field", ["port", "metrics_port"])
def test_half_a_port_is_not_shared_silently(facade: Any, field: str, capsys: pytest.CaptureFixture[str]):
    """gRPC would listen at the other address of localhost; a listener may also have offered to share its port."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for host in ("localhost", "127.0.0.1", "0.0.0.0"):
            config = ServerConfig(**{**BASE, "host": host, field: taken.getsockname()[1]})
            assert asyncio.run(command.serve(config)) == 1
            out, err = capsys.readouterr()
            assert not out and f"error: {field}: cannot listen on {host}:" in err


def test_secrets_that_cannot_be_read(facade: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    config = ServerConfig(**BASE, auth_token_file=str(tmp_path / "none"))
    assert asyncio.run(command.serve(config)) == 2
    assert capsys.readouterr().err.startswith("error: auth_token_file: cannot read ")


def unsupported(directory: Path) -> str:
    (directory / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    return str(directory)


def with_half_a_tokenizer(directory: Path) -> str:
    """The demo, but its tokenizer.json is cut off."""
    for file in resolve_model("demo").iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").write_text("{")
    return str(directory)


WRONG: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "no directory": (
        lambda _: {"model": "/no/such/model"},
        "a Hugging Face directory or a hub id ('organisation/model'), and '/no/such/model' is none",
    ),
    "no config.json": (lambda path: {"model": str(path)}, "config.json does not exist"),
    "an unsupported model": (lambda path: {"model": unsupported(path)}, "'MambaForCausalLM'] is not supported"),
    "a broken tokenizer": (
        lambda path: {"model": with_half_a_tokenizer(path)},
        "is not a valid tokenizer.json: ",
    ),
    "an unknown drafter": (lambda _: {"drafter": "eagle9"}, "drafter must be one of ('none', 'eagle3', "),
    "trees of a drafter of chains": (
        lambda _: {"drafter": "ngram", "speculation": {"depth": 2, "topk": 2, "num_nodes": 4}},
        "this drafter proposes chains only (topk 1), got topk 2",
    ),
    "a hybrid of two that look up": (
        lambda _: {"drafter": "ngram", "speculation": {"hybrid": True}},
        "hybrid joins suffix matches with a drafter of another kind",
    ),
    "texts in which nobody looks": (
        lambda _: {"speculation": {"suffix_corpus_tokens": 64, "suffix_corpus_responses": True}},
        "suffix_corpus_tokens is for the drafter that looks up whole suffixes and for hybrids",
    ),
    "no texts to look in": (
        lambda path: {
            "drafter": "suffix",
            "speculation": {"suffix_corpus_tokens": 64, "suffix_corpus_files": [str(path / "no.txt")]},
        },
        "no.txt cannot be read",
    ),
    "a ring of what nobody reads": (
        lambda path: {"drafter": "suffix", "engine": {"feature_ring": str(path)}},
        "is for drafters that read the target's states; this engine has one that reads none",
    ),
    "trees that are not invariant": (
        lambda _: {"engine": {"batch_invariant": True}, "speculation": {"depth": 2, "topk": 2, "num_nodes": 4}},
        "batch_invariant=True is for chains, whose nodes stand where they will lie once accepted, got tier tree-2x2/4",
    ),
    "too long a context": (
        lambda _: {"engine": {"max_seq_len": 10**6}},
        "max_seq_len must be at most the model's context of ",
    ),
    "no profile": (lambda path: {"engine": {"profile": str(path / "no.json")}}, "no.json' cannot be read: "),
    "no room for executables": (
        lambda _: {"engine": {"compile_cache": "/dev/null/cache"}},
        "compile_cache '/dev/null/cache' is no directory and cannot be made: ",
    ),
    "no room for a traffic log": (
        lambda path: {"engine": {"traffic_log": str(path / "no" / "log")}},
        "no/log' cannot be opened for appending: ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_served_is_found_before_anything_listens_or_loads(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    here(monkeypatch, lambda: pytest.fail("it is loaded"))
    monkeypatch.setattr("jax.default_backend", lambda: pytest.fail("the device is the engine's process's alone"))
    fields, message = WRONG[case]
    assert asyncio.run(command.serve(ServerConfig.of({**BASE, **fields(tmp_path)}))) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_weights_that_cannot_be_opened_are_found_before_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    here(monkeypatch, lambda: pytest.fail("it is loaded"))
    (tmp_path / "config.json").write_text((resolve_model("demo") / "config.json").read_text())
    assert asyncio.run(command.serve(ServerConfig(**BASE, model=str(tmp_path)))) == 2
    assert str(tmp_path) in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    assert asyncio.run(command.serve(ServerConfig(**BASE, model=str(tmp_path)))) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_a_model_that_does_not_load(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def load() -> Any:
        raise ValueError("tensor 'a' has shape (2,)")

    here(monkeypatch, load)
    assert asyncio.run(command.serve(ServerConfig(**BASE))) == 1
    out, err = capsys.readouterr()
    assert port_in(out)
    assert err == "error: the model could not be loaded: tensor 'a' has shape (2,)\n"


def test_an_engine_that_dies(kit: Any, facade: Any, capsys: pytest.CaptureFixture[str]):
    async def story() -> int:
        running = asyncio.ensure_future(command.serve(ServerConfig(**BASE)))
        out = ""
        while "serving" not in out:
            out += capsys.readouterr().out
            await asyncio.sleep(0.01)
        facade.error = RuntimeError("device\nlost")
        async with AsyncClient(f"127.0.0.1:{port_in(out)}") as client:
            with pytest.raises(Exception, match="UNAVAILABLE"):
                await client.generate("abc", max_tokens=5)
        return await running

    assert kit.run(story()) == 1
    assert capsys.readouterr().err == "error: the engine died: device lost\n"


def test_a_signal_while_the_model_loads(kit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    ended, loaded = threading.Event(), threading.Event()

    def load() -> Any:
        try:
            assert ended.wait(100), "the signal waits for the model"
            return kit.clean()
        finally:
            loaded.set()

    here(monkeypatch, load)

    async def story() -> int:
        running = asyncio.ensure_future(command.serve(ServerConfig(**{**BASE, "withdrawal_seconds": 30.0})))
        await kit.eventually(listens_to_signals)
        os.kill(os.getpid(), signal.SIGTERM)
        return await running

    assert kit.run(story()) == 0
    assert "serving" not in capsys.readouterr().out
    ended.set()
    assert loaded.wait(100)  # the thread ends by itself


@pytest.mark.slow
def test_the_real_thing(tmp_path: Path, kept_executables: Path, environment: dict[str, str]):
    """The demo as two processes: two lines, answers, one JSON object a line in their log, and a drained end."""
    log = tmp_path / "log"
    flags = ["--port", "0", "--metrics-port", "0", "--host", "127.0.0.1", "--withdrawal-seconds", "0"]
    # The executables are those of test_openai_end_to_end.py.
    few = ["--policy", "static", "--depth", "2", "--max-batch-size", "2", "--max-seq-len", "512", "--batch-buckets",
           "2", "--variants", "sampled", "--prefill-chunk", "16", "--compile-cache", str(kept_executables)]  # fmt: skip
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve", *flags, *few],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        port = port_in(process.stdout.readline())
        assert process.stdout.readline().startswith("serving demo after ")
        with Client(f"127.0.0.1:{port}") as client:
            assert client.generate("def main():", max_tokens=8, timeout=200).text
            assert client.generate("def main():", regex="[ab]{3}c", max_tokens=8, timeout=200).text[3:] == "c"
            assert client.set_speculation("static", 2) == ["chain-2"] and client.flush_cache() >= 0
            assert client.server_info().executables_ready
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 0
    finally:
        process.kill()
        process.communicate()
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["status"] for entry in entries if entry["event"] == "request"] == ["OK", "OK"]
