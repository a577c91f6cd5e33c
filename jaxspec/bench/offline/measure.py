"""Runs workloads on an engine and records what happened.

Owns the loop that keeps a batch full, the order of runs and the clock. Must not know how an
engine is built, what the records mean, or how they are printed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.offline.metrics import ADAPTIVE, PLAIN_MODE, STEADY_ROUNDS, Completion, Round, Run
from jaxspec.bench.offline.workloads import Library, Passage, queue
from jaxspec.engine import Engine
from jaxspec.events import Delta, Finished
from jaxspec.request import FinishReason, SamplingParams
from jaxspec.tier import Choice, Tier

#: Tokens a request of the unrecorded runs that come first.
WARM_TOKENS = 8
#: Batches of requests of a run, where the plan leaves it open.
_WAVES = (2, 6)
#: Tokens a round and request by which the length of the queues is chosen.
_TYPICAL_LENGTH = 4.0
#: More rounds are planned for than a steady state needs, by this factor.
_SPARE = 1.5


class Observed:
    """A policy that behaves like another one and keeps the stats of finished rounds for `take`."""

    def __init__(self, policy: TierPolicy):
        self.policy = policy
        self.tiers = policy.tiers
        self._stats: list[RoundStats] = []

    def select(self, view: BatchView) -> Tier | Choice:
        """The policy's choice."""
        return self.policy.select(view)

    def observe(self, stats: RoundStats) -> None:
        """Keeps the round and passes it on."""
        self._stats.append(stats)
        self.policy.observe(stats)

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Passes a measured cost on."""
        self.policy.learn(tier, bucket, seconds, tokens)

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """The policy's."""
        return self.policy.buckets_for(tier, buckets)

    def take(self) -> list[RoundStats]:
        """The rounds since the last call."""
        taken, self._stats = self._stats, []
        return taken


@dataclasses.dataclass(frozen=True)
class Mode:
    """What is compared: a fixed tier, or the engine's own policy (tier None)."""

    name: str
    tier: Tier | None

    def policy(self, engine: Engine) -> TierPolicy:
        """A fresh policy, so that no run profits from the one before."""
        return engine.new_policy() if self.tier is None else StaticPolicy(self.tier)


def modes_of(engine: Engine, adaptive: bool = True) -> list[Mode]:
    """Plain decoding, every static tier that the engine compiled, then its adaptive policy."""
    tiers = sorted(engine.runner.states)
    modes = [Mode(PLAIN_MODE if tier.depth == 0 else tier.name, tier) for tier in tiers]
    return [*modes, Mode(ADAPTIVE, None)] if adaptive and len(tiers) > 1 else modes


@dataclasses.dataclass(frozen=True)
class FixedRequest:
    """A prompt as the engine takes it."""

    prompt: Passage
    token_ids: tuple[int, ...]
    params: SamplingParams


@dataclasses.dataclass
class _Live:
    """A request on its way: submitted at, time of the last tokens, what came."""

    place: int
    job: FixedRequest
    submitted: float
    last: float = 0.0
    ttft: float | None = None
    gaps: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def take(self, delta: Delta, now: float) -> int:
        """Notes the delta; returns how many of its tokens came from rounds (the first one is the prefill's)."""
        count = len(delta.token_ids)
        if not count:
            return 0
        if self.ttft is None:
            self.ttft, count = now - self.submitted, count - 1
        else:
            self.gaps.append((now - self.last, count))
        self.last = now
        return count


