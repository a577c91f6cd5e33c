"""What the engine's thread keeps of every completion: its time limits, what the client has heard, its one end.

Used on the engine's thread only, between two steps. Must not know the event loop, streams or gRPC calls.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import grpc

from jaxspec.adaptive.policy import RoundStats
from jaxspec.engine import Engine
from jaxspec.events import Delta, Event, Finished, Started
from jaxspec.request import Logprob, RequestMetrics, RequestOutput, SamplingParams
from jaxspec.stats import EngineStats
from jaxspec.text.grammar import Grammar
from serve.core.errors import StatusError, invalid
from serve.core.jobs import Job

#: Of all streams together, where the configuration does not say otherwise. A message takes 50 to 200 us of the
#: interpreter, which the engine's thread needs as well: this leaves it most, and 16 streams a message every 5 ms.
MESSAGES_PER_SECOND = 3000.0


class Metrics(Protocol):
    """What is counted of requests; `serve.telemetry.metrics.ServerMetrics` says what each call means."""

    def on_round(self, stats: RoundStats) -> None: ...
    def on_stats(self, stats: EngineStats, pages: int) -> None: ...
    def on_tokens(self, job: Job, count: int, gap_seconds: float | None) -> None: ...
    def on_finished(self, job: Job, reason: str, prompt_tokens: int, metrics: RequestMetrics) -> None: ...
    def on_refused(self, code: str, reason: str) -> None: ...


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """One completion. Made on the event loop; once submitted, only the engine's thread writes to it.

    Attributes:
      id: the engine's name for it, never used twice, whatever clients call their requests.
      job, params, prompt_token_ids, index, grammar: for Engine.add; the params hold the resolved seed.
      arrived: when the request came (time.monotonic).
      queue_until, run_until: when it is ended unless it was scheduled, and in any case.
      deadline: the client's own.
      owner: for whoever made it; nothing here looks at it.
      started: it had a slot. ended: nothing more comes.
      unsent: what the client has not heard yet, None for nothing. sent_at: when it last heard something.
      token_at: when tokens came last.
    """

    id: str
    job: Job
    params: SamplingParams
    prompt_token_ids: list[int]
    index: int
    grammar: Grammar | None
    arrived: float
    queue_until: float
    run_until: float
    deadline: float
    owner: Any
    started: bool = False
    ended: bool = False
    unsent: Update | None = None
    sent_at: float | None = None
    token_at: float | None = None

    @property
    def until(self) -> float:
        """When it is ended if nothing happens before."""
        limit = min(self.run_until, self.deadline)
        return limit if self.started else min(limit, self.queue_until)


@dataclasses.dataclass(slots=True)
class Update:
    """News of a ticket. The first one says that the engine took it, or that it ended without; exactly one says `ended`.

    Attributes:
      started: it has had a slot.
      token_ids, text, logprobs: since the update before; logprobs None where not asked for.
      ended: nothing more comes.
      output: the whole, of a completion that ended by itself (FinishReason.STOP, LENGTH or ERROR).
      error: why it ended, otherwise; None: because the loop asked for it.
    """

    ticket: Ticket
    started: bool = False
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] | None = None
    ended: bool = False
    output: RequestOutput | None = None
    error: StatusError | None = None


class Tickets:
    """The live tickets of one engine.

    Args:
      stream_interval: seconds for which tokens of a stream are merged before the client hears them; the first and
        the last go at once. None: so long that all streams together make MESSAGES_PER_SECOND at most.
    """

    def __init__(self, metrics: Metrics, stream_interval: float | None = None):
        self._metrics, self._fixed_interval = metrics, stream_interval
        self._streams = 0  # started ones
        self._live: dict[str, Ticket] = {}
        self._held: dict[str, Ticket] = {}  # live ones with something unsent
        self._outbox: list[Update] = []
        self._soonest = float("inf")  # no ticket's time ends before this

    def __len__(self) -> int:
        return len(self._live)

    def add(self, engine: Engine, tickets: Sequence[Ticket]) -> None:
        """Gives the completions of a prompt to the engine: all of them, or none and every one ends with an error."""
        error = _expired(tickets, time.monotonic())
        if error is None:
            error = self._add_all(engine, tickets)
        if error is not None:
            for ticket in tickets:
                self._end(ticket, None, error, None)
            return
        for ticket in tickets:
            self._live[ticket.id] = ticket
            self._soonest = min(self._soonest, ticket.until)
            self._outbox.append(Update(ticket))

    def _add_all(self, engine: Engine, tickets: Sequence[Ticket]) -> StatusError | None:
        added: list[Ticket] = []
        try:
            for ticket in tickets:
                job = ticket.job
                engine.add(
                    ticket.prompt_token_ids, ticket.params, index=ticket.index,
                    request_id=ticket.id, arrival_time=ticket.arrived, priority=job.priority,
                    max_depth=job.max_depth, grammar=ticket.grammar,
                )  # fmt: skip
                added.append(ticket)
        except ValueError as e:
            for ticket in added:
                engine.abort(ticket.id)
            return invalid(str(e))
        return None

    def abort(self, engine: Engine, tickets: Iterable[Ticket], reason: str) -> None:
        """Ends tickets at the loop's wish; those that have ended are left alone."""
        for ticket in tickets:
            if not ticket.ended:
                self._end(ticket, reason, None, _cost(engine.abort(ticket.id)))

    def expire(self, engine: Engine, now: float) -> None:
        """Ends what has run out of time. Cheap while nothing has."""
        if now < self._soonest:
            return
        for ticket in [ticket for ticket in self._live.values() if ticket.until <= now]:
            self._end(ticket, "timeout", _expired([ticket], now), _cost(engine.abort(ticket.id)))
        self._soonest = min((ticket.until for ticket in self._live.values()), default=float("inf"))

    def after_step(self, events: Sequence[Event], now: float) -> None:
        """Takes in what a step says of the completions.

        Args:
          now: when the step ended.
        """
        fresh: Counter[str] = Counter()
        for event in events:
            if isinstance(event, Delta):
                fresh[event.request_id] += len(event.token_ids)
        for event in events:
            ticket = self._live.get(event.request_id)
            if ticket is not None:  # else whoever used the engine before left it behind
                self._count(ticket, fresh.pop(event.request_id, 0), now)
                self._take(ticket, event, now)
        for ticket in list(self._held.values()):
            if ticket.sent_at is None or now - ticket.sent_at >= self._interval:
                self._send(ticket, now)

    @property
    def _interval(self) -> float:
        return self._streams / MESSAGES_PER_SECOND if self._fixed_interval is None else self._fixed_interval

    def _count(self, ticket: Ticket, tokens: int, now: float) -> None:
        """Counts a completion's tokens of a whole step: its second delta did not come 0 seconds after the first."""
        if tokens:
            gap = None if ticket.token_at is None else now - ticket.token_at
            self._metrics.on_tokens(ticket.job, tokens, gap)
            ticket.token_at = now

    def _take(self, ticket: Ticket, event: Event, now: float) -> None:
        match event:
            case Started():
                ticket.started = True
                self._streams += ticket.job.stream
                self._outbox.append(Update(ticket, started=True))
            case Delta():
                self._keep(ticket, event)
                if ticket.job.stream:
                    if self._interval and ticket.sent_at is not None:
                        self._held[ticket.id] = ticket
                    else:
                        self._send(ticket, now)
            case Finished():
                self._end(ticket, event.reason, None, event.output.metrics, event.output)

    def _keep(self, ticket: Ticket, delta: Delta) -> None:
        if ticket.unsent is None:
            ticket.unsent = Update(ticket)
        update = ticket.unsent
        update.token_ids += delta.token_ids
        update.text += delta.text
        if delta.logprobs is not None:
            update.logprobs = (update.logprobs or []) + delta.logprobs

    def _send(self, ticket: Ticket, now: float) -> None:
        assert ticket.unsent is not None
        self._outbox.append(ticket.unsent)
        ticket.unsent, ticket.sent_at = None, now
        self._held.pop(ticket.id, None)

    def _end(
        self, ticket: Ticket, reason: str | None, error: StatusError | None, metrics: RequestMetrics | None,
        output: RequestOutput | None = None,
    ) -> None:  # fmt: skip
        """The ticket's one end. `reason` is for the metrics; without them the engine never had it."""
        assert not ticket.ended
        ticket.ended = True
        self._streams -= ticket.started and ticket.job.stream
        for table in (self._live, self._held):
            table.pop(ticket.id, None)
        update = ticket.unsent or Update(ticket)
        update.ended, update.output, update.error = True, output, error
        ticket.unsent = None
        self._outbox.append(update)
        if metrics is not None:
            assert reason is not None
            self._metrics.on_finished(ticket.job, reason, len(ticket.prompt_token_ids), metrics)

    def abort_all(self, engine: Engine, reason: str, *, dead: bool = False) -> None:
        """Ends everything; of a dead engine nothing is asked but what was counted."""
        for ticket in list(self._live.values()):
            metrics = engine.metrics(ticket.id) if dead else _cost(engine.abort(ticket.id))
            self._end(ticket, reason, None, metrics)

    def news(self) -> list[Update]:
        """What the loop has to hear, in order; empties the outbox."""
        outbox, self._outbox = self._outbox, []
        return outbox


def _cost(end: Finished | None) -> RequestMetrics | None:
    return None if end is None else end.output.metrics


def _expired(tickets: Sequence[Ticket], now: float) -> StatusError | None:
    """Why the first of them that has run out of time has."""
    for ticket in tickets:
        if ticket.until > now:
            continue
        where = "after it had started" if ticket.started else "before it could start"
        if ticket.deadline <= now:
            message, reason = f"the request's deadline passed {where}", "deadline"
        elif ticket.run_until <= now:
            message, reason = f"the request took longer than the server's run_seconds ({where})", "run_seconds"
        else:
            message, reason = "the request waited longer than the server's queue_seconds for a slot", "queue_seconds"
        return StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, message, reason=reason)
    return None
