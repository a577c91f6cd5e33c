"""The account of every live completion: what was asked of the engine, what its reader has not heard, its one end.

Event loop only. Must not know how the engine is reached, readers or gRPC calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from jaxspec.events import Delta, Event, Finished, Started
from jaxspec.request import FinishReason, RequestMetrics
from serve.core.commands import Abort, Add, Command, Turn
from serve.core.completion import Choice, Completion, Ended, News, Stage, Taken
from serve.core.errors import StatusError, invalid
from serve.core.observers import Guard, Meter, Metrics

#: Of all streams together, where the configuration does not say otherwise. A message takes some 100 us of the
#: interpreter, which starts requests as well: this leaves it most, and 16 streams a message every 5 ms.
MESSAGES_PER_SECOND = 3000.0
_TAKEN = Taken()


class LiveChoices:
    """The live completions of one engine.

    Args:
      meter: counts tokens and rounds.
      post: takes commands to the engine's side.
      stream_interval: seconds for which tokens of a stream are kept before its reader hears them; the first and the
        last go at once. None: so long that all streams together make MESSAGES_PER_SECOND at most.

    Attributes:
      soonest: no live one's time ends before this (time.monotonic).
    """

    def __init__(
        self, metrics: Metrics, guard: Guard, meter: Meter, post: Callable[[Command], None],
        stream_interval: float | None = None,
    ):  # fmt: skip
        self.soonest = float("inf")
        self._metrics, self._guard, self._meter, self._post = metrics, guard, meter, post
        self._fixed_interval = stream_interval
        self._serials = itertools.count()
        self._submitted: dict[str, Completion] = {}  # by its first name; the engine may not have heard of it
        self._live: dict[str, Choice] = {}
        self._holding: dict[Choice, None] = {}  # live ones that hold something back
        self._outbox: list[tuple[Choice, News]] = []
        self._streams = 0  # started ones

    def __len__(self) -> int:
        return len(self._live)

    def submit(self, request: Completion) -> None:
        """Asks for all completions of a request."""
        job, prepared, deadlines = request.job, request.prepared, request.deadlines
        now, until = time.monotonic(), deadlines.until(Stage.WAITING)
        assert prepared is not None
        if until <= now:
            for choice in request.choices:
                self._end(choice, None, None, Ended(deadlines.error(Stage.WAITING, now)))
            return
        self.soonest = min(self.soonest, until)
        serial = next(self._serials)
        for index, choice in enumerate(request.choices):
            choice.id = f"{serial}.{index}"
            self._live[choice.id] = choice
        names = tuple(choice.id for choice in request.choices)
        self._submitted[names[0]] = request
        tpot = None if job.tpot_ms is None else job.tpot_ms / 1e3
        self._post(
            Add(
                names, prepared.tokens, prepared.params, request.arrived, job.priority, job.max_depth, tpot,
                prepared.grammar,
            )
        )  # fmt: skip

    def abort(self, request: Completion, reason: str) -> None:
        """Asks for the end of a request's completions; what has ended of it, or is being ended, is left alone."""
        self._break_off([choice for choice in request.choices if choice.id], reason, None)

    def abort_all(self, reason: str) -> None:
        """Asks for the end of everything."""
        for choice in list(self._live.values()):
            self._break_off([choice], reason, None)

    def bury(self, reason: str, costs: Mapping[str, RequestMetrics]) -> None:
        """Ends what a dead engine had.

        Args:
          costs: what is known of them, by name.
        """
        for choice in list(self._live.values()):
            known = costs.get(choice.id)
            cost = RequestMetrics(arrival_time=choice.request.arrived) if known is None and choice.started else known
            self._end(choice, reason, cost, Ended(None))

    def expire(self, now: float) -> None:
        """Asks for the end of what has run out of time. Cheap while nothing has."""
        if now < self.soonest:
            return
        until = lambda choice: choice.request.deadlines.until(choice.stage)
        late: dict[Completion, list[Choice]] = {}
        for choice in self._live.values():
            if choice.cut is None and until(choice) <= now:
                late.setdefault(choice.request, []).append(choice)
        for request, choices in late.items():
            self._break_off(choices, "timeout", request.deadlines.error(choices[0].stage, now))
        self.soonest = min((until(c) for c in self._live.values() if c.cut is None), default=float("inf"))

    def _break_off(self, choices: Sequence[Choice], reason: str, error: StatusError | None) -> None:
        """Asks for the end of completions of one request; what they then end with is decided here."""
        wanted = [choice for choice in choices if not choice.ended and choice.cut is None]
        for choice in wanted:
            choice.cut = reason, Ended(error)
            self._holding.pop(choice, None)
        if wanted:
            self._post(Abort(tuple(choice.id for choice in wanted)))

    def hear(self, turn: Turn) -> None:
        """Takes in what the engine's side says of the completions."""
        for name in turn.added:
            self._outbox += [(choice, _TAKEN) for choice in self._submitted.pop(name).choices]
        for name, message in turn.refused:
            self._give_back(name, Ended(invalid(message)))
        for name in turn.dropped:
            self._give_back(name, Ended(None))
        if turn.events:
            self._count(turn.events, turn.ended_at)
        for event in turn.events:
            choice = self._live.get(event.request_id)
            if choice is not None:  # else whoever used the engine before left it behind
                self._take(choice, event, turn.ended_at)
        for choice in list(self._holding):
            if choice.sent_at is None or turn.ended_at - choice.sent_at >= self._interval:
                self._send(choice, turn.ended_at)

    def _give_back(self, name: str, last: Ended) -> None:
        """The engine has never had a request."""
        for choice in self._submitted.pop(name).choices:
            self._end(choice, None, None, last if choice.cut is None else choice.cut[1])

    @property
    def _interval(self) -> float:
        return self._streams / MESSAGES_PER_SECOND if self._fixed_interval is None else self._fixed_interval

    def _count(self, events: Sequence[Event], now: float) -> None:
        """Counts each completion's tokens of a whole step: its second delta did not come 0 seconds after the first."""
        fresh: dict[str, int] = {}
        for event in events:
            if isinstance(event, Delta) and event.token_ids:
                fresh[event.request_id] = fresh.get(event.request_id, 0) + len(event.token_ids)
        handed = 0
        for name, count in fresh.items():
            choice = self._live.get(name)
            if choice is not None and choice.cut is None:
                gap = None if choice.token_at is None else now - choice.token_at
                choice.token_at = now
                self._guard(self._metrics.on_tokens, choice.request.job, count, gap)
                handed += count
        if handed:
            self._meter.add_tokens(handed)

    def _take(self, choice: Choice, event: Event, now: float) -> None:
        match event:
            case Started():
                choice.started = True
                self._streams += choice.request.job.stream
                self._outbox.append((choice, event))
            case Delta():
                # What is not streamed comes with the end; what says nothing is no message.
                if choice.request.job.stream and (event.token_ids or event.text) and choice.cut is None:
                    choice.held.append(event)
                    if self._interval and choice.sent_at is not None:
                        self._holding[choice] = None
                    else:
                        self._send(choice, now)
            case Finished() if choice.cut is not None:
                reason, last = choice.cut
                self._end(choice, reason, event.output.metrics, last)
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
        """What readers have to hear, in order; empties the outbox."""
        outbox, self._outbox = self._outbox, []
        return outbox
