"""python -m jaxspec.bench.studies.online: a head that learns while it serves, on traffic that turns from code to prose.

A head is trained on what an engine gathered while it served code. It then serves prose it has never seen, whose states
are gathered in turn; every so many requests training goes on from it on those, with a gate, and the new weights take
the old ones' place under load. Beside it stands a head trained afresh on the same prose, with as many steps as all runs
of the other together. Each is measured on further prompts of both kinds, which no run has seen: greedy, chains of
--depth, tokens a round over all rounds, and whether its texts are those of plain decoding. Counts repeat exactly but
for the trials, whose turns depend on timing.

What gathering costs: two engines take turns at the same requests, one with a ring; the ratio of all their seconds a
round, by the clock and by this process's processor time, and between which values the pairs' own ratios lie. What the
writer owes is written between the turns, so that each pays for what it begins.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import LLM, SamplingParams
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.studies import report
from jaxspec.cli import leave
from jaxspec.config import EngineConfig
from jaxspec.request import RequestOutput
from jaxspec.resolve import resolve_model
from jaxspec.ringfiles import ring_files
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import PLAIN, Tier
from jaxspec.train.data.ring import SCHEME

KINDS = CODE, PROSE = "code", "prose"
#: Tokens of a prompt.
_SHORTEST, _LONGEST = 16, 48
#: Tokens of text for each prompt, where there are so many.
_APART = 400
#: Times that a batch is filled in a run that is timed.
_WAVES = 4
#: The most requests of a trial, for each that heads learn from.
_TRIAL = 10


def parser() -> argparse.ArgumentParser:
    p = report.parser("online", __doc__)
    p.add_argument("--target", default="demo", help='"demo", a Hugging Face directory or a hub id')
    p.add_argument("--drafter", help="serves first; shaped as the demo's EAGLE-3.1 (default: the target's own)")
    p.add_argument(
        "--texts", type=Path, nargs=2, metavar=("CODE", "PROSE"), help="JSONL of texts (default: made by train corpus)"
    )
    p.add_argument("--work", type=Path, default=Path("runs/online"), help="directory for rings and heads; emptied")
    p.add_argument("--requests", type=int, default=200, help="requests of each kind that heads learn from")
    p.add_argument("--cycles", type=int, default=2, help="times that the head learns while these are served")
    p.add_argument("--measured", type=int, default=48, help="further requests of each kind that heads are measured on")
    p.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    p.add_argument("--batch", type=int, default=8, help="requests at once")
    p.add_argument("--depth", type=int, default=3, help="drafts of a round")
    p.add_argument(
        "--steps", type=int, default=150, help="training steps of the first head, and of each cycle; 0: no training"
    )
    p.add_argument("--train-batch", type=int, default=8, help="rows of 256 tokens a training step")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the engines (default: the device's own)")
    p.add_argument("--overhead", type=int, default=20, metavar="N", help="pairs of runs with and without a ring")
    p.add_argument(
        "--shares", type=float, nargs="+", default=[EngineConfig.feature_ring_share, 1.0], metavar="SHARE",
        help="of the time that the ring's writer may take: each is measured, and heads learn from the last",
    )  # fmt: skip
    return p


def prompts_of(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Pieces of texts of each kind, far apart and in a random order: what is learned first, then what is measured.

    Raises:
      ValueError: too few texts; names how many tokens there are and how many are needed.
    """
    corpus, wanted = args.work / "corpus", args.requests + args.measured
    if args.texts is None:
        run([["corpus", "--out", corpus]])
    files = args.texts or [corpus / f"{kind}.train.jsonl" for kind in KINDS]
    tokenizer = Tokenizer.from_directory(resolve_model(args.target))
    found = {}
    for kind, file in zip(KINDS, files, strict=True):
        tokens: list[int] = []
        for line in file.read_text(encoding="utf-8").splitlines():
            if len(tokens) < wanted * _APART:
                tokens += tokenizer.encode(json.loads(line)["text"], add_special_tokens=False)
        stride = len(tokens) // wanted
        if stride < _LONGEST:
            raise ValueError(f"{file} has {len(tokens)} tokens, and {wanted} prompts need {wanted * _LONGEST}")
        noise = random.Random(0)
        pieces = [tokens[at * stride : at * stride + noise.randint(_SHORTEST, _LONGEST)] for at in range(wanted)]
        noise.shuffle(pieces)
        found[kind] = pieces
    return found


