"""The training loop: resume after a kill, broken checkpoints, full disks, accumulation, meshes, the log."""

from __future__ import annotations

import dataclasses
import gc
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxspec.train.run import logs, loop
from jaxspec.train.run.checkpoints import Checkpoints
from jaxspec.train.run.optim import OPTIMIZERS, SCHEDULES, OptimConfig, optimizer, schedule

ROOT = Path(__file__).resolve().parents[2]
CFG = OptimConfig(steps=7, lr=1e-2, warmup=2, save_every=2, log_every=1)


def quadratic(trainable: Any, frozen: Any, batch: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    noise = 0.01 * jax.random.normal(key, trainable["w"].shape)
    error = batch @ (trainable["w"] + noise) - batch @ frozen["w"]
    accepted = jnp.stack([jnp.int32(2), jnp.int32(1), jnp.int32(1)])
    return jnp.mean(error**2), {"bias": trainable["b"].sum(), "histogram": accepted}


def batch_at(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((4, 3)).astype(np.float32)


def start() -> dict[str, jax.Array]:
    return {"w": jnp.ones((3, 2)), "b": jnp.ones((2,))}


FROZEN = {"w": jnp.full((3, 2), 0.25)}


def log_of(run_dir: Path) -> list[dict[str, str]]:
    """The rows without what the clock decides."""
    return [{k: v for k, v in row.items() if "second" not in k} for row in logs.read(run_dir / "log.csv")]


@pytest.mark.parametrize("killed_at", [4, 5])
@pytest.mark.parametrize("log_every", [1, 3])
def test_a_killed_run_resumes_to_the_same_losses_and_weights(tmp_path: Path, killed_at: int, log_every: int) -> None:
    """Killed right after a checkpoint (step 4) and between two; log windows of any length."""
    cfg = dataclasses.replace(CFG, log_every=log_every)
    whole = loop.run(quadratic, start(), batch_at, cfg, tmp_path / "whole", frozen=FROZEN)

    def killed(step: int) -> np.ndarray:
        if step == killed_at:
            raise KeyboardInterrupt
        return batch_at(step)

    with pytest.raises(KeyboardInterrupt):
        loop.run(quadratic, start(), killed, cfg, tmp_path / "parts", frozen=FROZEN)
    seen: list[int] = []

    def watched(step: int) -> np.ndarray:
        seen.append(step)
        return batch_at(step)

    parts = loop.run(quadratic, start(), watched, cfg, tmp_path / "parts", frozen=FROZEN)
    assert seen == [4, 5, 6]
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    assert [int(row["step"]) for row in log_of(tmp_path / "whole")][-1] == 7
    assert all(bool(jnp.array_equal(whole[k], parts[k])) for k in whole)


def test_the_log_holds_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = dataclasses.replace(CFG, log_every=2, save_every=7, eval_every=3, tokens_per_step=60)
    evaluate = lambda trainable: {"loss": float(trainable["w"].sum())}
    loop.run(quadratic, start(), batch_at, cfg, tmp_path, frozen=FROZEN, evaluate=evaluate)
    rows = logs.read(tmp_path / "log.csv")
    assert [int(row["step"]) for row in rows] == [2, 3, 4, 6, 7]
    assert list(rows[0])[:5] == ["step", "loss", "accept_1", "accept_2", "length"]
    assert {"grad_norm", "lr", "bias", "tokens_per_second", "seconds_per_step"} < set(rows[0])
    assert [bool(row["eval_loss"]) for row in rows] == [False, True, False, True, True]
    assert float(rows[0]["length"]) == 1.75 and float(rows[0]["accept_1"]) == 0.5  # histograms 2, 1, 1
    assert float(rows[1]["tokens_per_second"]) == pytest.approx(60 / float(rows[1]["seconds_per_step"]), rel=1e-6)
    printed = capsys.readouterr().out
    assert re.findall(r"step (\d)/7 loss ", printed) == ["2", "3", "4", "6", "7"]
    assert "step 2/7 loss " in printed and " length 1.75 " in printed and "eval_loss" in printed


def test_a_finished_run_returns_its_weights_without_training(tmp_path: Path) -> None:
    given = start()
    done = loop.run(quadratic, given, batch_at, CFG, tmp_path, frozen=FROZEN)
    assert float(given["w"].sum()) == 6.0  # the caller's arrays were not donated

    def no_batch(step: int) -> np.ndarray:
        raise AssertionError(f"step {step} of a finished run")

    again = loop.run(quadratic, start(), no_batch, CFG, tmp_path, frozen=FROZEN)
    assert bool(jnp.array_equal(done["w"], again["w"]))


def test_the_frozen_state_reaches_the_loss_and_stays_out_of_checkpoints(tmp_path: Path) -> None:
    near = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "near", frozen=FROZEN)
    far = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "far", frozen={"w": jnp.full((3, 2), 9.0)})
    assert float(near["w"].max()) < float(far["w"].min())
    moved = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "near", frozen={"w": jnp.ones((3, 2))})
    assert bool(jnp.array_equal(moved["w"], near["w"]))  # a finished run, whatever is frozen now


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_names_its_step_and_saves_nothing(tmp_path: Path, where: str) -> None:
    def broken(trainable: Any, frozen: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, metrics = quadratic(trainable, frozen, batch, key)
        bad = jnp.where(batch.sum() > 99, jnp.nan, 1.0)
        loss = loss * bad if where == "loss" else loss + jnp.sqrt(trainable["w"].sum() * jnp.where(bad == 1, 1, 0)) * 0
        return loss, metrics

    at = lambda step: batch_at(step) + np.float32(100 if step == 2 else 0)
    with pytest.raises(FloatingPointError, match="at step 3"):
        loop.run(broken, start(), at, dataclasses.replace(CFG, log_every=4), tmp_path, frozen=FROZEN)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == ["2"]


def cut(path: Path) -> None:
    """Truncates every data file of a checkpoint."""
    files = [f for f in path.rglob("*") if f.is_file() and f.stat().st_size > 8 and not f.name.startswith("_")]
    assert files
    for f in files:
        f.write_bytes(f.read_bytes()[: f.stat().st_size // 3])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # reads that orbax leaves behind
def test_a_broken_checkpoint_falls_back_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "whole", frozen=FROZEN)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir() if p.name.isdigit()) == ["6", "7"]
    cut(checkpoints / "7")
    again = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "run", frozen=FROZEN)
    printed = capsys.readouterr().out
    assert f"checkpoint {checkpoints / '7'} cannot be read" in printed and "resumed at step 6" in printed
    assert all(bool(jnp.array_equal(whole[k], again[k])) for k in whole)
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")
    for name in ("6", "7"):
        cut(checkpoints / name)
    with pytest.raises(ValueError, match=f"{checkpoints}: no checkpoint can be read"):
        loop.run(quadratic, start(), batch_at, CFG, tmp_path / "run", frozen=FROZEN)
    gc.collect()  # or they are reported to a test after this one


