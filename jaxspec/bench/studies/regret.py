"""python -m jaxspec.bench.studies.regret: what policies lose against the best fixed tier, over many simulated cells.

A cell is a device, a batch that is always full, and texts that stay as they are or change. Costs are measured rounds
that docs/ keeps (two CPU cores: bench_cpu.json; an H200: h200/rounds.json), AdaSpec's published lines of an H100, and
formulas of an H200's rounds: for large batches, and for a small model whose rounds run four to a dispatch. Nothing is
timed on a device, and the same seeds give the same figures.

regret: 1 - tokens a second / those of the fixed tier that is best for the cell over all its seeds, learning included,
and the standard error over seeds. plain: tokens a second against plain decoding's. switches: changes of the tier per
100 rounds, and after the first 100. better, worse: rounds after drafts turned better or worse until ten rounds reach
95% of what the best fixed tier could expect, the median ("-": not before the next change).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from jaxspec import cli
from jaxspec.bench.online.arrivals import closed
from jaxspec.bench.simulate import acceptance, cells, command, costs, figures, tables
from jaxspec.bench.simulate.records import Outcome, Ran
from jaxspec.tier import PLAIN

_DOCS = Path(__file__).resolve().parents[3] / "docs"
#: Tokens a second that the demo's head catches up with on two cores: 256 in 6 ms, 1,024 in 19 (docs/notes.md).
_CATCH_UP_RATE = 5e4
#: Rounds that belong to the start, and rounds within which a policy should have settled after a change.
_START, SOON = 100, 20
#: The demo's EAGLE-3 head by position on either kind of its texts (docs/bench_cpu.json), and kinds of the simulator.
_CODE, _PROSE = "0.65:0.67:0.64:0.67", "0.47:0.53:0.55:0.5"
TEXTS = {
    "code": _CODE,
    "prose": _PROSE,
    "code+prose": f"{_CODE}+{_PROSE}",
    "code/prose": f"{_CODE}/{_PROSE}",
    "good": "good",
    "poor": "poor",
    "good+poor": "good+poor",
    "good/poor": "good/poor",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """Where a cell runs.

    Attributes:
      costs: loads its costs. depths: of its tiers. budgets: drafts a row that the policy may verify.
      deviation: of a round's seconds from the costs, in logarithm.
      rounds, host_ms: of a dispatch, and what it takes of the host.
    """

    costs: Callable[[], costs.Costs]
    depths: tuple[int, ...]
    budgets: tuple[float, ...] = ()
    deviation: float = 0.04
    rounds: int = 1
    host_ms: float = 0.0


DEVICES = {
    "2 cores": Device(functools.partial(costs.load, _DOCS / "bench_cpu.json", _CATCH_UP_RATE), (2, 4)),
    "H200": Device(functools.partial(costs.load, _DOCS / "h200/rounds.json"), (1, 3, 5)),
    "H100": Device(functools.partial(costs.load, "h100-adaspec"), (1, 2, 3, 5, 7), (2.0, 4.0)),
    "H200, 1B": Device(functools.partial(costs.load, "h200-1b"), (1, 3, 5), rounds=4, host_ms=1.3),
    "H200 formula": Device(functools.partial(costs.load, "h200-formula"), (1, 2, 3, 5, 7), (2.0, 4.0)),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One load of one kind of texts on one device.

    Attributes:
      device, texts: names. batch: requests at once.
      rounds: how long, in plain decoding's rounds. phase: between changes of the texts, alike.
      seeds: runs. streaks: as of `bench simulate`. restarted: the policy begins with what it learnt in another run.
      grows: after so many rounds there are twice as many requests, from one to the batch; inf: all from the start.
    """

    device: str
    batch: int
    texts: str
    rounds: int
    seeds: int
    phase: float = math.inf
    streaks: float = 0.0
    restarted: bool = False
    grows: float = math.inf

    @property
    def name(self) -> str:
        """In words."""
        more = f", streaks {self.streaks:g}" * (self.streaks > 0) + ", restarted" * self.restarted
        more += ", grows" * (self.grows < math.inf)
        return f"{self.device}, {self.batch}, {self.texts}, {self.rounds}{more}"


