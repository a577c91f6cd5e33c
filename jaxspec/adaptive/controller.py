"""Binds a policy to the states that run its tiers, counts what it does, and records what it hears.

A state is opaque here: a switch is a dictionary look-up between rounds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy
from jaxspec.tier import Choice, Tier, as_choice

State = TypeVar("State")


class Recorder:
    """Writes one JSON line a round, for `replay`. Lines reach the file at once, so an interrupted run keeps its own.

    Args:
      path: the file; an existing one is replaced.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by close)

    def write(self, stats: RoundStats) -> None:
        """Appends one round."""
        self._file.write(stats.to_json() + "\n")

    def close(self) -> None:
        """Closes the file; safe to call twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AdaptiveController(Generic[State]):
    """A policy and the state of each of its tiers.

    Attributes:
      policy: the policy; the controller owns it from here on.
      switches: rounds whose tier differs from the tier of the round before.
      rounds_by_tier: selected rounds for each tier of the policy, 0 included.

    Args:
      policy: chooses the tier.
      states: what runs each tier, now and later: may hold more tiers than the policy selects, and may change.
      recorder: hears every observed round too.
      ready: whether a tier's state can run in a bucket by now, with so many packed tokens or None. Where the policy's
        choice cannot, all of its tier is verified, else the next shallower tier runs that can, else the shallowest.

    Raises:
      ValueError: the policy can select a tier that has no state.
    """

    def __init__(
        self, policy: TierPolicy, states: Mapping[Tier, State], recorder: Recorder | None = None, *,
        ready: Callable[[Tier, int, int | None], bool] = lambda tier, bucket, tokens: True,
    ) -> None:  # fmt: skip
        missing = [tier.name for tier in policy.tiers if tier not in states]
        if missing:
            raise ValueError(f"the policy can select tiers {missing}, but states exist only for {_names(states)}")
        self.policy = policy
        self.switches = 0
        self.rounds_by_tier: Counter[Tier] = Counter(dict.fromkeys(policy.tiers, 0))
        self._states, self._ready = states, ready
        self._recorder = recorder
        self._last: Tier | None = None

    @property
    def active(self) -> Tier | None:
        """The tier of the latest round; None before the first."""
        return self._last

    def select(
        self, view: BatchView, repeats: Callable[[Choice], bool] = lambda choice: True
    ) -> tuple[Choice, State, int]:
        """How the rounds that are about to run do so, their tier's state, and how many they are.

        The policy is asked once for all rounds of a dispatch. A tier that is exchanged verifies all.

        Args:
          repeats: whether as many rounds as the view has can be dispatched of a choice; else one is.

        Raises:
          ValueError: the policy names a tier without a state, or `ready` knows no such packed round.
        """
        choice = self._available(self.policy.select(view), view)
        rounds = view.rounds if view.rounds > 1 and repeats(choice) else 1
        tier = choice.tier
        self.switches += self._last is not None and tier != self._last
        self._last = tier
        self.rounds_by_tier[tier] += rounds
        return choice, self._states[tier], rounds

    def _available(self, said: Tier | Choice, view: BatchView) -> Choice:
        """What can run of it."""
        choice = as_choice(said)
        tier = self._within(choice.tier, view)
        if tier not in self._states:
            raise ValueError(f"the policy selected tier {tier}, but states exist only for {_names(self._states)}")
        if not self._ready(tier, view.bucket, None):
            at_hand = sorted(t for t in self._states if self._ready(t, view.bucket, None))
            tier = max((t for t in at_hand if t.depth <= tier.depth), default=at_hand[0])
        if tier != choice.tier or (choice.tokens is not None and not self._ready(tier, view.bucket, choice.tokens)):
            choice = Choice(tier)
        return choice

    def _within(self, tier: Tier, view: BatchView) -> Tier:
        """The policy's choice, or its deepest tier that the batch's requests can use; theirs is cut on the device."""
        if view.max_depth is None or tier.depth <= view.max_depth:
            return tier
        usable = (t for t in self.policy.tiers if t.depth <= view.max_depth)
        at_hand = [t for t in usable if self.policy.buckets_for(t, (view.bucket,))]
        return max(at_hand, default=tier)

    def observe(self, stats: RoundStats) -> None:
        """Passes a finished round to the recorder and the policy."""
        if self._recorder is not None:
            self._recorder.write(stats)
        self.policy.observe(stats)


def _names(states: Mapping[Tier, object]) -> list[str]:
    return [tier.name for tier in sorted(states)]
