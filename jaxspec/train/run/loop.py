"""The training loop that every trainee shares: steps, checkpoints, resume, log.

Must not know what is trained: it gets a loss over (trainable state, frozen state, batch, key) and a function from
step to batch. A run that was killed goes on as if it had not been: batches and keys depend on the step only.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.train.objective import acceptance
from jaxspec.train.run import logs, processes
from jaxspec.train.run import mesh as meshes
from jaxspec.train.run.checkpoints import Checkpoints
from jaxspec.train.run.optim import OptimConfig, optimizer, schedule

#: (trainable, frozen, batch, key) -> (loss, {name: scalar}); all traced. A metric "histogram" (int32 [D + 1], rounds
#: by drafts accepted) is summed over a log window and logged as accept_1, .. and length; all others are averaged.
LossFn = Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
HISTOGRAM = "histogram"
#: Fields of OptimConfig that a resumed run may change.
_FREE = {"save_every", "log_every", "eval_every"}


def run(
    loss_fn: LossFn,
    trainable: Any,
    batch_at: Callable[[int], Any],
    cfg: OptimConfig,
    run_dir: Path,
    *,
    frozen: Any = (),
    mesh: Mesh | None = None,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
) -> Any:
    """Trains to cfg.steps, resuming from run_dir's newest checkpoint, and returns the trained state.

    Writes run_dir/log.csv and run_dir/checkpoints.

    Args:
      trainable: float32 arrays; the caller's stay valid.
      batch_at: step -> pytree of arrays whose first axis is rows.
      frozen: an argument of the jitted step (arrays in loss_fn's closure would be copied into the executable as
        constants), no part of a checkpoint.
      mesh: from mesh.make_mesh; rows are split over its data axis, parameters over its tensor axis.
      evaluate: called with the trainable state each cfg.eval_every steps and at the end; its metrics are logged with
        the prefix "eval_".

    Raises:
      ValueError: run_dir holds another run, or no checkpoint that can be read; a batch that cannot be split.
      OSError: a checkpoint cannot be written; the one before stays whole.
      FloatingPointError: a loss or gradient that is not finite; names the step. Nothing after it is saved.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(run_dir / "checkpoints", _settings(cfg, trainable))
    trainable = jax.tree.map(jnp.copy, trainable)  # the step donates its state
    trainable, frozen = meshes.place(mesh, trainable), meshes.place(mesh, frozen)
    tx = optimizer(cfg)
    start, trainable, opt_state = _resumed(checkpoints, trainable, _init(tx, trainable, mesh))
    step_fn: Callable[..., tuple[Any, Any, dict[str, jax.Array]]] | None = None
    log = logs.Log(run_dir / "log.csv", start) if processes.leads() else None
    window = _Window(cfg)
    for step in range(start, cfg.steps):
        batch = meshes.place_batch(mesh, batch_at(step), cfg.accumulate)
        if step_fn is None:
            step_fn = _compiled(loss_fn, tx, cfg, mesh, (trainable, opt_state, frozen, batch))
            window.clear()
        trainable, opt_state, metrics = step_fn(trainable, opt_state, frozen, batch, jnp.int32(step))
        window.steps.append(metrics)
        done = step + 1
        saves, evaluates = _due(done, cfg.save_every, cfg), evaluate is not None and _due(done, cfg.eval_every, cfg)
        # A checkpoint ends a log window, so that a resumed run averages over the same steps.
        if saves or evaluates or done % cfg.log_every == 0:
            row = window.summary(done)
            if evaluates and evaluate is not None:
                row |= {f"eval_{key}": value for key, value in evaluate(trainable).items()}
            if log is not None:
                log.append(done, row)
            print(f"step {done}/{cfg.steps} " + logs.line(row), flush=True)
            if saves:
                checkpoints.save(done, {"trainable": trainable, "opt_state": opt_state})
            window.clear()
    checkpoints.close()
    return trainable


def _resumed(checkpoints: Checkpoints, trainable: Any, opt_state: Any) -> tuple[int, Any, Any]:
    """(steps done, trainable, opt_state) of the newest checkpoint; what was given where there is none."""
    start, state = checkpoints.restore({"trainable": trainable, "opt_state": opt_state})
    if start:
        print(f"resumed at step {start}", flush=True)
    return start, state["trainable"], state["opt_state"]


def _due(done: int, every: int, cfg: OptimConfig) -> bool:
    """Whether what happens every so many steps (0: never) and at the end is to happen after `done` steps."""
    return done == cfg.steps or (every > 0 and done % every == 0)


class _Window:
    """The steps since the log's last row.

    Attributes:
      steps: their metrics, still on the device.
    """

    def __init__(self, cfg: OptimConfig) -> None:
        self._cfg = cfg
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self.steps: list[dict[str, jax.Array]] = []
        self._began = time.monotonic()

    def summary(self, done: int) -> dict[str, float]:
        """What the log says of them, now that `done` steps are done."""
        row = _summary(jax.device_get(self.steps), done - len(self.steps))
        seconds = (time.monotonic() - self._began) / len(self.steps)
        if self._cfg.tokens_per_step:
            row["tokens_per_second"] = self._cfg.tokens_per_step / seconds
        row["seconds_per_step"] = seconds
        return row


