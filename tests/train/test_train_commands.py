"""What the trainers' commands share: paths, the hidden-state cache, meshes, resume, the plot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.models.tiny import tiny_target
from jaxspec.train import __main__ as front
from jaxspec.train.data.batch import PackedRows
from jaxspec.train.data.dataset import Example
from jaxspec.train.drafters import eagle
from jaxspec.train.objective import teacher
from jaxspec.train.run import command, logs, plots

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--arch", "eagle3", "--hidden-size", "16", "--head-dim", "8", "--ttt-steps", "2", "--log-every", "1"]


def losses(run_dir: Path) -> list[str]:
    return [row["loss"] for row in logs.read(run_dir / "log.csv")]


def test_the_cache_gives_the_losses_of_online_states(
    tmp_path: Path, train_command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train_command(eagle, tmp_path / "online", *SMALL, plot=True)
    cached = ["--hidden-cache", str(tmp_path / "cache")]
    train_command(eagle, tmp_path / "cached", *SMALL, *cached)
    assert losses(tmp_path / "online.run") == losses(tmp_path / "cached.run")
    printed = capsys.readouterr().out
    assert "hidden states on disk: " in printed and "x 128 channels x 4 bytes" in printed
    assert printed.index("GB free") < printed.index("hidden states: chunk 1/1")
    with pytest.raises(ValueError, match="is stale: its rows differ"):
        train_command(eagle, tmp_path / "other", *SMALL, *cached, "--eval-share", "0.6")
    assert "plot: " in printed and (tmp_path / "online.run" / "training.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="online.run holds another run: lr was 0.0001, is 0.5"):
        train_command(eagle, tmp_path / "online", *SMALL, "--lr", "0.5")


def test_targets_are_named_as_everywhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command that has a target."""
    given: list[Any] = []
    for name, module in front.COMMANDS.items():
        if name in ("corpus", "target", "evaluate"):  # none, none, and its own way (test_train_evaluate.py)
            continue
        monkeypatch.setattr(f"{module}.main", given.append)
        files = ["--data", "x.jsonl", "--out", str(tmp_path / "out")]
        assert front.run([name, "--target", "demo", *files]) == 0
        assert given.pop().target == ROOT / "checkpoints" / "demo" / "target"
        assert front.run([name, "--target", str(tmp_path), *files]) == 0
        assert given.pop().target == tmp_path
        assert front.run([name, "--target", "/nowhere", *files]) == 2 and not given
        assert "a hub id ('organisation/model'), and '/nowhere' is none" in capsys.readouterr().err


