"""python -m jaxspec.bench.studies.experts: a layer's experts in few bits, by the way in which they are read.

Random weights of real shapes behind a router. `packed` is the kernel that reads each expert in use once
(docs/kernels.md), `many` the one for more than 8 rows, and `kernel` that of few rows in bfloat16. Every way's first row
is compared with what the same way makes of it among the first number of `--rows`, of equal choices of experts, and with
float32 arithmetic by the same weights; then some layers are run one after the other: microseconds and launches of a
layer, against the time that reading the bytes of the touched experts takes.
"""

from __future__ import annotations

import argparse
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
from jaxspec.models import stacked
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.layers import product
from jaxspec.models.mixing import Routing, activated, route
from jaxspec.models.mxfp4 import BLOCK, Mxfp4
from jaxspec.models.quantised import Quantised, stored_bytes
from pallas_kernels.profile import record
from pallas_kernels.small_batch import experts, gpu_experts, gpu_router, reference

EPS = 1e-6
#: Width and experts.
SHAPES = {
    "gpt-oss-20b": (2880, Experts(32, 4, 2880, (0,), scores="top_k", bias=True, hidden_act="clamped_swiglu")),
    "gpt-oss-120b": (2880, Experts(128, 4, 2880, (0,), scores="top_k", bias=True, hidden_act="clamped_swiglu")),
    "30b-a3b": (2048, Experts(128, 8, 768, (0,))),
    "deepseek-v3": (7168, Experts(256, 8, 2048, (0,))),  # without groups and corrections: what is read is the same
}
#: Values' types; mxfp4 has a scale for every 32 inputs, int8 one for all, the others one for every 128.
FORMATS = {"int4-g128": jnp.int4, "mxfp4": None, "fp8-block": jnp.float8_e4m3fn, "int8": jnp.int8, "bf16": jnp.bfloat16}
WAYS = ("blocks", "pairs", "all", "packed", "many", "kernel")


