"""python -m jaxspec.bench.studies.peer_engines: this engine, llama.cpp and vLLM's CPU build on the same weights.

Greedy, float32, the same prompt tokens, a fixed number of new ones, end of text ignored. Each engine is a process of
its own in its own environment, all of them stay, one works at a time, repeats are interleaved, and the first is not
counted. Needs a Llama target with a draft model in BF16 or F32 and the interpreters of environments that hold
`llama-cpp-python` and `gguf`, and vLLM's CPU build.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.bench.offline.prompts import CODE, PROSE
from jaxspec.bench.studies import peer_processes, report
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.text.tokenizer import Tokenizer

SLOTS = 16


class Case(NamedTuple):
    """What is asked of an engine at once: groups of prompts one after the other."""

    title: str
    groups: list[list[list[int]]]
    engine: str
    mode: str
    new: int


class Worker:
    """An engine's process."""

    def __init__(self, python: str, name: str, target: Path, draft: Path, cache: Path):
        root = str(Path(__file__).parents[3])
        env = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"} if name == "jaxspec" else dict(os.environ)
        command = [python, "-P", peer_processes.__file__, name, str(target), str(draft), str(SLOTS), str(cache)]
        self._log = cache / f"{name}.log"
        pipe = subprocess.PIPE
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=env)
        self._name = name

    def read(self) -> str:
        """The next line. Raises RuntimeError with the end of its log where the process has ended."""
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])
            raise RuntimeError(f"{self._name} ended:\n{tail}")
        return line

    def ask(self, prompts: list[list[int]], mode: str, new: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompts": prompts, "mode": mode, "new": new}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self.read())
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        self._process.kill()
        with self._process:  # waits, and closes the pipes
            pass


def cases(engines: Sequence[str], texts: list[list[int]], new: int) -> Iterator[Case]:
    """Plain decoding at batch 1, 4 and 16, chains with the draft model at batch 1, prompts of 512 and 1,500 tokens."""
    plain = [name for name in engines if not name.startswith("vllm-")]
    some = [texts[0], texts[1], texts[-2], texts[-1]]
    for batch in (1, 4, 16):
        groups = [[t] for t in some] if batch == 1 else [(texts * batch)[:batch]]
        yield from (Case(f"plain, batch {batch}", groups, name, "plain", new) for name in plain)
    for name in engines:
        if name != "vllm":
            depths = [int(name.partition("-")[2])] if name.startswith("vllm-") else range(2, 6)
            for k in depths:
                yield Case("draft model, batch 1", [[t] for t in some], name, f"chain-{k}", new)
    longest = [token for text in texts * 1500 for token in text][:1500]
    for length in (512, 1500):
        yield from (Case(f"prompt of {length}", [[longest[:length]]], name, "plain", 1) for name in plain)


def measure(workers: Mapping[str, Worker], asked: Sequence[Case], repeats: int) -> list[dict[str, Any]]:
    """Seconds of every case in every repeat, and how many answers equal this engine's plain decoding."""
    rows = [{"case": c.title, "engine": c.engine, "mode": c.mode, "seconds": []} for c in asked]
    answers: dict[int, list[list[int]]] = {}
    for repeat in range(repeats + 1):
        for i, c in enumerate(asked):
            told = [workers[c.engine].ask(group, c.mode, c.new) for group in c.groups]
            answers[i] = [tokens for _, group in told for tokens in group]
            if repeat:
                rows[i]["seconds"].append(sum(seconds for seconds, _ in told))
    for i, c in enumerate(asked):
        like = next(j for j, o in enumerate(asked) if o.mode == "plain" and o.groups == c.groups)
        rows[i]["equal"] = sum(a == b for a, b in zip(answers[i], answers[like], strict=True))
        rows[i]["of"], rows[i]["as"] = len(answers[i]), like
    for row in rows:
        plain = rows[row.pop("as")]["seconds"]
        row["speed"] = statistics.median(plain) / statistics.median(row["seconds"])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    p = report.parser("peer_engines", __doc__)
    p.add_argument("--model", default="demo", help="a Llama target with a draft model (default: %(default)s)")
    p.add_argument("--llama", metavar="PYTHON", help="interpreter that has llama-cpp-python and gguf (default: none)")
    p.add_argument("--vllm", metavar="PYTHON", help="interpreter that has vLLM's CPU build (default: none)")
    p.add_argument("--new-tokens", type=int, default=96, help="tokens of each answer")
    p.add_argument("--repeats", type=int, default=5, help="medians are taken over these, interleaved")
    args = report.parse(p, argv)

    target = resolve_model(args.model)
    _, draft = resolve_drafter("draft_model", target)
    assert draft  # else it has raised
    pythons = {"jaxspec": sys.executable}
    pythons |= {"llama": args.llama} if args.llama else {}
    pythons |= dict.fromkeys(("vllm", "vllm-4"), args.vllm) if args.vllm else {}
    tokenizer = Tokenizer.from_directory(target)
    texts = [tokenizer.encode(text) for text in (*CODE, *PROSE)]
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as cache:
        try:
            for name, python in pythons.items():  # one after the other: each compiles with all cores
                workers[name] = Worker(python, name, target, draft, Path(cache))
                workers[name].read()
            rows = measure(workers, list(cases(list(pythons), texts, args.new_tokens)), args.repeats)
        finally:
            for worker in workers.values():
                worker.close()
    print(f"{args.new_tokens} new tokens, greedy, float32, medians of {args.repeats} interleaved repeats")
    for row in rows:
        ms = statistics.median(row["seconds"]) * 1e3
        print(
            f"{row['case']:22s} {row['engine']:10s} {row['mode']:8s} {ms:9.1f} ms {row['speed']:6.2f} x jaxspec plain, "
            f"{row['equal']} of {row['of']} texts equal"
        )
    report.write(args, "cases", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
