"""An engine whose every second is planted: each prefill and each round takes what the test says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.adaptive.policy import RoundStats
from jaxspec.bench.offline.measure import FixedRequest, Mode
from jaxspec.bench.offline.workloads import Passage
from jaxspec.events import Delta, Event, Finished
from jaxspec.request import CompletionOutput, FinishReason, RequestOutput, SamplingParams
from jaxspec.tier import Tier


@dataclasses.dataclass
class _Row:
    name: str
    tokens: list[int]
    limit: int


class PlantedEngine:
    """A step is a round for all rows, then at most one prefill; it returns the results of both.

    Like the real one it times no round that follows a prefill. It has as much of an engine as `run_queue` and
    `step_offline` use.

    Args:
      prefill, round, add: seconds that each takes. gain: tokens a row and round.
      lost: whether a row stays for one more round after its request has ended, as where a round is in flight then.
    """

    def __init__(self, *, prefill: float, round: float, gain: int, add: float = 0.0, lost: bool = False):
        self.prefill, self.round, self.gain, self.add_seconds, self.lost = prefill, round, gain, add, lost
        self.now = 0.0
        self.policy: Any = None
        self.on_round: Any = None
        self._waiting: list[_Row] = []
        self._rows: list[_Row] = []
        self._ended: list[_Row] = []
        self._count = 0
        self._prefilled = False

    def clock(self) -> float:
        return self.now

    def use_policy(self, policy: Any) -> None:
        self.policy = policy

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> str:
        self.now += self.add_seconds
        self._count += 1
        self._waiting.append(_Row(f"r{self._count}", [], params.max_tokens))
        return self._waiting[-1].name

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._rows or self._ended)

    def step(self) -> list[Event]:
        events: list[Event] = []
        stale, self._ended = self._ended, []
        if self._rows or stale:
            self.now += self.round
            size = len(self._rows) + len(stale)
            for row in self._rows:
                events += self._give(row, self.gain)
            if self.lost:
                self._ended = [row for row in self._rows if len(row.tokens) == row.limit]
            self._rows = [row for row in self._rows if len(row.tokens) < row.limit]
            seconds, self._prefilled = 0.0 if self._prefilled else self.round, False
            stats = RoundStats(Tier(self.gain - 1), size, size, (self.gain - 1,) * size, seconds, 0)
            if self.policy is not None:
                self.policy.observe(stats)
            if self.on_round is not None:
                self.on_round(stats)
        if self._waiting:
            row = self._waiting.pop(0)
            self.now, self._prefilled = self.now + self.prefill, True
            events += self._give(row, 1)
            self._rows.append(row)
        return events

    def _give(self, row: _Row, count: int) -> list[Event]:
        new = list(range(len(row.tokens), min(row.limit, len(row.tokens) + count)))
        row.tokens += new
        delta, end = Delta(row.name, 0, new, ""), FinishReason.LENGTH
        if len(row.tokens) < row.limit:
            return [delta]
        output: Any = RequestOutput(row.name, None, [1], [CompletionOutput(0, row.tokens, "", end)], None)
        return [delta, Finished(row.name, 0, end, output)]


def mode(gain: int) -> Mode:
    """The fixed tier that gains so many tokens."""
    return Mode("plain" if gain == 1 else f"chain-{gain - 1}", Tier(gain - 1))


def jobs(count: int, max_tokens: int) -> list[FixedRequest]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [FixedRequest(Passage("code", i, ""), (1,), params) for i in range(count)]
