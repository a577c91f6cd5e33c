"""The engine: one step plans, dispatches one executable, reads the result before it, and streams.

Composition happens here: the scheduler decides who runs, the controller how deep, the
runner runs it. One round is always in flight while the host works on the one before.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import numbers
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxspec.adaptive.controller import AdaptiveController, Recorder
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy
from jaxspec.request import (
    CompletionOutput,
    ErrorKind,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    StreamDelta,
)
from jaxspec.runtime.compile import CompileCounter, SpecRuntimeState
from jaxspec.runtime.runner import Pending, RowResult, Runner
from jaxspec.scheduling.scheduler import DecodeRow, Plan, Scheduler
from jaxspec.text.grammar import Grammar, GrammarCompiler, Guide, Matcher
from jaxspec.text.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer
from jaxspec.tier import Tier
from jaxspec.traffic import TrafficLog

#: While the engine works and warms up: steps for each piece of warming up, and the seconds without a step after which
#: its own thread goes on although there is work: a stream may rest, and what it left in flight may never be read.
_STEPS_PER_ADVANCE, _RESTS_SECONDS = 2, 0.1
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Stream:
    """What the engine keeps of a live request besides the scheduler's Request.

    Attributes:
      index: which completion of its prompt.
      detokenizer, stops: None without a tokenizer.
      matcher: None where no grammar says what the text may be.
      unseen: most committed tokens that the drafter has not consumed.
    """

    request: Request
    prompt: str | None
    index: int
    detokenizer: IncrementalDetokenizer | None
    stops: StopChecker | None
    matcher: Matcher | None
    text: str = ""
    stop_reason: int | str | None = None
    unseen: int = 1


@dataclasses.dataclass
class EngineStats:
    """Counters since the engine was built.

    Attributes:
      warmup_seconds: loading, compiling and timing until everything was ready, or so far.
      startup_seconds: of those, until the first request could be served.
      executables: how many there are once all is warm. executables_ready: those that can run now.
      compilations_after_warmup: outside the warm-up; must stay 0.
      rounds, steps: decode rounds collected, engine steps.
      running, waiting: live requests with a slot, and without.
      active_tier: name of the latest round's tier; "" before the first.
      guided_rounds: rounds with a row whose text a grammar constrains; each is read before the next is dispatched.
      starved_rounds: rounds whose dispatch had not returned when all work before them was finished: the device ran out
        of work, or would have in a moment. It says how often, not for how long; a profile does. Not looked at: the
        first round after the engine was idle, guided rounds, and one behind a prompt's chunk that is not its last.
      device_seconds: time the host waited for results. host_seconds: the rest of the steps' time.
      switches: rounds whose tier differs from the one before. rounds_by_tier: {tier name: rounds}.
      lossless: whether outputs have the target's distribution (False under typical verification).
    """

    warmup_seconds: float
    startup_seconds: float
    executables: int
    executables_ready: int
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
    running: int
    waiting: int
    active_tier: str
    guided_rounds: int = 0


def _advance_idle(engine: Callable[[], Engine | None]) -> bool | None:
    """A piece of an engine's warm-up, where nobody steps it: for Warmup.attend."""
    alive = engine()
    if alive is None or alive.warm:
        return None
    if alive._step_wanted or (alive.has_work and time.perf_counter() - alive._stepped_at < _RESTS_SECONDS):
        return False
    with alive._stepping:
        return alive._advance_warmup()


def _deepest(requests: Sequence[Request]) -> int | None:
    """Most drafts that any of the requests may accept; None where one sets no limit."""
    limits = [request.max_depth for request in requests]
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


