"""The picture of a report: speed-ups, acceptance, and which tiers the adaptive policy ran over time.

Owns drawing. matplotlib (the extra `plot`) is imported when a picture is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.offline.metrics import (
    ADAPTIVE,
    PLAIN_MODE,
    Run,
    Summary,
    acceptance_by_position,
    group,
    kind_shares,
    summarize,
    tier_shares,
)
from jaxspec.bench.offline.report import Report, sampling

ACCENT, INK, PALE = "#d9480f", "#343a40", "#dee2e6"
LINES = ("#1c7ed6", "#2f9e44", "#9c36b5", "#495057")
_BINS = 24
#: Adaptive panels: at most this many batch sizes are drawn.
_PANELS = 3


def require_matplotlib() -> None:
    """Raises ValueError where matplotlib is missing: before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install -e '.[plot]'")


@contextlib.contextmanager
def picture(path: str | Path, title: str) -> Iterator[Any]:
    """A figure to draw on, which is written as PNG in the end.

    Raises:
      ValueError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    figure.savefig(path, format="png", facecolor="white")


def draw(report: Report, path: str | Path) -> None:
    """Writes the picture as PNG.

    Raises:
      ValueError: nothing was measured, or matplotlib is missing.
    """
    if not report.runs:
        raise ValueError(f"--plot {str(path)!r} needs at least 1 finished run, got 0")
    over_time = _over_time(report.runs)
    panels = 1 + max(1, len(over_time))
    names = {(r.depth, r.tier) for run in report.runs for r in run.rounds}
    with picture(path, _title(report)) as figure:
        colors = shades_of([name for _, name in sorted(names)])
        grid = figure.add_gridspec(2, panels, height_ratios=(1.25, 1))
        _speedups(figure.add_subplot(grid[0, :]), summarize(report.runs), colors)
        _acceptance(figure.add_subplot(grid[1, 0]), report.runs)
        for i, (title, runs) in enumerate(over_time):
            _tiers(figure.add_subplot(grid[1, i + 1]), title, runs, colors, legend=i == len(over_time) - 1)


def _title(report: Report) -> str:
    c = report.conditions
    grown = f" grown to {c['grow']}" if c["grow"] else ""
    parts = [
        f"{c['model']}{grown} ({c['parameters'] / 1e6:.1f} M), {c['drafter']}",
        f"{c['device']}, {c['dtype']}, {sampling(c)}, {c['max_tokens']} tokens, repeats: {c['repeats']}",
    ]
    if c["simulated_accept_length"] is not None:
        parts.append(f"SIMULATED acceptance {c['simulated_accept_length']:g}")
    if report.interrupted:
        parts.append("interrupted")
    return "   |   ".join(parts)


def style(ax: Any, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#adb5bd")
    ax.tick_params(colors=INK, labelsize=9)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="#e9ecef", linewidth=0.8)


def shades_of(tiers: Sequence[str]) -> dict[str, Any]:
    """Plain is pale, static tiers darken with depth, adaptive stands out."""
    from matplotlib import colormaps

    static = [mode for mode in tiers if mode != PLAIN_MODE]
    blues = colormaps["Blues"]
    colors: dict[str, Any] = {mode: blues(0.28 + 0.6 * i / max(1, len(static) - 1)) for i, mode in enumerate(static)}
    return {PLAIN_MODE: PALE, ADAPTIVE: ACCENT, **colors}


def _speedups(ax: Any, summaries: Sequence[Summary], colors: Mapping[str, Any]) -> None:
    rated = [s for s in summaries if s.end_to_end.speedup is not None]
    cells = list(dict.fromkeys((s.workload, s.batch_size) for s in rated))
    modes = [m for m in dict.fromkeys(s.mode for s in rated) if m != ADAPTIVE]
    modes += [ADAPTIVE] if any(s.mode == ADAPTIVE for s in rated) else []
    value = {(s.workload, s.batch_size, s.mode): s.end_to_end.speedup for s in rated}
    width = 0.84 / max(1, len(modes))
    for j, mode in enumerate(modes):
        there = [(i, value[(*cell, mode)]) for i, cell in enumerate(cells) if (*cell, mode) in value]
        x = [i - 0.42 + (j + 0.5) * width for i, _ in there]
        bars = ax.bar(x, [v for _, v in there], width * 0.92, color=colors[mode], label=mode)
        if mode == ADAPTIVE:
            ax.bar_label(bars, fmt="%.2f", fontsize=7.5, color=ACCENT, padding=2)
    ax.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    ax.set_xticks(range(len(cells)), [f"{workload}\nbatch {batch_size}" for workload, batch_size in cells])
    ax.set_xlim(-0.55, max(0.55, len(cells) - 0.45))
    ax.set_ylabel("times plain decoding", fontsize=9, color=INK)
    style(ax, "End-to-end speed-up over plain decoding (median of paired repeats)")
    ax.margins(y=0.12)
    if modes:
        ax.legend(ncols=len(modes), fontsize=8.5, frameon=False, loc="upper right", bbox_to_anchor=(1, 1.12))


def _acceptance(ax: Any, runs: Sequence[Run]) -> None:
    drafting = [run for run in runs if run.mode not in (PLAIN_MODE, ADAPTIVE)]
    for color, workload in zip(LINES, dict.fromkeys(run.workload for run in drafting), strict=False):
        shares = acceptance_by_position(run for run in drafting if run.workload == workload)
        ax.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, color=color, label=workload)
    ax.set_ylim(0, 1)
    ax.set_xlabel("draft position", fontsize=9, color=INK)
    style(ax, "Accepted up to a position")
    ax.xaxis.get_major_locator().set_params(integer=True)
    if drafting:
        ax.legend(fontsize=8.5, frameon=False)


def _over_time(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """(title, the adaptive policy's runs) of the switch workload, or of the first one, by batch size."""
    cells = {cell: modes[ADAPTIVE] for cell, modes in group(runs).items() if ADAPTIVE in modes}
    chosen = [cell for cell in cells if cell[0] == "switch"] or list(cells)
    return [(f"{workload}, batch {size}", cells[workload, size]) for workload, size in chosen[:_PANELS]]


def _tiers(ax: Any, title: str, runs: Sequence[Run], colors: Mapping[str, Any], *, legend: bool) -> None:
    bins = min(_BINS, min(len(run.rounds) for run in runs))
    if not bins:
        return
    shares = tier_shares(runs, bins)
    bottom = [0.0] * bins
    x = [(i + 0.5) / bins for i in range(bins)]
    for name, row in shares.items():
        ax.bar(x, row, 1 / bins, bottom=bottom, color=colors[name], label=name, linewidth=0)
        bottom = [b + v for b, v in zip(bottom, row, strict=True)]
    kinds = list(dict.fromkeys(r.kind for run in runs for r in run.rounds if r.kind))
    if len(kinds) > 1:
        ax.plot(x, kind_shares(runs, kinds[0], bins), color=INK, linewidth=1.6, label=f"rounds on {kinds[0]}")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.set_xlabel("progress through the run", fontsize=9, color=INK)
    style(ax, f"Tiers of adaptive: {title}")
    if legend:
        ax.legend(fontsize=7.5, frameon=True, framealpha=0.85, edgecolor="none", loc="lower right")
