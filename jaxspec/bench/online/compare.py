"""The same load with speculation off, with every static tier, and adaptive, against one server.

Owns the order of runs and the verdicts. Repeats are interleaved (off, static tiers, adaptive, off, ...), each begins
with an empty prefix cache, a policy that knows nothing and a few unrecorded requests. A verdict sets adaptive against
the better of off and the best static tier, for each phase and statistic by itself: medians over repeats, as a ratio.
Must not know how numbers are printed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from jaxspec.bench.online.arrivals import Phase
from jaxspec.bench.online.records import Objectives, Record, Summary, by_phase, summarize
from jaxspec.bench.online.sender import ADAPTIVE

#: Adaptive may be this much worse than the best fixed choice.
MARGIN = 0.10
STATISTICS = ("p50", "p99")
#: The name of a load without phases, in verdicts.
WHOLE = "all"


@dataclasses.dataclass(frozen=True)
class ModeRun:
    """One mode over the plan.

    Attributes:
      tier_rounds: rounds by tier. switches: of the tier.
    """

    mode: str
    repeat: int
    records: tuple[Record, ...]
    tier_rounds: dict[str, int] = dataclasses.field(default_factory=dict)
    switches: int = 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Adaptive against the best fixed mode, in one phase.

    Attributes:
      statistic: of the requests' TPOT. values: median over repeats by mode, in seconds.
      best: the fixed mode with the smallest. ratio: adaptive's over it; nan where either has no requests.
      low, high: range of the ratio to the same mode within each repeat, which says how far to trust it.
    """

    phase: str
    statistic: str
    values: dict[str, float]
    best: str
    ratio: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Within the margin; a phase without requests holds nothing."""
        return self.ratio <= 1 + MARGIN


def phase_summaries(run: ModeRun, phases: Sequence[Phase], slo: Objectives) -> list[Summary]:
    """By phase; the whole as one where the load has none."""
    if not phases:
        return [summarize(WHOLE, run.records, slo)]
    return by_phase(run.records, phases, slo)


def verdicts(runs: Sequence[ModeRun], phases: Sequence[Phase]) -> list[Verdict]:
    """A verdict for each phase and statistic.

    Raises:
      ValueError: no adaptive run, or nothing beside it.
    """
    modes = list(dict.fromkeys(run.mode for run in runs))
    fixed = [mode for mode in modes if mode != ADAPTIVE]
    if ADAPTIVE not in modes or not fixed:
        raise ValueError(f"a verdict needs adaptive and a fixed mode, got modes {modes}")
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for run in runs:
        for summary in phase_summaries(run, phases, Objectives()):
            for statistic in STATISTICS:
                value = getattr(summary.tpot, statistic)
                cell = found.setdefault((summary.name, statistic), {}).setdefault(run.mode, {})
                if not math.isnan(value):
                    cell[run.repeat] = value
    return [_verdict(*key, cell) for key, cell in found.items()]


def _verdict(phase: str, statistic: str, cell: dict[str, dict[int, float]]) -> Verdict:
    values = {mode: statistics.median(many.values()) if many else math.nan for mode, many in cell.items()}
    fixed = [mode for mode, many in cell.items() if mode != ADAPTIVE and many]
    own = cell.get(ADAPTIVE)
    if not fixed or not own:
        return Verdict(phase, statistic, values, "", math.nan, math.nan, math.nan)
    best = min(fixed, key=lambda mode: values[mode])
    paired = [own[repeat] / value for repeat, value in cell[best].items() if repeat in own] or [math.nan]
    return Verdict(phase, statistic, values, best, values[ADAPTIVE] / values[best], min(paired), max(paired))
