"""What a client saw of each request, and the numbers that follow from it: pure functions over records.

Owns the definitions, as AIPerf and vLLM's benchmark have them. TTFT: from the send to the first chunk with tokens.
TPOT: (E2E - TTFT) / (tokens after the first chunk); theirs, (E2E - TTFT) / (tokens - 1), is the same where that chunk
holds one token, and counts tokens without their time where it holds more. ITL: a burst of n tokens counts gap / n, n
times. Goodput: requests a second that meet all objectives. Must not know servers, clocks or output.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jaxspec.bench.offline.metrics import percentile
from jaxspec.bench.online.arrivals import Phase

OK = "OK"
#: The status of requests that Ctrl-C cut short. It is no error.
INTERRUPTED = "INTERRUPTED"
#: The status of a stream that ended well without a last message: an error of the server's.
INCOMPLETE = "INCOMPLETE"
#: Upper ends of the prompt-length buckets in tokens.
PROMPT_BOUNDS = (64, 256, 1024, 4096)
_PROMPT_NAMES = ("1-64", "65-256", "257-1024", "1025-4096", "4097+")


@dataclasses.dataclass(frozen=True)
class Record:
    """One request. Times are seconds since the run's start.

    Attributes:
      route: the label sent with it; phase: of the load, "" without phases.
      due, sent: when it should have left and when it did.
      prompt_tokens: as the server counted them, or as planned where it did not answer.
      status: a gRPC status name, INTERRUPTED or INCOMPLETE; message: what the server said with it.
      first: arrival of the first tokens; None: there were none. ended: of the end, good or bad.
      gaps: (seconds since the tokens before, tokens that came), after the first chunk.
      first_tokens: tokens of the first chunk.
      rounds, drafted, accepted: as the server reports them at the end.
    """

    index: int
    route: str
    phase: str
    due: float
    sent: float
    ended: float
    prompt_tokens: int
    status: str
    message: str = ""
    first: float | None = None
    first_tokens: int = 0
    gaps: tuple[tuple[float, int], ...] = ()
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def lag(self) -> float:
        """How late the generator itself was."""
        return self.sent - self.due

    @property
    def output_tokens(self) -> int:
        return self.first_tokens + sum(count for _, count in self.gaps)

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """None where no tokens came after the first chunk."""
        later = self.output_tokens - self.first_tokens
        return None if self.first is None or not later else (self.ended - self.first) / later

    def arrived(self, start: float, end: float) -> int:
        """Tokens that came in [start, end)."""
        if self.first is None:
            return 0
        now, count = self.first, self.first_tokens if start <= self.first < end else 0
        for gap, tokens in self.gaps:
            now += gap
            count += tokens if start <= now < end else 0
        return count

    @property
    def bucket(self) -> str:
        """Of the prompt's length."""
        return _PROMPT_NAMES[bisect_left(PROMPT_BOUNDS, self.prompt_tokens)]


