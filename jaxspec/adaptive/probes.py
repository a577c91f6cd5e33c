"""Single rounds of other arms than the current one: which tell enough for what they cost, and what they have cost.

Three kinds. A look times an arm whose seconds are unsure. A probe drafts deeper than the current arm, to see whether
drafts would be accepted there. A sight is of confidences, which packed rounds alone tell, or under a budget of what it
leaves out. All are paid from a bucket's credit. Must not know how rounds run, nor JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxspec.adaptive.acceptance import STALE_ROWS, AcceptanceModel, survival
from jaxspec.adaptive.arms import Arm
from jaxspec.adaptive.bucket import Bucket, GoodputParams
from jaxspec.adaptive.entry import Entry
from jaxspec.adaptive.estimate import AFTER_DRAFTS, CostEstimate
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.adaptive.worth import Worth
from jaxspec.adaptive.yields import Yields

#: Acceptance of unknown positions when asking whether a deeper tier is worth a look.
_OPTIMISM = 0.9
#: By how much deeper positions may be better than the deepest one that runs, and the tests of them that count where
#: nothing runs: whether drafts are worth anything shows at the first position.
_MORE, _ENOUGH = 0.25, 2.0
#: Spread of a tier's log seconds that is not worth a look, and from which one round says enough.
_SETTLED, _UNSURE = 0.01, 0.15
#: In rounds of the current tier: what a round of a probe is taken to cost at least, what one look may cost beyond its
#: first round, and what it must be expected to bring. Most rounds of one look.
_LEAST_CHARGE, _AT_ONCE, _WORTH, _LOOKS = 0.05, 0.25, 2.0, 8
#: Rounds of a look at plain decoding while drafts run: the first is slower than those that follow.
_AFRESH = 2
#: Rounds to which the pauses between losing probes grow quickly, by how much each that loses lets them grow after
#: that, and up to how many times as many; rounds to which those between looks at costs grow at most, and by how much.
_QUIET, _CALMER, _CALM, _SILENT, _CALMING = 100.0, 1.2, 4.0, 3000.0, 2.0
#: Part of the time for probes that is spent on them where nothing drafts and nothing shows that texts change.
_STATIONARY = 0.5
#: Least rounds between probes that win where drafts run already, doubled with each that changes nothing: a deeper
#: tier's evidence adds to theirs.
HASTE = 30.0
#: Probes that win where nothing drafts come again at once, as long as no more than this many have changed nothing.
_STREAK = 4
#: Rounds of one request after which drafts that were given up are looked at for the first time: it may have been bad
#: luck. Several requests, up to so many, have shown more, where texts were not seen to change; and that it was no luck
#: is sure from so many standard deviations.
_REGRET, _REGRETS, _TURNING, _SURE = 8.0, 16, 0.5, 2.5
#: Part of its pause after which a look may be so urgent.
_URGENT = 20
#: Gap in log goodput for which nothing is changed.
TIE = 0.01
#: Rounds of the current tier that the credit may fall below nothing.
_DEBT = 0.25
#: Rounds by which the horizon grows with each that passes without a probe.
_FURTHER = 1.0
#: Rounds after which confidences are looked at again where that may pay; and rounds under a budget after which one
#: verifies everything, so that what is believed of drafts that budgets leave out is checked.
_UNSEEN, _EVERYTHING = 100, 200


class Probes:
    """Begins probes and settles their accounts. The state of a bucket is its policy's, as are all estimates.

    Args:
      arms: every arm of the policy; named by their index.
    """

    def __init__(
        self, arms: Sequence[Arm], params: GoodputParams, cost: CostEstimate, acceptance: AcceptanceModel,
        yields: Yields, worth: Worth, entry: Entry,
    ) -> None:  # fmt: skip
        self._arms, self._params, self._cost = list(arms), params, cost
        self._acceptance, self._yields, self._worth, self._entry = acceptance, yields, worth, entry
        self._takes_in = [arm.tier.depth > 0 and not arm.tier.lookup for arm in arms]

    def entry(self, arm: int, current: int, bucket: int) -> float:
        """Rounds of the current arm that an arm in its place takes besides, for the drafter has missed some."""
        if not self._takes_in[arm] or self._takes_in[current] or not self._entry.due:
            return 0.0
        return self._entry.plain_rounds(bucket)[0]

    def begin(
        self, state: Bucket, view: BatchView, scores: Sequence[float], costs: Sequence[float], tokens: Sequence[float]
    ) -> bool:
        """Whether one begins with this round: then it is the state's.

        Args:
          scores, tokens: of each arm, as `Worth.scores` has them. costs: log seconds.
        """
        return (
            (view.timed and self._look(state, view, scores, costs))
            or self._probe(state, view, scores, costs, tokens)
            or self._sight(state, view, scores, costs, tokens)
        )

    def together(self, view: BatchView, arm: int) -> int:
        """Rounds of a dispatch of an arm."""
        return view.rounds if self._arms[arm].is_whole else 1

    def _look(self, state: Bucket, view: BatchView, scores: Sequence[float], costs: Sequence[float]) -> bool:
        """Begins to time the arm whose seconds are most worth knowing, if any is worth it."""
        current, bucket = state.current, view.bucket
        assert current is not None
        if state.credit <= 0 or state.since_look * _URGENT < state.pause:
            return False
        most, first, running = 1.0, 0.0, self._arms[current]
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
            each = self.together(view, i)
            spare, back = math.inf, self._takes_in[current] and not self._takes_in[i]
            if back:  # as long as the drafter misses little that is free; and the first round says little
                spare = self._entry.spare(running.tier.depth)
                rounds = min(rounds + 1, max(_AFRESH, spare))
            looks = -(-rounds // each)
            # What several rounds of a dispatch take is told as one.
            told = looks if each > 1 else rounds - back
            entry = self.entry(i, current, bucket)
            if back:
                entry = AFTER_DRAFTS * math.exp(longer)
                entry += 0.0 if spare >= looks * each else self._entry.plain_rounds(bucket)[0]
            gain = horizon * expected_gain(ahead - TIE, self._cost.news(i, current, bucket, told))
            takes = looks * each * charge + entry
            if gain > _WORTH and gain * state.since_look > state.pause and gain > most * takes:
                most, first = gain / takes, entry * math.exp(costs[current])
                state.probe, state.looks, state.charge = i, looks - 1, each * charge * math.exp(costs[current])
        if most == 1.0:
            return False
        state.since_look = 0
        state.credit -= (state.looks + 1) * state.charge + first
        state.pause = min(_SILENT, state.pause * _CALMING)
        return True

    def _does_no_more(self, arm: int, than: Arm) -> bool:
        one = self._arms[arm]
        both = one.is_whole and than.is_whole and (one.tier.lookup or not than.tier.lookup)
        return both and one.tier.depth <= than.tier.depth and one.tier.num_nodes <= than.tier.num_nodes

    def _probe(
        self, state: Bucket, view: BatchView, scores: Sequence[float], costs: Sequence[float], tokens: Sequence[float]
    ) -> bool:
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
        hopes = self._worth.hopes(bucket, hopeful)
        best = lambda i: math.log(hopes[i] / tokens[i]) + scores[i]
        if all(best(i) + self._cost.news(i, current, bucket) <= goal for i in deeper):
            return False

        def value(i: int) -> float:
            # Positions beyond the current depth that the rows would test, up to what overrules a stale estimate.
            each = self.together(view, i)
            tests = each * view.batch_size * sum([1.0, *survival(self._arms[i].tier, hopeful)][known:-1])
            return min(tests, STALE_ROWS if known else _ENOUGH) / (each * _charge(costs[i], costs[current]))

        probe = max(deeper, key=value)
        each = self.together(view, probe)
        charge = each * _charge(costs[probe], costs[current])
        # Few rows may fail by chance; looks that have become rare should not.
        looks = 2 if not known and each * view.batch_size < STALE_ROWS and state.interval >= _QUIET else 1
        return self._begin(state, bucket, probe, looks, charge, math.exp(costs[current]))

    def _sight(
        self, state: Bucket, view: BatchView, scores: Sequence[float], costs: Sequence[float], tokens: Sequence[float]
    ) -> bool:
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
            return self._begin(state, bucket, every, 1, self.together(view, every) * loses(every), now)
        packed = [i for i in state.candidates if not self._arms[i].is_whole]
        age = self._yields.age(bucket)
        if not running.tier.depth or not packed or view.batch_size < 2 or (age is not None and age < _UNSEEN):
            return False
        hopes = self._worth.hopes(bucket, self._acceptance.rates(bucket))
        hope = lambda i: math.log(hopes[i] / tokens[i]) + scores[i]
        best = max(packed, key=hope)
        if hope(best) < scores[current] + TIE:
            return False
        # Of the first ones it takes several to know what confidences mean.
        return self._begin(state, bucket, best, 1 if age is not None else 2, loses(best), now)

    def _begin(self, state: Bucket, bucket: int, probe: int, looks: int, charge: float, now: float) -> bool:
        """Begins so many dispatches of a probe, if the credit allows them.

        Args:
          charge: seconds that each costs. now: of a round of the current arm.
        """
        assert state.current is not None
        first = self.entry(probe, state.current, bucket) * now
        if state.credit < looks * charge + first:
            return False
        state.probe, state.looks, state.charge = probe, looks - 1, charge
        state.credit -= looks * charge + first
        return True

    def regret(
        self, state: Bucket, view: BatchView, gap: float, costs: Sequence[float], tokens: Sequence[float]
    ) -> float:
        """Rounds until drafts that are given up now are looked at again.

        Args:
          gap: by how much plain decoding is better, in log goodput.
        """
        current = state.current
        assert current is not None
        if state.turns >= _TURNING:
            return _REGRET
        soon = _REGRET * min(view.batch_size, _REGRETS)
        # Accepted lengths differ by about one from request to request.
        if not self._params.probe_share or gap * tokens[current] * math.sqrt(state.shown) < _SURE:
            return soon
        takes = self.together(view, current) * _charge(costs[current], costs[0]) / math.exp(costs[0])
        if self._takes_in[current]:
            takes += self._entry.plain_rounds(view.bucket)[0]
        return max(soon, min(_CALM * _QUIET, takes / (self._params.probe_share * (_STATIONARY + state.turns))))

    def settle(self, state: Bucket, stats: RoundStats, arm: int) -> None:
        """Charges what a dispatch of the awaited probe really lost, and sets the wait until the next one."""
        state.awaited -= 1
        over = not state.looks and state.awaited <= 0
        if over:
            state.probe = None
        current, bucket = state.current, stats.bucket
        if current is None or current == arm:
            return
        costs, running = self._cost.logs(bucket, stats.context_tokens), self._arms[current]
        known, deeper = running.tier.depth, running.tier.depth < stats.tier.depth
        now, tokens = math.exp(costs[current]), self._worth.tokens(current, bucket)
        alike = not (stats.tier.lookup or running.tier.lookup)
        if deeper and alike and running.is_whole and stats.tokens is None:
            # A row's first drafts are those that the current tier would have drafted: an exact comparison for chains.
            extra = sum(max(0, a - known) for a in stats.num_accepted) / len(stats.num_accepted)
        else:
            extra = self._worth.tokens(arm, bucket) - tokens
        gain = extra * now / tokens
        # A round that was disturbed, not dear, would else forbid for long to find that out.
        lost = stats.dispatched * max(0.0, math.exp(costs[arm]) - now - gain)
        state.credit = max(-_DEBT * now, state.credit + state.charge - lost)
        if not deeper or not self._params.probe_share:
            return
        charge = _charge(costs[arm], costs[current])
        least = (stats.dispatched * charge / now + self.entry(arm, current, bucket)) / self._params.probe_share
        if not known:
            least /= min(1.0, _STATIONARY + state.turns)
        if gain >= charge:
            wins = state.wins if known else state.wins - _STREAK
            state.interval = max(least, min(_CALM * _QUIET, HASTE * 2.0 ** min(wins, 9))) if wins >= 0 else 0.0
            state.won, state.wins = True, state.wins + 1
        elif over and not state.won:
            quiet = max(self._params.probe_backoff * least, _QUIET)
            longer = max(2 * state.interval, least) if state.interval < quiet else _CALMER * state.interval
            state.interval = min(longer, quiet if state.interval < quiet else _CALM * quiet)


def _charge(probe: float, current: float) -> float:
    """Seconds that a deeper probe costs at worst, given log seconds: it emits no more than the current tier would."""
    return max(_LEAST_CHARGE * math.exp(current), math.exp(probe) - math.exp(current))


def expected_gain(ahead: float, spread: float) -> float:
    """Mean of max(0, x) of a normal x: what knowing is worth that may show one tier ahead of another."""
    z = ahead / spread
    return spread * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) + ahead * 0.5 * math.erfc(-z / math.sqrt(2))
