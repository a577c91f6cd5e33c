"""A full batch with as many requests waiting: tokens a second with several rounds a call, and with prompts in rounds.

Whether several rounds pay while requests wait for slots (Scheduler.plan) depends on how soon texts end, and whether
rounds that take prompts along do on how often some begin, so that steady rounds of a full batch cannot tell.
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
      rounds: of a dispatch. mixed: share of the rounds that took chunks of prompts along.
    """

    tokens_per_second: float
    first_token: float
    rounds: float
    mixed: float


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
    calls, done = after.dispatches - before.dispatches, after.rounds - before.rounds
    mixed = (after.mixed_rounds - before.mixed_rounds) / done
    return Queue(said / seconds, statistics.mean(waited), done / calls, mixed)


#: What the engine does by itself ("own") is compared with.
_OTHERS = {"single": "single rounds", "apart": "prompts apart"}


def rows(
    engine: Engine, prompts: Sequence[Sequence[int]], tiers: Sequence[Tier], tokens: int, repeats: int,
    ways: Sequence[str] = ("own", *_OTHERS),
) -> list[dict[str, Any]]:  # fmt: skip
    """Medians for each tier, in turn: as the engine does by itself, with single rounds, with prompts by themselves."""
    pace, mixes, out = engine.pace, engine.mixes, []
    for tier in tiers:
        found: dict[str, list[Queue]] = {name: [] for name in ways}
        for repeat in range(repeats):
            for at in range(len(ways)):  # none always comes first
                name = ways[(at + repeat) % len(ways)]
                engine.pace = Pace(1, measured=False) if name == "single" else pace
                engine.mixes = mixes and name != "apart"
                found[name].append(closed_loop(engine, prompts, StaticPolicy(tier), tokens))
        engine.pace, engine.mixes = pace, mixes
        row: dict[str, Any] = {"batch_size": engine.facts.sizes.slots, "policy": tier.name, "tokens": tokens}
        row["prompt_tokens"] = len(prompts[0])
        for name, queues in found.items():
            for field in dataclasses.fields(Queue):
                row[f"{name}_{field.name}"] = statistics.median(getattr(queue, field.name) for queue in queues)
        for name in ways[1:]:
            pairs = zip(found["own"], found[name], strict=True)
            row[f"gains_over_{name}"] = [own.tokens_per_second / other.tokens_per_second for own, other in pairs]
        out.append(row)
    return out


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lines for each tier: what the engine gains over either way, and how long first tokens take in both."""
    head = "batch  policy    prompt  tokens     tok/s  rounds   mixed  against            tok/s  gain (range)"
    lines = [f"{head:<100s}  first token, ms"]
    for r in rows:
        about = (
            f"{r['batch_size']:5d}  {r['policy']:<8s}  {r['prompt_tokens']:6d}  {r['tokens']:6d}  "
            f"{r['own_tokens_per_second']:8.0f}  {r['own_rounds']:6.1f}  {r['own_mixed']:6.1%}"
        )
        for name, text in _OTHERS.items():
            if f"gains_over_{name}" not in r:
                continue
            gains = r[f"gains_over_{name}"]
            gain = f"{statistics.median(gains):.3f} ({min(gains):.3f} to {max(gains):.3f})"
            first = f"{1e3 * r['own_first_token']:.1f}, {1e3 * r[f'{name}_first_token']:.1f}"
            lines.append(f"{about}  {text:<14s}  {r[f'{name}_tokens_per_second']:8.0f}  {gain:<24s}  {first}")
    return "\n".join(lines)
