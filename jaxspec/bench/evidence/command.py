"""python -m jaxspec.bench adaptive: every policy on the real engine, interleaved with every fixed tier.

    python -m jaxspec.bench adaptive --batch-sizes 1,16 --json adaptive.json
    python -m jaxspec.bench report adaptive.json --out adaptive.html

Owns the command, and the engine that can run what all of its policies ask for.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxspec import cli
from jaxspec.adaptive import registry as policies
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import PolicyKind, Room, Settings
from jaxspec.adaptive.policy import TierPolicy
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.evidence import drive, loads
from jaxspec.bench.offline import grow, prompts
from jaxspec.bench.offline.engines import Options, Parts
from jaxspec.bench.offline.measure import Sweep
from jaxspec.bench.offline.report import check_path
from jaxspec.bench.simulate import breakeven, costs, tables
from jaxspec.bench.simulate.policies import ORACLE, SGLANG, defaults, settings_of, sglang
from jaxspec.bench.simulate.records import Outcome
from jaxspec.config import SpeculationConfig
from jaxspec.defaults import candidate_budgets
from jaxspec.drafters import registry
from jaxspec.engine import Engine
from jaxspec.names import DTYPES
from jaxspec.tier import Tier, parse_tier

#: The name under which the registry finds what all compared policies need together.
_TOGETHER = "compared"
#: Seconds of a run that is not recorded, what a run takes besides its own, and the shortest one that tells something.
_WARM, _BESIDES, _SHORTEST = 0.3, 0.1, 0.3
#: Asked in chats.
_QUESTIONS = (
    "How do I read a file line by line?", "What is the difference between a list and a tuple?",
    "Write a short story about a lighthouse.", "Why is the sky blue?", "Explain recursion to a child.",
    "How long should I boil an egg?", "Give me three tips for learning a language.", "What does this error mean?",
)  # fmt: skip


class Compared(PolicyKind):
    """The default policy in an engine that can also run what others choose.

    Attributes:
      members: settings of the others.
    """

    name = _TOGETHER
    fields = frozenset({"tiers"})
    needs_costs = True
    members: tuple[SpeculationConfig, ...] = ()

    def _room(self, settings: Settings, room: Room) -> Room:
        """With the depths that are compared instead of the device's own."""
        return Room(room.buckets, tuple(tier.depth for tier in settings.tiers or () if tier.depth), room.budgets)

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        room, found = self._room(settings, room), dict.fromkeys(settings.tiers or (), room.buckets)
        for member in self.members:
            for tier, buckets in member.policy_kind.reachable(member, room).items():
                found[tier] = tuple(sorted({*found.get(tier, ()), *buckets}))
        return found

    def budgets(self, settings: Settings, room: Room) -> dict[tuple[Tier, int], tuple[int, ...]]:
        room, found = self._room(settings, room), dict[tuple[Tier, int], tuple[int, ...]]()
        for member in self.members:
            for pair, tokens in member.policy_kind.budgets(member, room).items():
                found[pair] = tuple(sorted({*found.get(pair, ()), *tokens}))
        return found

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> TierPolicy:
        return StaticPolicy(Tier(0))


COMPARED = Compared()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.bench adaptive", description=(__doc__ or "").splitlines()[0], formatter_class=cli.Help
    )
    add = p.add_argument
    add("--model", default="demo", help='"demo", a Hugging Face directory or a hub id')
    add("--drafter", help=f"{', '.join(registry.names())}, a directory or a hub id (default: as LLM chooses)")
    add("--dtype", type=cli.dtype, choices=DTYPES, help="default: float32 on CPU, bfloat16 on accelerators")
    add("--grow", metavar=grow.SIZES, help="the same function at a larger model's cost (default: as it is)")
    add("--workloads", default=",".join(loads.WORKLOADS), metavar="code,mix",
        help="; ".join(f"{name}: {what}" for name, what in loads.WORKLOADS.items()))  # fmt: skip
    add("--batch-sizes", default="1,4,16", metavar="1,16", help="requests at once")
    add("--tiers", default="1,2,4", metavar="1,3,5", help="depths of the fixed tiers; policies choose among them")
    add("--policy", action="append", metavar="NAME", help="of the registry, with settings as JSON behind the name; "
        "sglang-default, or a JSON file; may be repeated (default: all that choose)")  # fmt: skip
    add("--seconds", type=float, default=12.0, help="of each run")
    add("--within", type=float, metavar="SECONDS", help="from start to end: runs are as long as what compiling "
        "leaves of it allows, at most --seconds; compiling is not cut short (default: no limit)")  # fmt: skip
    add("--carry", action="store_true", help="policies go on in a cell's later repeats with what they learnt in the "
        "earlier ones, as a server's do (default: each run starts anew)")  # fmt: skip
    add("--switch-seconds", type=float, default=3.0, help="between changes, of workloads that change")
    add("--max-tokens", type=int, default=96, help="of each request")
    add("--repeats", type=int, default=3, help="interleaved")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--json", metavar="FILE", help="all figures, and what `bench report` draws (default: not written)")
    return p


