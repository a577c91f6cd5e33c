"""What a run recorded, and the numbers that follow from it: pure functions over records.

Owns the definitions of every published number; docs/benchmarks.md has them in words. Two speeds, both of generated
tokens that were kept. **End to end**: all of them over all seconds of the run, prompts, filling and draining included;
speed-ups, regrets and the best fixed choice are of it. **Steady state**: tokens over seconds of the rounds with every
place in use whose time was taken. No token counts without its time. Must not know engines, clocks or output.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

#: The mode that all speed-ups refer to.
PLAIN_MODE = "plain"
ADAPTIVE = "adaptive"
#: A steady state is told from at least so many rounds, over all repeats.
STEADY_ROUNDS = 50


@dataclasses.dataclass(frozen=True)
class Round:
    """One decode round.

    Attributes:
      tier: its name; depth: its draft tokens.
      batch_size: requests in it.
      kind: the sort of text that most of its requests were writing.
      seconds: its wall time; None: not taken, as of the first round after a prefill, whose time it shares.
      tokens: generated tokens that were kept (a round may run past a request's end).
      accepted: accepted drafts of each row, the bonus token excluded.
      experts: distinct ones that the target read, over all layers; 0 of models without.
    """

    tier: str
    depth: int
    batch_size: int
    kind: str
    seconds: float | None
    tokens: int
    accepted: tuple[int, ...]
    experts: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """One request.

    Attributes:
      prompt: (kind, index) of its prompt.
      ttft: seconds from submission to the first tokens.
      gaps: (seconds since the tokens before, tokens that came), after the first tokens.
      token_ids: what was generated.
    """

    prompt: tuple[str, int]
    ttft: float
    gaps: tuple[tuple[float, int], ...]
    token_ids: tuple[int, ...]

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first ones; None where none came."""
        count = sum(count for _, count in self.gaps)
        return sum(gap for gap, _ in self.gaps) / count if count else None


@dataclasses.dataclass(frozen=True)
class Run:
    """One mode over one queue of prompts.

    Attributes:
      batch_size: places, each of which takes the next prompt of the queue as soon as it is free.
      seconds: wall time of it all, from the first submission to the last token.
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
class EndToEnd:
    """What a user gets, prompts, filling and draining of the batch included.

    Attributes:
      tokens_per_second: median over repeats; low and high: the range.
      speedup: median over repeats of the ratio to plain decoding in the same repeat; None without plain runs.
    """

    tokens_per_second: float
    low: float
    high: float
    speedup: float | None


@dataclasses.dataclass(frozen=True)
class SteadyState:
    """Decoding alone, while every place of the batch is in use.

    Attributes:
      rounds: that it is told from, over all repeats (`steady_rounds`).
      tokens_per_second: their tokens over their seconds; None: there are fewer than `STEADY_ROUNDS`.
      speedup: ratio to plain decoding over the same repeats; None where either has no speed.
      reason: why there is no speed; "" where there is.
    """

    rounds: int
    tokens_per_second: float | None
    speedup: float | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """The numbers of one mode in one cell, over all repeats.

    Attributes:
      mean_accepted_length: tokens a round and request, bonus included; None without rounds.
      by_position: see `acceptance_by_position`.
      tpot_p50, tpot_p99: seconds a token after the first ones, of each request (`Completion.tpot`); None of none.
      ttft_p50: seconds; None of none.
      tiers: rounds by tier name.
      experts: distinct ones a round, over all layers; None without rounds, or of models without.
    """

    workload: str
    batch_size: int
    mode: str
    repeats: int
    end_to_end: EndToEnd
    steady_state: SteadyState
    mean_accepted_length: float | None
    by_position: tuple[float, ...]
    tpot_p50: float | None
    tpot_p99: float | None
    ttft_p50: float | None
    tiers: dict[str, int]
    experts: float | None = None


@dataclasses.dataclass(frozen=True)
class Regret:
    """What the adaptive policy lost against the best fixed choice of a cell.

    Attributes:
      best: the mode with the highest median speed, end to end, among plain and the static tiers.
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


def end_to_end(run: Run) -> float:
    """Tokens a second of the whole run."""
    return sum(len(c.token_ids) for c in run.completions) / run.seconds


def steady_rounds(run: Run) -> list[Round]:
    """Rounds with every place in use whose time was taken.

    A place stays in use for the one round that was dispatched before its request's end was read: time without tokens,
    which a server that is kept full pays as well.
    """
    return [r for r in run.rounds if r.seconds is not None and r.batch_size == run.batch_size]


def _pooled(runs: Iterable[Run]) -> tuple[int, float]:
    """(rounds, tokens a second) of all steady rounds; no speed, 0.0, of none."""
    rounds = [r for run in runs for r in steady_rounds(run)]
    seconds = sum(r.seconds or 0.0 for r in rounds)
    return len(rounds), sum(r.tokens for r in rounds) / seconds if seconds else 0.0


def steady_state(runs: Sequence[Run], base: Sequence[Run]) -> SteadyState:
    """Of one mode's runs; `base`: plain decoding's of the same cell."""
    rounds, speed = _pooled(runs)
    if rounds < STEADY_ROUNDS or not speed:
        size = runs[0].batch_size if runs else 0
        places = "its place" if size == 1 else f"all {size} places"
        reason = f"{rounds} of at least {STEADY_ROUNDS} timed rounds with {places} in use"
        return SteadyState(rounds, None, None, reason)
    speedup = None
    if _pooled(base)[0] >= STEADY_ROUNDS:
        # The repeats that both ran: a machine that slows down between repeats slows both.
        shared = {run.repeat for run in runs} & {run.repeat for run in base}
        own, plain = (_pooled(run for run in many if run.repeat in shared)[1] for many in (runs, base))
        speedup = own / plain if plain else None
    return SteadyState(rounds, speed, speedup, "")


def mean_accepted_length(runs: Iterable[Run]) -> float | None:
    """Tokens a round and request, bonus included; None of none.

    A row's last round counts in full where a limit cut its tokens, and so does the round in flight at its request's
    end: they say as much about the drafts as others do.
    """
    rows = [a for run in runs for r in run.rounds for a in r.accepted]
    return 1 + sum(rows) / len(rows) if rows else None


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


def tier_rounds(runs: Iterable[Run]) -> dict[str, int]:
    """Rounds by tier name, shallow tiers first."""
    counts: Counter[tuple[int, str]] = Counter((r.depth, r.tier) for run in runs for r in run.rounds)
    return {name: count for (_, name), count in sorted(counts.items())}


def experts_a_round(runs: Iterable[Run]) -> float | None:
    """Distinct experts, over all layers, of rounds that read any; None without."""
    counts = [r.experts for run in runs for r in run.rounds if r.experts]
    return statistics.mean(counts) if counts else None


def group(runs: Iterable[Run]) -> dict[tuple[str, int], dict[str, list[Run]]]:
    """{cell: {mode: its runs}}, in order of first appearance."""
    cells: dict[tuple[str, int], dict[str, list[Run]]] = {}
    for run in runs:
        cells.setdefault(run.cell, {}).setdefault(run.mode, []).append(run)
    return cells


def _ratios(runs: Sequence[Run], base: Sequence[Run]) -> list[float]:
    """End-to-end speed of each run over that of the base's run in the same repeat."""
    speed = {run.repeat: end_to_end(run) for run in base}
    return [end_to_end(run) / speed[run.repeat] for run in runs if run.repeat in speed]


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """One Summary for each mode of each cell, in order of first appearance."""
    out: list[Summary] = []
    for (workload, batch_size), modes in group(runs).items():
        for mode, many in modes.items():
            speeds = [end_to_end(run) for run in many]
            ratios = _ratios(many, modes.get(PLAIN_MODE, ()))
            tpots = [c.tpot for run in many for c in run.completions if c.tpot is not None]
            ttfts = [c.ttft for run in many for c in run.completions]
            out.append(
                Summary(
                    workload=workload,
                    batch_size=batch_size,
                    mode=mode,
                    repeats=len(many),
                    end_to_end=EndToEnd(
                        statistics.median(speeds), min(speeds), max(speeds),
                        statistics.median(ratios) if ratios else None,
                    ),
                    steady_state=steady_state(many, modes.get(PLAIN_MODE, ())),
                    mean_accepted_length=mean_accepted_length(many),
                    by_position=acceptance_by_position(many),
                    tpot_p50=percentile(tpots, 0.5) if tpots else None,
                    tpot_p99=percentile(tpots, 0.99) if tpots else None,
                    ttft_p50=percentile(ttfts, 0.5) if ttfts else None,
                    tiers=tier_rounds(many),
                    experts=experts_a_round(many),
                )
            )  # fmt: skip
    return out


def regrets(runs: Sequence[Run]) -> list[Regret]:
    """One Regret for each cell where the adaptive policy and some fixed choice ran in the same repeat."""
    out: list[Regret] = []
    for (workload, batch_size), modes in group(runs).items():
        fixed = {mode: many for mode, many in modes.items() if mode != ADAPTIVE}
        if ADAPTIVE not in modes or not fixed:
            continue
        best = max(fixed, key=lambda mode: statistics.median(end_to_end(run) for run in fixed[mode]))
        ratios = _ratios(modes[ADAPTIVE], fixed[best])
        if ratios:
            out.append(Regret(workload, batch_size, best, statistics.median(1 - ratio for ratio in ratios)))
    return out


def divergences(runs: Sequence[Run]) -> list[Divergence]:
    """Every completion that differs from plain decoding's in the same cell and repeat."""
    out: list[Divergence] = []
    for (workload, batch_size), modes in group(runs).items():
        plain = {run.repeat: run for run in modes.get(PLAIN_MODE, ())}
        for mode, many in modes.items():
            for run in many:
                if mode == PLAIN_MODE or run.repeat not in plain:
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
