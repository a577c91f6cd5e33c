"""Compiles one target's programs and judges what comes out; one process, one target.

Run by the command in a process of its own (`python -m pallas_kernels.aot.worker`), because a
process can hold the compiler of one target only. Prints a line of the table as soon as it
is known.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from pallas_kernels import compilers
from pallas_kernels.aot import ptx
from pallas_kernels.aot.collectives import Collective, collectives
from pallas_kernels.aot.programs import Program, provider
from pallas_kernels.aot.table import Outcome, line
from pallas_kernels.aot.targets import TARGETS, Target
from pallas_kernels.commands import Parser

#: Bytes of registers that a thread of a GPU kernel may spill, stores and loads together: some 50 words around a
#: loop's edges are noise beside a kernel's traffic (latent attention on Mosaic GPU has 388 bytes and is 10% faster on
#: an H200 than without them), a spill inside of a product is many hundred bytes.
MAX_SPILL_BYTES = 400

_VMEM_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]+)\]\{[^{}]*S\(1\)[^{}]*\}")


def largest_in_vmem(hlo: str) -> int:
    """Bytes of the largest array that a TPU executable's text places in VMEM outside of kernels.

    Such arrays do not count as temporary memory: XLA brings operands there ahead of their use,
    and a copy of logits, or of a small pool, would not show.
    """
    sizes = [0]
    for dtype, dims in set(_VMEM_ARRAY.findall(hlo)):
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
        sizes.append(math.prod(map(int, dims.split(","))) * bits // 8)
    return max(sizes)


def faults(
    program: Program, outcome: Outcome, kernels: list[str], exchanged: Sequence[Collective] = ()
) -> list[str]:  # fmt: skip
    """What is wrong with an executable, in words.

    Args:
      kernels: names of the program's kernels that the executable holds.
      exchanged: its collectives.
    """
    found = []
    temp, alias, spill = outcome.temp_bytes or 0, outcome.alias_bytes or 0, outcome.spill_bytes or 0
    if temp > program.max_temp_bytes:
        found.append(f"{temp} temp bytes, allowed are {program.max_temp_bytes} ({program.limit})")
    allowed = program.max_temp_bytes if program.max_vmem_bytes is None else program.max_vmem_bytes
    if (vmem := outcome.vmem_bytes or 0) > allowed:
        found.append(f"an array of {vmem} bytes in VMEM, allowed are {allowed} ({program.limit})")
    if alias < program.in_place_bytes:
        found.append(f"{alias} bytes are updated in place, donated are {program.in_place_bytes}")
    if spill > MAX_SPILL_BYTES:
        found.append(f"{spill} bytes of spills, allowed are {MAX_SPILL_BYTES}")
    num_bytes = sum(one.num_bytes for one in exchanged)
    if program.max_collective_bytes is not None and num_bytes > program.max_collective_bytes:
        found.append(f"{num_bytes} bytes of collectives, allowed are {program.max_collective_bytes}")
    if program.max_collectives is not None and len(exchanged) > program.max_collectives:
        found.append(f"{len(exchanged)} collectives, allowed are {program.max_collectives}")
    if missing := sorted(set(program.kernels) - set(kernels)):
        found.append(f"the executable holds no kernel {', '.join(missing)}")
    return found


def examine(program: Program, target: Target) -> Outcome:
    """Compiles a program and judges it; what the compiler refuses is an outcome too."""
    outcome = Outcome(target.name, program.op, program.name, "FAIL", max_temp_bytes=program.max_temp_bytes)
    if program.refusal is not None:
        return dataclasses.replace(outcome, verdict="REFUSED", reason=program.refusal)
    began = time.perf_counter()
    try:
        lowered = program.lower()
        took = time.perf_counter() - began
        outcome = dataclasses.replace(outcome, lower_seconds=took)
        with tempfile.TemporaryDirectory() as scratch:
            # A directory of its own, so that the kernels found in it are this program's.
            options = {"xla_dump_to": scratch, "xla_dump_emitter_re": "ptx"} if target.kind == "gpu" else {}
            options |= compilers.options(target.platform, target.name.upper())  # near enough to what devices say
            began = time.perf_counter()
            compiled = lowered.compile(compiler_options=options)
            took = time.perf_counter() - began
            usage = ptx.usage(Path(scratch), program.kernels) if target.kind == "gpu" else []
    except Exception as error:  # compilers raise many kinds, and each is this line's result
        text = re.sub(r"\s+", " ", str(error))[:400]
        return dataclasses.replace(outcome, reason=f"{type(error).__name__}: {text}")
    memory = compiled.memory_analysis()
    outcome = dataclasses.replace(
        outcome, compile_seconds=took, temp_bytes=memory.temp_size_in_bytes, alias_bytes=memory.alias_size_in_bytes
    )
    if target.kind == "gpu":
        text = lowered.as_text()  # which has the code of Mosaic's kernels by name; no PTX of theirs is dumped
        there = lambda name: f"{name}_mosaic_gpu" in text or any(ptx.belongs(u.entry, name) for u in usage)
        kernels = [name for name in program.kernels if there(name)]
        if usage:
            outcome = dataclasses.replace(
                outcome,
                code_bytes=sum(u.code_bytes for u in usage),
                registers=max(u.registers for u in usage),
                spill_bytes=max(u.spill_bytes for u in usage),
            )
    else:
        kernels = re.findall(r'kernel_name = "([^"]+)"', lowered.as_text())
        vmem = largest_in_vmem(compiled.as_text())
        outcome = dataclasses.replace(outcome, code_bytes=memory.generated_code_size_in_bytes, vmem_bytes=vmem)
    exchanged = [] if program.max_collective_bytes is None else collectives(compiled.as_text())
    wrong = faults(program, outcome, kernels, exchanged)
    return dataclasses.replace(outcome, verdict="FAIL" if wrong else "PASS", reason="; ".join(wrong))


def main(argv: list[str] | None = None) -> None:
    """Compiles what is asked for and writes the outcomes as JSON."""
    parser = Parser("aot.worker", __doc__)
    parser.add_argument("target", choices=TARGETS, metavar="TARGET", help="device that is compiled for")
    parser.add_argument("--op", action="append", required=True, help="as of pallas_kernels.aot; may be repeated")
    parser.add_argument("--case", default="", metavar="REGEX", help="only programs whose name matches (default: all)")
    parser.add_argument("--quick", action="store_true", help="what every change is tested with (default: all)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="write the outcomes there")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    # A compiler without its device writes the cache but cannot read it.
    jax.config.update("jax_enable_compilation_cache", False)
    target = TARGETS[args.target]
    outcomes = []
    for op in args.op:
        for program in provider(op)(target):
            if re.search(args.case, program.name) and (program.quick or not args.quick):
                outcomes.append(examine(program, target))
                print(line(outcomes[-1]), flush=True)
    args.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    sys.exit(main())
