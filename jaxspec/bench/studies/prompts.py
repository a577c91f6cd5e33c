"""python -m jaxspec.bench.studies.prompts: how long prompts take to their first token, alone and many at once.

Random weights in the shapes of a model (or the demo), an engine without speculation or, with `--drafter`, with a chain
of 3 of a drafter of random weights, which reads prompts, too; greedy. For N short prompts that come at once: the mean
and the last time to first token (TTFT), submission included, and the host's own time a request. For long prompts alone:
their TTFT, and the share of the arithmetic floor, which is the time that the products of the prompt's tokens (of the
target's layers, causal attention and the one row of the output layer; behind the last attention of the last token
alone) take at the rate given.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.assemble import assemble
from jaxspec.bench.studies import drafters, report
from jaxspec.bench.studies.rounds import HEADS, SHAPES, SMALL, first_layers
from jaxspec.bench.studies.weights import FORMATS, MXFP4, quantise, random_weights
from jaxspec.checkpointing import hf
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.events import Delta
from jaxspec.loading import Drafting
from jaxspec.models import registry
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.request import SamplingParams
from jaxspec.resolve import resolve_model

_PAGE = 64
#: Tokens of a chain with --drafter.
_DEPTH = 3
#: Dense bfloat16 products a second, by the makers' data sheets.
RATES = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "TPU v5 lite": 197e12, "TPU v6 lite": 918e12}


def flops(cfg: ModelConfig, tokens: int) -> float:
    """Multiplications and additions of a prompt: layers, causal attention, and the output layer once.

    Behind the last layer's attention stands the last token alone.
    """
    heads, kv_heads, width = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    attention = cfg.hidden_size * width * (2 * heads + 2 * kv_heads)
    inner, own = cfg.num_layers * cfg.intermediate_size, cfg.experts
    if own is not None:
        inner += len(own.layers) * (own.per_token * own.inner + own.shared_inner - cfg.intermediate_size)
    weights = cfg.num_layers * attention + 3 * cfg.hidden_size * inner
    scores = 2.0 * cfg.num_layers * heads * width * tokens * (tokens + 1)
    last = cfg.intermediate_size
    if own is not None and cfg.num_layers - 1 in own.layers:
        last = own.per_token * own.inner + own.shared_inner
    left_out = cfg.hidden_size * (heads * width + 3 * last) * (tokens - 1)
    return 2.0 * (weights * tokens - left_out) + scores + 2.0 * cfg.hidden_size * cfg.vocab_size


def target_of(
    shape: str, dtype: jnp.dtype, weights: str | None = None, layers: int | None = None
) -> TargetModel:  # fmt: skip
    """The demo's target, or random weights in a shape, those of the layers in a format; so many layers, or all."""
    if shape == "demo":
        return hf.load_model(resolve_model("demo"), dtype)
    cfg = dataclasses.replace(first_layers(SHAPES[shape][0], layers), max_position_embeddings=2**17)
    made = nnx.eval_shape(lambda: registry.build(cfg, dtype))
    quantise(made, weights, None)
    return random_weights(made, 0)


