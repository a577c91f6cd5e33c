"""serve.core.tied: a child ends with its parent, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).write_text("told to"), sys.exit()))
print("running", sys.argv[2:], flush=True)
while True:
    signal.pause()
"""
PARENT = """
import os, subprocess, sys
tied = [sys.executable, "-m", "serve.core.tied", str(os.getpid()), "child", *sys.argv[1:]]
subprocess.run(tied, start_new_session=True)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "child.py").write_text(CHILD)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}


def test_a_killed_parent_takes_its_child_along(tmp_path: Path, environment: dict[str, str]) -> None:
    end = tmp_path / "end"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(end), "--flag", "a b"], env=environment, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "running ['--flag', 'a b']\n"
        assert not end.exists()
        parent.kill()
        assert parent.stdout.read() == ""  # the child had it open, too, and has ended
    assert parent.returncode == -signal.SIGKILL and end.read_text() == "told to"


def test_a_parent_that_died_before_leaves_nothing_running(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "serve.core.tied", "0", "child", str(tmp_path / "end")],
        env=environment, stdout=subprocess.PIPE, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, b"")
