"""The policies that are compared: those of the registry, SGLang's presets, every fixed tier, and one that cheats.

A policy is named as users name it, with further fields of SpeculationConfig as JSON behind it. Must not know how a
simulation runs, nor JAX.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.adaptive import PRESETS, AdaptiveSpeculativeParams, EmaPolicy, StaticPolicy, registry
from jaxspec.adaptive.kind import Room
from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy
from jaxspec.bench.simulate.costs import Costs, table
from jaxspec.bench.simulate.records import Batch
from jaxspec.config import SpeculationConfig
from jaxspec.tier import Tier

#: What is shown the hidden chances.
ORACLE = "oracle"
#: Of SGLang, by the names of its presets.
SGLANG = "sglang-"
#: A schedule for those who give none: TensorRT-LLM's documented example, in vLLM's form.
_SCHEDULE = ((1, 4, 4), (5, 8, 2), (9, 32, 1), (33, 4096, 0))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A policy to be simulated.

    Attributes:
      name: for tables. fixed: whether it runs one tier, so that it counts for the best fixed one in hindsight.
      make: a fresh one.
    """

    name: str
    fixed: bool
    make: Callable[[], TierPolicy]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What policies are made for.

    Attributes:
      costs: of the machine. depths: of its tiers, 0 among them. buckets: padded batch sizes.
      contexts: tokens of a row at which the costs that policies are told were measured, as an engine does at its start.
      error: factor by which they are told wrong costs of drafting.
      budgets: drafted tokens a row that packed rounds may verify, where a policy names none.
    """

    costs: Costs
    depths: tuple[int, ...]
    buckets: tuple[int, ...]
    contexts: tuple[int, ...] = (64, 1024)
    error: float = 1.0
    budgets: tuple[float, ...] = ()

    @property
    def room(self) -> Room:
        """What policies have room for."""
        return Room(self.buckets, tuple(d for d in self.depths if d), self.budgets)


def fixed(depths: Sequence[int]) -> list[Entry]:
    """Plain decoding and every fixed tier."""
    return [Entry(Tier(d).name, True, lambda d=d: StaticPolicy(Tier(d))) for d in depths]


def defaults() -> list[str]:
    """Every named kind of the registry that chooses, SGLang's preset, and the bound for those that choose tiers."""
    chosen = [kind.name for kind in registry.kinds() if kind.chooses and kind.drafts]
    return [*chosen, SGLANG + "default", ORACLE]


def entry(text: str, setting: Setting) -> Entry:
    """A policy by its description: 'adaptive', 'static {"depth": 3, "budget": 1.5}', 'sglang-default', 'x.json'.

    Raises:
      ValueError: unknown names or settings; tiers that are not simulated.
    """
    depths, buckets = setting.depths, setting.buckets
    if text.strip() == ORACLE:
        return Entry(text, False, lambda: Oracle(setting.costs, depths))
    if text.startswith(SGLANG):
        sglang(text, depths, buckets)
        return Entry(text, False, lambda: sglang(text, depths, buckets))
    settings = settings_of(text, depths)
    kind, room = settings.policy_kind, setting.room
    reached, packed = kind.reachable(settings, room), kind.budgets(settings, room)
    wrong = sorted(t.name for t in reached if not t.is_chain or t.depth > depths[-1])
    if wrong:
        raise ValueError(f"policy {text!r} may run {wrong}; chains of up to {depths[-1]} tokens are simulated")
    cost = None
    if kind.needs_costs:
        pairs = [(tier, bucket) for tier, many in reached.items() for bucket in many]
        cost = table(setting.costs, pairs, packed, setting.contexts, setting.error)
    return Entry(text, False, lambda: kind.build(settings, room, cost))


def settings_of(text: str, depths: Sequence[int]) -> SpeculationConfig:
    """What a description asks for.

    Raises:
      ValueError: unknown names or settings.
    """
    name, _, more = text.strip().partition(" ")
    try:
        fields: Any = json.loads(more) if more else {}
    except ValueError as error:
        raise ValueError(f"policy {text!r}: behind the name stands a JSON object of settings: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"policy {text!r}: behind the name stands a JSON object of settings, got {more!r}")
    if name == "schedule" and not fields:
        fields = {"num_speculative_tokens_per_batch_size": [(a, b, min(k, depths[-1])) for a, b, k in _SCHEDULE]}
    return SpeculationConfig.of({"policy": name, **fields})


def sglang(text: str, depths: Sequence[int], buckets: Sequence[int]) -> EmaPolicy:
    """A preset with the depths that there are; ValueError for an unknown one."""
    preset = PRESETS.get(text.removeprefix(SGLANG))
    if preset is None:
        raise ValueError(f"SGLang's presets are {sorted(SGLANG + p for p in PRESETS)}, got {text!r}")
    values = {
        key: {**slot, "candidate_steps": [s for s in slot["candidate_steps"] if s in depths] or [0]}
        if isinstance(slot, dict) else slot
        for key, slot in preset.items()
    }  # fmt: skip
    params = AdaptiveSpeculativeParams(values, None, tuple(buckets))
    return EmaPolicy(params, {step: Tier(step) for step in params.candidate_steps})


class Oracle:
    """Knows each draft's hidden chance and what every round costs, and runs the tier with the most expected tokens a
    second, for one round at a time. No policy can know that: a bound for those that choose among tiers."""

    def __init__(self, costs: Costs, depths: Sequence[int]) -> None:
        self._costs, self._depths = costs, tuple(depths)
        self.tiers = tuple(Tier(d) for d in depths)
        self._next = self.tiers[0]

    def show(self, batch: Batch) -> None:
        """Takes what the round to come is about."""
        gains = np.concatenate([[0.0], np.cumsum(batch.alive_BD.sum(axis=0))])
        rows, bucket = len(batch.alive_BD), batch.bucket
        value = [
            (rows + gains[d]) / self._costs.round(d, bucket, bucket * (d + 1), batch.context) for d in self._depths
        ]
        self._next = self.tiers[int(np.argmax(value))]

    def select(self, view: BatchView) -> Tier:
        """The best tier."""
        return self._next

    def observe(self, stats: RoundStats) -> None:
        """Knows already."""

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Knows already."""

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """All."""
        return tuple(buckets)
