"""python -m serve.client: what it prints, waits for and refuses."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from sockets import BASE, reachable

from serve.api.admin import described
from serve.app import Server
from serve.client import AsyncClient, Client, Delta, Options, ServerError, misfits
from serve.client.__main__ import main
from serve.config import ServerConfig
from serve.core.engine_client import ThreadLink

ROOT = Path(__file__).resolve().parents[2]
GREEDY: Options = {"temperature": 0.0, "max_tokens": 8}


def test_the_command(kit: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def story() -> None:
        async with reachable(kit) as (target, _):

            def command(*arguments: str) -> tuple[int, str, str]:
                code = main([*arguments, "--target", target])
                out = capsys.readouterr()
                return code, out.out, out.err

            async with AsyncClient(target) as client:
                wanted = await client.generate("abcab", **GREEDY)
                chat = await client.generate([{"role": "user", "content": "ab"}], **GREEDY)
            code, out, err = await asyncio.to_thread(command, "abcab", "--max-tokens", "8", "--stats")
            assert (code, out) == (0, wanted.text + "\n")
            assert "5 + 8 tokens" in err and "tokens a round; rounds by tier:" in err and "seed" in err
            code, out, err = await asyncio.to_thread(command, "ab", "--chat", "--max-tokens", "8")
            assert (code, out, err) == (0, chat.text + "\n", "")
            code, out, _ = await asyncio.to_thread(
                command, "abcab", "--max-tokens", "8", "--no-speculation", "--seed", "1", "--route", "x", "--top-k",
                "3", "--stop", "zz", "--ignore-eos", "--priority", "1", "--top-p", "0.9", "--timeout", "30",
                "--retries", "1",
            )  # fmt: skip
            assert code == 0
            monkeypatch.setattr(sys, "stdin", io.StringIO("abcab"))
            assert (await asyncio.to_thread(command, "-", "--max-tokens", "8"))[1] == wanted.text + "\n"
            code, out, err = await asyncio.to_thread(command, "abc" * 50, "--max-tokens", "8")
            assert (code, out) == (1, "") and err.startswith("error: INVALID_ARGUMENT: ") and err.count("\n") == 1
            missing = str(tmp_path / "none")
            for wrong in (
                ["--token-file", missing],
                ["--json-schema", f"@{missing}"],
                ["--json-schema", missing],
                ["--tls-cert", "a"],
            ):
                code, _, err = await asyncio.to_thread(command, "abc", *wrong)
                assert code == 2 and err.startswith("error: ")

    kit.run(story())


class Looks:
    """The time of a command that waits for a server: ten seconds from one look to the next.

    Attributes:
      between: called after a look.
    """

    def __init__(self) -> None:
        self.between, self._now = lambda: None, 0.0

    def sleep(self, seconds: float) -> None:
        self._now += 10
        self.between()

    def monotonic(self) -> float:
        return self._now


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    made = Looks()
    monkeypatch.setattr("serve.client.__main__.time", made)
    return made


def test_the_command_waits_for_a_server_that_is_starting(kit: Any, capsys: pytest.CaptureFixture[str], looks: Looks):
    """And says how far it is; with --no-wait, and after --timeout, it is an error."""
    built = threading.Event()

    def build(on_compiled: Any) -> Any:
        on_compiled(2, 5)
        assert built.wait(60)
        return facade

    facade, config = kit.clean(), ServerConfig(**BASE)

    async def story() -> None:
        server = Server(config, link=ThreadLink(build, described))
        await server.start()
        await kit.eventually(lambda: server.engine.compiled == (2, 5))

        async def command(*arguments: str) -> tuple[int, str, str]:
            target = f"127.0.0.1:{server.port}"
            code = await asyncio.to_thread(main, ["abcab", "--max-tokens", "8", "--target", target, *arguments])
            return code, *capsys.readouterr()

        for refused in (["--no-wait"], ["--timeout", "60"]):
            code, out, err = await command(*refused)
            assert (code, out) == (1, "") and err.endswith("error: UNAVAILABLE: the engine is starting\n")
            assert ("is starting: 2 of 5 executables" in err) == (refused[0] == "--timeout")
        looks.between = built.set
        code, out, err = await command()
        assert (code, err) == (
            0,
            "the server is starting: 2 of 5 executables, the first few of which it waits for\n",
        ) and out
        await server.stop()

    kit.run(story())


def test_ctrl_c_ends_the_request_and_the_command(kit: Any, monkeypatch: pytest.MonkeyPatch):
    class Interrupted(io.StringIO):
        """The terminal of somebody who presses Ctrl-C at the first word."""

        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    async def story() -> None:
        async with reachable(kit) as (target, facade):
            facade.hook = lambda: time.sleep(0.02)
            codes: list[int] = []

            def command() -> None:
                codes.append(main(["abc", "--target", target, "--max-tokens", "100", "--ignore-eos"]))

            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", Interrupted())
                thread = threading.Thread(target=command)
                thread.start()
                await kit.eventually(lambda: not thread.is_alive())
            assert codes == [130]
            await kit.eventually(lambda: not facade.has_work)

    kit.run(story())


def test_nobody_is_there(capsys: pytest.CaptureFixture[str], looks: Looks):
    waits = "nobody answers at 127.0.0.1:1 yet\n"
    for more, told in ((["--no-wait"], ""), (["--timeout", "60"], waits), ([], waits)):
        assert main(["abc", "--target", "127.0.0.1:1", *more]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"{told}error: UNAVAILABLE: ")
        assert "nobody answers at 127.0.0.1:1; python -m serve starts" in err


def test_a_text_that_breaks_off_is_not_begun_again(
    capsys: pytest.CaptureFixture[str], looks: Looks, monkeypatch: pytest.MonkeyPatch
):
    """Though another server may come, and others wait for that."""
    tries = []

    def stream(self: Client, *_: Any, **options: Any) -> Iterator[Delta]:
        tries.append(options)
        yield Delta(0, "abc", (1,), ())
        raise ServerError(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    monkeypatch.setattr(Client, "stream", stream)
    assert main(["abc", "--target", "127.0.0.1:1"]) == 1
    told = "error: UNAVAILABLE: Socket closed (the server is gone, and the text breaks off)\n"
    assert (*capsys.readouterr(), len(tries)) == ("abc", told, 1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["abc", "--target", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == f"\n{told}"  # below the text


def test_what_grpc_says_itself_is_not_printed():
    """It reads what it may print when it is imported."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def answer() -> None:
            with other.accept()[0] as end:
                end.recv(1)
                end.sendall(b"no TLS")

        threading.Thread(target=answer, daemon=True).start()
        target = f"127.0.0.1:{other.getsockname()[1]}"
        command = [sys.executable, "-m", "serve.client", "abc", "--tls", "--no-wait", "--target", target]
        env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 1 and done.stderr.startswith("error: UNAVAILABLE: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        (
            "UNAVAILABLE",
            "failed to connect: Tls handshake failed",
            "(no TLS there, or a certificate of others; see --tls",
        ),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "(--timeout 5 s)"),
    ],
)
def test_what_failed_is_told_with_the_flag(
    code: str, message: str, hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def stream(self: Client, *_: Any, **options: Any) -> Iterator[Delta]:
        raise ServerError(grpc.StatusCode[code], message)

    monkeypatch.setattr(Client, "stream", stream)
    assert main(["abc", "--timeout", "5", "--no-wait"]) == 1
    assert f"{message} {hint}" in capsys.readouterr().err


UNREACHABLE = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("said", "flags", "told"),
    [
        (f"{UNREACHABLE}Tls handshake failed: WRONG_VERSION_NUMBER", ["--tls"], "speaks no TLS: leave --tls, --tls-ca"),
        (f"{UNREACHABLE}Socket closed", [], "speaks TLS: give --tls, or --tls-ca with the file of its authority"),
        (f"{UNREACHABLE}Socket closed", ["--tls"], "asks for a client's certificate of an authority that it knows"),
        (f"{UNREACHABLE}Tls handshake failed: CERTIFICATE_VERIFY_FAILED", ["--tls"], "name its file with --tls-ca"),
        (f"{UNREACHABLE}Hostname Verification Check failed.", ["--tls"], "is for another name: give that in --target"),
        (f"{UNREACHABLE}Failed parsing HTTP/2 (Expected SETTINGS frame", [], "speaks no gRPC; is it a port for HTTP?"),
        ("errors resolving no.host:1: lookup failed", [], "the name in localhost:50051 cannot be resolved"),
    ],
)
def test_ends_that_do_not_understand_each_other_are_told_at_once(
    said: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def stream(self: Client, *_: Any, **options: Any) -> Iterator[Delta]:
        raise ServerError(grpc.StatusCode.UNAVAILABLE, said)

    monkeypatch.setattr(Client, "stream", stream)
    monkeypatch.setattr(misfits, "_speaks_tls", lambda target: True)
    monkeypatch.setattr("serve.client.__main__.wait_until_started", lambda *_: pytest.fail("it waits"))
    assert main(["abc", *flags]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: UNAVAILABLE: ") and err.count("\n") == 1
    assert told in err and said not in err and "see --tls-ca" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system", "be kind"], "--system needs --chat"),
        (["--temprature", "1"], "unrecognized arguments: --temprature 1; for '--temprature' say '--temperature'"),
        (["--max-token=5"], "--max-token=5; for '--max-token' say '--max-tokens'"),  # no abbreviation, as of others
        (["--max-new-tokens", "5"], "for '--max-new-tokens' say '--max-tokens'"),
        (["--guided-json", "{}"], "for '--guided-json' say '--json-schema'"),
        (["--port", "5"], "for '--port' say '--target'"),
        (["--target", "localhost"], "--target must be HOST:PORT, such as localhost:50051, got 'localhost'"),
        (["--target", "localhost:"], "--target must be HOST:PORT, such as localhost:50051, got 'localhost:'"),
        (["--target", "a:65536"], "--target must be HOST:PORT, such as localhost:50051, got 'a:65536'"),
        (["--target", "http://a:1"], "--target must be HOST:PORT, such as localhost:50051, got 'http://a:1'"),
        (["--prompt"], "--prompt; '--prompt': leave the flag out, the prompt is given as it is"),
        (["def"], "unrecognized arguments: def; a prompt of several words needs quotes"),
        (["--timeout", "-1"], "--timeout must be more than 0 seconds, got -1"),
        (["--best-of", "2"], "unrecognized arguments: --best-of 2"),  # there is no --n
        (["--max-tokens", "x"], "argument --max-tokens: invalid int value: 'x'"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as wrong:
        main(["abc", *words])
    assert wrong.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m serve.client: error: ") and error.endswith(f"{message} (see --help)\n")
    assert error.count("\n") == 1
