"""python -m jaxspec.bench: plain decoding, every static tier and the adaptive policy, in one run.

Its siblings on an engine of this process too: tune, profile, grow, overheads.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from jaxspec import cli
from jaxspec.bench.offline import grow, overheads, plots, profile, report, tune
from jaxspec.bench.offline.engines import Options, Parts, prepare
from jaxspec.bench.offline.measure import Experiment, Sweep
from jaxspec.bench.offline.metrics import summarize
from jaxspec.bench.offline.workloads import BUILT_IN, FILE
from jaxspec.config import DRAFT_QUANTIZATIONS
from jaxspec.drafters import registry
from jaxspec.names import DTYPES
from jaxspec.tier import Tier, parse_tier

_DEFAULTS = {"batch_sizes": (1, 4, 16), "workloads": BUILT_IN, "max_tokens": 96, "repeats": 3}
_QUICK = {"batch_sizes": (1, 4), "workloads": ("code", "switch"), "max_tokens": 48, "repeats": 1, "waves": 1}
_TUNE_WORKLOADS = ("code", "prose")
#: What vLLM's and SGLang's benchmarks call these flags.
_ELSEWHERE = {
    "output_len": "max_tokens", "num_iters": "repeats", "concurrency": "batch_sizes", "max_num_seqs": "batch_sizes",
    "num_speculative_tokens": "tiers", "depth": "tiers", "speculative_config": "drafter, tiers", "output_json": "json",
    "speculative_num_steps": "tiers", "speculative_algorithm": "drafter", "dataset_path": "prompts",
}  # fmt: skip


def parse_tiers(text: str) -> tuple[Tier, ...]:
    """Tiers from "1,3,5" or "chain-3,tree-4x3/16".

    Raises:
      ValueError: an entry that is neither a depth nor a tier's name, or plain decoding, which is always measured.
    """
    out: list[Tier] = []
    for entry in text.split(","):
        tier = parse_tier(entry.strip())
        if tier.depth == 0:
            raise ValueError(
                f"tiers must have a depth of at least 1 (plain decoding is always measured), got {entry!r}"
            )
        out.append(tier)
    return tuple(dict.fromkeys(out))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from "1,4,16", ascending.

    Raises:
      ValueError: an entry that is no integer from 1 to 1024.
    """
    sizes: set[int] = set()
    for entry in text.split(","):
        if not re.fullmatch(r"\s*\d{1,4}\s*", entry) or not 1 <= int(entry) <= 1024:
            raise ValueError(f"batch-sizes must be integers from 1 to 1024, got {entry!r}")
        sizes.add(int(entry))
    return tuple(sorted(sizes))


def parse_workloads(text: str, has_file: bool) -> tuple[str, ...]:
    """Workloads from "code,switch".

    Raises:
      ValueError: an unknown name, or "file" without --prompts.
    """
    names = tuple(dict.fromkeys(entry.strip() for entry in text.split(",")))
    known = (*BUILT_IN, FILE) if has_file else BUILT_IN
    for name in names:
        if name not in known:
            hint = " (give --prompts FILE)" if name == FILE else ""
            raise ValueError(f"workloads must be among {list(known)}, got {name!r}{hint}")
    return names


def _shared() -> argparse.ArgumentParser:
    """What the benchmark and `tune` have in common."""
    shared = argparse.ArgumentParser(add_help=False)
    add = shared.add_argument
    add("--model", default="demo", help='"demo", a Hugging Face directory or a hub id')
    add("--drafter", help=f"{', '.join(registry.names())}, a directory or a hub id (default: as LLM chooses)")
    add("--batch-sizes", metavar="1,4,16", help=f"requests decoded together ({_presets('batch_sizes')})")
    add("--tiers", metavar="1,3,chain-5", help='depths or names such as "tree-4x3/16" (default: the engine\'s)')
    add("--workloads", metavar="code,prose,switch", help='what is written; "file" with --prompts '
        f"({_presets('workloads')}, of tune {','.join(_TUNE_WORKLOADS)})")  # fmt: skip
    add("--prompts", metavar="FILE", help="JSON lines with `prompt` or Spec-Bench's `turns` (default: built-in texts)")
    add("--max-tokens", type=int, help=f"tokens of each request ({_presets('max_tokens')})")
    add("--repeats", type=int, help=f"interleaved repeats ({_presets('repeats')})")
    add("--waves", type=int, help="requests of a run, in batches (default: what a steady state needs, at most 6; "
        f"with --quick {_QUICK['waves']})")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--dtype", type=cli.dtype, choices=DTYPES, help="default: float32 on CPU, bfloat16 on accelerators")
    add("--hybrid", action="store_true", help="suffix matches in a request's own text draft beside the drafter")
    add("--hybrid-depth", type=int, metavar="N", help="of a hybrid's drafter (default: 3 in trees, else the tier's)")
    add("--draft-quantization", choices=DRAFT_QUANTIZATIONS, default="auto",
        help="round the drafter's weights (default: as engines do)")  # fmt: skip
    add("--batch-invariant", action="store_true", help="as EngineConfig.batch_invariant: bfloat16 without differences")
    add("--quick", action="store_true", help="fewer cells, shorter texts, one repeat")
    add("--json", metavar="FILE", help="all raw numbers and the conditions (default: not written)")
    add("--simulate-accept-length", type=float, metavar="X", help="simulated acceptance: X tokens a round at the "
        "deepest tier; for random weights, labelled (default: acceptance as it is)")  # fmt: skip
    add("--grow", metavar=grow.SIZES, help="the same function at a larger model's cost (default: as it is)")
    add("--grow-head", action="store_true", help="its EAGLE-3 head as wide as it (default: as wide as it was)")
    return shared


