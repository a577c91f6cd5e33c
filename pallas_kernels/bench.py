"""python -m pallas_kernels.bench: each kernel against the XLA reference, the best alternative, and the device's floor.

The floor of a case is the time that its fewest bytes take at the measured copy bandwidth
(bytes read plus bytes written a second). Wall-clock times are of calls dispatched back to
back; --device-time sums the kernels' own times from the profiler instead. Inputs rotate
among several sets, so that no cache holds them from call to call.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.profile import record
from pallas_kernels.rejection_sampling import cases as sampling_cases
from pallas_kernels.rejection_sampling.api import rejection_sampling
from pallas_kernels.tree_attention import cases as attention_cases
from pallas_kernels.tree_attention.api import tree_attention

_ROTATE_BYTES = 256 << 20  # several times the largest cache
_MOST_SETS = 8


@dataclasses.dataclass(frozen=True)
class Subject:
    """One case of one operation.

    Attributes:
      draw: seed to arguments.
      calls: {implementation: function of the arguments}; made lazily, since an alternative may copy its inputs.
      floor_bytes: fewest bytes a call must move.
    """

    op: str
    name: str
    draw: Callable[[int], tuple[Any, ...]]
    calls: dict[str, Callable[..., Any]]
    floor_bytes: Callable[[tuple[Any, ...]], float]
    prepare: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = dataclasses.field(default_factory=dict)


def _attention_subjects(kernel: str | None) -> Iterator[Subject]:
    for case in attention_cases.SERVING:

        def run(*args: jax.Array, case: Any = case, implementation: str = "reference") -> jax.Array:
            return tree_attention(*args, **case.options, implementation=implementation)

        calls: dict[str, Callable[..., Any]] = {"reference": jax.jit(run)}
        if kernel is not None:
            ours = jax.jit(lambda *args, run=run: run(*args, implementation=kernel))
            calls = {kernel: ours, **calls}
        prepare = {}
        if _torch() is not None and case.lengths == "full":
            calls["torch sdpa, contiguous, unmasked"] = _sdpa
            prepare["torch sdpa, contiguous, unmasked"] = _dense_inputs
        yield Subject(
            "tree_attention", case.name, lambda seed, case=case: tuple(case.draw(seed).values()), calls,
            lambda args, case=case: case.min_bytes(args[3]), prepare,
        )  # fmt: skip


def _torch() -> Any:
    """PyTorch where it is installed and sees a GPU, else None."""
    if jax.default_backend() != "gpu":
        return None
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _dense_inputs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The pages gathered into contiguous keys and values, as PyTorch tensors [B, heads, L, C]."""
    torch = _torch()
    q, pages, table, _, tree_k, tree_v, _ = args
    c = q.shape[-1]
    kv = jnp.take(pages, table, axis=0).transpose(0, 2, 1, 3, 4)  # [B, G, M, page, 2C]
    kv = kv.reshape(*kv.shape[:2], -1, 2 * c)
    k = jnp.concatenate([kv[..., :c], tree_k.transpose(0, 2, 1, 3)], axis=2)
    v = jnp.concatenate([kv[..., c:], tree_v.transpose(0, 2, 1, 3)], axis=2)
    return tuple(torch.from_dlpack(x).contiguous() for x in (q.transpose(0, 2, 1, 3), k, v))


def _sdpa(q: Any, k: Any, v: Any) -> Any:
    return _torch().nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _sampling_subjects(kernel: str | None) -> Iterator[Subject]:
    for case in sampling_cases.SERVING:

        def run(*args: Any, case: Any = case, implementation: str = "reference") -> Any:
            return rejection_sampling(*args, **case.options, implementation=implementation)

        calls: dict[str, Callable[..., Any]] = {"reference": jax.jit(run)}
        if kernel is not None:
            ours = jax.jit(lambda *args, run=run: run(*args, implementation=kernel))
            calls = {kernel: ours, **calls}
        yield Subject(
            "rejection_sampling", case.name, lambda seed, case=case: tuple(case.draw(seed).values()), calls,
            lambda args, case=case, run=run: case.min_bytes(float(jax.jit(run)(*args).num_accepted_B.mean())),
        )  # fmt: skip


