"""An engine without a model, for `jaxspec.bench.online.overhead`: rounds of a given length on a device that sleeps.

As `Engine.step` does, a step dispatches a round, waits for the one before it and says what that gave; its host's work
is computing, in Python, and its device's is sleeping. So what serving adds shows on any machine, in wall time and in
the processor's, without noise of kernels. Every request gets the same token again and again. Owns the stub's clockwork;
must not know servers.
"""

from __future__ import annotations

import dataclasses
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.adaptive.policy import RoundStats, TierPolicy
from jaxspec.events import Delta, Event, Finished, Started
from jaxspec.facts import EngineFacts
from jaxspec.request import CompletionOutput, FinishReason, Request, RequestMetrics, RequestOutput, SamplingParams
from jaxspec.sizes import Sizes
from jaxspec.stats import EngineStats
from jaxspec.tier import PLAIN

_TOKEN, _TEXT, _VOCAB = 7, " word", 32_000
_PAGE, _CONTEXT = 16, 2048


@dataclasses.dataclass(frozen=True)
class Stub:
    """What the stub is like.

    Attributes:
      round_seconds: of the device. host_seconds: of the engine's own Python, each round.
      slots: requests decoded together.
    """

    round_seconds: float = 1.3e-3
    host_seconds: float = 0.3e-3
    slots: int = 64

    def build(self, on_compiled: Any) -> Any:
        """The engine, which has nothing to compile."""
        return StubEngine(self)


class StubEngine:
    """As much of an Engine as a server and the offline side of the overhead's measurement use."""

    def __init__(self, stub: Stub):
        self.stub = stub
        pages = -(-(_CONTEXT + 1) // _PAGE)
        sizes = Sizes(stub.slots, stub.slots * pages, _PAGE, pages, 0, _CONTEXT)
        self.facts = EngineFacts(sizes, (stub.slots,), _VOCAB, True, frozenset(), None, None)
        self.on_round: Callable[[RoundStats], None] | None = None
        self.warm = True
        self._waiting: deque[Request] = deque()
        self._live: dict[str, Request] = {}
        self._indices: dict[str, int] = {}
        self._in_flight: list[Request] = []
        self._device_at = 0.0
        self._serial = self._rounds = 0
        # What `serve.api.admin.described` tells.
        pool = types.SimpleNamespace(sharding=types.SimpleNamespace(device_set=()), dtype="none")
        state = types.SimpleNamespace(pages=pool)
        tiers = {PLAIN: self.facts.buckets}
        self.runner = types.SimpleNamespace(drafter=None, state=state, states=tiers, reachable=tiers, weight_bytes=0)
        self.pool_bytes = 0

    def add(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, index: int = 0,
        request_id: str | None = None, arrival_time: float | None = None, priority: int = 0,
        max_depth: int | None = None, tpot: float | None = None, grammar: None = None,
    ) -> str:  # fmt: skip
        """See Engine.add."""
        name = f"request-{self._serial}" if request_id is None else request_id
        arrival = time.monotonic() if arrival_time is None else arrival_time
        request = Request(name, list(prompt_token_ids), params, 0, arrival, priority, max_depth)
        request.max_tokens = self.facts.sizes.allowed(len(prompt_token_ids), params.max_tokens)
        self._waiting.append(request)
        self._indices[name] = index
        self._serial += 1
        return name

    def abort(self, request_id: str) -> Finished | None:
        """See Engine.abort."""
        request = self._live.get(request_id)
        for waiting in tuple(self._waiting):
            if waiting.request_id == request_id:
                request = waiting
                self._waiting.remove(waiting)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def metrics(self, request_id: str) -> RequestMetrics | None:
        """See Engine.metrics."""
        request = self._live.get(request_id)
        return None if request is None else request.metrics

    def use_policy(self, policy: TierPolicy) -> None:
        """See Engine.use_policy; its rounds are what they are."""

    def flush_prefix_cache(self) -> int:
        """See Engine.flush_prefix_cache."""
        return 0

    def close(self) -> None:
        """Nothing goes on beside its steps."""

    @property
    def has_work(self) -> bool:
        """See Engine.has_work."""
        return bool(self._waiting or self._live or self._in_flight)

    def step(self) -> list[Event]:
        """See Engine.step."""
        events: list[Event] = []
        while self._waiting and len(self._live) < self.stub.slots:
            request = self._waiting.popleft()
            self._live[request.request_id] = request
            request.metrics.first_scheduled_time = now = time.monotonic()
            events.append(Started(request.request_id, self._indices[request.request_id], 0, now - request.arrival_time))
        _compute(self.stub.host_seconds / 2)
        previous, self._in_flight = self._in_flight, list(self._live.values())
        ready_at = self._device_at
        if self._in_flight:
            self._device_at = max(time.monotonic(), self._device_at) + self.stub.round_seconds
        if not previous:
            return events
        time.sleep(max(0.0, ready_at - time.monotonic()))
        _compute(self.stub.host_seconds / 2)
        self._rounds += 1
        if self.on_round is not None:
            self.on_round(RoundStats(PLAIN, len(previous), self.stub.slots, (0,) * len(previous)))
        for request in previous:
            if request.request_id in self._live:
                events += self._commit(request)
        return events

    def _commit(self, request: Request) -> list[Event]:
        m = request.metrics
        if m.first_token_time is None:
            m.first_token_time = time.monotonic()
        m.record_rounds(PLAIN.name, 0, [1])
        m.output_tokens += 1
        request.output_token_ids.append(_TOKEN)
        events: list[Event] = [Delta(request.request_id, self._indices[request.request_id], [_TOKEN], _TEXT)]
        if m.output_tokens >= request.max_tokens:
            events.append(self._finish(request, FinishReason.LENGTH))
        return events

    def _finish(self, request: Request, reason: FinishReason) -> Finished:
        self._live.pop(request.request_id, None)
        request.metrics.finished_time = time.monotonic()
        ids, index = request.output_token_ids, self._indices.pop(request.request_id)
        completion = CompletionOutput(index, ids, _TEXT * len(ids), reason)
        output = RequestOutput(request.request_id, None, request.prompt_token_ids, [completion], request.metrics)
        return Finished(request.request_id, index, reason, output)

    @property
    def stats(self) -> EngineStats:
        """See Engine.stats."""
        pages = self.facts.sizes.num_pages
        return EngineStats(
            warmup_seconds=0.0, startup_seconds=0.0, executables=0, executables_ready=0, compilations_after_warmup=0,
            steps=self._rounds, rounds=self._rounds, starved_rounds=0, device_seconds=0.0, host_seconds=0.0, switches=0,
            rounds_by_tier={PLAIN.name: self._rounds}, preemptions=0, prefix_hits=0, prefix_queries=0,
            free_pages=pages, cached_pages=0, lossless=True, running=len(self._live), waiting=len(self._waiting),
            active_tier=PLAIN.name,
        )  # fmt: skip


def _compute(seconds: float) -> None:
    """Works for so much of the processor's time, in the interpreter."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        sum(range(64))