def kernel(key: jax.Array, form: str, shape: tuple[int, int, int]) -> Any:
    """Experts [X, in, out] in a format, of a standard deviation near 1 / sqrt(in)."""
    count, d_in, d_out = shape
    if form == "mxfp4":
        codes = jax.random.bits(key, (count, d_in // 2, d_out), jnp.uint8)
        # Values of four bits have a deviation of 3.
        exponent = 127 - round(float(np.log2(3 * d_in**0.5)))
        return Mxfp4(codes, jnp.full((count, d_in // BLOCK, d_out), exponent, jnp.uint8))
    if form == "bf16":
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(d_in**-0.5)
    times, kind = {"int4-g128": 3, "int8": 40}.get(form, 1), jnp.dtype(FORMATS[form])
    values = jax.random.normal(key, shape, jnp.bfloat16) * times
    if jnp.issubdtype(kind, jnp.integer):
        values = jnp.clip(jnp.round(values), jnp.iinfo(kind).min, jnp.iinfo(kind).max)
    values = values.astype(kind)
    return Quantised(values, jnp.full((count, 1 if form == "int8" else d_in // 128, d_out), d_in**-0.5 / times))


def layer(key: jax.Array, name: str, form: str) -> MixtureOfExperts:
    """A mixture with random weights."""
    width, own = SHAPES[name]
    cfg = ModelConfig("", 1, width, own.inner, 1, 1, 1, 128, experts=dataclasses.replace(own, layers=(0,)))
    made = nnx.eval_shape(lambda: MixtureOfExperts(cfg, dtype=jnp.dtype(jnp.bfloat16), rngs=None))
    keys, random = jax.random.split(key, 4), jax.jit(kernel, static_argnums=(1, 2))
    made.gate_up.set_value(random(keys[0], form, (own.count, width, 2 * own.inner)))
    made.down.set_value(random(keys[1], form, (own.count, own.inner, width)))
    made.router.kernel.set_value((jax.random.normal(keys[2], (width, own.count)) / width**0.5).astype(jnp.bfloat16))
    if made.router.bias is not None:
        made.router.bias.set_value(jnp.zeros(made.router.bias.shape, jnp.bfloat16))
    for bias in (made.gate_up_bias, made.down_bias):
        if bias is not None:
            bias.set_value(jax.random.normal(keys[3], bias.shape).astype(jnp.bfloat16))
    return made


def serves(name: str, form: str, way: str) -> bool:
    """Whether a shape in a format can be read so."""
    own = SHAPES[name][1]
    if way == "kernel":
        return form == "bf16" and not own.bias and experts.refusal(SHAPES[name][0], own.inner, own.count) is None
    return form != "bf16" or way in ("pairs", "all", "many")


def lies_packed(form: str, way: str) -> bool:
    """Whether a way reads packed experts."""
    return form != "bf16" and way in ("packed", "many")


def stack(graph: Any, way: str, states: Sequence[Any], x_ME: jax.Array) -> jax.Array:
    """Layers one after the other, each on the normed sum of those before."""
    norm = lambda x32: (x32 / jnp.sqrt(jnp.mean(x32 * x32, axis=1, keepdims=True) + EPS)).astype(x_ME.dtype)
    gain = jnp.ones((x_ME.shape[1],), x_ME.dtype)
    for state in states:
        made = nnx.merge(graph, state)
        if way == "kernel":
            stream, own = reference.begin(x_ME, gain), made.experts
            choice = gpu_router.choose(stream, made.router.kernel[...], EPS, own.per_token, x_ME.shape[0])
            stream = gpu_experts.mix(stream, choice, made.gate_up[...], made.down[...], gain, EPS, own.per_token)
            x_ME = norm(stream.h_ME.astype(jnp.float32))
            continue
        logits_MX = product(x_ME, made.router.kernel[...], jnp.dtype(jnp.float32))
        x_ME = norm(x_ME.astype(jnp.float32) + made.mixed(way, x_ME, route(logits_MX, made.experts)))
    return x_ME


def routing(graph: Any, state: Any, x_ME: jax.Array) -> Routing:
    """The experts that a layer's router chooses."""
    made = nnx.merge(graph, state)
    return route(product(x_ME, made.router.kernel[...], jnp.dtype(jnp.float32)), made.experts)


def exact(graph: Any, state: Any, x_ME: jax.Array, routing: Routing) -> jax.Array:
    """What a layer's experts make of one row, in float32 by all of the same weights."""
    made = nnx.merge(graph, state)
    pick = lambda param: jax.tree.map(lambda x: jnp.take(x, routing.experts_MK[0], axis=0), param[...])
    bias = lambda param: 0 if param is None else pick(param).astype(jnp.float32)
    wide = [stacked.expanded(pick(param), jnp.float32) for param in (made.gate_up, made.down)]
    times = lambda x, w: jnp.einsum("ke,kef->kf", x, w, precision="highest")
    x_KE = jnp.repeat(x_ME.astype(jnp.float32), len(routing.experts_MK[0]), axis=0)
    hidden = activated(times(x_KE, wide[0]) + bias(made.gate_up_bias), made.experts.hidden_act)
    return jnp.sum((times(hidden, wide[1]) + bias(made.down_bias)) * routing.weights_MK[0][:, None], axis=0)


def parser() -> argparse.ArgumentParser:
    p = report.parser("experts", __doc__)
    add = p.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["gpt-oss-20b", "30b-a3b"], help="whose width and experts")
    add("--formats", nargs="+", choices=FORMATS, help="of the weights (default: mxfp4 for gpt-oss, else fp8-block)")
    add("--ways", nargs="+", choices=WAYS, default=["blocks", "pairs", "all"], help="how the experts are read")
    add("--packed-experts", action="store_true", help="also by the kernel for packed experts (Hopper)")
    add("--rows", type=int, nargs="+", default=[1, 4, 16, 32], help="tokens that a layer is given at once")
    add("--layers", type=int, default=3, help="that run one after the other, each with weights of its own")
    add("--repeats", type=int, default=5, help="medians are taken over these")
    add("--most-blocks", type=int, default=1, help="rows up to which blocks are run: they take long to launch")
    add("--bandwidth", type=float, help="TB/s, for the floor (default: the device's where it is known, else no floor)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = report.parse(parser(), argv)
    rate = report.rate(BANDWIDTH, args.bandwidth)
    ways = [*args.ways, *(["packed"] if args.packed_experts and "packed" not in args.ways else [])]
    usual = lambda name: ["mxfp4"] if name.startswith("gpt-oss") else ["fp8-block"]
    cases = [(name, form) for name in args.shapes for form in args.formats or usual(name)]
    most = max(64, *args.rows)
    rows_of = lambda name, m: jax.random.normal(jax.random.key(9), (most, SHAPES[name][0]), jnp.bfloat16)[:m]
    jobs = [
        (*case, m, way)
        for case in cases for m in args.rows for way in ways
        if serves(*case, way) and (way != "blocks" or m <= args.most_blocks)
    ]  # fmt: skip
    plain: dict[Any, list[Any]] = {}
    packed: dict[Any, list[Any]] = {}
    sizes: dict[Any, int] = {}
    for case in cases:
        layers = [layer(jax.random.key(i), *case) for i in range(args.layers)]
        plain[case] = [nnx.split(each) for each in layers]
        kernels = layers[0].gate_up[...], layers[0].down[...]
        sizes[case] = sum(map(stored_bytes, jax.tree.leaves(kernels)))
        if any(job[:2] == case and lies_packed(job[1], job[3]) for job in jobs):
            again = [layer(jax.random.key(i), *case) for i in range(args.layers)]  # merged ones share variables
            for each in again:
                each.pack()
            packed[case] = [nnx.split(each) for each in again]
    of = lambda job: packed[job[:2]] if lies_packed(job[1], job[3]) else plain[job[:2]]
    states = lambda job: [state for _, state in of(job)]

    # Of all rows at once: the router's product rounds by their number.
    routed = {case: jax.jit(functools.partial(routing, plain[case][0][0]))(plain[case][0][1], rows_of(case[0], most))
              for case in cases}  # fmt: skip
    routing_of = lambda job: jax.tree.map(lambda x: x[: job[2]], routed[job[:2]])

    def compiled(job: tuple[str, str, int, str]) -> Any:
        graph, way, x = of(job)[0][0], job[3], rows_of(job[0], job[2])
        run = jax.jit(functools.partial(stack, graph, way))
        one = jax.jit(lambda state, x, own: nnx.merge(graph, state).mixed(way, x, own))
        single = None if way == "kernel" else one.lower(states(job)[0], x, routing_of(job)).compile()
        return run.lower(states(job), x).compile(), single

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = dict(zip(jobs, pool.map(lambda job: attempt(lambda: compiled(job)), jobs), strict=True))
        exactly = lambda case: jax.jit(functools.partial(exact, plain[case][0][0]))(
            plain[case][0][1], rows_of(case[0], 1), jax.tree.map(lambda x: x[:1], routed[case])
        )
        wanted = {case: np.asarray(exactly(case)) for case in cases}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, compiled in {time.perf_counter() - began:.0f} s")
    print("shape        format    rows  way     us a layer  of the device  floor, us  launches  off by")
    rows: list[dict[str, Any]] = []
    alone: dict[Any, np.ndarray] = {}
    for job in jobs:
        (name, form, m, way), own = job, SHAPES[job[0]][1]
        if isinstance(calls := found[job], Exception):
            print(f"{name} {form} {m} {way}: {calls}", flush=True)
            continue
        (call, single), x, given = calls, rows_of(name, m), states(job)
        want, off, same = wanted[name, form], None, None
        if single is not None:
            first = np.asarray(single(given[0], x, routing_of(job)), np.float32)[0]
            off = float(np.abs(first - want).max() / np.abs(want).max())
            same = bool(np.array_equal(first, alone.setdefault((name, form, way), first)))
        times = []
        jax.block_until_ready(call(given, x))
        for _ in range(args.repeats):
            start = time.perf_counter()
            jax.block_until_ready([call(given, x) for _ in range(10)][-1])
            times.append((time.perf_counter() - start) / 10 / args.layers)
        events = record(lambda call=call, given=given, x=x: call(given, x))
        size = sizes[name, form] * own.expected(m) / own.count
        row = {
            "shape": name, "format": form, "rows": m, "way": way, "us": 1e6 * statistics.median(times),
            "device_us": 1e6 * sum(event.seconds for event in events) / args.layers if events else None,
            "floor_us": None if rate is None else 1e6 * size / rate,
            "launches": len(events) / args.layers if events else None,
            "off": off, "same_bits": same,
        }  # fmt: skip
        rows.append(row)
        told = "" if off is None else f"{off:.1e} {'same' if same else 'OTHER'}"
        print(
            f"{name:12s} {form:9s} {m:4d}  {way:7s} {row['us']:10.1f} {report.cell(row['device_us'], '14.1f')} "
            f"{report.cell(row['floor_us'], '10.1f')} {report.cell(row['launches'], '9.1f')}  {told}", flush=True,
        )  # fmt: skip
    report.write(args, "experts", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
