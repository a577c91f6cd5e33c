"""Simulated acceptance of chains and trees on texts of the target: rounds, walked as an engine would walk them.

Must not know engines or commands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.drafters import directories
from jaxspec.models.base import ModelConfig, TargetModel
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


@dataclasses.dataclass(frozen=True)
class Piece:
    """Packed rows of one group that are computed at once, apart from all others.

    Attributes:
      group: (data set, temperature). start: number of the first row in its group.
      rows: as many in every piece; of those that fill up the last one nothing is learned.
    """

    group: tuple[str, float]
    start: int
    rows: PackedRows


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
    tiers = tiers_of(depth, trees)
    pieces = pieces_of(examples, target.config, tiers, length, rows, limit)
    return summed(pieces, tiers, enumerate(Counter(module, target, tiers, seed, states)(pieces)))


def tiers_of(depth: int, trees: Sequence[Tier] = ()) -> tuple[Tier, ...]:
    """Chains of 1 to `depth` drafts, and trees."""
    return (*(Tier(d) for d in range(1, depth + 1)), *trees)


def pieces_of(
    examples: Sequence[dataset.Example], config: ModelConfig, tiers: Sequence[Tier], length: int | None, rows: int,
    limit: int,
) -> list[Piece]:  # fmt: skip
    """The texts in pieces; see `simulate`.

    Raises:
      ValueError: rows are too short for one round.
    """
    groups: dict[tuple[str, float], list[dataset.Example]] = {}
    for example in examples:
        members = groups.setdefault((example.dataset, example.temperature_band), [])
        if len(members) < limit:
            members.append(example)
    width = length or min(max(len(e.tokens) for e in examples), LONGEST, config.max_position_embeddings)
    deepest = max(tier.depth for tier in tiers)
    if width < deepest + 3:
        raise ValueError(f"a chain of {deepest} drafts needs texts of at least {deepest + 3} tokens, got {width}")
    pieces = []
    for group, members in sorted(groups.items()):
        packed = dataset.pack(members, width, report=False)
        for start in range(0, len(packed), rows):
            there = np.arange(start, start + rows) < len(packed)
            own = packed.take(np.minimum(np.arange(start, start + rows), len(packed) - 1))
            pieces.append(Piece(group, start, dataclasses.replace(own, learn=own.learn & there[:, None])))
    return pieces


def summed(
    pieces: Sequence[Piece], tiers: Sequence[Tier], counts: Iterable[tuple[int, list[np.ndarray]]]
) -> list[Group]:
    """What pieces make together, by group.

    Args:
      counts: of each piece, (its number, what `Counter` makes of it), in any order.

    Raises:
      ValueError: no text holds a whole round.
    """
    totals = {piece.group: {tier: np.zeros(tier.depth + 1, np.int64) for tier in tiers} for piece in pieces}
    for number, found in counts:
        for tier, histogram in zip(tiers, found, strict=True):
            totals[pieces[number].group][tier] += histogram
    out = [Group(*group, total) for group, total in totals.items()]
    out = [group for group in out if group.rounds]
    if not out:
        raise ValueError(f"no text holds a whole round of {max(t.depth for t in tiers)} drafts after its prompt")
    return out


class Counter:
    """A drafter and its target, which make counts of pieces."""

    def __init__(self, module: Any, target: TargetModel, tiers: Sequence[Tier], seed: int, states: States | None):
        self._histograms, self._seed, self._states = _histograms(module, target, tiers), seed, states

    def __call__(self, pieces: Sequence[Piece]) -> Iterator[list[np.ndarray]]:
        """Of each piece and tier, how many rounds accepted exactly 0, 1, .. depth drafts, [depth + 1]."""
        for piece in pieces:
            temperature, index = piece.group[1], np.arange(len(piece.rows))
            key = jax.random.fold_in(jax.random.key(self._seed), piece.start)
            known = None if self._states is None else self._states(piece.rows, index)
            found = self._histograms(piece.rows.batch(index), known, jnp.float32(temperature), key, temperature > 0)
            yield [np.asarray(counts) for counts in found]


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
        drawn = (temperature, key) if sampled else ()
        if chain.walk is not None and chain.walk.listed is not None:
            # Drafts come from short lists: what is not on one is not drafted, however likely the token before makes it.
            deepest = Tier(len(chain.hidden))
            matches = drafts.tree_matches(chain, deepest, target, hidden_BTE, batch.tokens_BT, *drawn)
        elif sampled:
            matches = drafts.coupled_matches(chain, target, hidden_BTE, batch.tokens_BT, temperature, key)
        else:
            matches = drafts.greedy_matches(chain, target, hidden_BTE)
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
