"""Results as text of at most 120 columns, and as JSON.

Owns layout and wording. Must not know engines, nor how a number is defined.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.offline.metrics import (
    ADAPTIVE,
    PLAIN_MODE,
    STEADY_ROUNDS,
    Divergence,
    Regret,
    Run,
    Summary,
    divergences,
    regrets,
    summarize,
)

WIDTH = 120
#: Positions of the acceptance column.
_POSITIONS = 5
#: Divergences printed in full.
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that is published about one call.

    Attributes:
      conditions: what was measured, on what.
      runs: the raw records.
      compilations: XLA compilations after the warm-up.
      interrupted: not all of the plan was measured.
    """

    conditions: Mapping[str, Any]
    runs: Sequence[Run]
    compilations: int
    interrupted: bool = False

    @property
    def errors(self) -> list[str]:
        """What makes the command fail: in float32 every mode must write plain decoding's tokens."""
        if self.conditions["dtype"] != "float32":
            return []
        return [f"ERROR: {describe(d)}" for d in divergences(self.runs)]


def describe(d: Divergence) -> str:
    """One divergence in words."""
    side = lambda token: "the end" if token is None else f"token {token}"
    return (
        f"{d.workload}, batch {d.batch_size}, {d.mode}, repeat {d.repeat}: prompt {d.prompt[0]} {d.prompt[1]} "
        f"diverges at generated token {d.position}: {side(d.other)}, but plain decoding has {side(d.plain)}"
    )


def header(conditions: Mapping[str, Any]) -> str:
    """The conditions of a measurement, a few lines."""
    c = conditions
    device = f"{c['devices']} x {c['device']}" if c["devices"] > 1 else c["device"]
    cores = f" ({c['cpu_cores']} cores)" if c["platform"] == "cpu" else ""
    queues = "; ".join(
        f"at batch {size} " + ", ".join(f"{workload} {count}" for workload, count in counts.items())
        for size, counts in c["queues"].items()
    )
    lines = [
        f"device      {device}{cores}, jax {c['jax']}, {c['dtype']}",
        f"model       {c['model']}, {c['parameters'] / 1e6:.1f} M parameters",
        f"drafter     {c['drafter']}",
        f"requests    {c['max_tokens']} tokens each, {sampling(c)}, interleaved repeats: {c['repeats']}",
        f"queues      {queues} requests a run, each sent when a place is free",
        f"warm-up     {c['warmup_seconds']:.1f} s, {c['executables']} executables",
    ]
    if c["grow"]:
        g = c["geometry"]
        lines.insert(
            2,
            f"grown       to {c['grow']}: {g['num_layers']} layers of {g['hidden_size']} compute what the small model "
            "does; vocabulary and drafter keep their sizes",
        )
    if has := c.get("experts"):
        layer = f"{has['count']} of {has['inner']} in {has['layers']} layers, {has['per_token']} a token"
        lines.insert(2, f"experts     {layer}")
    if c["simulated_accept_length"] is not None:
        lines.append(f"SIMULATED   acceptance: {c['simulated_accept_length']:g} tokens a round at the deepest tier")
    if c["skipped_prompts"]:
        lines.append(f"skipped     {c['skipped_prompts']} prompts of {c['prompts']} that exceed the model's context")
    return "\n".join(map(clipped, lines))


def clipped(line: str) -> str:
    """A line of at most WIDTH columns."""
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def sampling(conditions: Mapping[str, Any]) -> str:
    """Greedy, or the temperature."""
    temperature = conditions["temperature"]
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def table(report: Report) -> str:
    """The cells' table: a block for each workload and batch size, a line for each mode."""
    marks = {(r.workload, r.batch_size): r for r in regrets(report.runs)}
    simulated = report.conditions["simulated_accept_length"]
    label = "" if simulated is None else f"   [acceptance SIMULATED at {simulated:g}]"
    blocks: dict[tuple[str, int], list[Summary]] = {}
    for summary in summarize(report.runs):
        blocks.setdefault((summary.workload, summary.batch_size), []).append(summary)
    lines = [_columns()]
    for (workload, batch_size), many in blocks.items():
        title = f"--- {workload}, batch {batch_size}{label} "
        lines.append(title + "-" * (WIDTH - len(title)))
        regret = marks.get((workload, batch_size))
        # Plain first, the adaptive policy last, whatever was measured first.
        many.sort(key=lambda s: (s.mode != PLAIN_MODE, s.mode == ADAPTIVE, _depth(s.mode), s.mode))
        lines += [_row(s, regret) for s in many]
        lines += [_adaptive(s, regret) for s in many if s.mode == ADAPTIVE]
        if any(s.experts for s in many):
            layers = report.conditions["experts"]["layers"]
            told = ", ".join(f"{s.mode} {s.experts / layers:.1f}" for s in many if s.experts)
            lines.append(clipped(f"    distinct experts a layer and round: {told}"))
    return "\n".join(lines)


def _depth(mode: str) -> int:
    digits = mode.partition("-")[2].partition("x")[0]
    return int(digits) if digits.isdigit() else 0


def _columns() -> str:
    return (
        f"{'':<16}{'--------- end to end ---------':>32}  {'- steady state -':>16}\n"
        f"{'mode':<16}{'tokens/s':>9}{'low':>7}{'high':>8}{'speed-up':>9}{'tokens/s':>10}{'speed-up':>9}{'length':>7}"
        f" {'accepted at 1, 2, ..':<{4 * _POSITIONS}}{'TPOT p50':>9}{'p99':>7}{'TTFT':>7}"
    )


