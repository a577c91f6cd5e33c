"""python -m jaxspec.bench.studies.rounds: what a round costs at a real model's shapes, against the weights' bytes.

Random weights in the shapes of a Llama and of an EAGLE-3 head as wide: a round's cost does not
depend on what the weights say. For each tier and batch: milliseconds a round (rounds dispatched
back to back, as the engine does), the device's busy share of it, and the floor, which is the
time that reading the target's weights once takes at the bandwidth given. Packed rounds, of so many
tokens over the batch, stand behind their tier's.
"""

from __future__ import annotations

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

from jaxspec.adaptive.arms import packed_tokens
from jaxspec.bench.studies import report
from jaxspec.models import few_rows
from jaxspec.models.base import ModelConfig
from jaxspec.models.layers import Transformer
from jaxspec.runtime.compile import use_persistent_cache
from jaxspec.runtime.programs import RunnerConfig
from jaxspec.runtime.runner import Runner
from jaxspec.runtime.warmup import WarmupConfig
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.layouts import Batch
from jaxspec.speculation.state import Geometry
from jaxspec.tier import Tier
from pallas_kernels.profile import busy, medians, record

#: Llama 3.1 8B and 3.2 1B, a small one for rehearsals; vocabularies and the heads' draft vocabularies included.
SHAPES = {
    "8b": (ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, rope_theta=5e5), 32000),
    "1b": (ModelConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, rope_theta=5e5, tie_word_embeddings=True), 32000),
    "tiny": (ModelConfig("llama", 512, 64, 128, 2, 4, 2, 16), 256),
}

#: Measured device-to-device copy, bytes read plus bytes written a second (docs/kernels.md).
BANDWIDTH = {"H200": 4.28e12}


def random_weights(module: Any, seed: int) -> Any:
    """An abstract module with noise for matrices, ones for norms and 0, 1, ... for id tables, made on the device."""
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    normal = jax.jit(
        lambda key, shape, dtype: (jax.random.normal(key, shape, jnp.float32) * 0.02).astype(dtype),
        static_argnums=(1, 2),
    )
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    fill = lambda key, x: (
        jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
        if jnp.issubdtype(x.dtype, jnp.integer)
        else jnp.ones(x.shape, x.dtype) if x.ndim == 1 else normal(key, x.shape, x.dtype)
    )  # fmt: skip
    return nnx.merge(graph, jax.tree.unflatten(tree, [fill(k, x) for k, x in zip(keys, leaves, strict=True)]))


