"""python -m jaxspec.bench.studies.mixed: rounds that take prompts along against prompts by themselves, under load.

Random weights in a Llama's shapes and an EAGLE-3 head beside them (or the demo with its own): closed loops of twice as
many requests as slots, greedy, with EngineConfig.mixed_chunk and with every prompt apart, interleaved. Random heads
are hardly ever right, so a chain's requests end as seldom as plain decoding's, and gains of real ones are larger. First
the demo in float32 has to write the same tokens both ways (--no-check leaves that out).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.assemble import assemble, build_engine
from jaxspec.bench.offline import queues
from jaxspec.bench.offline.prompts import CODE
from jaxspec.bench.studies import report
from jaxspec.bench.studies.prompts import target_of
from jaxspec.bench.studies.rounds import SHAPES
from jaxspec.bench.studies.weights import random_weights
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.events import Finished
from jaxspec.loading import Drafting
from jaxspec.request import SamplingParams
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.state import Geometry
from jaxspec.tier import Tier, parse_tier


def check(mixed_chunk: int | str) -> str:
    """What the demo writes both ways, in words.

    Raises:
      ValueError: other tokens.
    """
    config = EngineConfig(
        max_batch_size=4, max_seq_len=128, batch_buckets=(4,), dtype="float32", variants=("sampled",),
        mixed_chunk=mixed_chunk, enable_prefix_caching=False, warmup="eager",
    )  # fmt: skip
    engine = build_engine("demo", "eagle3", {"policy": "static", "depth": 3}, config, progress=False)
    assert engine.facts.tokenizer is not None
    prompts = [engine.facts.tokenizer.encode(text)[: 9 + 5 * i] for i, text in enumerate(CODE[:12])]
    said, mixed = [], []
    for engine.mixes in (True, False):
        before = engine.stats.mixed_rounds
        params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=16 + i) for i in range(len(prompts))]
        ids = [engine.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        outputs = {}
        while engine.has_work:
            outputs |= {e.request_id: e.output.token_ids for e in engine.step() if isinstance(e, Finished)}
        said.append([outputs[i] for i in ids])
        mixed.append(engine.stats.mixed_rounds - before)
    if said[0] != said[1] or not mixed[0] or mixed[1]:
        parted = sum(one != other for one, other in zip(*said, strict=True))
        raise ValueError(f"{parted} of {len(said[0])} texts differ, with {mixed} rounds that took prompts along")
    return f"the demo, float32: {len(said[0])} texts are the same, with {mixed[0]} rounds that took prompts along"


def build(args: argparse.Namespace, tiers: Sequence[Tier]) -> Engine:
    """An engine of one batch size."""
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    longest = max(args.prompt) + 2 * args.tokens
    config = EngineConfig(
        max_batch_size=args.batch, max_seq_len=longest, batch_buckets=(args.batch,), variants=("greedy",),
        mixed_chunk=args.mixed_chunk, enable_prefix_caching=False, rounds_per_dispatch=1, dtype=dtype.name,
        warmup="eager",
    )  # fmt: skip
    depth = max(tier.depth for tier in tiers)
    speculation = SpeculationConfig(tiers=tuple(tiers)) if depth else SpeculationConfig(policy="off")
    cost, progress = CostTable({(tier, args.batch): 1e-3 for tier in tiers}), sys.stderr.isatty()
    if args.shape == "demo":
        kind = "eagle3" if depth else "none"
        return build_engine("demo", kind, speculation, config, progress=progress)
    target = target_of(args.shape, dtype)
    cfg, draft_vocab = target.config, SHAPES[args.shape][1]
    head = Eagle3Config(
        cfg.hidden_size, cfg.hidden_size, cfg.intermediate_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim,
        cfg.vocab_size, draft_vocab, cfg.aux_layers, rope_theta=cfg.rope_theta,
    )  # fmt: skip

    def bind(geo: Geometry) -> tuple[Drafter, Any]:
        core = HeadCore(random_weights(nnx.eval_shape(lambda: Eagle3Head(head, dtype=dtype)), 1))
        return AutoregressiveDrafter(core, geo), core.take_params()

    drafter = Drafting(bind, trees=True) if depth else None
    return assemble(target, None, speculation, config, drafter=drafter, progress=progress, cost=cost)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("mixed", __doc__)
    add = parser.add_argument
    add("--shape", choices=("demo", *sorted(SHAPES)), default="demo", help="the demo, or random weights of this shape")
    add("--batch", type=int, default=4, help="slots")
    add("--tiers", default="off,3", help="depths or tiers' names")
    add("--prompt", type=int, nargs="+", default=[32], help="tokens of each prompt, each measured for itself")
    add("--tokens", type=int, default=64, help="mean of what a request generates")
    add("--mixed-chunk", type=lambda text: text if text == "auto" else int(text), default="auto", help="auto or N")
    add("--dtype", choices=("bfloat16", "float32"), help="default: float32 on CPU, bfloat16 on accelerators")
    add("--repeats", type=int, default=3, help="medians are taken over these")
    add("--no-check", action="store_true", help="without the demo's tokens both ways")
    args = report.parse(parser, argv)
    if not args.no_check:
        print(check(16 if jax.default_backend() == "cpu" else args.mixed_chunk), flush=True)
    tiers = [parse_tier(entry.strip()) for entry in args.tiers.split(",")]
    engine = build(args, tiers)
    stats = engine.stats
    print(f"{args.shape}, {stats.executables} executables in {stats.warmup_seconds:.0f} s", flush=True)
    rng, rows = np.random.default_rng(0), []
    for length in args.prompt:
        prompts = rng.integers(2, engine.facts.vocab_size, (2 * args.batch, length)).tolist()
        for tier in tiers:  # what runs first is slow
            queues.closed_loop(engine, prompts, StaticPolicy(tier), 8)
        rows += queues.rows(engine, prompts, tiers, args.tokens, args.repeats, ways=("own", "apart"))
        print(queues.table(rows[-len(tiers) :]), flush=True)
    if engine.stats.compilations_after_warmup:
        raise ValueError(f"{engine.stats.compilations_after_warmup} executables were compiled after the warm-up")
    report.write(args, "queues", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
