"""The cost-aware policy: the tier, and the verify budget, with the most expected tokens a second.

Owns the choice made from estimated acceptance and measured costs; `worth` weighs arms, `probes` keeps estimates alive.
Acceptance alone cannot see that speculation stopped paying (at a larger batch, say); seconds alone cannot see what a
draft is worth. Must not know how rounds run, nor JAX. Deterministic: the same rounds lead to the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxspec.adaptive.acceptance import AcceptanceModel
from jaxspec.adaptive.arms import Arm, whole
from jaxspec.adaptive.bucket import Bucket, GoodputParams
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.entry import Entry
from jaxspec.adaptive.estimate import CostEstimate
from jaxspec.adaptive.learnt import Learnt
from jaxspec.adaptive.policy import BatchView, RoundStats, together
from jaxspec.adaptive.probes import HASTE, TIE, Probes
from jaxspec.adaptive.rows import Rows
from jaxspec.adaptive.worth import Worth
from jaxspec.adaptive.yields import Yields
from jaxspec.tier import PLAIN, Choice, Tier

#: Dispatches to wait for a probe's result before it is given up (an aborted round reports nothing).
_PROBE_PATIENCE = 8
#: Most rounds between probes, and between looks at costs, that a policy begins with which recalls what was learnt.
_PAUSE = 100.0
#: Gap in log goodput within which the first arm is the cheapest one that drafts.
_NEAR = 0.05
#: Gap in log goodput from which it counts more than in proportion; and how fast switches are forgotten.
_LARGE, _REST = 0.1, 0.99
#: Log goodput by which plain decoding must be better besides, for it takes probes to see what drafts are worth then.
_BLIND = 0.01
#: Rounds that must have drafted, or not, before a change of that tells that texts change; rounds that must have drafted
#: before a change of acceptance does; how fast that is forgotten.
_HELD, _HEARD, _SETTLES = 60, 10, 0.999
#: Log goodput that drafts may lose where texts change, if drafting again takes a plain round or more: as long as they
#: go on nothing is missed, and nothing has to be taken in.
_OPTION = 0.06
#: What is left of what drafting again is believed to take after a round that took nothing but its own seconds.
_FREE = 0.2
#: How far the drafts that a packed round accepts may be off what was expected, in depths over the root of its rows,
#: before the next ones are looked at closely.
_ODD = 0.6


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
        self._worth = Worth(self._arms, self._acceptance, self._yields, self._rows)
        self._entry = Entry(sizes, self.tiers[-1].depth)
        self._probes = Probes(self._arms, params, self._cost, self._acceptance, self._yields, self._worth, self._entry)
        self._parts: list[RoundStats] = []  # rounds of a dispatch of which others are still to come
        self._drafted = False  # whether the latest round did
        self._heard = 0  # rounds that told of drafts since acceptance was last seen to change
        self._buckets: dict[int, Bucket] = {}
        for bucket in sizes:
            if not buckets:
                cost.seconds(PLAIN, bucket)
            self._buckets[bucket] = Bucket(self._known(bucket))

    def select(self, view: BatchView) -> Tier | Choice:
        """What has the best expected goodput, or a probe; ValueError for a bucket without costs.

        Where a request asks for it, of what keeps its time per token (see `_in_time`), as far as anything does.
        """
        state, bucket = self._bucket(view.bucket), view.bucket
        if len(state.candidates) == 1:
            return PLAIN
        current, steady = state.current, state.steady
        rounds = self._probes.together(view, 0 if current is None else current)
        state.rounds += rounds
        state.since_probe += rounds
        state.since_look += rounds
        state.waited += 1
        if steady.repeats(view, rounds):
            assert steady.choice is not None and current is not None
            state.since_whole += not self._arms[current].is_whole
            state.credit += self._params.probe_share * rounds * steady.seconds
            return steady.choice
        costs = self._cost.logs(bucket, view.context_tokens)
        scores, tokens = self._worth.scores(bucket, costs, state.current)
        current = self._settled_on(state, view, rounds, scores, costs, tokens)
        if state.looks and state.probe is not None:
            state.looks, state.awaited = state.looks - 1, state.awaited + 1
            return self._run(state, state.probe, bucket)
        if state.probe is not None and state.waited > _PROBE_PATIENCE:
            state.probe = None
        if state.probe is None and self._probes.begin(state, view, scores, costs, tokens):
            state.since_probe, state.waited, state.awaited, state.won, state.doubted = 0, 0, 1, False, False
            assert state.probe is not None
            steady.disturb()
            return self._run(state, state.probe, bucket)
        rounds = self._probes.together(view, current)
        most = 2 * view.rounds * math.exp(max(costs[i] for i in state.candidates))
        state.credit = min(state.credit + self._params.probe_share * rounds * math.exp(costs[current]), most)
        if view.tpot is not None:
            current = self._in_time(state, view, current, scores, costs, tokens)
        choice = self._run(state, current, bucket)
        if state.probe is None:
            steady.decided(choice, rounds * view.batch_size, tokens[current], math.exp(costs[current]))
            if steady.plain:  # not beyond the next probe
                steady.left = min(steady.left, max(0, (int(state.interval) - state.since_probe) // rounds - 1))
        return choice

    def _in_time(
        self, state: Bucket, view: BatchView, current: int, scores: Sequence[float], costs: Sequence[float],
        tokens: Sequence[float],
    ) -> int:  # fmt: skip
        """The arm if it keeps the time per token that is asked for, else the best that does, or what comes nearest.

        A round may be as long as the tokens allow that it is expected to bring a request of the poorer half.
        """
        assert view.tpot is not None
        poorer = self._worth.poorer(view.bucket, tokens)
        each = [math.exp(cost) / told for cost, told in zip(costs, poorer, strict=True)]
        if each[current] <= view.tpot:
            return current
        quick = [i for i in state.candidates if each[i] <= view.tpot]
        return max(quick, key=scores.__getitem__) if quick else min(state.candidates, key=each.__getitem__)

    def _run(self, state: Bucket, arm: int, bucket: int) -> Tier | Choice:
        """What an arm is in a bucket."""
        chosen = self._arms[arm]
        state.since_whole = 0 if chosen.is_whole else state.since_whole + 1
        return chosen.choice(bucket, self._yields.fits)

    def observe(self, stats: RoundStats) -> None:
        """Updates acceptance from a finished round, and costs where it was timed. All rounds of a dispatch at once."""
        if self._parts and _kind(self._parts[0]) != _kind(stats):
            self._parts.clear()  # their others are missing
        self._parts.append(stats)
        if len(self._parts) < stats.dispatched:
            return
        stats, self._parts = together(self._parts), []
        state = self._bucket(stats.bucket)
        self._rows[stats.bucket].read(stats)
        if state.steady.is_usual(stats, timed=self._params.refine_cost and stats.seconds > 0):
            self._yields.wait(stats.bucket, stats.dispatched)
            self._entry.ran(stats)
            self._drafted = stats.tier.depth > 0
            return
        arm = self._cost.arm(stats.tier, stats.bucket, stats.tokens)
        after, self._drafted = self._drafted and not stats.tier.depth, stats.tier.depth > 0
        doubtful = stats.seconds > 0 and self._cost.observe(
            stats.tier,
            stats.bucket,
            stats.seconds,
            stats.tokens,
            context=stats.context_tokens,
            after_drafts=after / stats.dispatched,
        )
        self._learn_entry(stats)
        self._learn_acceptance(stats, state.steady.studied())
        if stats.seconds > 0 and not state.timed and self._params.probe_share and self._params.refine_cost:
            state.timed = True
            state.credit += self._params.probe_start * stats.seconds
        if arm is None or arm != state.probe or not (stats.num_accepted or not stats.tier.depth):
            return
        if doubtful and not state.doubted and not state.looks:
            # What disturbed the round may have been something else.
            state.doubted, state.looks = True, 1
            state.credit -= state.charge
        self._probes.settle(state, stats, arm)

    def _learn_entry(self, stats: RoundStats) -> None:
        """What drafting again took, where a round was the first to draft; see `Entry`."""
        tier, bucket = stats.tier, stats.bucket
        if tier.depth and not tier.lookup and self._cost.knows(PLAIN, bucket):
            context, (rounds, error) = stats.context_tokens, self._entry.plain_rounds(bucket)
            now = self._cost.seconds(PLAIN, bucket, context=context)
            if stats.entered > 0:
                each = now / stats.dispatched  # of the pass, on each of the rounds whose seconds have it
                told = self._cost.observe_with(
                    tier, bucket, stats.entered, rounds * each, error * each, stats.tokens, context
                )
                self._entry.learn(bucket, told[0] / each, told[1] / each)
            elif stats.seconds > 0 and self._entry.due:
                self._entry.learn(bucket, _FREE * rounds, _FREE * error)
        self._entry.ran(stats)

    def _learn_acceptance(self, stats: RoundStats, rounds: int) -> None:
        """What a round accepted, and of a packed one what the others would have shown.

        Args:
          rounds: that it stands for.
        """
        depth, bucket, drafts = stats.tier.depth, stats.bucket, stats.drafts
        if depth == 0:
            self._acceptance.age(stats.batch_size * rounds)
        elif stats.tokens is None:
            self._heard += rounds
            self._buckets[bucket].shown += len(stats.num_accepted)
            if self._acceptance.observe(stats):
                self._forget(bucket)
        elif drafts is not None:
            self._heard += rounds
            arm, count = self._cost.arm(stats.tier, bucket, stats.tokens), len(stats.num_accepted)
            if arm is not None and count:
                off = sum(stats.num_accepted) / count + 1 - self._worth.tokens(arm, bucket)
                if abs(off) > _ODD * depth / math.sqrt(count):
                    self._yields.attend(bucket)
            told = len(stats.rows) == count and len(drafts.known) == count * drafts.nodes
            better = self._rows[bucket].better(stats.rows) if told and count else None
            beyond = self._yields.observe(drafts, depth, bucket, better)
            if beyond is not None and self._acceptance.observe(stats, beyond):
                self._forget(bucket)
            return
        self._yields.wait(bucket, stats.dispatched)

    def _forget(self, bucket: int) -> None:
        """Acceptance has changed, as a round of the bucket shows."""
        self._buckets[bucket].turns += self._heard >= _HEARD
        self._heard = 0
        self._yields.forget()
        for rows in self._rows.values():
            rows.forget()
        for state in self._buckets.values():
            state.shown = 0

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

    def learnt(self) -> Learnt:
        """Costs, acceptance, what budgets keep, and how rarely it has come to look; see `learnt.Learnt`."""
        rates, means, start = self._acceptance.learnt()
        shares, curves = self._yields.learnt()
        pauses = {
            bucket: (min(state.interval, _PAUSE), min(state.pause, _PAUSE))
            for bucket, state in self._buckets.items() if state.timed
        }  # fmt: skip
        return Learnt({}, self._cost.learnt(), rates, means, start, pauses, shares, curves)

    def recall(self, learnt: Learnt) -> None:
        """Before the first round: begins with what another such policy had learnt; rounds overrule it."""
        self._cost.recall(learnt.seconds)
        self._acceptance.recall(learnt.rates, learnt.means, learnt.start)
        self._yields.recall(learnt.shares, learnt.curves)
        for bucket, (interval, pause) in learnt.pauses.items():
            state = self._buckets.get(bucket)
            if state is not None:  # nothing is to be found out at once
                state.interval, state.pause, state.timed = interval, pause, True

    def expected_tokens(self, tier: Tier, bucket: int, tokens: int | None = None) -> float:
        """Tokens that a request is expected to gain from one such round now, the bonus token included."""
        self._bucket(bucket)
        arm = self._cost.arm(tier, bucket, tokens)
        assert arm is not None, (tier, bucket, tokens)
        return self._worth.tokens(arm, bucket)

    def seconds(self, tier: Tier, bucket: int, tokens: int | None = None) -> float:
        """Seconds that a round is expected to take now: the cost table, as measured rounds corrected it."""
        return self._cost.seconds(tier, bucket, tokens)

    def _settled_on(
        self, state: Bucket, view: BatchView, rounds: int, scores: Sequence[float], costs: Sequence[float],
        tokens: Sequence[float],
    ) -> int:  # fmt: skip
        """The arm to run when nothing is probed.

        Args:
          rounds: that the current one would run.
        """
        bucket = view.bucket
        best = max(state.candidates, key=scores.__getitem__)
        if state.turns and state.current and not best:
            best = max(state.candidates[1:], key=scores.__getitem__)
            option = _OPTION * min(1.0, state.turns) * min(1.0, self._entry.plain_rounds(bucket)[0])
            best = best if scores[best] > scores[0] - option else 0
        if state.current is None:
            # Of what may be as good where nothing is known, that which loses least.
            drafting = self._acceptance.blank and self._arms[best].tier.depth
            near = lambda i: self._arms[i].tier.depth > 0 and scores[best] - scores[i] < _NEAR
            state.current = min(filter(near, state.candidates), key=costs.__getitem__) if drafting else best
        elif best == state.current:
            state.lost = 0.0
        else:
            gap = scores[best] - scores[state.current]
            sure = TIE if self._arms[best].tier.depth else TIE + _BLIND
            state.lost += rounds * max(0.0, gap - sure) * max(1.0, gap / _LARGE)
            # Plain decoding shows nothing of acceptance: an error in its favour lasts.
            patience = self._params.patience * (1 + state.unrest) * (1 if best else 2)
            if state.lost > patience + self._probes.entry(best, state.current, bucket):
                if self._arms[best].tier.depth == 0 or self._arms[state.current].tier.depth == 0:
                    state.turns += state.rounds - state.began > _HELD
                    state.began = state.rounds
                regret = self._probes.regret(state, view, gap, costs, tokens)
                state.interval = min(state.interval, HASTE) if best else regret
                state.current, state.lost, state.unrest, state.wins = best, 0.0, state.unrest + 1, 0
        state.unrest *= _REST**rounds
        state.turns *= _SETTLES**rounds
        return state.current

    def _bucket(self, bucket: int) -> Bucket:
        if bucket not in self._buckets:
            raise ValueError(f"the cost table has no cost in bucket {bucket}, only in buckets {list(self._buckets)}")
        return self._buckets[bucket]


def _kind(stats: RoundStats) -> tuple[Tier, int, int]:
    """What the rounds of a dispatch have in common."""
    return stats.tier, stats.bucket, stats.dispatched
