"""Figures of simulations as text and as JSON. Must not know how they came about."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import operator
import os
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.simulate import breakeven, figures
from jaxspec.bench.simulate.cells import Done
from jaxspec.bench.simulate.costs import Costs
from jaxspec.bench.simulate.policies import ORACLE
from jaxspec.bench.simulate.records import Outcome
from jaxspec.tier import PLAIN

_WIDTH = 118
#: Calibration error by chance alone from which nothing is said of a policy's.
_MOST_CHANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Told:
    """What is said of a cell besides its figures.

    Attributes:
      concurrency: of a closed loop; None: an open one.
      auc: how well confidence tells right drafts from wrong ones, where that is known.
      acceptance: by kind of text, the share of drafts that are accepted up to each position.
    """

    name: str
    texts: str
    load: str
    concurrency: int | None
    auc: float | None
    acceptance: Mapping[str, Sequence[float]]


def told(done: Done) -> Told:
    """Of a simulated cell."""
    cell, deepest = done.cell, max(r.depth for o in done.outcomes.values() for r in o.rounds)
    survival = {
        name: list(itertools.accumulate((rates[min(i, len(rates) - 1)] for i in range(deepest)), operator.mul))
        for name, rates in cell.texts.kinds.items()
    }
    return Told(cell.name, cell.texts.name, cell.load.source, cell.load.concurrency, done.auc, survival)


def block(told: Told, runs: Sequence[Mapping[str, Outcome]], fixed: Collection[str]) -> dict[str, Any]:
    """One cell over all its runs: the mean of every figure, and of the first run what is drawn.

    Args:
      runs: outcomes by policy. fixed: which of these ran one tier.
    """
    closed = told.concurrency is not None
    by_policy: dict[str, list[figures.Figures]] = {}
    for outcomes in runs:
        best = max((figures.speed(outcomes[name], closed) for name in outcomes if name in fixed), default=None)
        plain, oracle = outcomes.get(PLAIN.name), outcomes.get(ORACLE)
        for name, outcome in outcomes.items():
            found = figures.figures(name, name in fixed, outcome, closed, best, plain, oracle)
            by_policy.setdefault(name, []).append(found)
    rows, first = [_mean(many) for many in by_policy.values()], runs[0]
    speeds = {row["policy"]: row["speed"] for row in rows if row["fixed"]}
    by_run = [[one.speed for one in many] for name, many in by_policy.items() if name in fixed]
    return {
        "name": told.name,
        "texts": told.texts,
        "load": told.load,
        "concurrency": told.concurrency,
        "closed": closed,
        "runs": len(runs),
        "confidence_auc": told.auc,
        "noise": _noise(by_run),
        "best_fixed": max(speeds, key=speeds.__getitem__) if speeds else None,
        "policies": rows,
        "timelines": {name: figures.timeline(outcome) for name, outcome in first.items() if name not in fixed},
        "reliability": {name: found for name, outcome in first.items() if (found := figures.reliability(outcome))},
        "acceptance": told.acceptance,
    }


def _noise(speeds: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of one run's speed over that of others of the same fixed tier, the mean over tiers."""
    if not speeds or len(speeds[0]) < 2:
        return None
    return statistics.mean(statistics.stdev(many) / statistics.mean(many) if any(many) else 0.0 for many in speeds)


def _mean(many: Sequence[figures.Figures]) -> dict[str, Any]:
    """Means over runs; lists are joined."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(figures.Figures):
        values = [getattr(one, field.name) for one in many]
        known = [value for value in values if value is not None]
        if field.name in ("policy", "fixed") or not known:
            out[field.name] = values[0]
        elif field.name == "settled":
            out[field.name] = [x for value in values for x in value]
        elif isinstance(known[0], Mapping):
            keys = list(dict.fromkeys(key for value in known for key in value))
            out[field.name] = {key: statistics.mean(value.get(key, 0) for value in known) for key in keys}
        else:
            out[field.name] = statistics.mean(known)
    regrets = [one.regret for one in many if one.regret is not None]
    out["worst_regret"] = max(regrets, default=None)
    return out


def text(cell: Mapping[str, Any], label: str = "simulated") -> str:
    """A cell's table."""
    unit = "tokens/s" if cell["closed"] else "1/latency"
    title = f"--- {label}: {cell['name']} "
    lines = [
        title + "-" * max(0, _WIDTH - len(title)),
        f"{'policy':<22}{unit:>10}{'x plain':>8}{'regret':>8}{'gap':>6}{'length':>7}{'drafts':>7}{'verified':>9}"
        f"{'TTFT':>7}{'TPOT':>7}{'p99':>7}{'SLO 0.8':>8}{'1.0':>5}{'sw':>6}{'settled':>8}{'ECE':>6}{'us':>5}{'p99':>6}",
    ]
    for row in cell["policies"]:
        star = "*" if row["policy"] == cell["best_fixed"] else ""
        kept = row["attainment"] or {}
        lines.append(
            f"{_cut(row['policy'] + star, 21):<22}{_number(row['speed'], 1 if cell['closed'] else 3):>10}"
            f"{_number(row['speedup'], 2):>8}{_share(row['regret'], 1):>8}{_gap(row['gap']):>6}"
            f"{_number(row['length'], 2):>7}{_number(row['depth'], 1):>7}{_number(row['verified'], 1):>9}"
            f"{_ms(row['ttft_p50'], 0):>7}{_ms(row['tpot_p50'], 1):>7}{_ms(row['tpot_p99'], 1):>7}"
            f"{_share(kept.get('0.8')):>8}{_share(kept.get('1')):>5}{_number(row['switches'], 1):>6}"
            f"{_settled(row['settled']):>8}{_calibration(row):>6}{row['controller_us']:>5.0f}"
            f"{row['controller_p99']:>6.0f}"
        )
    if read := [f"{row['policy']} {row['experts']:.1f}" for row in cell["policies"] if row["experts"]]:
        lines.append(f"distinct experts a layer and round: {', '.join(read)}")
    if cell["noise"] is not None:
        lines.append(f"runs of one fixed tier differ by {_share(cell['noise'], 1)} (standard deviation)")
    return "\n".join(lines)


