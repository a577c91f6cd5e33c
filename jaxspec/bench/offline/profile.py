"""Measures what rounds cost on this device, and writes it for `EngineConfig.profile`.

Owns the command's options and its summary; how a round is timed is the engine's business.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxspec import cli
from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.assemble import build_engine
from jaxspec.config import DRAFT_QUANTIZATIONS, EngineConfig, SpeculationConfig
from jaxspec.drafters import registry
from jaxspec.names import DTYPES
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.runtime.timing import longest_context, measure
from jaxspec.tier import PLAIN, parse_tier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add("--out", metavar="FILE", required=True, help="the JSON to write")
    add("--model", default="demo", help='"demo", a Hugging Face directory or a hub id')
    add("--drafter", help=f"{', '.join(registry.names())}, a directory or a hub id (default: as LLM chooses)")
    add("--draft-quantization", choices=DRAFT_QUANTIZATIONS, default="auto", help="of that server")
    add("--tiers", metavar="1,3,chain-5", help="tiers of the server that it is for (default: the engine's)")
    add("--max-batch-size", type=int, default=8, help="of the server that it is for")
    add("--max-seq-len", type=int, help="longest prompt plus output (default: the model's, at most 2048)")
    add("--contexts", metavar="64,256,1024", default="64,256,1024", help="tokens before a round, of each request")
    add("--repeats", type=int, default=7, help="rounds behind each median")
    add("--dtype", type=cli.dtype, choices=DTYPES, help="default: float32 on CPU, bfloat16 on accelerators")


def parse_contexts(text: str) -> tuple[int, ...]:
    """Contexts from "64,256", ascending.

    Raises:
      ValueError: an entry that is no integer of 0 to 1,000,000.
    """
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not re.fullmatch(r"\d{1,7}", entry) or int(entry) > 1_000_000:
            raise ValueError(f"contexts must be integers from 0 to 1000000, got {entry!r}")
    return tuple(sorted({int(entry) for entry in entries}))


def run(args: argparse.Namespace, say: Callable[[str], None]) -> CostProfile:
    """Builds the engine, times every round at every context, and writes the profile.

    Raises:
      ValueError: options that do not fit; names them.
    """
    contexts = parse_contexts(args.contexts)
    if args.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {args.repeats}")
    out = Path(args.out)
    if not out.parent.is_dir():
        raise ValueError(f"out must lie in a directory that exists, got {args.out!r}")
    tiers = None if args.tiers is None else tuple(parse_tier(entry.strip()) for entry in args.tiers.split(","))
    config = EngineConfig(
        max_batch_size=args.max_batch_size, max_seq_len=args.max_seq_len, dtype=args.dtype, warmup="eager"
    )
    resolve_drafter(args.drafter, resolve_model(args.model))
    say("loading and compiling: up to a few minutes the first time, seconds from the cache")
    # A policy that runs one tier times nothing by itself; what the adaptive one may run is compiled.
    speculation = SpeculationConfig(tiers=tiers, draft_quantization=args.draft_quantization)
    engine = build_engine(args.model, args.drafter, speculation, config)
    geo = engine.runner.geo
    longest = longest_context(geo)
    if contexts[-1] > longest:
        raise ValueError(f"contexts may be {longest} tokens with max_seq_len {geo.max_seq_len}, got {contexts[-1]}")
    seconds = {}
    for context in contexts:
        table = measure(engine.runner, args.repeats, (context,))
        seconds.update({(context, key): s for key, s in table.rounds.items()})
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    profile = CostProfile(engine.facts.identity, versions, seconds)
    say("\n" + summary(profile) + "\n")
    out.write_text(profile.to_json() + "\n", encoding="utf-8")
    say(f"wrote {out}: use it as LLM(profile={str(out)!r}), or `python -m serve --profile {out}`")
    return profile


def summary(profile: CostProfile) -> str:
    """Milliseconds of every round at the middle context, in plain steps besides, and AdaSpec's model with its error."""
    tiers = sorted({key[0] for _, key in profile.seconds})
    context = profile.contexts[len(profile.contexts) // 2]
    table = profile.table(context)
    lines = [f"{profile.identity['device']}: milliseconds (plain steps) behind {context} tokens"]
    lines += [_row("batch", [tier.name for tier in tiers])]
    for bucket in table.buckets:
        plain = table.seconds(PLAIN, bucket)
        costs = [table.seconds(tier, bucket) for tier in tiers]
        lines.append(_row(str(bucket), [f"{1e3 * s:.2f} ({s / plain:.2f})" for s in costs]))
    if table.packed:
        lines.append("packed rounds: batch, tier, tokens verified")
    for (tier, bucket, tokens), s in table.packed.items():
        lines.append(f"{bucket:>8}{tier.name:>12}{tokens:>8}{1e3 * s:>10.2f} ({s / table.seconds(PLAIN, bucket):.2f})")
    lines.append("AdaSpec's line a * context + g * tokens + d: R2, worst error")
    fits = [profile.linear(tier) for tier in tiers]
    return "\n".join([*lines, _row("", [f"{line.r2:.3f}, {line.worst:.0%}" for line in fits])])


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:>8}" + "".join(f"{cell:>18}" for cell in cells)
