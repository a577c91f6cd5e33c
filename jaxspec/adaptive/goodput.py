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
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.estimate import CostEstimate
from jaxspec.adaptive.kind import PolicyKind, Room, Running, Settings
from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy
from jaxspec.tier import PLAIN, Tier

#: Acceptance of unknown positions when asking whether a deeper tier is worth a look.
_OPTIMISM = 0.9
#: Rounds to wait for a probe's result before it is given up (an aborted round reports nothing).
_PROBE_PATIENCE = 8
#: Spread of a tier's log seconds that is not worth a look, and from which one round says enough.
_SETTLED, _UNSURE = 0.01, 0.15
#: In rounds of the current tier: what a round of a probe is taken to cost at least, and what one look may cost beyond
#: its first round. Most rounds of one look.
_LEAST_CHARGE, _AT_ONCE, _LOOKS = 0.05, 0.25, 8
#: Rounds to which the pauses between losing probes grow at least, and those between looks at costs at most; and by
#: what each look lets its pause grow.
_QUIET, _SILENT, _CALMING = 100.0, 600.0, 1.5
#: Least rounds between probes that win where drafts run already: a deeper tier's evidence adds to theirs.
_HASTE = 30.0
#: Part of its pause after which a look may be so urgent.
_URGENT = 20
#: Gap in log goodput from which it counts more than in proportion; and how fast switches are forgotten.
_LARGE, _REST = 0.1, 0.99
#: Gap in log goodput for which nothing is changed.
_TIE = 0.01
#: Rounds of the current tier that the credit may fall below nothing.
_DEBT = 0.25
#: Rounds by which the horizon grows with each that passes without a probe.
_FURTHER = 3.0


@dataclasses.dataclass
class _Bucket:
    """The choice in one bucket, and its probes. Tiers are named by their index.

    Attributes:
      candidates: tiers whose cost is known here, plain decoding first.
      current: the tier in use; None before the first round.
      lost: rounds' worth of goodput that staying with it is believed to have lost so far.
      unrest: how often the tier was changed of late: the more, the more must be lost before the next time.
      credit: seconds that probing may cost now. timed: whether a round's seconds are known.
      interval: rounds to wait between probes of acceptance, as long as they lose.
      pause: rounds to wait between looks at costs that are worth a round; less for those that are worth more.
      since_probe: rounds since the last probe of either kind. since_look: since the last look.
      probe: the tier of the probe whose results are awaited, and how many are. looks: further rounds of it that are
        still to run. won: whether it emitted what it took.
      charge: seconds of the credit that each round of it took. doubted: whether it is a second look.
    """

    candidates: tuple[int, ...]
    current: int | None = None
    lost: float = 0.0
    unrest: float = 0.0
    credit: float = 0.0
    timed: bool = False
    interval: float = 0.0
    pause: float = 1.0
    since_probe: int = 0
    since_look: int = 0
    probe: int | None = None
    looks: int = 0
    awaited: int = 0
    won: bool = False
    charge: float = 0.0
    doubted: bool = False


@dataclasses.dataclass(frozen=True)
class GoodputParams:
    """How a GoodputPolicy weighs evidence and risks.

    Attributes:
      half_life: observed rows (one request in one drafting round) after which evidence counts half.
      prior_rate: acceptance assumed of each position before anything is known; optimistic, so that drafts are tried.
      margin: relative gain that a probe must promise.
      patience: rounds' worth of goodput that may be lost by staying before a switch: a large gain is taken at once, a
        small one when it lasts.
      horizon: rounds over which what a probe teaches of costs is believed to hold.
      probe_share: share of the time that probes may cost.
      probe_start: rounds' worth of the time that they may cost at once in a bucket that is new.
      probe_backoff: how far the interval between losing probes may grow beyond what `probe_share` demands.
      refine_cost: correct the table by the measured seconds of rounds.

    Raises:
      ValueError: a parameter out of range.
    """

    half_life: float = 60.0
    prior_rate: float = 0.8
    margin: float = 0.03
    patience: float = 0.5
    horizon: float = 500.0
    probe_share: float = 0.02
    probe_start: float = 3.0
    probe_backoff: float = 2.0
    refine_cost: bool = True

    def __post_init__(self) -> None:
        ranges = {"half_life": (1, math.inf), "prior_rate": (0, 1), "margin": (0, 1), "patience": (0, math.inf),
                  "horizon": (0, math.inf), "probe_share": (0, 1), "probe_start": (0, math.inf),
                  "probe_backoff": (1, math.inf)}  # fmt: skip
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must lie between {least} and {most}, got {value!r}")


