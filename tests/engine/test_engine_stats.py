"""What the engine's counters count, on a device whose readiness is planted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.engine import Engine
from jaxspec.request import SamplingParams
from jaxspec.runtime.results import Pending
from jaxspec.tier import Tier

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@dataclasses.dataclass
class Device:
    """Says that all work is finished: `before` until a round's dispatch has returned, `after` from then on.

    Attributes:
      unwatched: rounds dispatched right behind a prompt's chunk that is not its last.
    """

    engine: Engine
    before: bool = False
    after: bool = False
    now: bool = False
    unwatched: int = 0


@pytest.fixture
def device(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    engine = bench.engine("small")
    engine.use_policy(StaticPolicy(Tier(5)))
    planted = Device(engine)
    step, dispatch, prefill = engine.step, engine.runner.dispatch, engine.runner.prefill
    chunk_last = False

    def stepped() -> Any:
        planted.now = planted.before
        return step()

    def dispatched(*args: Any, **rest: Any) -> Any:
        nonlocal chunk_last
        planted.unwatched, chunk_last = planted.unwatched + chunk_last, False
        pending = dispatch(*args, **rest)
        planted.now = planted.after
        return pending

    def prefilled(work: Any) -> Any:
        nonlocal chunk_last
        chunk_last = not work.chunks[-1].is_last
        return prefill(work)

    monkeypatch.setattr(engine, "step", stepped)
    monkeypatch.setattr(engine.runner, "dispatch", dispatched)
    monkeypatch.setattr(engine.runner, "prefill", prefilled)
    monkeypatch.setattr(Pending, "is_ready", property(lambda _: planted.now))
    yield planted


def counted(device: Device, tools: Any, requests: list[Any], join: Any = lambda i: 0) -> tuple[int, int]:
    """(starved rounds, rounds) of the requests."""
    before = device.engine.stats
    tools.drive(device.engine, requests, join=join)
    after = device.engine.stats
    return after.starved_rounds - before.starved_rounds, after.rounds - before.rounds


def test_a_busy_device_starves_of_nothing(device: Device, tools: Any):
    starved, rounds = counted(device, tools, [([1, 2, 3], GREEDY)])
    assert starved == 0 and rounds >= 7


def test_a_device_that_finishes_while_the_host_dispatches_has_starved(device: Device, tools: Any):
    device.after = True
    # The first round too: the prefill before it is work as well.
    starved, rounds = counted(device, tools, [([1, 2, 3], GREEDY)])
    assert starved == rounds >= 7


def test_chunks_of_which_nothing_is_read_are_work(device: Device, tools: Any):
    device.before = device.after = True
    long = list(range(1, 12)) * 5
    starved, rounds = counted(device, tools, [([1, 2, 3], GREEDY), (long, GREEDY)], join=lambda i: 3 * i)
    assert device.unwatched >= 1 and starved == rounds - device.unwatched
