"""Which loads and texts are simulated, and every policy over one of them. Must not know how figures are shown."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

from jaxspec.adaptive.controller import Recorder
from jaxspec.adaptive.learnt import Learns, Learnt
from jaxspec.bench.online import traces
from jaxspec.bench.online.arrivals import Load, closed, random_process
from jaxspec.bench.simulate import acceptance, costs, figures, policies
from jaxspec.bench.simulate.engine import Simulation
from jaxspec.bench.simulate.records import Machine, Outcome
from jaxspec.config import EngineConfig
from jaxspec.tier import PLAIN

#: By which the seed of a run that only teaches differs.
_EARLIER = 1000


@dataclasses.dataclass(frozen=True)
class Cell:
    """One load of one kind of texts.

    Attributes:
      batch: concurrency of a closed loop; of an open one the largest batch.
      seconds: after which it ends; inf: when all are served.
    """

    name: str
    texts: acceptance.Process
    load: Load
    batch: int
    seconds: float


def numbers(option: str, text: str, least: float, most: float, whole: bool = True) -> list[float]:
    """Numbers from "1,8", ascending.

    Raises:
      ValueError: an entry that is none, or out of range.
    """
    found = set()
    for part in text.split(","):
        fits = re.fullmatch(r"\s*\d+\s*" if whole else r"\s*\d*\.?\d+\s*", part)
        if not fits or not least <= float(part) <= most:
            kind = "integers" if whole else "numbers"
            raise ValueError(f"{option} must be {kind} from {least:g} to {most:g}, got {part.strip()!r}")
        found.add(float(part))
    return sorted(found)


def cells(args: argparse.Namespace, device: costs.Costs) -> list[Cell]:
    """What is simulated.

    Raises:
      ValueError: options that do not fit; names them.
    """
    for name in ("seconds", "speed_up", "prompt_tokens", "output_tokens", "max_batch_size", "max_context", "seeds",
                 "max_num_batched_tokens"):  # fmt: skip
        if not 0 < getattr(args, name) < float("inf"):
            raise ValueError(f"{name.replace('_', '-')} must be above 0, got {getattr(args, name)}")
    if args.grow is not None and not 0 < args.grow < float("inf"):
        raise ValueError(f"grow must be a finite number of seconds above 0, got {args.grow}")
    if args.tpot_scale is not None and not 0 < args.tpot_scale < 100:
        raise ValueError(f"tpot-scale must lie in (0, 100), got {args.tpot_scale}")
    if not 1 <= args.rounds_per_dispatch <= 64 or not 0 <= args.host_ms < 1e3:
        raise ValueError(
            f"rounds-per-dispatch must lie in [1, 64] and host-ms in [0, 1000), got {args.rounds_per_dispatch} and "
            f"{args.host_ms}"
        )
    if not 0 <= args.noise < 1 or not 0 < args.table_error < 100:
        raise ValueError(
            f"noise must lie in [0, 1) and table-error in (0, 100), got {args.noise} and {args.table_error}"
        )
    sure = acceptance.Reliability(args.spread, args.confidence_noise, args.confidence_slope, streaks=args.streaks)
    texts = [acceptance.parse(text, sure) for text in args.acceptance or ("good", "poor", "good+poor")]
    open_loops = [
        (Path(path).name, traces.read(path, speed_up=args.speed_up, duration=args.seconds)) for path in args.trace or ()
    ]
    for rate in numbers("rate", args.rate, 1e-6, 1e6, whole=False) if args.rate else ():
        load = random_process(rate, max(1, round(rate * args.seconds)), seed=args.seed)
        open_loops.append((f"{rate:g}/s", load))
    sizes = [int(size) for size in numbers("concurrency", args.concurrency, 1, 4096)] if args.concurrency else []
    if not sizes and not open_loops:
        sizes = [size for size in (1, 8, 32, 64) if device.largest is None or size <= device.largest]
    out = [
        Cell(f"{process.name}, {size} at once", process, closed(size, 1), size, args.seconds)
        for process in texts for size in sizes
    ]  # fmt: skip
    out += [
        Cell(f"{process.name}, {name}", process, load, args.max_batch_size, float("inf"))
        for process in texts for name, load in open_loops
    ]  # fmt: skip
    return out


@dataclasses.dataclass(frozen=True)
class Done:
    """A cell's outcomes of one seed, by policy."""

    cell: Cell
    seed: int
    outcomes: dict[str, Outcome]
    entries: list[policies.Entry]
    auc: float


def told_at(max_context: int) -> tuple[int, ...]:
    """Tokens of a row at which policies are told costs: as in an engine, none longer than its requests may be."""
    return tuple(sorted({min(context, max_context) for context in policies.Setting.contexts}))


def play(cell: Cell, args: argparse.Namespace, device: costs.Costs, seed: int, depths: tuple[int, ...]) -> Done:
    """Every policy over one cell; all of them meet the same texts, arrivals and lengths."""
    buckets = EngineConfig(max_batch_size=cell.batch).buckets
    longest = max(
        (a.prompt_tokens or args.prompt_tokens) + (a.output_tokens or 2 * args.output_tokens)
        for a in cell.load.arrivals[:1] + (() if cell.load.concurrency else cell.load.arrivals)
    )  # fmt: skip
    machine = Machine(
        device, depths, buckets, min(longest, args.max_context), args.pages, args.max_num_batched_tokens, args.noise,
        args.rounds_per_dispatch, args.host_ms / 1e3,
    )  # fmt: skip
    tape = acceptance.Tape(cell.texts, seed, depths[-1])
    setting = policies.Setting(
        device, depths, buckets, contexts=told_at(args.max_context), error=args.table_error,
        budgets=tuple(numbers("budgets", args.budgets, 0.01, 32, whole=False)) if args.budgets else (),
    )  # fmt: skip
    named = [policies.entry(text, setting) for text in args.policy or policies.defaults()]
    entries = [*policies.fixed(depths), *named]
    outcomes, tpot, doubles = {}, None, float("inf") if args.grow is None else args.grow
    for one in entries:
        policy, recorder = one.make(), None
        if args.carry and isinstance(policy, Learns):
            earlier = one.make()
            before = acceptance.Tape(cell.texts, seed + _EARLIER, depths[-1])
            first = Simulation(
                machine, before, earlier, prompt=args.prompt_tokens, output=args.output_tokens, seed=seed + _EARLIER
            )
            first.run(cell.load, cell.seconds, doubles)
            assert isinstance(earlier, Learns)
            policy.recall(Learnt.from_json(earlier.learnt().to_json()))
        if args.record:
            where = re.sub(r"[^\w.+-]+", "_", f"{cell.name}-{one.name}-{seed}")
            recorder = Recorder(Path(args.record) / f"{where}.jsonl")
        simulation = Simulation(
            machine, tape, policy, prompt=args.prompt_tokens, output=args.output_tokens, seed=seed, recorder=recorder,
            tpot=tpot,
        )  # fmt: skip
        outcomes[one.name] = simulation.run(cell.load, cell.seconds, doubles)
        if args.tpot_scale and one.name == PLAIN.name:
            usual = figures.objective(outcomes[one.name])
            tpot = None if usual is None else args.tpot_scale * usual
        if recorder is not None:
            recorder.close()
    return Done(cell, seed, outcomes, entries, tape.auc())