def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second by the best large copy at hand (XLA's, and PyTorch's where present)."""
    count = 1 << (30 if jax.default_backend() != "cpu" else 24)
    x = jnp.ones((count,), jnp.bfloat16)
    copies = 10
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, copies, lambda _, y: -y, x))
    jax.block_until_ready(loop(x))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(loop(x))
        seconds.append((time.perf_counter() - began) / copies)
    best = min(seconds)
    torch = _torch()
    if torch is not None:
        a = torch.ones(count, dtype=torch.bfloat16, device="cuda")
        b = torch.empty_like(a)
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(copies):
                b.copy_(a)
            torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - began) / copies)
        del a, b
        torch.cuda.empty_cache()
    return 2 * x.nbytes / best


def _wait(result: Any) -> None:
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result)):
        jax.block_until_ready(result)
    elif _torch() is not None:
        _torch().cuda.synchronize()


def seconds_per_call(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]], repeats: int, device: bool) -> float:
    """Median seconds a call, over rounds that use every input set once."""
    _wait(call(*sets[0]))
    if device:
        found = record(lambda: [call(*sets[i % len(sets)]) for i in range(repeats)][-1])
        if found:
            return sum(event.seconds for event in found) / repeats
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = None
        for args in sets:
            result = call(*args)
        _wait(result)
        times.append((time.perf_counter() - began) / len(sets))
    return statistics.median(times)


def measure(subject: Subject, bandwidth: float, repeats: int, device: bool) -> Iterator[dict[str, Any]]:
    """One row for each implementation of a case."""
    first = subject.draw(0)
    size = sum(x.nbytes for x in jax.tree.leaves(first))
    count = max(1, min(_MOST_SETS, -(-_ROTATE_BYTES // size)))
    sets = [first, *(subject.draw(seed) for seed in range(1, count))]
    floor = subject.floor_bytes(first)
    for name, call in subject.calls.items():
        make = subject.prepare.get(name)
        mine = [make(args) for args in sets] if make else sets
        by_device = device and not make  # the profiler follows JAX's kernels only
        seconds = seconds_per_call(call, mine, repeats, by_device)
        yield {
            "op": subject.op,
            "case": subject.name,
            "implementation": name,
            "us": 1e6 * seconds,
            "clock": "device" if by_device else "wall",
            "gb_per_s": floor / seconds / 1e9,
            "floor_us": 1e6 * floor / bandwidth,
            "floor_share": floor / bandwidth / seconds,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    line = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=line)
    add = parser.add_argument
    add("--op", choices=("tree_attention", "rejection_sampling"), help="default: all")
    add("--case", default="", metavar="REGEX", help="cases whose names match")
    add("--device-time", action="store_true", help="kernels' own times from the profiler instead of the wall clock's")
    add("--repeats", type=int, default=20)
    add("--bandwidth", type=float, help="TB/s of the floor; default: measured first")
    add("--json", metavar="FILE")
    args = parser.parse_args(argv)

    backend = jax.default_backend()
    kernel = {"gpu": "gpu", "tpu": "tpu"}.get(backend)
    if kernel is None:
        print(f"note: backend {backend!r} has no kernel; only the reference is measured", file=sys.stderr)
    bandwidth = args.bandwidth * 1e12 if args.bandwidth else copy_bandwidth()
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(
        f"{'case':28s} {'implementation':34s} {'us':>9s} {'clock':>6s} {'GB/s':>7s} {'floor us':>9s} {'of floor':>8s}"
    )
    rows = []
    for subject in (*_attention_subjects(kernel), *_sampling_subjects(kernel)):
        if (args.op and subject.op != args.op) or not re.search(args.case, subject.name):
            continue
        for row in measure(subject, bandwidth, args.repeats, args.device_time):
            rows.append(row)
            print(
                f"{row['case']:28s} {row['implementation']:34s} {row['us']:9.1f} {row['clock']:>6s} "
                f"{row['gb_per_s']:7.0f} {row['floor_us']:9.1f} {row['floor_share']:8.1%}",
                flush=True,
            )
    if args.json:
        conditions = {**vars(args), "device": device, "jax": jax.__version__, "bandwidth": bandwidth}
        del conditions["json"]
        Path(args.json).write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
