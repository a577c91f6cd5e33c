"""python -m jaxspec.bench.studies.few_rows: a decoder layer's kernels for few rows, by the type of its weights.

Random weights in the shapes of Llama 3.1 8B's layers, in bfloat16 and packed in few bits. Every kernel is compared with
plain XLA's result, and its first row with the same row alone, bit for bit; then some layers' kernels are run one after
the other, the types taking turns: microseconds of a layer, and of each kernel by the profiler, against the time that
reading the bytes takes.
"""

from __future__ import annotations

import concurrent.futures
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.studies import report
from jaxspec.bench.studies.rounds import BANDWIDTH, FORMATS, quantised_kernel
from jaxspec.models.quantised import stored_bytes
from pallas_kernels.profile import medians, record
from pallas_kernels.small_batch import gpu, gpu_packed, packed, reference
from pallas_kernels.small_batch.packed import Packed

EMBED, HIDDEN, HEADS, EPS = 4096, 14336, (32, 8, 8), 1e-5
NAMES = ("bf16", *FORMATS)
#: A layer's kernels: what runs it, and the shape of its weights.
SHAPES = {
    "heads": (EMBED, 128 * sum(HEADS)), "out": (EMBED, EMBED), "swiglu": (EMBED, 2 * HIDDEN), "down": (HIDDEN, EMBED),
}  # fmt: skip


def weight(key: jax.Array, name: str, k: int, n: int) -> jax.Array | Packed:
    """A kernel of some format, of a standard deviation of 0.02."""
    if name == "bf16":
        return (jax.random.normal(key, (k, n), jnp.float32) * 0.02).astype(jnp.bfloat16)
    few = quantised_kernel(key, name, k, n)
    return jax.jit(packed.pack)(few.values, few.scale)


def run(name: str, w: Any, rows: dict[str, Any], ways: Any) -> Any:
    """One of a layer's kernels on rows of the stack's."""
    if name == "heads":
        return ways.heads(rows["stream"], w, rows["rope"], HEADS, EPS)
    if name == "swiglu":
        return ways.swiglu(rows["stream"], w, EPS)
    return ways.add(rows[name], w, rows["stream"].h_ME, rows["gain"])


def ways_for(w: Any) -> Any:
    return gpu_packed if isinstance(w, Packed) else gpu


def layers(weights: Sequence[dict[str, Any]], rows: dict[str, Any]) -> jax.Array:
    """A stack of layers but for attention: the query goes straight to the output projection."""
    stream = rows["stream"]
    for w in weights:
        ways, own = ways_for(w["heads"]), {**rows, "stream": stream}
        stream = run("out", w["out"], own | {"out": run("heads", w["heads"], own, ways)[0]}, ways)
        own = {**rows, "stream": stream}
        stream = run("down", w["down"], own | {"down": run("swiglu", w["swiglu"], own, ways)}, ways)
    return stream.h_ME


