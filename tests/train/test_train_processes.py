"""A run over several processes is the run of one with the same mesh; what one process alone can do is refused."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
import quick
from safetensors.numpy import load_file

from jaxspec.train.drafters import eagle
from jaxspec.train.run import mesh, processes
from serve.openai import free_port

ROOT = Path(__file__).resolve().parents[2]
SIZES = [
    "--hidden-size", "16", "--head-dim", "6", "--ttt-steps", "2", "--length", "32", "--batch", "4", "--warmup", "0",
    "--eval-share", "0.3", "--lr", "1e-2", "--log-every", "1", "--save-every", "2",
]  # fmt: skip


def start(files: Path, out: Path, devices: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxspec.train", "eagle3", "--target", str(files / "target")]
    command += ["--data", str(files / "texts.jsonl"), "--out", str(out), *SIZES, *words]
    flags = f"{quick.FLAGS} --xla_force_host_platform_device_count={devices}"
    env = {"JAX_PLATFORMS": "cpu"} | quick.QUICKLY | {"XLA_FLAGS": flags}
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def together(files: Path, out: Path, *words: str) -> list[str]:
    """What two processes print, with one device each."""
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    runs = [start(files, out, 1, *words, *place, "--process-id", str(i)) for i in range(2)]
    printed = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], printed
    return printed


def losses(out: Path) -> list[float]:
    with out.with_name(f"{out.name}.run").joinpath("log.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.exhaustive("five runs of the command, in processes of their own")
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_two_processes_train_what_one_does(axis: str, tmp_path: Path, tiny_files: Path) -> None:
    """The same losses and the same head, also where the run was interrupted."""
    grid = ["--mesh", f"{axis}=2"]
    alone = start(tiny_files, tmp_path / "alone", 2, *grid, "--steps", "4")
    printed = alone.communicate(timeout=600)[0]
    assert alone.returncode == 0, printed
    if axis == "data":  # half, and on from there; schedules go by --steps, so the rate is constant
        first, second = together(tiny_files, tmp_path / "two", *grid, "--steps", "4")
        assert "step 4/4" in first and "held" not in second and "step" not in second
    else:
        together(tiny_files, tmp_path / "two", *grid, "--steps", "4")
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "alone"), rtol=1e-5)
    assert len(losses(tmp_path / "two")) == 4
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "alone"))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(
            np.asarray(array, np.float32), np.asarray(theirs[name], np.float32), atol=1e-2, err_msg=name
        )
    (tmp_path / "two" / "model.safetensors").unlink()
    first, _ = together(tiny_files, tmp_path / "two", *grid, "--steps", "4")
    assert "resumed at step 4" in first and (tmp_path / "two" / "model.safetensors").exists()


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    eagle.add_arguments(parser)
    return parser.parse_args(["--target", "t", "--data", "d.jsonl", "--out", "o", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-processes", "2"], "--num-processes and --process-id need --coordinator, got 2 and None"),
        (["--coordinator", "a:1"], "needs --num-processes and a --process-id below that, got None and None"),
        (["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"], "below that, got 2 and 2"),
        (["--coordinator", "auto", "--process-id", "0"], "auto finds its number of processes .* got None and 0"),
    ],
)
def test_who_cannot_meet(words: Sequence[str], message: str) -> None:
    with pytest.raises(ValueError, match=message), processes.joined(parsed(*words)):
        pass


def test_what_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    processes.refuse(parsed("--regenerate"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    processes.refuse(parsed("--mesh", "data=4"))
    cases: list[tuple[list[str], str]] = [
        (["--regenerate"], "--regenerate True is for one process, got 2"),
        (["--hidden-cache", "h"], "--hidden-cache h is for one process, got 2"),
        (["--gate", "g"], "--gate g is for one process, got 2"),
        (["--data", "ring:r"], "--data ring: ring:r is for one process, got 2"),
        ([], f"2 processes need --mesh over all their devices, e.g. data={jax.device_count()}"),
    ]
    for words, message in cases:
        with pytest.raises(ValueError, match=message):
            processes.refuse(parsed(*words))
    with pytest.raises(ValueError, match=r"mesh 'data=2' has 2 devices; 2 processes must use all their 4"):
        mesh.make_mesh("data=2")
