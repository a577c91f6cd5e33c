"""The engine: one step plans, dispatches one executable, reads the result before it, and streams.

Composition happens here: the scheduler decides who runs, the controller how deep, the
runner runs it. One round is always in flight while the host works on the one before.
"""

from __future__ import annotations

import dataclasses
import numbers
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxspec.adaptive.controller import AdaptiveController, Recorder
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy
from jaxspec.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    StreamDelta,
)
from jaxspec.runtime.compile import CompileCounter, SpecRuntimeState
from jaxspec.runtime.runner import Pending, RowResult, Runner
from jaxspec.scheduling.scheduler import DecodeRow, Plan, Scheduler
from jaxspec.text.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer
from jaxspec.tier import Tier
from jaxspec.traffic import TrafficLog


@dataclasses.dataclass
class _Stream:
    """What the engine keeps of a live request besides the scheduler's Request.

    Attributes:
      index: which completion of its prompt.
      detokenizer, stops: None without a tokenizer.
      unseen: most committed tokens that the drafter has not consumed.
    """

    request: Request
    prompt: str | None
    index: int
    detokenizer: IncrementalDetokenizer | None
    stops: StopChecker | None
    text: str = ""
    stop_reason: int | str | None = None
    unseen: int = 1


@dataclasses.dataclass
class EngineStats:
    """Counters since the engine was built.

    Attributes:
      warmup_seconds: compiling and timing executables. executables: how many there are.
      compilations_after_warmup: must stay 0.
      rounds, steps: decode rounds collected, engine steps.
      starved_rounds: rounds dispatched after the one before had already finished: the device had to wait.
      device_seconds: time the host waited for results. host_seconds: the rest of the steps' time.
      switches: rounds whose tier differs from the one before. rounds_by_tier: {tier name: rounds}.
      lossless: whether outputs have the target's distribution (False under typical verification).
    """

    warmup_seconds: float
    executables: int
    compilations_after_warmup: int
    steps: int
    rounds: int
    starved_rounds: int
    device_seconds: float
    host_seconds: float
    switches: int
    rounds_by_tier: dict[str, int]
    preemptions: int
    prefix_hits: int
    prefix_queries: int
    free_pages: int
    cached_pages: int
    lossless: bool