def run(commands: Sequence[Sequence[Any]]) -> None:
    """Commands of jaxspec.train at the same time, in processes of their own, as beside a server.

    Raises:
      subprocess.CalledProcessError: one that failed.
    """
    begun = [subprocess.Popen([sys.executable, "-m", "jaxspec.train", *map(str, command)]) for command in commands]
    for process in begun:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)


def serve(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[RequestOutput]:
    """Greedy answers of so many tokens."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, params, use_tqdm=False)


def tokens_a_round(outputs: Sequence[RequestOutput]) -> float:
    """Of all rounds together, the target's own token included."""
    rounds = sum(output.metrics.rounds for output in outputs)
    return 1.0 + sum(output.metrics.accepted for output in outputs) / rounds


def set_aside(ring: Path, other: Path) -> None:
    """Moves what has been gathered so far into a directory of its own."""
    other.mkdir()
    for path in ring_files(ring):
        path.rename(other / path.name)


class Study:
    """The heads and their measurements.

    Attributes:
      rows: what --json gets. texts: what plain decoding answers to the measured prompts.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.prompts = args, prompts_of(args)
        self.rows: list[dict[str, Any]] = []
        self.texts: dict[str, list[list[int]]] = {}

    def engine(self, drafter: Any, ring: Path | None) -> LLM:
        args, tier = self.args, Tier(self.args.depth)
        llm = LLM(
            args.target, drafter, {"tiers": (PLAIN, tier)}, args.batch, args.tokens + 64, progress=False,
            warmup="eager", batch_buckets=(args.batch,), variants=("greedy",), dtype=args.dtype, feature_ring=ring,
        )  # fmt: skip
        llm.use_policy(StaticPolicy(tier))
        return llm

    def learned(self, kind: str) -> list[list[int]]:
        return self.prompts[kind][: self.args.requests]

    def measured(self, kind: str) -> list[list[int]]:
        return self.prompts[kind][self.args.requests :]

    def training(self, name: str, ring: Path, steps: int, *more: Any) -> list[Any]:
        """The command that trains a head by --data ring; those that begin afresh are as small as the demo's."""
        fresh = ["--hidden-size", 256, "--intermediate-size", 768, "--heads", 4, "--kv-heads", 2, "--head-dim", 64,
                 "--draft-vocab-size", 4096]  # fmt: skip
        return [
            "eagle3", "--target", resolve_model(self.args.target), "--data", f"{SCHEME}{ring}",
            "--out", self.args.work / name, "--steps", steps, "--batch", self.args.train_batch, "--length", 256,
            "--lr", 2e-3, "--ttt-steps", self.args.depth, "--eval-share", 0.1, "--log-every", max(50, steps // 4),
            "--save-every", steps, *(() if "--init-from" in more else fresh), *more,
        ]  # fmt: skip

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    def main(self) -> None:
        """One engine gathers and one does not; heads take the place of one another in both."""
        args, ring = self.args, self.args.work / "ring"
        with self.engine(args.drafter, ring) as ringed, self.engine(args.drafter, None) as plain:
            if args.overhead:
                for share in args.shares:
                    ringed.engine.limit_ring(share)
                    self.overhead(ringed, plain, share)
            ringed.engine.limit_ring(args.shares[-1])
            if not args.steps:
                return
            serve(ringed, self.learned(CODE), args.tokens)
            ringed.engine.flush_ring()
            set_aside(ring, args.work / "ring-code")
            run([self.training("code", args.work / "ring-code", args.steps)])
            llm, served, size = ringed, args.work / "code", -(-args.requests // args.cycles)
            self.texts = self.plain_texts(plain)
            self.measure(plain, "trained for code", served)
            llm.update_drafter(served, trial=False)
            for start in range(0, args.requests, size):
                some = self.learned(PROSE)[start : start + size]
                self.add(
                    phase="served", requests=len(some), tokens_a_round=tokens_a_round(serve(llm, some, args.tokens))
                )
                llm.engine.flush_ring()
                count, steps = start + len(some), args.steps
                commands = [self.training(f"prose-{count}", ring, steps, "--init-from", served, "--gate", served)]
                if count == args.requests:
                    commands.append(self.training("prose", ring, steps * (1 + args.cycles)))
                run(commands)
                if (args.work / f"prose-{count}" / "config.json").exists():
                    served = args.work / f"prose-{count}"
                    self.update(llm, served, count)
                self.measure(plain, f"after {count} requests", served)
            self.measure(plain, "trained for prose", args.work / "prose")
            self.add(phase="end", compilations=plain.stats.compilations_after_warmup)
        self.summary()

    def update(self, llm: LLM, head: Path, learned: int) -> None:
        """Puts a head on trial, and serves what was served before until it has ended."""
        began, version = time.perf_counter(), llm.update_drafter(head)
        seconds, requests, batch = time.perf_counter() - began, 0, self.args.batch
        while llm.stats.drafter_trial and requests < _TRIAL * learned:
            some = (self.learned(PROSE)[:learned] * 2)[requests % learned :][:batch]
            requests += len(some)
            serve(llm, some, self.args.tokens)
        stats = llm.stats
        self.add(
            phase="trial", version=version, served=stats.drafter_version, rollbacks=stats.drafter_rollbacks,
            requests=requests, loading_seconds=seconds, compilations=stats.compilations_after_warmup,
            ring_rows=stats.ring_rows, ring_lost=stats.ring_lost,
        )  # fmt: skip

    def plain_texts(self, llm: LLM) -> dict[str, list[list[int]]]:
        """What plain decoding answers to the prompts that heads are measured on."""
        llm.use_policy(StaticPolicy(PLAIN))
        texts = {kind: [o.token_ids for o in serve(llm, self.measured(kind), self.args.tokens)] for kind in KINDS}
        llm.use_policy(StaticPolicy(Tier(self.args.depth)))
        return texts

    def measure(self, llm: LLM, name: str, head: Path) -> None:
        """A head on the prompts that no head has seen."""
        llm.update_drafter(head, trial=False)
        for kind in KINDS:
            llm.flush_prefix_cache()
            outputs = serve(llm, self.measured(kind), self.args.tokens)
            same = [output.token_ids == text for output, text in zip(outputs, self.texts[kind], strict=True)]
            self.add(
                head=name, traffic=kind, tokens_a_round=tokens_a_round(outputs),
                texts_of_plain_decoding=f"{sum(same)} of {len(same)}",
            )  # fmt: skip

    def overhead(self, ringed: LLM, plain: LLM, share: float) -> None:
        """What gathering costs a round whose writer may take so much of the time."""
        args, some = self.args, self.learned(CODE)[: _WAVES * self.args.batch]
        seconds: dict[LLM, list[tuple[float, float]]] = {ringed: [], plain: []}
        same, began = True, ringed.stats
        for number in range(args.overhead + 1):
            said = []
            for llm in (ringed, plain) if number % 2 else (plain, ringed):
                llm.flush_prefix_cache()
                rounds, clock, cpu = llm.stats.rounds, time.perf_counter(), time.process_time()
                said.append([output.token_ids for output in serve(llm, some, args.tokens)])
                clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
                rounds = llm.stats.rounds - rounds
                if number:  # the first pair warms caches up
                    seconds[llm].append((clock / rounds, cpu / rounds))
                ringed.engine.flush_ring()
            same &= said[0] == said[1]
        ratios = [with_[0] / without[0] for with_, without in zip(seconds[ringed], seconds[plain], strict=True)]
        totals = [[sum(column) for column in zip(*seconds[llm], strict=True)] for llm in (ringed, plain)]
        clock, cpu = (100 * (with_ / without - 1) for with_, without in zip(*totals, strict=True))
        self.add(
            phase="gathering", share=share, pairs=args.overhead,
            milliseconds_a_round=1e3 * totals[1][0] / args.overhead, percent_by_the_clock=clock,
            of_pairs=[round(100 * (f(ratios) - 1), 2) for f in (min, statistics.median, max)],
            percent_by_processor_time=cpu, positions=ringed.stats.ring_rows - began.ring_rows,
            lost=ringed.stats.ring_lost - began.ring_lost, same_texts=same,
        )  # fmt: skip

    def summary(self) -> None:
        """Tokens a round of each head on prose, beside those of the head that was trained for it."""
        found = {row["head"]: row["tokens_a_round"] for row in self.rows if row.get("traffic") == PROSE}
        known = next(row["tokens_a_round"] for row in self.rows if row.get("traffic") == CODE)
        own = found["trained for prose"]
        print(f"\ntokens a round, chain-{self.args.depth}, on texts that no head has seen")
        print(f"{'before the shift (code)':32s} {known:.3f}")
        for name, length in found.items():
            label = {"trained for code": "after it, without learning"}.get(name, name)
            print(f"{label:32s} {length:.3f}  {length / own - 1:+.1%}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = report.parse(parser(), argv)
    for name in ("requests", "cycles", "measured", "tokens", "batch", "depth", "steps"):
        if getattr(args, name) < (least := name != "steps"):
            raise SystemExit(f"error: --{name} must be at least {least:d}, got {getattr(args, name)}")
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    study = Study(args)
    study.main()
    report.write(args, "rows", study.rows)
    return 0


if __name__ == "__main__":
    leave(main())
