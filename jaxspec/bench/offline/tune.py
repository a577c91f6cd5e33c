"""From measured static tiers to an adaptive configuration, as SGLang's documentation advises to do by hand.

Owns the choice of candidate steps for each batch size and the table that says why. Must not
know how the summaries came about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.adaptive.ema import AdaptiveSpeculativeParams
from jaxspec.bench.offline.metrics import ADAPTIVE, PLAIN_MODE, Summary

#: Share of the best tier's speed that a tier may lack and still be a candidate.
REACH = 0.05


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of a tier at one batch size.

    Attributes:
      step: its draft tokens; 0 is plain decoding.
      speedups: (workload, end-to-end speed-up over plain), in the order measured.
      best_on: workloads where it is the fastest. near_on: workloads where it lacks at most `REACH`.
    """

    batch_size: int
    mode: str
    step: int
    speedups: tuple[tuple[str, float], ...]
    best_on: tuple[str, ...]
    near_on: tuple[str, ...]

    @property
    def kept(self) -> bool:
        return bool(self.best_on or self.near_on)

    @property
    def why(self) -> str:
        """In words."""
        if self.best_on:
            return "best on " + ", ".join(self.best_on)
        if self.near_on:
            return "close to the best on " + ", ".join(self.near_on)
        return "below the best everywhere"


def choose(summaries: Sequence[Summary], steps: dict[str, int], reach: float = REACH) -> list[Finding]:
    """Judges every fixed mode at every batch size.

    Args:
      summaries: of plain decoding and the static tiers; the adaptive policy's are left out.
      steps: draft tokens of each mode.
      reach: see `REACH`.

    Raises:
      ValueError: a batch size without a speed-up to compare, or a reach outside [0, 1).
    """
    if not 0 <= reach < 1:
        raise ValueError(f"reach must lie in [0, 1), got {reach!r}")
    speed: dict[int, dict[str, dict[str, float]]] = {}
    for s in summaries:
        if s.mode == ADAPTIVE:
            continue
        speedup = s.end_to_end.speedup
        if speedup is None:
            raise ValueError(f"{s.workload}, batch {s.batch_size}, {s.mode} needs plain decoding beside it, got none")
        speed.setdefault(s.batch_size, {}).setdefault(s.workload, {})[s.mode] = speedup
    if not speed:
        raise ValueError("tuning needs at least 1 measured cell, got 0")
    out: list[Finding] = []
    for batch_size in sorted(speed):
        cells = speed[batch_size]
        best = {workload: max(modes, key=lambda mode: modes[mode]) for workload, modes in cells.items()}
        names = {mode for modes in cells.values() for mode in modes}
        for mode in sorted(names, key=lambda mode: (steps[mode], mode)):
            own = tuple((workload, modes[mode]) for workload, modes in cells.items() if mode in modes)
            first = tuple(workload for workload, _ in own if best[workload] == mode)
            near = tuple(
                workload
                for workload, value in own
                if best[workload] != mode and value >= (1 - reach) * cells[workload][best[workload]]
            )
            out.append(Finding(batch_size, mode, steps[mode], own, first, near))
    return out


def configuration(verdicts: Sequence[Finding]) -> dict[str, Any]:
    """The JSON that AdaptiveSpeculativeParams and SGLang read: candidate steps by batch size.

    Raises:
      ValueError: AdaptiveSpeculativeParams refuses it.
    """
    out: dict[str, Any] = {}
    for v in verdicts:
        slot = out.setdefault(str(v.batch_size), {"candidate_steps": []})
        if v.kept:
            slot["candidate_steps"] = sorted({*slot["candidate_steps"], v.step})
    AdaptiveSpeculativeParams(out, buckets=sorted(int(size) for size in out))
    return out


def table(verdicts: Sequence[Finding]) -> str:
    """Why each step is or is not a candidate, in at most 120 columns."""
    workloads = list(dict.fromkeys(workload for v in verdicts for workload, _ in v.speedups))
    lines = [f"{'batch':>5}  {'mode':<14}{'step':>5}" + "".join(f"{w[:9]:>10}" for w in workloads) + "  candidate"]
    for i, v in enumerate(verdicts):
        size = str(v.batch_size) if i == 0 or verdicts[i - 1].batch_size != v.batch_size else ""
        speeds = dict(v.speedups)
        cells = "".join(f"{f'{speeds[w]:.2f}x' if w in speeds else '-':>10}" for w in workloads)
        name = "off" if v.mode == PLAIN_MODE else v.mode
        lines.append(f"{size:>5}  {name:<14}{v.step:>5}{cells}  {'yes: ' if v.kept else 'no: '}{v.why}")
    return "\n".join(lines)
