"""`python -m jaxspec.train evaluate`: what a drafter is worth on texts of the target, before and after serving it.

Acceptance is simulated by walking rounds over the texts (acceptance.py); the engine then times every tier on this
device, which gives the speed-up to expect and the best static tier. `--measure` serves the same prompts and puts what
the engine measured beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import clusters
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.assemble import build_engine
from jaxspec.checkpointing import hf
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.drafters import directories, registry
from jaxspec.engine import Engine
from jaxspec.events import Finished
from jaxspec.request import SamplingParams
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.text import modes
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import PLAIN, Tier, parse_tier
from jaxspec.train.data import dataset
from jaxspec.train.run import plots
from jaxspec.train.run.simulation import LONGEST, Counter, Group, pieces_of, summed, tiers_of


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--target", required=True, help='"demo", a Hugging Face directory or a hub id')
    p.add_argument("--drafter", help="a directory, or a name as the engine takes it (default: as LLM chooses)")
    p.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL that training did not see")
    p.add_argument("--chat-template-kwargs", type=modes.parse, metavar="JSON", help="of chats (default: none)")
    p.add_argument("--depth", type=int, default=5, help="drafts of the deepest chain")
    p.add_argument(
        "--trees", nargs="+", default=[], metavar="TIER",
        help="trees besides, such as tree-5x4/16, of a drafter that drafts in one pass",
    )  # fmt: skip
    p.add_argument("--batch-sizes", default="1,8", help="batch sizes whose rounds are timed")
    p.add_argument("--limit", type=int, default=256, help="rows of each data set and temperature")
    p.add_argument("--length", type=int, help=f"tokens a row (default: the longest text, at most {LONGEST})")
    p.add_argument("--rows", type=int, default=8, help="rows computed at once")
    p.add_argument("--no-cost", action="store_true", help="acceptance only, without the engine")
    p.add_argument("--measure", action="store_true", help="serve the rows' prompts and compare")
    p.add_argument("--json", type=Path, help="write everything here (default: print only)")
    p.add_argument("--plot", type=Path, help="write a picture here, a PNG (default: none)")
    p.add_argument("--seed", type=int, default=0, help="same seed, same draws")
    clusters.add_arguments(p)


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What to expect of one tier: expected speed-up over plain decoding at a batch size."""

    tier: Tier
    batch_size: int
    length: float
    speedup: float


def expectations(group: Group, cost: CostTable) -> list[Expectation]:
    """Every tier of the group and batch size of the cost table; plain decoding is 1."""
    out = []
    for bucket in cost.buckets:
        for tier in (PLAIN, *group.histograms):
            ratio = cost.seconds(PLAIN, bucket) / cost.seconds(tier, bucket)
            out.append(Expectation(tier, bucket, group.length(tier), group.length(tier) * ratio))
    return out


def measure(engine: Engine, examples: Sequence[dataset.Example], tier: Tier) -> dict[str, float]:
    """Serves the texts' prompts at their temperatures with drafts of a tier; {label: measured tokens a round}."""
    engine.use_policy(StaticPolicy(tier))
    names: dict[str, str] = {}
    totals: dict[str, list[int]] = {}
    room = engine.facts.sizes.max_seq_len
    for seed, example in enumerate(examples):
        count = min(len(example.tokens), room) - example.prompt_length
        if not example.prompt_length or count < 2:
            continue
        params = SamplingParams(temperature=example.temperature, seed=seed, max_tokens=count)
        name = _label(example.dataset, example.temperature_band)
        names[engine.add(example.tokens[: example.prompt_length], params)] = name
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Finished):
                total = totals.setdefault(names[event.request_id], [0, 0])
                total[0] += event.output.metrics.accepted
                total[1] += event.output.metrics.rounds
    return {name: 1.0 + accepted / rounds for name, (accepted, rounds) in sorted(totals.items()) if rounds}