@dataclasses.dataclass(frozen=True)
class Mode:
    """A policy that is compared; fixed: it runs one tier."""

    name: str
    fixed: bool
    make: Callable[[], TierPolicy]


def texts_of(parts: Parts, kinds: set[str]) -> dict[str, list[tuple[int, ...]]]:
    """Prompts as token ids."""
    found = {"code": prompts.CODE, "prose": prompts.PROSE}
    out = {kind: [tuple(parts.tokenizer.encode(text)) for text in found[kind]] for kind in kinds & found.keys()}
    if "chat" in kinds:
        out["chat"] = [_asked(parts, question) for question in _QUESTIONS]
    return out


def _asked(parts: Parts, question: str) -> tuple[int, ...]:
    try:
        text = parts.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    except ValueError:  # it has none
        return tuple(parts.tokenizer.encode(f"User: {question}\nAssistant:"))
    return tuple(parts.tokenizer.encode(text, add_special_tokens=False))


def modes(named: Sequence[str], depths: Sequence[int], engine: Engine) -> list[Mode]:
    """Plain decoding, every fixed tier and the policies by name."""
    buckets = engine.facts.buckets
    room = Room(buckets, tuple(d for d in depths if d), candidate_budgets())
    found = [Mode(Tier(d).name, True, lambda d=d: StaticPolicy(Tier(d))) for d in depths]
    for name in named:
        if name.startswith(SGLANG):
            found.append(Mode(name, False, lambda name=name: sglang(name, depths, buckets)))
        else:
            settings = settings_of(name, depths)
            kind = settings.policy_kind
            cost = engine.cost if kind.needs_costs else None
            found.append(Mode(name, False, lambda s=settings, k=kind, c=cost: k.build(s, room, c)))
    return found


