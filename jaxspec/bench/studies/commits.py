"""python -m jaxspec.bench.studies.commits: what it takes to write new keys and values into the pool, in place.

Keys and values of every layer lie apart, as a pass leaves them, and the pool is given away. For each shape (requests x
tokens of each): microseconds of all that a commit runs, with so many layers in a scatter, and with as many as engines
put there; beside it the time that reading and writing the bytes once takes. By the profiler, or on a CPU by the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.studies import report
from jaxspec.bench.studies.rounds import BANDWIDTH, SHAPES
from jaxspec.cache import commit, init_pages
from jaxspec.models.base import ModelConfig
from pallas_kernels.profile import busy, record


def _shape(text: str) -> tuple[int, int]:
    requests, _, tokens = text.partition("x")
    try:
        return _positive(requests), _positive(tokens)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be requests x tokens, such as 32x4, got {text!r}") from None


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def seconds(
    cfg: ModelConfig, requests: int, tokens: int, page: int, dtype: jnp.dtype, each: int | None, count: int
) -> float:
    """Of one commit; each: see `jaxspec.cache.commit`."""
    columns = -(-tokens // page)
    num_pages = requests * columns
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.permutation(num_pages).reshape(requests, columns), jnp.int32)
    shape = requests, tokens, cfg.num_kv_heads, cfg.head_dim
    new = [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2 * cfg.num_layers)]
    position = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (requests, tokens))

    def run(pages: jax.Array, new: Sequence[jax.Array], table: jax.Array, position: jax.Array) -> jax.Array:
        both = zip(new[::2], new[1::2], strict=True)
        kv = jnp.stack([jnp.concatenate(pair, axis=-1) for pair in both])
        ready, write = table[:, 0] >= 0, position >= 0
        return commit(pages, kv, table, position, write, num_pages, ready_B=ready, each=each)

    jitted = jax.jit(run, donate_argnums=0)
    pages = init_pages(cfg.num_layers, num_pages, cfg.num_kv_heads, page, cfg.kv_width, dtype)
    held = [jax.block_until_ready(jitted(pages, new, table, position))]

    def many() -> jax.Array:
        for _ in range(count):
            held[0] = jitted(held[0], new, table, position)
        return held[0]

    found = record(many)
    return busy(found)[0] / count if found else _by_the_clock(many) / count


def _by_the_clock(run: Callable[[], Any]) -> float:
    took = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(run())
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("commits", __doc__)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="8b", help="of the target whose layers and heads they are")
    add("--new", type=_shape, nargs="+", metavar="BxN", help="requests x tokens of each",
        default=[(1, 1), (32, 1), (32, 4), (128, 1), (128, 4), (1, 512), (1, 2048)])  # fmt: skip
    add("--each", type=_positive, nargs="*", default=[1, 4, 8, 16, 32], help="layers of a scatter")
    add("--page", type=_positive, default=64, help="tokens a page")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the pool")
    add("--count", type=_positive, default=4, help="commits, one after the other")
    args = report.parse(parser, argv)
    cfg, dtype, device = SHAPES[args.shape][0], jnp.dtype(args.dtype), jax.devices()[0].device_kind
    bandwidth = report.rate(BANDWIDTH, None)
    print(f"{args.shape}'s {cfg.num_layers} layers on {device}, {dtype}, pages of {args.page}, jax {jax.__version__}")
    print("requests tokens    bytes   " + "".join(f"{f'by {each}':>9s}" for each in args.each) + "   engine")
    rows = []
    for requests, tokens in args.new:
        size = requests * tokens * cfg.num_layers * cfg.num_kv_heads * cfg.kv_width * dtype.itemsize
        floor = None if bandwidth is None else 2e6 * size / bandwidth
        print(f"{requests:8d} {tokens:6d} {report.cell(floor, '8.1f')}   ", end="", flush=True)
        took = {}
        for each in (*args.each, None):
            took[each] = 1e6 * seconds(cfg, requests, tokens, args.page, dtype, each, args.count)
            print(f"{took[each]:9.1f}", end="", flush=True)
        print()
        rows.append(
            {"requests": requests, "tokens": tokens, "floor_us": floor, "engine_us": took.pop(None), "us": took}
        )
    report.write(args, "commits", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
