"""Pictures: of a run (loss, acceptance by position, simulated length, learning rate), and of an evaluation.

Owns drawing. matplotlib (the extra `plot`) is imported when a picture is drawn.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from jaxspec.train.run import logs

_LINES = ("#1c7ed6", "#2f9e44", "#9c36b5", "#f08c00", "#495057", "#0c8599", "#e03131", "#868e96")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_run(run_dir: Path) -> str:
    """Draws run_dir/log.csv as run_dir/training.png; returns a line that says where it is or why it is not."""
    rows = logs.read(run_dir / "log.csv")
    if not rows:
        return f"no plot: {run_dir / 'log.csv'} has no rows"
    if not can_draw():
        return f"no plot: matplotlib is not installed (pip install -e '.[plot]'); figures are in {run_dir / 'log.csv'}"

    def series(name: str) -> tuple[list[int], list[float]]:
        kept = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        return [step for step, _ in kept], [value for _, value in kept]

    positions = sorted((n for n in rows[-1] if n.startswith("accept_")), key=lambda n: int(n.removeprefix("accept_")))
    panels = {
        "loss, nats": ["loss"],
        "share accepted": positions,
        "tokens a round": ["length"],
        "learning rate": ["lr"],
    }
    figure = _figure(11, 7)
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for name, colour in zip(names, _LINES * (1 + len(names) // len(_LINES)), strict=False):
            axes.plot(*series(name), color=colour, label=name)
            held = series(f"eval_{name}")
            if held[0]:
                axes.plot(*held, color=colour, marker="o", linestyle="--", label="_held out")
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", loc="best")
    figure.suptitle("lines: training; dots: held out", fontsize="small")
    path = run_dir / "training.png"
    figure.savefig(path, dpi=120)
    return f"plot: {path}"


def plot_evaluation(record: dict[str, Any], path: Path) -> None:
    """Draws what `evaluate` measured: acceptance by position and, where rounds were timed, speed-up by depth."""
    timed = "milliseconds" in record
    figure = _figure(11 if timed else 6, 4)
    left, *right = figure.subplots(1, 2 if timed else 1, squeeze=False).flat
    for group in record["groups"]:
        left.plot(range(1, record["depth"] + 1), group["accept"], marker="o", label=group["label"])
    left.set(xlabel="draft position", ylabel="accepted of the rounds that got there", ylim=(0, 1.02))
    left.legend(fontsize="small")
    for axes in right:
        for group in record["groups"]:
            for batch, row in group["speedup"].items():
                chains = [speedup for name, speedup in row.items() if name not in group["trees"]]
                axes.plot(range(len(chains)), chains, marker="o", label=f"{group['label']}, batch {batch}")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(xlabel="depth of the chain (0: plain decoding)", ylabel="expected speed-up")
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