class Engine:
    """Continuous batching with adaptive speculative decoding.

    Args:
      runner: compiled executables and device state.
      scheduler: owns pages and slots.
      build_policy: builds the configured policy from the costs known so far.
      tokenizer: None for token-in, token-out use (no text, no stop strings).
      eos: token ids that end a text.
      seed: base of the seeds of requests that bring none.
      began: when building the engine began, on time.perf_counter's clock.
      cost: measured seconds of the rounds, where the policy needs them; what the warm-up measures is added.
      traffic_log: file to append finished requests to (see EngineConfig).
      grammars: compiles what requests may bring as their grammar; None: this engine takes none.

    Attributes:
      on_round: hears every finished round, between the dispatch of one and the next; None: nobody does.

    Raises:
      ValueError: a traffic_log that cannot be appended to.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, build_policy: Callable[[CostTable | None], TierPolicy],
        buckets: Sequence[int], tokenizer: Tokenizer | None, eos: Sequence[int], seed: int, began: float,
        cost: CostTable | None,
        traffic_log: str | Path | None = None, grammars: GrammarCompiler | None = None,
    ):  # fmt: skip
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self._build_policy, self.cost, self.grammars = build_policy, cost, grammars
        self._buckets, self._eos, self._seed = tuple(buckets), frozenset(eos), seed
        self.use_policy(self.new_policy())
        self._streams: dict[str, _Stream] = {}
        self._in_flight: list[Pending] = []
        self._serial = 0
        self._prompt: tuple[Sequence[int], list[int]] = ((), [])
        self._steps = self._rounds = self._starved = self._guided = 0
        self._chunk_last = False  # the latest dispatch was a chunk of which nothing is read
        self._waited = self._worked = self._collected_at = 0.0
        self._began, self._startup_seconds = began, time.perf_counter() - began
        self._warmup_seconds: float | None = None
        self._compilations = CompileCounter()
        self.on_round: Callable[[RoundStats], None] | None = None
        self._traffic = None if traffic_log is None else TrafficLog(traffic_log)
        self._stepping = threading.Lock()
        self._step_wanted, self._stepped_at = False, 0.0  # whether a thread is in `step`; when one last was
        if runner.warm:
            self._warmup_seconds = self._startup_seconds
        else:
            _log.info(
                "ready after %.1f s with %d of %d executables; the others are compiled in the background",
                self._startup_seconds, runner.num_ready, runner.num_executables,
            )  # fmt: skip
            runner.attend(functools.partial(_advance_idle, weakref.ref(self)))

    def new_policy(self) -> TierPolicy:
        """The configured policy, afresh."""
        return self._build_policy(self.cost)

    def use_policy(self, policy: TierPolicy, recorder: Recorder | None = None) -> None:
        """From the next step on, `policy` chooses the tier; its counters start anew. Requests may be under way.

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
        self.controller: AdaptiveController[SpecRuntimeState] = AdaptiveController(
            policy, self.runner.states, recorder, ready=self.runner.ready
        )

    # Requests.

    def add(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, prompt: str | None = None, index: int = 0,
        request_id: str | None = None, arrival_time: float | None = None, priority: int = 0,
        max_depth: int | None = None, grammar: Grammar | None = None,
    ) -> str:  # fmt: skip
        """Queues one completion and returns its id.

        Args:
          prompt: the text of the prompt, for the output.
          index: which of the prompt's completions; added to the seed.
          request_id: unique among live requests; None: one is made up.
          arrival_time: on time.monotonic's clock, where it came before now; it orders the queue.
          priority, max_depth: see Request.
          grammar: what the text has to be, compiled by `grammars`. The request ends with FinishReason.STOP as soon as
            the text is complete and nothing may follow, with LENGTH where max_tokens cuts it before.

        Raises:
          ValueError: the prompt or the parameters do not fit this engine; nothing was queued.
        """
        tokens = self._checked(prompt_token_ids)
        params.check_vocabulary(self.runner.config.vocab_size)
        if not params.plain_greedy and True not in self.runner.variants:
            raise ValueError("this engine has variants ('greedy',) only, and these parameters need 'sampled'")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {params.stop!r} need a tokenizer, and this engine has none")
        if params.masks_stop_tokens and len(self._eos) > 8:
            raise ValueError(f"min_tokens can ban 8 end tokens of the checkpoint, but it has {len(self._eos)}")
        if grammar is not None:
            self._check_grammar(grammar, params)
        serial = self._serial
        request_id = f"request-{serial}" if request_id is None else request_id
        seed = (self._seed + serial if params.seed is None else params.seed + index) % 2**32
        request = Request(
            request_id,
            tokens,
            params,
            seed,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            max_depth=max_depth,
        )
        # Whatever can fail comes before the scheduler has the request.
        detokenizer = stops = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            stops = StopChecker(
                params.stop, include_stop_str_in_output=params.include_stop_str_in_output, min_tokens=params.min_tokens
            )
        stream = _Stream(
            request, prompt, index, detokenizer, stops, matcher=None if grammar is None else grammar.matcher()
        )
        self.scheduler.add(request)
        self._streams[request_id] = stream
        self._serial += 1
        return request_id

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """A copy of the prompt, whose tokens are looked at once for all its completions.

        Raises:
          ValueError: a token that is no integer or not of the vocabulary.
        """
        source, tokens = self._prompt
        if prompt is source and list(prompt) == tokens:
            return list(tokens)
        vocab, tokens = self.runner.config.vocab_size, list(prompt)
        if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= vocab):
            for token in tokens:
                integral = isinstance(token, numbers.Integral) and not isinstance(token, bool)
                if not integral or not 0 <= int(token) < vocab:
                    raise ValueError(f"prompt token ids must lie in [0, {vocab}), got {token!r}")
            return [int(token) for token in tokens]
        self._prompt = prompt, tokens
        return list(tokens)

    def _check_grammar(self, grammar: Grammar, params: SamplingParams) -> None:
        if self.grammars is None:
            raise ValueError(
                "a grammar needs an engine with EngineConfig.structured_output and a tokenizer that serves grammars"
            )
        if grammar.vocab_size != self.runner.config.vocab_size:
            raise ValueError(
                f"the grammar was compiled for {grammar.vocab_size} tokens, "
                f"but this engine's vocabulary has {self.runner.config.vocab_size}"
            )
        if params.min_tokens:
            raise ValueError(
                f"min_tokens must be 0 with a grammar, which says when a text ends, got {params.min_tokens}"
            )

    def abort(self, request_id: str) -> StreamDelta | None:
        """Ends a request at once; its slot and pages are free for the next step. None if it is not live."""
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        return self._finish(stream, FinishReason.ABORT, [], "")

    def request(self, request_id: str) -> Request | None:
        """The live request of this id, the engine's own: to be read between two steps. None if it is not live."""
        stream = self._streams.get(request_id)
        return None if stream is None else stream.request

    def flush_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many pages that freed. Live requests keep theirs."""
        return self.scheduler.flush_prefix_cache()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    # The step.

    def step(self) -> list[StreamDelta]:
        """Dispatches the next prefill chunk and round, and commits the ones dispatched a step before."""
        self._step_wanted = True
        try:
            with self._stepping:
                if self._warmup_seconds is None and self._steps % _STEPS_PER_ADVANCE == 0:
                    self._advance_warmup()
                return self._step()
        finally:
            self._stepped_at, self._step_wanted = time.perf_counter(), False

    # Warming up, beside requests or between them.

    @property
    def warm(self) -> bool:
        """Whether every executable has come; until then requests run with those that have."""
        return self._warmup_seconds is not None

    def wait_until_warm(self) -> None:
        """Returns when every executable has come and was timed; requests may run meanwhile, from other threads."""
        while not self.warm:
            if not _advance_idle(lambda: self):
                time.sleep(0.01)

    def stop_warmup(self) -> None:
        """Compiles nothing more; requests go on with what there is."""
        self.runner.stop_warmup()

    def _advance_warmup(self) -> bool:
        """One piece of it, between two steps; whether there was anything to do. What fails ends it, and no request."""
        runner = self.runner
        known = dict(runner.costs)
        try:
            if not runner.advance():
                if runner.warm and self._warmup_seconds is None:
                    self._end_warmup(runner.warmup_error)
                return False
            for (tier, bucket), seconds in runner.costs.items():
                if known.get((tier, bucket)) != seconds:
                    self.controller.policy.learn(tier, bucket, seconds)
        except Exception as e:
            self._end_warmup(e)
            return False
        if runner.costs != known:
            self.cost = CostTable(runner.costs)
        for pending in self._in_flight:
            pending.timed = False  # its result is read later than it came
        return True

    def _end_warmup(self, error: BaseException | None) -> None:
        self._warmup_seconds = time.perf_counter() - self._began
        have = f"{self.runner.num_ready} of {self.runner.num_executables} executables"
        if error is None:
            _log.info("warm after %.1f s: %s", self._warmup_seconds, have)
        else:
            self.runner.stop_warmup()
            _log.warning("the warm-up ends after %.1f s with %s: %s", self._warmup_seconds, have, error)

    def _step(self) -> list[StreamDelta]:
        began = time.perf_counter()
        waited = self._waited
        plan = self.scheduler.plan()
        dispatched = self._dispatch(plan)
        previous, self._in_flight = self._in_flight, dispatched
        if any(self._is_guided(pending) for pending in dispatched):
            # What a constrained text may go on with is known once its last token is: nothing of it stays in flight.
            previous, self._in_flight = [*previous, *dispatched], []
        deltas = [delta for pending in previous for delta in self._commit(pending)]
        self._steps += 1
        self._worked += time.perf_counter() - began - (self._waited - waited)
        return deltas

    def _dispatch(self, plan: Plan) -> list[Pending]:
        dispatched, growth = [], 0
        if plan.decode:
            # One round, but for batches larger than what is compiled so far.
            most = self.runner.largest_ready()
            for first in range(0, len(plan.decode), most):
                pending = self._dispatch_round(plan.decode[first : first + most])
                dispatched.append(pending)
                assert pending.tier is not None
                growth = max(growth, pending.tier.depth + 1)
            # Looked at last: building the plan and the call itself take the host's time. Guided, the call waits.
            watched = bool(self._in_flight) and not self._chunk_last and not any(map(self._is_guided, dispatched))
            self._starved += watched and self._in_flight[-1].is_ready
        self._chunk_last = plan.prefill is not None and not plan.prefill.is_last
        if plan.prefill is not None:
            matcher = self._streams[plan.prefill.request.request_id].matcher
            allowed = matcher.root if matcher is not None and plan.prefill.is_last else None
            pending = self.runner.prefill(plan.prefill, allowed)
            if pending is not None:
                dispatched.append(pending)
        self.scheduler.dispatched(plan, growth)
        return dispatched

    def _dispatch_round(self, rows: Sequence[DecodeRow]) -> Pending:
        runner = self.runner
        bucket = next(b for b in self._buckets if b >= len(rows) and any(runner.ready(t, b) for t in runner.states))
        context = sum(row.request.num_computed for row in rows)
        tier, state = self.controller.select(
            BatchView(len(rows), bucket, context, time.monotonic(), _deepest([row.request for row in rows]))
        )
        catch_up, guide = self._behind(rows, tier, bucket), self._guide(rows)
        self._guided += guide is not None
        return runner.dispatch(rows, state, bucket, catch_up=catch_up, guide=guide)

    def _guide(self, rows: Sequence[DecodeRow]) -> Guide | None:
        """What the rows may say; None where no grammar says anything."""
        matchers = [self._streams[row.request.request_id].matcher for row in rows]
        return Guide(matchers, self.runner.config.vocab_size) if any(matchers) else None

    def _is_guided(self, pending: Pending) -> bool:
        return any(self._streams[request.request_id].matcher is not None for request, _ in pending.rows)

    def _behind(self, rows: Sequence[DecodeRow], tier: Tier, bucket: int) -> bool:
        """Counts what each row's drafter has not consumed; whether it must, and can, catch up before this round."""
        drafter = self.runner.drafter
        if drafter is None or not drafter.has_cache:
            return False
        streams = [self._streams[row.request.request_id] for row in rows]
        behind = tier.depth > 0 and any(stream.unseen > drafter.window for stream in streams)
        lost = behind and not self.runner.can_catch_up(bucket)
        for stream in streams:
            if lost and stream.unseen > drafter.window:
                stream.request.cacheable_generated = False
            stream.unseen = tier.depth + 1 if tier.depth else stream.unseen + 1
            # Beyond what it can catch up its cache lacks entries: such pages are no prefix to reuse.
            if stream.unseen > drafter.window + drafter.catch_up_tokens:
                stream.request.cacheable_generated = False
        return behind and not lost

    def _commit(self, pending: Pending) -> list[StreamDelta]:
        began = time.perf_counter()
        results = self.runner.collect(pending)
        now = time.perf_counter()
        self._waited += now - began
        if pending.tier is not None:
            self._rounds += 1
            depth = pending.tier.depth
            whole = [result for result in results if result.request.draft_limit(depth) == depth]
            stats = RoundStats(
                tier=pending.tier,
                batch_size=len(results),
                bucket=pending.bucket,
                num_accepted=tuple(len(result.tokens) - 1 for result in whole),
                seconds=now - max(pending.dispatched_at, self._collected_at) if pending.timed else 0.0,
                context_tokens=pending.context_tokens,
            )
            if pending.tier in self.controller.policy.tiers:  # else a policy before this one chose it
                self.controller.observe(stats)
            if self.on_round is not None:
                self.on_round(stats)
        self._collected_at = now
        deltas = [self._commit_row(pending.tier, result) for result in results]
        return [delta for delta in deltas if delta is not None]

    def _commit_row(self, tier: Tier | None, result: RowResult) -> StreamDelta | None:
        request = result.request
        if result.epoch != request.epoch:
            return None
        stream = self._streams[request.request_id]
        if not result.finite:
            return self._fail(stream, ErrorKind.NON_FINITE, "the target's logits are not finite")
        tokens, matcher = result.tokens, stream.matcher
        if matcher is not None:
            tokens = tokens[: matcher.take(tokens)]
            if matcher.error is not None:
                return self._fail(stream, ErrorKind.GRAMMAR, f"the grammar failed: {matcher.error}")
        if tier is not None:
            limit = request.draft_limit(tier.depth)
            drafted = tier.num_nodes - 1 if limit == tier.depth else limit
            request.metrics.record_round(tier.name, drafted, len(result.tokens) - 1)
        kept, text, reason = self._until_stop(stream, tokens)
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
            whole = stream.matcher is not None and stream.matcher.complete and count == len(tokens)
            if whole and token in self._eos:
                # It says that the text is over, and is no part of it.
                return tokens, text + self._flush(stream), FinishReason.STOP
            if stream.detokenizer is not None and stream.stops is not None:
                settled = stream.stops.feed([stream.detokenizer.feed(token)])
                text += settled.text
                if settled.stop is not None:
                    stream.stop_reason = settled.stop
                    return tokens[:count], text, FinishReason.STOP
            if whole:
                return tokens, text + self._flush(stream), FinishReason.STOP
            if total >= params.max_tokens:
                return tokens[:count], text + self._flush(stream), FinishReason.LENGTH
        return tokens, text, None

    def _flush(self, stream: _Stream) -> str:
        if stream.detokenizer is None or stream.stops is None:
            return ""
        return stream.stops.flush(stream.detokenizer.flush())

    def _fail(self, stream: _Stream, kind: ErrorKind, message: str) -> StreamDelta:
        """Ends a request whose result in hand is worth nothing."""
        request = stream.request
        request.error, request.error_kind = message, kind
        self.scheduler.commit(request, request.epoch, ())
        return self._finish(stream, FinishReason.ERROR, [], "")

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
            error_kind=request.error_kind,
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
            warmup_seconds=time.perf_counter() - self._began if self._warmup_seconds is None else self._warmup_seconds,
            startup_seconds=self._startup_seconds,
            executables=self.runner.num_executables,
            executables_ready=self.runner.num_ready,
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
            running=s.running,
            waiting=s.waiting,
            active_tier="" if self.controller.active is None else self.controller.active.name,
            guided_rounds=self._guided,
        )

    @property
    def max_batch_size(self) -> int:
        """Requests decoded together."""
        return self.scheduler.config.max_batch_size

    @property
    def max_seq_len(self) -> int:
        """Most tokens of a prompt and its output."""
        return self.scheduler.config.max_seq_len

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.scheduler.config.num_pages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.scheduler.config.page_size

    @property
    def pool_bytes(self) -> int:
        """Bytes of the target's pool of keys and values, over all devices."""
        return self.runner.state.pages.nbytes
