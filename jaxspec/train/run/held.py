"""A run's held-out texts: the loss on them, and acceptance as an engine would see it.

Owns what is measured on them while a module trains and in the end. Must not know arguments, what is saved, or which
texts are held out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.train.data.batch import Batch, PackedRows
from jaxspec.train.objective import acceptance
from jaxspec.train.run import loop
from jaxspec.train.run import mesh as meshes
from jaxspec.train.run.optim import OptimConfig
from jaxspec.train.run.simulation import States


@dataclasses.dataclass
class Evaluation:
    """The loss on held-out rows, and acceptance as an engine would see it, by data set."""

    loss_fn: loop.LossFn
    frozen: Any
    eval_rows: dict[str, PackedRows]
    cfg: OptimConfig
    batch: int
    mesh: Mesh | None
    states: States = lambda rows, index: None
    _fn: Callable[..., Any] | None = None

    def table(self, trainable: Any) -> dict[str, dict[str, float]]:
        """{data set: {"length", "accept_1", .., "rounds", "loss"}}; "all" sums them up where there are several."""
        if not self.eval_rows:
            return {}
        if self._fn is None:
            everywhere = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
            self._fn = jax.jit(loop.casting(self.loss_fn, self.cfg), out_shardings=everywhere)
        key = jax.random.key(self.cfg.seed)
        totals: dict[str, tuple[np.ndarray, float, float]] = {}
        for name, rows in self.eval_rows.items():
            histogram, loss, weight = np.zeros(1, np.int64), 0.0, 0.0
            for start in range(0, len(rows), self.batch):
                batch = padded_batch(rows, start, self.batch)
                learned = float(batch.learn_BT.sum())
                index = np.arange(start, min(start + self.batch, len(rows)))
                known = self.states(rows, np.pad(index, (0, self.batch - len(index)), mode="edge"))
                value, metrics = self._fn(trainable, self.frozen, meshes.place_batch(self.mesh, (batch, known)), key)
                histogram = histogram + np.asarray(metrics[loop.HISTOGRAM], np.int64)
                loss, weight = loss + float(value) * learned, weight + learned
            totals[name] = histogram, loss, weight
        if len(totals) > 1:
            totals["all"] = tuple(sum(parts) for parts in zip(*totals.values(), strict=True))  # pyright: ignore
        table = {}
        for name, (histogram, loss, weight) in totals.items():
            summary = acceptance.summary(jnp.asarray(histogram, jnp.int32))
            row = {key: round(float(value), 4) for key, value in summary.items()}
            row = {"length": row.pop("length"), **row, "rounds": int(histogram.sum())}
            table[name] = {**row, "loss": round(loss / max(weight, 1.0), 5)}
        return table

    @staticmethod
    def metrics(table: dict[str, dict[str, float]]) -> dict[str, float]:
        """The row of all data sets together."""
        return table.get("all") or next(iter(table.values()))


def padded_batch(rows: PackedRows, start: int, batch: int) -> Batch:
    """Rows from `start`, with rows of padding behind the last one."""
    found = rows.batch(np.arange(start, min(start + batch, len(rows))))
    missing = batch - found.tokens_BT.shape[0]
    return jax.tree.map(lambda x: jnp.pad(x, ((0, missing), (0, 0))), found)


def format_table(table: dict[str, dict[str, float]]) -> str:
    """One line a data set."""
    return "\n".join(
        f"{name:22s} " + "  ".join(f"{key} {value:g}" for key, value in row.items()) for name, row in table.items()
    )
