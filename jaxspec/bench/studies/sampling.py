"""python -m jaxspec.bench.studies.sampling: the GPU's sampling kernels against each other, and against the reference.

Device microseconds by the profiler of the kernel on Mosaic GPU, as it is launched and with `--variants` otherwise, and
of the kernel on Triton, with inputs in turn that no cache holds; and in how many of the first requests each differs
from plain XLA. A kernel that the compiler or the device refuses says why.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.bench.studies import report
from pallas_kernels.profile import record
from pallas_kernels.rejection_sampling import gpu, gpu_mosaic, reference
from pallas_kernels.rejection_sampling.cases import COVERAGE, FILTERS, SERVING, Case
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, Verdict

_LLAMA = 128_256
_ROTATE_BYTES = 256 << 20
Sampler = Callable[[RejectionSamplingArgs], Verdict]


def _cases() -> dict[str, Case]:
    """By name: those of the benchmarks and plain rounds of other batches; then those that are only compared."""
    own = [*SERVING]
    own += [Case(f"plain-b{b}", b, 1, _LLAMA, 0, chain=True) for b in (1, 8, 16, 128)]
    own += [
        Case(f"plain-b{b}-{f}", b, 1, _LLAMA, 0, chain=True, rows=(f,)) for b in (1, 64) for f in ("top-k", "top-p")
    ]
    own += [
        Case("chain3-b16", 16, 4, _LLAMA, 3, chain=True),
        Case("plain-b1-greedy", 1, 1, _LLAMA, 0, chain=True, rows=("greedy",)),
        Case("plain-b1-v1024", 1, 1, 1024, 0, chain=True),
        Case("plain-b64-cool", 64, 1, _LLAMA, 0, chain=True, rows=("cool",)),
    ]
    mixed = tuple(FILTERS)
    compared = [dataclasses.replace(case, rows=mixed) for case in COVERAGE]
    compared.append(Case("gemma-b4", 4, 1, 262_144, 0, chain=True, rows=("plain", "top-k", "top-p", "all")))
    return {case.name: case for case in (*own, *compared)}


def _launches(case: Case, variants: bool) -> dict[str, gpu_mosaic.Launch]:
    """By name: the launch that a call gets, and with `variants` others that serve the case."""
    drafts = case.mode == "rejection"
    own = gpu_mosaic.launch_for(case.batch, case.nodes, case.vocab, drafts)
    launches = {"mosaic": own}
    if variants:
        other = 8 if own.members == 16 else 16
        launches[f"{other} members"] = gpu_mosaic.sizes(other, case.vocab, own.walk)
        if case.nodes > 1 and not drafts and (own.walk is False or case.nodes * case.batch <= 64):
            launches["nodes" if own.walk else "walk"] = gpu_mosaic.sizes(own.members, case.vocab, not own.walk)
    return launches


def _ways(case: Case, variants: bool) -> dict[str, Sampler]:
    """The kernels that serve a case."""
    ways: dict[str, Sampler] = {
        name: functools.partial(gpu_mosaic.rejection_sampling, launch=launch)
        for name, launch in _launches(case, variants).items()
    }
    ways["triton"] = gpu.rejection_sampling
    return ways


def _draw(case: Case) -> list[RejectionSamplingArgs]:
    """Several sets of arguments, which no cache holds from call to call unless they are few."""
    first = case.draw(0)
    size = sum(x.nbytes for x in jax.tree.leaves(first))
    return [first, *(case.draw(seed) for seed in range(1, max(1, min(4, -(-_ROTATE_BYTES // size)))))]


def _repeat(call: Sampler, sets: Sequence[RejectionSamplingArgs], count: int) -> Verdict:
    return [call(sets[i % len(sets)]) for i in range(count)][-1]


def _differing(got: Verdict, want: Verdict) -> int:
    """Requests that do not have the same path, token and flag."""
    count = 0
    path, accepted, token, fine = (np.asarray(x) for x in want)
    for row in range(len(token)):
        same = got.finite_B[row] == fine[row]
        if fine[row]:
            upto = slice(accepted[row] + 1)
            same &= got.num_accepted_B[row] == accepted[row] and got.next_token_B[row] == token[row]
            same &= np.array_equal(np.asarray(got.path_BD)[row, upto], path[row, upto])
        count += not same
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("sampling", __doc__)
    add = parser.add_argument
    cases = _cases()
    add("--case", nargs="+", choices=sorted(cases), default=list(cases), metavar="NAME", help="which")
    add("--variants", action="store_true", help="other sizes of a launch beside those that a call gets")
    add("--repeats", type=int, default=20, help="calls that means are taken over")
    add("--within", type=float, default=100, metavar="S", help="seconds after which nothing new is begun")
    args = report.parse(parser, argv, gpu=True)
    began = time.perf_counter()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    compiled: dict[Any, concurrent.futures.Future[Any]] = {}
    drawn: dict[str, concurrent.futures.Future[list[RejectionSamplingArgs]]] = {}
    rows = []
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        for name in args.case:
            case, shapes = cases[name], cases[name].shapes()
            for way, sampler in {**_ways(case, args.variants), "reference": reference.rejection_sampling}.items():
                key = (way, str(shapes))
                if key not in compiled:
                    compiled[key] = pool.submit(lambda s=sampler, x=shapes: jax.jit(s).lower(x).compile())
            drawn[name] = pool.submit(_draw, case)
        for name in args.case:
            if time.perf_counter() - began > args.within:
                print("out of time", flush=True)
                break
            case, shapes = cases[name], cases[name].shapes()
            sets = drawn[name].result()
            want = [compiled["reference", str(shapes)].result()(x) for x in sets[:2]]
            line: dict[str, Any] = {"case": name}
            for way in _ways(case, args.variants):
                print(f"       {name} {way}", flush=True)  # what hangs has its name on the screen
                try:
                    call = compiled[way, str(shapes)].result()
                    line[f"{way} differs"] = sum(_differing(call(x), w) for x, w in zip(sets, want, strict=False))
                    line[f"{way} requests"] = case.batch * len(want)
                    run = functools.partial(_repeat, call, sets, args.repeats)
                    jax.block_until_ready(run())
                    found = record(run)
                    line[way] = 1e6 * sum(event.seconds for event in found) / args.repeats
                    line[f"{way} kernels"] = len(found) / args.repeats
                except Exception as error:  # compilers raise many kinds, and each is this line's result
                    line[way] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            rows.append(line)
            shown = [f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()]
            print(f"{time.perf_counter() - began:5.0f} s  " + "  ".join(shown), flush=True)
    report.write(args, "sampling", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
