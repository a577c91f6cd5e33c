"""The loop that trains a server's drafter: when it trains, from what, and what it makes of the gate and of a trial."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve import learn


class Server:
    """Takes heads; a trial takes a look or two, and ends as planned."""

    def __init__(self, *ends: bool):
        self.ends, self.taken, self.version, self.looks = list(ends), [], 1, 0

    def update_drafter(self, directory: str) -> int:
        self.taken.append(directory)
        self.looks = 2
        return 1 + len(self.taken)

    def server_info(self) -> Any:
        self.looks -= 1
        if not self.looks and self.ends.pop(0):
            self.version = 1 + len(self.taken)
        trial = self.looks > 0
        return SimpleNamespace(
            drafter_trial=trial, drafter_updates=len(self.taken), drafter_version=self.version, drafter_rollbacks=0
        )


def test_cycles(tmp_path: Path):
    """Not better; better and kept; better and rolled back: each trains on from what is served."""
    ring, out = tmp_path / "ring", tmp_path / "heads"
    ring.mkdir()
    commands: list[Sequence[str]] = []
    gates, count = iter((False, True, True)), 0

    def sleep(seconds: float) -> None:
        nonlocal count
        count += 1
        (ring / f"ring-{count:020d}-1.safetensors").write_bytes(bytes(2**19))

    def train(command: Sequence[str]) -> None:
        commands.append(command)
        path = Path(command[command.index("--out") + 1])
        path.with_name(path.name + ".run").mkdir(parents=True)
        if next(gates):
            path.mkdir()
            (path / "config.json").write_text("{}")

    arguments = ["--target", "t", "--drafter", "first", "--ring", str(ring), "--out", str(out), "--grown-mib", "1"]
    arguments += ["--trainer", "eagle3"]
    args = learn.parser().parse_args([*arguments, "--", "--steps", "7"])
    server: Any = Server(True, False)
    loop = learn.Loop(args, server, train, sleep)
    assert loop.cycle() == "head-0001: not better than first" and count == 2
    assert loop.cycle() == "head-0002: version 2 is served"
    assert loop.cycle() == "head-0003: version 3 was rolled back to 2" and loop.head == out / "head-0002"
    assert server.taken == [str(out / "head-0002"), str(out / "head-0003")]
    at = lambda name: [command[command.index(name) + 1] for command in commands]
    assert at("--init-from") == at("--gate") == ["first", "first", str(out / "head-0002")]
    assert at("--data") == [f"ring:{ring}"] * 3 and at("--steps") == ["7"] * 3


def test_what_goes_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    base = [
        "--target",
        "t",
        "--drafter",
        "d",
        "--ring",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--trainer",
        "eagle3",
    ]
    assert learn.main([*base, "--token-file", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err

    def fail(*args: Any, **more: Any) -> None:
        raise subprocess.CalledProcessError(2, ["train", Path("a b")])

    assert learn.main([*base, "--ring", str(tmp_path / "none")]) == 2
    assert "none is no directory: it is the server's --feature-ring" in capsys.readouterr().err
    assert learn.main([*base, "--server", "127.0.0.1:1"]) == 1  # nothing is waited for
    assert "error: UNAVAILABLE" in capsys.readouterr().err
    monkeypatch.setattr(learn, "Client", lambda *args, **more: contextlib.nullcontext(Server(True)))
    monkeypatch.setattr(learn, "_run_trainer", fail)
    (tmp_path / "ring-1-1.safetensors").write_bytes(bytes(2**10))
    assert learn.main([*base, "--grown-mib", "0.0001", "--cycles", "1"]) == 1
    assert "error: the trainer ended with status 2: train 'a b'" in capsys.readouterr().err