def test_a_run_of_another_configuration_is_refused(tmp_path: Path) -> None:
    loop.run(quadratic, start(), batch_at, CFG, tmp_path, frozen=FROZEN)
    other = dataclasses.replace(CFG, lr=2e-2)
    with pytest.raises(ValueError, match=r"checkpoints holds another run: lr was 0.01, is 0.02"):
        loop.run(quadratic, start(), batch_at, other, tmp_path, frozen=FROZEN)
    wider = {"w": jnp.ones((3, 2)), "b": jnp.ones((5,))}
    with pytest.raises(ValueError, match=r"checkpoints holds another run: parameters was .*\[2\].*\[5\]"):
        loop.run(quadratic, wider, batch_at, CFG, tmp_path, frozen=FROZEN)
    (tmp_path / "checkpoints" / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings.json is broken"):
        loop.run(quadratic, start(), batch_at, CFG, tmp_path, frozen=FROZEN)


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk; the run goes on from the checkpoint before it."""
    script = f"""
import resource, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
import jax.numpy as jnp, numpy as np
from pathlib import Path
from jaxspec.train.run import loop
from jaxspec.train.run.optim import OptimConfig
def loss(t, f, b, k): return jnp.sum((t["w"] - b) ** 2), {{}}
def at(step):
    if step == 3: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    return np.random.default_rng(step).standard_normal((300, 300)).astype(np.float32)
loop.run(loss, {{"w": jnp.ones((300, 300))}}, at, OptimConfig(steps=4, save_every=2), Path({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert f"OSError: cannot save step 4 in {tmp_path / 'checkpoints'}" in done.stderr
    assert "The checkpoint of step 2 is whole" in done.stderr

    def loss(t: Any, f: Any, b: Any, k: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jnp.sum((t["w"] - b) ** 2), {}

    seen: list[int] = []

    def at(step: int) -> np.ndarray:
        seen.append(step)
        return np.random.default_rng(step).standard_normal((300, 300)).astype(np.float32)

    loop.run(loss, {"w": jnp.ones((300, 300))}, at, OptimConfig(steps=4, save_every=2), tmp_path)
    assert seen == [2, 3]


def test_a_failed_save_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(OSError, match=f"cannot save step 2 in {tmp_path}.*No space left.*no earlier checkpoint"):
        loop.run(quadratic, start(), batch_at, CFG, tmp_path, frozen=FROZEN)


def test_micro_batches_give_the_whole_batch_s_step(tmp_path: Path) -> None:
    def plain(trainable: Any, frozen: Any, batch: jax.Array, key: jax.Array) -> Any:
        error = batch @ trainable["w"] - batch @ frozen["w"]
        rows = jnp.zeros((3,), jnp.int32).at[0].set(batch.shape[0])
        return jnp.mean(error**2), {"histogram": rows}

    run = lambda name, n: loop.run(
        plain, start(), batch_at, dataclasses.replace(CFG, accumulate=n), tmp_path / name, frozen=FROZEN
    )
    whole, parts = run("whole", 1), run("parts", 2)
    np.testing.assert_allclose(parts["w"], whole["w"], rtol=1e-5)
    assert [row["length"] for row in log_of(tmp_path / "parts")] == [
        row["length"] for row in log_of(tmp_path / "whole")
    ]
    for one, other in zip(log_of(tmp_path / "parts"), log_of(tmp_path / "whole"), strict=True):
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-5)
    with pytest.raises(ValueError, match=r"batch must be a multiple of 3 \(accumulate\), got 4 rows"):
        run("odd", 3)


def test_bfloat16_computes_and_float32_learns(tmp_path: Path) -> None:
    dtypes: list[Any] = []

    def loss(trainable: Any, frozen: Any, batch: jax.Array, key: jax.Array) -> Any:
        dtypes.append(trainable["w"].dtype)
        return jnp.mean((batch.astype(jnp.bfloat16) @ trainable["w"]).astype(jnp.float32) ** 2), {}

    cfg = dataclasses.replace(CFG, compute_dtype="bfloat16", lr=1e-5)
    out = loop.run(loss, start(), batch_at, cfg, tmp_path)
    assert set(dtypes) == {jnp.dtype(jnp.bfloat16)} and out["w"].dtype == jnp.float32
    assert 0 < float(jnp.abs(out["w"] - 1).max()) < 1e-3  # steps that bfloat16 weights would round away


def test_a_checkpoint_that_lacks_a_part_of_the_state_is_refused(tmp_path: Path) -> None:
    """As of a version whose optimiser kept other moments: orbax alone would hand out None for them."""
    kept = Checkpoints(tmp_path, {})
    kept.save(2, {"opt_state": {"mu": jnp.ones(2), "nu": None}})
    assert kept.restore({"opt_state": {"mu": jnp.zeros(2), "nu": None}})[0] == 2
    with pytest.raises(ValueError, match=r"it lacks 1 arrays of this version's state, such as \['opt_state'\]\['nu'\]"):
        kept.restore({"opt_state": {"mu": jnp.zeros(2), "nu": jnp.zeros(2)}})
    kept.close()


def test_muon_leaves_output_layers_and_tables_to_adam() -> None:
    """Adam's first step is as long as the learning rate, however small a gradient is."""
    params = {
        "lm_head": {"kernel": jnp.ones((3, 2))},
        "markov": {"before": jnp.ones((4, 2)), "after": jnp.ones((4, 2))},
    }
    tx = optimizer(OptimConfig(steps=10, lr=0.1, warmup=0, weight_decay=0.0, optimizer="muon"))
    updates = tx.update(jax.tree.map(lambda x: 1e-3 * x, params), tx.init(params), params)[0]
    for update in jax.tree.leaves(updates):
        np.testing.assert_allclose(update, -0.1, rtol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_descends_and_decays_matrices_only(name: str) -> None:
    decay = 0.0 if name == "adam" else 0.5
    params = {"lin": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones((2,))}, "embedding": jnp.ones((4, 2))}
    tx = optimizer(OptimConfig(steps=10, lr=0.1, warmup=0, weight_decay=decay, optimizer=name))
    updates: Any = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[0]
    assert float(jnp.abs(updates["lin"]["bias"]).max()) == float(jnp.abs(updates["embedding"]).max()) == 0.0
    np.testing.assert_allclose(updates["lin"]["kernel"], -0.1 * decay, rtol=1e-6)

    tx = optimizer(OptimConfig(steps=60, lr=0.05, optimizer=name, warmup=0.1, weight_decay=0.0))
    value = lambda p: jnp.sum((p["lin"]["kernel"] - 0.5) ** 2) + jnp.sum((p["embedding"] + p["lin"]["bias"][None]) ** 2)
    state = tx.init(params)
    assert all(x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(state))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(value)(params), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    now = params
    for _ in range(60):
        now, state = step(now, state)
    assert float(value(now)) < 0.3 * float(value(params))


def test_schedules() -> None:
    rates = {}
    for name in SCHEDULES:
        at = schedule(OptimConfig(steps=100, lr=1.0, warmup=0.1, final_lr=0.1, schedule=name))
        rates[name] = [round(float(at(step)), 3) for step in (0, 5, 10, 55, 90, 100)]
    assert rates == {
        "cosine": [0.0, 0.5, 1.0, 0.55, 0.127, 0.1],
        "linear": [0.0, 0.5, 1.0, 0.55, 0.2, 0.1],
        "constant": [0.0, 0.5, 1.0, 1.0, 1.0, 1.0],
        "wsd": [0.0, 0.5, 1.0, 1.0, 0.55, 0.1],
    }
    assert float(schedule(OptimConfig(steps=10, lr=1.0, warmup=0))(0)) == 1.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("optimizer", "rms", "optimizer must be one of .* got 'rms'"),
        ("schedule", "step", "schedule must be one of .* got 'step'"),
        ("steps", 0, "steps must be at least 1, got 0"),
        ("lr", float("nan"), "lr must be positive, got nan"),
        ("warmup", 1.5, "warmup must be a number of steps or a share below 1, got 1.5"),
        ("b2", 1.0, r"b2 must lie in \[0, 1\), got 1.0"),
        ("weight_decay", -1.0, "weight_decay must be at least 0, got -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CFG, **{field: value})
    with pytest.raises(ValueError, match="weight_decay must be 0 with optimizer 'adam', got 0.1"):
        OptimConfig(steps=1, optimizer="adam", weight_decay=0.1)
