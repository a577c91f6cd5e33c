"""Pictures of a load: latency over time beside what was asked, and the modes of a comparison by phase.

Owns drawing. matplotlib (the extra `plot`) is imported when a picture is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.offline.metrics import PLAIN_MODE
from jaxspec.bench.offline.plots import ACCENT, INK, LINES, picture, shades_of, style
from jaxspec.bench.online.arrivals import Phase
from jaxspec.bench.online.compare import STATISTICS
from jaxspec.bench.online.records import Record
from jaxspec.bench.online.report import Report
from jaxspec.bench.online.sender import ADAPTIVE, OFF

#: Points of the curve of requests under way.
_POINTS = 400


def draw(report: Report, path: str | Path) -> None:
    """Writes the picture as PNG.

    Raises:
      ValueError: nothing was measured, or matplotlib is missing.
    """
    if not any(run.records for run in report.runs):
        raise ValueError(f"--plot {str(path)!r} needs at least 1 request, got 0")
    # Of a comparison, the last run is adaptive's.
    shown, phases, c = report.runs[-1], report.plan.load.phases, report.conditions
    title = f"{c['model']} on {c['device']}, {c['drafter']}   |   {report.plan.load.source}"
    with picture(path, title) as figure:
        axes = [figure.add_subplot(place) for place in figure.add_gridspec(2, 2)]
        if len(report.runs) > 1 and report.judged:
            for ax, statistic in zip(axes, STATISTICS, strict=False):
                _modes(ax, report, statistic)
        else:
            _scatter(axes[0], shown.records, phases, "ttft", "TTFT (ms) by time of sending")
            _distribution(axes[1], shown.records)
        _scatter(axes[2], shown.records, phases, "tpot", f"TPOT (ms) by time of sending{_of(report)}")
        _under_way(axes[3], shown.records, phases, f"Requests under way{_of(report)}")


def _of(report: Report) -> str:
    return f": {report.runs[-1].mode}, repeat {report.runs[-1].repeat}" if len(report.runs) > 1 else ""


def _shaded(ax: Any, phases: Sequence[Phase]) -> None:
    for i, phase in enumerate(phases):
        if i % 2:
            ax.axvspan(phase.start, phase.end, color="#f1f3f5", linewidth=0, zorder=0)
        ax.annotate(
            phase.name, ((phase.start + phase.end) / 2, 1), xycoords=("data", "axes fraction"), ha="center", va="top",
            fontsize=8, color="#868e96",
        )  # fmt: skip


def _scatter(ax: Any, records: Sequence[Record], phases: Sequence[Phase], name: str, title: str) -> None:
    _shaded(ax, phases)
    for color, route in zip(LINES * 16, sorted({r.route for r in records}), strict=False):
        chosen = [(r.sent, getattr(r, name)) for r in records if r.route == route and r.ok]
        points = [(at, 1e3 * value) for at, value in chosen if value is not None]
        ax.plot(
            [at for at, _ in points], [v for _, v in points], "o", markersize=3, color=color, label=route, alpha=0.7
        )
    failed = [r.sent for r in records if not r.ok]
    if failed:
        ax.plot(failed, [0.0] * len(failed), "x", color=ACCENT, label="not ok")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("seconds", fontsize=9, color=INK)
    style(ax, title)
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, 0.96))


def _distribution(ax: Any, records: Sequence[Record]) -> None:
    good = [r for r in records if r.ok]
    for color, name in zip(LINES, ("ttft", "tpot", "e2e"), strict=False):
        values = sorted(v for r in good if (v := getattr(r, name)) is not None)
        if values:
            shares = [(i + 1) / len(values) for i in range(len(values))]
            ax.plot([1e3 * v for v in values], shares, color=color, label=name.upper())
            ax.set_xscale("log")
    ax.set_ylim(0, 1)
    ax.set_xlabel("milliseconds", fontsize=9, color=INK)
    style(ax, "Share of the requests at or below")
    if good:
        ax.legend(fontsize=8, frameon=False)


def _under_way(ax: Any, records: Sequence[Record], phases: Sequence[Phase], title: str) -> None:
    _shaded(ax, phases)
    end = max(r.ended for r in records)
    x = [end * i / _POINTS for i in range(_POINTS + 1)]
    ax.plot(x, [sum(r.sent <= at < r.ended for r in records) for at in x], color=ACCENT, linewidth=1.4)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("seconds", fontsize=9, color=INK)
    style(ax, title)


def _modes(ax: Any, report: Report, statistic: str) -> None:
    chosen = [v for v in report.judged if v.statistic == statistic]
    modes = list(dict.fromkeys(mode for v in chosen for mode in v.values))
    shades = shades_of([mode for mode in modes if mode not in (OFF, ADAPTIVE)])
    colors = {**shades, OFF: shades[PLAIN_MODE]}
    width = 0.84 / len(modes)
    for j, mode in enumerate(modes):
        heights = [1e3 * v.values.get(mode, math.nan) for v in chosen]
        x = [i - 0.42 + (j + 0.5) * width for i in range(len(chosen))]
        ax.bar(x, [0 if math.isnan(h) else h for h in heights], width * 0.92, color=colors[mode], label=mode)
    labels = [v.phase + ("" if math.isnan(v.ratio) else f"\n{v.ratio:.2f}") for v in chosen]
    ax.set_xticks(range(len(chosen)), labels)
    style(ax, f"TPOT {statistic} (ms) by phase; below: adaptive over the best fixed mode")
    ax.legend(fontsize=7.5, frameon=False, ncols=2)
