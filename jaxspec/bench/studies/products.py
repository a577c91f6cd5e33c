"""python -m jaxspec.bench.studies.products: a model's dense products by rows and layout of the weights.

All layers' products in a chain, so that weights come from memory as they do in a step, without attention and without
the output layer: the weights flat, in column blocks, and both as an engine keeps them on a CPU. Two times for each:
the wall's, which says how well the cores share the work, and the processor's, which other work beside it changes
less; and whether a row's bits are those that the most rows gave.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.bench.studies import report
from jaxspec.checkpointing import hf
from jaxspec.models.base import ModelConfig
from jaxspec.models.layers import Linear
from jaxspec.models.layouts import column_blocks
from jaxspec.resolve import resolve_model


class Products(nnx.Module):
    """The dense layers of a decoder, chained."""

    def __init__(self, cfg: ModelConfig):
        self.heads, self.inner = cfg.num_heads * cfg.head_dim, cfg.intermediate_size
        qkv, hidden = (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim, cfg.hidden_size
        sizes = (hidden, qkv), (self.heads, hidden), (hidden, 2 * self.inner), (self.inner, hidden)
        rngs = nnx.Rngs(0)
        new = lambda size: Linear(*size, dtype=jnp.dtype(jnp.float32), rngs=rngs)
        self.layers = nnx.List([new(size) for _ in range(cfg.num_layers) for size in sizes])

    def __call__(self, x_NE: jax.Array) -> jax.Array:
        layers = list(self.layers)
        for qkv, out, gate_up, down in zip(*(layers[i::4] for i in range(4)), strict=True):
            x_NE = x_NE + out(qkv(x_NE)[:, : self.heads])
            x_NE = x_NE + down(gate_up(x_NE)[:, : self.inner])
        return x_NE


def compile_all(cfg: ModelConfig, rows: Sequence[int]) -> dict[tuple[str, int], Callable[[], jax.Array]]:
    """{(layout, rows): a call}; every call's input are the first rows of one array."""
    flat = Products(cfg)
    layouts = {"flat": flat, "blocks": column_blocks(flat), "both": column_blocks(flat, keep_flat=True)}
    x_NE = jax.random.normal(jax.random.key(1), (max(rows), cfg.hidden_size))
    calls: dict[tuple[str, int], Callable[[], jax.Array]] = {}
    for name, module in layouts.items():
        graph, state = nnx.split(module)
        run = jax.jit(lambda state, x_NE, graph=graph: nnx.merge(graph, state)(x_NE))
        for count in rows:
            args = state, x_NE[:count]
            compiled = run.lower(*args).compile()
            calls[name, count] = lambda compiled=compiled, args=args: jax.block_until_ready(compiled(*args))
    return calls


def measure(calls: dict[tuple[str, int], Callable[[], jax.Array]], repeats: int) -> list[dict[str, Any]]:
    """Medians over interleaved repeats, in milliseconds; the first repeat warms up."""
    wall: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    processor: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(repeats + 1):
        for key, call in calls.items():
            began, used = time.perf_counter(), time.process_time()
            call()
            wall[key].append(time.perf_counter() - began)
            processor[key].append(time.process_time() - used)
    most = max(count for _, count in calls)
    full = {name: np.asarray(calls[name, most]()) for name, _ in calls}
    return [
        {
            "layout": name,
            "rows": count,
            "wall_ms": 1e3 * statistics.median(wall[name, count][1:]),
            "processor_ms": 1e3 * statistics.median(processor[name, count][1:]),
            "same_bits": bool(np.array_equal(np.asarray(calls[name, count]()), full[name][:count])),
        }
        for name, count in calls
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("products", __doc__)
    add = parser.add_argument
    add("--model", default="demo", help='"demo", a Hugging Face directory or a hub id: whose sizes')
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256, 512], help="tokens of each product")
    add("--repeats", type=int, default=15, help="medians are taken over these, interleaved")
    args = report.parse(parser, argv)

    cfg = hf.load_config(resolve_model(args.model))
    found = measure(compile_all(cfg, args.rows), args.repeats)
    print("layout   rows   wall ms   processor ms   bits as of the most rows")
    for row in found:
        same = "same" if row["same_bits"] else "others"
        print(f"{row['layout']:7s} {row['rows']:5d}  {row['wall_ms']:8.2f}  {row['processor_ms']:13.2f}   {same}")
    report.write(args, "products", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