def checked(args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Workloads, batch sizes, depths (0 among them) and policies.

    Raises:
      ValueError: names the option, what was given and what is allowed.
    """
    names = tuple(dict.fromkeys(entry.strip() for entry in args.workloads.split(",")))
    for name in names:
        if name not in loads.WORKLOADS:
            raise ValueError(f"workloads must be among {list(loads.WORKLOADS)}, got {name!r}")
    sizes = set()
    for entry in args.batch_sizes.split(","):
        if not re.fullmatch(r"\s*\d{1,4}\s*", entry) or not 1 <= int(entry) <= 1024:
            raise ValueError(f"batch-sizes must be integers from 1 to 1024, got {entry.strip()!r}")
        sizes.add(int(entry))
    tiers = [parse_tier(entry.strip()) for entry in args.tiers.split(",")]
    if not all(tier.is_chain and tier.depth for tier in tiers):
        raise ValueError(f"tiers must be chains, got {args.tiers!r}")
    for name, least in (("seconds", 0.1), ("switch_seconds", 0.05), ("max_tokens", 2), ("repeats", 1)):
        if not getattr(args, name) >= least:
            raise ValueError(f"{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    depths = (0, *sorted({tier.depth for tier in tiers}))
    named = tuple(args.policy or (name for name in defaults() if name != ORACLE))
    if ORACLE in named:
        raise ValueError(f"policy {ORACLE!r} knows what only a simulation does; use `bench simulate`")
    for name in named:
        sglang(name, depths, (1,)) if name.startswith(SGLANG) else settings_of(name, depths)
    if args.within is not None and not args.within > 0:
        raise ValueError(f"within must be above 0 seconds, got {args.within}")
    check_path("json", args.json)
    return names, tuple(sorted(sizes)), depths, named


def parts_of(args: argparse.Namespace, sizes: tuple[int, ...], depths: tuple[int, ...]) -> Parts:
    """What an engine is made of, of which nothing is loaded yet."""
    plan = Sweep(sizes, ("code",), args.max_tokens, args.repeats, temperature=args.temperature)
    tiers = tuple(Tier(d) for d in depths if d)
    return Parts(Options(plan, args.model, args.drafter, tiers, args.dtype, args.grow))


def build(args: argparse.Namespace, parts: Parts, depths: tuple[int, ...], named: Sequence[str],
          kinds: set[str]) -> tuple[Engine, dict[str, list[tuple[int, ...]]]]:  # fmt: skip
    """An engine that has compiled what every policy may run, and the prompts."""
    texts = texts_of(parts, kinds)
    COMPARED.members = tuple(settings_of(name, depths) for name in named if not name.startswith(SGLANG))
    policies.KINDS[_TOGETHER] = (__name__, "COMPARED")
    longest = max(len(text) for many in texts.values() for text in many) + args.max_tokens
    return parts.engine(longest, policy=_TOGETHER), texts


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Measures; returns the exit status: 1 where a completion differs from plain decoding's in float32.

    Raises:
      ValueError: options that do not fit; names them.
    """
    began = time.perf_counter()
    names, sizes, depths, named = checked(args)
    kinds = {load.kind(phase, place) for name in names for load in [loads.load(name, 2, 1.0)]
             for phase in (0, 1) for place in (0, 1)}  # fmt: skip
    parts = parts_of(args, sizes, depths)
    say("loading and compiling: up to a few minutes the first time, seconds from the cache")
    with cli.quick_interrupts():
        engine, texts = build(args, parts, depths, named, kinds)
    compared = modes(named, depths, engine)
    fixed = [mode.name for mode in compared if mode.fixed]
    device = jax.devices()[0].device_kind
    float32 = "float32" in engine.facts.identity.values()
    blocks, different = [], 0
    cells = [*itertools.product(names, sizes)]
    warm, count = engine.stats.warmup_seconds, engine.stats.executables
    say(
        f"ready after {time.perf_counter() - began:.0f} s, {warm:.0f} of them to compile and time {count} executables; "
        f"measuring on {device}\n"
    )
    for number, (name, size) in enumerate(cells):
        left = math.inf if args.within is None else args.within - (time.perf_counter() - began)
        seconds = min(args.seconds, _share(left, len(cells) - number, len(compared), args.repeats))
        if seconds < _SHORTEST:
            say(f"{left:.0f} s are left: {len(cells) - number} cells are not measured")
            break
        load = loads.load(name, size, min(args.switch_seconds, seconds / 4))
        runs: list[dict[str, Outcome]] = []
        survival: Mapping[str, Sequence[float]] = {}
        written: dict[tuple[str, int], tuple[int, ...]] = {}
        going = {mode.name: mode.make() for mode in compared}
        for mode in compared:  # unrecorded
            drive.run(engine, mode.make(), load, texts, min(_WARM, seconds), args.max_tokens, args.temperature)
        for repeat in range(args.repeats):
            turn = repeat % len(compared)
            done = {
                mode.name: drive.run(
                    engine, going[mode.name] if args.carry else mode.make(), load, texts, seconds, args.max_tokens,
                    args.temperature,
                )
                for mode in (*compared[turn:], *compared[:turn])
            }  # fmt: skip
            for found in done.values():
                different += sum(written.setdefault(key, text) != text for key, text in found.texts.items())
            outcomes = {mode.name: done[mode.name].outcome for mode in compared}
            drive.valued(load, outcomes, fixed)
            runs.append(outcomes)
            survival = survival or _survival(done[fixed[-1]], depths[-1])
        told = tables.Told(f"{name}, {size} at once", name, loads.WORKLOADS[name], size, None, survival)
        blocks.append(tables.block(told, runs, fixed))
        say(tables.text(blocks[-1], f"measured, {seconds:.1f} s a run") + "\n")
        if args.json:
            _write(args, engine, device, blocks, different)
    if not blocks:
        return 1
    say(tables.summary(blocks))
    late = engine.stats.compilations_after_warmup
    say(f"compilations after warm-up: {late}; completions that differ from another mode's: {different}"
        + ("" if float32 else " (near ties may part)"))  # fmt: skip
    if args.json:
        say(f"wrote {args.json}: `python -m jaxspec.bench report {args.json}` makes a page of it")
    return 1 if different and float32 else 0


def _share(left: float, cells: int, modes: int, repeats: int) -> float:
    """Seconds of a run if so many cells are to be measured in what is left."""
    return left / (cells * modes * repeats) - _BESIDES - (_WARM + _BESIDES) / repeats


def _survival(found: drive.Run, depth: int) -> dict[str, list[float]]:
    """By kind of text, the share of the deepest tier's rows that accepted at least so many drafts."""
    return {
        kind: [sum(a >= i for a in rows) / len(rows) for i in range(1, depth + 1)]
        for (kind, deep), rows in found.accepted.items() if deep == depth and rows
    }  # fmt: skip


def _write(args: argparse.Namespace, engine: Engine, device: str, blocks: list[Any], different: int) -> None:
    assert engine.cost is not None
    context = round(engine.cost.context)
    points = {
        (tier.depth, bucket, bucket * tier.num_nodes, context): engine.cost.seconds(tier, bucket)
        for tier, bucket in engine.cost if tier.is_chain
    }  # fmt: skip
    measured = costs.Measured(f"measured: {device}, {args.model}, context {context}", points)
    report = {
        "simulated": False,
        "profile": breakeven.curves(measured, measured.deepest or 1).to_dict(),
        "conditions": {
            **{key: value for key, value in vars(args).items() if key != "json"},
            "device": device, "jax": jax.__version__, "drafter": engine.facts.drafter,
            "different completions": different,
            "compilations after warm-up": engine.stats.compilations_after_warmup,
        },
        "cells": blocks,
    }  # fmt: skip
    tables.write(report, args.json)


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    args = cli.parse(parser(), argv)
    try:
        return run(args, lambda text: print(text, flush=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        cli.say_interrupted("interrupted")
        return cli.INTERRUPTED
