"""python -m jaxspec.bench.studies.many_rows: many rows times a layer's packed weights, beside XLA.

Random weights in the shapes of Llama 3.1 8B's layers. Of each number of rows the time on the device, by the profiler,
of a layer's four products: by the kernel, by XLA's product of the same weights, by XLA's of weights as they are
loaded, which devices without the kernel keep, and in bfloat16. Then the kernel's largest difference from the same
weights expanded in float32. Where there is no kernel, the two that need none are measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.studies import report
from jaxspec.bench.studies.few_rows import SHAPES, weight
from jaxspec.bench.studies.weights import FORMATS, quantised_kernel
from jaxspec.models import quantised
from pallas_kernels.profile import record
from pallas_kernels.small_batch import gpu, gpu_packed_many, packed

_BF16 = jnp.bfloat16
#: How a product is made, [M, N] in bfloat16.
WAYS: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "kernel": lambda x, w: gpu_packed_many.product(x, w, _BF16),
    "xla": lambda x, w: packed.product(x, w).astype(_BF16),
    "stored": lambda x, w: quantised.product(x, w),
    "bf16": lambda x, w: x @ w,
}


def rows(m: int, width: int) -> jax.Array:
    return jax.random.normal(jax.random.key(m), (m, width), jnp.float32).astype(_BF16)


def microseconds(way: str, x: jax.Array, weights: Sequence[Any], runs: int) -> float:
    """Of one product on the device: each run multiplies by all weights, one after the other."""
    run = jax.jit(lambda x, weights: [WAYS[way](x, w) for w in weights])
    jax.block_until_ready(run(x, weights))
    found = record(lambda: [run(x, weights) for _ in range(runs)])
    return 1e6 * sum(event.seconds for event in found) / (runs * len(weights))


def error(x: jax.Array, w: Any) -> float:
    """The largest difference over the largest value."""
    want = jax.jit(lambda x, w: x.astype(jnp.float32) @ packed.dequantised(w))(x, w)
    return float(jnp.abs(WAYS["kernel"](x, w).astype(jnp.float32) - want).max() / jnp.abs(want).max())


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("many_rows", __doc__)
    add = parser.add_argument
    formats = sorted(FORMATS)
    add("--formats", nargs="+", choices=formats, default=formats, help="of the weights, after bf16")
    add("--rows", type=int, nargs="+", default=[48, 64, 128, 256, 512, 1024], help="tokens given to a layer at once")
    add("--xla", type=int, default=256, metavar="ROWS", help="XLA's product of packed weights up to so many rows")
    add("--layers", type=int, default=3, help="whose weights are read in turns, so that no cache has them")
    add("--runs", type=int, default=5, help="means are taken over these")
    args = report.parse(parser, argv, gpu=True)
    if (why := gpu.supported()) is not None:
        print(f"no kernel for many rows here: {why}", file=sys.stderr)
    return _measure(args, kernel=why is None)


def _measure(args: argparse.Namespace, kernel: bool) -> int:
    shape, found = SHAPES["8b"], []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; us of a layer's four products")
    for name in ("bf16", *args.formats):
        layer: dict[tuple[str, int], float] = {}
        for j, (part, size) in enumerate(shape.weights.items()):
            keys = [jax.random.key(10 * i + j) for i in range(args.layers)]
            weights = [weight(key, name, *size) for key in keys] if kernel or name == "bf16" else []
            stored = [quantised_kernel(key, name, size) for key in keys] if name != "bf16" else []
            for m in args.rows:
                x = rows(m, size[0])
                ways = ["kernel"] * kernel + ["xla"] * (kernel and m <= args.xla) + ["stored"]
                for way in ("bf16",) if name == "bf16" else ways:
                    us = microseconds(way, x, stored if way == "stored" else weights, args.runs)
                    layer[way, m] = layer.get((way, m), 0.0) + us
                    row: dict[str, Any] = {"format": name, "product": part, "rows": m, "way": way, "us": us}
                    found.append(row | ({"error": error(x, weights[0])} if way == "kernel" else {}))
        for way in dict.fromkeys(way for way, _ in layer):
            line = "  ".join(f"{m}: {us:.1f}" for (w, m), us in layer.items() if w == way)
            print(f"{name:15s} {way:7s} {line}", flush=True)
    if kernel:
        worst = max((row["error"] for row in found if "error" in row), default=0.0)
        print(f"the kernel's largest difference from float32, over the largest value: {worst:.1e}")
    report.write(args, "products", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
