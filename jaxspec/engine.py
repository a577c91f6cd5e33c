"""The engine: one step plans, dispatches one executable, reads the result before it, and says what happened.

Composition happens here: the scheduler decides who runs, the controller how deep, the
runner runs it. One round is always in flight while the host works on the one before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.adaptive import objectives
from jaxspec.adaptive.controller import AdaptiveController, Recorder
from jaxspec.adaptive.cost import Costed, CostTable
from jaxspec.adaptive.learnt import Keeper
from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy
from jaxspec.deciding import Decider
from jaxspec.events import Delta, Event, Finished, Started
from jaxspec.facts import EngineFacts
from jaxspec.laps import WAIT
from jaxspec.live import Live, weights
from jaxspec.output import Kept, OutputProcessor
from jaxspec.reader import RoundReader
from jaxspec.remembered import answer
from jaxspec.request import FinishReason, Request, RequestMetrics, SamplingParams
from jaxspec.runtime.collecting import Collector
from jaxspec.runtime.compile import CompileCounter, SpecRuntimeState
from jaxspec.runtime.prompts import PromptWork
from jaxspec.runtime.results import Pending, Result
from jaxspec.runtime.runner import Runner
from jaxspec.scheduling.pace import Pace
from jaxspec.scheduling.plan import DecodeRows, Plan, PrefillChunk
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.stats import EngineStats
from jaxspec.swapping import DrafterWeights
from jaxspec.text.grammar import Grammar
from jaxspec.tier import Choice, Tier
from jaxspec.traffic import TrafficLog
from jaxspec.warming import BackgroundWarmup
from jaxspec.watch import RoundWatch


class Engine:
    """Continuous batching with adaptive speculative decoding.

    Args:
      facts: what it is, for good.
      runner: compiled executables and device state.
      scheduler: owns pages and slots.
      build_policy: builds the configured policy from the costs known so far.
      cost: measured seconds of the rounds, where the policy needs them; what the warm-up measures is added.
      seed: base of the seeds of requests that bring none.
      began: when building the engine began, on time.perf_counter's clock.
      traffic_log: file to append finished requests to (see EngineConfig).
      pace: how many rounds a dispatch runs; None: one.
      remembers: whether finished responses go into the drafter's corpus.
      collector: takes what the ring gathers; None: there is no ring.
      load_drafter: other parameters for the runner's drafter from a directory; None: it has none to exchange.
      keeper: where the policy's estimates outlive the engine; None: nowhere.

    Attributes:
      drafter_weights: the versions of the drafter's weights.
      on_round: hears every finished round, between the dispatch of one and the next; None: nobody does.
      pace: as given; may be exchanged for one of no more rounds.
      mixes: whether rounds take chunks of prompts along where they can; may be set.

    Raises:
      ValueError: a traffic_log that cannot be appended to.
    """

    def __init__(
        self, facts: EngineFacts, runner: Runner, scheduler: Scheduler,
        build_policy: Callable[[CostTable | None], TierPolicy], cost: CostTable | None, seed: int, began: float,
        traffic_log: str | Path | None = None, pace: Pace | None = None, remembers: bool = False,
        load_drafter: Callable[[Path], Any] | None = None, collector: Collector | None = None,
        keeper: Keeper | None = None,
    ):  # fmt: skip
        self.facts, self.runner, self.scheduler, self._seed = facts, runner, scheduler, seed
        self._decider = Decider(runner, facts.buckets, build_policy, cost, keeper)
        self._live = Live(facts)
        self._reader = RoundReader(facts, runner.laps)
        self._in_flight: list[Pending] = []
        self._serial = 0
        self._prompt: tuple[Sequence[int], list[int]] = ((), [])
        self._steps = self._starved = self._guided = self._mixed = 0
        self._watch = RoundWatch()
        self.pace = Pace(1, measured=False) if pace is None else pace
        self.mixes = True
        self._chunk_last = False  # the latest dispatch was a chunk of which nothing is read
        self._laps = runner.laps
        self._compilations = CompileCounter()
        self.on_round: Callable[[RoundStats], None] | None = None
        self._traffic = None if traffic_log is None else TrafficLog(traffic_log)
        self._remembers = remembers
        self.drafter_weights = DrafterWeights(runner, load_drafter)
        self._collector = collector
        self._warmup = BackgroundWarmup(runner, began, self._learn, lambda: self.has_work)

    # Policies.

    @property
    def controller(self) -> AdaptiveController[SpecRuntimeState]:
        """What asks the policy."""
        return self._decider.controller

    @property
    def cost(self) -> CostTable | None:
        """Measured seconds of the rounds, as far as they are known, where the policy needs them."""
        return self._decider.cost

    def new_policy(self) -> TierPolicy:
        """The configured policy, as at a start: afresh, or with what was learnt before that."""
        return self._decider.fresh()

    def use_policy(self, policy: TierPolicy, recorder: Recorder | None = None) -> None:
        """From the next step on, `policy` chooses the tier; its counters start anew. Requests may be under way.

        Args:
          recorder: writes every finished round, for `jaxspec.adaptive.replay`.

        Raises:
          ValueError: it is no policy, or can select a tier, or one at a batch size, that this engine has not compiled.
        """
        self._decider.use(policy, recorder)

    # Requests.

    def add(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, index: int = 0,
        request_id: str | None = None, arrival_time: float | None = None, priority: int = 0,
        max_depth: int | None = None, tpot: float | None = None, grammar: Grammar | None = None,
    ) -> str:  # fmt: skip
        """Queues one completion and returns its id.

        Args:
          index: which of the prompt's completions; added to the seed.
          request_id: unique among live requests; None: one is made up.
          arrival_time: on time.monotonic's clock, where it came before now; it orders the queue.
          priority, max_depth, tpot: see Request.
          grammar: what the text has to be, compiled by `facts.grammars`. The request ends with FinishReason.STOP as
            soon as the text is complete and nothing may follow, with LENGTH where its length cuts it before.

        Raises:
          ValueError: the prompt or the parameters do not fit this engine; nothing was queued.
        """
        tokens = self._checked(prompt_token_ids)
        self.facts.check(params, grammar)
        serial = self._serial
        request = Request(
            f"request-{serial}" if request_id is None else request_id,
            tokens,
            params,
            seed=(self._seed + serial if params.seed is None else params.seed + index) % 2**32,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            max_depth=max_depth,
            tpot=tpot,
        )
        output = OutputProcessor(self.facts, request, index, grammar)
        self.scheduler.add(request)  # last of what can fail
        self._live.enter(output)
        self._watch.disturbed()
        self._serial += 1
        return request.request_id

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """A copy of the prompt, whose tokens are looked at once for all its completions; see EngineFacts.checked."""
        source, tokens = self._prompt
        if prompt is not source or list(prompt) != tokens:
            tokens = self.facts.checked(prompt)
            self._prompt = prompt, tokens
        return list(tokens)

    def abort(self, request_id: str) -> Finished | None:
        """Ends a request at once; its slot and pages are free for the next step. None if it is not live."""
        output = self._live.get(request_id)
        return None if output is None else self._finish(output, FinishReason.ABORT)

    def metrics(self, request_id: str) -> RequestMetrics | None:
        """What a live request has cost so far, for the caller to keep; None if it is not live."""
        output = self._live.get(request_id)
        if output is None:
            return None
        self._reader.tell(output)
        m = output.request.metrics
        m.output_tokens = len(output.request.output_token_ids)
        return dataclasses.replace(m, acceptance_histogram=[*m.acceptance_histogram], tier_rounds={**m.tier_rounds})

    def flush_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many pages that freed. Live requests keep theirs."""
        return self.scheduler.flush_prefix_cache()

    def forget_texts(self) -> int:
        """`flush_prefix_cache`, and the texts in the drafter's corpus, those from files too."""
        self.runner.forget()
        return self.flush_prefix_cache()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    # The step.

    def step(self) -> list[Event]:
        """Dispatches the next prefill chunks and round, and commits the ones dispatched a step before.

        Events of one completion come in the order Started, Delta, ..., Finished.
        """
        with self._warmup.step():
            self._laps.start()
            plan = self.scheduler.plan(self.pace.repeats(), self._beside())
            for request in plan.preempted:
                self._reader.leave(self._live[request.request_id])
            self._laps.lap("plan")
            dispatched = self._dispatch(plan)
            previous, self._in_flight = self._in_flight, dispatched
            if any(self._live.is_guided(pending.requests) for pending in dispatched):
                # What a constrained text may go on with is known once its last token is: nothing of it stays in flight.
                previous, self._in_flight = [*previous, *dispatched], []
            events = [event for chunk in plan.prefill for event in self._started(chunk)]
            for pending in previous:
                events += self._commit(pending)
            self._steps += 1
            if not self.has_work:
                self._keep_learnt()
            self._laps.lap("rest")
            return events

    def _beside(self) -> PrefillShape | None:
        """What the next round can take along of prompts, if it is as the latest one."""
        pending = next((pending for pending in self._in_flight if pending.tier is not None), None)
        if not self.mixes or pending is None or pending.tier is None or pending.tokens is not None:
            return None
        if self._live.any_guided:
            return None
        return self.runner.takes_along(pending.tier, pending.bucket)

    def _started(self, chunk: PrefillChunk) -> list[Event]:
        if not chunk.is_first or chunk.request.metrics.preemptions:
            return []
        request, m = chunk.request, chunk.request.metrics
        assert m.first_scheduled_time is not None
        waited = m.first_scheduled_time - m.arrival_time
        return [Started(request.request_id, self._live[request.request_id].index, m.cached_prompt_tokens, waited)]

    def _dispatch(self, plan: Plan) -> list[Pending]:
        dispatched, growth = [], 0
        work = PromptWork(plan.prefill, [self._live.allowed(chunk) for chunk in plan.prefill])
        if len(plan.decode):
            # One round, but for batches larger than what is compiled so far.
            parts = plan.decode.parts(self.runner.largest_ready())
            for rows in parts:
                pending = self._dispatch_rounds(rows, work if self.mixes and len(parts) == 1 else None)
                dispatched.append(pending)
                assert pending.tier is not None
                growth = max(growth, pending.tier.depth + 1)
            for rows in parts:
                rows.growth = growth  # of several parts, which are a round each
            # Looked at last: building the plan and the call itself take the host's time. Guided, the call waits.
            guided = any(self._live.is_guided(pending.requests) for pending in dispatched)
            watched = bool(self._in_flight) and not self._chunk_last and not guided
            self._starved += watched and self._in_flight[-1].is_ready
        self._chunk_last = bool(plan.prefill) and not plan.prefill[-1].is_last
        if plan.prefill:
            self._watch.disturbed()
            dispatched += self.runner.prefill(work)
            if self._collector is not None:
                self._collector.dispatched(sum(chunk.end - chunk.start for chunk in plan.prefill))
            self._laps.lap("prefill")
        self.scheduler.dispatched(plan, growth)
        self._laps.lap("commit")
        return dispatched

    def _dispatch_rounds(self, rows: DecodeRows, work: PromptWork | None) -> Pending:
        runner, buckets = self.runner, self.facts.buckets
        bucket = next(b for b in buckets if b >= len(rows) and any(runner.ready(t, b) for t in runner.states))
        now, asked = time.monotonic(), self._live.asked(rows.requests)
        tpot = min(asked) if asked and self.facts.objective == objectives.STEP else None
        guide = self._live.guide(rows.requests)
        # Masks and log-probabilities cross over round by round.
        alone = guide is not None or bool(np.count_nonzero(rows.logprobs_B))
        timed = runner.timed and guide is None and (work is None or not work.chunks)
        rounds = 1 if alone else rows.rounds
        choice, state, rows.rounds = self.controller.select(
            BatchView(len(rows), bucket, rows.context_tokens, now, rows.deepest, tpot, timed, rounds),
            lambda choice: runner.repeats(choice, bucket),
        )
        worth = None
        if asked and choice.tokens is not None:
            worth = weights(rows, choice.tier.depth, now, self._watch.round_seconds)
        self._guided += guide is not None
        version = self.drafter_weights.before_round(choice, rows.rounds)
        self._laps.lap("policy")
        pending = runner.dispatch(rows, state, choice, bucket, guide, worth, work)
        self._mixed += work is not None and work.calls is not None
        pending.version = version
        if self._collector is not None:
            pending.ring = self._collector.taken, len(rows) * (choice.tier.depth + 1) * rows.rounds
            self._collector.dispatched(pending.ring[1])
        return pending

    def _commit(self, pending: Pending) -> list[Event]:
        waited = self._laps.seconds[WAIT]
        result = self.runner.collect(pending)
        waited = self._laps.seconds[WAIT] - waited
        rows, tier = pending.rows, pending.tier
        if not isinstance(rows, DecodeRows):
            self._watch.prompt()
            return [
                e for row, (request, epoch) in enumerate(rows) for e in self._commit_first(request, epoch, result, row)
            ]
        assert tier is not None
        self._observe(pending, rows, tier, result, waited)
        if self._collector is not None and pending.ring is not None:
            self._collector.collected(*pending.ring, int(result.counts_RB.sum()))
        return self._commit_round(rows, (tier, pending.bucket), result)

    def _observe(self, pending: Pending, rows: DecodeRows, tier: Tier, result: Result, waited: float) -> None:
        """Tells the controller, and whoever listens, what each round gave and how long it took."""
        for stats in self._watch.round(pending, rows, tier, result, waited, self.pace):
            self.drafter_weights.observe(pending.version, Choice(tier, pending.tokens), stats.num_accepted)
            self._decider.observe(stats)
            if self.on_round is not None:
                self.on_round(stats)
        self._laps.lap("policy")

    def _commit_first(self, request: Request, epoch: int, result: Result, row: int) -> list[Event]:
        """The token after a prompt, or after outputs that were computed again."""
        if epoch != request.epoch:
            return []
        output = self._live[request.request_id]
        kept = output.take(result.tokens[row], bool(result.finite_B[row]))
        self.scheduler.commit(request, epoch, kept.tokens)
        if kept.reason is None:
            self._reader.enter(output)
        return self._said(output, kept, result, row)

    def _said(self, output: OutputProcessor, kept: Kept, result: Result, row: int) -> list[Event]:
        """What a completion's new tokens are to those who listen, once they are committed."""
        request, logprobs = output.request, None
        if result.logprobs is not None and request.params.logprobs is not None:
            logprobs = result.entries(row, request.params.logprobs)[: len(kept.tokens)]
            request.logprobs.extend(logprobs)
        events: list[Event] = []
        if kept.tokens or kept.text:
            events.append(Delta(request.request_id, output.index, list(kept.tokens), kept.text, logprobs))
        if kept.reason is not None:
            events.append(self._finish(output, kept.reason))
        return events

    def _commit_round(self, rows: DecodeRows, kind: tuple[Tier, int], result: Result) -> list[Event]:
        slots = self.scheduler.slots
        said = self._reader.read(kind[0], rows.slots_B, slots.alive(rows), result)
        self.scheduler.commit_round(rows, said.tokens)
        counts_RB = result.counts_RB
        stopped = sum(reason is not FinishReason.LENGTH for reason in said.reasons.values())
        self.pace.gave(kind, int(np.count_nonzero(counts_RB)), int(counts_RB.sum()), stopped)
        self._laps.lap("commit")
        events: list[Event] = []
        for row, (output, tokens, text) in enumerate(zip(said.outputs, said.tokens, said.texts, strict=True)):
            if output is None:
                continue
            if row in said.reasons or result.logprobs is not None:
                events += self._said(output, Kept(tokens, text, said.reasons.get(row)), result, row)
            else:
                events.append(Delta(output.request.request_id, output.index, list(tokens), text))
        self._laps.lap("events")
        return events

    def _finish(self, output: OutputProcessor, reason: FinishReason) -> Finished:
        request = output.request
        self._watch.disturbed()
        self._reader.leave(output)
        self.scheduler.finish(request, reason)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            if self._traffic is not None:
                self._traffic.record(request)
            if self._remembers:
                self.runner.remember(answer(request.prompt_token_ids, request.output_token_ids))
        self._live.leave(output)
        return Finished(request.request_id, output.index, reason, output.result())

    # Warming up, beside requests or between them.

    @property
    def warm(self) -> bool:
        """Whether every executable has come; until then requests run with those that have."""
        return self._warmup.warm

    def wait_until_warm(self) -> None:
        """Returns when every executable has come and was timed; requests may run meanwhile, from other threads."""
        self._warmup.wait()

    def stop_warmup(self) -> None:
        """Compiles nothing more; requests go on with what there is."""
        self.runner.stop_warmup()

    def finish_warmup(self) -> None:
        """As `stop_warmup`, and waits for what is being compiled and what the next start drafts with; in any thread."""
        self.runner.finish_warmup()

    def flush_ring(self) -> None:
        """Returns when what the ring has gathered is written; nothing without one."""
        if self._collector is not None:
            with self._warmup.step():
                self._collector.flush()

    def limit_ring(self, share: float) -> None:
        """From now on the ring's writer takes no more than this share of the time; nothing without a ring."""
        if self._collector is not None:
            self._collector.share = share

    def follow(self) -> None:
        """In the other processes of an engine that several share: runs what the first one runs, until that closes.

        Raises:
          HostLostError: the first process, or another, is gone.
          ValueError: this process follows none.
        """
        self.runner.follow()

    def close(self) -> None:
        """Ends what goes on beside its steps: the warm-up, the ring's writing, and the processes that follow."""
        self.stop_warmup()
        self.flush_ring()
        self._keep_learnt(at_once=True)
        self.runner.leave()

    def _keep_learnt(self, *, at_once: bool = False) -> None:
        """Of a drafter whose weights were exchanged it is not: the next start has the first ones."""
        if self.drafter_weights.version <= 1:
            self._decider.keep(at_once=at_once)

    def _learn(self, costs: Mapping[Costed, float]) -> None:
        """After a piece of the warm-up: what it has timed."""
        self._decider.learn(costs)
        for pending in self._in_flight:
            pending.timed = pending.entered = False  # its result is read later than it came

    # What users can read.

    @property
    def stats(self) -> EngineStats:
        s, parts = self.scheduler.stats, dict(self._laps.seconds)
        return EngineStats(
            warmup_seconds=self._warmup.seconds,
            startup_seconds=self._warmup.startup_seconds,
            executables=self.runner.num_executables,
            executables_ready=self.runner.num_ready,
            compilations_after_warmup=self._compilations.count,
            steps=self._steps,
            rounds=self._watch.rounds,
            dispatches=self._watch.dispatches,
            starved_rounds=self._starved,
            device_seconds=parts[WAIT],
            host_seconds=sum(parts.values()) - parts[WAIT],
            host_parts={part: seconds for part, seconds in parts.items() if part != WAIT},
            switches=self.controller.switches,
            rounds_by_tier={t.name: n for t, n in self.controller.rounds_by_tier.items()},
            preemptions=s.preemptions,
            prefix_hits=s.prefix_hits,
            prefix_queries=s.prefix_queries,
            free_pages=s.free_pages,
            cached_pages=s.cached_pages,
            lossless=self.runner.spec.typical is None,
            running=s.running,
            waiting=s.waiting,
            active_tier="" if self.controller.active is None else self.controller.active.name,
            guided_rounds=self._guided,
            mixed_rounds=self._mixed,
            experts_touched=self._watch.experts,
            ring_rows=0 if self._collector is None else self._collector.rows,
            ring_lost=0 if self._collector is None else self._collector.lost,
            draft_tensor_parallel=self.runner.draft_shards,
            drafter_version=self.drafter_weights.version,
            drafter_trial=self.drafter_weights.versions.trying,
            drafter_updates=self.drafter_weights.versions.updates,
            drafter_rollbacks=self.drafter_weights.versions.rollbacks,
        )

    @property
    def pool_bytes(self) -> int:
        """Bytes of the target's pool of keys and values, over all devices."""
        return self.runner.state.pages.nbytes