def inputs(m: int) -> dict[str, Any]:
    """Rows for every kernel; the first m of the same 64."""
    normal = lambda seed, width, scale=1.0: (
        jax.random.normal(jax.random.key(seed), (64, width), jnp.float32) * scale
    ).astype(jnp.bfloat16)[:m]
    angles = jax.random.uniform(jax.random.key(5), (64, 64))[:, : -(-m // 8) * 8] * 6
    gain = jax.random.uniform(jax.random.key(6), (EMBED,), jnp.float32, 0.5, 1.5).astype(jnp.bfloat16)
    return {
        "stream": reference.begin(normal(1, EMBED), gain), "gain": gain, "rope": (jnp.cos(angles), jnp.sin(angles)),
        "out": normal(2, EMBED), "down": normal(3, HIDDEN),
    }  # fmt: skip


def error(got: Any, want: Any, m: int) -> float:
    """The largest difference over the largest value, of all results; squares by their sums."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if a.shape[0] != m:
            a, b = a.sum(0)[:m], b.sum(0)[:m]
        worst = max(worst, float(np.abs(a - b).max() / np.abs(b).max()))
    return worst


def first_rows_equal(one: Any, many: Any, m: int) -> bool:
    """Whether the row alone has the bits of the first of many."""
    return all(
        bool((a[0] == b[0]).all()) if b.shape[0] == m else bool((a[:, 0] == b[:, 0]).all())
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("few_rows", __doc__)
    add = parser.add_argument
    add("--formats", nargs="+", choices=NAMES, default=NAMES)
    add("--rows", type=int, nargs="+", default=[1, 8, 32])
    add("--layers", type=int, default=8)
    add("--repeats", type=int, default=7, help="medians are taken over these")
    add("--bandwidth", type=float, help="TB/s, for the floor; default: the device's where it is known")
    args = parser.parse_args(argv)
    rate = report.rate(BANDWIDTH, args.bandwidth)
    keys = jax.random.split(jax.random.key(0), args.layers * len(SHAPES))
    weights = {
        name: [
            {part: weight(keys[len(SHAPES) * i + j], name, *shape) for j, (part, shape) in enumerate(SHAPES.items())}
            for i in range(args.layers)
        ]
        for name in args.formats
    }

    def compiled(name: str, m: int, part: str | None) -> Callable[..., Any]:
        first = weights[name][0]
        if part is None:
            return jax.jit(layers).lower(weights[name], inputs(m)).compile()
        ways = ways_for(first[part])
        return jax.jit(lambda w, rows: run(part, w, rows, ways)).lower(first[part], inputs(m)).compile()

    began = time.perf_counter()
    jobs = [(name, m, part) for name in args.formats for m in args.rows for part in (None, *SHAPES)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = dict(zip(jobs, pool.map(lambda job: attempt(lambda: compiled(*job)), jobs), strict=True))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, compiled in {time.perf_counter() - began:.0f} s")
    rows = []
    for name in args.formats:
        for part in SHAPES:
            w, alone = weights[name][0][part], None
            for m in args.rows:
                call = found[name, m, part]
                if isinstance(call, Exception):
                    print(f"{name} {part} {m}: {call}", flush=True)
                    continue
                got = call(w, inputs(m))
                want = jax.jit(lambda w, rows, part=part: run(part, w, rows, reference))(w, inputs(m))
                alone = got if m == 1 else alone
                same = "" if alone is None or m == 1 else f", first row as alone: {first_rows_equal(alone, got, m)}"
                print(f"{name:10s} {part:6s} {m:2d} rows: off by {error(got, want, m):.1e}{same}", flush=True)
    print("rows  format      layer, us   floor  " + "  ".join(f"{part:>6s}" for part in SHAPES))
    for m in args.rows:
        stacks = {name: found[name, m, None] for name in args.formats}
        stacks = {name: f for name, f in stacks.items() if not isinstance(f, Exception)}
        x, times = inputs(m), {name: [] for name in stacks}
        for _ in range(args.repeats):
            for name, f in stacks.items():
                jax.block_until_ready(f(weights[name], x))
                start = time.perf_counter()
                jax.block_until_ready([f(weights[name], x) for _ in range(20)][-1])
                times[name].append((time.perf_counter() - start) / 20 / args.layers)
        for name, f in stacks.items():
            top = medians(record(lambda f=f, name=name, x=x: [f(weights[name], x) for _ in range(5)]))
            size = sum(map(stored_bytes, jax.tree.leaves(weights[name][0])))
            kernels = {kind: 1e6 * t for kind, (_, t) in top.items()}
            row = {
                "rows": m, "format": name, "us": 1e6 * statistics.median(times[name]),
                "floor_us": None if rate is None else 1e6 * size / rate, "kernels": kernels,
            }  # fmt: skip
            rows.append(row)
            line = "  ".join(f"{kind[12:32]} {t:.1f}" for kind, t in list(kernels.items())[:6])
            print(f"{m:4d}  {name:10s}  {row['us']:9.1f}  {row['floor_us'] or 0:6.1f}  {line}", flush=True)
    report.write(args, "few_rows", rows)
    return 0


def attempt(make: Callable[[], Any]) -> Any:
    """What it makes, or why it does not."""
    try:
        return make()
    except Exception as error:  # a kernel that does not compile is a row of the table
        return error


if __name__ == "__main__":
    sys.exit(main())