@dataclasses.dataclass(frozen=True)
class Objectives:
    """What a good request keeps, in milliseconds; None asks for nothing.

    Raises:
      ValueError: one that is not positive.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"slo-{field.name.replace('_', '-')} must be above 0, got {value!r}")

    @property
    def any(self) -> bool:
        return self != Objectives()

    def met(self, record: Record) -> bool:
        """Whether a request ended well and within all of them; what came in one chunk has no TPOT to miss."""
        limits = ((self.ttft_ms, record.ttft), (self.tpot_ms, record.tpot), (self.e2e_ms, record.e2e))
        return record.ok and all(limit is None or got is None or 1e3 * got <= limit for limit, got in limits)


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """Of some values, in seconds; nan of none."""

    p50: float
    p90: float
    p99: float
    mean: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan, math.nan)
        p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, sum(values) / len(values), max(values))


@dataclasses.dataclass(frozen=True)
class Summary:
    """A group of requests.

    Attributes:
      name: of the group.
      seconds: that the rates refer to.
      requests: all of them. statuses: how they ended.
      ttft, tpot, itl, e2e: of those that ended well, in seconds.
      lag: of the generator, of all.
      output_tokens: of all.
      tokens_per_second: tokens that came within the seconds, over them (`by_phase`: of whatever request).
      requests_per_second, goodput: rates of the group's requests, whenever they ended.
      attained: share of all requests that met every objective.
      accepted_length: tokens a round, bonus included; nan without rounds. acceptance: accepted share of the drafts.
    """

    name: str
    seconds: float
    requests: int
    statuses: dict[str, int]
    ttft: Quantiles
    tpot: Quantiles
    itl: Quantiles
    e2e: Quantiles
    lag: Quantiles
    output_tokens: int
    tokens_per_second: float
    requests_per_second: float
    goodput: float
    attained: float
    accepted_length: float
    acceptance: float


def span(records: Sequence[Record]) -> float:
    """Seconds from the first send to the last end; 0 of none."""
    return max((r.ended for r in records), default=0.0) - min((r.sent for r in records), default=0.0)


def summarize(
    name: str, records: Sequence[Record], slo: Objectives, seconds: float | None = None, arrived: float | None = None
) -> Summary:
    """The numbers of a group.

    Args:
      seconds: that rates refer to; None: from the first send to the last end.
      arrived: tokens that came within the seconds; None: all of the group's.
    """
    seconds = span(records) if seconds is None else seconds
    good = [r for r in records if r.ok]
    met = sum(slo.met(r) for r in records)
    tokens = sum(r.output_tokens for r in records)
    rounds, drafted = sum(r.rounds for r in good), sum(r.drafted for r in good)
    accepted = sum(r.accepted for r in good)
    rate = lambda count: count / seconds if seconds > 0 else math.nan
    return Summary(
        name=name,
        seconds=seconds,
        requests=len(records),
        statuses=dict(Counter(r.status for r in records).most_common()),
        ttft=Quantiles.of([r.ttft for r in good if r.ttft is not None]),
        tpot=Quantiles.of([r.tpot for r in good if r.tpot is not None]),
        itl=Quantiles.of([gap / count for r in good for gap, count in r.gaps for _ in range(count)]),
        e2e=Quantiles.of([r.e2e for r in good]),
        lag=Quantiles.of([r.lag for r in records]),
        output_tokens=tokens,
        tokens_per_second=rate(tokens if arrived is None else arrived),
        requests_per_second=rate(len(good)),
        goodput=rate(met),
        attained=met / len(records) if records else math.nan,
        accepted_length=(accepted + rounds) / rounds if rounds else math.nan,
        acceptance=accepted / drafted if drafted else math.nan,
    )


def grouped(records: Sequence[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """{key: its records}, in order of first appearance."""
    out: dict[str, list[Record]] = {}
    for record in records:
        out.setdefault(key(record), []).append(record)
    return out


def by_route(records: Sequence[Record], slo: Objectives) -> list[Summary]:
    """A summary a route; rates refer to the whole run."""
    groups = sorted(grouped(records, lambda r: r.route).items())
    return [summarize(name, many, slo, span(records)) for name, many in groups]


def by_bucket(records: Sequence[Record], slo: Objectives) -> list[Summary]:
    """A summary a prompt-length bucket, short ones first; rates refer to the whole run."""
    found = grouped(records, lambda r: r.bucket)
    return [summarize(name, found[name], slo, span(records)) for name in _PROMPT_NAMES if name in found]


def by_phase(records: Sequence[Record], phases: Iterable[Phase], slo: Objectives) -> list[Summary]:
    """A summary a phase's name, of the requests due in it; rates refer to the planned seconds of those phases.

    Tokens a second are of what came during the phases: under overload much of what was due in one comes after it.
    """
    windows: dict[str, list[Phase]] = {}
    for phase in phases:
        windows.setdefault(phase.name, []).append(phase)
    found = grouped(records, lambda r: r.phase)
    return [
        summarize(
            name, found.get(name, []), slo, sum(phase.seconds for phase in many),
            sum(r.arrived(phase.start, phase.end) for phase in many for r in records),
        )
        for name, many in windows.items()
    ]  # fmt: skip
