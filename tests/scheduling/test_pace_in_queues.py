"""Several rounds a dispatch while requests wait: scheduler and pace on a clock, against single rounds.

The seconds are like an H200's with a model of a billion weights (docs/benchmarks.md), the closed loop is that of
`bench overheads --queue`.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from jaxspec.request import FinishReason, Request, SamplingParams
from jaxspec.scheduling import DecodeRows, Scheduler, SchedulerConfig
from jaxspec.scheduling.pace import Pace
from jaxspec.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Machine:
    """Milliseconds.

    Attributes:
      round, gap, prompt: of the device, for each round, for each dispatch of them, and for each prompt.
      call, row, begin, end: of the host, for each dispatch, row of it, prompt, and request that ends.
    """

    round: float
    gap: float
    prompt: float = 0.9
    call: float = 0.65
    row: float = 0.01
    begin: float = 0.3
    end: float = 0.05


class Loop:
    """A closed loop of twice as many requests as slots; the host reads results a dispatch late, as the engine does."""

    def __init__(self, machine: Machine, pace: Pace, slots: int, gain: float) -> None:
        sizes = Sizes(slots, slots * 8, 64, 8, 3, 500, 256, max_num_batched_tokens=1024, max_rounds=4)
        self.machine, self.pace, self.gain, self.rng = machine, pace, gain, random.Random(0)
        self.now = self.free_at = self.collected = 0.0
        self.scheduler = Scheduler(SchedulerConfig(sizes, enable_prefix_caching=False), lambda: self.now)
        self.added = self.ended = self.said = self.rounds = self.dispatches = 0
        self.disturbed, self.eventful = True, 0
        for _ in range(2 * slots):
            self.add()

    def add(self) -> None:
        self.added += 1
        params = SamplingParams(max_tokens=round(128 * (0.5 + (0.381966 * self.added) % 1)), ignore_eos=True)
        self.scheduler.add(Request(f"r{self.added}", [0] * 256, params, seed=0, arrival_time=self.now))

    def run(self, ends: int) -> float:
        """Tokens a millisecond until so many have ended, the first quarter of them left out."""
        flight: list[tuple[DecodeRows | list[tuple[Request, int]], float, bool, float]] = []
        began = 0.0
        while self.ended < ends:
            plan, coming = self.scheduler.plan(self.pace.repeats()), []
            if rows := plan.decode if len(plan.decode) else None:
                self.rounds, self.dispatches = self.rounds + rows.rounds, self.dispatches + 1
                work = self.machine.gap + self.machine.round * rows.rounds
                finish = self.queue(self.machine.call + self.machine.row * len(rows), work)
                coming.append((rows, finish, not self.disturbed, self.now))
                self.disturbed = False
            if plan.prefill:
                count = len(plan.prefill)
                finish = self.queue(self.machine.begin * count, self.machine.prompt * count)
                coming.append(([(c.request, c.request.epoch) for c in plan.prefill], finish, False, self.now))
                self.disturbed, self.eventful = True, 2
            self.scheduler.dispatched(plan, growth=4)
            flight, before = coming, flight
            for what, finish, timed, dispatched in before:
                waited, self.now = max(0.0, finish - self.now), max(self.now, finish)
                if isinstance(what, DecodeRows):
                    if timed and dispatched < self.collected:
                        took = self.now - self.collected
                        self.pace.took("round", what.rounds, took / 1e3, waited / 1e3, quiet=not self.eventful)
                    self.eventful = max(0, self.eventful - 1)
                    self.commit(what)
                else:
                    self.said += sum(self.scheduler.commit(request, epoch, [0]) for request, epoch in what)
                self.collected = self.now
            if self.ended < ends // 4:
                began, self.said = self.now, 0
        return self.said / (self.now - began)

    def queue(self, host: float, device: float) -> float:
        """When the device has done what the host dispatches now."""
        self.now += host
        self.free_at = max(self.free_at, self.now) + device
        return self.free_at

    def commit(self, rows: DecodeRows) -> None:
        said: list[list[int]] = []
        ran = given = 0
        for request, lives in zip(rows.requests, self.scheduler.slots.alive(rows), strict=True):
            left = request.max_tokens - len(request.output_token_ids) if lives else 0
            gains = [1 + sum(self.rng.random() < (self.gain - 1) / 3 for _ in range(3)) for _ in range(rows.rounds)]
            for at, gained in enumerate(gains):
                if sum(gains[:at]) < left:
                    ran, given = ran + 1, given + gained
            said.append([0] * min(left, sum(gains)))
        self.said += sum(map(len, said))
        self.scheduler.commit_round(rows, said)
        self.pace.gave("round", ran, given, 0)
        for request, new in zip(rows.requests, said, strict=True):
            if new and len(request.output_token_ids) == request.max_tokens:
                self.scheduler.finish(request, FinishReason.LENGTH)
                self.ended, self.eventful, self.now = self.ended + 1, 2, self.now + self.machine.end
                self.add()


@pytest.mark.parametrize(
    ("slots", "gain", "machine", "least"),
    [
        (16, 1.0, Machine(0.95, 0.25), 1.1),  # plain: ends are known and rare
        (16, 3.2, Machine(1.26, 0.2), 1.0),
        (64, 3.2, Machine(1.84, 0.06, call=0.7, row=0.005), 0.998),  # a text ends in every round
    ],
)
def test_several_rounds_gain_where_texts_end_seldom_and_lose_nowhere(
    slots: int, gain: float, machine: Machine, least: float
):
    single = Loop(machine, Pace(1, measured=False), slots, gain).run(ends := 5 * slots)
    loop = Loop(machine, Pace(4, measured=True), slots, gain)
    assert loop.run(ends) >= least * single
    assert (loop.rounds > 2 * loop.dispatches) == (least > 1.05)
