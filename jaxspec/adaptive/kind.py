"""What one kind of policy is: its name, the settings that it reads, what it can reach, and how it is built.

Must not know other kinds, engines or requests.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.policy import TierPolicy
from jaxspec.tier import Tier


class Settings(Protocol):
    """What a user asked for: the fields of SpeculationConfig that policies read."""

    @property
    def resolved_policy(self) -> str: ...
    @property
    def depth(self) -> int | None: ...
    @property
    def candidate_steps(self) -> tuple[int, ...] | None: ...
    @property
    def tiers(self) -> tuple[Tier, ...] | None: ...
    @property
    def num_speculative_tokens_per_batch_size(self) -> tuple[tuple[int, int, int], ...] | None: ...
    @property
    def budget(self) -> float | None: ...
    @property
    def candidate_budgets(self) -> tuple[float, ...] | None: ...
    @property
    def verification(self) -> str: ...

    def tier(self, depth: int) -> Tier:
        """The tier of so many draft tokens."""
        ...


@dataclasses.dataclass(frozen=True)
class Room:
    """What an engine has room for.

    Attributes:
      buckets: its padded batch sizes.
      steps: depths to choose among where the user names none, as deep as the drafter goes.
      budgets: drafted tokens a row that packed rounds verify where the user names none.
      lookups: depths of the tiers to choose among besides that only look up.
    """

    buckets: tuple[int, ...]
    steps: tuple[int, ...]
    budgets: tuple[float, ...] = ()
    lookups: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Running:
    """An engine whose policy is to be exchanged.

    Attributes:
      kind: the kind that it was started with. named: how its user named that.
      compiled: the tiers that it can run, ascending.
      renew: makes another policy as the one that it was started with.
    """

    kind: PolicyKind
    named: str
    compiled: Sequence[Tier]
    renew: Callable[[], TierPolicy]


class PolicyKind(abc.ABC):
    """One kind of policy. A module of this package holds an instance, and `registry` names it.

    Attributes:
      name: what users call it.
      fields: of SpeculationConfig's depth, candidate_steps, candidate_budgets, tiers, budget and
        num_speculative_tokens_per_batch_size, those that it accepts.
      drafts: whether it ever drafts.
      chooses: whether it chooses among tiers; trees of several depths then share num_nodes.
      needs_costs: whether `build` wants to know what executables cost, so that they are timed.
      heeds_tpot: whether it looks at the time per token that a batch's requests ask for.
      switched_by_depth: whether `switch` takes a depth.
    """

    name: ClassVar[str]
    fields: ClassVar[frozenset[str]] = frozenset()
    drafts: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    needs_costs: ClassVar[bool] = False
    heeds_tpot: ClassVar[bool] = False
    switched_by_depth: ClassVar[bool] = False

    def check(self, settings: Settings) -> None:
        """Refuses settings that do not fit together.

        Raises:
          ValueError: names the values.
        """
        return None

    @abc.abstractmethod
    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        """The tiers that it can choose, and in which buckets: what is compiled."""

    def budgets(self, settings: Settings, room: Room) -> dict[tuple[Tier, int], tuple[int, ...]]:
        """The packed tokens that it can choose at a reachable tier and bucket: each takes an executable more."""
        return {}

    @abc.abstractmethod
    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> TierPolicy:
        """The policy; `cost` is None unless it needs costs."""

    def switch(self, running: Running, depth: int | None) -> TierPolicy:
        """The policy with which a running engine goes on.

        Raises:
          ValueError: the engine lacks what it needs.
        """
        if running.kind is not self:
            raise ValueError(
                f"policy {self.name!r} needs a server that was started with it, got policy {running.named!r}"
            )
        return running.renew()
