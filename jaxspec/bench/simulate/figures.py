"""What outcomes say: pure functions over records. Owns the definitions of every figure of a simulation."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from jaxspec.adaptive.calibration import calibration_error, chance_error
from jaxspec.bench.offline.metrics import percentile
from jaxspec.bench.simulate.records import Outcome, Ran

#: Of the objective for time per output token, which is plain decoding's 90th percentile.
SCALES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
#: Rounds over which it is told whether a policy has settled, and the share of the best that it then has to reach.
_SETTLED_OVER, _SETTLED = 10, 0.95
#: Bins of the calibration's picture.
BINS = 10


@dataclasses.dataclass(frozen=True)
class Figures:
    """One policy in one cell; None where there is nothing to tell from.

    Attributes:
      tokens_per_second: committed tokens over simulated seconds.
      speed: what policies are compared by: tokens a second in a closed loop; in an open one, where all serve the same
        tokens, the inverse of the mean latency.
      speedup: against plain decoding, by `speed`. regret: 1 - speed / the best fixed tier's. gap: share of what lies
        between the best fixed tier and the oracle.
      ttft_p50, ttft_p99, tpot_p50, tpot_p99, latency: seconds, by request; the latter the mean.
      attainment: by scale, the share of requests whose TPOT is within plain decoding's 90th percentile times it.
      length: tokens a round and request. depth: drafts a round and request.
      verified: drafts that were verified, a round and request. experts: distinct ones a layer and round.
      switches: a hundred rounds. settled: after each change of the texts, rounds until it reached 95% of the best
        tier's expected tokens a second over ten rounds; None: not before the next change.
      calibration_error: of the survival that packed rounds are spent by. calibration_chance: what it would be by chance
        alone, so few were the drafts. bias: expected over accepted tokens - 1.
      controller_us, controller_p99: microseconds of the processor a round, the mean and the 99th percentile.
      tiers: rounds by depth. faster: simulated seconds over those of the processor.
    """

    policy: str
    fixed: bool
    tokens_per_second: float
    speed: float
    speedup: float | None
    regret: float | None
    gap: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    latency: float | None
    attainment: dict[str, float] | None
    length: float | None
    depth: float | None
    verified: float | None
    switches: float
    settled: list[int | None]
    calibration_error: float | None
    calibration_chance: float | None
    bias: float | None
    controller_us: float
    controller_p99: float
    tiers: dict[str, int]
    requests: int
    unfinished: int
    refused: int
    preemptions: int
    rounds: int
    faster: float | None
    experts: float | None = None


def speed(outcome: Outcome, closed: bool) -> float:
    """See Figures."""
    if closed:
        return outcome.tokens / outcome.seconds if outcome.seconds else 0.0
    done = outcome.served
    return len(done) / sum(r.latency for r in done) if done else 0.0


def figures(
    name: str, fixed: bool, outcome: Outcome, closed: bool, best: float | None = None,
    plain: Outcome | None = None, oracle: Outcome | None = None,
) -> Figures:  # fmt: skip
    """The numbers of a policy.

    Args:
      best: the best fixed tier's speed.
      plain, oracle: of the cell, where they ran.
    """
    mine, rounds = speed(outcome, closed), outcome.rounds
    rows = sum(r.rows for r in rounds)
    gap = None
    if oracle is not None and best is not None and speed(oracle, closed) > best * 1.001:
        gap = (mine - best) / (speed(oracle, closed) - best)
    tpots = [r.tpot for r in outcome.served if r.tpot is not None]
    ttfts = [r.ttft for r in outcome.served]
    experts = [r.experts for r in rounds if r.experts]
    tiers: dict[str, int] = {}
    for r in sorted(rounds, key=lambda r: r.depth):
        tiers[str(r.depth)] = tiers.get(str(r.depth), 0) + 1
    return Figures(
        policy=name,
        fixed=fixed,
        tokens_per_second=outcome.tokens / outcome.seconds if outcome.seconds else 0.0,
        speed=mine,
        speedup=mine / speed(plain, closed) if plain is not None and speed(plain, closed) else None,
        regret=1 - mine / best if best else None,
        gap=gap,
        ttft_p50=_percentile(ttfts, 0.5),
        ttft_p99=_percentile(ttfts, 0.99),
        tpot_p50=_percentile(tpots, 0.5),
        tpot_p99=_percentile(tpots, 0.99),
        latency=statistics.mean(r.latency for r in outcome.served) if outcome.served else None,
        attainment=None if plain is None else attainment(outcome, plain),
        length=sum(r.gained for r in rounds) / rows if rows else None,
        depth=sum(r.depth * r.rows for r in rounds) / rows if rows else None,
        verified=sum(min(_drafts(r), r.depth * r.rows) for r in rounds) / rows if rows else None,
        switches=100 * outcome.switches / len(rounds) if rounds else 0.0,
        settled=settled(rounds),
        calibration_error=calibration_error(outcome.predicted, outcome.actual) if outcome.predicted else None,
        calibration_chance=chance_error(outcome.predicted) if outcome.predicted else None,
        bias=outcome.expected / outcome.accepted - 1 if outcome.accepted else None,
        controller_us=1e6 * statistics.mean(outcome.controller) if outcome.controller else 0.0,
        controller_p99=1e6 * percentile(outcome.controller, 0.99) if outcome.controller else 0.0,
        tiers=tiers,
        requests=len(outcome.served),
        unfinished=outcome.unfinished,
        refused=outcome.refused,
        preemptions=outcome.preemptions,
        rounds=len(rounds),
        faster=outcome.seconds / outcome.wall if outcome.wall else None,
        experts=statistics.mean(experts) if experts else None,
    )


def _drafts(r: Ran) -> int:
    return r.depth * r.rows if r.tokens is None else r.tokens - r.bucket


def _percentile(values: Sequence[float], share: float) -> float | None:
    return percentile(values, share) if values else None


def objective(plain: Outcome) -> float | None:
    """The time per output token that attainment is of at scale 1: plain decoding's 90th percentile."""
    return _percentile([r.tpot for r in plain.served if r.tpot is not None], 0.9)