def parse_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from "1,8", ascending.

    Raises:
      ValueError: an entry that is no integer from 1 to 1024.
    """
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not (entry.isdecimal() and 1 <= int(entry) <= 1024):
            raise ValueError(f"--batch-sizes must be integers from 1 to 1024, got {entry!r}")
    return tuple(sorted(map(int, set(entries))))


def parse_trees(names: Sequence[str]) -> tuple[Tier, ...]:
    """Trees by their names, each once.

    Raises:
      ValueError: a name that is no tree's.
    """
    tiers = [parse_tier(name) for name in names]
    if chains := [name for name, tier in zip(names, tiers, strict=True) if tier.is_chain]:
        raise ValueError(f"--trees must be names such as 'tree-5x4/16', got {chains}")
    return tuple(dict.fromkeys(tiers))


def _check(args: argparse.Namespace) -> None:
    """Refuses options that no work is needed to refuse."""
    if args.depth < 1:
        raise ValueError(f"depth must be at least 1, got {args.depth}")
    for name in ("rows", "limit"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name} {path}: its directory does not exist")
    parse_sizes(args.batch_sizes)
    parse_trees(args.trees)
    if args.plot and not plots.can_draw():
        raise ValueError("--plot needs matplotlib: pip install -e '.[plot]'")


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Prints and returns the record that --json writes.

    Raises:
      ValueError: files or options that do not fit together; names both values.
    """
    _check(args)
    target_dir = resolve_model(args.target)
    kind, directory = resolve_drafter(args.drafter, target_dir)
    if directory is None:
        raise ValueError(f"drafter {kind!r} has no parameters to evaluate; `python -m jaxspec.bench` measures it")
    context = hf.load_config(target_dir).max_position_embeddings
    if args.length is not None and args.length > context:
        raise ValueError(f"--length must be at most the target's max_position_embeddings {context}, got {args.length}")
    tiers = tiers_of(args.depth, parse_trees(args.trees))
    load = _Load(target_dir, kind, directory, tiers, args.length, args.seed)
    examples = dataset.read_examples(
        args.data, Tokenizer.from_directory(target_dir), chat_template_kwargs=args.chat_template_kwargs
    )
    pieces = pieces_of(examples, hf.load_config(target_dir), tiers, args.length, args.rows, args.limit)
    cluster = clusters.of(args)
    with contextlib.nullcontext() if cluster is None else clusters.joined(cluster):
        counts = enumerate(load()(pieces)) if cluster is None else clusters.spread(load, pieces, cluster, 1)
        groups = summed(pieces, tiers, counts)
        record: dict[str, Any] = {
            "target": str(args.target),
            "drafter": f"{kind} ({directory.name})",
            "depth": args.depth,
            "groups": [_entry(group) for group in groups],
        }
        print(acceptance_table(groups), flush=True)
        timed = _Timed(args, groups, _first(examples, args.limit))
        if cluster is None:
            record = timed(record)
        else:
            ((_, record),) = clusters.spread(timed.each, [record], dataclasses.replace(cluster, workers=1), 1)
    if "speedup" in record["groups"][0]:
        print("\n" + speedup_table(record), flush=True)
    if args.measure:
        print("\n" + measured_table(record), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plots.plot_evaluation(record, args.plot)
    return record


def _entry(group: Group) -> dict[str, Any]:
    """A group in the record."""
    return {
        "label": _label(group.name, group.temperature),
        "data": group.name,
        "temperature": group.temperature,
        "rounds": group.rounds,
        "accept": [round(x, 4) for x in group.accept()],
        "length": [round(group.length(tier), 4) for tier in group.histograms if tier.is_chain],
        "trees": {tier.name: round(group.length(tier), 4) for tier in group.histograms if not tier.is_chain},
    }


@dataclasses.dataclass(frozen=True)
class _Load:
    """Loads a drafter and its target, here or in an actor: what counts pieces of texts."""

    target: Path
    kind: str
    directory: Path
    tiers: tuple[Tier, ...]
    length: int | None
    seed: int

    def __call__(self) -> Counter:
        """Raises ValueError: what does not fit, or drafts deeper than the drafter can propose."""
        dtype = _dtype()
        target = hf.load_model(self.target, dtype, context=self.length)
        module = directories.load_drafter(self.kind, self.directory, target, dtype)
        limit, deepest = registry.find(self.kind).deepest(module), max(tier.depth for tier in self.tiers)
        if limit is not None and deepest > limit:
            raise ValueError(f"depth must be at most {limit}, what this drafter can propose in a row, got {deepest}")
        return Counter(module, target, self.tiers, self.seed, None)


def _dtype() -> jnp.dtype:
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class _Timed:
    """Adds to a record the device, and what an engine is timed at there and, with --measure, what it measures."""

    args: argparse.Namespace
    groups: Sequence[Group]
    examples: Sequence[dataset.Example]

    def each(self) -> Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]:
        """For an actor."""
        return lambda records: [self(record) for record in records]

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        args = self.args
        where = {"device": jax.devices()[0].device_kind, "dtype": _dtype().name}
        first = {name: record[name] for name in ("target", "drafter")}
        record = {**first, **where, **{name: record[name] for name in record if name not in first}}
        if args.no_cost and not args.measure:
            return record
        sizes, depths = parse_sizes(args.batch_sizes), [args.depth] if args.no_cost else range(1, args.depth + 1)
        trees, sampled = parse_trees(args.trees), args.measure and any(text.temperature for text in self.examples)
        engine = build_engine(
            resolve_model(args.target),
            args.drafter,
            SpeculationConfig(tiers=(*(Tier(d) for d in depths), *trees), draft_quantization="none"),
            EngineConfig(
                max_batch_size=sizes[-1],
                batch_buckets=sizes,
                variants=None if sampled else ("greedy",),
                warmup="eager",
                skip_tokenizer_init=True,
            ),
        )
        if not args.no_cost:
            _add_speedups(record, self.groups, engine, sizes)
        if args.measure:
            measured = lambda tier: {name: round(x, 4) for name, x in measure(engine, self.examples, tier).items()}
            record["measured_length"] = measured(Tier(args.depth))
            record["measured_trees"] = {tier.name: measured(tier) for tier in trees}
        return record