def _settings(cfg: OptimConfig, trainable: Any) -> dict[str, Any]:
    """What a resumed run must share: the settings, and the trainee's shapes."""
    fields = {key: value for key, value in dataclasses.asdict(cfg).items() if key not in _FREE}
    shapes = {jax.tree_util.keystr(path): list(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(trainable)}
    return {**fields, "parameters": shapes}


def _init(tx: optax.GradientTransformation, trainable: Any, mesh: Mesh | None) -> Any:
    if mesh is None:
        return tx.init(trainable)
    shardings = meshes.parameter_shardings(mesh, jax.eval_shape(tx.init, trainable))
    return jax.jit(tx.init, out_shardings=shardings)(trainable)


def casting(loss_fn: LossFn, cfg: OptimConfig) -> LossFn:
    """loss_fn on weights that are rounded to the compute dtype first; gradients are those of the float32 weights."""
    dtype = jnp.dtype(cfg.compute_dtype)

    def loss(trainable: Any, frozen: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        rounded = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, trainable)
        return loss_fn(rounded, frozen, batch, key)

    return loss


def train_step(
    loss_fn: LossFn, tx: optax.GradientTransformation, cfg: OptimConfig, mesh: Mesh | None = None
) -> Callable[..., tuple[Any, Any, dict[str, jax.Array]]]:
    """One optimiser step: (trainable, opt_state, frozen, batch, step int32) -> (trainable, opt_state, metrics)."""
    rate, gradient = schedule(cfg), jax.value_and_grad(casting(loss_fn, cfg), has_aux=True)

    def split(x: jax.Array) -> jax.Array:
        # Every accumulate-th row to the same micro-batch: rows stay on the device that holds them.
        return jnp.swapaxes(x.reshape(x.shape[0] // cfg.accumulate, cfg.accumulate, *x.shape[1:]), 0, 1)

    def step_fn(
        trainable: Any, opt_state: Any, frozen: Any, batch: Any, step: jax.Array
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(cfg.seed), step)
        if cfg.accumulate == 1:
            (value, metrics), grads = gradient(trainable, frozen, batch, key)
        else:

            def micro(total: Any, at: tuple[jax.Array, Any]) -> tuple[Any, tuple[jax.Array, dict[str, jax.Array]]]:
                index, part = at
                if mesh is not None:
                    part = jax.lax.with_sharding_constraint(part, NamedSharding(mesh, PartitionSpec(meshes.DATA)))
                result, grads = gradient(trainable, frozen, part, jax.random.fold_in(key, index))
                return jax.tree.map(jnp.add, total, grads), result

            zeros = jax.tree.map(jnp.zeros_like, trainable)
            columns = (jnp.arange(cfg.accumulate, dtype=jnp.int32), jax.tree.map(split, batch))
            total, (values, stacked) = jax.lax.scan(micro, zeros, columns)
            grads = jax.tree.map(lambda g: g / jnp.asarray(cfg.accumulate, g.dtype), total)
            value = values.mean()
            metrics = {k: v.sum(axis=0) if k == HISTOGRAM else v.mean(axis=0) for k, v in stacked.items()}
        updates, opt_state = tx.update(grads, opt_state, trainable)
        own = {"loss": value, "grad_norm": optax.tree.norm(grads), "lr": rate(step)}
        return optax.apply_updates(trainable, updates), opt_state, {**own, **metrics}

    return step_fn


def _compiled(
    loss_fn: LossFn, tx: optax.GradientTransformation, cfg: OptimConfig, mesh: Mesh | None, args: tuple[Any, ...]
) -> Callable[..., tuple[Any, Any, dict[str, jax.Array]]]:
    began = time.monotonic()
    placed: Any = None
    if mesh is not None:
        placed = (*(meshes.parameter_shardings(mesh, x) for x in args[:2]), NamedSharding(mesh, PartitionSpec()))
    step = train_step(loss_fn, tx, cfg, mesh)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=placed)
    compiled = jitted.lower(*args, jnp.int32(0)).compile()
    print(f"compiled the step in {time.monotonic() - began:.1f} s", flush=True)
    return compiled


def _summary(window: list[dict[str, Any]], before: int) -> dict[str, float]:
    """Means over a window (sums of histograms), in the log's order.

    Raises:
      FloatingPointError: a loss or gradient norm that is not finite.
    """
    for i, metrics in enumerate(window):
        for name in ("loss", "grad_norm"):
            if not math.isfinite(float(metrics[name])):
                raise FloatingPointError(
                    f"{name} is {float(metrics[name])} at step {before + i + 1}; nothing of it was saved"
                )
    row = {"loss": float(np.mean([float(m["loss"]) for m in window]))}
    if HISTOGRAM in window[0]:
        histogram = jnp.asarray(np.sum([m[HISTOGRAM] for m in window], axis=0))
        row |= {name: float(value) for name, value in acceptance.summary(histogram).items()}
    others = [key for key in window[0] if key not in ("loss", "grad_norm", "lr", HISTOGRAM)]
    row |= {key: float(np.mean([float(m[key]) for m in window])) for key in others}
    row["grad_norm"] = float(np.mean([float(m["grad_norm"]) for m in window]))
    row["lr"] = float(window[-1]["lr"])
    return row