class Engine:
    """Continuous batching with adaptive speculative decoding.

    Args:
      runner: compiled executables and device state.
      scheduler: owns pages and slots.
      new_policy: builds the configured policy, afresh at each call.
      tokenizer: None for token-in, token-out use (no text, no stop strings).
      eos: token ids that end a text.
      seed: base of the seeds of requests that bring none.
      cost: measured seconds of the rounds, where the policy needed them.
      traffic_log: file to append finished requests to (see EngineConfig).

    Raises:
      ValueError: a traffic_log that cannot be appended to.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, new_policy: Callable[[], TierPolicy], buckets: Sequence[int],
        tokenizer: Tokenizer | None, eos: Sequence[int], seed: int, warmup_seconds: float, cost: CostTable | None,
        traffic_log: str | Path | None = None,
    ):  # fmt: skip
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.new_policy, self.cost = new_policy, cost
        self._buckets, self._eos, self._seed = tuple(buckets), frozenset(eos), seed
        self.use_policy(new_policy())
        self._streams: dict[str, _Stream] = {}
        self._in_flight: list[Pending] = []
        self._serial = 0
        self._steps = self._rounds = self._starved = 0
        self._waited = self._worked = self._collected_at = 0.0
        self._warmup_seconds = warmup_seconds
        self._compilations = CompileCounter()
        self._traffic = None if traffic_log is None else TrafficLog(traffic_log)

    def use_policy(self, policy: TierPolicy, recorder: Recorder | None = None) -> None:
        """From the next step on, `policy` chooses the tier; its counters start anew.

        Args:
          recorder: writes every finished round, for `jaxspec.adaptive.replay`.

        Raises:
          ValueError: it can select a tier, or a tier at a batch size, that this engine has not compiled.
        """
        for tier in policy.tiers:
            have = self.runner.reachable.get(tier)
            missing = [] if have is None else [b for b in policy.buckets_for(tier, self._buckets) if b not in have]
            if missing:
                raise ValueError(
                    f"the policy can select {tier} at batch sizes {missing}, but it is compiled for {have}"
                )
        self.controller: AdaptiveController[SpecRuntimeState] = AdaptiveController(policy, self.runner.states, recorder)

    # Requests.

    def add(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, prompt: str | None = None, index: int = 0,
        request_id: str | None = None, priority: int = 0,
    ) -> str:  # fmt: skip
        """Queues one completion and returns its id.

        Raises:
          ValueError: the prompt or the parameters do not fit this engine; nothing was queued.
        """
        vocab = self.runner.config.vocab_size
        for token in prompt_token_ids:
            integral = isinstance(token, numbers.Integral) and not isinstance(token, bool)
            if not integral or not 0 <= int(token) < vocab:
                raise ValueError(f"prompt token ids must lie in [0, {vocab}), got {token!r}")
        params.check_vocabulary(vocab)
        if not params.plain_greedy and True not in self.runner.variants:
            raise ValueError("this engine has variants ('greedy',) only, and these parameters need 'sampled'")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {params.stop!r} need a tokenizer, and this engine has none")
        if params.masks_stop_tokens and len(self._eos) > 8:
            raise ValueError(f"min_tokens can ban 8 end tokens of the checkpoint, but it has {len(self._eos)}")
        serial = self._serial
        request_id = f"request-{serial}" if request_id is None else request_id
        seed = (self._seed + serial if params.seed is None else params.seed + index) % 2**32
        request = Request(
            request_id,
            [int(t) for t in prompt_token_ids],
            params,
            seed,
            arrival_time=time.monotonic(),
            priority=priority,
        )
        self.scheduler.add(request)
        self._serial += 1
        detokenizer = stops = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            stops = StopChecker(
                params.stop, include_stop_str_in_output=params.include_stop_str_in_output, min_tokens=params.min_tokens
            )
        self._streams[request_id] = _Stream(request, prompt, index, detokenizer, stops)
        return request_id

    def abort(self, request_id: str) -> StreamDelta | None:
        """Ends a request at once; its slot and pages are free for the next step. None if it is not live."""
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        return self._finish(stream, FinishReason.ABORT, [], "")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    # The step.

    def step(self) -> list[StreamDelta]:
        """Dispatches the next prefill chunk and round, and commits the ones dispatched a step before."""
        began = time.perf_counter()
        waited = self._waited
        plan = self.scheduler.plan()
        dispatched = self._dispatch(plan)
        previous, self._in_flight = self._in_flight, dispatched
        deltas = [delta for pending in previous for delta in self._commit(pending)]
        self._steps += 1
        self._worked += time.perf_counter() - began - (self._waited - waited)
        return deltas

    def _dispatch(self, plan: Plan) -> list[Pending]:
        dispatched, growth = [], 0
        if plan.decode:
            rows = plan.decode
            bucket = next(b for b in self._buckets if b >= len(rows))
            context = sum(row.request.num_computed for row in rows)
            tier, state = self.controller.select(BatchView(len(rows), bucket, context, time.monotonic()))
            growth = tier.depth + 1
            self._starved += bool(self._in_flight) and self._in_flight[-1].is_ready
            dispatched.append(self.runner.dispatch(rows, state, bucket, catch_up=self._behind(rows, tier)))
        if plan.prefill is not None:
            pending = self.runner.prefill(plan.prefill)
            if pending is not None:
                dispatched.append(pending)
        self.scheduler.dispatched(plan, growth)
        return dispatched

    def _behind(self, rows: Sequence[DecodeRow], tier: Tier) -> bool:
        """Counts what each row's drafter has not consumed; whether it must catch up before this round."""
        drafter = self.runner.drafter
        if drafter is None or not drafter.has_cache:
            return False
        streams = [self._streams[row.request.request_id] for row in rows]
        behind = tier.depth > 0 and any(stream.unseen > drafter.window for stream in streams)
        for stream in streams:
            stream.unseen = tier.depth + 1 if tier.depth else stream.unseen + 1
            # Beyond what it can catch up its cache lacks entries: such pages are no prefix to reuse.
            if stream.unseen > drafter.window + drafter.catch_up_tokens:
                stream.request.cacheable_generated = False
        return behind

    def _commit(self, pending: Pending) -> list[StreamDelta]:
        began = time.perf_counter()
        results = self.runner.collect(pending)
        now = time.perf_counter()
        self._waited += now - began
        if pending.tier is not None:
            self._rounds += 1
            stats = RoundStats(
                tier=pending.tier,
                batch_size=len(results),
                bucket=pending.bucket,
                num_accepted=tuple(len(result.tokens) - 1 for result in results),
                seconds=now - max(pending.dispatched_at, self._collected_at) if pending.timed else 0.0,
                context_tokens=pending.context_tokens,
            )
            self.controller.observe(stats)
        self._collected_at = now
        deltas = [self._commit_row(pending.tier, result) for result in results]
        return [delta for delta in deltas if delta is not None]

    def _commit_row(self, tier: Tier | None, result: RowResult) -> StreamDelta | None:
        request = result.request
        if result.epoch != request.epoch:
            return None
        stream = self._streams[request.request_id]
        if not result.finite:
            request.error = "the target's logits are not finite"
            self.scheduler.commit(request, result.epoch, ())
            return self._finish(stream, FinishReason.ERROR, [], "")
        if tier is not None:
            request.metrics.record_round(tier.name, tier.num_nodes - 1, len(result.tokens) - 1)
        kept, text, reason = self._until_stop(stream, result.tokens)
        self.scheduler.commit(request, result.epoch, kept)
        if result.logprobs is not None:
            request.logprobs.extend(result.logprobs[: len(kept)])
        if reason is not None:
            return self._finish(stream, reason, kept, text)
        stream.text += text
        return StreamDelta(request.request_id, stream.index, list(kept), text, None, None)

    def _until_stop(self, stream: _Stream, tokens: Sequence[int]) -> tuple[Sequence[int], str, FinishReason | None]:
        """The tokens that belong to the request, their settled text, and why it ends, if it does."""
        request, params = stream.request, stream.request.params
        text = ""
        for count, token in enumerate(tokens, start=1):
            total = len(request.output_token_ids) + count
            ends = token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)
            if ends and total > params.min_tokens:
                stream.stop_reason = token if token in params.stop_token_ids else None
                return tokens[:count], text + self._flush(stream), FinishReason.STOP
            if stream.detokenizer is not None and stream.stops is not None:
                settled = stream.stops.feed([stream.detokenizer.feed(token)])
                text += settled.text
                if settled.stop is not None:
                    stream.stop_reason = settled.stop
                    return tokens[:count], text, FinishReason.STOP
            if total >= params.max_tokens:
                return tokens[:count], text + self._flush(stream), FinishReason.LENGTH
        return tokens, text, None

    def _flush(self, stream: _Stream) -> str:
        if stream.detokenizer is None or stream.stops is None:
            return ""
        return stream.stops.flush(stream.detokenizer.flush())

    def _finish(self, stream: _Stream, reason: FinishReason, tokens: Sequence[int], text: str) -> StreamDelta:
        request = stream.request
        stream.text += text
        self.scheduler.finish(request, reason)
        if self._traffic is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._traffic.record(request)
        del self._streams[request.request_id]
        completion = CompletionOutput(
            index=stream.index,
            token_ids=list(request.output_token_ids),
            text=stream.text,
            finish_reason=reason,
            stop_reason=stream.stop_reason,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            error=request.error,
        )
        output = RequestOutput(
            request.request_id, stream.prompt, request.prompt_token_ids, [completion], request.metrics
        )
        return StreamDelta(request.request_id, stream.index, list(tokens), text, reason, output)

    # What users can read.

    @property
    def stats(self) -> EngineStats:
        s = self.scheduler.stats
        return EngineStats(
            warmup_seconds=self._warmup_seconds,
            executables=self.runner.num_executables,
            compilations_after_warmup=self._compilations.count,
            steps=self._steps,
            rounds=self._rounds,
            starved_rounds=self._starved,
            device_seconds=self._waited,
            host_seconds=self._worked,
            switches=self.controller.switches,
            rounds_by_tier={t.name: n for t, n in self.controller.rounds_by_tier.items()},
            preemptions=s.preemptions,
            prefix_hits=s.prefix_hits,
            prefix_queries=s.prefix_queries,
            free_pages=s.free_pages,
            cached_pages=s.cached_pages,
            lossless=self.runner.spec.typical is None,
        )
