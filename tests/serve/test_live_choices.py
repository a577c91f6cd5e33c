"""Live completions of the engine's client, with a clock of their own: intervals, gaps and time limits."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from jaxspec.events import Delta, Finished, Started
from jaxspec.prepared import Prepared
from jaxspec.request import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from serve.core.admission import Place
from serve.core.commands import Abort, Add, Command, Turn
from serve.core.completion import Choice, Completion, Deadlines, Ended, Taken
from serve.core.errors import StatusError
from serve.core.live import LiveChoices
from serve.core.observers import Guard, Meter


class Counter:
    """Metrics that are not under test."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def ended(name: str, reason: FinishReason) -> Finished:
    completion = CompletionOutput(0, [], "", reason)
    return Finished(name, 0, reason, RequestOutput(name, None, [], [completion], RequestMetrics()))


class Account:
    """Live completions of requests that nobody reads, one each; `said` is what the loop hears of each."""

    def __init__(self, kit: Any, interval: float | None = None, metrics: Any = None):
        self.kit = kit
        self.posted: list[Command] = []
        self.aborted: list[str] = []
        self.live = LiveChoices(metrics or Counter(), Guard(), Meter(), self.posted.append, interval)

    def add(self, deadlines: Deadlines | None = None, **options: Any) -> Completion:
        job = self.kit.job([1, 2], seed=0, **options)
        far = time.monotonic() + 1000
        nobody: Any = None
        request = Completion(job, deadlines or Deadlines(far, far, float("inf")), nobody, nobody)
        request.prepared = Prepared(None, [1, 2], job.params, None)
        request.choices = [Choice(request, Place(1, 2))]
        self.live.submit(request)
        self.obey()
        return request

    def obey(self) -> None:
        """As the engine's side does."""
        while self.posted:
            match self.posted.pop(0):
                case Add(names):
                    self.live.hear(Turn(added=[names[0]]))
                case Abort(names):
                    self.aborted += names
                    self.live.hear(Turn(events=[ended(name, FinishReason.ABORT) for name in names]))

    def step(self, now: float, *events: Any) -> None:
        self.live.hear(Turn(ended_at=now, events=list(events)))

    def abort(self, request: Completion) -> None:
        self.live.abort(request, "abort")
        self.obey()

    def expire(self, now: float) -> None:
        self.live.expire(now)
        self.obey()

    def said(self) -> list[tuple[str, Any]]:
        return [(choice.id, news) for choice, news in self.live.news()]


def started(name: str) -> Started:
    return Started(name, 0, 0, 0.0)


@pytest.mark.parametrize(("asked", "told"), [(None, None), (20.0, 0.02)])
def test_the_time_per_token_that_a_client_asks_for_reaches_the_engine(kit: Any, asked: float, told: float) -> None:
    account, obey = Account(kit), Account.obey
    adds: list[Any] = []
    account.obey = lambda: (adds.extend(account.posted), obey(account))[1]
    account.add(tpot_ms=asked)
    assert [add.tpot for add in adds] == [told]


def test_tokens_of_a_stream_are_kept_for_the_interval(kit: Any) -> None:
    account = Account(kit, 0.05)
    request = account.add()
    account.step(9.9, started("0.0"))
    assert account.said() == [("0.0", Taken()), ("0.0", started("0.0"))]

    def step(now: float, *tokens: int) -> list[int]:
        account.step(now, *([Delta("0.0", 0, list(tokens), "x" * len(tokens))] if tokens else []))
        return [token for _, delta in account.said() for token in delta.token_ids]

    assert step(10.0, 1) == [1]  # the first at once
    assert step(10.01, 2) == [] == step(10.02, 3, 4)
    assert step(10.051, 5) == [2, 3, 4, 5]
    assert step(10.06, 6) == []
    assert step(10.12) == [6]  # also when nothing is added, as while it is preempted
    assert step(10.13, 7) == []
    account.step(10.14, ended("0.0", FinishReason.LENGTH))
    (_, last), (_, end) = account.said()
    assert last.token_ids == [7] and end == ended("0.0", FinishReason.LENGTH)  # the last at once
    assert len(account.live) == 0
    account.abort(request)
    assert not account.said() and not account.aborted


