"""What the engine's thread keeps of every live completion: who is next, what the loop has not heard, its one end.

Used on the engine's thread only, between two steps. Must not know the event loop, readers or gRPC calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from jaxspec.engine import Engine
from jaxspec.events import Delta, Event, Finished, Started
from jaxspec.request import FinishReason, RequestMetrics
from serve.core.completion import Choice, Completion, Ended, News, Stage, Taken
from serve.core.errors import StatusError, invalid
from serve.core.observers import Guard, Meter, Metrics

#: Of all streams together, where the configuration does not say otherwise. A message takes 50 to 200 us of the
#: interpreter, which the engine's thread needs as well: this leaves it most, and 16 streams a message every 5 ms.
MESSAGES_PER_SECOND = 3000.0
#: Completions, and tokens of their prompts, that are given to the engine between two steps: a burst waits in front of
#: it (about a millisecond's work), the running streams do not wait for a burst. A step starts one request at most.
INTAKE_COMPLETIONS, INTAKE_TOKENS = 16, 4096
_TAKEN = Taken()


class LiveChoices:
    """The live completions of one engine.

    Args:
      meter: counts tokens and rounds.
      stream_interval: seconds for which tokens of a stream are kept before the loop hears them; the first and the last
        go at once. None: so long that all streams together make MESSAGES_PER_SECOND at most.
    """

    def __init__(self, metrics: Metrics, guard: Guard, meter: Meter, stream_interval: float | None = None):
        self._metrics, self._guard, self._meter, self._fixed_interval = metrics, guard, meter, stream_interval
        self._submitted: deque[Completion] = deque()  # in order; the engine has not heard of them
        self._live: dict[str, Choice] = {}
        self._holding: dict[Choice, None] = {}  # live ones that hold something back
        self._outbox: list[tuple[Choice, News]] = []
        self._streams = 0  # started ones
        self._soonest = float("inf")  # no live one's time ends before this

    def __len__(self) -> int:
        return len(self._live)

    @property
    def backlog(self) -> int:
        """Completions that wait in front of the engine."""
        return sum(not choice.ended for request in self._submitted for choice in request.choices)

    @property
    def has_submitted(self) -> bool:
        """Something waits in front of the engine."""
        return bool(self._submitted)

    def submit(self, request: Completion) -> None:
        """Queues all completions of a request."""
        self._submitted.append(request)

    def take_in(self, engine: Engine) -> None:
        """Gives the engine what was submitted, in order: a prompt whatever its size, and more within the bounds."""
        completions = tokens = 0
        while self._submitted:
            request = self._submitted[0]
            count, size = len(request.choices), len(request.choices) * len(request.prompt_token_ids)
            if request.choices[0].ended:  # aborts do not wait
                count = size = 0
            if completions and (completions + count > INTAKE_COMPLETIONS or tokens + size > INTAKE_TOKENS):
                return
            self._submitted.popleft()
            if count:
                self._add(engine, request)
                completions, tokens = completions + count, tokens + size

    def _add(self, engine: Engine, request: Completion) -> None:
        """Gives completions to the engine: all of them, or none and every one ends with an error."""
        job, prepared, deadlines = request.job, request.prepared, request.deadlines
        now, until = time.monotonic(), deadlines.until(Stage.WAITING)
        assert prepared is not None
        try:
            if until <= now:
                raise deadlines.error(Stage.WAITING, now)
            names = prepared.add(engine, request.arrived, job.priority, job.max_depth)
        except (StatusError, ValueError) as e:
            error = e if isinstance(e, StatusError) else invalid(str(e))
            for choice in request.choices:
                self._end(choice, None, None, Ended(error))
            return
        self._soonest = min(self._soonest, until)
        for choice, name in zip(request.choices, names, strict=True):
            choice.id = name
            self._live[name] = choice
            self._outbox.append((choice, _TAKEN))

    def abort(self, engine: Engine, request: Completion, reason: str) -> None:
        """Ends a request at the loop's wish; what has ended of it is left alone."""
        for choice in request.choices:
            if not choice.ended:
                self._end(choice, reason, _cost(engine.abort(choice.id)), Ended(None))

    def abort_all(self, engine: Engine, reason: str) -> None:
        """Ends everything, also what the engine has not heard of."""
        for request in [*self._submitted, *(choice.request for choice in self._live.values())]:
            self.abort(engine, request, reason)

    def bury(self, engine: Engine, reason: str) -> None:
        """Ends what a dead engine had; nothing is asked of it but what was counted."""
        for choice in list(self._live.values()):
            self._end(choice, reason, engine.metrics(choice.id), Ended(None))

    def expire(self, engine: Engine, now: float) -> None:
        """Ends what has run out of time. Cheap while nothing has."""
        if now < self._soonest:
            return
        until = lambda choice: choice.request.deadlines.until(choice.stage)
        for choice in [choice for choice in self._live.values() if until(choice) <= now]:
            error = choice.request.deadlines.error(choice.stage, now)
            self._end(choice, "timeout", _cost(engine.abort(choice.id)), Ended(error))
        self._soonest = min(map(until, self._live.values()), default=float("inf"))

    def after_step(self, events: Sequence[Event], now: float) -> None:
        """Takes in what a step says of the completions.

        Args:
          now: when the step ended.
        """
        self._count(events, now)
        for event in events:
            choice = self._live.get(event.request_id)
            if choice is not None:  # else whoever used the engine before left it behind
                self._take(choice, event, now)
        for choice in list(self._holding):
            if choice.sent_at is None or now - choice.sent_at >= self._interval:
                self._send(choice, now)

    @property
    def _interval(self) -> float:
        return self._streams / MESSAGES_PER_SECOND if self._fixed_interval is None else self._fixed_interval

    def _count(self, events: Sequence[Event], now: float) -> None:
        """Counts each completion's tokens of a whole step: its second delta did not come 0 seconds after the first."""
        fresh: dict[str, int] = {}
        for event in events:
            if isinstance(event, Delta) and event.token_ids:
                fresh[event.request_id] = fresh.get(event.request_id, 0) + len(event.token_ids)
        for name, count in fresh.items():
            choice = self._live.get(name)
            if choice is not None:
                gap = None if choice.token_at is None else now - choice.token_at
                choice.token_at = now
                self._guard(self._metrics.on_tokens, choice.request.job, count, gap)
                self._meter.add_tokens(count)

    def _take(self, choice: Choice, event: Event, now: float) -> None:
        match event:
            case Started():
                choice.started = True
                self._streams += choice.request.job.stream
                self._outbox.append((choice, event))
            case Delta():
                # What is not streamed comes with the end; what says nothing is no message.
                if choice.request.job.stream and (event.token_ids or event.text):
                    choice.held.append(event)
                    if self._interval and choice.sent_at is not None:
                        self._holding[choice] = None
                    else:
                        self._send(choice, now)
            case Finished():
                if event.reason is not FinishReason.ERROR:
                    self._send(choice, now)
                self._end(choice, event.reason, event.output.metrics, event)

    def _send(self, choice: Choice, now: float) -> None:
        self._outbox += [(choice, delta) for delta in choice.held]
        choice.held, choice.sent_at = [], now
        self._holding.pop(choice, None)

    def _end(self, choice: Choice, reason: str | None, cost: RequestMetrics | None, last: Finished | Ended) -> None:
        """The completion's one end. `reason` is for the metrics; without a cost the engine never had it."""
        assert not choice.ended
        choice.ended = True
        self._streams -= choice.started and choice.request.job.stream
        self._live.pop(choice.id, None)
        self._holding.pop(choice, None)
        self._outbox.append((choice, last))
        if cost is not None:
            assert reason is not None
            request = choice.request
            self._guard(self._metrics.on_finished, request.job, reason, len(request.prompt_token_ids), cost)
            self._meter.add_finished(cost)

    def news(self) -> list[tuple[Choice, News]]:
        """What the loop has to hear, in order; empties the outbox."""
        outbox, self._outbox = self._outbox, []
        return outbox


def _cost(end: Finished | None) -> RequestMetrics | None:
    return None if end is None else end.output.metrics
