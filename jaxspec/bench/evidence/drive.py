"""Runs one policy on an engine under a load for some time, and notes what a simulation notes.

Owns the loop and the clock. Must not know how engines and policies are made, or what the notes mean.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from jaxspec.adaptive.policy import BatchView, DraftLabels, RoundStats, TierPolicy
from jaxspec.bench.evidence.loads import Load
from jaxspec.bench.simulate.records import Outcome, Ran, Served
from jaxspec.engine import Engine
from jaxspec.events import Delta, Finished
from jaxspec.request import FinishReason, SamplingParams
from jaxspec.tier import Choice, Tier, as_choice

#: What a confidence is kept from 0 and 1 by, as on the device (speculation.budget.EDGE).
_EDGE = 1e-4
#: Prompts of a kind as token ids, in the order in which they are sent.
Texts = Mapping[str, Sequence[tuple[int, ...]]]


class Watched:
    """A policy that behaves like another one; notes its rounds, its processor time and what it expected."""

    def __init__(self, policy: TierPolicy) -> None:
        self.policy, self.tiers = policy, policy.tiers
        self.rounds: list[RoundStats] = []
        self.seconds: list[float] = []
        self.expected = self.accepted = 0.0
        self.predicted: list[float] = []
        self.actual: list[bool] = []
        self._asked: deque[tuple[Choice, float | None]] = deque()
        self._expects = getattr(policy, "expected_tokens", None)

    def select(self, view: BatchView) -> Tier | Choice:
        """The policy's choice."""
        began = time.thread_time()
        chosen = self.policy.select(view)
        self.seconds.append(time.thread_time() - began)
        choice = as_choice(chosen)
        known = self._expects is not None and choice.tokens is None
        self._asked.append((choice, self._expects(choice.tier, view.bucket) if known and self._expects else None))
        return chosen

    def observe(self, stats: RoundStats) -> None:
        """Passes the round on; rounds are heard of in the order in which they were chosen."""
        began = time.thread_time()
        self.policy.observe(stats)
        self.seconds[-1] += time.thread_time() - began
        self.rounds.append(stats)
        while self._asked:
            choice, expected = self._asked.popleft()
            if (choice.tier, choice.tokens) == (stats.tier, stats.tokens):
                break
        else:
            return  # the engine exchanged it
        if expected is not None and stats.num_accepted:
            self.expected += expected * len(stats.num_accepted)
            self.accepted += sum(stats.num_accepted) + len(stats.num_accepted)
        if stats.drafts is not None and stats.tier.is_chain:
            predicted, actual = survivals(stats.drafts, stats.tier.depth, choice.calibration)
            self.predicted += predicted
            self.actual += actual

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Passes a measured cost on."""
        self.policy.learn(tier, bucket, seconds, tokens)

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """The policy's."""
        return self.policy.buckets_for(tier, buckets)


def survivals(
    drafts: DraftLabels, depth: int, calibration: Sequence[tuple[float, float]]
) -> tuple[list[float], list[bool]]:
    """The chance of surviving that a calibration gives each draft of chains, and whether it would have.

    A draft behind one that a budget left out has no label, and is left out here too.
    """
    predicted: list[float] = []
    actual: list[bool] = []
    for first in range(0, len(drafts.confidence), drafts.nodes):
        alive = chances(drafts.confidence[first : first + depth], depth, calibration)
        stands = True
        for node, chance in zip(range(first, first + depth), alive, strict=True):
            if stands and not drafts.known[node]:
                break
            stands = stands and bool(drafts.right[node])
            predicted.append(chance)
            actual.append(stands)
    return predicted, actual


def chances(confidences: Iterable[float], depth: int, calibration: Sequence[tuple[float, float]]) -> list[float]:
    """The chance that each draft of a chain is accepted with all before it, as the device has it."""
    fit = [*calibration[:depth], *[(1.0, 0.0)] * (depth - len(calibration))]
    inside = (min(1 - _EDGE, max(_EDGE, c)) for c in confidences)
    rates = (1 / (1 + math.exp(-(a * math.log(p / (1 - p)) + b))) for (a, b), p in zip(fit, inside, strict=True))
    return list(accumulate(rates, operator.mul))


@dataclasses.dataclass
class Run:
    """What a run gave.

    Attributes:
      outcome: as of a simulation; rounds have no value yet.
      texts: completions that ended, by (kind, prompt).
      accepted: accepted drafts of rows that drafted to the whole depth, by (kind of phase, depth).
    """

    outcome: Outcome
    texts: dict[tuple[str, int], tuple[int, ...]]
    accepted: dict[tuple[str, int], list[int]]