def build(
    shape: str, tiers: Sequence[Tier], batches: Sequence[int], context: int, dtype: jnp.dtype, *,
    kernels: str | None, sampled: bool, page: int, budgets: Sequence[float] = (), layers_by_xla: bool = False,
) -> Runner:  # fmt: skip
    """A runner of random weights with one executable a tier and batch, and one a budget."""
    cache = use_persistent_cache(True)
    cfg, draft_vocab = SHAPES[shape]
    target = random_weights(nnx.eval_shape(lambda: Transformer(cfg, dtype=dtype)), 0)
    if few_rows.unsupported() is None and not layers_by_xla:
        target = few_rows.prepare(target)
    depth = max(tier.depth for tier in tiers)
    pages = -(-(context + 64 * (depth + 1)) // page)
    geo = Geometry(max(batches), max(batches) * pages, page, pages, depth, kernels=kernels)
    head = Eagle3Config(
        cfg.hidden_size, cfg.hidden_size, cfg.intermediate_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim,
        cfg.vocab_size, draft_vocab, cfg.aux_layers, rope_theta=cfg.rope_theta,
    )  # fmt: skip
    drafter, params = None, ()
    if depth:
        core = HeadCore(random_weights(nnx.eval_shape(lambda: Eagle3Head(head, dtype=dtype)), 1))
        drafter, params = AutoregressiveDrafter(core, geo), core.take_params()
    packed = {
        (tier, batch): tuple(sorted({packed_tokens(tier, batch, budget) for budget in budgets}))
        for tier in tiers for batch in batches if tier.depth
    }  # fmt: skip
    reachable = {tier: tuple(batches) for tier in tiers}
    can = RunnerConfig(reachable, prefill_shapes=(), variants=(sampled,), budgets=packed)
    return Runner(target, drafter, params, geo, can, WarmupConfig(sys.stderr.isatty(), cache))


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
        runner.state = dataclasses.replace(runner.state, table_SM=jnp.asarray(table), length_S=length)
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
        return {
            "tier": tier.name,
            "batch": batch,
            "tokens": tokens,
            "ms": 1e3 * statistics.median(times),
            "ms_spread": 1e3 * (max(times) - min(times)),
            "device_ms": 1e3 * active / count,
            "idle_share": None if not span else 1 - active / span,
            "kernels": round(len(found) / count),
            "top": {name: [n / count, 1e6 * t] for name, (n, t) in list(top.items())[:12]},
        }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("rounds", __doc__)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="8b")
    add("--batch", type=int, nargs="+", default=[1])
    add("--depth", type=int, nargs="+", default=[0, 1, 3, 5], help="0 is plain decoding; it is always measured")
    add("--budget", type=float, nargs="+", default=[], help="packed rounds: drafted tokens verified a row, on average")
    add("--context", type=int, default=1024, help="committed tokens of each request")
    add("--page", type=int, default=64, help="tokens a page")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--kernels", choices=("reference", "tpu", "gpu", "interpret"), help="default: the backend's own")
    add("--layers-by-xla", action="store_true", help="no small-batch kernels (default: where the device has them)")
    add("--sampled", action="store_true", help="rounds that sample (temperature 0 rows included)")
    add("--rounds", type=int, default=50, help="rounds dispatched back to back")
    add("--repeats", type=int, default=5, help="medians are taken over these")
    add("--bandwidth", type=float, help="TB/s, for the floor; default: the device's where it is known")
    args = parser.parse_args(argv)

    tiers = [Tier(depth) for depth in sorted({0, *args.depth})]
    device = jax.devices()[0]
    runner = build(
        args.shape, tiers, sorted(set(args.batch)), args.context, jnp.dtype(args.dtype),
        kernels=args.kernels, sampled=args.sampled, page=args.page, budgets=args.budget,
        layers_by_xla=args.layers_by_xla,
    )  # fmt: skip
    bench = Bench(runner, args.context)
    rate = report.rate(BANDWIDTH, args.bandwidth)
    cfg = runner.config
    kv = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * jnp.dtype(args.dtype).itemsize * args.context
    rows = []
    print(f"{args.shape} {args.dtype} on {device.device_kind}, context {args.context}, jax {jax.__version__}")
    print("batch  tier     tokens      ms  x plain  share of floor  device ms  idle  kernels")
    for batch in sorted(set(args.batch)):
        plain = None
        for tier, tokens in [(t, n) for t in tiers for n in (None, *runner.budgets.get((t, batch), ()))]:
            row = bench.measure(tier, batch, args.rounds, args.repeats, tokens)
            plain = plain or row["ms"]
            row["floor_ms"] = None if rate is None else 1e3 * (runner.weight_bytes + batch * kv) / rate
            row["ratio"] = row["ms"] / plain
            share = "" if rate is None or tier.depth else f"{row['floor_ms'] / row['ms']:.1%}"
            idle = "" if row["idle_share"] is None else f"{row['idle_share']:.1%}"
            print(
                f"{batch:5d}  {tier.name:8s} {tokens or batch * tier.num_nodes:5d} {row['ms']:7.3f}  "
                f"{row['ratio']:7.3f}  {share:>14s}  "
                f"{row['device_ms']:9.3f} {idle:>5s}  {row['kernels']:7d}",
                flush=True,
            )
            rows.append(row)
    report.write(args, "rounds", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
