"""python -m jaxspec.bench.studies.layouts: how to lay out a decoder for a GPU or TPU, decided by measurement.

Times one plain decode step of a Llama-shaped stack (random weights, every layer's attention over
a paged prefix) in three layouts: layers unrolled, layers scanned over stacked weights, and layers
unrolled with q, k, v, gate and up as five products instead of two. The engine uses the first;
docs/kernels.md holds the figures.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.bench.studies import report
from jaxspec.bench.studies.rounds import SHAPES
from jaxspec.bench.studies.weights import random_weights
from jaxspec.cache import init_pages
from jaxspec.models.base import ModelConfig
from jaxspec.models.layers import DecoderLayer, Linear
from jaxspec.models.rope import Tables, rotary_tables
from pallas_kernels.profile import busy, record
from pallas_kernels.tree_attention.api import tree_attention

Step = Callable[..., jax.Array]


def split_projections(layer: DecoderLayer) -> None:
    """Replaces the fused projections by separate ones behind the same call."""

    class Separate(nnx.Module):
        def __init__(self, fused: Linear, widths: Sequence[int]):
            kernel = fused.kernel[...]
            cuts = [sum(widths[:i]) for i in range(1, len(widths))]
            self.parts = nnx.List([nnx.Param(part) for part in jnp.split(kernel, cuts, axis=1)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.concatenate([x @ part[...] for part in self.parts], axis=-1)

    attn, mlp = layer.attn, layer.mlp
    q, kv = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    width = mlp.gate_up.kernel[...].shape[1] // 2
    setattr(attn, "qkv", nnx.data(Separate(attn.qkv, (q, kv, kv))))  # noqa: B010  (another type on purpose)
    setattr(mlp, "gate_up", nnx.data(Separate(mlp.gate_up, (width, width))))  # noqa: B010


def steps(cfg: ModelConfig, batch: int, context: int, dtype: jnp.dtype) -> dict[str, tuple[Step, tuple[Any, ...]]]:
    """{layout: (function of (weights, pages, x_BNE), its weights)}."""
    page = 64
    columns = -(-context // page)
    table = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
    length = jnp.full((batch,), context, jnp.int32)
    mask = jnp.ones((batch, 1, 1), bool)

    def attend_with(pages: jax.Array) -> Any:
        def attend(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return tree_attention(q, pages, table + layer * (batch * columns), length, k, v, mask)

        return attend

    def rope() -> Tables:
        return rotary_tables(cfg, length[:, None])

    layers = [
        random_weights(nnx.eval_shape(lambda: DecoderLayer(cfg, dtype=dtype, rngs=None)), i)
        for i in range(cfg.num_layers)
    ]
    graph, _ = nnx.split(layers[0])
    fused = tuple(nnx.split(layer)[1] for layer in layers)

    def unrolled(weights: Any, pages: jax.Array, x: jax.Array, graph: Any = graph) -> jax.Array:
        tables, attend = rope(), attend_with(pages)
        for i, state in enumerate(weights):
            x = nnx.merge(graph, state)(x, tables, attend, i)
        return x

    def scanned(weights: Any, pages: jax.Array, x: jax.Array) -> jax.Array:
        tables, attend = rope(), attend_with(pages)

        def body(x: jax.Array, at: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
            state, i = at
            return nnx.merge(graph, state)(x, tables, attend, i), None

        return jax.lax.scan(body, x, (weights, jnp.arange(cfg.num_layers, dtype=jnp.int32)))[0]

    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *fused)
    for layer in layers:
        split_projections(layer)
    apart_graph, _ = nnx.split(layers[0])
    apart = tuple(nnx.split(layer)[1] for layer in layers)
    return {
        "unrolled": (unrolled, fused),
        "scanned": (scanned, stacked),
        "unrolled, separate projections": (lambda w, p, x: unrolled(w, p, x, apart_graph), apart),
    }


def measure(
    name: str, step: Step, weights: Any, pages: jax.Array, x: jax.Array, steps: int, repeats: int
) -> dict[str, Any]:
    """What a layout's step costs; `steps` of them are dispatched back to back."""
    began = time.perf_counter()
    compiled = jax.jit(step).trace(weights, pages, x).lower().compile()
    seconds = time.perf_counter() - began

    def run() -> jax.Array:
        y = x
        for _ in range(steps):
            y = compiled(weights, pages, y)
        return y

    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append((time.perf_counter() - began) / steps)
    found = record(run)
    memory = compiled.memory_analysis()
    return {
        "layout": name,
        "ms": 1e3 * statistics.median(times),
        "device_ms": 1e3 * busy(found)[0] / steps,
        "kernels": round(len(found) / steps),
        "temp_mib": 0.0 if memory is None else memory.temp_size_in_bytes / 2**20,
        "compile_s": seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("layouts", __doc__)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="8b", help="whose layers")
    add("--batch", type=int, default=1, help="requests of a step")
    add("--context", type=int, default=1024, help="committed tokens of each request")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    add("--steps", type=int, default=20, help="steps dispatched back to back")
    add("--repeats", type=int, default=5, help="medians are taken over these")
    args = report.parse(parser, argv)

    cfg, dtype = SHAPES[args.shape][0], jnp.dtype(args.dtype)
    pages = init_pages(
        cfg.num_layers, args.batch * -(-args.context // 64), cfg.num_kv_heads, 64, cfg.kv_width, dtype
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(0), (args.batch, 1, cfg.hidden_size), dtype)
    rows = []
    print(f"{args.shape} {args.dtype}, batch {args.batch}, context {args.context}, {jax.devices()[0].device_kind}")
    print("layout                              ms  device ms  kernels  temp MiB  compile s")
    for name, (step, weights) in steps(cfg, args.batch, args.context, dtype).items():
        row = measure(name, step, weights, pages, x, args.steps, args.repeats)
        rows.append(row)
        print(
            f"{name:32s} {row['ms']:6.3f}  {row['device_ms']:9.3f}  {row['kernels']:7d}  {row['temp_mib']:8.1f}  "
            f"{row['compile_s']:9.1f}",
            flush=True,
        )
    report.write(args, "layouts", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
