"""python -m jaxspec.bench serve: a load for a server, and what its clients saw.

serve --target localhost:50051 --concurrency 16             16 requests at any time
serve --target localhost:50051 --rate 4 --burstiness 0.5    gamma-distributed arrivals
serve --target localhost:50051 --trace azure.csv --speed-up 10
serve --compare                                             off, every static tier and adaptive, on a server of its own
serve --overhead                                            what serving adds to the offline engine
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxspec import cli
from jaxspec.bench.offline import plots as bench_plots
from jaxspec.bench.offline.report import check_path, write_json
from jaxspec.bench.offline.workloads import FILE, Passage, built_in, load_prompts
from jaxspec.bench.online import arrivals, overhead, plots, report, texts, traces
from jaxspec.bench.online.process import own_server
from jaxspec.bench.online.records import Objectives, Record
from jaxspec.bench.online.sender import Sending
from jaxspec.bench.online.session import Session, Wanted
from serve.client import AsyncClient, ServerError

#: The name of the shipped trace.
SYNTHETIC = "synthetic"
#: Exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130
#: Options of --overhead besides --batch-sizes.
_OVERHEAD = ("stub_round_ms", "depth", "stream_interval_ms", "same_process")
_REQUESTS, _CONCURRENCY, _DURATION = 64, 4, 40.0
#: What vLLM's and SGLang's load generators call these flags.
ELSEWHERE = {
    "num_prompts": "requests", "request_rate": "rate", "max_concurrency": "concurrency", "host": "target",
    "port": "target", "base_url": "target", "dataset_path": "prompts", "output_len": "max_tokens",
    "random_output_len": "max_tokens", "max_num_seqs": "max_batch_size", "goodput": "slo_ttft_ms, slo_tpot_ms",
    "api_key": "token_file", "output_file": "json",
}  # fmt: skip


class _Help(cli.Help, argparse.RawDescriptionHelpFormatter):
    """With the examples as they are laid out."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    text = __doc__ or ""
    out = argparse.ArgumentParser(
        prog="python -m jaxspec.bench serve", description=text.splitlines()[0],
        epilog=text.partition("\n\n")[2], formatter_class=_Help,
    )  # fmt: skip
    add = out.add_argument_group("server").add_argument
    add("--target", metavar="HOST:PORT", help="a running server (default: one is started, and stopped in the end)")
    add("--token-file", metavar="FILE", help="the bearer token is its first line (default: no token)")
    add("--tls-ca", metavar="FILE", help="PEM file with the server's authority (default: no TLS)")
    add("--model", help='of an own server: "demo", a Hugging Face directory or a hub id (default: demo)')
    add("--drafter", help="of an own server (default: as LLM chooses)")
    add("--max-batch-size", type=int, metavar="N", help="of an own server (default: 16)")
    add = out.add_argument_group("arrivals (default: --concurrency 4; with --compare: --trace synthetic)").add_argument
    add("--concurrency", type=int, metavar="N", help="closed loop: N requests under way at any time (default: 4)")
    add("--rate", type=float, metavar="R", help="open loop: R requests a second; of the synthetic trace: its capacity "
        "(default: none)")  # fmt: skip
    add("--burstiness", type=float, metavar="B", help="shape of gamma-distributed gaps; 1 (default) is Poisson")
    add("--bursty", metavar="ON,OFF", help="phases of so many seconds with --rate and with --off-rate (default: none)")
    add("--off-rate", type=float, metavar="R", help="of --bursty (default: 0)")
    add("--trace", metavar="FILE", help='Azure, BurstGPT, Mooncake or one column of seconds, or "synthetic" '
        "(default: none)")  # fmt: skip
    add("--speed-up", type=float, metavar="X", help="a trace's arrivals come X times as fast (default: 1)")
    add("--requests", type=int, metavar="N", help=f"so many at most (default: {_REQUESTS}; traces: all)")
    add("--duration", type=float, metavar="S", help="arrivals of so many seconds (synthetic: default 40)")
    add = out.add_argument_group("requests").add_argument
    add("--workloads", metavar="code,prose", help="kinds of built-in prompts; each is a route (default: both)")
    add(
        "--prompts", metavar="FILE", help="JSON lines with `prompt` or Spec-Bench's `turns` (default: built-in prompts)"
    )
    add("--max-tokens", type=int, metavar="N", help="tokens of each request; most of a trace's (default: 96)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--seed", type=int, default=0, help="of arrivals and of the choice of prompts")
    add("--timeout", type=float, default=600.0, metavar="S", help="a request's deadline (default: 600)")
    add("--warmup", type=int, default=4, metavar="N", help="unrecorded requests before each run (default: 4)")
    for name, words in (("ttft", "to the first token"), ("tpot", "a token after it"), ("e2e", "to the end")):
        add(
            f"--slo-{name}-ms",
            type=float,
            metavar="MS",
            help=f"objective of the goodput: milliseconds {words} (default: none)",
        )
    add = out.add_argument_group("what is measured").add_argument
    add("--compare", action="store_true", help="speculation off, every compiled static tier, and adaptive, interleaved")
    add("--overhead", action="store_true", help="offline engine against serving, on an own server; no load options")
    add("--stub-round-ms", type=float, metavar="MS", help="of --overhead: no model, but a stub with rounds of so many "
        "milliseconds (default: the model)")  # fmt: skip
    add("--depth", type=int, metavar="N", help="of --overhead: the fixed depth beside plain and adaptive (default: a "
        "middle one)")  # fmt: skip
    add(
        "--stream-interval-ms",
        type=float,
        metavar="MS",
        help="of --overhead: see python -m serve (default: the server's)",
    )
    add("--same-process", action="store_true", default=None, help="of --overhead: the engine on a thread of the "
        "server's process, for comparison (default: off)")  # fmt: skip
    add("--batch-sizes", metavar="1,16", help="of --overhead (default: 1,16)")
    add("--repeats", type=int, metavar="N", help="of --compare (default: 3) and --overhead (default: 9)")
    add("--json", metavar="FILE", help="all raw numbers and the conditions (default: not written)")
    add("--plot", metavar="FILE", help="a picture, PNG (default: none)")
    return out


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} {why}")


