"""The engine's loop on a clock of its own: the real scheduler and the real controller, and a device that takes as long
as a cost model says.

As in jaxspec.engine one dispatch is under way while the host works, so results come a dispatch late. The host itself
costs nothing, or so much a dispatch. Must not know how policies are made or results printed, nor JAX.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
import time
from array import array
from collections.abc import Sequence

import numpy as np

from jaxspec.adaptive.controller import AdaptiveController, Recorder
from jaxspec.adaptive.policy import PLACE, BatchView, DraftLabels, RoundStats, TierPolicy
from jaxspec.bench.online.arrivals import Load
from jaxspec.bench.simulate.acceptance import Tape
from jaxspec.bench.simulate.costs import CATCH_UP
from jaxspec.bench.simulate.records import Batch, Machine, Outcome, Ran, Served
from jaxspec.request import FinishReason, Request, SamplingParams
from jaxspec.scheduling.lag import DraftLag
from jaxspec.scheduling.pace import Repeats
from jaxspec.scheduling.plan import DecodeRows, PrefillChunk, SchedulerConfig
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.tier import Choice, Tier

#: What a confidence is kept from 0 and 1 by, as on the device (speculation.budget.EDGE).
_EDGE = 1e-4
#: Steps of context tokens in which the best fixed tier is looked up.
_COARSE = 1024


@dataclasses.dataclass
class _Pending:
    """A dispatch under way: what the device will have said at `finish`.

    Attributes:
      stats: of each of its rounds, whose seconds are still unknown. seconds: of the device for all of them.
      timed: whether nothing but rounds ran since the dispatch before. entered: whether the drafter took in first what
        it had missed.
    """

    finish: float
    firsts: list[tuple[Request, int]] = dataclasses.field(default_factory=list)
    rows: DecodeRows | None = None
    stats: list[RoundStats] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    timed: bool = False
    entered: bool = False

    def gained(self) -> np.ndarray:
        """Tokens that all its rounds gave each row."""
        return np.asarray([one.num_accepted for one in self.stats]).sum(axis=0) + len(self.stats)


class Simulation:
    """One policy on one machine under one load.

    Args:
      tape: the texts. policy: chooses; it is told of rounds a round late, as in the engine.
      prompt, output: tokens of requests whose arrival names none; outputs differ from this mean by up to half.
      seed: of lengths, places in the texts and noise. The same for every policy that is compared.
      recorder: hears every round.
      tpot: seconds a token that every request asks for, by AdaSpec's rule: no round should take longer. None: none.
    """

    def __init__(
        self, machine: Machine, tape: Tape, policy: TierPolicy, *, prompt: int = 256, output: int = 128, seed: int = 0,
        recorder: Recorder | None = None, tpot: float | None = None,
    ) -> None:  # fmt: skip
        self.machine, self._tape, self._policy = machine, tape, policy
        self._prompt, self._output, self._seed, self._tpot = prompt, output, seed, tpot
        self.now = 0.0
        self._scheduler = Scheduler(SchedulerConfig(machine.sizes, enable_prefix_caching=False), lambda: self.now)
        tiers = {tier: None for tier in (*map(Tier, machine.depths), *policy.tiers)}
        self.controller: AdaptiveController[None] = AdaptiveController(policy, tiers, recorder)
        slots = machine.sizes.slots
        self._lag = DraftLag(machine.depths[-1] + 1, CATCH_UP, slots)
        self._kind_S, self._draw_S = np.zeros(slots, np.intp), np.zeros(slots)
        self._at_S = np.zeros(slots, np.intp)
        self._place: dict[Request, tuple[int, float]] = {}  # offset on the tape, draw of the kind
        self._in_flight: list[_Pending] = []
        self._free_at = 0.0  # the device
        self._timed = False  # nothing but rounds ran since the round before
        self._read_at = 0.0  # when the latest result was read
        self._phase, self._phase_end = tape.process.phase_at(0.0)
        self._noise = random.Random(f"noise {seed}")
        self._steps = np.asarray(machine.depths)
        self._seconds: dict[tuple[int, int], np.ndarray] = {}  # of the tiers, by bucket and context in steps
        self._words = [[0] * n for n in range(machine.rounds * (machine.depths[-1] + 1) + 1)]
        self._expects = getattr(policy, "expected_tokens", None)
        self._out = Outcome()
        self._since, self._filling = 0.0, 0  # when it began to count, and the first answers that it still waits for

    def run(self, load: Load, seconds: float = float("inf"), doubles: float = float("inf")) -> Outcome:
        """Serves the load. A closed loop goes on for `seconds`, an open one till all is served, or for so long.

        Args:
          doubles: a closed loop begins with one request, and has twice as many after each so many seconds, up to its
            concurrency; inf: with all of them.
        """
        began, out, arrivals = time.process_time(), self._out, load.arrivals
        number, closed = 0, load.concurrency
        grows = doubles < float("inf")
        self._filling = 1 if grows and closed else closed or 0
        while self.now < seconds:
            if closed is not None:
                places = min(closed, 1 << min(30, int(self.now / doubles))) if grows else closed
                while number - len(out.served) < places:
                    self._add(number, self.now, None, None)
                    number += 1
            else:
                while number < len(arrivals) and arrivals[number].at <= self.now:
                    a = arrivals[number]
                    self._add(number, a.at, a.prompt_tokens, a.output_tokens)
                    number += 1
                if not self._scheduler.has_work and not self._in_flight:
                    if number == len(arrivals):
                        break
                    self.now = arrivals[number].at
                    continue
            self._step()
        out.seconds, out.wall = self.now - self._since, time.process_time() - began
        out.unfinished = number - len(out.served) - out.refused
        out.switches, out.preemptions = self.controller.switches, self._scheduler.stats.preemptions
        return out

    def _add(self, index: int, at: float, prompt: int | None, output: int | None) -> None:
        rng = random.Random(f"{self._seed} {index}")
        share = 0.5 + rng.random()
        tokens = max(1, round(self._output * share)) if output is None else output
        request = Request(
            f"r{index}", [0] * (self._prompt if prompt is None else prompt),
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), seed=0, arrival_time=at,
        )  # fmt: skip
        request.metrics.arrival_time = at
        try:
            self._scheduler.add(request)
        except ValueError:  # longer than the context
            self._out.refused += 1
            return
        self._place[request] = rng.randrange(Tape.LENGTH), rng.random()

    # ---------------------------------------------------------------- a step, as jaxspec.engine has it

    def _step(self) -> None:
        plan = self._scheduler.plan(Repeats(self.machine.rounds))
        dispatched, growth = [], 0
        self.now += self.machine.host
        if len(plan.decode):
            pending, growth = self._round(plan.decode)
            dispatched.append(pending)
        if plan.prefill:
            dispatched.append(self._prefill(plan.prefill))
        self._scheduler.dispatched(plan, growth)
        previous, self._in_flight = self._in_flight, dispatched
        for pending in previous:
            self._commit(pending)

    def _device(self, seconds: float) -> tuple[float, float]:
        """Queues work; (when it begins, when it ends)."""
        begin = max(self.now, self._free_at)
        self._free_at = begin + seconds
        return begin, self._free_at

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> _Pending:
        tokens, behind = sum(c.end - c.start for c in chunks), sum(c.start for c in chunks)
        _, finish = self._device(self.machine.costs.prefill(tokens, behind))
        self._timed = False
        firsts = []
        for chunk in chunks:
            if chunk.is_last:
                offset, draw = self._place[chunk.request]
                # The next token is drafted behind what is there and the token that this gives.
                at = offset + len(chunk.request.output_token_ids) + 1
                self._at_S[chunk.slot], self._draw_S[chunk.slot] = at % Tape.LENGTH, draw
                self._kind_S[chunk.slot] = self._kind(draw)
                firsts.append((chunk.request, chunk.request.epoch))
        return _Pending(finish, firsts)

    def _kind(self, draw: float) -> int:
        return self._tape.kinds.index(self._tape.process.kind(self._phase, draw))

    def _enter_phase(self) -> None:
        self._phase, self._phase_end = self._tape.process.phase_at(self.now)
        self._kind_S[:] = [self._kind(draw) for draw in self._draw_S.tolist()]

    def _round(self, rows: DecodeRows) -> tuple[_Pending, int]:
        machine, slots = self.machine, rows.slots_B
        if self.now >= self._phase_end:
            self._enter_phase()
        bucket = machine.buckets[bisect.bisect_left(machine.buckets, len(rows))]
        context = rows.context_tokens
        kinds, at = self._kind_S.take(slots), self._at_S.take(slots)
        alive_BD = self._tape.alive_KLD[kinds, at]
        show = getattr(self._policy, "show", None)
        if show is not None:
            show(Batch(bucket, context, alive_BD))
        began = time.thread_time()
        view = BatchView(len(rows), bucket, context, self.now, rows.deepest, self._tpot, self._timed, rows.rounds)
        choice, _, rows.rounds = self.controller.select(view, lambda choice: choice.tokens is None)
        self._out.controller.append(time.thread_time() - began)
        tier = choice.tier
        assert tier.is_chain, f"only chains are simulated, got {tier}"
        entry = 0.0
        if self._lag.before_round(rows, tier.depth, can_catch_up=True):
            entry = machine.costs.catching_up(bucket, context)
        timed, self._timed = self._timed, True
        pending = _Pending(self.now, rows=rows, timed=timed, entered=entry > 0)
        for _ in range(rows.rounds):
            begins = max(self.now, self._free_at) + pending.seconds
            stats, seconds = self._one(begins, rows, choice, bucket, context, entry * (not pending.stats))
            pending.stats.append(stats)
            pending.seconds += seconds
        _, pending.finish = self._device(pending.seconds)
        return pending, tier.depth + 1

    def _one(
        self, begins: float, rows: DecodeRows, choice: Choice, bucket: int, context: int, entry: float
    ) -> tuple[RoundStats, float]:
        """A round of a dispatch and its seconds, which are not in the stats yet. A text that ends in it goes on."""
        machine, slots, tier = self.machine, rows.slots_B, choice.tier
        kinds, at = self._kind_S.take(slots), self._at_S.take(slots)
        alive_BD, run_B = self._tape.alive_KLD[kinds, at], self._tape.run_KL[kinds, at]
        drafts, kept_B = None, np.minimum(run_B, tier.depth)
        if tier.depth and choice.tokens is not None:
            said_BD = self._tape.said_KLD[kinds, at][:, : tier.depth]
            kept_B, drafts = self._spend(choice, bucket, said_BD, run_B)
            expected = len(rows) + self._worth(alive_BD, drafts)
        else:
            expected = len(rows) + float(alive_BD[:, : tier.depth].sum())
        shape = bucket * tier.num_nodes if choice.tokens is None else choice.tokens
        seconds = machine.costs.round(tier.depth, bucket, shape, context)
        best = self._best(alive_BD, bucket, context)
        value = expected / seconds
        if machine.noise:
            seconds *= self._noise.lognormvariate(0.0, machine.noise)
        self._at_S[slots] = (at + kept_B + 1) % Tape.LENGTH
        accepted = tuple(kept_B.tolist())
        if self._expects is not None and choice.tokens is None:
            self._out.expected += len(rows) * self._expects(tier, bucket)
            self._out.accepted += len(rows) + sum(accepted)
        stats = RoundStats(
            tier, len(rows), bucket, accepted, 0.0, context, choice.tokens, drafts, rows.rounds,
            rows=tuple((rows.slots_B + (rows.stamps_B << PLACE)).tolist()),
        )  # fmt: skip
        self._out.rounds.append(
            Ran(begins, self._phase, tier.depth, choice.tokens, len(rows), bucket, seconds + entry,
                len(rows) + sum(accepted), value, best)
        )  # fmt: skip
        return stats, seconds + entry

    def _best(self, alive_BD: np.ndarray, bucket: int, context: int) -> float:
        """Tokens a second that the best fixed tier could expect now."""
        gains = np.concatenate([[0.0], np.cumsum(alive_BD.sum(axis=0))])
        key = bucket, context // _COARSE
        if key not in self._seconds:
            at = (key[1] + 0.5) * _COARSE
            costs = self.machine.costs
            self._seconds[key] = np.asarray([costs.round(d, bucket, bucket * (d + 1), at) for d in self.machine.depths])
        return float(((len(alive_BD) + gains[self._steps]) / self._seconds[key]).max())

    def _spend(
        self, choice: Choice, bucket: int, said_BD: np.ndarray, run_B: np.ndarray
    ) -> tuple[np.ndarray, DraftLabels]:
        """Which drafts a packed round verifies, as speculation.budget selects them; accepted ones, and what is told."""
        b, depth = said_BD.shape
        inside = np.clip(said_BD, _EDGE, 1 - _EDGE)
        fit = np.tile([1.0, 0.0], (depth, 1))
        if choice.calibration:
            fit[: len(choice.calibration)] = choice.calibration[:depth]
        p_BD = 1 / (1 + np.exp(-(fit[:, 0] * np.log(inside / (1 - inside)) + fit[:, 1])))
        survival_BD = np.cumprod(p_BD, axis=1)
        assert choice.tokens is not None
        room = choice.tokens - bucket
        assert 0 <= room <= bucket * depth, f"{choice.tokens} tokens of {bucket} rows of depth {depth}"
        # Ties by depth, then row.
        taken = np.argsort(-survival_BD.T.ravel(), kind="stable")[:room]
        length_B = np.bincount(taken % b, minlength=b)
        steps = np.arange(1, depth + 1)
        verified_BD = steps <= length_B[:, None]
        accepted_B = np.minimum(run_B, length_B)
        known_BD = steps <= accepted_B[:, None] + 1
        right_BD = known_BD & (steps <= run_B[:, None])
        if len(self._out.predicted) < 400_000:
            self._out.predicted += survival_BD.ravel().tolist()
            self._out.actual += (steps <= run_B[:, None]).ravel().tolist()
        labels = DraftLabels(
            depth, array("f", said_BD.astype(np.float32).tobytes()), bytes(range(1, depth + 1)) * b,
            *(x.astype(np.uint8).tobytes() for x in (verified_BD, known_BD, right_BD)),
        )  # fmt: skip
        return accepted_B, labels

    def _worth(self, alive_BD: np.ndarray, drafts: DraftLabels) -> float:
        verified = np.frombuffer(drafts.verified, np.uint8).reshape(len(alive_BD), -1)
        return float((alive_BD[:, : verified.shape[1]] * verified).sum())

    def _commit(self, pending: _Pending) -> None:
        scheduler, out = self._scheduler, self._out
        self.now = max(self.now, pending.finish)
        for request, epoch in pending.firsts:
            if scheduler.commit(request, epoch, [0]):
                out.tokens += 1
                if self._filling and len(request.output_token_ids) == 1:
                    self._filling -= 1
                    if not self._filling:
                        self._since, out.tokens = self.now, 0
                if len(request.output_token_ids) >= request.max_tokens:
                    self._finish(request)
        rows = pending.rows
        if rows is None:
            self._read_at = self.now
            return
        took = max(pending.seconds, self.now - self._read_at if self.machine.host else 0.0) / rows.rounds
        self._read_at = self.now
        told = dict.fromkeys(("entered" if pending.entered else "seconds",), took if pending.timed else 0.0)
        stats = [dataclasses.replace(one, **told) for one in pending.stats]
        began = time.thread_time()
        for one in stats:
            self.controller.observe(one)
        out.controller[-1] += time.thread_time() - began
        out.controller[-1:] = [out.controller[-1] / rows.rounds] * rows.rounds
        counts_B = pending.gained()
        alive_B = scheduler.slots.alive(rows)
        left_B = np.asarray([request.max_tokens - len(request.output_token_ids) for request in rows.requests])
        kept_B = np.minimum(counts_B, np.maximum(left_B, 0))
        over = (alive_B & (counts_B >= left_B)).nonzero()[0].tolist()
        out.tokens += int(kept_B[alive_B].sum())
        scheduler.commit_round(rows, [self._words[n] for n in kept_B.tolist()])
        for row in over:
            self._finish(rows.requests[row])

    def _finish(self, request: Request) -> None:
        self._scheduler.finish(request, FinishReason.LENGTH)
        m = request.metrics
        assert m.first_token_time is not None and m.finished_time is not None
        self._out.served.append(Served(m.arrival_time, m.first_token_time, m.finished_time, m.output_tokens))
        del self._place[request]
