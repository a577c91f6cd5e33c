"""The cost-aware policy: the tier with the most expected tokens a second.

Owns the choice made from estimated acceptance and measured costs, and the probes that keep the estimate alive.
Acceptance alone cannot see that speculation stopped paying (at a larger batch, say); seconds alone cannot see what a
draft is worth. Must not know how rounds run, nor JAX. Deterministic: the same rounds lead to the same choices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxspec.adaptive.acceptance import STALE_ROWS, AcceptanceModel, survival
from jaxspec.adaptive.cost import CostTable, RefinedCost
from jaxspec.adaptive.kind import PolicyKind, Room, Running, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy
from jaxspec.tier import PLAIN, Tier

#: Acceptance of unknown positions when asking whether a deeper tier is worth a look.
_OPTIMISM = 0.9
#: Rounds to wait for a probe's result before it is given up (an aborted round reports nothing).
_PROBE_PATIENCE = 8


@dataclasses.dataclass
class _Bucket:
    """The choice in one bucket, and its probes.

    Attributes:
      candidates: tiers that can pay here, plain decoding first.
      current: the tier in use; None before the first round.
      credit: seconds that probing may cost now.
      interval: rounds to wait between probes, as long as they lose.
      since_probe: rounds since the last probe.
      probe: the tier of the probe whose result is awaited.
    """

    candidates: tuple[Tier, ...]
    current: Tier | None = None
    credit: float = 0.0
    interval: float = 0.0
    since_probe: int = 0
    probe: Tier | None = None


@dataclasses.dataclass(frozen=True)
class GoodputParams:
    """How a GoodputPolicy weighs evidence and risks.

    Attributes:
      half_life: observed rows (one request in one drafting round) after which evidence counts half.
      prior_rate: acceptance assumed of each position before anything is known; optimistic, so that drafts are tried.
      margin: relative gain that a switch must promise.
      probe_share: share of the time that probes may cost.
      probe_backoff: how far the interval between losing probes may grow beyond what `probe_share` demands.
      refine_cost: let the measured seconds of rounds correct the table slowly.

    Raises:
      ValueError: a parameter out of range.
    """

    half_life: float = 60.0
    prior_rate: float = 0.8
    margin: float = 0.03
    probe_share: float = 0.02
    probe_backoff: float = 2.0
    refine_cost: bool = True

    def __post_init__(self) -> None:
        ranges = {"half_life": (1, math.inf), "prior_rate": (0, 1), "margin": (0, 1), "probe_share": (0, 1),
                  "probe_backoff": (1, math.inf)}  # fmt: skip
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must lie between {least} and {most}, got {value!r}")


class GoodputPolicy:
    """Maximises expected tokens / seconds over the tiers that can pay in the round's bucket.

    A chain of depth d is expected to emit 1 + sum over i <= d of the product of the acceptance rates of positions
    1..i: SmartSpec's goodput with a rate for each position (`AcceptanceModel`), and with costs looked up for the
    padded shape that runs.

    A tier reveals nothing of positions beyond its depth. Where a deeper tier would win if drafts were good, single
    rounds of one are run as probes: the tier that shows most for its cost. That cost is charged to a credit which
    grows by `probe_share` of the time spent, and refunded by what the probe emits beyond the current tier. So probes
    that win come again at once, and those that lose at growing intervals. Tiers of the same depth are not probed: a
    tree and a chain are compared through `acceptance.breadth` until both have run.

    Args:
      tiers: what may be chosen; plain decoding is always added. A tier is left out of buckets where its full
        acceptance would not beat plain decoding, or for which no cost of it or of plain decoding is known.
      cost: seconds of plain decoding and of the tiers, as far as they are known; `learn` brings others.
      buckets: further padded batch sizes, for which costs may come later.
      params: how evidence and risks are weighed.

    Raises:
      ValueError: without `buckets`, a tier without any cost, or a bucket without a cost of plain decoding: nothing
        would ever bring it.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        cost: CostTable,
        params: GoodputParams = GoodputParams(),
        *,
        buckets: Sequence[int] = (),
    ) -> None:
        self.tiers: tuple[Tier, ...] = tuple(sorted({PLAIN, *tiers}))
        unknown = [tier.name for tier in self.tiers if tier not in cost.tiers]
        if unknown and not buckets:
            raise ValueError(f"the cost table has no cost of {unknown}, only of {[t.name for t in cost.tiers]}")
        self._params = params
        self._cost = RefinedCost(cost, enabled=params.refine_cost)
        self._acceptance = AcceptanceModel(
            max(1, self.tiers[-1].depth),
            sorted({*cost.buckets, *buckets}),
            half_life=params.half_life,
            prior_rate=params.prior_rate,
        )
        self._buckets: dict[int, _Bucket] = {}
        for bucket in sorted({*cost.buckets, *buckets}):
            if not buckets:
                cost.seconds(PLAIN, bucket)
            self._buckets[bucket] = _Bucket(self._paying(bucket))

    def select(self, view: BatchView) -> Tier:
        """The tier with the best expected goodput, or a probe; ValueError for a bucket without costs."""
        state = self._bucket(view.bucket)
        if len(state.candidates) == 1:
            return PLAIN
        scores = {tier: self._goodput(tier, view.bucket) for tier in state.candidates}
        best = max(state.candidates, key=scores.__getitem__)
        if state.current is None or scores[best] > scores[state.current] * (1 + self._params.margin):
            state.current = best
            state.interval = 0.0
        state.since_probe += 1
        probe = self._probe(state, view)
        if probe is not None:
            state.probe, state.since_probe = probe, 0
            state.credit -= self._charge(probe, state.current, view.bucket)
            return probe
        earned = self._params.probe_share * self._cost.seconds(state.current, view.bucket)
        state.credit = min(state.credit + earned, 2 * self._cost.seconds(state.candidates[-1], view.bucket))
        return state.current

    def observe(self, stats: RoundStats) -> None:
        """Updates acceptance from a finished round, and costs where it was timed."""
        state = self._bucket(stats.bucket)
        if stats.seconds > 0:
            self._cost.observe(stats.tier, stats.bucket, stats.seconds)
        if stats.tier.depth == 0:
            self._acceptance.age(stats.batch_size)
            return
        self._acceptance.observe(stats)
        if stats.tier == state.probe and stats.num_accepted:
            self._settle(state, stats)

    def learn(self, tier: Tier, bucket: int, seconds: float) -> None:
        """Takes a measured cost, and with it reconsiders which tiers can pay in that bucket."""
        self._cost.learn(tier, bucket, seconds)
        state = self._bucket(bucket)
        state.candidates = self._paying(bucket)
        if state.current not in state.candidates:
            state.current, state.interval = None, 0.0

    def _paying(self, bucket: int) -> tuple[Tier, ...]:
        """Plain decoding, and the tiers that can pay, as far as costs are known."""
        cost = self._cost.table
        known = (t for t in self.tiers if (t, bucket) in cost and (PLAIN, bucket) in cost)
        return PLAIN, *(t for t in known if cost.pays(t, bucket))

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `buckets` where the tier can pay; plain decoding in all."""
        return tuple(b for b in buckets if tier in self._bucket(b).candidates)

    def expected_tokens(self, tier: Tier, bucket: int) -> float:
        """Tokens that a request is expected to gain from one round of the tier now, the bonus token included."""
        self._bucket(bucket)
        return self._acceptance.tokens(tier, bucket)

    def seconds(self, tier: Tier, bucket: int) -> float:
        """Seconds that a round is expected to take now: the cost table, as measured rounds corrected it."""
        return self._cost.seconds(tier, bucket)

    # ---------------------------------------------------------------- probes

    def _probe(self, state: _Bucket, view: BatchView) -> Tier | None:
        """The tier to look at in this round instead of the current one, or None."""
        assert state.current is not None
        if state.probe is not None and state.since_probe > _PROBE_PATIENCE:
            state.probe = None
        if state.probe is not None or state.since_probe < state.interval:
            return None
        known, bucket = state.current.depth, view.bucket
        deeper = [tier for tier in state.candidates if tier.depth > known]
        if not deeper:
            return None
        hopeful = self._acceptance.hopeful_rates(bucket, known, _OPTIMISM)
        goal = self._goodput(state.current, bucket) * (1 + self._params.margin)
        if all(self._goodput(tier, bucket, hopeful) <= goal for tier in deeper):
            return None

        def value(tier: Tier) -> float:
            # Positions beyond the current depth that the rows would test, up to what overrules a stale estimate.
            tests = view.batch_size * sum([1.0, *survival(tier, hopeful)][known:-1])
            return min(tests, STALE_ROWS) / max(self._charge(tier, state.current, bucket), 1e-12)

        probe = max(deeper, key=value)
        return probe if state.credit >= self._charge(probe, state.current, bucket) else None

    def _charge(self, probe: Tier, current: Tier | None, bucket: int) -> float:
        """Seconds that a probe costs at worst: it emits no more than the current tier would have."""
        assert current is not None
        return max(0.0, self._cost.seconds(probe, bucket) - self._cost.seconds(current, bucket))

    def _settle(self, state: _Bucket, stats: RoundStats) -> None:
        """Refunds what the awaited probe emitted beyond the current tier, and sets the wait until the next one."""
        state.probe = None
        current, bucket = state.current, stats.bucket
        if current is None or current.depth >= stats.tier.depth:
            return
        # A row's first drafts are those that the current tier would have drafted: an exact comparison for chains.
        extra = sum(max(0, a - current.depth) for a in stats.num_accepted) / len(stats.num_accepted)
        gain = extra / self._goodput(current, bucket)
        charge = self._charge(stats.tier, current, bucket)
        state.credit += min(gain, charge)
        if gain >= charge:
            state.interval = 0.0
        elif self._params.probe_share > 0:
            least = charge / (self._params.probe_share * self._cost.seconds(current, bucket))
            state.interval = min(max(2 * state.interval, least), self._params.probe_backoff * least)

    # ---------------------------------------------------------------- look-ups

    def _bucket(self, bucket: int) -> _Bucket:
        if bucket not in self._buckets:
            raise ValueError(f"the cost table has no cost in bucket {bucket}, only in buckets {list(self._buckets)}")
        return self._buckets[bucket]

    def _goodput(self, tier: Tier, bucket: int, rates: Sequence[float] | None = None) -> float:
        return self._acceptance.tokens(tier, bucket, rates) / self._cost.seconds(tier, bucket)


class Goodput(PolicyKind):
    """The tiers that a user names, or chains and trees of the depths that pay on this device."""

    name = "adaptive"
    fields = frozenset({"candidate_steps", "tiers"})
    needs_costs = True

    def _tiers(self, settings: Settings, room: Room) -> tuple[Tier, ...]:
        if settings.tiers is not None:
            return settings.tiers
        steps = room.steps if settings.candidate_steps is None else settings.candidate_steps
        return tuple(settings.tier(step) for step in sorted({0, *steps}))

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        return dict.fromkeys(self._tiers(settings, room), room.buckets)

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> GoodputPolicy:
        assert cost is not None
        return GoodputPolicy(self._tiers(settings, room), cost, buckets=room.buckets)

    def switch(self, running: Running, depth: int | None) -> TierPolicy:
        """That of a file too, which adapts as well."""
        if not running.kind.chooses or len(running.compiled) < 2:
            raise ValueError(
                f"policy {self.name!r} needs tiers to choose among; this server was started with policy "
                f"{running.named!r} and has {[tier.name for tier in running.compiled]}"
            )
        return running.renew()


KIND = Goodput()
