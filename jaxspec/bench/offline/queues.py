"""A full batch with as many requests waiting: tokens a second with single rounds, and with several a call.

Whether several rounds pay while requests wait for slots (Scheduler.plan) depends on how soon texts end, so that steady
rounds of a full batch cannot tell.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxspec.adaptive.policy import TierPolicy
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.engine import Engine
from jaxspec.events import Delta, Finished
from jaxspec.request import SamplingParams
from jaxspec.scheduling.pace import Pace
from jaxspec.tier import Tier


@dataclasses.dataclass(frozen=True)
class Queue:
    """What a closed loop gave.

    Attributes:
      tokens_per_second: of all requests. first_token: mean seconds from a request's arrival to its first token.
      rounds: of a dispatch.
    """

    tokens_per_second: float
    first_token: float
    rounds: float


def lengths(mean: int) -> Iterator[int]:
    """Of requests without end: spread evenly from half the mean to one and a half."""
    return (max(1, round(mean * (0.5 + (0.381966 * i) % 1))) for i in itertools.count(1))


def closed_loop(
    engine: Engine, prompts: Sequence[Sequence[int]], policy: TierPolicy, tokens: int, *,
    clock: Callable[[], float] = time.perf_counter,
) -> Queue:  # fmt: skip
    """Twice as many requests as slots, each replaced when it ends; looked at until twice as many as slots have ended.

    Args:
      tokens: mean of what a request generates.
    """
    engine.use_policy(policy)
    slots, wanted, number = engine.facts.sizes.slots, lengths(tokens), itertools.count()
    added: dict[str, float] = {}
    waited: list[float] = []
    said = 0

    def add() -> None:
        params = SamplingParams(temperature=0, max_tokens=next(wanted), ignore_eos=True)
        name = engine.add(prompts[next(number) % len(prompts)], params)
        live[name], added[name] = None, clock()

    def run(count: int) -> None:
        """Until so many have ended."""
        nonlocal said
        while count > 0:
            for event in engine.step():
                if isinstance(event, Delta):
                    said += len(event.token_ids)
                    if event.request_id in added:
                        waited.append(clock() - added.pop(event.request_id))
                elif isinstance(event, Finished):
                    del live[event.request_id]
                    count -= 1
                    add()

    live: dict[str, None] = {}
    for _ in range(2 * slots):
        add()
    run(slots)  # their lengths are mixed then
    before, began, said = engine.stats, clock(), 0
    waited.clear()
    run(2 * slots)
    seconds, after = clock() - began, engine.stats
    for name in live:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    calls = after.dispatches - before.dispatches
    return Queue(said / seconds, statistics.mean(waited), (after.rounds - before.rounds) / calls)


def rows(
    engine: Engine, prompts: Sequence[Sequence[int]], tiers: Sequence[Tier], tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Medians for each tier, with single rounds and at the engine's own pace, in turn."""
    own, out = engine.pace, []
    for tier in tiers:
        found: dict[str, list[Queue]] = {"single": [], "own": []}
        for _ in range(repeats):
            for name, pace in (("single", Pace(1, measured=False)), ("own", own)):
                engine.pace = pace
                found[name].append(closed_loop(engine, prompts, StaticPolicy(tier), tokens))
        row: dict[str, Any] = {"batch_size": engine.facts.sizes.slots, "policy": tier.name, "tokens": tokens}
        for name, queues in found.items():
            for field in dataclasses.fields(Queue):
                row[f"{name}_{field.name}"] = statistics.median(getattr(queue, field.name) for queue in queues)
        row["gains"] = [b.tokens_per_second / a.tokens_per_second for a, b in zip(*found.values(), strict=True)]
        out.append(row)
    return out


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each tier."""
    head = "batch  policy   tokens  single tok/s  several tok/s  gain (range)         rounds  first token, ms"
    lines = [head]
    for r in rows:
        gains = r["gains"]
        gain = f"{statistics.median(gains):.3f} ({min(gains):.3f} to {max(gains):.3f})"
        first = f"{1e3 * r['single_first_token']:.1f} and {1e3 * r['own_first_token']:.1f}"
        lines.append(
            f"{r['batch_size']:5d}  {r['policy']:<7s}  {r['tokens']:6d}  {r['single_tokens_per_second']:12.0f}  "
            f"{r['own_tokens_per_second']:13.0f}  {gain:<22s} {r['own_rounds']:5.1f}  {first}"
        )
    return "\n".join(lines)
