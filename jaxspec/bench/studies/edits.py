"""python -m jaxspec.bench.studies.edits: suffix matches, model drafters and hybrids, on repeated edits and on own text.

`edits` is a file of this repository as the prompt and the same file with small changes as the answer. No demo model
would write that, so the target is made to: at every position its logits are its own plus a large bonus for the token of
the answer that is dictated. It computes all that it computes, and a draft is accepted where it is the dictated token;
a head that was trained on the target's own answers meets text of another here. `code` and `prose` are the target's own
greedy answers to the prompts of `python -m jaxspec.bench`, and show what such a head can do. One request at a time.

Tokens a round are counts and repeat exactly. Speed is the ratio of plain decoding's seconds to those of whole runs, the
modes taking turns within each repeat: the median of the repeats; by the clock, and by the processor time of this
process, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec import cli
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.assemble import assemble
from jaxspec.bench.offline import prompts
from jaxspec.bench.studies import report
from jaxspec.checkpointing import hf
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.drafters import registry
from jaxspec.engine import Engine
from jaxspec.events import Finished
from jaxspec.loading import Drafting, bind_drafter, load_drafter
from jaxspec.models.base import Attend, ModelConfig
from jaxspec.models.layers import Transformer
from jaxspec.names import DTYPES
from jaxspec.request import SamplingParams
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import PLAIN, Tier, parse_tier

WORKLOADS = ("edits", "code", "prose")
#: Files that are edited unless others are named.
FILES = ("jaxspec/tier.py", "jaxspec/scheduling/pages.py", "jaxspec/adaptive/budget.py", "jaxspec/laps.py")
_BONUS = 1e4


class Dictated(Transformer):
    """A target that says what is dictated where something is: the token at each position, or -1."""

    def __init__(self, cfg: ModelConfig, *, dtype: jnp.dtype) -> None:
        super().__init__(cfg, dtype=dtype)
        self.dictation = nnx.Param(jnp.full((cfg.max_position_embeddings,), -1, jnp.int32))

    @classmethod
    def of(cls, target: Transformer) -> Dictated:
        """The same weights, and no dictation yet."""
        dtype = target.embedding[...].dtype
        made = nnx.eval_shape(lambda: cls(target.config, dtype=dtype))
        nnx.update(made, nnx.state(target))
        made.dictation.set_value(jnp.full((target.config.max_position_embeddings,), -1, jnp.int32))
        return made

    def __call__(
        self, tokens_BN: jax.Array, positions_BN: jax.Array, attend: Attend, aux_layers: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array | None]:
        hidden_BNE, aux_BNA = super().__call__(tokens_BN, positions_BN, attend, aux_layers)
        # The position goes along as a channel more, since the output layer is told nothing else.
        return jnp.concatenate([hidden_BNE, positions_BN[..., None].astype(hidden_BNE.dtype)], axis=-1), aux_BNA

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        following = hidden_BNE[..., -1].astype(jnp.int32) + 1
        said = jnp.take(self.dictation[...], following, mode="clip")
        logits_BNV = super().logits(hidden_BNE[..., :-1])
        return logits_BNV + _BONUS * jax.nn.one_hot(said, logits_BNV.shape[-1], dtype=logits_BNV.dtype)


class Run(NamedTuple):
    """What jobs cost, one after the other, and what was written."""

    accepted: int
    rounds: int
    seconds: float
    busy: float
    texts: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt, and the answer that is dictated; None: the target's own."""

    prompt: Sequence[int]
    answer: Sequence[int] | None
    tokens: int


def edited(text: str, rate: float, seed: int) -> str:
    """The text with about so many of its lines changed: a name, a number, a line that goes or comes twice."""
    rng, out = random.Random(seed), []
    for line in text.splitlines(keepends=True):
        if rng.random() >= rate or not line.strip():
            out.append(line)
            continue
        change = rng.randrange(4)
        words = [word for word in line.split() if word.isidentifier() and len(word) > 3]
        if change == 0 and words:
            out.append(line.replace(rng.choice(words), rng.choice(["result", "value", "total", "current"])))
        elif change == 1:
            indent = line[: len(line) - len(line.lstrip())]
            out += [f"{indent}# checked: {rng.randrange(100)}\n", line]
        elif change == 2:
            out += [line, line]
    return "".join(out)


def jobs_of(workload: str, tokenizer: Tokenizer, args: argparse.Namespace) -> list[Job]:
    if workload != "edits":
        texts = {"code": prompts.CODE, "prose": prompts.PROSE}[workload][: args.prompts]
        return [Job(tokenizer.encode(text), None, args.max_tokens) for text in texts]
    jobs = []
    for number, path in enumerate(args.files):
        text = Path(path).read_text(encoding="utf-8")[: args.characters]
        answer = tokenizer.encode(edited(text, args.rate, number))
        jobs.append(Job(tokenizer.encode(text + "\n\n"), answer, len(answer)))
    return jobs


def dictate(engine: Engine, job: Job) -> None:
    """The job's answer as what the target says after the prompt."""
    target = engine.runner.target
    text = np.full(target["dictation"].shape, -1, np.int32)
    if job.answer is not None:
        text[len(job.prompt) : len(job.prompt) + len(job.answer)] = job.answer
    target["dictation"].set_value(jnp.asarray(text))
    engine.runner.target = target


