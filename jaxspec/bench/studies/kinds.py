"""python -m jaxspec.bench.studies.kinds: drafters beside one another, by the engine, on the demo's own greedy answers.

Rows of `--data` are texts that the target wrote (`train regenerate` writes such files); their prompts are served with
each drafter and tier, so many requests at a time, and every text is compared with that of plain decoding. Tokens a
round are counts; a hybrid learns what its sources are worth, and those are of its first run at the first batch size.
Speed is the ratio of plain decoding's processor time to that of whole runs, all of which take turns within each
repeat: the median of the repeats. It hardly depends on what else the machine does.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec import cli
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.assemble import assemble
from jaxspec.bench.studies import drafters, report
from jaxspec.checkpointing import hf
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.events import Finished
from jaxspec.loading import drafting_of
from jaxspec.models.sharded import BY_XLA
from jaxspec.names import DTYPES
from jaxspec.request import SamplingParams
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import PLAIN, Tier, parse_tier
from jaxspec.train.data import dataset


@dataclasses.dataclass
class Mode:
    """A drafter's tier in an engine, and what came of it.

    Attributes:
      counts: of each data set, accepted drafts and rounds of the last run. busy: its processor seconds.
    """

    name: str
    engine: Engine
    tier: Tier
    counts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    busy: float = 0.0

    def run(self, texts: Sequence[dataset.Example], tokens: int, batch: int) -> list[list[int]]:
        """What it writes after the texts' prompts, so many at a time."""
        engine, self.counts = self.engine, {}
        engine.use_policy(StaticPolicy(self.tier))
        began, written = time.process_time(), []
        for start in range(0, len(texts), batch):
            written += self._together(texts[start : start + batch], tokens)
        self.busy = time.process_time() - began
        return written

    def _together(self, texts: Sequence[dataset.Example], tokens: int) -> list[list[int]]:
        engine, names, written = self.engine, {}, {}
        for text in texts:
            count = min(tokens, len(text.tokens) - text.prompt_length)
            params = SamplingParams(temperature=0, max_tokens=count)
            names[engine.add(text.tokens[: text.prompt_length], params)] = text.dataset
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Finished):
                    count = self.counts.setdefault(names[event.request_id], [0, 0])
                    count[0] += event.output.metrics.accepted
                    count[1] += event.output.metrics.rounds
                    written[event.request_id] = event.output.token_ids
        return [list(written[name]) for name in names]


def modes_of(args: Any, target: Any, directory: Path) -> list[Mode]:
    """Plain decoding first."""
    config = EngineConfig(
        max_batch_size=max(args.batch), batch_buckets=tuple(sorted(set(args.batch))), max_seq_len=args.context,
        variants=("greedy",), enable_prefix_caching=False, warmup="eager", prefill_chunk=64,
        rounds_per_dispatch=1, mixed_chunk=0,
    )  # fmt: skip
    modes: list[Mode] = []
    for text in args.drafters:
        named, _, said = text.partition("=")
        asked, hybrid, depth = drafters.parts(named)
        kind, place = resolve_drafter(asked, directory)
        tiers = [parse_tier(name) for name in (said or args.tiers).split(",")]
        # A hybrid learns what its sources are worth, so that one tier's run would teach the next one's.
        for own in [[tier] for tier in tiers] if hybrid else [tiers]:
            speculation = SpeculationConfig(tiers=tuple(own), hybrid=hybrid, hybrid_depth=depth)
            drafting = drafting_of(kind, place, target, jnp.dtype(args.dtype), speculation, 1, BY_XLA)
            engine = assemble(target, None, speculation, config, drafter=drafting, progress=sys.stderr.isatty())
            modes += [] if modes else [Mode("plain", engine, PLAIN)]
            modes += [Mode(f"{named} {tier}", engine, tier) for tier in own]
    return modes


def measured(args: Any) -> list[dict[str, Any]]:
    """A row for each mode, printed too."""
    directory = resolve_model(args.target)
    target = hf.load_model(directory, jnp.dtype(args.dtype), context=args.context)
    texts = dataset.read_examples(args.data, Tokenizer.from_directory(directory))
    by_set: dict[str, list[dataset.Example]] = {}
    for text in texts:
        if not text.temperature and 0 < text.prompt_length < len(text.tokens) - 1:
            by_set.setdefault(text.dataset, []).append(text)
    texts = [text for some in by_set.values() for text in some[: args.limit]]
    modes = modes_of(args, target, directory)
    return [row for batch in args.batch for row in _rows(args, modes, texts, batch)]


def _rows(args: Any, modes: Sequence[Mode], texts: Sequence[dataset.Example], batch: int) -> list[dict[str, Any]]:
    written = [mode.run(texts, args.max_tokens, batch) for mode in modes]
    equal = [sum(a == b for a, b in zip(written[0], mine, strict=True)) for mine in written]
    counts = [mode.counts for mode in modes]
    busy: list[list[float]] = []
    for _ in range(args.repeats):
        busy.append([])
        for mode in modes:
            mode.run(texts, args.max_tokens, batch)
            busy[-1].append(mode.busy)
    rows = []
    for i, (mode, count, same) in enumerate(zip(modes, counts, equal, strict=True)):
        lengths = {name: round(1 + accepted / rounds, 3) for name, (accepted, rounds) in count.items()}
        row: dict[str, Any] = {
            "batch": batch,
            "mode": mode.name,
            "tokens_a_round": lengths,
            "texts": len(texts),
            "equal": same,
        }
        if args.repeats:
            ratios = [taken[0] / taken[i] for taken in busy]
            row |= {"speed": round(statistics.median(ratios), 3), "speeds": [round(r, 3) for r in ratios]}
        rows.append(row)
        said = " ".join(f"{name} {length:.3f}" for name, length in lengths.items())
        print(f"{batch:3d} {mode.name:40s} {said}  {row.get('speed', '')}  {same} of {len(texts)} equal", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("kinds", __doc__)
    add = parser.add_argument
    add("--target", default="demo", help='"demo", a Hugging Face directory or a hub id')
    add("--data", type=Path, nargs="+", required=True, help="JSONL of the target's greedy answers")
    add("--drafters", nargs="+", required=True, metavar="DRAFTER", help="kinds or directories; DRAFTER+suffix[:N]: a "
        "hybrid, its drafter N deep; DRAFTER=TIER,TIER: its own tiers")  # fmt: skip
    add("--tiers", default="chain-5", help="of drafters that name none")
    add("--batch", type=int, nargs="+", default=[1], help="requests at a time")
    add("--limit", type=int, default=10**9, help="texts of each data set")
    add("--max-tokens", type=int, default=160, help="of each answer, at most")
    add("--context", type=int, default=512, help="tokens of a prompt and its answer, at most")
    add("--repeats", type=int, default=3, help="timed runs; 0: tokens a round alone")
    add("--dtype", type=cli.dtype, choices=DTYPES, default="float32", help="of the engines")
    args = report.parse(parser, argv)
    report.write(args, "kinds", measured(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
