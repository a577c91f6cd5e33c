"""The training loop: resume after a kill, frozen state, the log."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.train import loop

CFG = loop.OptimConfig(steps=7, lr=1e-2, warmup=2, save_every=2, log_every=1)


def quadratic(trainable: Any, frozen: Any, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    error = batch @ trainable["w"] - batch @ frozen["w"]
    return jnp.mean(error**2), {"bias": trainable["b"].sum()}


def batch_at(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((4, 3)).astype(np.float32)


def start() -> dict[str, jax.Array]:
    return {"w": jnp.ones((3, 2)), "b": jnp.ones((2,))}


FROZEN = {"w": jnp.full((3, 2), 0.25)}


def log_of(run_dir: Path) -> list[list[str]]:
    """Step, loss and gradient norm of each row (the time differs from run to run)."""
    with (run_dir / "log.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    return [[row["step"], row["loss"], row["grad_norm"]] for row in rows]


def test_a_killed_run_resumes_to_the_same_losses_and_weights(tmp_path: Path) -> None:
    whole = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "whole", frozen=FROZEN)

    def killed_at_5(step: int) -> np.ndarray:
        if step == 5:
            raise KeyboardInterrupt
        return batch_at(step)

    with pytest.raises(KeyboardInterrupt):
        loop.run(quadratic, start(), killed_at_5, CFG, tmp_path / "parts", frozen=FROZEN)
    assert [row[0] for row in log_of(tmp_path / "parts")] == ["1", "2", "3", "4", "5"]
    parts = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "parts", frozen=FROZEN)

    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    assert [row[0] for row in log_of(tmp_path / "whole")] == [str(i) for i in range(1, 8)]
    assert all(bool(jnp.array_equal(whole[k], parts[k])) for k in whole)


def test_a_finished_run_returns_its_weights_without_training(tmp_path: Path) -> None:
    done = loop.run(quadratic, start(), batch_at, CFG, tmp_path, frozen=FROZEN)

    def no_batch(step: int) -> np.ndarray:
        raise AssertionError(f"step {step} of a finished run")

    again = loop.run(quadratic, start(), no_batch, CFG, tmp_path, frozen=FROZEN)
    assert bool(jnp.array_equal(done["w"], again["w"]))


def test_the_frozen_state_reaches_the_loss_and_stays_out_of_checkpoints(tmp_path: Path) -> None:
    near = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "near", frozen={"w": jnp.ones((3, 2))})
    far = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "far", frozen={"w": jnp.full((3, 2), 9.0)})
    assert float(near["w"].max()) < float(far["w"].min())
    moved = loop.run(quadratic, start(), batch_at, CFG, tmp_path / "near", frozen=FROZEN)
    assert bool(jnp.array_equal(moved["w"], near["w"]))  # a finished run, whatever is frozen now


def test_a_loss_that_is_not_finite_saves_nothing(tmp_path: Path) -> None:
    def broken(trainable: Any, frozen: Any, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, metrics = quadratic(trainable, frozen, batch)
        return loss * jnp.nan, metrics

    with pytest.raises(FloatingPointError, match="at step 2"):
        loop.run(broken, start(), batch_at, CFG, tmp_path, frozen=FROZEN)
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()]


def test_vectors_do_not_decay() -> None:
    tx = loop.optimizer(loop.OptimConfig(steps=10, lr=1.0, warmup=0, weight_decay=0.5))
    params = start()
    updates: Any = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[0]
    assert float(jnp.abs(updates["b"]).max()) == 0.0
    np.testing.assert_allclose(updates["w"], -0.5, rtol=1e-6)
