"""What a run recorded, and the numbers that follow from it: pure functions over records.

Owns the definitions of every published number. Must not know engines, clocks or output.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

#: The mode that all speed-ups refer to.
PLAIN = "plain"
ADAPTIVE = "adaptive"


@dataclasses.dataclass(frozen=True)
class Round:
    """One decode round.

    Attributes:
      tier: its name; depth: its draft tokens.
      batch_size: requests in it.
      kind: the sort of text that most of its requests were writing.
      seconds: its wall time, prefills excluded.
      tokens: generated tokens that were kept (a round may run past a request's end).
      accepted: accepted drafts of each row, the bonus token excluded.
    """

    tier: str
    depth: int
    batch_size: int
    kind: str
    seconds: float
    tokens: int
    accepted: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One request.

    Attributes:
      prompt: (kind, index) of its prompt.
      ttft: seconds from submission to the first token.
      gaps: (seconds since the tokens before, tokens that came), after the first token.
      token_ids: what was generated.
    """

    prompt: tuple[str, int]
    ttft: float
    gaps: tuple[tuple[float, int], ...]
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """One mode over one queue of prompts.

    Attributes:
      seconds: wall time of it all, prefills included.
      completions: in the order of the queue.
    """

    workload: str
    batch_size: int
    mode: str
    repeat: int
    seconds: float
    rounds: tuple[Round, ...]
    completions: tuple[Completion, ...]

    @property
    def cell(self) -> tuple[str, int]:
        return self.workload, self.batch_size


@dataclasses.dataclass(frozen=True)
class Summary:
    """The numbers of one mode in one cell, over all repeats.

    Attributes:
      tokens_per_second: median over repeats; low and high: the range.
      speedup: median over repeats of the ratio to plain decoding in the same repeat; None without plain runs.
      mean_accepted_length: tokens a round and request, bonus included.
      by_position: see `acceptance_by_position`.
      tpot_p50, tpot_p99, ttft_p50: seconds.
      tiers: rounds by tier name.
    """

    workload: str
    batch_size: int
    mode: str
    repeats: int
    tokens_per_second: float
    low: float
    high: float
    speedup: float | None
    mean_accepted_length: float
    by_position: tuple[float, ...]
    tpot_p50: float
    tpot_p99: float
    ttft_p50: float
    tiers: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Regret:
    """What the adaptive policy lost against the best fixed choice of a cell.

    Attributes:
      best: the mode with the highest median speed among plain and the static tiers.
      loss: median over repeats of 1 - adaptive / best; negative where adaptive won.
    """

    workload: str
    batch_size: int
    best: str
    loss: float


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where a mode's tokens first differ from plain decoding's of the same prompt.

    Attributes:
      position: index of the generated token; the shorter length where one is a prefix of the other.
      plain, other: the tokens there; None past the end.
    """

    workload: str
    batch_size: int
    mode: str
    repeat: int
    prompt: tuple[str, int]
    position: int
    plain: int | None
    other: int | None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value with at least `share` of all at or below it (nearest rank); nan of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def full_rounds(run: Run) -> list[Round]:
    """Rounds with every row in use that kept something: without the filling and draining of the batch."""
    kept = [r for r in run.rounds if r.tokens > 0]
    most = max((r.batch_size for r in kept), default=0)
    return [r for r in kept if r.batch_size == most]


def tokens_per_second(run: Run) -> float:
    """Kept tokens over seconds of the rounds at full batch; nan of a run without rounds."""
    rounds = full_rounds(run)
    seconds = sum(r.seconds for r in rounds)
    return sum(r.tokens for r in rounds) / seconds if seconds > 0 else math.nan


def mean_accepted_length(runs: Iterable[Run]) -> float:
    """Tokens a round and request, bonus included; nan of none."""
    rows = [a for run in runs for r in run.rounds for a in r.accepted]
    return 1 + sum(rows) / len(rows) if rows else math.nan


def acceptance_by_position(runs: Iterable[Run]) -> tuple[float, ...]:
    """For i = 1, 2, ...: of the rows that drafted at least i tokens, the share that accepted at least i."""
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for run in runs:
        for r in run.rounds:
            for i in range(1, r.depth + 1):
                drafted[i] += len(r.accepted)
                accepted[i] += sum(a >= i for a in r.accepted)
    return tuple(accepted[i] / drafted[i] for i in sorted(drafted) if drafted[i])


def token_times(runs: Iterable[Run]) -> list[float]:
    """Seconds of each token after the first: every token takes its share of the gap that it came after."""
    return [gap / count for run in runs for c in run.completions for gap, count in c.gaps for _ in range(count)]


def tier_rounds(runs: Iterable[Run]) -> dict[str, int]:
    """Rounds by tier name, shallow tiers first."""
    counts: Counter[tuple[int, str]] = Counter((r.depth, r.tier) for run in runs for r in run.rounds)
    return {name: count for (_, name), count in sorted(counts.items())}


def group(runs: Iterable[Run]) -> dict[tuple[str, int], dict[str, list[Run]]]:
    """{cell: {mode: its runs}}, in order of first appearance."""
    cells: dict[tuple[str, int], dict[str, list[Run]]] = {}
    for run in runs:
        cells.setdefault(run.cell, {}).setdefault(run.mode, []).append(run)
    return cells


def _ratios(runs: Sequence[Run], base: Sequence[Run]) -> list[float]:
    """Speed of each run over that of the base's run in the same repeat."""
    speed = {run.repeat: tokens_per_second(run) for run in base}
    return [tokens_per_second(run) / speed[run.repeat] for run in runs if run.repeat in speed]


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """One Summary for each mode of each cell, in order of first appearance."""
    out: list[Summary] = []
    for (workload, batch_size), modes in group(runs).items():
        for mode, many in modes.items():
            speeds = [tokens_per_second(run) for run in many]
            ratios = _ratios(many, modes.get(PLAIN, ()))
            times = token_times(many)
            out.append(
                Summary(
                    workload=workload,
                    batch_size=batch_size,
                    mode=mode,
                    repeats=len(many),
                    tokens_per_second=statistics.median(speeds),
                    low=min(speeds),
                    high=max(speeds),
                    speedup=statistics.median(ratios) if ratios else None,
                    mean_accepted_length=mean_accepted_length(many),
                    by_position=acceptance_by_position(many),
                    tpot_p50=percentile(times, 0.5),
                    tpot_p99=percentile(times, 0.99),
                    ttft_p50=percentile([c.ttft for run in many for c in run.completions], 0.5),
                    tiers=tier_rounds(many),
                )
            )
    return out


def regrets(runs: Sequence[Run]) -> list[Regret]:
    """One Regret for each cell where the adaptive policy and some fixed choice ran in the same repeat."""
    out: list[Regret] = []
    for (workload, batch_size), modes in group(runs).items():
        fixed = {mode: many for mode, many in modes.items() if mode != ADAPTIVE}
        if ADAPTIVE not in modes or not fixed:
            continue
        best = max(fixed, key=lambda mode: statistics.median(tokens_per_second(run) for run in fixed[mode]))
        ratios = _ratios(modes[ADAPTIVE], fixed[best])
        if ratios:
            out.append(Regret(workload, batch_size, best, statistics.median(1 - ratio for ratio in ratios)))
    return out


def divergences(runs: Sequence[Run]) -> list[Divergence]:
    """Every completion that differs from plain decoding's in the same cell and repeat."""
    out: list[Divergence] = []
    for (workload, batch_size), modes in group(runs).items():
        plain = {run.repeat: run for run in modes.get(PLAIN, ())}
        for mode, many in modes.items():
            for run in many:
                if mode == PLAIN or run.repeat not in plain:
                    continue
                for base, other in zip(plain[run.repeat].completions, run.completions, strict=True):
                    position = _first_difference(base.token_ids, other.token_ids)
                    if position is not None:
                        at = [
                            ids[position] if position < len(ids) else None for ids in (base.token_ids, other.token_ids)
                        ]
                        out.append(
                            Divergence(workload, batch_size, mode, run.repeat, base.prompt, position, at[0], at[1])
                        )
    return out


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def tier_shares(runs: Sequence[Run], bins: int) -> dict[str, list[float]]:
    """Share of rounds by tier in each of `bins` equal parts of a run's rounds, averaged over the runs.

    Tiers come shallow first; runs with fewer rounds than bins leave some parts out.
    """
    counts: dict[tuple[int, str], list[float]] = {}
    totals = [0.0] * bins
    for run in runs:
        for i, r in enumerate(run.rounds):
            at = min(bins - 1, i * bins // len(run.rounds))
            counts.setdefault((r.depth, r.tier), [0.0] * bins)[at] += 1
            totals[at] += 1
    return {
        name: [n / total if total else 0.0 for n, total in zip(row, totals, strict=True)]
        for (_, name), row in sorted(counts.items())
    }


def kind_shares(runs: Sequence[Run], kind: str, bins: int) -> list[float]:
    """Share of rounds that mostly wrote `kind`, over the same parts as `tier_shares`."""
    hits, totals = [0.0] * bins, [0.0] * bins
    for run in runs:
        for i, r in enumerate(run.rounds):
            at = min(bins - 1, i * bins // len(run.rounds))
            hits[at] += r.kind == kind
            totals[at] += 1
    return [hit / total if total else 0.0 for hit, total in zip(hits, totals, strict=True)]