def _row(s: Summary, regret: Regret | None) -> str:
    positions = "".join(f" {_share(share)}" for share in s.by_position[:_POSITIONS])
    star = "*" if regret is not None and s.mode == regret.best else ""
    whole, steady = s.end_to_end, s.steady_state
    return (
        f"{s.mode + star:<16}{whole.tokens_per_second:>9.1f}{whole.low:>7.0f}{whole.high:>8.0f}"
        f"{_times(whole.speedup):>9}{_decimal(steady.tokens_per_second, 1):>10}{_times(steady.speedup):>9}"
        f"{_decimal(s.mean_accepted_length, 2):>7} {positions:<{4 * _POSITIONS}}{_ms(s.tpot_p50, 2):>9}"
        f"{_ms(s.tpot_p99, 1):>7}{_ms(s.ttft_p50, 0):>7}"
    )


def _adaptive(s: Summary, regret: Regret | None) -> str:
    total = sum(s.tiers.values()) or 1
    ran = ", ".join(f"{name} {100 * count / total:.0f}%" for name, count in s.tiers.items() if count)
    lost = "" if regret is None else f"; regret {100 * regret.loss:+.1f}% against {regret.best}"
    return clipped(f"    adaptive ran {ran}{lost}")


def _share(value: float) -> str:
    return "1.0" if value > 0.994 else f"{value:.2f}".removeprefix("0")


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _decimal(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ms(seconds: float | None, digits: int) -> str:
    return _decimal(None if seconds is None else 1000 * seconds, digits)


def footer(report: Report) -> str:
    """What the table means in short, exactness, and the compilation counter."""
    lines = [
        "end to end: all tokens over all seconds, prompts, filling and draining included: median of the repeats, low,",
        "high; speed-up: median of the repeats' ratios to plain. Steady state: decoding alone, over the timed rounds",
        "with every place in use. Length: tokens a round and request, bonus included. TPOT: ms a token after the first",
        "one, by request. TTFT: ms to the first token, median. *: best fixed choice, end to end.",
    ]
    lines += _unsteady(report)
    over = [r.loss for r in regrets(report.runs)]
    if over:
        lines.append(
            f"regret of adaptive, end to end: {100 * sum(over) / len(over):+.1f}% mean, {100 * max(over):+.1f}% largest"
        )
    lines.append(f"compilations after warm-up: {report.compilations}")
    lines += _exactness(report)
    if report.interrupted:
        lines.append("INTERRUPTED: only what had finished is shown")
    return "\n".join(lines)


def _unsteady(report: Report) -> list[str]:
    """Where the steady state has a dash, and why."""
    cells: dict[tuple[str, int], list[str]] = {}
    for s in summarize(report.runs):
        if s.steady_state.reason:
            cells.setdefault((s.workload, s.batch_size), []).append(f"{s.mode} {s.steady_state.rounds}")
    if not cells:
        return []
    lines = [
        f"steady state -: fewer than {STEADY_ROUNDS} such rounds (more --waves, --repeats or --max-tokens give more):"
    ]
    for (workload, batch_size), many in cells.items():
        lines.append(clipped(f"  {workload}, batch {batch_size}: {', '.join(many)}"))
    return lines


def _exactness(report: Report) -> list[str]:
    found = divergences(report.runs)
    compared = sum(len(run.completions) for run in report.runs if run.mode != PLAIN_MODE)
    if not found:
        return [f"exactness: {compared} completions equal plain decoding's token for token"] if compared else []
    mark = "ERROR: " if report.errors else ""
    lines = [f"exactness: {mark}{len(found)} of {compared} completions differ from plain decoding's"]
    if not mark:
        lines[0] += f" ({report.conditions['dtype']}: near ties may part)"
    lines += [f"  {mark}{describe(d)}" for d in found[:_SHOWN]]
    return lines + ([f"  ... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def render(report: Report) -> str:
    """The whole report."""
    return "\n".join([header(report.conditions), "", table(report), "", footer(report)])


def jsonable(value: Any) -> Any:
    """Records as plain data; nan is no JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_dict(report: Report) -> dict[str, Any]:
    """Conditions, summaries and all raw numbers; tokens appear only where they diverge."""
    runs = []
    for run in report.runs:
        rounds = {
            f.name: [getattr(r, f.name) for r in run.rounds]
            for f in dataclasses.fields(run.rounds[0])
        } if run.rounds else {}  # fmt: skip
        completions = [{"prompt": c.prompt, "ttft": c.ttft, "gaps": c.gaps} for c in run.completions]
        runs.append(
            {
                "workload": run.workload,
                "batch_size": run.batch_size,
                "mode": run.mode,
                "repeat": run.repeat,
                "seconds": run.seconds,
                "rounds": rounds,
                "completions": completions,
            }
        )
    return {
        "conditions": dict(report.conditions),
        "interrupted": report.interrupted,
        "compilations_after_warmup": report.compilations,
        "summaries": jsonable(summarize(report.runs)),
        "regrets": jsonable(regrets(report.runs)),
        "divergences": jsonable(divergences(report.runs)),
        "runs": runs,
    }


def check_path(option: str, path: str | None) -> None:
    """Raises ValueError where a file could not be written, before anything is measured."""
    if path and not Path(path).resolve().parent.is_dir():
        raise ValueError(f"--{option} {path!r}: its directory does not exist")


def write_json(value: Any, path: str | Path) -> None:
    """Writes JSON all or nothing: an interruption leaves the file as it was."""
    path = Path(path)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staging.write_text(json.dumps(value, allow_nan=False) + "\n", encoding="utf-8")
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
