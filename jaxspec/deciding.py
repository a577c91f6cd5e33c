"""An engine's policy: how it comes about, what it is told of rounds and costs, and how what it learnt is kept.

Owns the policy's life beside the executables that it may choose. Must not know requests, or when rounds run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxspec.adaptive.controller import AdaptiveController, Recorder
from jaxspec.adaptive.cost import Costed, CostTable
from jaxspec.adaptive.learnt import Keeper
from jaxspec.adaptive.policy import RoundStats, TierPolicy
from jaxspec.runtime.compile import SpecRuntimeState
from jaxspec.runtime.runner import Runner


class Decider:
    """The policy that chooses by now.

    Args:
      runner: what can run, and which of it has come.
      buckets: the engine's batch sizes.
      build: the configured policy from the costs known so far.
      cost: measured seconds of the rounds, where the policy needs them; what `learn` hears is added.
      keeper: where the policy's estimates outlive the engine; None: nowhere.

    Attributes:
      controller: asks the policy.
    """

    def __init__(
        self, runner: Runner, buckets: Sequence[int], build: Callable[[CostTable | None], TierPolicy],
        cost: CostTable | None, keeper: Keeper | None,
    ):  # fmt: skip
        self._runner, self._buckets, self._build = runner, tuple(buckets), build
        self.cost, self.keeper = cost, keeper
        self.use(self.fresh())

    def fresh(self) -> TierPolicy:
        """The configured policy, as at a start: afresh, or with what was learnt before that."""
        policy = self._build(self.cost)
        if self.keeper is not None:
            self.keeper.recall(policy)
        return policy

    def use(self, policy: TierPolicy, recorder: Recorder | None = None) -> None:
        """See Engine.use_policy."""
        if isinstance(policy, str) or not callable(getattr(policy, "select", None)):
            raise ValueError(
                f"use_policy takes a policy object, such as StaticPolicy(Tier(3)), got {policy!r}; by name an engine "
                f"is started with one: speculation={{'policy': ...}}"
            )
        for tier in policy.tiers:
            have = self._runner.reachable.get(tier)
            missing = [] if have is None else [b for b in policy.buckets_for(tier, self._buckets) if b not in have]
            if missing:
                raise ValueError(
                    f"the policy can select {tier} at batch sizes {missing}, but it is compiled for {have}"
                )
        self.controller: AdaptiveController[SpecRuntimeState] = AdaptiveController(
            policy, self._runner.states, recorder, ready=self._runner.ready
        )

    def observe(self, stats: RoundStats) -> None:
        """Tells the policy what a round gave, unless a policy before it chose what it cannot."""
        if stats.tier in self.controller.policy.tiers:
            self.controller.observe(stats)

    def learn(self, costs: Mapping[Costed, float]) -> None:
        """After a piece of the warm-up: what it has timed."""
        for (tier, bucket, tokens), seconds in costs.items():
            self.controller.policy.learn(tier, bucket, seconds, tokens)
        if costs:
            self.cost = CostTable(self._runner.costs)

    def keep(self, *, at_once: bool) -> None:
        """Keeps what the policy has learnt, by and by or at once."""
        if self.keeper is not None:
            self.keeper.keep(self.controller.policy, at_once=at_once)
