"""python -m jaxspec.bench overheads: the host's microseconds by part of a round, and how long the device idles.

overheads --batch-sizes 1,16,64 --tiers off,3                 the demo
overheads --model DIR --tiers off,3,5 --policies adaptive      a grown model (`python -m jaxspec.bench grow 1b DIR`)
overheads --batch-sizes 16 --queue 128                         also twice as many requests as slots, of 128 tokens each
overheads --rounds 0 --queue 128 --context 64 --mixed-chunk 16   only these, with prompts of 64 tokens

Requests of a full batch run side by side; rounds are looked at once all are under way and until the first could end, so
that no prompt is among them. What the device needs for a round is that of the same executable dispatched back to back
at the same context; the rest of a round's wall time the device idles. On a CPU host and device share the cores. Where
one call runs several rounds (EngineConfig.rounds_per_dispatch), the column "rounds" says how many on average, and the
host's time is shared among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxspec import cli
from jaxspec.adaptive.policy import TierPolicy
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.offline import grow, queues
from jaxspec.bench.offline.engines import Options, Parts
from jaxspec.bench.offline.measure import Sweep
from jaxspec.bench.offline.metrics import ADAPTIVE
from jaxspec.bench.offline.prompts import CODE
from jaxspec.bench.offline.report import check_path, write_json
from jaxspec.config import MOST_ROUNDS
from jaxspec.engine import Engine
from jaxspec.events import Delta, Event
from jaxspec.laps import PARTS, WAIT
from jaxspec.names import DTYPES
from jaxspec.request import SamplingParams
from jaxspec.runtime.timing import back_to_back
from jaxspec.tier import PLAIN, Tier, parse_tier

#: Rounds before those that are looked at, in which the engine also learns how many to dispatch at once.
_FIRST = 32


@dataclasses.dataclass(frozen=True)
class Window:
    """What some rounds took, in seconds a round.

    Attributes:
      wall: from one to the next. parts: of the host, by jaxspec.laps.PARTS; WAIT is not the host's.
      starved: share of the dispatches before which the device had no work left (EngineStats.starved_rounds).
      tokens: that a request got in a round. rounds: of a dispatch.
    """

    wall: float
    parts: dict[str, float]
    starved: float
    tokens: float
    rounds: float

    @property
    def host(self) -> float:
        """Of the host, whether the device worked meanwhile or not."""
        return sum(seconds for part, seconds in self.parts.items() if part != WAIT)


def median(windows: Sequence[Window]) -> Window:
    """Of every figure by itself."""
    middle = lambda of: statistics.median(map(of, windows))
    parts = {part: middle(lambda w, part=part: w.parts[part]) for part in windows[0].parts}
    whole = (middle(lambda w: w.starved), middle(lambda w: w.tokens), middle(lambda w: w.rounds))
    return Window(middle(lambda w: w.wall), parts, *whole)


def window(
    engine: Engine, prompts: Sequence[Sequence[int]], policy: TierPolicy, rounds: int, room: int, *,
    clock: Callable[[], float] = time.perf_counter,
) -> Window:  # fmt: skip
    """Rounds of a full batch in a steady state.

    Args:
      prompts: of requests that run side by side.
      room: tokens that each may generate, too many for it to end.
    """
    engine.use_policy(policy)
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    ids = [engine.add(prompt, params) for prompt in prompts]
    started: set[str] = set()
    while len(started) < len(ids):
        started |= {event.request_id for event in engine.step() if isinstance(event, Delta)}
    settled = engine.stats.rounds + _FIRST
    while engine.stats.rounds < settled:
        engine.step()
    before, began = engine.stats, clock()
    events: list[Event] = []
    while engine.stats.rounds < before.rounds + rounds:
        events += engine.step()
    seconds, after = clock() - began, engine.stats
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    done, calls = after.rounds - before.rounds, after.dispatches - before.dispatches
    spent = {part: (after.host_parts[part] - before.host_parts[part]) / done for part in PARTS if part != WAIT}
    spent[WAIT] = (after.device_seconds - before.device_seconds) / done
    starved = (after.starved_rounds - before.starved_rounds) / calls
    tokens = sum(len(event.token_ids) for event in events if isinstance(event, Delta))
    return Window(seconds / done, spent, starved, tokens / done / len(ids), done / calls)


def row(
    engine: Engine, prompts: Sequence[Sequence[int]], name: str, rounds: int, repeats: int, room: int
) -> dict[str, Any]:
    """Medians of one batch size and policy, in microseconds.

    Args:
      name: of a tier, or ADAPTIVE.
    """
    tier = None if name == ADAPTIVE else parse_tier(name)
    windows = [
        window(engine, prompts, engine.new_policy() if tier is None else StaticPolicy(tier), rounds, room)
        for _ in range(repeats)
    ]
    found, size = median(windows), len(prompts)
    out: dict[str, Any] = {"batch_size": size, "policy": name, "tokens_per_round": found.tokens}
    out["wall_us"], out["host_us"] = 1e6 * found.wall, 1e6 * found.host
    out["wall_us_range"] = [1e6 * min(w.wall for w in windows), 1e6 * max(w.wall for w in windows)]
    out["parts_us"] = {part: 1e6 * seconds for part, seconds in found.parts.items()}
    out["starved_share"], out["rounds_per_dispatch"] = found.starved, found.rounds
    if tier is not None:
        context = len(prompts[0]) + round(found.tokens * (_FIRST + rounds / 2))
        bucket = min(bucket for bucket in engine.facts.buckets if bucket >= size)
        device, alone = back_to_back(engine.runner, tier, bucket, size, context, rounds, repeats)
        out |= {"device_us": 1e6 * device, "call_alone_us": 1e6 * alone, "context": context}
        out["device_idle_share"] = max(0.0, 1 - device / found.wall)
    return out


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Microseconds a round."""
    parts = [*(part for part in PARTS if part != WAIT), WAIT]
    head = ["batch", "policy", "rounds", "wall", "device", "idle", "starved", "host", *parts, "call alone"]
    lines = [head]
    for r in rows:
        device = [f"{r['device_us']:.0f}", f"{r['device_idle_share']:.1%}"] if "device_us" in r else ["", ""]
        lines.append([
            str(r["batch_size"]), r["policy"], f"{r['rounds_per_dispatch']:.1f}", f"{r['wall_us']:.0f}", *device,
            f"{r['starved_share']:.1%}",
            f"{r['host_us']:.0f}", *(f"{r['parts_us'][part]:.0f}" for part in parts),
            f"{r['call_alone_us']:.0f}" if "call_alone_us" in r else "",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    text = __doc__ or ""
    out = argparse.ArgumentParser(
        prog="python -m jaxspec.bench overheads", description=text.splitlines()[0].partition(": ")[2].capitalize(),
        formatter_class=cli.Help,
    )  # fmt: skip
    add = out.add_argument
    add("--model", default="demo", help='"demo", a Hugging Face directory or a hub id')
    add("--drafter", help="a name, a directory or a hub id (default: as LLM chooses)")
    add("--grow", metavar=grow.SIZES, help="the same function at a larger model's cost (default: as it is)")
    add("--dtype", type=cli.dtype, choices=DTYPES, help="default: float32 on CPU, bfloat16 on accelerators")
    add("--batch-sizes", metavar="1,16,64", default="1,16,64", help="requests decoded together")
    add("--tiers", metavar="off,3,tree-4x3/16", default="off,3", help="depths or tiers' names, each run throughout")
    add("--policies", choices=(ADAPTIVE,), help="also the adaptive policy over these tiers (default: not measured)")
    add("--context", type=int, default=256, help="tokens of each prompt")
    add("--rounds", type=int, default=100, help="that are looked at; 0: none")
    add("--repeats", type=int, default=5, help="medians are taken over these")
    add("--rounds-per-dispatch", metavar="auto|N", default="auto", help="as EngineConfig.rounds_per_dispatch")
    add("--mixed-chunk", metavar="auto|N", default="auto", help="as EngineConfig.mixed_chunk")
    queue = "also a full batch of the largest size and as many requests waiting, of TOKENS tokens on average"
    add("--queue", type=int, metavar="TOKENS", help=f"{queue} (default: not measured)")
    add("--json", metavar="FILE", help="all figures and the conditions (default: not written)")
    out.set_defaults(command="overheads")
    return out


def run(args: argparse.Namespace, sizes: tuple[int, ...], say: Callable[[str], None]) -> int:
    """Measures what was asked for.

    Args:
      sizes: of batches.

    Raises:
      ValueError: options that do not fit; names the option, what was given and what is allowed.
    """
    for name, least in (("context", 1), ("rounds", 0), ("repeats", 1), ("queue", 1)):
        if (given := getattr(args, name)) is not None and given < least:
            raise ValueError(f"{name} must be at least {least}, got {given}")
    check_path("json", args.json)
    tiers = [parse_tier(entry.strip()) for entry in args.tiers.split(",")]
    drafting = tuple(tier for tier in tiers if tier != PLAIN)
    depth = max(tier.depth for tier in tiers)
    # Rounds until the engine knows its pace, those that are looked at, and dispatches in flight behind them.
    room = max((depth + 1) * (args.rounds + _FIRST + 4 * MOST_ROUNDS), 2 * (args.queue or 0))
    plan = Sweep(sizes, ("code",), room, args.repeats)
    number = lambda text: int(text) if text.isdecimal() else text
    options = Options(
        plan, args.model, args.drafter, drafting or (Tier(1),), args.dtype, args.grow,
        rounds_per_dispatch=number(args.rounds_per_dispatch), mixed_chunk=number(args.mixed_chunk),
    )  # fmt: skip
    parts = Parts(options)
    engine = parts.engine(args.context + room, plain=not drafting)
    text = [token for passage in CODE for token in parts.tokenizer.encode(passage)]
    text *= -(-args.context // len(text)) + 1
    # Every request somewhere else in the text.
    prompts = [[text[(37 * i + at) % len(text)] for at in range(args.context)] for i in range(max(sizes))]
    names = [tier.name for tier in dict.fromkeys(tiers)] + ([args.policies] if args.policies else [])
    rows = []
    for size in sizes if args.rounds else ():
        for name in names:
            rows.append(row(engine, prompts[:size], name, args.rounds, args.repeats, room))
            say(table(rows[-1:]))
    device = jax.devices()[0]
    say(f"\n{args.model}, {parts.dtype.name}, {device.device_kind}, JAX {jax.__version__}")
    if rows:
        say(f"\nmicroseconds a round\n\n{table(rows)}")
    queued = []
    if args.queue:
        queued = queues.rows(engine, prompts, tiers, args.queue, args.repeats)
        say(f"\n{queues.table(queued)}")
    if args.json:
        conditions = {**vars(args), "device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
        write_json({"conditions": conditions, "rounds": rows, "queues": queued}, args.json)
    return 0