def build(target: TargetModel, lengths: Sequence[int], requests: int, tokens: int, args: argparse.Namespace) -> Engine:
    """An engine for one long prompt, or for all short ones."""
    longest = max(*lengths, tokens) + args.max_tokens + 1
    config = EngineConfig(
        max_batch_size=requests, max_seq_len=longest, page_size=_PAGE, batch_buckets=(requests,), variants=("greedy",),
        num_pages=max(-(-longest // _PAGE) + 2, requests * (-(-(tokens + args.max_tokens) // _PAGE) + 1)),
        prefill_chunk=args.chunk, max_num_batched_tokens=args.max_num_batched_tokens, dtype=args.dtype,
        enable_prefix_caching=False, warmup="eager",
    )  # fmt: skip
    drafting, speculation = None, SpeculationConfig(policy="off")
    if args.drafter is not None:
        name, small = args.drafter, SHAPES[SMALL.get(args.shape) or args.shape][0]
        filled = lambda made: random_weights(nnx.eval_shape(made), 1)
        heads = HEADS.get(args.shape, {})
        sizes = drafters.Sizes(target, SHAPES[args.shape][1], _DEPTH, None, small, filled, heads)
        drafting = Drafting(lambda geo: drafters.bound(name, sizes, geo), name=name)
        speculation = SpeculationConfig(policy="static", depth=_DEPTH)
    return assemble(target, None, speculation, config, drafter=drafting, progress=sys.stderr.isatty())


def first_tokens(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[float], float]:
    """(seconds to each prompt's first token, the host's seconds until the last of them), all sent at once."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    first: dict[str, float] = {}
    before, began = engine.stats.host_seconds, time.perf_counter()
    ids = [engine.add(prompt, params) for prompt in prompts]
    added = time.perf_counter() - began
    host = 0.0
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - began
        for event in events:
            if isinstance(event, Delta):
                first.setdefault(event.request_id, now)
        if len(first) == len(ids) and not host:
            host = added + engine.stats.host_seconds - before
    return [first[i] for i in ids], host


def measure(engine: Engine, count: int, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the repeats, in milliseconds, and the last first token's time of each."""
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(args.repeats + 1):
        prompts = rng.integers(2, engine.facts.vocab_size, (count, tokens)).tolist()
        runs.append(first_tokens(engine, prompts, args.max_tokens))
    median = lambda values: 1e3 * statistics.median(values)
    times = [seconds for seconds, _ in runs[1:]]
    return {
        "prompts": count,
        "tokens": tokens,
        "ttft_mean_ms": median(map(statistics.mean, times)),
        "ttft_last_ms": median(map(max, times)),
        "ttft_last_each_ms": [1e3 * max(run) for run in times],
        "ttft_last_spread_ms": 1e3 * (max(map(max, times)) - min(map(max, times))),
        "host_ms_per_prompt": median(host for _, host in runs[1:]) / count,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("prompts", __doc__)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="demo", help="demo: its own weights")
    add("--layers", type=int, help="of a shape (default: all)")
    add("--requests", type=int, default=16, help="short prompts at once")
    add("--tokens", type=int, nargs="+", default=[32], help="of each short prompt")
    add("--long", type=int, nargs="*", default=[1500], help="tokens of prompts that come alone")
    add("--max-tokens", type=int, default=16, help="generated after each prompt")
    add("--chunk", type=int, help="prefill_chunk; default: the engine's")
    add("--max-num-batched-tokens", type=int, help="default: the engine's")
    add("--dtype", choices=("bfloat16", "float32"), help="default: the engine's")
    add("--weights", choices=[*sorted(FORMATS), MXFP4], help="of the layers, quantised (default: as --dtype)")
    add("--drafter", choices=drafters.NAMES, help="reads the prompts, too, and drafts (default: none)")
    add("--rate", type=float, help="TFLOP/s, for the floor; default: the device's where it is known")
    add("--repeats", type=int, default=5, help="medians are taken over these")
    args = report.parse(parser, argv)
    if args.shape == "demo" and (args.weights or args.layers):
        parser.error("--weights and --layers are for random weights, and the demo has its own")

    device = jax.devices()[0]
    cpu = device.platform == "cpu"
    target = target_of(
        args.shape, jnp.dtype(args.dtype or ("float32" if cpu else "bfloat16")), args.weights, args.layers
    )
    engine = build(target, args.long, args.requests, max(args.tokens), args)
    sizes = engine.facts.sizes
    rate = report.rate(RATES, args.rate)
    print(
        f"{args.shape}{f' in {args.weights}' if args.weights else ''} on {device.device_kind}, prefill_chunk "
        f"{sizes.prefill_chunk}, max_num_batched_tokens {sizes.max_num_batched_tokens}, {engine.stats.executables} "
        f"executables in {engine.stats.warmup_seconds:.0f} s"
    )
    rows = []
    for count, tokens in [*((args.requests, tokens) for tokens in args.tokens), *((1, tokens) for tokens in args.long)]:
        row = measure(engine, count, tokens, args)
        row["floor_ms"] = None if rate is None else 1e3 * count * flops(target.config, tokens) / rate
        floor = row["floor_ms"]
        share = "" if floor is None else f", floor {floor:.2f} ms ({floor / row['ttft_last_ms']:.1%})"
        mean, last = row["ttft_mean_ms"], row["ttft_last_ms"]
        print(
            f"{count:3d} x {tokens:5d} tokens: TTFT mean {mean:8.2f} ms, last {last:8.2f} (spread "
            f"{row['ttft_last_spread_ms']:.2f}), host {row['host_ms_per_prompt']:.3f} ms a prompt{share}",
            flush=True,
        )
        rows.append(row)
    report.write(args, "prompts", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
