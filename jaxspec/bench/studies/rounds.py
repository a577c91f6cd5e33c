"""python -m jaxspec.bench.studies.rounds: what a round costs at a real model's shapes, against the weights' bytes.

Random weights in the shapes of a Llama and of an EAGLE-3 or DSpark head as wide: a round's cost does not
depend on what the weights say. For each tier and batch: milliseconds a round (rounds dispatched
back to back, as the engine does), the device's busy share of it, and the floor, which is the
time that reading the target's weights once takes at the bandwidth given. Packed rounds, of so many
tokens over the batch, stand behind their tier's. With `--tensor-parallel N` the same on N devices, after one where a
model fits it: how much faster, and which share of the device's time collectives take (waiting for another included).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.adaptive.arms import packed_tokens
from jaxspec.bench.studies import report
from jaxspec.models import few_rows, registry
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.layers import Shared, shared_lm_head
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.quantised import Quantised, stored_bytes
from jaxspec.runtime import summing
from jaxspec.runtime.compile import use_persistent_cache
from jaxspec.runtime.repertoire import RunnerConfig
from jaxspec.runtime.results import Result
from jaxspec.runtime.runner import Runner
from jaxspec.runtime.sharding import parameter_shardings, tensor_mesh
from jaxspec.runtime.warmup import WarmupConfig
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.drafters.dspark_head import DsparkConfig, DsparkHead
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.hybrid import HybridDrafter
from jaxspec.speculation.drafters.suffix import SuffixMatcher
from jaxspec.speculation.drafters.walks import WalkingDrafter
from jaxspec.speculation.layouts import Batch
from jaxspec.speculation.state import Geometry
from jaxspec.tier import Tier, parse_tier
from pallas_kernels.profile import busy, medians, record

#: Llama 3.1 8B and 3.2 1B, Qwen3-30B-A3B, small ones for rehearsals; with the heads' draft vocabularies.
SHAPES = {
    "8b": (ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, rope_theta=5e5), 32000),
    "30b-a3b": (
        ModelConfig(
            "qwen3_moe",
            151936,
            2048,
            6144,
            48,
            32,
            4,
            128,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            qk_norm=True,
            experts=Experts(128, 8, 768, tuple(range(48))),
        ),
        32000,
    ),
    "1b": (ModelConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, rope_theta=5e5, tie_word_embeddings=True), 32000),
    "tiny": (ModelConfig("llama", 512, 64, 128, 2, 4, 2, 16), 256),
    "tiny-moe": (ModelConfig("qwen3_moe", 512, 64, 128, 2, 4, 2, 16, experts=Experts(16, 4, 64, (0, 1))), 256),
}

#: Measured device-to-device copy, bytes read plus bytes written a second (docs/kernels.md).
BANDWIDTH = {"H200": 4.28e12}


#: Kinds of heads.
DRAFTERS = ("eagle3", "dspark")
#: Names of kernels by which devices exchange something.
_COLLECTIVE = re.compile(r"nccl|all.?reduce|all.?gather|reduce.?scatter|collective", re.IGNORECASE)


def random_weights(module: Any, seed: int, mesh: Mesh | None = None) -> Any:
    """An abstract module with noise for matrices, ones for norms and 0, 1, ... for id tables, made on the device.

    Args:
      mesh: where they lie, if `tensor_parallel` laid the module out.
    """
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    lie = [None] * len(leaves) if mesh is None else jax.tree.leaves(parameter_shardings(mesh, state))
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    @functools.cache
    def filler(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Any) -> Any:
        def fill(key: jax.Array) -> jax.Array:
            if jnp.issubdtype(dtype, jnp.integer):
                return jnp.arange(math.prod(shape), dtype=dtype).reshape(shape)
            if len(shape) == 1:
                return jnp.ones(shape, dtype)
            return (jax.random.normal(key, shape, jnp.float32) * 0.02).astype(dtype)

        return jax.jit(fill, out_shardings=sharding)

    made = [filler(x.shape, x.dtype, at)(key) for key, x, at in zip(keys, leaves, lie, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(tree, made))


#: Formats of quantised weights by name: the type of the values, and whether every 128 inputs have scales.
FORMATS = {
    "int8": (jnp.int8, False), "fp8": (jnp.float8_e4m3fn, False), "fp8-block": (jnp.float8_e4m3fn, True),
    "int4-g128": (jnp.int4, True),
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def quantised_kernel(key: jax.Array, name: str, d_in: int, d_out: int) -> Quantised:
    """Noise in a format, of a standard deviation of 0.02."""
    dtype, grouped = FORMATS[name]
    top = {"int8": 127.0, "int4-g128": 7.0}.get(name, 448.0)
    values = jnp.clip(jax.random.normal(key, (d_in, d_out), jnp.float32) / 4, -1, 1) * top
    values = (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)
    spread = jax.random.uniform(key, (d_in // 128 if grouped else 1, d_out), jnp.float32, 0.5, 1.5)
    return Quantised(values, 0.08 / top * spread)


def quantise(target: Any, name: str | None, output: str | None = None) -> None:
    """Noise of a format instead of the layers' weights, and of one instead of the output layer's, in place."""
    if output is not None:
        target.lm_head.kernel.set_value(quantised_kernel(jax.random.key(3), output, *target.lm_head.kernel[...].shape))
    if name is None:
        return
    keys = iter(jax.random.split(jax.random.key(2), 4 * len(target.layers)))
    for layer in target.layers:
        for linear in (layer.attn.qkv, layer.attn.out, layer.mlp.gate_up, layer.mlp.down):
            linear.kernel.set_value(quantised_kernel(next(keys), name, *linear.kernel[...].shape))


def _block_head(target: Any, depth: int, layers: int, shards: int) -> DsparkHead:
    """A DSpark head of blocks of `depth` drafts that reads five layers of the target, and uses its tables."""
    cfg = target.config
    if shards > 1 or cfg.experts is not None:
        raise ValueError(f"dspark is for dense targets on one device, got {cfg.family} on {shards}")
    reads = tuple(round(1 + i * (cfg.num_layers - 4) / 4) for i in range(5)) if cfg.num_layers > 4 else (0, 1)
    layer = dataclasses.replace(
        cfg, family="dflash", num_layers=layers, qk_norm=True, tie_word_embeddings=False
    )  # fmt: skip
    head = DsparkConfig(layer, reads, depth, 0, cfg.vocab_size)
    tables = Shared(target.embedding[...]), shared_lm_head(target)
    return DsparkHead(head, *tables, dtype=target.embedding[...].dtype, rngs=nnx.Rngs(params=1))


def build(
    shape: str, tiers: Sequence[Tier], batches: Sequence[int], context: int, dtype: jnp.dtype, *,
    kernels: str | None, sampled: bool, page: int, budgets: Sequence[float] = (), layers_by_xla: bool = False,
    shards: int = 1, sums: str = "nccl", weights: str | None = None, last: str | None = None, output: bool = False,
    invariant: bool = False, kind: str = DRAFTERS[0], layers: int = 1, hybrid: bool = False,
) -> Runner:  # fmt: skip
    """A runner of random weights with one executable a tier and batch, and one a budget, on so many devices.

    Args:
      sums: how these add up activations (runtime.summing).
      weights, last: formats of the layers' weights and of the output layer's; None: as they are.
      output: whether the output layer runs by its kernel for few rows. invariant: attention of `batch_invariant`.
      kind: of the drafter, one of DRAFTERS. layers: of its head. hybrid: suffix matches draft beside it.

    Raises:
      ValueError: DSpark on several devices, or of a target with experts.
    """
    cache = use_persistent_cache(True)
    cfg, draft_vocab = SHAPES[shape]
    mesh = tensor_mesh(shards) if shards > 1 else None
    way = summing.WAYS[sums]
    lay_out = lambda module: tensor_parallel(module, shards, way.by) if shards > 1 else module
    target = random_weights(nnx.eval_shape(lambda: lay_out(registry.build(cfg, dtype))), 0, mesh)
    quantise(target, weights, last)
    depth = max(tier.depth for tier in tiers)
    block = _block_head(target, depth, layers, shards) if kind == "dspark" and depth else None
    if few_rows.unsupported() is None and not layers_by_xla:
        target = few_rows.prepare(target, output=output)
    pages = -(-(context + 64 * (depth + 1)) // page)
    geo = Geometry(max(batches), max(batches) * pages, page, pages, depth, kernels=kernels, batch_invariant=invariant)
    head = Eagle3Config(
        cfg.hidden_size, cfg.hidden_size, cfg.intermediate_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim,
        cfg.vocab_size, draft_vocab, cfg.aux_layers, rope_theta=cfg.rope_theta, num_layers=layers,
    )  # fmt: skip
    drafter, params = None, ()
    if block is not None:
        drafter = WalkingDrafter(block, geo)
        params = drafter.take_params()
    elif depth:
        core = HeadCore(random_weights(nnx.eval_shape(lambda: lay_out(Eagle3Head(head, dtype=dtype))), 1, mesh))
        drafter, params = AutoregressiveDrafter(core, geo), core.take_params()
    if hybrid and drafter is not None:
        drafter = HybridDrafter(drafter, SuffixMatcher(cfg.vocab_size))
    packed = {
        (tier, batch): tuple(sorted({packed_tokens(tier, batch, budget) for budget in budgets}))
        for tier in tiers for batch in batches if tier.depth
    }  # fmt: skip
    reachable = {tier: tuple(batches) for tier in tiers}
    can = RunnerConfig(reachable, prefill_shapes=(), variants=(sampled,), budgets=packed)
    options = way.options if shards > 1 else ()
    return Runner(target, drafter, params, geo, can, WarmupConfig(sys.stderr.isatty(), cache), mesh, options)


def target_bytes(runner: Runner, touched: int) -> int:
    """Bytes of the target's weights that a pass reads; of experts those of the `touched` ones, over all layers."""
    cfg = runner.config
    if cfg.experts is None:
        return runner.weight_bytes
    # Kernels that are stacked over experts; biases are no more than a thousandth of them.
    stacked = [x for x in jax.tree.leaves(runner.target) if x.ndim > 2 and x.shape[0] == cfg.experts.count]
    each = sum(map(stored_bytes, stacked)) // (cfg.experts.count * len(cfg.experts.layers))
    return runner.weight_bytes - sum(map(stored_bytes, stacked)) + touched * each


