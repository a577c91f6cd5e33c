"""The commands of docs/training.md, as they stand, on the demo; and what its command line does with errors."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import generate
from jaxspec.drafters import registry
from jaxspec.train import __main__ as command

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = re.compile(r"<!-- tutorial -->\n```bash\n(.*?)```", re.DOTALL)


def blocks_of_the_tutorial() -> list[str]:
    blocks = TUTORIAL.findall((ROOT / "docs" / "training.md").read_text(encoding="utf-8"))
    assert len(blocks) == 5
    return blocks


def parsed(module: str, arguments: list[str]) -> argparse.Namespace:
    """What a command of the tutorial makes of its arguments; SystemExit where it does not take them."""
    if module == "jaxspec.generate":
        return generate.parser().parse_args(arguments)
    assert module == "jaxspec.train", module
    parser = argparse.ArgumentParser()
    importlib.import_module(command.COMMANDS[arguments[0]]).add_arguments(parser)
    return parser.parse_args(arguments[1:])


def test_every_command_of_the_tutorial_parses_and_reads_what_is_there_or_was_written_before() -> None:
    written: set[Path] = set()
    ran: list[str] = []

    def readable(path: Path) -> bool:
        return (ROOT / path).exists() or not written.isdisjoint((path, *path.parents))

    lines = "".join(blocks_of_the_tutorial()).replace("\\\n", " ").splitlines()
    for line in lines:
        words = shlex.split(line)
        if words[0] in ("head", "tail"):
            assert words[1] == "-n" and words[4] == ">" and readable(Path(words[3])), line
            written.add(Path(words[5]))
            continue
        assert words[:2] == ["python", "-m"], line
        arguments = vars(parsed(words[2], words[3:]))
        ran.append(words[3] if words[2] == "jaxspec.train" else words[2])
        reads = [arguments.get(name) for name in ("target", "data", "eval_data", "drafter", "model")]
        for path in [path for read in reads for path in (read if isinstance(read, list) else [read])]:
            assert path in (None, *registry.names()) or readable(Path(path)), (line, path)
        written |= {Path(arguments[name]) for name in ("out", "json") if arguments.get(name)}
    assert ran == ["corpus", "regenerate", "eagle3", "evaluate", "jaxspec.generate"]


@pytest.mark.exhaustive("minutes of training")
def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = blocks_of_the_tutorial()
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    outputs = []
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        outputs.append(done.stdout)
    record = json.loads((tmp_path / "runs" / "evaluation.json").read_text())
    greedy = next(group for group in record["groups"] if group["temperature"] == 0)
    assert 1.0 < greedy["length"][-1] <= 4.0
    # The engine accepts what the walk over its own greedy texts promised; the rounds at a text's end differ.
    assert record["measured_length"]["code greedy"] == pytest.approx(greedy["length"][-1], rel=0.05)
    assert record["milliseconds"]["1"].keys() == {"off", "chain-1", "chain-2", "chain-3"}
    assert outputs[-1].startswith("def main(argv=None):") and len(outputs[-1]) > 60


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "whole"}\n{"text": "cut', encoding="utf-8")
    target = str(ROOT / "checkpoints" / "demo" / "target")
    assert command.run(["eagle3", "--target", target, "--data", str(broken), "--out", str(tmp_path / "head")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and f"{broken}:2" in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "head").exists()