@pytest.mark.parametrize("how", ["abort", "error"])
def test_what_is_kept_of_a_stream_that_breaks_off_is_lost(kit: Any, how: str) -> None:
    account = Account(kit, 0.05)
    request = account.add()
    account.step(10.0, started("0.0"), Delta("0.0", 0, [1], "x"))
    account.step(10.01, Delta("0.0", 0, [2], "x"))
    account.said()
    if how == "abort":
        account.abort(request)
        account.abort(request)
        assert account.said() == [("0.0", Ended(None))] and account.aborted == ["0.0"]
    else:
        account.step(10.02, ended("0.0", FinishReason.ERROR))
        assert account.said() == [("0.0", ended("0.0", FinishReason.ERROR))]
    assert len(account.live) == 0 and not account.live._holding


def test_all_streams_together_make_so_many_messages_a_second(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.core.live.MESSAGES_PER_SECOND", 20)
    account, names = Account(kit), ["0.0", "1.0", "2.0"]
    made = [account.add(stream=name != "2.0") for name in names]
    account.step(9.9, *map(started, names))
    assert all(request.choices[0].started for request in made)
    account.said()

    def step(now: float, *names: str) -> list[str]:
        account.step(now, *(Delta(name, 0, [1], "x") for name in names))
        return list(dict(account.said()))

    both = ("0.0", "1.0")
    assert step(10.0, *both, "2.0") == ["0.0", "1.0"]  # the one that is not streamed costs none
    assert step(10.06, *both) == [] and step(10.101, *both) == ["0.0", "1.0"]  # two share 20 a second
    for request in made[1:]:
        account.abort(request)
    assert len(account.said()) == 2
    assert step(10.14, "0.0") == [] and step(10.152, "0.0") == ["0.0"]  # and one has them to itself


@pytest.mark.parametrize("interval", [0.0, 0.05])
def test_each_delta_keeps_its_logprobs_and_a_step_has_its_own_gap(kit: Any, interval: float) -> None:
    class Gaps(Counter):
        def __init__(self) -> None:
            self.seen: list[tuple[int, float | None]] = []

        def on_tokens(self, job: Any, count: int, gap: float | None) -> None:
            self.seen.append((count, gap))

    gaps = Gaps()
    account = Account(kit, interval, gaps)
    account.add(logprobs=0)
    account.said()
    heard: list[tuple[list[int], list[int]]] = []
    # A step may bring a completion several deltas.
    for now, parts in ((10.0, [[1], [2]]), (11.0, [[3, 4], [5]]), (12.0, [[], [6]]), (13.0, [[7]])):
        account.step(now, *(Delta("0.0", 0, part, "x", [{t: Logprob(t, -1.0)} for t in part]) for part in parts))
        heard += [(delta.token_ids, [t for e in delta.logprobs for t in e]) for _, delta in account.said()]
    assert [t for tokens, _ in heard for t in tokens] == [1, 2, 3, 4, 5, 6, 7]
    assert all(tokens == logprobs for tokens, logprobs in heard) and len(heard) >= 4
    assert gaps.seen == [(2, None), (3, 1.0), (1, 1.0), (1, 1.0)]


@pytest.mark.parametrize("slot", [False, True])
@pytest.mark.parametrize(
    ("field", "reason"), [("queue", "queue_seconds"), ("run", "run_seconds"), ("client", "deadline")]
)
def test_time_limits_are_those_of_where_the_completion_is(kit: Any, slot: bool, field: str, reason: str) -> None:
    limit = time.monotonic() + 500
    account = Account(kit)
    account.add(deadlines=dataclasses.replace(Deadlines(limit + 500, limit + 500, float("inf")), **{field: limit}))
    if slot:
        account.step(1.0, started("0.0"))
    account.said()
    account.expire(limit - 1)
    assert not account.aborted
    account.expire(limit)
    if slot and field == "queue":
        assert not account.aborted and not account.said()
        return
    ((_, end),) = account.said()
    assert isinstance(end.error, StatusError) and account.aborted == ["0.0"]
    assert (end.error.code.name, end.error.reason) == ("DEADLINE_EXCEEDED", reason)


def test_what_has_no_time_left_is_never_added(kit: Any) -> None:
    account = Account(kit)
    now = time.monotonic()
    account.add(deadlines=Deadlines(now + 9, now + 9, now - 1))
    ((_, end),) = account.said()
    assert end.error.reason == "deadline" and not account.posted and len(account.live) == 0