@dataclasses.dataclass
class Bench:
    """Back-to-back rounds of one runner at a given context."""

    runner: Runner
    context: int

    def rounds(self, tier: Tier, batch: int, count: int, tokens: int | None = None) -> Any:
        """Dispatches rounds without waiting; returns the last result. Every call starts at the same context."""
        runner, geo = self.runner, self.runner.geo
        table = np.arange(geo.slots * geo.pages_per_seq, dtype=np.int32).reshape(geo.slots, -1)
        length = jnp.full((geo.slots,), self.context, jnp.int32)
        # Each request has a text of its own, and with it experts of its own.
        vocab, shape = runner.config.vocab_size, runner.state.tokens_SL.shape
        texts = jax.random.randint(jax.random.key(0), shape, 0, vocab, jnp.int32)
        runner.state = dataclasses.replace(runner.state, table_SM=jnp.asarray(table), length_S=length, tokens_SL=texts)
        rows = Batch.of(geo, batch, range(batch), geo.max_depth)
        return runner.repeat(tier, batch, jax.device_put(rows.array), count, tokens)

    def measure(self, tier: Tier, batch: int, count: int, repeats: int, tokens: int | None = None) -> dict[str, Any]:
        """Milliseconds a round, and what the device did with them."""
        jax.block_until_ready(self.rounds(tier, batch, 3, tokens))
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            jax.block_until_ready(self.rounds(tier, batch, count, tokens))
            times.append((time.perf_counter() - began) / count)
        found = record(lambda: self.rounds(tier, batch, count, tokens))
        active, span = busy(found)
        top = medians(found)
        exchanged = sum(event.seconds for event in found if _COLLECTIVE.search(event.name))
        return {
            "tier": tier.name,
            "batch": batch,
            "tokens": tokens,
            "ms": 1e3 * statistics.median(times),
            "ms_spread": 1e3 * (max(times) - min(times)),
            "device_ms": 1e3 * active / count,
            "idle_share": None if not span else 1 - active / span,
            "kernels": round(len(found) / count),
            "collective_share": exchanged / active if active else None,
            "experts": Result.of(np.asarray(self.rounds(tier, batch, 1, tokens)), batch).touched_R[0],
            "top": {name: [n / count, 1e6 * t] for name, (n, t) in list(top.items())[:12]},
        }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("rounds", __doc__)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="8b")
    add("--batch", type=int, nargs="+", default=[1])
    add("--depth", type=int, nargs="+", default=[0, 1, 3, 5], help="0 is plain decoding; it is always measured")
    add("--trees", nargs="+", default=[], metavar="TIER", help="trees besides, such as tree-5x4/16")
    add("--drafter", choices=DRAFTERS, default=DRAFTERS[0], help="kind of the head, random too")
    add("--draft-layers", type=int, default=1, help="of the head")
    add("--hybrid", action="store_true", help="suffix matches in the request's own text draft beside the head")
    add("--budget", type=float, nargs="+", default=[], help="packed rounds: drafted tokens verified a row, on average")
    add("--context", type=int, default=1024, help="committed tokens of each request")
    add("--page", type=int, default=64, help="tokens a page")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--weights", choices=sorted(FORMATS), help="of the layers, quantised (default: as --dtype)")
    add("--output-weights", choices=sorted(FORMATS), help="of the output layer, quantised (default: as --dtype)")
    add("--kernels", choices=("reference", "tpu", "gpu", "interpret"), help="default: the backend's own")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="on N devices too, after one")
    add("--without-one", action="store_true", help="on N devices only")
    add("--sums", choices=sorted(summing.WAYS), nargs="+", help="how N devices add up (default: measured)")
    add("--layers-by-xla", action="store_true", help="no small-batch kernels (default: where the device has them)")
    add("--output-by-kernel", action="store_true", help="the output layer by its kernel, too (default: by XLA)")
    add("--batch-invariant", action="store_true", help="as engines with batch_invariant, the output layer included")
    add("--sampled", action="store_true", help="rounds that sample (temperature 0 rows included)")
    add("--rounds", type=int, default=50, help="rounds dispatched back to back")
    add("--repeats", type=int, default=5, help="medians are taken over these")
    add("--bandwidth", type=float, help="TB/s, for the floor; default: the device's where it is known")
    args = report.parse(parser, argv)
    if args.output_weights and SHAPES[args.shape][0].tie_word_embeddings:
        parser.error(f"--output-weights wants an output layer of its own, and that of {args.shape} is the embedding")

    tiers = [*(Tier(depth) for depth in sorted({0, *args.depth})), *map(parse_tier, args.trees)]
    rows: list[dict[str, Any]] = []
    kind = args.weights or args.dtype
    print(f"{args.shape} {kind} on {jax.devices()[0].device_kind}, context {args.context}, jax {jax.__version__}")
    print(
        "devices batch  tier     tokens      ms  x plain  x one  share of floor  device ms  idle  collectives kernels "
        " experts a layer"
    )
    ways = [(1, "nccl")] if args.tensor_parallel == 1 or not args.without_one else []
    for name in args.sums or [None] if args.tensor_parallel > 1 else []:
        width, dtype = SHAPES[args.shape][0].hidden_size, jnp.dtype(args.dtype)
        ways.append((args.tensor_parallel, name or summing.choose(tensor_mesh(args.tensor_parallel), width, dtype)))
    for shards, sums in ways:
        if shards > 1:
            print(f"{shards} devices, sums by {sums}", flush=True)
        try:
            _measure(args, tiers, shards, sums, rows)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or shards == args.tensor_parallel:
                raise
            print(f"{shards:7d} does not fit: {str(error).splitlines()[0]}", flush=True)
        gc.collect()  # its weights and pools
    report.write(args, "rounds", rows)
    return 0