def _add_speedups(record: dict[str, Any], groups: Sequence[Group], engine: Engine, sizes: Sequence[int]) -> None:
    """Adds the measured cost of every round, and what it promises each group."""
    cost = engine.cost
    assert cost is not None
    record["milliseconds"] = {str(b): {t.name: round(1e3 * cost.seconds(t, b), 4) for t in cost.tiers} for b in sizes}
    for group, row in zip(groups, record["groups"], strict=True):
        expected = expectations(group, cost)
        row["speedup"] = {
            str(b): {e.tier.name: round(e.speedup, 4) for e in expected if e.batch_size == b} for b in sizes
        }
        row["best"] = {
            str(b): max((e for e in expected if e.batch_size == b), key=lambda e: e.speedup).tier.name for b in sizes
        }


def _first(examples: Sequence[dataset.Example], limit: int) -> list[dataset.Example]:
    """At most `limit` texts of each data set and temperature, the ones that `simulate` took.

    Without those that filters or penalties shaped, of which rows do not say how.
    """
    counts: dict[str, int] = {}
    out = []
    for example in examples:
        name = _label(example.dataset, example.temperature_band)
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= limit and not example.dataset.endswith(dataset.FILTERED):
            out.append(example)
    return out


def _label(name: str, temperature: float) -> str:
    return f"{name} T={temperature:g}" if temperature else f"{name} greedy"


def acceptance_table(groups: Sequence[Group]) -> str:
    """Acceptance by position, one line a data set and temperature, and the tokens a round of trees."""
    tiers = list(groups[0].histograms)
    deepest, trees = max(tier for tier in tiers if tier.is_chain), [tier for tier in tiers if not tier.is_chain]
    head = "simulated acceptance     rounds  length  " + "  ".join(f"pos {i}" for i in range(1, deepest.depth + 1))
    lines = [
        f"{_label(g.name, g.temperature):24s} {g.rounds:6d}  {g.length(deepest):6.3f}  "
        + "  ".join(f"{x:5.3f}" for x in g.accept())
        + "".join(f"  {g.length(tree):{len(tree.name)}.3f}" for tree in trees)
        for g in groups
    ]
    return "\n".join(["  ".join([head, *(tree.name for tree in trees)]), *lines])


def speedup_table(record: dict[str, Any]) -> str:
    """Expected speed-up of each static tier, the best one marked."""
    tiers = list(next(iter(record["milliseconds"].values())))
    lines = ["expected speed-up        batch  " + "  ".join(f"{name:>8s}" for name in tiers)]
    for group in record["groups"]:
        for batch, row in group["speedup"].items():
            marked = [f"{row[t]:.2f}" + ("*" if t == group["best"][batch] else " ") for t in tiers]
            lines.append(f"{group['label']:24s} {batch:>5s}  " + "  ".join(f"{cell:>8s}" for cell in marked))
    return "\n".join(lines)


def measured_table(record: dict[str, Any]) -> str:
    """The engine's tokens a round beside the simulated ones."""
    lines = []
    chain = (Tier(record["depth"]).name, record["measured_length"], lambda group: group["length"][-1])
    trees = [(name, found, lambda group, n=name: group["trees"][n]) for name, found in record["measured_trees"].items()]
    for name, found, simulated_of in (chain, *trees):
        lines.append(f"tokens a round, {name:10s} simulated  measured  difference")
        for group in record["groups"]:
            if group["label"] in found:
                simulated, measured = simulated_of(group), found[group["label"]]
                apart = measured / simulated - 1
                lines.append(f"{group['label']:24s} {simulated:9.3f}  {measured:8.3f}  {apart:+9.1%}")
    return "\n".join(lines)
