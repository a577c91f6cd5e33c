"""The cost-aware policy: the tier, and the verify budget, with the most expected tokens a second.

Owns the choice made from estimated acceptance and measured costs, and the probes that keep the estimates alive.
Acceptance alone cannot see that speculation stopped paying (at a larger batch, say); seconds alone cannot see what a
draft is worth. Must not know how rounds run, nor JAX. Deterministic: the same rounds lead to the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxspec.adaptive.acceptance import STALE_ROWS, AcceptanceModel, survival
from jaxspec.adaptive.arms import Arm, whole
from jaxspec.adaptive.bucket import Bucket, GoodputParams
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.estimate import CostEstimate
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.adaptive.rows import Rows
from jaxspec.adaptive.yields import Yields, guess
from jaxspec.tier import PLAIN, Choice, Tier

#: Acceptance of unknown positions when asking whether a deeper tier is worth a look.
_OPTIMISM = 0.9
#: By how much deeper positions may be better than the deepest one that runs, and the tests of them that count where
#: nothing runs: whether drafts are worth anything shows at the first position.
_MORE, _ENOUGH = 0.25, 2.0
#: Rounds to wait for a probe's result before it is given up (an aborted round reports nothing).
_PROBE_PATIENCE = 8
#: Spread of a tier's log seconds that is not worth a look, and from which one round says enough.
_SETTLED, _UNSURE = 0.01, 0.15
#: In rounds of the current tier: what a round of a probe is taken to cost at least, what one look may cost beyond its
#: first round, and what it must be expected to bring. Most rounds of one look.
_LEAST_CHARGE, _AT_ONCE, _WORTH, _LOOKS = 0.05, 0.25, 2.0, 8
#: Rounds to which the pauses between losing probes grow quickly, by how much each that loses lets them grow after
#: that, and up to how many times as many; rounds to which those between looks at costs grow at most, and by how much.
_QUIET, _CALMER, _CALM, _SILENT, _CALMING = 100.0, 1.2, 4.0, 3000.0, 2.0
#: Least rounds between probes that win where drafts run already, doubled with each that changes nothing: a deeper
#: tier's evidence adds to theirs.
_HASTE = 30.0
#: Rounds after which drafts that were given up are looked at for the first time: it may have been bad luck.
_REGRET = 8.0
#: Probes that win where nothing drafts come again at once, as long as no more than this many have changed nothing.
_STREAK = 4
#: Part of its pause after which a look may be so urgent.
_URGENT = 20
#: Gap in log goodput from which it counts more than in proportion; and how fast switches are forgotten.
_LARGE, _REST = 0.1, 0.99
#: Difference of the halves' acceptance below which a batch's requests are alike.
_ALIKE = 0.02
#: Gap in log goodput for which nothing is changed.
_TIE = 0.01
#: Rounds of the current tier that the credit may fall below nothing.
_DEBT = 0.25
#: Rounds by which the horizon grows with each that passes without a probe.
_FURTHER = 1.0
#: How much a budget is hoped to gain from confidences that nobody has seen for long (0: nothing, 1: all there is), and
#: how much of the difference from what was seen last.
_INFORMED, _RENEWED = 0.6, 0.3
#: How far the drafts that a packed round accepts may be off what was expected, in depths over the root of its rows,
#: before the next ones are looked at closely.
_ODD = 0.6
#: Rounds after which confidences are looked at again where that may pay; and rounds under a budget after which one
#: verifies everything, so that what is believed of drafts that budgets leave out is checked.
_UNSEEN, _EVERYTHING = 100, 200


class GoodputPolicy:
    """Maximises expected tokens / seconds over the tiers whose costs are known in the round's bucket.

    A chain of depth d is expected to emit 1 + sum over i <= d of the product of the acceptance rates of positions
    1..i: SmartSpec's goodput with a rate for each position (`AcceptanceModel`), and with costs looked up for the
    padded shape that runs, as rounds corrected them (`CostEstimate`). Under a budget a tier keeps a share of what it
    would accept (`Yields`): that of the drafts of highest survival over the whole batch.

    A tier reveals nothing of positions beyond its depth. Where a deeper tier would win if drafts were good, single
    rounds of one are run as probes: the tier that shows most for its cost. That cost is charged to a credit which
    grows by `probe_share` of the time spent, and refunded by what the probe emits beyond the current tier. So probes
    that win come again at once, and those that lose at growing intervals. Tiers of the same depth are not probed: a
    tree and a chain are compared through `acceptance.breadth` until both have run. Of costs, too, an arm is probed
    as long as what its round may tell is worth more than it takes, from the same credit. No arm is given up for good.

    Args:
      tiers: what may be chosen; plain decoding is always added. A tier is left out of buckets for which no cost of it
        or of plain decoding is known.
      packed: tiers under budgets that may be chosen besides, each in the buckets in which its cost is known.
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
        params: GoodputParams = GoodputParams(),  # noqa: B008 (frozen)
        *,
        buckets: Sequence[int] = (),
        packed: Sequence[Arm] = (),
    ) -> None:
        self.tiers: tuple[Tier, ...] = tuple(sorted({PLAIN, *tiers}))
        unknown = [tier.name for tier in self.tiers if tier not in cost.tiers]
        if unknown and not buckets:
            raise ValueError(f"the cost table has no cost of {unknown}, only of {[t.name for t in cost.tiers]}")
        self._params = params
        self._arms = [*whole(self.tiers), *packed]
        for arm in packed:
            if arm.is_whole or arm.tier.lookup or not arm.tier.depth or arm.tier not in self.tiers:
                raise ValueError(
                    f"a packed arm drafts as one of {[t.name for t in self.tiers]} with a budget, got {arm}"
                )
        sizes = sorted({*cost.buckets, *buckets})
        self._cost = CostEstimate(self._arms, sizes, cost, enabled=params.refine_cost)
        self._yields = Yields(self._arms, sizes)
        self._acceptance = AcceptanceModel(
            max(1, self.tiers[-1].depth), sizes, half_life=params.half_life, prior_rate=params.prior_rate
        )
        self._rows = {bucket: Rows() for bucket in sizes}
        self._buckets: dict[int, Bucket] = {}
        for bucket in sizes:
            if not buckets:
                cost.seconds(PLAIN, bucket)
            self._buckets[bucket] = Bucket(self._known(bucket))

    def select(self, view: BatchView) -> Tier | Choice:
        """What has the best expected goodput, or a probe; ValueError for a bucket without costs.

        Where a request asks for it, of what takes no longer than its time per token, as far as anything does.
        """
        state, bucket = self._bucket(view.bucket), view.bucket
        if len(state.candidates) == 1:
            return PLAIN
        state.since_probe += 1
        state.since_look += 1
        steady = state.steady
        if steady.repeats(view):
            assert steady.choice is not None and state.current is not None
            state.since_whole += not self._arms[state.current].is_whole
            state.credit += self._params.probe_share * steady.seconds
            return steady.choice
        costs = self._cost.logs(bucket)
        scores = self._scores(bucket, costs, state.current)
        current = self._settled_on(state, scores, costs)
        if state.looks and state.probe is not None:
            state.looks, state.awaited = state.looks - 1, state.awaited + 1
            return self._run(state, state.probe, bucket)
        if state.probe is not None and state.since_probe > _PROBE_PATIENCE:
            state.probe = None
        if state.probe is None and (
            self._look(state, bucket, scores, costs)
            or self._probe(state, view, scores, costs)
            or self._sight(state, view, scores, costs)
        ):
            state.since_probe, state.awaited, state.won, state.doubted = 0, 1, False, False
            assert state.probe is not None
            steady.disturb()
            return self._run(state, state.probe, bucket)
        most = 2 * math.exp(max(costs[i] for i in state.candidates))
        state.credit = min(state.credit + self._params.probe_share * math.exp(costs[current]), most)
        if view.tpot is not None and math.exp(costs[current]) > view.tpot:
            quick = [i for i in state.candidates if math.exp(costs[i]) <= view.tpot]
            current = max(quick, key=scores.__getitem__) if quick else min(state.candidates, key=costs.__getitem__)
        choice = self._run(state, current, bucket)
        if state.probe is None:
            steady.decided(choice, self._tokens(current, bucket), math.exp(costs[current]))
        return choice

    def _run(self, state: Bucket, arm: int, bucket: int) -> Tier | Choice:
        """What an arm is in a bucket."""
        chosen = self._arms[arm]
        state.since_whole = 0 if chosen.is_whole else state.since_whole + 1
        return chosen.choice(bucket, self._yields.fits)

    def observe(self, stats: RoundStats) -> None:
        """Updates acceptance from a finished round, and costs where it was timed."""
        state = self._bucket(stats.bucket)
        self._rows[stats.bucket].read(stats)
        if state.steady.is_usual(stats):
            self._yields.wait(stats.bucket)
            return
        arm = self._cost.arm(stats.tier, stats.bucket, stats.tokens)
        doubtful = stats.seconds > 0 and self._cost.observe(stats.tier, stats.bucket, stats.seconds, stats.tokens)
        self._learn_acceptance(stats)
        if stats.seconds > 0 and not state.timed and self._params.probe_share and self._params.refine_cost:
            state.timed = True
            state.credit += self._params.probe_start * stats.seconds
        if arm is None or arm != state.probe or not (stats.num_accepted or not stats.tier.depth):
            return
        if doubtful and not state.doubted and not state.looks:
            # What disturbed the round may have been something else.
            state.doubted, state.looks = True, 1
            state.credit -= state.charge
        self._settle(state, stats, arm)

    def _learn_acceptance(self, stats: RoundStats) -> None:
        """What a round accepted, and of a packed one what the others would have shown."""
        depth, bucket, drafts = stats.tier.depth, stats.bucket, stats.drafts
        if depth == 0:
            self._acceptance.age(stats.batch_size)
        elif stats.tokens is None:
            if self._acceptance.observe(stats):
                self._forget()
        elif drafts is not None:
            arm, count = self._cost.arm(stats.tier, bucket, stats.tokens), len(stats.num_accepted)
            if arm is not None and count:
                off = sum(stats.num_accepted) / count + 1 - self._tokens(arm, bucket)
                if abs(off) > _ODD * depth / math.sqrt(count):
                    self._yields.attend(bucket)
            told = len(stats.rows) == count and len(drafts.known) == count * drafts.nodes
            better = self._rows[bucket].better(stats.rows) if told and count else None
            beyond = self._yields.observe(drafts, depth, bucket, better)
            if beyond is not None and self._acceptance.observe(stats, beyond):
                self._forget()
            return
        self._yields.wait(bucket)

    def _forget(self) -> None:
        """Acceptance has changed."""
        self._yields.forget()
        for rows in self._rows.values():
            rows.forget()

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Takes a measured cost; the round may be chosen in that bucket from now on."""
        self._cost.learn(tier, bucket, seconds, tokens)
        self._bucket(bucket).candidates = self._known(bucket)

    def _known(self, bucket: int) -> tuple[int, ...]:
        """Plain decoding, and where its cost is known the arms whose costs are."""
        if not self._cost.knows(PLAIN, bucket):
            return (0,)
        rounds = [(i, (arm.tier, bucket, arm.tokens(bucket))) for i, arm in enumerate(self._arms)]
        return tuple(i for i, key in rounds if self._cost.arm(*key) == i and self._cost.knows(*key))

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `buckets` where the tier's cost is known; plain decoding in all."""
        at_hand = {b: {self._arms[i].tier for i in self._bucket(b).candidates} for b in buckets}
        return tuple(b for b in buckets if tier in at_hand[b])

    def expected_tokens(self, tier: Tier, bucket: int, tokens: int | None = None) -> float:
        """Tokens that a request is expected to gain from one such round now, the bonus token included."""
        self._bucket(bucket)
        arm = self._cost.arm(tier, bucket, tokens)
        assert arm is not None, (tier, bucket, tokens)
        return self._tokens(arm, bucket)

    def seconds(self, tier: Tier, bucket: int, tokens: int | None = None) -> float:
        """Seconds that a round is expected to take now: the cost table, as measured rounds corrected it."""
        return self._cost.seconds(tier, bucket, tokens)

    def _settled_on(self, state: Bucket, scores: Sequence[float], costs: Sequence[float]) -> int:
        """The arm to run when nothing is probed."""
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
                state.current, state.lost, state.unrest, state.wins = best, 0.0, state.unrest + 1, 0
                state.interval = min(state.interval, _HASTE if best else _REGRET)
        state.unrest *= _REST
        return state.current

    # ---------------------------------------------------------------- probes

    def _look(self, state: Bucket, bucket: int, scores: Sequence[float], costs: Sequence[float]) -> bool:
        """Begins to time the arm whose seconds are most worth knowing, if any is worth it."""
        current = state.current
        assert current is not None
        if state.credit <= 0 or state.since_look * _URGENT < state.pause:
            return False
        most, running = 1.0, self._arms[current]
        horizon = self._params.horizon + _FURTHER * state.since_look
        for i in state.candidates:
            spread = self._cost.news(i, current, bucket) if i != current else 0.0
            if spread < _SETTLED:
                continue
            # In rounds of the current arm: what a look takes less what it emits, and what it may lead to.
            ahead, longer = scores[i] - scores[current], costs[i] - costs[current]
            if longer > 0 and self._does_no_more(i, running):
                ahead, longer = ahead + longer, 0.0  # it does no more than the current one, and cannot take longer
            charge = max(_LEAST_CHARGE, math.exp(longer) * (math.exp(spread * spread / 2) - math.exp(ahead)))
            rounds = 1 if spread > _UNSURE else max(1, min(_LOOKS, int(_AT_ONCE / charge)))
            gain = horizon * expected_gain(ahead - _TIE, self._cost.news(i, current, bucket, rounds))
            if gain > _WORTH and gain * state.since_look > state.pause and gain > most * rounds * charge:
                most = gain / (rounds * charge)
                state.probe, state.looks, state.charge = i, rounds - 1, charge * math.exp(costs[current])
        if most == 1.0:
            return False
        state.since_look = 0
        state.credit -= (state.looks + 1) * state.charge
        state.pause = min(_SILENT, state.pause * _CALMING)
        return True

    def _does_no_more(self, arm: int, than: Arm) -> bool:
        one = self._arms[arm]
        both = one.is_whole and than.is_whole and (one.tier.lookup or not than.tier.lookup)
        return both and one.tier.depth <= than.tier.depth and one.tier.num_nodes <= than.tier.num_nodes

    def _probe(self, state: Bucket, view: BatchView, scores: Sequence[float], costs: Sequence[float]) -> bool:
        """Begins to look how much a deeper tier accepts, if that may pay."""
        current, bucket = state.current, view.bucket
        assert current is not None
        if state.since_probe < state.interval:
            return False
        known = self._arms[current].tier.depth
        deeper = [i for i in state.candidates if self._arms[i].tier.depth > known]
        if not deeper:
            return False
        hope = _OPTIMISM
        if known:
            hope = min(hope, self._acceptance.rates(bucket)[known - 1] + _MORE)
        hopeful = self._acceptance.hopeful_rates(bucket, known, hope)
        goal = scores[current] + math.log1p(self._params.margin)
        lasts = lambda i: scores[i] + costs[i] - math.log(self._tokens(i, bucket))
        best = lambda i: math.log(self._tokens(i, bucket, hopeful)) - costs[i] + lasts(i)
        if all(best(i) + self._cost.news(i, current, bucket) <= goal for i in deeper):
            return False

        def value(i: int) -> float:
            # Positions beyond the current depth that the rows would test, up to what overrules a stale estimate.
            tests = view.batch_size * sum([1.0, *survival(self._arms[i].tier, hopeful)][known:-1])
            return min(tests, STALE_ROWS if known else _ENOUGH) / _charge(costs[i], costs[current])

        probe = max(deeper, key=value)
        charge = _charge(costs[probe], costs[current])
        # Few rows may fail by chance; looks that have become rare should not.
        rounds = 2 if not known and view.batch_size < STALE_ROWS and state.interval >= _QUIET else 1
        return self._begin(state, probe, rounds, charge)

    def _sight(self, state: Bucket, view: BatchView, scores: Sequence[float], costs: Sequence[float]) -> bool:
        """Begins to look at what a budget would keep; or, under one, at what verifying everything accepts."""
        current, bucket = state.current, view.bucket
        assert current is not None
        running, now = self._arms[current], math.exp(costs[current])
        loses = lambda i: max(_LEAST_CHARGE * now, math.exp(costs[i]) - now * math.exp(scores[i] + costs[i]) / gains)
        gains = math.exp(scores[current] + costs[current])
        if not running.is_whole:
            every = self._cost.arm(running.tier, bucket)
            if state.since_whole < _EVERYTHING or every not in state.candidates or every is None:
                return False
            return self._begin(state, every, 1, loses(every))
        packed = [i for i in state.candidates if not self._arms[i].is_whole]
        age = self._yields.age(bucket)
        if not running.tier.depth or not packed or view.batch_size < 2 or (age is not None and age < _UNSEEN):
            return False
        rates = self._acceptance.rates(bucket)
        lasts = lambda i: scores[i] - math.log(self._tokens(i, bucket))
        hope = lambda i: math.log(self._tokens(i, bucket, rates)) + lasts(i)
        best = max(packed, key=hope)
        if hope(best) < scores[current] + _TIE:
            return False
        # Of the first ones it takes several to know what confidences mean.
        return self._begin(state, best, 1 if age is not None else 2, loses(best))

    def _begin(self, state: Bucket, probe: int, rounds: int, charge: float) -> bool:
        """Begins so many rounds of a probe, if the credit allows them."""
        if state.credit < rounds * charge:
            return False
        state.probe, state.looks, state.charge = probe, rounds - 1, charge
        state.credit -= rounds * charge
        return True

    def _settle(self, state: Bucket, stats: RoundStats, arm: int) -> None:
        """Charges what a round of the awaited probe really lost, and sets the wait until the next one."""
        state.awaited -= 1
        over = not state.looks and state.awaited <= 0
        if over:
            state.probe = None
        current, bucket = state.current, stats.bucket
        if current is None or current == arm:
            return
        costs, running = self._cost.logs(bucket), self._arms[current]
        known, deeper = running.tier.depth, running.tier.depth < stats.tier.depth
        now, tokens = math.exp(costs[current]), self._tokens(current, bucket)
        alike = not (stats.tier.lookup or running.tier.lookup)
        if deeper and alike and running.is_whole and stats.tokens is None:
            # A row's first drafts are those that the current tier would have drafted: an exact comparison for chains.
            extra = sum(max(0, a - known) for a in stats.num_accepted) / len(stats.num_accepted)
        else:
            extra = self._tokens(arm, bucket) - tokens
        gain = extra * now / tokens
        # A round that was disturbed, not dear, would else forbid for long to find that out.
        state.credit = max(-_DEBT * now, state.credit + state.charge - max(0.0, math.exp(costs[arm]) - now - gain))
        if not deeper or not self._params.probe_share:
            return
        charge = _charge(costs[arm], costs[current])
        least = charge / (self._params.probe_share * now)
        if gain >= charge:
            wins = state.wins if known else state.wins - _STREAK
            state.interval = max(least, min(_CALM * _QUIET, _HASTE * 2.0 ** min(wins, 9))) if wins >= 0 else 0.0
            state.won, state.wins = True, state.wins + 1
        elif over and not state.won:
            quiet = max(self._params.probe_backoff * least, _QUIET)
            longer = max(2 * state.interval, least) if state.interval < quiet else _CALMER * state.interval
            state.interval = min(longer, quiet if state.interval < quiet else _CALM * quiet)

    # ---------------------------------------------------------------- look-ups

    def _bucket(self, bucket: int) -> Bucket:
        if bucket not in self._buckets:
            raise ValueError(f"the cost table has no cost in bucket {bucket}, only in buckets {list(self._buckets)}")
        return self._buckets[bucket]

    def _scores(self, bucket: int, costs: Sequence[float], current: int | None) -> list[float]:
        """Logarithm of the expected tokens a second of each request, by arm, as far as they last; see `rows`."""
        tokens = [self._tokens(i, bucket) for i in range(len(costs))]
        low, high = self._rows[bucket].halves
        if current is not None and high - low > _ALIKE:
            tokens = self._lasting(bucket, tokens, current, low, high)
        return [math.log(t) - cost for t, cost in zip(tokens, costs, strict=True)]

    def _lasting(self, bucket: int, tokens: Sequence[float], current: int, low: float, high: float) -> list[float]:
        """Tokens a round of each arm in place of the current one, once the batch is what the arm makes of it."""
        alive, pooled, better, tilt = 1.0, 0.0, 0.0, [1.0]
        ratio = 2 * high / (low + high)
        other = 2 * low / (low + high)
        up = down = 1.0
        for rate in self._acceptance.rates(bucket):
            up, down, alive = up * ratio, down * other, alive * rate
            pooled += alive
            better += alive * up / ((up + down) / 2)
            tilt.append(better / pooled if pooled else 1.0)
        halves = []
        for i, (arm, mean) in enumerate(zip(self._arms, tokens, strict=True)):
            lean = None if arm.is_whole else self._yields.tilt(i, bucket)
            extra = (mean - 1) * (tilt[arm.tier.depth] if lean is None else lean)
            halves.append((max(1.0, 2 * mean - 1 - extra), 1 + extra))
        poor, good = halves[current]
        return [2 * tokens[current] / (poor / p + good / g) for p, g in halves]

    def _tokens(self, arm: int, bucket: int, rates: Sequence[float] | None = None) -> float:
        """Tokens that a request is expected to gain from one round, the bonus token included.

        Args:
          rates: to ask what if drafts were as good as that, and confidences told as much as can be hoped.
        """
        one = self._arms[arm]
        tokens = self._acceptance.tokens(one.tier, bucket, rates)
        return tokens if one.is_whole else 1 + (tokens - 1) * self._share(arm, bucket, rates)

    def _share(self, arm: int, bucket: int, rates: Sequence[float] | None) -> float:
        """The part of a whole round's accepted drafts that a packed arm keeps; see `_tokens`."""
        one, seen = self._arms[arm], self._yields.share(arm, bucket)
        if rates is None and seen is not None:
            return seen
        alive = survival(one.tier, self._acceptance.rates(bucket) if rates is None else rates)
        # In levels of the tree, each as wide as the mean.
        drafts = (one.budget or 0.0) * one.tier.depth / (one.tier.num_nodes - 1)
        if rates is None or seen is None:
            return guess(alive, drafts, 0.0 if rates is None else _INFORMED)
        return seen + _RENEWED * (guess(alive, drafts, 1.0) - seen)


def _charge(probe: float, current: float) -> float:
    """Seconds that a deeper probe costs at worst, given log seconds: it emits no more than the current tier would."""
    return max(_LEAST_CHARGE * math.exp(current), math.exp(probe) - math.exp(current))


def expected_gain(ahead: float, spread: float) -> float:
    """Mean of max(0, x) of a normal x: what knowing is worth that may show one tier ahead of another."""
    z = ahead / spread
    return spread * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) + ahead * 0.5 * math.erfc(-z / math.sqrt(2))
