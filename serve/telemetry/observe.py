"""What is told of every request when it ends, whatever protocol it came by: a line in the log and, if wanted, a span.

Stands between servicers and the generator. Must not know messages of any protocol.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import grpc

from jaxspec.request import RequestMetrics
from serve.config import ServerConfig
from serve.core.engine_thread import EngineThread
from serve.core.errors import StatusError
from serve.core.generator import Chunk, Generator
from serve.core.guarded import Guard
from serve.core.jobs import Chat, Job, Running
from serve.core.tickets import Metrics
from serve.telemetry.logs import event

if TYPE_CHECKING:
    from serve.telemetry.tracing import Tracer

_log = logging.getLogger("serve")


@dataclasses.dataclass
class Outcome:
    """What became of a job.

    Attributes:
      code: its status.
      prompt_tokens, seed: None where it ended before they were known.
      output_tokens: handed to the servicer, over all completions.
      reasons: why its completions ended, by index; only of those that ended by themselves.
      metrics: of the same completions.
      first_after: seconds from the start to the first chunk; None: there was none.
      seconds: from the start to the end.
      tier_switches: of the engine meanwhile.
    """

    code: grpc.StatusCode = grpc.StatusCode.OK
    prompt_tokens: int | None = None
    seed: int | None = None
    output_tokens: int = 0
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    metrics: list[RequestMetrics] = dataclasses.field(default_factory=list)
    first_after: float | None = None
    seconds: float = 0.0
    tier_switches: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        times = [m.ttft for m in self.metrics if m.ttft is not None]
        return min(times) if times else self.first_after

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first, the mean over completions."""
        times = [m.tpot for m in self.metrics if m.tpot is not None]
        return sum(times) / len(times) if times else None

    @property
    def accepted_length(self) -> float | None:
        """Tokens a round over all completions, the bonus included; None before the first round."""
        rounds = sum(m.rounds for m in self.metrics)
        return (sum(m.accepted for m in self.metrics) + rounds) / rounds if rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens; None where nothing was drafted."""
        drafted = sum(m.drafted for m in self.metrics)
        return sum(m.accepted for m in self.metrics) / drafted if drafted else None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, over all completions."""
        return sum(m.cached_prompt_tokens for m in self.metrics)

    @property
    def tier_rounds(self) -> dict[str, int]:
        """Rounds by the tier that ran."""
        total: Counter[str] = Counter()
        for m in self.metrics:
            total.update(m.tier_rounds)
        return dict(total)


class _Watch:
    """One job from its start to its end, which it tells once."""

    def __init__(self, job: Job, switches: Callable[[], int], tell: Callable[[Outcome, StatusError | None, str], None]):
        self._job, self._switches, self._tell = job, switches, tell
        self._began, self._switches_before = time.monotonic(), switches()
        self._outcome: Outcome | None = Outcome()
        self._texts: list[str] = []

    def started(self, generation: Running) -> None:
        if self._outcome is not None:
            self._outcome.prompt_tokens, self._outcome.seed = len(generation.prompt_token_ids), generation.seed

    def take(self, chunk: Chunk) -> None:
        outcome = self._outcome
        if outcome is None:
            return
        if outcome.first_after is None and chunk.token_ids:
            outcome.first_after = time.monotonic() - self._began
        outcome.output_tokens += len(chunk.token_ids)
        if chunk.finish is not None:
            outcome.reasons[chunk.index] = str(chunk.finish.reason)
            outcome.metrics.append(chunk.finish.metrics)
            self._texts.append(chunk.finish.text)

    def end(self, code: grpc.StatusCode, error: StatusError | None = None) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        deadline = self._job.deadline
        if code is grpc.StatusCode.CANCELLED and error is None and deadline is not None:
            # gRPC cancels a call whose deadline passed, without a word.
            code = grpc.StatusCode.DEADLINE_EXCEEDED if time.monotonic() >= deadline else code
        outcome.code = code
        outcome.seconds = time.monotonic() - self._began
        outcome.tier_switches = max(0, self._switches() - self._switches_before)
        self._tell(outcome, error, "\n".join(self._texts))


class _Watched(AsyncIterator[Chunk]):
    """A generation that is watched."""

    def __init__(self, inner: Running, watch: _Watch) -> None:
        self._inner, self._chunks, self._watch = inner, aiter(inner), watch
        self.job, self.prompt_token_ids, self.seed = inner.job, inner.prompt_token_ids, inner.seed

    @property
    def on_stall(self) -> Callable[[], None] | None:
        return self._inner.on_stall

    @on_stall.setter
    def on_stall(self, callback: Callable[[], None] | None) -> None:
        self._inner.on_stall = callback

    async def __anext__(self) -> Chunk:
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            self._watch.end(grpc.StatusCode.OK)
            raise
        except StatusError as e:
            self._watch.end(e.code, e)
            raise
        self._watch.take(chunk)
        return chunk

    def close(self) -> None:
        self._inner.close()
        self._watch.end(grpc.StatusCode.CANCELLED)

    def delivered(self) -> None:
        self._inner.delivered()
        self._watch.end(grpc.StatusCode.CANCELLED)


class ObservedGenerator(Generator):
    """A Generator whose jobs are logged, and traced where there is a tracer.

    Args:
      tracer: None traces nothing, at no cost.
    """

    def __init__(self, engine: EngineThread, config: ServerConfig, metrics: Metrics, tracer: Tracer | None) -> None:
        super().__init__(engine, config, metrics)
        self._tracer, self._log_prompts, self._guard = tracer, config.log_prompts, Guard()

    async def start(self, job: Job) -> Running:
        tracer, spans = self._tracer, []
        if tracer is not None:
            self._guard("the request's span", lambda: spans.append(tracer.start(job)))

        def tell(outcome: Outcome, error: StatusError | None, text: str) -> None:
            self._guard("the request's log", _write, job, outcome, error, text, self._log_prompts)
            for span in spans:
                self._guard("the request's span", span.finish, outcome)

        watch = _Watch(job, self._switches, tell)
        try:
            generation = await super().start(job)
        except BaseException as e:
            refusal = e if isinstance(e, StatusError) else None
            watch.end(grpc.StatusCode.CANCELLED if refusal is None else refusal.code, refusal)
            raise
        watch.started(generation)
        return _Watched(generation, watch)

    def _switches(self) -> int:
        return 0 if self._engine.snapshot is None else self._engine.snapshot.switches


def _write(job: Job, outcome: Outcome, error: StatusError | None, text: str, log_prompts: bool) -> None:
    ms = lambda seconds: None if seconds is None else round(seconds * 1e3, 3)
    length = outcome.accepted_length
    shown: dict[str, object] = {}
    if log_prompts:
        prompt = job.prompt.messages if isinstance(job.prompt, Chat) else job.prompt
        shown = {"prompt": prompt, "output": text, "message": None if error is None else error.message}
    bad = outcome.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    event(
        _log,
        logging.ERROR if bad else logging.INFO,
        "request",
        request_id=job.request_id,
        route=job.route or None,
        status=outcome.code.name,
        reason=None if error is None else error.reason,
        finish=list(outcome.reasons.values()) or None,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens,
        ttft_ms=ms(outcome.ttft),
        tpot_ms=ms(outcome.tpot),
        total_ms=ms(outcome.seconds),
        accepted_length=None if length is None else round(length, 3),
        **shown,
    )