def run_queue(
    engine: Engine, mode: Mode, jobs: Sequence[FixedRequest], *, workload: str, batch_size: int, repeat: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:  # fmt: skip
    """Sends the jobs so that `batch_size` of them are always on their way, and waits for all.

    Raises:
      RuntimeError: the engine ended a request with an error.
    """
    watch = Observed(mode.policy(engine))
    engine.use_policy(watch)
    waiting = list(enumerate(jobs))
    live: dict[str, _Live] = {}
    rounds: list[Round] = []
    done: dict[int, Completion] = {}
    began = now = clock()
    while waiting or live:
        while waiting and len(live) < batch_size:
            place, job = waiting.pop(0)
            live[engine.add(job.token_ids, job.params)] = _Live(place, job, clock())
        kinds = Counter(request.job.prompt.kind for request in live.values() if request.ttft is not None)
        events = engine.step()
        now = clock()
        kept = 0
        for event in events:
            match event:
                case Delta():
                    kept += live[event.request_id].take(event, now)
                case Finished():
                    request = live.pop(event.request_id)
                    done[request.place] = _completion(request, event)
        rounds += _rounds(watch.take(), kept, kinds)
    while engine.has_work:  # a round may still be in flight for requests that have ended
        engine.step()
    ordered = tuple(done[place] for place in range(len(jobs)))
    return Run(workload, batch_size, mode.name, repeat, now - began, tuple(rounds), ordered)


def _completion(request: _Live, end: Finished) -> Completion:
    if end.reason is FinishReason.ERROR:
        raise RuntimeError(f"{end.request_id}: the engine ended it with an error (logits that are not finite)")
    assert request.ttft is not None
    prompt = request.job.prompt
    return Completion((prompt.kind, prompt.index), request.ttft, tuple(request.gaps), tuple(end.output.token_ids))


def _rounds(stats: Sequence[RoundStats], kept: int, kinds: Counter[str]) -> Iterator[Round]:
    """The rounds that a step finished; the kept tokens are noted with the last of them."""
    kind = kinds.most_common(1)[0][0] if kinds else ""
    for i, s in enumerate(stats, start=1):
        tokens = kept if i == len(stats) else 0
        name = PLAIN_MODE if s.tier.depth == 0 else s.tier.name
        # Which of several dispatches gave which tokens is not known: then none has a time.
        seconds = s.seconds if s.seconds > 0 and len(stats) == s.dispatched else None
        yield Round(name, s.tier.depth, s.batch_size, kind, seconds, tokens, s.num_accepted, s.experts)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
      max_tokens: generated by each request, the end of text ignored.
      temperature: 0 is greedy; above, seeds are fixed by prompt.
      waves: requests of a run, in batches; None: as many as a steady state is likely to need, within `_WAVES`.
    """

    batch_sizes: tuple[int, ...]
    workloads: tuple[str, ...]
    max_tokens: int
    repeats: int
    temperature: float = 0.0
    waves: int | None = None

    def waves_of(self, batch_size: int) -> int:
        """Batches of requests that a run sends, each request as soon as a place is free.

        A request lives for so many rounds. The first wave fills the batch by a request a round; later on requests end
        at any time, and a round is steady only if none ended in the three rounds up to it.
        """
        if self.waves is not None:
            return self.waves
        life = self.max_tokens / _TYPICAL_LENGTH
        first, later = max(0.0, life - batch_size), life * math.exp(-3 * batch_size / life)
        missing = max(0.0, _SPARE * STEADY_ROUNDS / self.repeats - first)
        least, most = _WAVES
        return most if missing > (most - 1) * later else max(least, 1 + math.ceil(missing / later))


@dataclasses.dataclass
class Experiment:
    """An engine with prompts and a plan.

    Attributes:
      library: prompts by kind.
      token_ids: the tokens of each prompt, by (kind, index).
      modes: what is compared.
      runs: what was recorded so far.
      estimate: seconds that `measure` will take, known after `warm_up`.
    """

    engine: Engine
    library: Library
    token_ids: dict[tuple[str, int], tuple[int, ...]]
    plan: Sweep
    modes: list[Mode]
    runs: list[Run] = dataclasses.field(default_factory=list)
    estimate: float = 0.0

    @property
    def num_runs(self) -> int:
        """Recorded runs of the whole plan."""
        plan = self.plan
        return len(plan.batch_sizes) * len(plan.workloads) * len(self.modes) * plan.repeats

    def jobs(self, workload: str, batch_size: int, repeat: int, max_tokens: int) -> list[FixedRequest]:
        """One run's prompts; equal prompts have equal seeds in every mode, batch size and repeat."""
        waves = self.plan.waves_of(batch_size)
        return [self.job(prompt, max_tokens) for prompt in queue(workload, batch_size, repeat, self.library, waves)]

    def job(self, prompt: Passage, max_tokens: int) -> FixedRequest:
        """One prompt as a request of fixed length."""
        params = SamplingParams(
            temperature=self.plan.temperature, max_tokens=max_tokens, ignore_eos=True, seed=prompt.index
        )
        return FixedRequest(prompt, self.token_ids[prompt.kind, prompt.index], params)

    def warm_up(self) -> None:
        """A short unrecorded run of each mode and batch size; their speed gives the estimate."""
        tokens = min(WARM_TOKENS, self.plan.max_tokens)
        workload = self.plan.workloads[0]
        self.estimate = 0.0
        for batch_size in self.plan.batch_sizes:
            jobs = self.jobs(workload, batch_size, 0, tokens)[:batch_size]
            sent = sum(len(self.jobs(w, batch_size, 0, tokens)) for w in self.plan.workloads) / batch_size
            for mode in self.modes:
                run = run_queue(self.engine, mode, jobs, workload=workload, batch_size=batch_size)
                per_token = statistics.mean(c.tpot or 0.0 for c in run.completions)
                once = run.seconds + per_token * (self.plan.max_tokens - tokens)
                self.estimate += once * sent * self.plan.repeats

    def measure(self) -> Iterator[Run]:
        """Yields each run of the plan once it is recorded. Repeats are outside, modes inside, in rotated order."""
        for repeat in range(self.plan.repeats):
            for batch_size in self.plan.batch_sizes:
                for workload in self.plan.workloads:
                    jobs = self.jobs(workload, batch_size, repeat, self.plan.max_tokens)
                    turn = repeat % len(self.modes)
                    for mode in (*self.modes[turn:], *self.modes[:turn]):
                        run = run_queue(
                            self.engine, mode, jobs, workload=workload, batch_size=batch_size, repeat=repeat
                        )
                        self.runs.append(run)
                        yield run
