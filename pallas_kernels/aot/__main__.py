"""python -m pallas_kernels.aot: compiles every case with the real compilers of devices that are not there.

    python -m pallas_kernels.aot --target h100 --target v5e --op tree_attention --case 'verify8'

Each target is compiled for in a process of its own, one after another. A program fails where
the compiler refuses it, where it takes more temporary memory than its inputs justify (a copy
of the page pool, of weights, of logits), where a donated pool is not updated in place, where
a GPU kernel spills registers, or where the kernel is not in the executable. The exit status
is 0 where everything passes, 1 where something fails, 2 where a compiler is missing.

The programs of this library's operations come from their cases. The commit and the round are the
engine's, and others may be a function's ("package.module:function"): see `programs`.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.aot.programs import known
from pallas_kernels.aot.table import Outcome, header
from pallas_kernels.aot.targets import EXTRA, TARGETS
from pallas_kernels.commands import Parser

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")

#: libtpu asks a cloud's metadata server for a TPU, and locks the chips of the machine; here there are none.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def versions() -> dict[str, str]:
    """Versions of the compilers' packages that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compile_for(target: str, ops: Sequence[str], case: str, quick: bool) -> list[dict[str, Any]]:
    """Outcomes of one target, from a process of its own, which prints the table's lines as they come."""
    with tempfile.TemporaryDirectory() as scratch:
        result, errors = Path(scratch) / "outcomes.json", Path(scratch) / "stderr"
        command = [sys.executable, "-m", "pallas_kernels.aot.worker", target, "--json", str(result), "--case", case]
        command += [word for op in ops for word in ("--op", op)] + (["--quick"] if quick else [])
        with errors.open("w") as stderr:  # the compilers log much there that says nothing
            status = subprocess.run(command, env=os.environ | _ENVIRONMENT, stderr=stderr).returncode
        if status == 0:
            return json.loads(result.read_text())
        last = "\n".join(errors.read_text().splitlines()[-15:])
        print(f"{target}: the compiling process ended with status {status}:\n{last}", flush=True)
    crash = Outcome(target, "-", "-", "FAIL", f"the compiling process ended with status {status}")
    return [dataclasses.asdict(crash)]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = Parser("aot", __doc__)
    parser.add_argument(
        "--target", action="append", choices=TARGETS, metavar="NAME",
        help=f"one of {', '.join(TARGETS)}; may be repeated (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--op", action="append", metavar="OP",
        help=f"one of {', '.join(known())}, or package.module:function; may be repeated (default: all)",
    )  # fmt: skip
    parser.add_argument("--case", default="", metavar="REGEX", help="only programs whose name matches (default: all)")
    parser.add_argument("--subset", choices=("ci",), help="ci: what every change is tested with (default: all)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the outcomes there too (default: nowhere)")
    args = parser.parse_args(argv)
    names, ops = args.target or list(TARGETS), args.op or list(known())
    for op in ops:
        if op not in known() and ":" not in op:
            parser.error(f"--op must be one of {', '.join(known())} or package.module:function, got {op!r}")
    try:
        re.compile(args.case)
    except re.error as error:
        parser.error(f"--case must be a regular expression, got {args.case!r}: {error}")
    if missing := {package: name for name in names for package in TARGETS[name].missing()}:
        for package, name in missing.items():
            print(f"{package} is not installed, which holds a part of the compiler for {name}", file=sys.stderr)
        print(f'install the extra that brings every compiler: pip install -e "{EXTRA}"', file=sys.stderr)
        return 2

    found = versions()
    print("compiled by " + ", ".join(f"{name} {version}" for name, version in found.items()))
    outcomes: list[dict[str, Any]] = []
    for name in names:
        print(f"\n{name}\n{header()}", flush=True)
        began = time.perf_counter()
        rows = compile_for(name, ops, args.case, args.subset == "ci")
        verdicts = collections.Counter(row["verdict"] for row in rows)
        summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())) or "no program matches"
        print(f"{name}: {summary} in {time.perf_counter() - began:.0f} s", flush=True)
        outcomes += rows
    if args.json is not None:
        args.json.write_text(json.dumps({"versions": found, "outcomes": outcomes}, indent=1) + "\n")
    # Nothing compiled is nothing proved.
    return 0 if outcomes and all(row["verdict"] == "PASS" for row in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