def run(engine: Engine, tier: Tier, jobs: Sequence[Job]) -> Run:
    engine.use_policy(StaticPolicy(tier))
    accepted = rounds = 0
    seconds, busy, texts = 0.0, 0.0, []
    for job in jobs:
        dictate(engine, job)
        began, worked = time.perf_counter(), time.process_time()
        engine.add(job.prompt, SamplingParams(temperature=0, max_tokens=job.tokens, ignore_eos=True))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Finished):
                    accepted += event.output.metrics.accepted
                    rounds += event.output.metrics.rounds
                    texts.append(event.output.token_ids)
        seconds, busy = seconds + time.perf_counter() - began, busy + time.process_time() - worked
    return Run(accepted, rounds, seconds, busy, texts)


def engines(target: Transformer, plain: Transformer, args: argparse.Namespace) -> dict[str, tuple[Engine, Tier]]:
    """The modes by name, "plain" first."""
    config = EngineConfig(
        max_batch_size=1, max_seq_len=args.context, variants=("greedy",), enable_prefix_caching=False, warmup="eager",
    )  # fmt: skip
    directory = resolve_model("demo")
    modes: dict[str, tuple[Engine, Tier]] = {}
    for name in args.drafters:
        kind, _, hybrid = name.partition("+")
        if hybrid not in ("", "suffix"):
            raise ValueError(f"a drafter is a kind, or a kind with '+suffix', got {name!r}")
        facts = registry.find(kind)
        place = resolve_drafter(kind, directory)[1]
        tiers = [tier for tier in args.tiers if (tier.is_chain or facts.trees) and (hybrid or not tier.lookup)]
        speculation = SpeculationConfig(tiers=tuple(tiers), hybrid=bool(hybrid))
        module = load_drafter(kind, place, plain, plain.embedding[...].dtype)

        def bind(geo: Any, kind: str = kind, module: Any = module, speculation: Any = speculation) -> Any:
            return bind_drafter(kind, module, geo, speculation)

        drafting = Drafting(bind, facts.trees, facts.deepest(module), kind)
        engine = assemble(target, None, speculation, config, drafter=drafting, progress=sys.stderr.isatty())
        modes.setdefault("plain", (engine, PLAIN))
        modes |= {f"{name} {tier}": (engine, tier) for tier in tiers}
    return modes


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each workload and mode."""
    directory = resolve_model("demo")
    plain = hf.load_model(directory, jnp.dtype(args.dtype))
    assert isinstance(plain, Transformer)
    modes = engines(Dictated.of(plain), plain, args)
    tokenizer, rows = Tokenizer.from_directory(directory), []
    for workload in args.workloads:
        jobs = jobs_of(workload, tokenizer, args)
        if max(len(job.prompt) + job.tokens for job in jobs) > args.context:
            raise ValueError(f"a job of {workload} is longer than --context {args.context}; give fewer --characters")
        found = {name: [run(engine, tier, jobs)] for name, (engine, tier) in modes.items()}
        texts = found["plain"][0].texts
        for _ in range(args.repeats):
            for name, (engine, tier) in modes.items():
                found[name].append(run(engine, tier, jobs))
        for name, runs in found.items():
            assert all(texts == one.texts for one in runs), f"{name} writes other text than plain decoding"
            length = 1 + runs[0].accepted / runs[0].rounds
            row: dict[str, Any] = {"workload": workload, "mode": name, "tokens_a_round": round(length, 3)}
            for key, at in (("speed", "seconds"), ("cpu_speed", "busy")) if args.repeats else ():
                ratios = [
                    getattr(plain, at) / getattr(one, at)
                    for plain, one in zip(found["plain"][1:], runs[1:], strict=True)
                ]
                row |= {key: round(statistics.median(ratios), 3), f"{key}s": [round(r, 3) for r in ratios]}
            rows.append(row)
            print(" ".join(f"{row.get(key, ''):>{width}}" for key, width in _COLUMNS), flush=True)
    return rows


_COLUMNS = (("workload", 8), ("mode", 28), ("tokens_a_round", 7), ("speed", 7), ("cpu_speed", 7))


def main(argv: Sequence[str] | None = None) -> None:
    p = report.parser("edits", __doc__)
    drafters = ["eagle3", "eagle3+suffix", "suffix"]
    p.add_argument("--drafters", nargs="+", default=drafters, help="kinds of the demo's drafters; KIND+suffix: hybrid")
    p.add_argument("--tiers", nargs="+", type=parse_tier, default=[Tier(4), Tier(8)], help="as chain-4, suffix-8")
    p.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="which, in this order")
    p.add_argument("--files", nargs="+", default=list(FILES), help="texts to edit")
    p.add_argument("--characters", type=int, default=1800, help="of each file")
    p.add_argument("--rate", type=float, default=0.1, help="share of the lines that change")
    p.add_argument("--prompts", type=int, default=8, help="of code and of prose")
    p.add_argument("--max-tokens", type=int, default=128, help="of each answer to them")
    p.add_argument("--context", type=int, default=2048, help="tokens of a prompt and its answer, at most")
    p.add_argument("--repeats", type=int, default=3, help="timed runs; 0: tokens a round alone")
    p.add_argument("--dtype", type=cli.dtype, choices=DTYPES, default="float32", help="of the engines")
    args = report.parse(p, argv)
    rows = measure(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
