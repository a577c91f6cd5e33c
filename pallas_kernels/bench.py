"""python -m pallas_kernels.bench: each kernel against the XLA reference, the best alternative, and the device's floor.

The floor of a case is the time that its fewest bytes take at the measured copy bandwidth
(bytes read plus bytes written a second). Wall-clock times are of calls dispatched back to
back; --device-time sums the kernels' own times from the profiler instead. Inputs rotate
among several sets, so that no cache holds them from call to call.
"""

from __future__ import annotations

import functools
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

from pallas_kernels.commands import Parser
from pallas_kernels.dispatch import Operation
from pallas_kernels.profile import record
from pallas_kernels.registry import OPERATIONS, Case, suite

_ROTATE_BYTES = 256 << 20  # several times the largest cache
_MOST_SETS = 8


def _torch() -> Any:
    """PyTorch where it is installed and sees a GPU, else None."""
    if jax.default_backend() != "gpu":
        return None
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second by the best large copy at hand (XLA's, and PyTorch's where present)."""
    count, copies, seconds = 1 << (30 if jax.default_backend() != "cpu" else 24), 10, []
    x = jnp.ones((count,), jnp.bfloat16)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, copies, lambda _, y: -y, x))
    jax.block_until_ready(loop(x))
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(loop(x))
        seconds.append((time.perf_counter() - began) / copies)
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
            seconds.append((time.perf_counter() - began) / copies)
        del a, b
        torch.cuda.empty_cache()
    return 2 * x.nbytes / min(seconds)


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


def measure(
    operation: Operation[Any, Any], case: Case[Any, Any], bandwidth: float, repeats: int, device: bool,
    named: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One row for the backend's kernel, the reference, and each alternative to a case; or for the named ones."""
    first = case.draw(0)
    size = sum(x.nbytes for x in jax.tree.leaves(first))
    count = max(1, min(_MOST_SETS, -(-_ROTATE_BYTES // size)))
    sets = [first, *(case.draw(seed) for seed in range(1, count))]
    floor = case.min_bytes(first)
    ways = operation.implementations
    names = [name for name in named or (jax.default_backend(), "reference") if name in ways]
    names = [name for name in names if ways[name].refusal(first) is None]
    ours = {name: (lambda x: (x,), jax.jit(functools.partial(operation, implementation=name))) for name in names}
    others = case.alternatives(torch) if not named and (torch := _torch()) is not None else {}
    for name, (prepare, call) in {**ours, **others}.items():
        by_device = device and name in ours  # the profiler follows JAX's kernels only
        seconds = seconds_per_call(call, [prepare(args) for args in sets], repeats, by_device)
        yield {
            "op": operation.name,
            "case": case.name,
            "implementation": name,
            "us": 1e6 * seconds,
            "clock": "device" if by_device else "wall",
            "gb_per_s": floor / seconds / 1e9,
            "floor_us": 1e6 * floor / bandwidth,
            "floor_share": floor / bandwidth / seconds,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = Parser("bench", __doc__)
    add = parser.add_argument
    add("--op", choices=tuple(OPERATIONS), help="default: all of them")
    add("--case", default="", metavar="REGEX", help="cases whose names match (default: all)")
    add("--device-time", action="store_true", help="kernels' own times from the profiler (default: the wall clock's)")
    add("--implementation", nargs="+", default=[], metavar="NAME", help="these only, where they serve a case (default: "
        "the backend's, the reference and a case's alternatives)")  # fmt: skip
    add("--repeats", type=int, default=20, help="medians are taken over these (default: %(default)s)")
    add("--bandwidth", type=float, help="TB/s of the floor; default: measured first")
    add("--json", metavar="FILE", help="write conditions and rows there (default: nowhere)")
    args = parser.parse_args(argv)
    try:
        pattern = re.compile(args.case)
    except re.error as error:
        parser.error(f"--case must be a regular expression, got {args.case!r}: {error}")
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if args.bandwidth is not None and not args.bandwidth > 0:
        parser.error(f"--bandwidth must be above 0, got {args.bandwidth:g}")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"--json {args.json!r}: its directory does not exist")
    suites = [suite(name) for name in OPERATIONS if args.op in (None, name)]
    known = list(dict.fromkeys(name for s in suites for name in s.operation.implementations))
    if unknown := [name for name in args.implementation if name not in known]:
        parser.error(f"--implementation must be of {known}, got {unknown}")
    cases = [(s.operation, case) for s in suites for case in s.serving if pattern.search(case.name)]
    if not cases:
        parser.error(f"--case {args.case!r} matches none of {[case.name for s in suites for case in s.serving]}")

    if (backend := jax.default_backend()) not in ("gpu", "tpu"):
        print(f"note: backend {backend!r} has no kernel; only the reference is measured", file=sys.stderr)
    bandwidth = args.bandwidth * 1e12 if args.bandwidth is not None else copy_bandwidth()
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(
        f"{'case':28s} {'implementation':34s} {'us':>9s} {'clock':>6s} {'GB/s':>7s} {'floor us':>9s} {'of floor':>8s}"
    )
    rows = []
    for operation, case in cases:
        for row in measure(operation, case, bandwidth, args.repeats, args.device_time, args.implementation):
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
