"""python -m jaxspec.bench simulate: policies on a simulated device, on synthetic or recorded load.

python -m jaxspec.bench simulate                                        good, poor and mixed texts on an H100's costs
python -m jaxspec.bench simulate --profile profile.json --acceptance good/poor@20 --concurrency 1,4
python -m jaxspec.bench simulate --trace AzureLLMInferenceTrace_conv.csv --seconds 600
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec import cli
from jaxspec.bench.simulate import acceptance, costs, tables
from jaxspec.bench.simulate.cells import cells, numbers, play


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.bench simulate", description=(__doc__ or "").splitlines()[0], formatter_class=cli.Help
    )
    add = p.add_argument
    add("--profile", default="h100-adaspec", metavar="NAME|FILE", help=f"costs of rounds: {', '.join(costs.NAMES)}; or "
        "a file of `bench profile` or of `bench.studies.rounds --json`")  # fmt: skip
    add("--acceptance", action="append", metavar="TEXTS", help=f"texts: kinds ({', '.join(acceptance.KINDS)}), rates "
        "0.8 or 0.9:0.7 by position, mixtures good*2+poor, phases good/poor@20 (seconds), or a recorded JSONL; may be "
        "repeated (default: good, poor, good+poor)")  # fmt: skip
    add("--concurrency", metavar="1,8,64", help="closed loops (default: 1,8,32,64, within the profile)")
    add("--grow", type=float, metavar="SECONDS", help="closed loops begin with one request, and have twice as many "
        "after each so many seconds (default: all at once)")  # fmt: skip
    add("--trace", action="append", metavar="FILE", help="arrivals: Azure, BurstGPT, Mooncake, AdaSpec's or one column "
        "of seconds; may be repeated (default: none)")  # fmt: skip
    add("--rate", metavar="1,2.5", help="Poisson arrivals a second (default: none)")
    add("--policy", action="append", metavar="NAME", help='of the registry, with settings: \'static {"depth": 3}\'; '
        "sglang-default, oracle, or a JSON file; may be repeated; fixed tiers always run (default: all)")  # fmt: skip
    add("--depths", metavar="1,2,3,5,7", help="chains that exist (default: 1,2,3,5,7, within the profile)")
    add("--budgets", default="2,4", metavar="1,2.5", help="drafted tokens a request that packed rounds may verify")
    add("--seconds", type=float, default=30.0, help="simulated seconds of a closed loop, or of arrivals")
    add("--speed-up", type=float, default=1.0, help="of a trace's arrivals")
    add("--prompt-tokens", type=int, default=256, help="where a trace names none")
    add("--output-tokens", type=int, default=128, help="where a trace names none: the mean, up to half more or less")
    add("--max-batch-size", type=int, default=64, help="of open loops")
    add("--max-context", type=int, default=16384, help="longest prompt and output; others are refused")
    add("--max-num-batched-tokens", type=int, default=1024, help="prompt tokens between two rounds")
    add("--pages", type=int, help="of the pool, 128 tokens each (default: enough)")
    add("--rounds-per-dispatch", type=int, default=1, help="rounds of a dispatch, where every draft is verified")
    add("--host-ms", type=float, default=0.0, help="milliseconds that the host takes for a dispatch")
    add("--noise", type=float, default=0.02, help="standard deviation of a round's seconds, in logarithm")
    add("--table-error", type=float, default=1.0, help="factor by which policies are told wrong costs of drafting")
    add("--spread", type=float, default=2.0, help="how much a text's tokens differ, in logits")
    add("--confidence-noise", type=float, default=1.0, help="of the drafter's word for its drafts, in logits")
    add("--confidence-slope", type=float, default=1.0, help="below 1 it is too modest, above too bold")
    add(
        "--streaks",
        type=float,
        default=0.0,
        help="share of that spread that neighbours have in common; real texts 0.35",
    )
    add("--carry", action="store_true", help="policies begin with what they learnt in an earlier run of the cell, with "
        "another seed, as a server's do after a restart (keep_learnt)")  # fmt: skip
    add("--tpot-scale", type=float, help="every request asks for so many times plain decoding's 90th percentile of "
        "TPOT; no round should take longer (default: none asks)")  # fmt: skip
    add("--seeds", type=int, default=1, help="runs of each cell, whose figures are averaged")
    add("--seed", type=int, default=0, help="of the first")
    add("--json", metavar="FILE", help="all figures, and what `bench report` draws (default: not written)")
    add("--record", metavar="DIR", help="rounds of each policy in each cell, as JSON lines (default: not kept)")
    return p


def run(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Simulates all cells; returns what --json writes.

    Raises:
      ValueError: options that do not fit; names them.
    """
    device = costs.load(args.profile)
    if args.depths:
        depths = (0, *(int(d) for d in numbers("depths", args.depths, 1, 32)))
    else:
        depths = tuple(d for d in (0, 1, 2, 3, 5, 7) if device.deepest is None or d <= device.deepest)
    for option in ("json", "record"):
        path = getattr(args, option)
        if path and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"--{option} {path!r}: its directory does not exist")
    if args.record:
        Path(args.record).mkdir(exist_ok=True)
    todo = cells(args, device)
    say(f"SIMULATED on {device.label}\n")
    blocks = []
    for cell in todo:
        done = [play(cell, args, device, args.seed + i, depths) for i in range(args.seeds)]
        fixed = [one.name for one in done[0].entries if one.fixed]
        blocks.append(tables.block(tables.told(done[0]), [one.outcomes for one in done], fixed))
        say(tables.text(blocks[-1]) + "\n")
    say(tables.summary(blocks))
    report = {
        "simulated": True,
        "profile": tables.profile(device, depths),
        "conditions": {key: value for key, value in vars(args).items() if key not in ("json", "record", "command")},
        "cells": blocks,
    }
    if args.json:
        tables.write(report, args.json)
        say(f"wrote {args.json}: `python -m jaxspec.bench report {args.json}` makes a page of it")
    return report


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    try:
        run(cli.parse(parser(), argv), lambda text: print(text, flush=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        cli.say_interrupted("interrupted")
        return cli.INTERRUPTED
    return 0