def rows_of(count: int, length: int = 8) -> PackedRows:
    tokens = np.random.default_rng(0).integers(0, 13, (count, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return PackedRows(tokens, np.ones_like(tokens), positions, positions > 0)


def test_the_cache_is_resumed_checked_and_refused_without_room(
    tmp_path: Path, tiny_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, rows = tiny_target(bos_token_id=None), rows_of(teacher.CHUNK + 3)
    make = lambda: teacher.cached_states(tmp_path / "cache", tiny_files / "target", target, rows, (0, 2), 8)
    with monkeypatch.context() as patch:
        patch.setattr(teacher.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(ValueError, match=r"needs 0.000 GB .* free are 0.000 GB"):
            make()
    cache = make()
    index = np.array([teacher.CHUNK + 2, 0])
    online = teacher.states_fn(target, (0, 2))(rows.batch(index))
    for found, wanted in zip((cache.states(index).aux_BTA, cache.states(index).hidden_BTE),
                             (online.aux_BTA, online.hidden_BTE), strict=True):  # fmt: skip
        assert found is not None
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert cache.bytes == rows.tokens.size * 96 * 4 == sum(p.stat().st_size for p in cache.directory.glob("*.bin"))
    first, last = sorted(cache.directory.glob("*.bin"))
    before = first.stat().st_mtime_ns
    last.write_bytes(last.read_bytes()[:100])  # a kill, or a disk that was full
    capsys.readouterr()
    np.testing.assert_array_equal(make().states(index).hidden_BTE, cache.states(index).hidden_BTE)
    assert first.stat().st_mtime_ns == before and "chunk 1/1" in capsys.readouterr().out


MESHED = ["--batch", "8", "--accumulate", "2", "--steps", "4", "--lr", "0.01", "--save-every", "2", *SMALL]


def agree(one: list[str], meshed: list[str]) -> None:
    assert len(one) == len(meshed) == 4 and len(set(one)) == 4
    np.testing.assert_allclose([float(x) for x in meshed], [float(x) for x in one], rtol=1e-5)


def test_a_mesh_gives_the_losses_of_one_device(tmp_path: Path, train_command: Any) -> None:
    """data=2, tensor=2 on virtual devices, with micro-batches; every loss agrees to 1e-5."""
    train_command(eagle, tmp_path / "one", *MESHED)
    train_command(eagle, tmp_path / "four", *MESHED, "--mesh", "data=2,tensor=2")
    agree(losses(tmp_path / "one.run"), losses(tmp_path / "four.run"))


@pytest.mark.exhaustive("eight devices, compiled as users do")
def test_a_mesh_of_eight_devices_gives_the_losses_of_one(tmp_path: Path, tiny_files: Path) -> None:
    """data=4, tensor=2, in a process that compiles as users do."""
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import jax
jax.config.update("jax_default_matmul_precision", "highest")
assert len(jax.devices()) == 8
from jaxspec.train import __main__ as front
for name, mesh in (("one", []), ("eight", ["--mesh", "data=4,tensor=2"])):
    front.main(["eagle3", "--target", {str(tiny_files / "target")!r}, "--data", {str(tiny_files / "texts.jsonl")!r},
      "--out", {str(tmp_path)!r} + "/" + name, "--length", "32", "--warmup", "0", "--eval-share", "0.3",
      *{MESHED}, *mesh])
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=400, env=flags)
    assert done.returncode == 0, done.stderr[-3000:]
    agree(losses(tmp_path / "one.run"), losses(tmp_path / "eight.run"))


def test_results_never_overwrite_what_a_run_reads(tmp_path: Path, tiny_files: Path, train_command: Any) -> None:
    with pytest.raises(ValueError, match="--out must differ from --target"):
        train_command(eagle, tiny_files / "target", *SMALL)
    with pytest.raises(ValueError, match="--run-dir must differ from --out"):
        train_command(eagle, tmp_path, *SMALL, "--run-dir", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file, not a directory"):
        train_command(eagle, tmp_path / "file", *SMALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "4096"], "--length must be at most the target's max_position_embeddings 512, got 4096"),
        (["--epochs", "2"], "--steps 2 and --epochs 2.0 exclude each other"),
        (["--eval-share", "1"], r"--eval-share must lie in \[0, 1\), got 1.0"),
        (["--mesh", "data=3000"], "mesh 'data=3000' needs 3000 devices"),
        (["--mesh", "rows=2"], "mesh must look like 'data=4,tensor=2'"),
        (["--batch", "3", "--accumulate", "2"], r"batch must be a multiple of 2 \(accumulate\), got 3 rows"),
        (["--optimizer", "adam", "--weight-decay", "0.1"], "weight_decay must be 0 with optimizer 'adam'"),
    ],
)
def test_arguments_out_of_range_are_refused(
    arguments: list[str], message: str, tmp_path: Path, train_command: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        train_command(eagle, tmp_path / "head", *SMALL, *arguments)
    assert not (tmp_path / "head").exists()


def test_texts_are_held_out_by_what_they_say() -> None:
    rng = np.random.default_rng(0)
    examples = [Example([int(x) for x in rng.integers(0, 9, 6)], [True] * 6, "a", 0, origin=str(i)) for i in range(400)]
    held = [command.held_out(example, 0.25) for example in examples]
    assert 60 < sum(held) < 140 and held == [command.held_out(example, 0.25) for example in examples]
    assert not any(command.held_out(example, 0.0) for example in examples)


def test_a_plot_needs_a_log_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plots.plot_run(tmp_path) == f"no plot: {tmp_path / 'log.csv'} has no rows"
    logs.Log(tmp_path / "log.csv", 0).append(1, {"loss": 1.0, "accept_1": 0.5, "length": 1.5, "lr": 0.1})
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert "matplotlib is not installed" in plots.plot_run(tmp_path)


@pytest.mark.parametrize("name", sorted(front.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        front.main([name, "--help"])
    assert stopped.value.code == 0 and "--" in capsys.readouterr().out