@dataclasses.dataclass
class _Live:
    """A request under way: its place, what it writes, when it came and when it began to answer."""

    place: int
    prompt: tuple[str, int]
    arrival: float
    first: float | None = None
    tokens: int = 0


def run(
    engine: Engine, policy: TierPolicy, load: Load, texts: Texts, seconds: float, max_tokens: int,
    temperature: float = 0.0, clock: Callable[[], float] = time.perf_counter,
) -> Run:  # fmt: skip
    """Keeps the load's places full for so many seconds. Every run sends the same prompts in the same order.

    Raises:
      RuntimeError: the engine ended a request with an error.
    """
    watch = Watched(policy)
    engine.use_policy(watch)
    mixture = engine.runner.config.experts
    layers = 1 if mixture is None else len(mixture.layers)
    done, live = Run(Outcome(), {}, {}), dict[str, _Live]()
    out, sent, heard, phase = done.outcome, dict[str, int](), 0, 0
    began = clock()
    while (now := clock() - began) < seconds:
        if load.phase(now) != phase:
            phase = load.phase(now)
            if load.cuts:
                for request_id in live:
                    engine.abort(request_id)
                live.clear()
        taken = {request.place for request in live.values()}
        for place in set(range(load.places(phase))) - taken:
            kind = load.kind(phase, place)
            number = sent.get(kind, 0)
            sent[kind] = number + 1
            at = number % len(texts[kind])
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=at)
            live[engine.add(texts[kind][at], params)] = _Live(place, (kind, at), now)
        size = len(live)
        events = engine.step()
        now, kept = clock() - began, 0
        for event in events:
            if event.request_id not in live:
                continue
            request = live[event.request_id]
            match event:
                case Delta():
                    kept += len(event.token_ids) - (request.first is None)
                    out.tokens += len(event.token_ids)
                    request.tokens += len(event.token_ids)
                    request.first = now if request.first is None else request.first
                case Finished():
                    if event.reason is FinishReason.ERROR:
                        raise RuntimeError(f"{event.request_id}: the engine ended it with an error")
                    assert request.first is not None
                    out.served.append(Served(request.arrival, request.first, now, request.tokens))
                    done.texts[request.prompt] = tuple(event.output.token_ids)
                    del live[event.request_id]
        new, heard = watch.rounds[heard:], len(watch.rounds)
        for stats in new:
            gained = sum(stats.num_accepted) + len(stats.num_accepted)
            out.rounds.append(
                Ran(now, phase, stats.tier.depth, stats.tokens, stats.batch_size, stats.bucket, stats.seconds, gained,
                    math.nan, math.nan, stats.experts / layers)
            )  # fmt: skip
            if stats.tokens is None and stats.tier.depth and size == load.places(phase):
                done.accepted.setdefault((load.kind(phase, 0), stats.tier.depth), []).extend(stats.num_accepted)
    out.seconds, out.unfinished = clock() - began, len(live)
    for request_id in live:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    out.switches, out.controller = engine.controller.switches, watch.seconds
    out.predicted, out.actual = watch.predicted, watch.actual
    out.expected, out.accepted = watch.expected, watch.accepted
    return done


def valued(load: Load, runs: Mapping[str, Outcome], fixed: Iterable[str]) -> None:
    """Gives every round its value and the best fixed tier's: tokens a second, as measured in phases that are alike.

    A tier's is that of its own fixed run; of a packed round that of all rounds like it in the same run.
    """
    tiers = {
        key: speed for name in fixed for key, speed in _speeds(load, runs[name]).items()
    }  # fmt: skip
    best: dict[str, float] = {}
    for (alike, *_), speed in tiers.items():
        best[alike] = max(best.get(alike, 0.0), speed)
    for outcome in runs.values():
        own = _speeds(load, outcome)
        rounds = []
        for r in outcome.rounds:
            alike = load.key(r.phase)
            key = alike, r.depth, r.tokens
            value = tiers.get(key, own.get(key))
            if value is not None and alike in best:
                rounds.append(dataclasses.replace(r, value=value, best=best[alike]))
        outcome.rounds = rounds


def _speeds(load: Load, outcome: Outcome) -> dict[tuple[str, int, int | None], float]:
    """Tokens a second of timed rounds by what they did in which kind of phase."""
    sums: dict[tuple[str, int, int | None], list[float]] = {}
    for r in outcome.rounds:
        if r.seconds > 0:
            cell = sums.setdefault((load.key(r.phase), r.depth, r.tokens), [0.0, 0.0])
            cell[0], cell[1] = cell[0] + r.gained, cell[1] + r.seconds
    return {key: gained / seconds for key, (gained, seconds) in sums.items()}
