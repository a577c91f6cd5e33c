"""python -m jaxspec.bench.studies.few_rows: a decoder layer's kernels for few rows, by shape and type of its weights.

Random weights in the shapes of Llama 3.1 8B's or Qwen3-30B-A3B's layers, in bfloat16 and (8B) packed in few bits. Some
layers' kernels are run one after the other, the variants taking turns: microseconds of a layer, and of each kernel by
the profiler, against the time that reading the bytes takes. Then every kernel is compared with plain XLA's result, and
its first row with the same row alone, bit for bit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.studies import report
from jaxspec.bench.studies.rounds import BANDWIDTH
from jaxspec.bench.studies.weights import FORMATS, quantised_kernel
from jaxspec.models.quantised import stored_bytes
from pallas_kernels.profile import medians, record
from pallas_kernels.small_batch import experts, gpu, gpu_experts, gpu_router, packed, reference
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.reference import Stream

EPS, C = 1e-5, 128
NAMES = ("bf16", *FORMATS)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's.

    Attributes:
      heads: queries', keys' and values'. experts: of a layer, 0 for an MLP. per_token: of these.
    """

    embed: int
    inner: int
    heads: tuple[int, int, int]
    vocabulary: int
    experts: int = 0
    per_token: int = 0

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """A layer's matrices."""
        e, f, n = self.embed, self.inner, self.experts
        attention = {"heads": (e, C * sum(self.heads)), "out": (C * self.heads[0], e)}
        mlp = {"swiglu": (e, 2 * f), "down": (f, e)}
        return attention | ({"router": (e, n), "gate_up": (n, e, 2 * f), "down": (n, f, e)} if n else mlp)

    @property
    def calls(self) -> tuple[str, ...]:
        """A layer's kernels, in their order."""
        return ("heads", "out", "choose", "mix") if self.experts else ("heads", "out", "swiglu", "down")

    def read(self, used: int) -> int:
        """Values of a layer's matrices that are read where so many experts are in use."""
        of = {name: int(np.prod(shape)) for name, shape in self.weights.items()}
        each = {name: size // self.experts * used if len(self.weights[name]) > 2 else size for name, size in of.items()}
        return sum(each.values())


SHAPES = {
    "8b": Shape(4096, 14336, (32, 8, 8), 128256),
    "30b-a3b": Shape(2048, 768, (32, 4, 4), 151936, 128, 8),
}


def weight(key: jax.Array, name: str, *shape: int, invariant: bool = False) -> jax.Array | Packed:
    """A kernel of some format, of a standard deviation of 0.02; see Packed.invariant."""
    if name == "bf16":
        return jax.jit(lambda key: (jax.random.normal(key, shape, jnp.float32) * 0.02).astype(jnp.bfloat16))(key)
    few = quantised_kernel(key, name, shape)
    return dataclasses.replace(jax.jit(packed.pack)(few.values, few.scale, few.zero), invariant=invariant)


def run(shape: Shape, call: str, w: dict[str, Any], rows: dict[str, Any], kernels: bool) -> Any:
    """One of a layer's kernels on rows of the stack's."""
    products, stream = gpu if kernels else reference, rows["stream"]
    router, mixture = (gpu_router, gpu_experts) if kernels else (experts, experts)
    if call == "heads":
        gains = rows["gains"] if shape.experts else None
        return products.heads(stream, w["heads"], rows["rope"], shape.heads, EPS, gains=gains)
    if call == "swiglu":
        return products.swiglu(stream, w["swiglu"], EPS)
    if call == "choose":
        return router.choose(stream, w["router"], EPS, shape.per_token, stream.h_ME.shape[0])
    if call == "mix":
        return mixture.mix(stream, rows["choice"], w["gate_up"], w["down"], rows["gain"], EPS, shape.per_token)
    if call == "logits":
        return products.logits(stream.h_ME, w["logits"])
    return products.add(rows[call], w[call], stream.h_ME, rows["gain"])


def layers(shape: Shape, weights: Sequence[dict[str, Any]], rows: dict[str, Any]) -> jax.Array:
    """A stack of layers but for attention: the query goes straight to the output projection."""
    rows = dict(rows)
    for w in weights:
        go = lambda call, w=w: run(shape, call, w, rows, True)
        rows["out"] = go("heads")[0]
        rows["stream"] = go("out")
        first, second = shape.calls[2:]
        rows["choice" if shape.experts else "down"] = go(first)
        rows["stream"] = go(second)
    return rows["stream"].h_ME


def inputs(shape: Shape, m: int) -> dict[str, Any]:
    """Rows for every kernel; the first m of the same 128."""
    normal = lambda seed, width: jax.random.normal(jax.random.key(seed), (128, width), jnp.float32).astype(jnp.bfloat16)
    angles = jax.random.uniform(jax.random.key(5), (C // 2, 128))[:, : reference.padded(m)] * 6
    gain = lambda seed, width: jax.random.uniform(jax.random.key(seed), (width,), jnp.float32, 0.5, 1.5).astype(
        jnp.bfloat16
    )
    stream = reference.begin(normal(1, shape.embed)[:m], gain(6, shape.embed))
    out = {
        "stream": stream, "gain": gain(6, shape.embed), "rope": jnp.stack([jnp.cos(angles), jnp.sin(angles)]),
        "out": normal(2, C * shape.heads[0])[:m], "gains": (gain(7, C), gain(8, C)),
    }  # fmt: skip
    if not shape.experts:
        return out | {"down": normal(3, shape.inner)[:m]}
    router = jax.random.normal(jax.random.key(9), (shape.embed, shape.experts), jnp.float32).astype(jnp.bfloat16)
    return out | {"choice": experts.choose(stream, router, EPS, shape.per_token, m)}


def by_rows(result: Any, m: int) -> list[np.ndarray]:
    """A result's arrays with rows first, and what has none left out."""
    if isinstance(result, Stream):
        result = *result[:2], result.squares_TR.T[:m]
    elif isinstance(result, experts.Choice):
        result = result.weights_XR.T[:m]
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(result)]


def error(got: Any, want: Any, m: int) -> float:
    """The largest difference over the largest value, of all results; squares by their sums."""
    total = lambda x: x._replace(squares_TR=x.squares_TR.sum(0, keepdims=True)) if isinstance(x, Stream) else x
    pairs = zip(by_rows(total(got), m), by_rows(total(want), m), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def first_rows_equal(one: Any, many: Any, m: int) -> bool:
    """Whether the row alone has the bits of the first of many."""
    return all(bool((a[0] == b[0]).all()) for a, b in zip(by_rows(one, 1), by_rows(many, m), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("few_rows", __doc__)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="8b", help="whose layers")
    add("--formats", nargs="+", choices=NAMES, help="default: all (8b), bf16")
    add("--rows", type=int, nargs="+", default=[1, 8, 32], help="tokens that a layer is given at once")
    add("--batch-invariant", action="store_true", help="few bits as engines with batch_invariant have them")
    add("--output", action="store_true", help="the output layer in bfloat16, too, beside XLA's")
    add("--whole", action="store_true", help="layers' times alone, nothing compared")
    add("--layers", type=int, default=4, help="that run one after the other, each with weights of its own")
    add("--repeats", type=int, default=7, help="medians are taken over these")
    add("--bandwidth", type=float, help="TB/s, for the floor; default: the device's where it is known")
    args = report.parse(parser, argv, gpu=True)
    shape = SHAPES[args.shape]
    formats = args.formats or (NAMES if args.shape == "8b" else ("bf16",))
    if shape.experts and tuple(formats) != ("bf16",):
        parser.error(f"--formats of --shape {args.shape} must be bf16, got {' '.join(formats)}")
    return _measure(args, shape, formats)


def _measure(args: argparse.Namespace, shape: Shape, formats: Sequence[str]) -> int:
    rate, count = report.rate(BANDWIDTH, args.bandwidth), len(shape.weights) + 1
    keys = jax.random.split(jax.random.key(0), args.layers * count)
    weights = {
        name: [
            {
                part: weight(keys[count * i + j], name, *size, invariant=args.batch_invariant)
                for j, (part, size) in enumerate(shape.weights.items())
            }
            for i in range(args.layers)
        ]
        for name in formats
    }
    last = {"logits": weight(keys[-1], "bf16", shape.embed, shape.vocabulary)} if args.output else {}

    def compiled(name: str, m: int, part: str) -> Callable[..., Any]:
        if part == "layers":
            return jax.jit(lambda w, rows: layers(shape, w, rows)).lower(weights[name], inputs(shape, m)).compile()
        call = jax.jit(lambda w, rows: run(shape, part, w, rows, True))
        return call.lower(weights[name][0] | last, inputs(shape, m)).compile()

    def all_compiled(parts: Sequence[str]) -> dict[tuple[str, int, str], Any]:
        began, jobs = time.perf_counter(), [(name, m, part) for name in formats for m in args.rows for part in parts]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            done = list(pool.map(lambda job: attempt(lambda: compiled(*job)), jobs))
        print(f"{', '.join(parts)} compiled in {time.perf_counter() - began:.0f} s", flush=True)
        return dict(zip(jobs, done, strict=True))

    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    found = all_compiled(["layers", *last])
    rows = []
    print("rows  format           layer, us   floor  kernels")
    for m in args.rows:
        stacks = {name: f for (name, rows, part), f in found.items() if (rows, part) == (m, "layers")}
        for name in [name for name, f in stacks.items() if isinstance(f, Exception)]:
            print(f"{name} layers {m}: {stacks.pop(name)}", flush=True)
        x, times = inputs(shape, m), {name: [] for name in stacks}
        used = int(x["choice"].ranks_X[-1]) if shape.experts else 0
        for _ in range(args.repeats):
            for name, f in stacks.items():
                jax.block_until_ready(f(weights[name], x))
                start = time.perf_counter()
                jax.block_until_ready([f(weights[name], x) for _ in range(20)][-1])
                times[name].append((time.perf_counter() - start) / 20 / args.layers)
        for name, f in stacks.items():
            top = medians(record(lambda f=f, name=name, x=x: [f(weights[name], x) for _ in range(5)]))
            size = sum(map(stored_bytes, jax.tree.leaves(weights[name][0])))
            size = 2 * shape.read(used) if shape.experts else size
            kernels = {kind: 1e6 * t for kind, (_, t) in top.items()}
            row = {
                "rows": m, "format": name, "us": 1e6 * statistics.median(times[name]), "experts": used,
                "floor_us": None if rate is None else 1e6 * size / rate, "kernels": kernels,
            }  # fmt: skip
            rows.append(row)
            line = "  ".join(f"{kind[12:32]} {t:.1f}" for kind, t in list(kernels.items())[:8])
            print(f"{m:4d}  {name:15s}  {row['us']:9.1f}  {report.cell(row['floor_us'], '6.1f')}  {line}", flush=True)
        if last:
            own = formats[0]  # the output layer is in bfloat16 with all of them
            rows.append(_output_layer(m, found[own, m, "logits"], weights[own][0] | last, inputs(shape, m)))
    report.write(args, "few_rows", rows)
    if not args.whole:
        found |= all_compiled(shape.calls)
    for name in formats:
        for part in [*(() if args.whole else shape.calls), *last]:
            _check(shape, name, part, args.rows, weights[name][0] | last, found)
    return 0


def _check(shape: Shape, name: str, part: str, counts: Sequence[int], w: dict[str, Any], found: dict[Any, Any]) -> None:
    """Prints how far a kernel is from plain XLA, and whether its first row has the bits that it has alone."""
    alone = None
    for m in counts:
        call = found[name, m, part]
        if isinstance(call, Exception):
            print(f"{name} {part} {m}: {call}", flush=True)
            continue
        got = call(w, inputs(shape, m))
        want = jax.jit(lambda w, rows: run(shape, part, w, rows, False))(w, inputs(shape, m))
        alone = got if m == 1 else alone
        same = "" if alone is None or m == 1 else f", first row as alone: {first_rows_equal(alone, got, m)}"
        print(f"{name:15s} {part:6s} {m:2d} rows: off by {error(got, want, m):.1e}{same}", flush=True)


def _output_layer(m: int, call: Any, w: dict[str, Any], x: dict[str, Any]) -> dict[str, Any]:
    """Times of the output layer by its kernel and by XLA, which pads one row to two as `layers.product` does."""
    h = x["stream"].h_ME
    dot = jax.jit(lambda w, h: reference.logits(jnp.pad(h, ((0, max(0, 2 - m)), (0, 0))), w["logits"]))
    jax.block_until_ready((call(w, x), dot(w, h)))
    own, xla = ([next(iter(medians(record(lambda f=f: [f() for _ in range(5)])).values()))[1]
                 for f in (lambda: call(w, x), lambda: dot(w, h))])  # fmt: skip
    print(f"{m:4d}  output layer: {1e6 * own:.1f} us, by XLA {1e6 * xla:.1f}", flush=True)
    return {"rows": m, "output_us": 1e6 * own, "output_by_xla_us": 1e6 * xla}


def attempt(make: Callable[[], Any]) -> Any:
    """What it makes, or why it does not."""
    try:
        return make()
    except Exception as error:  # a kernel that does not compile is a row of the table
        return error


if __name__ == "__main__":
    sys.exit(main())
