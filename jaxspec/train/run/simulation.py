"""Simulated acceptance of chains and trees on texts of the target: rounds, walked as an engine would walk them.

Must not know engines or commands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.drafters import directories
from jaxspec.models.base import TargetModel
from jaxspec.tier import Tier
from jaxspec.train.data import dataset
from jaxspec.train.data.batch import Batch, PackedRows
from jaxspec.train.drafters import drafts
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective import acceptance, teacher

#: Rows are not longer than this unless asked for: what a head reads of a batch grows with them.
LONGEST = 2048
#: The target's states of packed rows [B]; None where they are not known.
States = Callable[[PackedRows, np.ndarray], TargetStates | None]


@dataclasses.dataclass(frozen=True)
class Group:
    """Texts of one data set at one temperature.

    Attributes:
      histograms: of each tier, how many rounds accepted exactly 0, 1, .. depth drafts, [depth + 1].
    """

    name: str
    temperature: float
    histograms: dict[Tier, np.ndarray]

    @property
    def rounds(self) -> int:
        return int(self._deepest.sum())

    @property
    def _deepest(self) -> np.ndarray:
        return self.histograms[max(tier for tier in self.histograms if tier.is_chain)]

    def length(self, tier: Tier) -> float:
        """Tokens a round, the bonus included."""
        if not tier.depth:
            return 1.0
        counts = self.histograms[tier]
        return 1.0 + float((counts * np.arange(len(counts))).sum() / max(1, counts.sum()))

    def accept(self) -> list[float]:
        """The share accepted at each position of the rounds of the deepest chain that got there."""
        reached = np.cumsum(self._deepest[::-1])[::-1]
        return [float(reached[i + 1] / max(1, reached[i])) for i in range(len(reached) - 1)]


def simulate(
    module: Any, target: TargetModel, examples: Sequence[dataset.Example], depth: int, *, length: int | None = None,
    rows: int = 8, limit: int = 256, seed: int = 0, trees: Sequence[Tier] = (), states: States | None = None,
) -> list[Group]:  # fmt: skip
    """Simulated acceptance of chains of 1 to `depth` drafts and of trees, one group a data set and temperature.

    Args:
      length: tokens of a packed row; rows: so many at once; limit: texts of a group.
      states: the target's states of packed rows, by their numbers; None: the target computes them.

    Raises:
      ValueError: no text is long enough for one round, or trees of a drafter that does not draft in one pass.
    """
    groups: dict[tuple[str, float], list[dataset.Example]] = {}
    for example in examples:
        members = groups.setdefault((example.dataset, example.temperature_band), [])
        if len(members) < limit:
            members.append(example)
    width = length or min(max(len(e.tokens) for e in examples), LONGEST, target.config.max_position_embeddings)
    tiers = (*(Tier(d) for d in range(1, depth + 1)), *trees)
    deepest = max(tier.depth for tier in tiers)
    if width < deepest + 3:
        raise ValueError(f"a chain of {deepest} drafts needs texts of at least {deepest + 3} tokens, got {width}")
    histograms = _histograms(module, target, tiers)
    out = []
    for (name, temperature), members in sorted(groups.items()):
        packed = dataset.pack(members, width, report=False)
        total = {tier: np.zeros(tier.depth + 1, np.int64) for tier in tiers}
        for start in range(0, len(packed), rows):
            index = np.arange(start, min(start + rows, len(packed)))
            padded = np.pad(index, (0, rows - len(index)), mode="edge")
            batch = packed.batch(padded)
            real = jnp.arange(rows) < len(index)
            batch = dataclasses.replace(batch, learn_BT=batch.learn_BT & real[:, None])
            key = jax.random.fold_in(jax.random.key(seed), start)
            known = None if states is None else states(packed, padded)
            found = histograms(batch, known, jnp.float32(temperature), key, temperature > 0)
            for tier, counts in zip(tiers, found, strict=True):
                total[tier] += np.asarray(counts)
        group = Group(name, temperature, total)
        if group.rounds:
            out.append(group)
    if not out:
        raise ValueError(f"no text holds a whole round of {deepest} drafts after its prompt")
    return out


def _histograms(module: Any, target: TargetModel, tiers: Sequence[Tier]) -> Any:
    """A function of (batch, states or None, temperature, key, whether rows are sampled): [depth + 1] of each tier."""
    graph, state = nnx.split((module, target))
    kind = directories.kind_of(module)
    layers, chain_of = kind.aux_layers(module), drafts.trainer_of(kind).chain

    def run(
        state: Any, batch: Batch, known: TargetStates | None, temperature: jax.Array, key: jax.Array, sampled: bool
    ) -> list[jax.Array]:
        module, target = nnx.merge(graph, state)
        if known is None:
            known = teacher.target_states(target, batch, layers)
        hidden_BTE = known.hidden_BTE
        chain = chain_of(module, batch, known.aux_BTA, max(tier.depth for tier in tiers))
        if sampled:
            matches = drafts.coupled_matches(chain, target, hidden_BTE, batch.tokens_BT, temperature, key)
        else:
            matches = drafts.greedy_matches(chain, target, hidden_BTE)
        drawn = (temperature, key) if sampled else ()
        return [
            acceptance.rounds(
                matches[..., : tier.depth]
                if tier.is_chain
                else drafts.tree_matches(chain, tier, target, hidden_BTE, batch.tokens_BT, *drawn),
                batch,
            )[1]
            for tier in tiers
        ]

    jitted = jax.jit(run, static_argnums=5)
    return lambda *args: jitted(state, *args)