def summary(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Each policy's regret over all cells, its gain over the best single tier, and what the columns mean."""
    single, gains = _against_one(blocks)
    lines = [
        "over all cells: mean and worst regret, gain over the best single fixed tier"
        + (f" ({single})" if single else "") + ", switches a hundred",
        "rounds; simulated over processor seconds",
    ]  # fmt: skip
    names = list(dict.fromkeys(row["policy"] for cell in blocks for row in cell["policies"] if not row["fixed"]))
    for name in names:
        rows = [row for cell in blocks for row in cell["policies"] if row["policy"] == name]
        regrets = [row["regret"] for row in rows if row["regret"] is not None]
        worst = max((row["worst_regret"] for row in rows if row["worst_regret"] is not None), default=None)
        lines.append(
            f"  {_cut(name, 40):<42}{_share(statistics.mean(regrets) if regrets else None, 1):>7}"
            f"{_share(worst, 1):>7}{_share(gains.get(name), 1):>7}"
            f"{statistics.mean(row['switches'] for row in rows):>8.2f}"
            f"{_number(_mean_of(row['faster'] for row in rows), 0):>8}"
        )
    lines += [
        "regret: 1 - speed / the best fixed tier's (*). gap: share of the way from there to the oracle, which knows",
        "every draft's chance. length: tokens a round and request. drafts, verified: of a request and round. TTFT,",
        "TPOT (p50, p99): ms. SLO: requests within 0.8 and 1.0 times plain decoding's 90th percentile of TPOT.",
        "sw: switches of the tier a hundred rounds. settled: rounds after a change of the texts to 95% of the best",
        "tier, median (- never). ECE: calibration error of survival (few: drafts so few that chance alone",
        "would show 1%). us, p99: processor time of the policy a round, microseconds, the mean and 99th percentile.",
    ]
    return "\n".join(lines)


def _against_one(blocks: Sequence[Mapping[str, Any]]) -> tuple[str | None, dict[str, float]]:
    """The fixed tier that is best over all cells by the geometric mean of speeds, and policies' gains over it."""
    logs: dict[str, list[float]] = {}
    fixed = {row["policy"] for cell in blocks for row in cell["policies"] if row["fixed"]}
    for cell in blocks:
        for row in cell["policies"]:
            logs.setdefault(row["policy"], []).append(math.log(row["speed"]) if row["speed"] else -math.inf)
    means = {name: statistics.mean(many) for name, many in logs.items() if len(many) == len(blocks)}
    single = max(fixed & means.keys(), key=means.__getitem__, default=None)
    if single is None or means[single] == -math.inf:
        return None, {}
    return single, {name: math.exp(mean - means[single]) - 1 for name, mean in means.items()}


def profile(device: Costs, depths: Sequence[int]) -> dict[str, Any]:
    """What the report's calculator starts from."""
    return breakeven.curves(device, depths[-1]).to_dict()


def write(value: Any, path: str | os.PathLike) -> None:
    """JSON, all or nothing."""
    path = Path(path)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staging.write_text(json.dumps(_plain(value), allow_nan=False) + "\n", encoding="utf-8")
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _mean_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 2] + ".."


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def _gap(value: float | None) -> str:
    return "<0" if value is not None and value < 0 else _share(value)


def _ms(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{1e3 * value:.{digits}f}"


def _calibration(row: Mapping[str, Any]) -> str:
    """The calibration error, where there were enough drafts to tell."""
    chance = row["calibration_chance"]
    return "few" if chance is not None and chance > _MOST_CHANCE else _share(row["calibration_error"], 1)


def _settled(rounds: Sequence[int | None]) -> str:
    known = sorted(x for x in rounds if x is not None)
    if not rounds or len(known) * 2 < len(rounds):
        return "-" if rounds else ""
    return f"{known[(len(known) - 1) // 2]}"
