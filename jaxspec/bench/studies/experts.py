"""python -m jaxspec.bench.studies.experts: a layer's experts in few bits, by the way in which they are read.

Random weights: gpt-oss-20b's experts in MXFP4 and Qwen3-30B-A3B's in float8 with blocks of 128, behind a router. Every
way's result is compared with that of blocks; then some layers are run one after the other: microseconds and launches
of a layer, against the time that reading the bytes of the touched experts takes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.bench.studies import report
from jaxspec.bench.studies.few_rows import attempt
from jaxspec.bench.studies.rounds import BANDWIDTH
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.experts import MixtureOfExperts, route
from jaxspec.models.layers import product
from jaxspec.models.mxfp4 import BLOCK, Mxfp4
from jaxspec.models.quantised import Quantised, stored_bytes
from pallas_kernels.profile import record

SHAPES = {
    "gpt-oss-20b": (2880, Experts(32, 4, 2880, (0,), scores="top_k", bias=True, hidden_act="clamped_swiglu")),
    "30b-a3b": (2048, Experts(128, 8, 768, (0,))),
}
WAYS = ("blocks", "pairs", "all")


def kernel(key: jax.Array, name: str, shape: tuple[int, int, int]) -> Any:
    """Experts [X, in, out] in a shape's format, of a standard deviation near 1 / sqrt(in)."""
    count, d_in, d_out = shape
    if name == "gpt-oss-20b":
        codes = jax.random.bits(key, (count, d_in // 2, d_out), jnp.uint8)
        # Values of four bits have a deviation of 3.
        exponent = 127 - round(float(np.log2(3 * d_in**0.5)))
        return Mxfp4(codes, jnp.full((count, d_in // BLOCK, d_out), exponent, jnp.uint8))
    values = jax.random.normal(key, shape, jnp.bfloat16).astype(jnp.float8_e4m3fn)
    return Quantised(values, jnp.full((count, d_in // 128, d_out), d_in**-0.5, jnp.float32))


def layer(key: jax.Array, name: str) -> MixtureOfExperts:
    """A mixture with random weights."""
    width, own = SHAPES[name]
    cfg = ModelConfig("", 1, width, own.inner, 1, 1, 1, 128, experts=dataclasses.replace(own, layers=(0,)))
    made = nnx.eval_shape(lambda: MixtureOfExperts(cfg, dtype=jnp.dtype(jnp.bfloat16), rngs=None))
    keys = jax.random.split(key, 3)
    made.gate_up.set_value(kernel(keys[0], name, (own.count, width, 2 * own.inner)))
    made.down.set_value(kernel(keys[1], name, (own.count, own.inner, width)))
    made.router.kernel.set_value((jax.random.normal(keys[2], (width, own.count)) / width**0.5).astype(jnp.bfloat16))
    for bias in (made.router.bias, made.gate_up_bias, made.down_bias):
        if bias is not None:
            bias.set_value(jnp.zeros(bias.shape, jnp.bfloat16))
    return made


def stack(graph: Any, way: str, states: Sequence[Any], x_ME: jax.Array) -> jax.Array:
    """Layers one after the other, each on the normed sum of those before."""
    for state in states:
        made = nnx.merge(graph, state)
        logits_MX = product(x_ME, made.router.kernel[...], jnp.dtype(jnp.float32))
        x32 = x_ME.astype(jnp.float32) + made.mixed(way, x_ME, route(logits_MX, made.experts))
        x_ME = (x32 / jnp.sqrt(jnp.mean(x32 * x32, axis=1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
    return x_ME


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("experts", __doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--rows", type=int, nargs="+", default=[1, 4, 16, 32])
    add("--layers", type=int, default=3)
    add("--repeats", type=int, default=5, help="medians are taken over these")
    add("--most-blocks", type=int, default=1, help="rows up to which blocks are run: they take long to launch")
    add("--bandwidth", type=float, help="TB/s, for the floor; default: the device's where it is known")
    args = report.parse(parser, argv)
    rate = report.rate(BANDWIDTH, args.bandwidth)
    made = {name: [layer(jax.random.key(i), name) for i in range(args.layers)] for name in args.shapes}
    graphs = {name: nnx.split(layers[0])[0] for name, layers in made.items()}
    states = {name: [nnx.split(each)[1] for each in layers] for name, layers in made.items()}
    rows_of = lambda name, m: jax.random.normal(jax.random.key(9), (64, SHAPES[name][0]), jnp.bfloat16)[:m]
    jobs = [
        (name, m, way)
        for name in args.shapes for m in args.rows for way in WAYS if way != "blocks" or m <= args.most_blocks
    ]  # fmt: skip

    def compiled(name: str, m: int, way: str) -> Any:
        run = jax.jit(functools.partial(stack, graphs[name], way))
        return run.lower(states[name], rows_of(name, m)).compile()

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = dict(zip(jobs, pool.map(lambda job: attempt(lambda: compiled(*job)), jobs), strict=True))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, compiled in {time.perf_counter() - began:.0f} s")
    print("shape        rows  way     us a layer  of the device  floor, us  launches  off by")
    rows: list[dict[str, Any]] = []
    for name, m, way in jobs:
        call, x, own = found[name, m, way], rows_of(name, m), SHAPES[name][1]
        if isinstance(call, Exception):
            print(f"{name} {m} {way}: {call}", flush=True)
            continue
        got = np.asarray(jax.block_until_ready(call(states[name], x)), np.float32)
        first = found.get((name, 1, "blocks"), call)
        want = np.asarray(first(states[name], x[:1]), np.float32) if not isinstance(first, Exception) else got
        times = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            jax.block_until_ready([call(states[name], x) for _ in range(10)][-1])
            times.append((time.perf_counter() - start) / 10 / args.layers)
        events = record(lambda call=call, name=name, x=x: call(states[name], x))
        kernels = (made[name][0].gate_up[...], made[name][0].down[...])
        size = sum(map(stored_bytes, jax.tree.leaves(kernels))) * own.expected(m) / own.count
        row = {
            "shape": name, "rows": m, "way": way, "us": 1e6 * statistics.median(times),
            "device_us": 1e6 * sum(event.seconds for event in events) / args.layers,
            "floor_us": None if rate is None else 1e6 * size / rate, "launches": len(events) / args.layers,
            "off": float(np.abs(got[:1] - want).max() / np.abs(want).max()),
        }  # fmt: skip
        rows.append(row)
        print(
            f"{name:12s} {m:4d}  {way:7s} {row['us']:10.1f} {row['device_us']:14.1f} "
            f"{row['floor_us'] or 0:10.1f} {row['launches']:9.1f}  "
            f"{row['off']:.1e}", flush=True,
        )  # fmt: skip
    report.write(args, "experts", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
