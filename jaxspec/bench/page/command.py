"""python -m jaxspec.bench report: a page about a run or a simulation, with a calculator of when speculation pays.

    python -m jaxspec.bench simulate --json sim.json && python -m jaxspec.bench report sim.json --out sim.html
    python -m jaxspec.bench report sim.json --profile profile.json --out page.html

Owns what the page is made of; what its figures mean is told where they are made. The page is one file: it loads
nothing, and works where it lies.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec import cli
from jaxspec.bench.simulate import breakeven, costs

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("model.js", "charts.js", "page.js")
#: What a cell has to have, and a policy in it.
_CELL = ("name", "texts", "closed", "concurrency", "best_fixed", "policies", "timelines", "reliability", "acceptance",
         "confidence_auc")  # fmt: skip
_ROW = ("policy", "speed", "speedup", "regret", "gap", "switches", "controller_us", "settled", "attainment")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.bench report", description=(__doc__ or "").splitlines()[0], formatter_class=cli.Help
    )
    p.add_argument("run", metavar="FILE", help="what `bench simulate --json` or `bench adaptive --json` wrote")
    p.add_argument("--out", metavar="FILE", required=True, help="the HTML to write")
    p.add_argument("--profile", metavar="NAME|FILE", help="costs for the calculator (default: the run's)")
    return p


def read(path: str | os.PathLike) -> dict[str, Any]:
    """A run's figures.

    Raises:
      ValueError: a file that cannot be read or is something else; names the file and what is missing.
    """
    where = os.fspath(path)
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"run {where!r} cannot be read: {error}") from error
    if not isinstance(data, Mapping) or not isinstance(data.get("cells"), list) or "profile" not in data:
        raise ValueError(f"run {where!r} must be an output of `bench simulate --json` or `bench adaptive --json`")
    if not data["cells"]:
        raise ValueError(f"run {where!r} must hold at least 1 cell, got 0")
    for cell in data["cells"]:
        missing = [key for key in _CELL if key not in cell]
        missing += [key for row in cell.get("policies", ()) for key in _ROW if key not in row]
        if missing:
            raise ValueError(f"run {where!r} lacks {sorted(set(missing))} in cell {cell.get('name')!r}")
    return dict(data)


def page(run: Mapping[str, Any], profile: breakeven.Curves | None, source: str) -> str:
    """The HTML.

    Args:
      profile: for the calculator; None: the run's.
      source: what the run is called.
    """
    conditions = {key: value for key, value in run.get("conditions", {}).items() if value not in (None, [], "")}
    data = {
        "measured": not run.get("simulated", True),
        "where": f"{run['profile']['label'][:1].upper()}{run['profile']['label'][1:]}.",
        "when": str(run.get("when", "")),
        "source": source,
        "settings": ", ".join(f"{key.replace('_', ' ')} {_said(value)}" for key, value in conditions.items()),
        "profile": run["profile"] if profile is None else profile.to_dict(),
        "cells": run["cells"],
    }
    html = (_ASSETS / "page.html").read_text(encoding="utf-8")
    parts = {
        "/*STYLE*/": (_ASSETS / "style.css").read_text(encoding="utf-8"),
        "/*SCRIPT*/": "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        # Within a script element only this could end it.
        "/*DATA*/": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    }
    for mark, text in parts.items():
        before, found, after = html.partition(mark)
        assert found, mark
        html = before + text + after
    return html


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def run(args: argparse.Namespace) -> None:
    """Reads, and writes the page.

    Raises:
      ValueError: files that cannot be read or written; names them.
    """
    out = Path(args.out)
    if not out.resolve().parent.is_dir():
        raise ValueError(f"--out {args.out!r}: its directory does not exist")
    data, curves = read(args.run), None
    if args.profile:
        device = costs.load(args.profile)
        curves = breakeven.curves(device, device.deepest or data["profile"]["deepest"])
    out.write_text(page(data, curves, Path(args.run).name), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    args = cli.parse(parser(), argv)
    try:
        run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}: open it in a browser")
    return 0
