"""Results of a load as text of at most 120 columns, and as JSON.

Owns layout and wording. Must not know servers, nor how a number is defined.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.bench.offline.report import WIDTH, clipped, jsonable
from jaxspec.bench.online.compare import MARGIN, ModeRun, Verdict, phase_summaries, verdicts
from jaxspec.bench.online.records import (
    INTERRUPTED,
    OK,
    Objectives,
    Record,
    Summary,
    by_bucket,
    by_phase,
    by_route,
    summarize,
)
from jaxspec.bench.online.sender import ADAPTIVE
from jaxspec.bench.online.texts import Plan

#: Messages of failed requests printed in full.
_SHOWN = 5
#: A generator later than this does not measure the server alone, in seconds.
LATE = 0.010


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything about one call.

    Attributes:
      conditions: what was measured, on what.
      runs: one, or all of a comparison.
      skipped: modes of a comparison that the server refused, and why.
      compilations: of the server after its warm-up; None: it did not say.
    """

    conditions: Mapping[str, Any]
    plan: Plan
    slo: Objectives
    runs: Sequence[ModeRun]
    compilations: int | None = None
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interrupted: bool = False

    @property
    def failures(self) -> list[Record]:
        """Requests that did not end well, those that Ctrl-C cut short aside."""
        return [r for run in self.runs for r in run.records if r.status not in (OK, INTERRUPTED)]

    @property
    def judged(self) -> list[Verdict]:
        """Of a comparison; none where a mode is missing."""
        modes = {run.mode for run in self.runs}
        return verdicts(self.runs, self.plan.load.phases) if ADAPTIVE in modes and len(modes) > 1 else []


