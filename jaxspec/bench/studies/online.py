"""python -m jaxspec.bench.studies.online: a head that learns while it serves, on traffic that turns from code to prose.

A head is trained on what an engine gathered while it served code. It then serves prose it has never seen, whose states
are gathered in turn; training goes on from it on those, with a gate, and the new weights take the old ones' place under
load. Beside it stands a head trained afresh on the same prose, with as many steps as both runs of the other together.
All three are measured on further prompts of both kinds, which no run has seen: greedy, chains of --depth, tokens a
round over all rounds. Counts repeat exactly but for the trial, whose turns depend on timing.

--overhead measures what gathering costs: two engines take turns at the same requests, one with a ring; the median of
the ratios of their seconds a round, by the clock and by this process's processor time.
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
from jaxspec.assemble import resolve_model
from jaxspec.bench.studies import report
from jaxspec.cli import leave
from jaxspec.request import RequestOutput
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.data.ring import SCHEME

KINDS = CODE, PROSE = "code", "prose"
#: Tokens of a prompt.
_SHORTEST, _LONGEST = 16, 48
#: Tokens of text for each prompt, where there are so many.
_APART = 400


def parser() -> argparse.ArgumentParser:
    p = report.parser("online", __doc__)
    p.add_argument("--target", default="demo", help='"demo" or a Hugging Face directory')
    p.add_argument("--drafter", help="a head of the kind that is trained (default: the target's own)")
    p.add_argument("--work", type=Path, default=Path("runs/online"), help="directory for rings and heads; emptied")
    p.add_argument("--requests", type=int, default=200, help="requests of each kind that heads learn from")
    p.add_argument("--measured", type=int, default=48, help="further requests of each kind that heads are measured on")
    p.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    p.add_argument("--batch", type=int, default=8, help="requests at once")
    p.add_argument("--depth", type=int, default=3, help="drafts of a round")
    p.add_argument(
        "--steps", type=int, default=150, help="training steps of the first head, and again of its successor"
    )
    p.add_argument("--overhead", type=int, default=0, metavar="N", help="pairs of runs with and without a ring")
    return p


def prompts_of(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Pieces of texts of each kind, far apart and in a random order: what is learned first, then what is measured."""
    corpus, wanted = args.work / "corpus", args.requests + args.measured
    run("corpus", "--out", corpus)
    tokenizer = Tokenizer.from_directory(resolve_model(args.target))
    found = {}
    for kind in KINDS:
        tokens: list[int] = []
        for line in (corpus / f"{kind}.train.jsonl").read_text(encoding="utf-8").splitlines():
            if len(tokens) < wanted * _APART:
                tokens += tokenizer.encode(json.loads(line)["text"], add_special_tokens=False)
        stride = len(tokens) // wanted
        if stride < _LONGEST:
            raise ValueError(f"{kind} has {len(tokens)} tokens, and {wanted} prompts need {wanted * _LONGEST}")
        noise = random.Random(0)
        pieces = [tokens[at * stride : at * stride + noise.randint(_SHORTEST, _LONGEST)] for at in range(wanted)]
        noise.shuffle(pieces)
        found[kind] = pieces
    return found


def run(*command: Any) -> None:
    """A command of jaxspec.train, in a process of its own, as beside a server."""
    subprocess.run([sys.executable, "-m", "jaxspec.train", *map(str, command)], check=True)