def _presets(name: str) -> str:
    """The default of an option, and its default with --quick."""
    plain, quick = (
        ",".join(map(str, value)) if isinstance(value := preset[name], tuple) else value
        for preset in (_DEFAULTS, _QUICK)
    )
    return f"default: {plain}, with --quick {quick}"


def parser() -> argparse.ArgumentParser:
    """The benchmark's command line."""
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.bench", description=(__doc__ or "").splitlines()[0], parents=[_shared()],
        formatter_class=cli.Help,
        epilog="`tune --help`: measure an adaptive configuration. `profile --help`: measure costs. "
        "`serve --help`: measure a server. `adaptive --help`: every policy, under texts and loads that change. "
        "`simulate --help`: the same on a simulated device. `report --help`: a page of either. "
        "`grow --help`: write a larger model. "
        "`overheads --help`: the host's part of a round. Studies of single questions: python -m "
        "jaxspec.bench.studies.NAME, listed in docs/benchmarks.md.",
    )  # fmt: skip
    p.add_argument("--plot", metavar="FILE", help="a picture, PNG (default: none)")
    p.add_argument("--fixed", action="store_true", help="plain decoding and the fixed tiers alone, no adaptive policy")
    p.set_defaults(command="bench", out=None)
    return p


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Command lines of the commands by name; `serve` has its own."""
    tuner = argparse.ArgumentParser(
        prog="python -m jaxspec.bench tune", parents=[_shared()], formatter_class=cli.Help,
        description="Measures static tiers and writes candidate steps by batch size.",
    )  # fmt: skip
    tuner.add_argument("--out", metavar="FILE", required=True, help="the JSON to write, as SGLang reads it")
    tuner.add_argument("--reach", type=float, default=tune.REACH, help="share of the best speed a candidate may lack")
    tuner.set_defaults(command="tune", plot=None)
    grower = argparse.ArgumentParser(
        prog="python -m jaxspec.bench grow", formatter_class=cli.Help,
        description="Writes a model, and its EAGLE-3 head, that compute what the small ones do at a larger one's cost.",
    )  # fmt: skip
    layers = "the layers of Llama 3.2 1B, Llama 3.1 8B or Qwen3-30B-A3B, or others"
    grower.add_argument("size", metavar=grow.SIZES, help=layers)
    grower.add_argument("out", metavar="DIR", help="a new directory: `python -m serve --model DIR` serves it")
    grower.add_argument("--model", default="demo", help='"demo", a Hugging Face directory or a hub id')
    grower.add_argument("--dtype", type=cli.dtype, choices=DTYPES, default="bfloat16", help="of what is written")
    grower.set_defaults(command="grow")
    profiler = argparse.ArgumentParser(
        prog="python -m jaxspec.bench profile", formatter_class=cli.Help,
        description="Measures what every round costs on this device, by tier, batch size and context.",
    )  # fmt: skip
    profile.add_arguments(profiler)
    profiler.set_defaults(command="profile")
    return {"tune": tuner, "grow": grower, "overheads": overheads.parser(), "profile": profiler}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with status 2 on unknown options."""
    named = subcommands()
    known = bool(argv) and argv[0] in named
    return cli.parse(named[argv[0]], argv[1:], _ELSEWHERE) if known else cli.parse(parser(), argv, _ELSEWHERE)


