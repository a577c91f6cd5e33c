"""When requests arrive: closed loops, random processes and the shipped bursty trace.

Owns arrival times and phases, all seeded. Must not know prompts, servers or clocks.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

#: The shipped trace: (name, share of its duration, rate as a share of what the server can take).
SYNTHETIC = (
    ("quiet", 0.20, 0.10),
    ("burst", 0.20, 0.70),
    ("lull", 0.15, 0.10),
    ("overload", 0.20, 1.40),
    ("recovery", 0.25, 0.15),
)
#: Lengths of its completions in tokens, drawn evenly from this range.
SYNTHETIC_OUTPUT = (32, 96)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request to come.

    Attributes:
      at: seconds since the start; 0 for all requests of a closed loop.
      phase: the phase's name; "" where the load has none.
      prompt_tokens, output_tokens: lengths, where the trace gives them.
    """

    at: float
    phase: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of a load, in seconds since its start."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Load:
    """All arrivals of a run.

    Attributes:
      source: what made them, in words.
      arrivals: in order of time.
      phases: in order; empty where the load is one piece. Names may repeat (on, off, on, ...).
      concurrency: requests of a closed loop that are under way together; None: an open loop, which waits for nobody.
      skipped: rows of a trace that are no requests, by reason.
    """

    source: str
    arrivals: tuple[Arrival, ...]
    phases: tuple[Phase, ...] = ()
    concurrency: int | None = None
    skipped: tuple[tuple[str, int], ...] = ()


def _positive(name: str, value: float, low: float = 0.0) -> float:
    if not low < value < float("inf"):
        raise ValueError(f"{name} must be a finite number above {low:g}, got {value!r}")
    return value


def closed(concurrency: int, count: int) -> Load:
    """`count` requests, each sent when one of `concurrency` places becomes free.

    Raises:
      ValueError: fewer than 1 place or request.
    """
    for name, value in (("concurrency", concurrency), ("requests", count)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return Load(f"closed loop of {concurrency}", (Arrival(0.0),) * count, concurrency=concurrency)


def _times(rng: random.Random, rate: float, burstiness: float, start: float, end: float) -> Iterator[float]:
    """Arrivals in [start, end) whose gaps are gamma-distributed with mean 1/rate and shape `burstiness`."""
    now = start + rng.gammavariate(burstiness, 1 / (rate * burstiness))
    while now < end:
        yield now
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))


def random_process(rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0) -> Load:
    """Gamma-distributed gaps: Poisson at burstiness 1, burstier below, more even above (as in vLLM's benchmark).

    Args:
      rate: requests a second.

    Raises:
      ValueError: a rate, burstiness or count that is not positive.
    """
    _positive("rate", rate)
    _positive("burstiness", burstiness)
    _positive("requests", count)
    times = _times(random.Random(seed), rate, burstiness, 0.0, float("inf"))
    name = f"Poisson, {rate:g}/s" if burstiness == 1 else f"gamma, {rate:g}/s, burstiness {burstiness:g}"
    return Load(name, tuple(Arrival(at) for at, _ in zip(times, range(count), strict=False)))


def on_off(
    rate: float, off_rate: float, on_seconds: float, off_seconds: float, duration: float, *, seed: int = 0
) -> Load:
    """Poisson arrivals that alternate between two rates, beginning with the low one.

    Args:
      rate, off_rate: requests a second in the phases "on" and "off"; off_rate may be 0.
      duration: seconds of the whole; the last phase is cut there.

    Raises:
      ValueError: a value that is not positive, or off_rate not in [0, rate).
    """
    for name, value in (("rate", rate), ("on-seconds", on_seconds), ("off-seconds", off_seconds)):
        _positive(name, value)
    _positive("duration", duration)
    if not 0 <= off_rate < rate:
        raise ValueError(f"off-rate must lie in [0, rate = {rate:g}), got {off_rate!r}")
    phases, start = [], 0.0
    while start < duration:
        on = len(phases) % 2 == 1
        end = min(duration, start + (on_seconds if on else off_seconds))
        phases.append((Phase("on" if on else "off", start, end), rate if on else off_rate))
        start = end
    return _piecewise(f"on/off, {rate:g}/s and {off_rate:g}/s", phases, seed)


def synthetic(rate: float, duration: float, *, seed: int = 0) -> Load:
    """The shipped bursty trace (SYNTHETIC): quiet, a burst, a lull, more than the server can take, recovery.

    Args:
      rate: requests a second that the server can take; the phases' rates are shares of it.
      duration: seconds of arrivals.

    Raises:
      ValueError: a rate or duration that is not positive.
    """
    _positive("rate", rate)
    _positive("duration", duration)
    phases, start = [], 0.0
    for name, share, load in SYNTHETIC:
        phases.append((Phase(name, start, start + share * duration), load * rate))
        start += share * duration
    load = _piecewise(f"synthetic bursty trace at {rate:.2f}/s", phases, seed)
    rng = random.Random(f"lengths {seed}")
    arrivals = tuple(dataclasses.replace(a, output_tokens=rng.randint(*SYNTHETIC_OUTPUT)) for a in load.arrivals)
    return dataclasses.replace(load, arrivals=arrivals)


def _piecewise(source: str, phases: Sequence[tuple[Phase, float]], seed: int) -> Load:
    rng = random.Random(seed)
    arrivals = [
        Arrival(at, phase.name)
        for phase, rate in phases
        if rate > 0
        for at in _times(rng, rate, 1.0, phase.start, phase.end)
    ]
    if not arrivals:
        raise ValueError(f"{source} must have at least 1 arrival in {phases[-1][0].end:g} s, got 0; raise the rate")
    return Load(source, tuple(arrivals), tuple(phase for phase, _ in phases))