def _measure(
    args: argparse.Namespace, tiers: Sequence[Tier], shards: int, sums: str, rows: list[dict[str, Any]]
) -> None:
    """Measures on so many devices, prints, and appends to `rows`."""
    runner = build(
        args.shape, tiers, sorted(set(args.batch)), args.context, jnp.dtype(args.dtype),
        kernels=args.kernels, sampled=args.sampled, page=args.page, budgets=args.budget,
        layers_by_xla=args.layers_by_xla, shards=shards, sums=sums, weights=args.weights,
        last=args.output_weights, output=args.output_by_kernel or args.batch_invariant, invariant=args.batch_invariant,
        kind=args.drafter, layers=args.draft_layers, hybrid=args.hybrid,
    )  # fmt: skip
    bench = Bench(runner, args.context)
    rate = report.rate(BANDWIDTH, args.bandwidth)
    cfg = runner.config
    kv = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * jnp.dtype(args.dtype).itemsize * args.context
    alone = {(row["tier"], row["batch"], row["tokens"]): row["ms"] for row in rows if row["devices"] == 1}
    for batch in sorted(set(args.batch)):
        plain = None
        for tier, tokens in [(t, n) for t in tiers for n in (None, *runner.budgets.get((t, batch), ()))]:
            row = bench.measure(tier, batch, args.rounds, args.repeats, tokens) | {"devices": shards, "sums": sums}
            plain = plain or row["ms"]
            read = (target_bytes(runner, row["experts"]) + batch * kv) / shards
            row["floor_ms"] = least = None if rate is None else 1e3 * read / rate
            row["ratio"] = row["ms"] / plain
            one = alone.get((row["tier"], batch, tokens))
            row["speedup"] = None if one is None else one / row["ms"]
            percent = lambda x: "" if x is None else f"{x:.1%}"
            shown = tier.depth == 0 or cfg.experts is not None
            floor = percent(least / row["ms"] if shown and least is not None else None)
            print(
                f"{shards:7d} {batch:5d}  {tier.name:8s} {tokens or batch * tier.num_nodes:5d} {row['ms']:7.3f}  "
                f"{row['ratio']:7.3f}  {'' if one is None else format(row['speedup'], '.2f'):>5s}  {floor:>14s}  "
                f"{row['device_ms']:9.3f} {percent(row['idle_share']):>5s}  {percent(row['collective_share']):>11s} "
                f"{row['kernels']:7d}"
                + ("" if cfg.experts is None else f"  {row['experts'] / len(cfg.experts.layers):15.1f}"),
                flush=True,
            )
            rows.append(row)


if __name__ == "__main__":
    sys.exit(main())
