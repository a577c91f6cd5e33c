"""The training loop that every trainee shares: optimiser, checkpoints, resume, log.

Must not know what is trained: it gets a loss over (trainable state, frozen state, batch) and
a function from step to batch.
"""

from __future__ import annotations

import csv
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

#: (trainable, frozen, batch) -> (loss, {name: scalar}); all traced.
LossFn = Callable[[Any, Any, Any], tuple[jax.Array, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay.

    Attributes:
      steps: optimiser steps in all; the schedule ends there.
      lr: peak learning rate. final_lr: where the cosine ends, as a share of lr.
      warmup: steps of linear warm-up.
      save_every: steps between checkpoints. log_every: steps between log lines.
    """

    steps: int
    lr: float = 2e-3
    final_lr: float = 0.05
    warmup: int = 100
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.05
    clip: float = 1.0
    save_every: int = 200
    log_every: int = 20


def optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
    """Clip, then AdamW; matrices decay, norms and biases do not."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, cfg.lr, min(cfg.warmup, cfg.steps), max(cfg.steps, cfg.warmup + 1), cfg.lr * cfg.final_lr
    )
    decay = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    tx = optax.chain(
        optax.clip_by_global_norm(cfg.clip),
        optax.adamw(schedule, b1=cfg.b1, b2=cfg.b2, weight_decay=cfg.weight_decay, mask=decay),
    )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
            return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


def run(
    loss_fn: LossFn,
    trainable: Any,
    batch_at: Callable[[int], Any],
    cfg: OptimConfig,
    run_dir: Path,
    on_log: Callable[[int, dict[str, float]], None] | None = None,
    *,
    frozen: Any = (),
) -> Any:
    """Trains to cfg.steps, resuming from run_dir's newest checkpoint, and returns the trained state.

    Writes run_dir/log.csv and run_dir/checkpoints (orbax). `frozen` is an argument of the
    jitted step (arrays in loss_fn's closure would be copied into the executable as constants)
    and is not part of a checkpoint.
    """
    tx = optimizer(cfg)
    opt_state = tx.init(trainable)

    @jax.jit
    def step_fn(trainable: Any, opt_state: Any, frozen: Any, batch: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable, frozen, batch)
        updates, opt_state = tx.update(grads, opt_state, trainable)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **metrics}
        return optax.apply_updates(trainable, updates), opt_state, metrics

    run_dir.mkdir(parents=True, exist_ok=True)
    manager = ocp.CheckpointManager(
        (run_dir / "checkpoints").resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )
    start = manager.latest_step() or 0
    if start:
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"trainable": trainable, "opt_state": opt_state})
        restored = manager.restore(start, args=ocp.args.StandardRestore(template))
        trainable, opt_state = restored["trainable"], restored["opt_state"]
        print(f"resumed at step {start}", flush=True)
    _truncate_csv(run_dir / "log.csv", start)

    window: list[dict[str, jax.Array]] = []
    began = time.monotonic()
    for step in range(start, cfg.steps):
        trainable, opt_state, metrics = step_fn(trainable, opt_state, frozen, batch_at(step))
        window.append(metrics)
        done = step + 1
        if done % cfg.log_every == 0 or done == cfg.steps:
            means = {k: float(np.mean([float(m[k]) for m in window])) for k in window[0]}
            means["seconds_per_step"] = (time.monotonic() - began) / len(window)
            _append_csv(run_dir / "log.csv", done, means)
            print(f"step {done}/{cfg.steps} " + " ".join(f"{k} {v:.4g}" for k, v in means.items()), flush=True)
            if on_log is not None:
                on_log(done, means)
            window, began = [], time.monotonic()
        if done % cfg.save_every == 0 or done == cfg.steps:
            if not bool(jnp.isfinite(metrics["loss"])):
                raise FloatingPointError(f"loss is {float(metrics['loss'])} at step {done}; nothing was saved")
            manager.save(done, args=ocp.args.StandardSave({"trainable": trainable, "opt_state": opt_state}))
            manager.wait_until_finished()
    manager.close()
    return trainable


def _append_csv(path: Path, step: int, row: dict[str, float]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as f:
        writer = csv.writer(f)
        if new:
            writer.writerow(["step", *row])
        writer.writerow([step, *(f"{v:.6g}" for v in row.values())])


def _truncate_csv(path: Path, step: int) -> None:
    """Drops the rows after `step`: a run that was killed logged them, and its successor logs them again."""
    if not path.exists():
        return
    with path.open(newline="") as f:
        header, *rows = list(csv.reader(f))
    kept = [row for row in rows if int(row[0]) <= step]
    if len(kept) < len(rows):
        with path.open("w", newline="") as f:
            csv.writer(f).writerows([header, *kept])