def attainment(outcome: Outcome, plain: Outcome) -> dict[str, float] | None:
    """By scale, the share of requests with at least two tokens that met the objective."""
    limit, mine = objective(plain), [r.tpot for r in outcome.served if r.tpot is not None]
    if limit is None or not mine:
        return None
    return {f"{scale:g}": sum(t <= scale * limit for t in mine) / len(mine) for scale in SCALES}


def changes(rounds: Sequence[Ran]) -> list[tuple[int, int | None]]:
    """Each change of the texts that the end did not cut short: its phase, and the rounds until it had settled (see
    Figures)."""
    out: list[tuple[int, int | None]] = []
    starts = [i for i in range(1, len(rounds)) if rounds[i].phase != rounds[i - 1].phase]
    for start, end in zip(starts, [*starts[1:], len(rounds)], strict=False):
        ratios = [r.value / r.best for r in rounds[start:end]]
        if len(ratios) < 2 * _SETTLED_OVER:
            continue
        window = sum(ratios[:_SETTLED_OVER])
        found = None
        for i in range(len(ratios) - _SETTLED_OVER + 1):
            if i:
                window += ratios[i + _SETTLED_OVER - 1] - ratios[i - 1]
            if window >= _SETTLED * _SETTLED_OVER:
                found = i
                break
        out.append((rounds[start].phase, found))
    return out


def settled(rounds: Sequence[Ran]) -> list[int | None]:
    """See Figures; empty where the texts never changed."""
    return [found for _, found in changes(rounds)]


def reliability(outcome: Outcome) -> list[dict[str, float]] | None:
    """Drafts by the survival that was predicted: mean prediction, share that survived, how many; by bin."""
    if not outcome.predicted:
        return None
    sums = [[0.0, 0.0, 0.0] for _ in range(BINS)]
    for p, hit in zip(outcome.predicted, outcome.actual, strict=True):
        cell = sums[min(BINS - 1, int(p * BINS))]
        cell[0], cell[1], cell[2] = cell[0] + p, cell[1] + hit, cell[2] + 1
    return [{"predicted": p / n, "accepted": hits / n, "drafts": n} for p, hits, n in sums if n]


def timeline(outcome: Outcome, bins: int = 120) -> dict[str, list[float]]:
    """Over time: mean drafts and verified drafts a request, requests in a round, value against the best fixed tier."""
    out: dict[str, list[float]] = {"at": [], "depth": [], "verified": [], "rows": [], "ratio": []}
    if not outcome.rounds or not outcome.seconds:
        return out
    cells: dict[int, list[Ran]] = {}
    for r in outcome.rounds:
        cells.setdefault(min(bins - 1, int(bins * r.at / outcome.seconds)), []).append(r)
    for i, many in sorted(cells.items()):
        rows = sum(r.rows for r in many)
        out["at"].append((i + 0.5) * outcome.seconds / bins)
        out["depth"].append(sum(r.depth * r.rows for r in many) / rows)
        out["verified"].append(sum(min(_drafts(r), r.depth * r.rows) for r in many) / rows)
        out["rows"].append(rows / len(many))
        out["ratio"].append(sum(r.value / r.best for r in many) / len(many))
    return {key: [round(x, 4) for x in values] for key, values in out.items()}


def finite(value: float | None) -> float | None:
    """What JSON can hold."""
    return None if value is None or not math.isfinite(value) else value