class GoodputPolicy:
    """Maximises expected tokens / seconds over the tiers whose costs are known in the round's bucket.

    A chain of depth d is expected to emit 1 + sum over i <= d of the product of the acceptance rates of positions
    1..i: SmartSpec's goodput with a rate for each position (`AcceptanceModel`), and with costs looked up for the
    padded shape that runs, as rounds corrected them (`CostEstimate`).

    A tier reveals nothing of positions beyond its depth. Where a deeper tier would win if drafts were good, single
    rounds of one are run as probes: the tier that shows most for its cost. That cost is charged to a credit which
    grows by `probe_share` of the time spent, and refunded by what the probe emits beyond the current tier. So probes
    that win come again at once, and those that lose at growing intervals. Tiers of the same depth are not probed: a
    tree and a chain are compared through `acceptance.breadth` until both have run. Of costs, too, a tier is probed
    as long as what its round may tell is worth more than it takes, from the same credit. No tier is given up for good.

    Args:
      tiers: what may be chosen; plain decoding is always added. A tier is left out of buckets for which no cost of it
        or of plain decoding is known.
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
        self._index = {tier: i for i, tier in enumerate(self.tiers)}
        sizes = sorted({*cost.buckets, *buckets})
        self._cost = CostEstimate(self.tiers, sizes, cost, enabled=params.refine_cost)
        self._acceptance = AcceptanceModel(
            max(1, self.tiers[-1].depth), sizes, half_life=params.half_life, prior_rate=params.prior_rate
        )
        self._buckets: dict[int, _Bucket] = {}
        for bucket in sizes:
            if not buckets:
                cost.seconds(PLAIN, bucket)
            self._buckets[bucket] = _Bucket(self._known(bucket))

    def select(self, view: BatchView) -> Tier:
        """The tier with the best expected goodput, or a probe; ValueError for a bucket without costs."""
        state, bucket = self._bucket(view.bucket), view.bucket
        if len(state.candidates) == 1:
            return PLAIN
        costs = self._cost.logs(bucket)
        scores = self._scores(bucket, costs)
        current = self._settled_on(state, scores, costs)
        state.since_probe += 1
        state.since_look += 1
        if state.looks and state.probe is not None:
            state.looks, state.awaited = state.looks - 1, state.awaited + 1
            return self.tiers[state.probe]
        if state.probe is not None and state.since_probe > _PROBE_PATIENCE:
            state.probe = None
        if state.probe is None and (
            self._look(state, bucket, scores, costs) or self._probe(state, view, scores, costs)
        ):
            state.since_probe, state.awaited, state.won, state.doubted = 0, 1, False, False
            assert state.probe is not None
            return self.tiers[state.probe]
        most = 2 * math.exp(max(costs[i] for i in state.candidates))
        state.credit = min(state.credit + self._params.probe_share * math.exp(costs[current]), most)
        return self.tiers[current]

    def observe(self, stats: RoundStats) -> None:
        """Updates acceptance from a finished round, and costs where it was timed."""
        state, tier = self._bucket(stats.bucket), self._index.get(stats.tier)
        doubtful = stats.seconds > 0 and self._cost.observe(stats.tier, stats.bucket, stats.seconds)
        if stats.tier.depth == 0:
            self._acceptance.age(stats.batch_size)
        else:
            self._acceptance.observe(stats)
        if stats.seconds > 0 and not state.timed and self._params.probe_share and self._params.refine_cost:
            state.timed = True
            state.credit += self._params.probe_start * stats.seconds
        if tier is None or tier != state.probe or not (stats.num_accepted or not stats.tier.depth):
            return
        if doubtful and not state.doubted and not state.looks:
            # What disturbed the round may have been something else.
            state.doubted, state.looks = True, 1
            state.credit -= state.charge
        self._settle(state, stats, tier)

    def learn(self, tier: Tier, bucket: int, seconds: float) -> None:
        """Takes a measured cost; the tier may run in that bucket from now on."""
        self._cost.learn(tier, bucket, seconds)
        self._bucket(bucket).candidates = self._known(bucket)

    def _known(self, bucket: int) -> tuple[int, ...]:
        """Plain decoding, and where its cost is known the tiers whose costs are."""
        if not self._cost.knows(PLAIN, bucket):
            return (0,)
        return tuple(i for i, tier in enumerate(self.tiers) if self._cost.knows(tier, bucket))

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `buckets` where the tier's cost is known; plain decoding in all."""
        return tuple(b for b in buckets if self._index.get(tier) in self._bucket(b).candidates)

    def expected_tokens(self, tier: Tier, bucket: int) -> float:
        """Tokens that a request is expected to gain from one round of the tier now, the bonus token included."""
        self._bucket(bucket)
        return self._acceptance.tokens(tier, bucket)

    def seconds(self, tier: Tier, bucket: int) -> float:
        """Seconds that a round is expected to take now: the cost table, as measured rounds corrected it."""
        return self._cost.seconds(tier, bucket)

    def _settled_on(self, state: _Bucket, scores: Sequence[float], costs: Sequence[float]) -> int:
        """The tier to run when nothing is probed."""
        best = max(state.candidates, key=scores.__getitem__)
        if state.current is None:
            state.current = best
        elif best == state.current:
            state.lost = 0.0
        else:
            gap = scores[best] - scores[state.current]
            state.lost += max(0.0, gap - _TIE) * max(1.0, gap / _LARGE)
            # Plain decoding shows nothing of acceptance: an error in its favour lasts.
            if state.lost > self._params.patience * (1 + state.unrest) * (1 if best else 2):
                state.current, state.lost, state.unrest = best, 0.0, state.unrest + 1
        state.unrest *= _REST
        return state.current

    # ---------------------------------------------------------------- probes

    def _look(self, state: _Bucket, bucket: int, scores: Sequence[float], costs: Sequence[float]) -> bool:
        """Begins to time the tier whose seconds are most worth knowing, if any is worth it."""
        current = state.current
        assert current is not None
        if state.credit <= 0 or state.since_look * _URGENT < state.pause:
            return False
        most, running = 1.0, self.tiers[current]
        horizon = self._params.horizon + _FURTHER * state.since_look
        for i in state.candidates:
            spread = self._cost.news(i, current, bucket) if i != current else 0.0
            if spread < _SETTLED:
                continue
            # In rounds of the current tier: what a look takes less what it emits, and what it may lead to.
            ahead, longer = scores[i] - scores[current], costs[i] - costs[current]
            if longer > 0 and self.tiers[i].depth <= running.depth and self.tiers[i].num_nodes <= running.num_nodes:
                ahead, longer = ahead + longer, 0.0  # it does no more than the current one, and cannot take longer
            charge = max(_LEAST_CHARGE, math.exp(longer) * (math.exp(spread * spread / 2) - math.exp(ahead)))
            rounds = 1 if spread > _UNSURE else max(1, min(_LOOKS, int(_AT_ONCE / charge)))
            gain = horizon * expected_gain(ahead - _TIE, self._cost.news(i, current, bucket, rounds))
            if gain * state.since_look > state.pause and gain > most * rounds * charge:
                most = gain / (rounds * charge)
                state.probe, state.looks, state.charge = i, rounds - 1, charge * math.exp(costs[current])
        if most == 1.0:
            return False
        state.since_look = 0
        state.credit -= (state.looks + 1) * state.charge
        state.pause = min(_SILENT, state.pause * _CALMING)
        return True

    def _probe(self, state: _Bucket, view: BatchView, scores: Sequence[float], costs: Sequence[float]) -> bool:
        """Begins to look how much a deeper tier accepts, if that may pay."""
        current, bucket = state.current, view.bucket
        assert current is not None
        if state.since_probe < state.interval:
            return False
        known = self.tiers[current].depth
        deeper = [i for i in state.candidates if self.tiers[i].depth > known]
        if not deeper:
            return False
        hopeful = self._acceptance.hopeful_rates(bucket, known, _OPTIMISM)
        goal = scores[current] + math.log1p(self._params.margin)
        hope = lambda i: math.log(self._acceptance.tokens(self.tiers[i], bucket, hopeful)) - costs[i]
        if all(hope(i) + self._cost.news(i, current, bucket) <= goal for i in deeper):
            return False

        def value(i: int) -> float:
            # Positions beyond the current depth that the rows would test, up to what overrules a stale estimate.
            tests = view.batch_size * sum([1.0, *survival(self.tiers[i], hopeful)][known:-1])
            return min(tests, STALE_ROWS) / _charge(costs[i], costs[current])

        probe = max(deeper, key=value)
        charge = _charge(costs[probe], costs[current])
        # Few rows may fail by chance; looks that have become rare should not.
        rounds = 2 if not known and view.batch_size < STALE_ROWS and state.interval >= _QUIET else 1
        if state.credit < rounds * charge:
            return False
        state.probe, state.looks, state.charge = probe, rounds - 1, charge
        state.credit -= rounds * charge
        return True

    def _settle(self, state: _Bucket, stats: RoundStats, tier: int) -> None:
        """Charges what a round of the awaited probe really lost, and sets the wait until the next one."""
        state.awaited -= 1
        over = not state.looks and state.awaited <= 0
        if over:
            state.probe = None
        current, bucket = state.current, stats.bucket
        if current is None or current == tier:
            return
        costs, known = self._cost.logs(bucket), self.tiers[current].depth
        now, tokens = math.exp(costs[current]), self._acceptance.tokens(self.tiers[current], bucket)
        if known < stats.tier.depth:
            # A row's first drafts are those that the current tier would have drafted: an exact comparison for chains.
            extra = sum(max(0, a - known) for a in stats.num_accepted) / len(stats.num_accepted)
        else:
            extra = self._acceptance.tokens(stats.tier, bucket) - tokens
        gain = extra * now / tokens
        # A round that was disturbed, not dear, would else forbid for long to find that out.
        state.credit = max(-_DEBT * now, state.credit + state.charge - max(0.0, math.exp(costs[tier]) - now - gain))
        if known >= stats.tier.depth or not self._params.probe_share:
            return
        charge = _charge(costs[tier], costs[current])
        least = charge / (self._params.probe_share * now)
        if gain >= charge:
            state.interval, state.won = max(least, state.interval / 2, _HASTE) if known else 0.0, True
        elif over and not state.won:
            state.interval = min(max(2 * state.interval, least), max(self._params.probe_backoff * least, _QUIET))

    # ---------------------------------------------------------------- look-ups

    def _bucket(self, bucket: int) -> _Bucket:
        if bucket not in self._buckets:
            raise ValueError(f"the cost table has no cost in bucket {bucket}, only in buckets {list(self._buckets)}")
        return self._buckets[bucket]

    def _scores(self, bucket: int, costs: Sequence[float]) -> list[float]:
        """Logarithm of the expected tokens a second of each request, by tier."""
        return [
            math.log(self._acceptance.tokens(tier, bucket)) - cost for tier, cost in zip(self.tiers, costs, strict=True)
        ]


def _charge(probe: float, current: float) -> float:
    """Seconds that a deeper probe costs at worst, given log seconds: it emits no more than the current tier would."""
    return max(_LEAST_CHARGE * math.exp(current), math.exp(probe) - math.exp(current))


def expected_gain(ahead: float, spread: float) -> float:
    """Mean of max(0, x) of a normal x: what knowing is worth that may show one tier ahead of another."""
    z = ahead / spread
    return spread * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) + ahead * 0.5 * math.erfc(-z / math.sqrt(2))


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