def serve(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[RequestOutput]:
    """Greedy answers of so many tokens."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, params, use_tqdm=False)


def tokens_a_round(outputs: Sequence[RequestOutput]) -> float:
    """Of all rounds together, the target's own token included."""
    rounds = sum(output.metrics.rounds for output in outputs)
    return 1.0 + sum(output.metrics.accepted for output in outputs) / rounds


class Study:
    """The heads and their measurements.

    Attributes:
      rows: what --json gets.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.prompts = args, prompts_of(args)
        self.rows: list[dict[str, Any]] = []

    def engine(self, drafter: Any, ring: Path | None) -> LLM:
        args = self.args
        return LLM(
            args.target, drafter, {"depth": args.depth}, args.batch, args.tokens + 64, progress=False, warmup="eager",
            batch_buckets=(args.batch,), feature_ring=ring,
        )  # fmt: skip

    def learned(self, kind: str) -> list[list[int]]:
        return self.prompts[kind][: self.args.requests]

    def train(self, name: str, ring: Path, steps: int, *more: Any) -> Path:
        """A head by --data ring; those that begin afresh have the served one's shapes."""
        out = self.args.work / name
        sizes = () if "--init-from" in more else self.shapes
        run(
            "eagle3", "--target", resolve_model(self.args.target), "--data", f"{SCHEME}{ring}", "--out", out,
            "--steps", steps, "--batch", 8, "--length", 256, "--lr", 1e-3, "--ttt-steps", self.args.depth,
            "--eval-share", 0.1, "--log-every", 50, *sizes, *more,
        )  # fmt: skip
        return out

    @property
    def shapes(self) -> list[Any]:
        """Arguments of a fresh head as small as the demo's."""
        return ["--hidden-size", 256, "--intermediate-size", 768, "--heads", 4, "--kv-heads", 2, "--head-dim", 64,
                "--draft-vocab-size", 4096]  # fmt: skip

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    def main(self) -> None:
        args, work = self.args, self.args.work
        with self.engine(args.drafter, work / "ring-code") as llm:
            serve(llm, self.learned(CODE), args.tokens)
        first = self.train("code-head", work / "ring-code", args.steps)
        with self.engine(first, work / "ring-live") as llm:
            known = serve(llm, self.measured(CODE), args.tokens)
            self.add(phase="before", traffic=CODE, tokens_a_round=tokens_a_round(known))
            shifted = serve(llm, self.learned(PROSE), args.tokens)
            self.add(phase="after the shift", traffic=PROSE, tokens_a_round=tokens_a_round(shifted))
            llm.engine.flush_ring()
            again = ("--init-from", first, "--gate", first)
            second = self.train("learned-head", work / "ring-live", args.steps, *again)
            self.update(llm, second)
        fresh = self.train("prose-head", work / "ring-live", 2 * args.steps)
        self.compare({"trained for code": first, "learned while serving": second, "trained for prose": fresh})

    def measured(self, kind: str) -> list[list[int]]:
        return self.prompts[kind][self.args.requests :]

    def update(self, llm: LLM, head: Path) -> None:
        """Puts a head on trial, and serves what was served before until it has ended."""
        began, version = time.perf_counter(), llm.update_drafter(head)
        seconds, requests = time.perf_counter() - began, 0
        while llm.stats.drafter_trial and requests < 50 * self.args.requests:
            some = self.learned(PROSE)[requests % self.args.requests :][: self.args.batch]
            requests += len(some)
            serve(llm, some, self.args.tokens)
        stats = llm.stats
        self.add(
            phase="trial", version=version, served=stats.drafter_version, rollbacks=stats.drafter_rollbacks,
            requests=requests, loading_seconds=seconds, compilations=stats.compilations_after_warmup,
            ring_rows=stats.ring_rows, ring_lost=stats.ring_lost,
        )  # fmt: skip

    def compare(self, heads: dict[str, Path]) -> None:
        """Each head on the same further prompts, of one engine whose weights are exchanged in between."""
        texts: dict[str, list[list[int]]] = {}
        with self.engine(next(iter(heads.values())), None) as llm:
            for name, head in heads.items():
                llm.update_drafter(head, trial=False)
                for kind in KINDS:
                    llm.flush_prefix_cache()
                    outputs = serve(llm, self.measured(kind), self.args.tokens)
                    said = [output.token_ids for output in outputs]
                    self.add(
                        head=name, traffic=kind, tokens_a_round=tokens_a_round(outputs),
                        same_text=said == texts.setdefault(kind, said),
                    )  # fmt: skip
            self.add(phase="end", compilations=llm.stats.compilations_after_warmup)

    def overhead(self) -> None:
        """What gathering costs a round."""
        args, pairs = self.args, []
        with self.engine(args.drafter, args.work / "ring-cost") as ringed, self.engine(args.drafter, None) as plain:
            some = self.measured(PROSE)[: args.batch]
            for number in range(args.overhead + 1):
                found = {}
                for llm in (ringed, plain) if number % 2 else (plain, ringed):
                    llm.flush_prefix_cache()
                    rounds, clock, cpu = llm.stats.rounds, time.perf_counter(), time.process_time()
                    serve(llm, some, args.tokens)
                    rounds = llm.stats.rounds - rounds
                    found[llm] = (time.perf_counter() - clock) / rounds, (time.process_time() - cpu) / rounds
                if number:  # the first pair warms caches up
                    pairs.append([found[ringed][i] / found[plain][i] for i in range(2)])
            clock, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
            self.add(phase="overhead", pairs=args.overhead, by_the_clock=clock, by_processor_time=cpu)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    study = Study(args)
    if args.overhead:
        study.overhead()
    else:
        study.main()
    report.write(args, "rows", study.rows)
    return 0


if __name__ == "__main__":
    leave(main())
