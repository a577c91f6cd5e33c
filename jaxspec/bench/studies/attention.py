"""python -m jaxspec.bench.studies.attention: a GPU's attention on Mosaic GPU against that on Triton.

Device microseconds by the profiler of each one's kernels (XLA's list of items, made once a round, stands apart),
without a mask: plain decoding, chains and chunks of prompts, by default in the shapes of Llama 3.1 8B's heads. The
Mosaic kernel is the one that engines take, or the first that serves where they take Triton's. Calls go through the
pages of a pool that no cache holds. Errors are against plain XLA, the norm of the difference over the norm.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import cli
from jaxspec.bench.studies import report
from jaxspec.names import DTYPES
from pallas_kernels.profile import medians, record
from pallas_kernels.tree_attention import gpu, gpu_mosaic, mosaic_latent, mosaic_plain, mosaic_wide, reference
from pallas_kernels.tree_attention.cases import Case
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

#: Bytes of pages that calls go through, several times what a cache holds, where a call does not read as many.
_POOL_BYTES = 256 << 20


def _on_mosaic(args: TreeAttentionArgs) -> jax.Array:
    kernels = gpu_mosaic, mosaic_wide, mosaic_latent, mosaic_plain
    serving = [kernel for kernel in kernels if kernel.refusal(args) is None]
    return next((kernel for kernel in serving if kernel.slower(args) is None), serving[0]).tree_attention(args)


_WAYS: dict[str, Callable[[TreeAttentionArgs], jax.Array]] = {"mosaic": _on_mosaic, "triton": gpu.tree_attention}


def _case(batch: int, nodes: int, context: int, **shape: Any) -> Case:
    case = Case(f"b{batch}-n{nodes}-{context}", batch, nodes, context=context, mask="causal", **shape)
    page_bytes = jnp.dtype(case.dtype).itemsize * case.kv_heads * case.page * case.wide
    return dataclasses.replace(case, pool=max(case.num_pages, _POOL_BYTES // page_bytes))


def _draw(case: Case) -> list[TreeAttentionArgs]:
    """Arguments over one pool, of different pages."""
    args, rng = case.draw(0), np.random.default_rng(1)
    tables = []
    size = case.batch * case.columns
    for pages in np.array_split(rng.permutation(case.num_pages), max(1, case.num_pages // size)):
        tables.append(jnp.asarray(pages[:size].reshape(case.batch, case.columns), jnp.int32))
    return [dataclasses.replace(args, table_BM=table) for table in tables[:8]]


def _repeat(call: Callable[[Any], Any], sets: Sequence[TreeAttentionArgs], count: int) -> Any:
    return [call(sets[i % len(sets)]) for i in range(count)][-1]


def _compile(run: Callable[[TreeAttentionArgs], jax.Array], case: Case) -> Any:
    return jax.jit(run).lower(case.shapes()).compile()


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value > 0.1 else f"{value:.1e}"
    return " + ".join(map(_shown, value)) if isinstance(value, list) else str(value)


def _error(got: jax.Array, want: jax.Array) -> float:
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 1 where a kernel errs."""
    parser = report.parser("attention", __doc__)
    add = parser.add_argument
    add("--batch", type=int, nargs="+", default=[1, 8, 32], help="requests of a call, each measured for itself")
    add("--nodes", type=int, nargs="+", default=[1, 4, 6], help="tokens of each request, each number for itself")
    add("--context", type=int, nargs="+", default=[1024, 8192], help="committed tokens of each request")
    add("--heads", type=int, default=32, help="of the queries")
    add("--kv-heads", type=int, default=8, help="of keys and values")
    add("--head-dim", type=int, default=128, help="channels of a head")
    add("--values", type=int, help="latent attention: so many first channels of keys (default: values of their own)")
    add("--dtype", type=cli.dtype, choices=DTYPES, default="bfloat16", help="of queries, keys and values")
    add("--page", type=int, default=64, help="tokens of a page")
    add("--soft-cap", type=float, help="scores are kept within plus and minus this (default: they are not)")
    kinds = "every one's, of every length up to it, or the first one's beside others of a sixteenth"
    add("--lengths", choices=("full", "ragged", "long"), default="full", help=f"whose the context is: {kinds}")
    add("--repeats", type=int, default=24, help="calls, of whose kernels medians are taken")
    add("--within", type=float, default=100, metavar="S", help="seconds after which nothing new is begun")
    args = report.parse(parser, argv, gpu=True)
    began = time.perf_counter()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    shape = {name: getattr(args, name) for name in ("heads", "kv_heads", "head_dim", "values", "dtype", "page")}
    shape |= {"soft_cap": args.soft_cap, "lengths": args.lengths}
    cases = [_case(b, n, c, **shape) for c, b, n in itertools.product(args.context, args.batch, args.nodes)]
    ways = {**_WAYS, "reference": reference.tree_attention}
    rows, wrong = [], False
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        compiled = {
            (case.name, way): pool.submit(_compile, run, case)
            for case in cases for way, run in ways.items()
        }  # fmt: skip
        for case in cases:
            if time.perf_counter() - began > args.within:
                print("out of time", flush=True)
                break
            sets = _draw(case)
            want = compiled[case.name, "reference"].result()(sets[0])
            line: dict[str, Any] = {"case": case.name, "floor": case.min_bytes(sets[0]) / 4.22e6}
            for way in _WAYS:
                try:
                    call = compiled[case.name, way].result()
                    line[f"{way} error"] = _error(call(sets[0]), want)
                    wrong |= not line[f"{way} error"] < 4e-3
                    run = functools.partial(_repeat, call, sets, args.repeats)
                    jax.block_until_ready(run())
                    found = medians(record(run))
                    own = {name: 1e6 * t for name, (_, t) in found.items() if "tree_attention" in name}
                    line[way], line[f"{way} kernels"] = sum(own.values()), list(own.values())
                    line[f"{way} beside"] = 1e6 * sum(t for name, (_, t) in found.items() if name not in own)
                except Exception as error:  # compilers raise many kinds, and each is this line's result
                    wrong, line[way] = True, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            rows.append(line)
            shown = "  ".join(f"{name} {_shown(value)}" for name, value in line.items())
            print(f"{time.perf_counter() - began:4.0f} s  {shown}", flush=True)
    report.write(args, "attention", rows)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