def options_of(args: argparse.Namespace) -> Options:
    """Checked options.

    Raises:
      ValueError: names the option, what was given and what is allowed.
    """
    preset = dict(_QUICK if args.quick else _DEFAULTS)
    if args.prompts:
        preset["workloads"] = (FILE,)
    elif args.command == "tune":
        preset["workloads"] = _TUNE_WORKLOADS
    for name in ("max_tokens", "repeats", "waves"):
        value = getattr(args, name)
        if value is not None:
            preset[name] = value
    if preset["max_tokens"] < 2:
        raise ValueError(
            f"max-tokens must be at least 2 (the first token is the prefill's), got {preset['max_tokens']}"
        )
    for name in ("repeats", "waves"):
        if preset.get(name, 1) < 1:
            raise ValueError(f"{name} must be at least 1, got {preset[name]}")
    if not 0 <= args.temperature <= 100 or math.isnan(args.temperature):
        raise ValueError(f"temperature must lie in [0, 100], got {args.temperature!r}")
    if args.batch_sizes:
        preset["batch_sizes"] = parse_sizes(args.batch_sizes)
    if args.workloads:
        preset["workloads"] = parse_workloads(args.workloads, bool(args.prompts))
    if args.command == "tune" and not 0 <= args.reach < 1:
        raise ValueError(f"reach must lie in [0, 1), got {args.reach!r}")
    tiers = parse_tiers(args.tiers) if args.tiers else None
    for name in ("json", "plot", "out"):
        report.check_path(name, getattr(args, name))
    if args.plot:
        plots.require_matplotlib()
    return Options(
        plan=Sweep(temperature=args.temperature, **preset),
        model=args.model,
        drafter=args.drafter,
        tiers=tiers,
        dtype=args.dtype,
        grow=args.grow,
        grow_head=args.grow_head,
        simulate=args.simulate_accept_length,
        prompts=args.prompts,
        batch_invariant=args.batch_invariant,
        hybrid=args.hybrid,
        hybrid_depth=args.hybrid_depth,
        draft_quantization=args.draft_quantization,
    )


def measure(session: Experiment, say: Callable[[str], None]) -> bool:
    """Runs the plan with a progress bar on standard error; True if Ctrl-C ended it early."""
    try:
        session.warm_up()
        say(f"measuring {session.num_runs} runs: about {_duration(session.estimate)}")
        with tqdm(total=session.num_runs, desc="runs", disable=not sys.stderr.isatty(), leave=False) as bar:
            for run in session.measure():
                bar.set_postfix_str(f"{run.workload} batch {run.batch_size} {run.mode}")
                bar.update()
    except KeyboardInterrupt:
        return True
    return False


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def run(args: argparse.Namespace) -> int:
    """One command; returns its exit status.

    Raises:
      ValueError: options that do not fit together.
    """
    say = lambda text: print(text, flush=True)
    if args.command == "grow":
        weights = grow.save_grown(args.model, args.size, args.out, args.dtype)
        say(f"wrote {args.out}: {weights:,} weights in {args.dtype}")
        return 0
    if args.command == "overheads":
        return overheads.run(args, parse_sizes(args.batch_sizes), say)
    if args.command == "profile":
        with cli.quick_interrupts():
            profile.run(args, say)
        return 0
    parts = Parts(options_of(args))
    say("loading and compiling: up to a few minutes the first time, seconds from the cache")
    with cli.quick_interrupts():
        session, conditions = prepare(parts, adaptive=args.command == "bench" and not args.fixed)
    say(report.header(conditions) + "\n")
    interrupted = measure(session, say)
    stats = session.engine.stats
    result = report.Report(conditions, session.runs, stats.compilations_after_warmup, interrupted)
    status = cli.INTERRUPTED if interrupted else 1 if result.errors else 0
    if not session.runs:
        say("interrupted before the first run ended: nothing was measured")
    else:
        say("\n" + report.table(result) + "\n\n" + report.footer(result))
    if args.json:
        report.write_json(report.to_dict(result), args.json)
        say(f"wrote {args.json}")
    if args.plot and session.runs:
        plots.draw(result, args.plot)
        say(f"wrote {args.plot}")
    if args.command == "tune":
        if status:
            say(f"{args.out} was not written: the measurement is incomplete or not exact")
        else:
            _tune(session, result, args, say)
    return status


def _tune(session: Experiment, result: report.Report, args: argparse.Namespace, say: Callable[[str], None]) -> None:
    steps = {mode.name: mode.tier.depth for mode in session.modes if mode.tier is not None}
    verdicts = tune.choose(summarize(result.runs), steps, args.reach)
    config: dict[str, Any] = tune.configuration(verdicts)
    report.write_json(config, args.out)
    say("\n" + tune.table(verdicts) + "\n")
    say(f"wrote {args.out}: use it as SpeculationConfig(policy={args.out!r})")


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status (2 for options that do not fit, 130 after Ctrl-C)."""
    try:
        return run(parse(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        cli.say_interrupted("interrupted before anything was measured")
        return cli.INTERRUPTED