def check(args: argparse.Namespace) -> None:
    """Refuses options that contradict each other or cannot be.

    Raises:
      ValueError: names the option, what was given and what is allowed.
    """
    for name in ("concurrency", "requests", "max_tokens", "max_batch_size", "repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {value}")
    if args.warmup < 0:
        raise ValueError(f"warmup must be at least 0, got {args.warmup}")
    if not 0 <= args.temperature <= 100:
        raise ValueError(f"temperature must lie in [0, 100], got {args.temperature!r}")
    for name in ("timeout", "duration"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, got {value!r}")
    for name in ("json", "plot"):
        check_path(name, getattr(args, name))
    if args.plot:
        bench_plots.require_matplotlib()
    if args.target is not None:
        _refuse(args, ("model", "drafter", "max_batch_size"), f"is for an own server, got --target {args.target}")
    else:
        _refuse(args, ("token_file", "tls_ca"), "is for a server that runs, got no --target")
    if args.overhead:
        names = (
            "target", "concurrency", "rate", "burstiness", "bursty", "trace", "requests", "duration", "workloads",
            "prompts", "plot", "max_batch_size",
        )  # fmt: skip
        _refuse(args, names, "does not go with --overhead")
        if args.compare:
            raise ValueError("--compare does not go with --overhead")
        if args.stub_round_ms is not None:
            _refuse(args, ("model", "drafter", "depth"), f"does not go with --stub-round-ms {args.stub_round_ms}")
            if not 0 < args.stub_round_ms <= 1000:
                raise ValueError(f"stub-round-ms must lie above 0 and be at most 1000, got {args.stub_round_ms!r}")
        if args.max_tokens is not None and args.max_tokens < 2:
            raise ValueError(f"max-tokens must be at least 2 with --overhead, got {args.max_tokens}")
        return
    _refuse(args, ("batch_sizes", *_OVERHEAD), "is for --overhead")
    if not args.compare:
        _refuse(args, ("repeats",), "is for --compare and --overhead")
    if args.prompts is not None:
        _refuse(args, ("workloads",), f"does not go with --prompts {args.prompts}")
    _check_arrivals(args)


def _check_arrivals(args: argparse.Namespace) -> None:
    if args.concurrency is not None:
        _refuse(args, ("rate", "trace", "duration"), f"does not go with --concurrency {args.concurrency}")
    if args.trace is not None and args.trace != SYNTHETIC:
        _refuse(args, ("rate",), f"does not go with --trace {args.trace}, which has its own")
    if args.trace is None or args.trace == SYNTHETIC:
        _refuse(args, ("speed_up",), "is for trace files")
    if args.rate is None or args.trace is not None:
        _refuse(args, ("burstiness", "bursty"), "needs --rate, and no --trace")
    if args.bursty is None:
        _refuse(args, ("off_rate",), "is for --bursty")
    else:
        _refuse(args, ("burstiness", "requests"), f"does not go with --bursty {args.bursty}")
    if args.trace == SYNTHETIC or (args.compare and args.rate is args.trace is args.concurrency is None):
        _refuse(args, ("requests",), "does not go with the synthetic trace; give --duration")


def load_of(args: argparse.Namespace) -> arrivals.Load | None:
    """The arrivals that checked options ask for; None: the shipped trace at the server's own capacity.

    Raises:
      ValueError: see `arrivals` and `traces`.
    """
    if args.trace == SYNTHETIC or (args.compare and args.rate is args.trace is args.concurrency is None):
        if args.rate is None:
            return None
        return arrivals.synthetic(args.rate, args.duration or _DURATION, seed=args.seed)
    if args.trace is not None:
        return traces.read(args.trace, speed_up=args.speed_up or 1.0, duration=args.duration, count=args.requests)
    if args.rate is None:
        return arrivals.closed(args.concurrency or _CONCURRENCY, args.requests or _REQUESTS)
    if args.bursty is not None:
        match = re.fullmatch(r"(\d+\.?\d*),(\d+\.?\d*)", args.bursty)
        if match is None:
            raise ValueError(f"bursty must be two numbers of seconds such as 2,8, got {args.bursty!r}")
        on, off = float(match[1]), float(match[2])
        duration = args.duration or _DURATION
        return arrivals.on_off(args.rate, args.off_rate or 0.0, on, off, duration, seed=args.seed)
    count = args.requests or (_REQUESTS if args.duration is None else 10**6)
    burstiness = 1.0 if args.burstiness is None else args.burstiness
    if args.duration is not None:
        count = min(count, math.ceil(args.rate * args.duration * 2) + 100)
    load = arrivals.random_process(args.rate, count, burstiness=burstiness, seed=args.seed)
    if args.duration is None:
        return load
    return dataclasses.replace(load, arrivals=tuple(a for a in load.arrivals if a.at < args.duration))


def library_of(args: argparse.Namespace) -> dict[str, list[Passage]]:
    """Prompts by kind.

    Raises:
      ValueError: an unknown kind or an unreadable file.
    """
    if args.prompts is not None:
        return {FILE: load_prompts(args.prompts)}
    known = built_in()
    names = texts.KINDS if args.workloads is None else tuple(args.workloads.split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"workloads must be among {sorted(known)}, got {name!r}")
    return {name: known[name] for name in names}


def wanted_of(args: argparse.Namespace) -> Wanted:
    """What a checked command line asks a session for."""
    slo = Objectives(args.slo_ttft_ms, args.slo_tpot_ms, args.slo_e2e_ms)
    return Wanted(
        load=load_of(args), library=library_of(args), sending=Sending(args.temperature, args.timeout, slo),
        duration=args.duration or _DURATION, max_tokens=args.max_tokens or 96, seed=args.seed, warmup=args.warmup,
        compare=args.compare, repeats=args.repeats or 3,
    )  # fmt: skip


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


class _Command:
    """A load under way: what it measured can be reported at any time."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.wanted = args, wanted_of(args)
        self.session: Session | None = None

    async def go(self) -> None:
        args = self.args
        if args.target is not None:
            await self._measure(args.target)
            return
        flags = ["--model", args.model or "demo", "--max-batch-size", str(args.max_batch_size or 16)]
        if args.drafter is not None:
            flags += ["--drafter", args.drafter]
        _say("starting a server: up to a few minutes the first time, seconds from the compile cache")
        async with own_server(flags) as target:
            await self._measure(target)

    async def _measure(self, target: str) -> None:
        args = self.args
        token = None if args.token_file is None else _first_line(args.token_file)
        with tqdm(desc="requests", disable=not sys.stderr.isatty(), leave=False) as bar:
            on_end = lambda record: _count(bar, record)
            async with AsyncClient(target, token=token, tls_ca=args.tls_ca) as client:
                self.session = Session(client, self.wanted, target, say=_say, on_end=on_end)
                await self.session.go()

    def report(self, *, interrupted: bool) -> int:
        """Prints and writes what there is; the exit status."""
        result = None if self.session is None else self.session.report(interrupted=interrupted)
        if result is None:
            _say("interrupted before anything was measured")
            return INTERRUPTED
        _say(report.header(result.conditions, result.plan) + "\n\n" + report.render(result))
        if self.args.json:
            write_json(report.to_dict(result), self.args.json)
            _say(f"wrote {self.args.json}")
        if self.args.plot and any(run.records for run in result.runs):
            plots.draw(result, self.args.plot)
            _say(f"wrote {self.args.plot}")
        missed = any(not verdict.holds and not math.isnan(verdict.ratio) for verdict in result.judged)
        return INTERRUPTED if interrupted else 1 if result.failures or missed else 0


def _count(bar: Any, record: Record) -> None:
    if not record.ok:
        bar.set_postfix_str(f"last error: {record.status}")
    bar.update()


def _first_line(path: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token-file {path!r} cannot be read: {error}") from error
    if not lines:
        raise ValueError(f"token-file {path!r} must hold a token, got nothing")
    return lines[0]


def _sizes(text: str) -> tuple[int, ...]:
    entries = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,3}", entry) for entry in entries):
        raise ValueError(f"batch-sizes must be integers from 1 to 9999 such as 1,16, got {text!r}")
    return tuple(sorted({int(entry) for entry in entries}))


def _overhead(args: argparse.Namespace) -> int:
    sizes = _sizes(args.batch_sizes or "1,16")
    stub = None if args.stub_round_ms is None else args.stub_round_ms / 1e3
    plan = overhead.Plan(
        args.model or "demo", args.drafter, sizes, args.max_tokens or 96, args.repeats or 9, args.seed, stub,
        args.depth, args.stream_interval_ms, bool(args.same_process),
    )  # fmt: skip
    measurement = overhead.Measurement(plan, _say)
    interrupted = False
    try:
        asyncio.run(measurement.go())
    except KeyboardInterrupt:
        interrupted = True
        _say("INTERRUPTED: only what had finished is shown")
    if args.json:
        write_json(overhead.to_dict(measurement, interrupted=interrupted), args.json)
        _say(f"wrote {args.json}")
    missed = any(cell.holds is False for cell in measurement.cells)
    return INTERRUPTED if interrupted else 1 if missed else 0


def main(argv: Sequence[str]) -> int:
    """The command; its exit status: 1 for failed requests or a missed limit, 2 for bad options, 130 after Ctrl-C."""
    args = cli.parse(parser(), argv, ELSEWHERE)
    try:
        check(args)
        if args.overhead:
            return _overhead(args)
        command = _Command(args)
        try:
            asyncio.run(command.go())
        except KeyboardInterrupt:
            return command.report(interrupted=True)
        except ServerError as error:
            if command.session is not None and command.session.plan is not None:
                command.report(interrupted=True)
            print(f"error: the server at {args.target or 'the own port'} says {error}", file=sys.stderr)
            return 1
        return command.report(interrupted=False)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
