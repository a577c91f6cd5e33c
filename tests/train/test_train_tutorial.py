"""The commands of docs/training.md, as they stand, on the demo; and what its command line does with errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.train import __main__ as command

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = re.compile(r"<!-- tutorial -->\n```bash\n(.*?)```", re.DOTALL)


@pytest.mark.slow
def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = TUTORIAL.findall((ROOT / "docs" / "training.md").read_text(encoding="utf-8"))
    assert len(blocks) == 5
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
    assert record["measured_length"]["code"] == pytest.approx(greedy["length"][-1], rel=0.05)
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