def header(conditions: Mapping[str, Any], plan: Plan) -> str:
    """The conditions, a few lines."""
    c, load = conditions, plan.load
    lines = [
        f"server      {c['target']}: {c['model']} on {c['device']}, {c['dtype']}, drafter {c['drafter']}, "
        f"{c['verification']}",
        f"batch       at most {c['max_batch_size']}, tiers {', '.join(c['tiers'])}; context {c['max_seq_len']}",
        f"load        {load.source}: {len(plan.requests)} requests",
        f"requests    at most {c['max_tokens']} tokens each, temperature {c['temperature']:g}, seed {c['seed']}",
    ]
    notes = [f"{count} rows with {reason} left out" for reason, count in load.skipped]
    if plan.cut_prompts:
        notes.append(f"{plan.cut_prompts} prompts cut to the context")
    if plan.cut_outputs:
        notes.append(f"{plan.cut_outputs} outputs cut to {c['max_tokens']} tokens")
    if notes:
        lines.append(f"changed     {', '.join(notes)}")
    return "\n".join(map(clipped, lines))


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _num(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


_HEAD = (
    f"{'':<20}{'requests':>9}{'ok':>6}{'TTFT p50':>10}{'p99':>8}{'TPOT p50':>10}{'p90':>8}{'p99':>8}{'E2E p50':>9}"
    f"{'p99':>8}{'tok/s':>8}{'good/s':>8}{'len':>6}"
)


def _line(s: Summary) -> str:
    return (
        f"{s.name[:19]:<20}{s.requests:>9}{s.statuses.get(OK, 0):>6}{_ms(s.ttft.p50):>10}{_ms(s.ttft.p99):>8}"
        f"{_ms(s.tpot.p50):>10}{_ms(s.tpot.p90):>8}{_ms(s.tpot.p99):>8}{_ms(s.e2e.p50):>9}{_ms(s.e2e.p99):>8}"
        f"{_num(s.tokens_per_second):>8}{_num(s.goodput, 2):>8}{_num(s.accepted_length, 2):>6}"
    )


def _block(title: str, summaries: Sequence[Summary]) -> list[str]:
    mark = f"--- {title} "
    return [mark + "-" * (WIDTH - len(mark)), *map(_line, summaries)] if summaries else []


def _tables(report: Report, records: Sequence[Record]) -> list[str]:
    phases, slo = report.plan.load.phases, report.slo
    whole = summarize("all", records, slo)
    itl = f"ITL ms: p50 {_ms(whole.itl.p50)}, p90 {_ms(whole.itl.p90)}, p99 {_ms(whole.itl.p99)}"
    lines = [_HEAD, _line(whole)]
    lines += _block(
        "by phase (requests due in it; tok/s: what came during it)", by_phase(records, phases, slo) if phases else []
    )
    lines += _block("by route", by_route(records, slo))
    lines += _block("by prompt length in tokens", by_bucket(records, slo))
    return [*lines, "", itl + f"; accepted share of the drafts {_num(100 * whole.acceptance)}%"]


def _comparison(report: Report) -> list[str]:
    phases = report.plan.load.phases
    repeats = 1 + max(run.repeat for run in report.runs)
    lines = [f"{'all repeats':<20}" + _HEAD[20:]]
    names = list(dict.fromkeys(run.mode for run in report.runs))
    for phase in dict.fromkeys(s.name for run in report.runs for s in phase_summaries(run, phases, report.slo)):
        rows = []
        for mode in names:
            runs = [run for run in report.runs if run.mode == mode]
            parts = [s for run in runs for s in phase_summaries(run, phases, report.slo) if s.name == phase]
            chosen = [r for run in runs for r in run.records if r.phase == phase or not phases]
            arrived = sum(s.tokens_per_second * s.seconds for s in parts if s.seconds > 0)
            rows.append(summarize(mode, chosen, report.slo, sum(s.seconds for s in parts), arrived))
        lines += _block(phase, rows)
    lines += ["", f"adaptive against the better of off and the best static tier (medians over {repeats} repeats):"]
    for v in report.judged:
        mark = "holds" if v.holds else f"MORE than {1 + MARGIN:.2f}"
        got = f"{v.ratio:.3f} of {v.best}'s {_ms(v.values.get(v.best, math.nan))} ms"
        got = f"{got:<34} {v.low:.2f} to {v.high:.2f} by repeat  {mark}"
        lines.append(f"  {v.phase:<16} TPOT {v.statistic}  " + ("no requests" if math.isnan(v.ratio) else got))
    for run in report.runs:
        if run.mode == ADAPTIVE and run.tier_rounds:
            ran = ", ".join(f"{name} {count}" for name, count in sorted(run.tier_rounds.items()) if count)
            lines.append(f"  adaptive, repeat {run.repeat}: rounds {ran}; {run.switches} switches"[:WIDTH])
    lines += [f"  {mode} was refused by the server: {why}"[:WIDTH] for mode, why in report.skipped.items()]
    return lines


def render(report: Report) -> str:
    """Tables and what qualifies them."""
    records = [r for run in report.runs for r in run.records]
    if not records:
        return "nothing was measured"
    lines = _tables(report, records) if len(report.runs) == 1 else _comparison(report)
    lines.append("milliseconds; good/s: requests a second within " + _objectives(report.slo))
    lag = summarize("", records, report.slo).lag
    late = " (the generator is late: its own delays are part of the numbers)" if lag.p99 > LATE else ""
    lines.append(f"scheduling lag ms: p50 {_ms(lag.p50)}, p99 {_ms(lag.p99)}, most {_ms(lag.most)}{late}")
    statuses = summarize("", records, report.slo).statuses
    if set(statuses) != {OK}:
        lines.append("statuses: " + ", ".join(f"{name} {count}" for name, count in statuses.items()))
    seen = dict.fromkeys((r.status, r.message) for r in report.failures)
    lines += [f"  {status}: {message}"[:WIDTH] for status, message in list(seen)[:_SHOWN]]
    if report.compilations is not None:
        lines.append(f"the server's compilations after warm-up: {report.compilations}")
    if report.interrupted:
        lines.append(f"INTERRUPTED: {len(records)} requests were sent")
    return "\n".join(lines)


def _objectives(slo: Objectives) -> str:
    given = [f"{f.name[:-3].upper()} {getattr(slo, f.name):g} ms" for f in dataclasses.fields(slo)
             if getattr(slo, f.name) is not None]  # fmt: skip
    return ", ".join(given) if given else "no objective (all that ended well)"


def to_dict(report: Report) -> dict[str, Any]:
    """Conditions, summaries, verdicts and every request's raw numbers. Prompts are not among them."""
    plan, slo = report.plan, report.slo
    runs = []
    for run in report.runs:
        runs.append(
            {
                "mode": run.mode,
                "repeat": run.repeat,
                "tier_rounds": run.tier_rounds,
                "switches": run.switches,
                "all": summarize("all", run.records, slo),
                "by_phase": by_phase(run.records, plan.load.phases, slo),
                "by_route": by_route(run.records, slo),
                "by_prompt_tokens": by_bucket(run.records, slo),
                "requests": run.records,
            }
        )
    return jsonable(
        {
            "conditions": dict(report.conditions),
            "load": {
                "source": plan.load.source,
                "requests": len(plan.requests),
                "phases": plan.load.phases,
                "skipped": dict(plan.load.skipped),
                "cut_prompts": plan.cut_prompts,
                "cut_outputs": plan.cut_outputs,
            },
            "objectives": slo,
            "interrupted": report.interrupted,
            "compilations_after_warmup": report.compilations,
            "skipped_modes": dict(report.skipped),
            "verdicts": [{**jsonable(v), "holds": v.holds} for v in report.judged],
            "runs": runs,
        }
    )
