"""Optimisers and learning-rate schedules by name (optax).

Owns what a step does with a gradient. Must not know losses, data or checkpoints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

OPTIMIZERS = ("adamw", "adam", "lion", "muon", "adafactor", "sgd")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
COMPUTE_DTYPES = ("float32", "bfloat16")
#: Optimisers that decay weights by default, and by how much.
_DECAY = {"adamw": 0.05, "lion": 0.05, "muon": 0.05}
#: Share of the steps in which "wsd" (warm-up, stable, decay) falls.
_WSD_DECAY = 0.2


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """How long, how fast and by what rule a trainee learns.

    Attributes:
      steps: optimiser steps in all; the schedule ends there.
      lr: peak learning rate. final_lr: where cosine, linear and wsd end, as a share of lr.
      warmup: steps of linear warm-up; below 1 a share of `steps`.
      schedule: "cosine", "linear", "constant", or "wsd" (constant, then linear over the last fifth).
      optimizer: "adamw", "adam", "lion", "muon" (matrices; Adam for the rest, at the same lr), "adafactor", "sgd".
      b1, b2: momentum and second moment (sgd and muon read b1 only, adafactor neither).
      weight_decay: decoupled; matrices decay, norms, biases and embeddings do not. None: 0.05 for adamw, lion and
        muon, 0 for the others.
      clip: largest global norm of a gradient; 0 switches it off.
      accumulate: micro-batches that a batch is cut into; their losses and gradients are averaged, each with the same
        weight (so a mean over learned positions is one over micro-batches of such means).
      compute_dtype: "float32", or "bfloat16": the loss sees a rounded copy of the float32 weights; gradients reach
        the optimiser, and stay there, in float32.
      save_every, log_every, eval_every: steps between checkpoints, log lines and evaluations (eval_every 0: only at
        the end).
      seed: of the keys that a loss is given.
      tokens_per_step: tokens of a batch, for the log's tokens_per_second; 0 leaves that out.

    Raises:
      ValueError: values out of range; names the field, what was given and what is allowed.
    """

    steps: int
    lr: float = 2e-3
    final_lr: float = 0.05
    warmup: float = 100
    schedule: str = "cosine"
    optimizer: str = "adamw"
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float | None = None
    clip: float = 1.0
    accumulate: int = 1
    compute_dtype: str = "float32"
    save_every: int = 200
    log_every: int = 20
    eval_every: int = 0
    seed: int = 0
    tokens_per_step: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("compute_dtype", COMPUTE_DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name in ("steps", "accumulate", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup", "clip", "eval_every", "final_lr", "tokens_per_step"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be positive, got {self.lr}")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ValueError(f"warmup must be a number of steps or a share below 1, got {self.warmup}")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if self.optimizer == "adam" and self.decay:
            raise ValueError(f"weight_decay must be 0 with optimizer 'adam', got {self.weight_decay}; use 'adamw'")

    @property
    def decay(self) -> float:
        """The weight decay that applies."""
        return _DECAY.get(self.optimizer, 0.0) if self.weight_decay is None else self.weight_decay

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up, at most `steps`."""
        return min(round(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup), self.steps)


def schedule(cfg: OptimConfig) -> Callable[[Any], jax.Array]:
    """Step -> learning rate, float32 scalar."""
    warm, rest, end = cfg.warmup_steps, max(1, cfg.steps - cfg.warmup_steps), cfg.lr * cfg.final_lr
    flat = optax.constant_schedule(cfg.lr)
    if cfg.schedule == "cosine":
        parts, edges = [optax.cosine_decay_schedule(cfg.lr, rest, cfg.final_lr)], []
    elif cfg.schedule == "linear":
        parts, edges = [optax.linear_schedule(cfg.lr, end, rest)], []
    elif cfg.schedule == "constant":
        parts, edges = [flat], []
    else:
        fall = max(1, round(_WSD_DECAY * cfg.steps))
        stable = max(0, cfg.steps - warm - fall)
        parts, edges = [flat, optax.linear_schedule(cfg.lr, end, fall)], [warm + stable]
    if warm:
        parts, edges = [optax.linear_schedule(0.0, cfg.lr, warm), *parts], [warm, *edges]
    joined = optax.join_schedules(parts, edges)

    def at(step: Any) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return jnp.asarray(joined(step), jnp.float32)

    return at


def _names(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]


def is_matrix(path: tuple[Any, ...], x: Any) -> bool:
    """Whether a parameter is a map between activations: not a norm, a bias or an embedding."""
    return x.ndim > 1 and not any("embedding" in name for name in _names(path))


#: Names of output layers and of tables with a row for each token.
_TABLES = ("lm_head", "before", "after")


def is_hidden_matrix(path: tuple[Any, ...], x: Any) -> bool:
    """Whether Muon trains a parameter: output layers and tables of tokens are left to Adam, as its authors do."""
    return is_matrix(path, x) and not any(table in name for name in _names(path) for table in _TABLES)


def _matrices(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _hidden(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(is_hidden_matrix, params)


def _others(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: not is_hidden_matrix(path, x), params)


def _orthogonal(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
    """The nearest semi-orthogonal matrix, roughly, as large as Adam's updates are; vectors and tables as they are.

    Five Newton-Schulz steps (Jordan et al. 2024, Muon); the scale is that of Liu et al. 2025 ("Muon is scalable").
    """
    if not is_hidden_matrix(path, update):
        return update
    a, b, c = 3.4445, -4.775, 2.0315
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    x = x.T if update.shape[0] > update.shape[1] else x
    return x * (0.2 * max(update.shape) ** 0.5)


def _direction(cfg: OptimConfig) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(cfg.b1, cfg.b2)
    if cfg.optimizer in ("adamw", "adam"):
        return adam
    if cfg.optimizer == "lion":
        return optax.scale_by_lion(cfg.b1, cfg.b2)
    if cfg.optimizer == "sgd":
        return optax.trace(cfg.b1)
    if cfg.optimizer == "adafactor":
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    return optax.chain(
        optax.masked(optax.trace(cfg.b1, nesterov=True), _hidden),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(_orthogonal, updates)),
        optax.masked(adam, _others),
    )


def optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
    """Clip, the optimiser's direction, decoupled weight decay, learning rate; its state is float32."""
    tx = optax.chain(
        optax.clip_by_global_norm(cfg.clip) if cfg.clip else optax.identity(),
        _direction(cfg),
        optax.add_decayed_weights(cfg.decay, _matrices) if cfg.decay else optax.identity(),
        optax.scale_by_learning_rate(schedule(cfg)),
    )

    # optax raises floats to integer counts and mixes ranks.
    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return tx.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return tx.update(updates, state, params)

    return optax.GradientTransformation(init, update)