def _grid(
    device: str, batches: Iterable[int], texts: Iterable[str], rounds: int, seeds: int, **more: Any
) -> list[Cell]:
    """Every batch with every kind of texts; those that change do so after each quarter of the rounds."""
    out = []
    for batch, text in itertools.product(batches, texts):
        phase = rounds / 4 if "/" in text else math.inf
        out.append(Cell(device, batch, text, rounds, seeds, phase, **more))
    return out


_DEMO, _KINDS = ("code", "prose", "code+prose", "code/prose"), ("good", "poor", "good+poor", "good/poor")
#: Sets of cells by name.
SETS = {
    "default": [
        *_grid("2 cores", (1, 4, 16), _DEMO, 130, 6),
        *_grid("2 cores", (1, 4, 16), _DEMO, 500, 6),
        *_grid("H100", (1, 8, 64), _KINDS, 600, 3),
        *_grid("H200", (1, 8, 32), ("code", "prose", "code/prose"), 600, 4),
        *_grid("H100", (1, 8), ("good", "poor"), 600, 3, restarted=True),
        *_grid("2 cores", (4, 16), ("code", "prose"), 130, 6, restarted=True),
    ],
    "changes": [
        *_grid("H100", (1, 8, 32), ("good/poor",), 1500, 4),
        *_grid("H100", (1, 8, 32), ("good/poor",), 1500, 4, streaks=0.35),
        *_grid("H200", (1, 8, 32), ("good/poor",), 1500, 4),
        *_grid("H200", (1, 8, 32), ("good/poor",), 1500, 4, streaks=0.35),
        *_grid("2 cores", (1, 4, 16), ("good/poor",), 1500, 4),
    ],
    "streaks": [
        *_grid("H200", (1, 8, 32), ("code", "prose"), 900, 4, streaks=0.35),
        *_grid("H100", (1, 8, 64), ("good", "poor"), 900, 3, streaks=0.35),
    ],
    "several": [
        *_grid("H200, 1B", (1, 8, 16), ("code", "prose", "code/prose"), 200, 6),
        *_grid("H200, 1B", (1, 8, 16), (*_KINDS, "code", "prose", "code/prose"), 800, 4),
    ],
    "large": [
        *_grid("H200 formula", (64, 128, 256), _KINDS, 300, 2),
        *_grid("H100", (128, 256), _KINDS, 300, 2),
    ],
    "growing": [
        *_grid("2 cores", (16,), ("code", "prose", "code+prose"), 500, 4, grows=80),
        *_grid("H200", (32,), ("code", "prose", "code+prose"), 500, 4, grows=80),
        *_grid("H100", (64,), ("good", "poor", "good+poor"), 560, 3, grows=80),
    ],
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What one seed of a cell told of a policy, or of a fixed tier.

    Attributes:
      speed: tokens a second. rounds, switches, drafted: of it, changes of the tier, and rounds that drafted.
      late: switches per 100 rounds after the first ones; None: too few rounds.
      changes: (whether drafts turned better, rounds until it had settled).
      bias: expected over accepted tokens - 1. us: microseconds of the policy a round.
      calibration, chance: error of survival, and what so few drafts show by chance.
    """

    speed: float
    rounds: int
    switches: int
    drafted: float
    late: float | None
    changes: list[tuple[bool, int | None]]
    bias: float | None
    us: float
    calibration: float | None
    chance: float | None


def run_of(name: str, outcome: Outcome) -> Run:
    """The figures of an outcome; the first of two kinds of texts in turn is the better one."""
    told = figures.figures(name, False, outcome, closed=True)
    return Run(
        told.speed, told.rounds, outcome.switches, sum(r.depth > 0 for r in outcome.rounds) / max(1, told.rounds),
        _late(outcome.rounds), [(phase % 2 == 0, found) for phase, found in figures.changes(outcome.rounds)],
        told.bias, told.controller_us, told.calibration_error, told.calibration_chance,
    )  # fmt: skip


def _late(rounds: Sequence[Ran]) -> float | None:
    rest = rounds[_START:]
    if len(rest) < _START / 2:
        return None
    return 100 * sum(a.depth != b.depth for a, b in itertools.pairwise(rest)) / len(rest)


def play(job: tuple[Cell, Sequence[str], int]) -> dict[str, Run]:
    """Every fixed tier and every policy on one seed of a cell, by name."""
    cell, policies, seed = job
    device = DEVICES[cell.device]
    priced = device.costs()
    plain = priced.round(0, cell.batch, cell.batch, cell.batch * 256)
    texts = TEXTS[cell.texts]
    if cell.phase < math.inf:
        texts += f"@{cell.phase * plain:.9g}"
    args = command.parser().parse_args(
        ["--prompt-tokens", "128", "--noise", str(device.deviation),
         "--rounds-per-dispatch", str(device.rounds), "--host-ms", str(device.host_ms), "--budgets",
         ",".join(map(str, device.budgets)), *(x for name in policies for x in ("--policy", name)),
         *["--carry"] * cell.restarted]
    )  # fmt: skip
    args.grow = None if cell.grows == math.inf else cell.grows * plain
    process = acceptance.parse(texts, acceptance.Reliability(streaks=cell.streaks))
    played = cells.Cell(cell.name, process, closed(cell.batch, 1), cell.batch, cell.rounds * plain)
    done = cells.play(played, args, priced, seed, (0, *device.depths))
    return {name: run_of(name, outcome) for name, outcome in done.outcomes.items()}


def row(cell: Cell, runs: Sequence[Mapping[str, Run]], policy: str) -> dict[str, Any]:
    """What a policy did in a cell."""
    fixed = [name for name in runs[0] if name == PLAIN.name or name.startswith("chain")]
    speeds = {name: statistics.mean(run[name].speed for run in runs) for name in fixed}
    best = max(speeds, key=speeds.__getitem__)
    mine = [run[policy] for run in runs]
    regrets = [1 - run[policy].speed / run[best].speed for run in runs]
    mean = lambda values: statistics.mean(known) if (known := [x for x in values if x is not None]) else None
    waits = [change for run in mine for change in run.changes]
    return {
        **dataclasses.asdict(cell),
        **{name: value if (value := getattr(cell, name)) < math.inf else None for name in ("phase", "grows")},
        "cell": cell.name,
        "policy": policy,
        "best": best,
        "regret": statistics.mean(regrets),
        "error": statistics.stdev(regrets) / math.sqrt(len(regrets)) if len(regrets) > 1 else None,
        "plain": statistics.mean(run[policy].speed / run[PLAIN.name].speed for run in runs),
        "drafted": statistics.mean(run.drafted for run in mine),
        "switches": statistics.mean(100 * run.switches / run.rounds for run in mine),
        "late_switches": mean(run.late for run in mine),
        "better": [found for better, found in waits if better],
        "worse": [found for better, found in waits if not better],
        "bias": mean(run.bias for run in mine),
        "us": statistics.mean(run.us for run in mine),
        "calibration": mean(run.calibration for run in mine if run.chance is not None and run.chance < 0.01),
        "speeds": {name: [round(run[name].speed, 3) for run in runs] for name in (*fixed, policy)},
    }


def median(waits: Sequence[int | None]) -> float | None:
    """Of rounds until it had settled; None where half had not, or nothing changed."""
    found = statistics.median(math.inf if wait is None else wait for wait in waits) if waits else math.inf
    return None if found == math.inf else found


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over cells: mean and worst regret, least share of plain decoding, switches, rounds to settle."""
    waits = [wait for r in rows for wait in (*r["better"], *r["worse"])]
    late = [r["late_switches"] for r in rows if r["late_switches"] is not None]
    return {
        "cells": len(rows),
        "regret": statistics.mean(r["regret"] for r in rows),
        "worst": max(r["regret"] for r in rows),
        "least_plain": min(r["plain"] for r in rows),
        "switches": statistics.mean(r["switches"] for r in rows),
        "late_switches": statistics.mean(late) if late else None,
        "better": median([wait for r in rows for wait in r["better"]]),
        "worse": median([wait for r in rows for wait in r["worse"]]),
        "soon": sum(wait is not None and wait <= SOON for wait in waits) / len(waits) if waits else None,
    }


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def line(r: Mapping[str, Any]) -> str:
    """A cell's figures."""
    return (
        f"{r['cell']:<45}{r['best']:<9}{100 * r['regret']:>6.1f} {_show(r['error'] and 100 * r['error'], '.1f'):>4}"
        f"{r['plain']:>7.3f}{100 * r['drafted']:>5.0f}%{r['switches']:>6.1f}{_show(r['late_switches'], '.1f'):>6}"
        f"{_show(median(r['better']), '.0f'):>7}{_show(median(r['worse']), '.0f'):>6}{r['us']:>6.0f}"
    )


_HEAD = (
    f"{'device, batch, texts, rounds':<45}{'best':<9}{'regret':>6} {'+-':>4}{'plain':>7}{'drafts':>6}{'switch':>6}"
    f"{'late':>6}{'better':>7}{'worse':>6}{'us':>6}"
)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Totals by batch and over all."""
    lines = ["batch  cells  regret  worst  least plain  switches  late  better  worse  within 20 rounds"]
    groups = [(str(batch), [r for r in rows if r["batch"] == batch]) for batch in sorted({r["batch"] for r in rows})]
    for name, many in (*groups, ("all", rows)):
        t = totals(many)
        lines.append(
            f"{name:>5}{t['cells']:>7}{100 * t['regret']:>7.2f}%{100 * t['worst']:>6.1f}%{t['least_plain']:>13.3f}"
            f"{t['switches']:>10.2f}{_show(t['late_switches'], '.2f'):>6}{_show(t['better'], '.0f'):>8}"
            f"{_show(t['worse'], '.0f'):>7}{_show(t['soon'], '.0%'):>18}"
        )
    return "\n".join(lines)


def study(
    chosen: Sequence[Cell], policies: Sequence[str], say: Callable[[str], None], jobs: int = 1
) -> list[dict[str, Any]]:
    """Plays the cells; a row of each for each policy."""
    todo = [(cell, policies, seed) for cell in chosen for seed in range(cell.seeds)]
    rows: list[dict[str, Any]] = []
    say(_HEAD)
    with ProcessPoolExecutor(jobs) if jobs > 1 else _Here() as pool:
        found = iter(pool.map(play, todo))
        for cell in chosen:
            runs = list(itertools.islice(found, cell.seeds))
            for policy in policies:
                rows.append(row(cell, runs, policy))
                say(line(rows[-1]) + (f"  {policy}" if len(policies) > 1 else ""))
    return rows


class _Here:
    """Instead of other processes: this one."""

    map = staticmethod(map)

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.bench.studies.regret", description=(__doc__ or "").split("\n\n")[0],
        formatter_class=cli.Help,
    )  # fmt: skip
    add = p.add_argument
    add("--cells", nargs="+", choices=[*SETS, "all"], default=["default"], help="which sets")
    add("--match", default="", metavar="TEXT", help="only cells whose names hold this")
    add("--policy", action="append", metavar="NAME", help="as of `bench simulate`; may be repeated (default: adaptive)")
    add("--seeds", type=int, help="runs of each cell (default: 2 to 6, as the cell says)")
    add("--jobs", type=int, default=1, help="processes")
    add("--json", metavar="FILE", help="conditions, and every cell with its speeds by seed (default: not written)")
    args = cli.parse(p, argv)
    names = list(SETS) if "all" in args.cells else list(dict.fromkeys(args.cells))
    policies = args.policy or ["adaptive"]
    out = []
    for name in names:
        chosen = [cell for cell in SETS[name] if args.match in cell.name]
        if args.seeds:
            chosen = [dataclasses.replace(cell, seeds=args.seeds) for cell in chosen]
        if not chosen:
            print(f"error: no cell of {name!r} is named {args.match!r}, as is {SETS[name][0].name!r}", file=sys.stderr)
            return 2
        print(f"SIMULATED: {name}, {len(chosen)} cells")
        rows = study(chosen, policies, lambda text: print(text, flush=True), args.jobs)
        out += [{"set": name, **r} for r in rows]
        for policy in policies:
            print(f"\n{policy}\n" + summary([r for r in rows if r["policy"] == policy]) + "\n", flush=True)
    if args.json:
        devices = {name: device.costs().label for name, device in DEVICES.items()}
        conditions = {"cells": names, "policies": policies, "match": args.match, "devices": devices, "texts": TEXTS}
        tables.write({"simulated": True, "conditions": conditions, "cells": out}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
