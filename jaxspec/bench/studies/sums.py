"""python -m jaxspec.bench.studies.sums: what a small sum over devices takes, by every way that there is.

Chains of 64 sums in one executable, as a step of 32 layers has them, of few rows as wide as a model: microseconds per
sum by the wall clock; whether all devices hold the same bits, in every run, and the largest difference from the exact
result in units of rounding, of one sum (error) and after the chain (drift). A way that the compiler or the device
refuses says why.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.bench.studies import report
from jaxspec.runtime.sharding import tensor_mesh
from jaxspec.runtime.summing import WAYS, measure


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("sums", __doc__)
    add = parser.add_argument
    add("--tensor-parallel", type=int, default=2, metavar="N", help="devices")
    add("--way", nargs="+", choices=sorted(WAYS), default=list(WAYS), help="which, in this order")
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="tokens of a step")
    add("--width", type=int, default=4096, help="of the residual stream")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of what is added up")
    add("--repeats", type=int, default=20, help="chains that are dispatched back to back")
    args = report.parse(parser, argv)
    mesh = tensor_mesh(args.tensor_parallel)
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, {args.dtype}, {args.width} wide, jax {jax.__version__}")
    print("way         rows  us/sum  error  drift  same bits", flush=True)
    rows = []
    for name in args.way:
        for count in args.rows:
            print(f"{name:10s} {count:5d}", end="", flush=True)  # what hangs has its name on the screen
            try:
                found = measure(WAYS[name], mesh, count, args.width, jnp.dtype(args.dtype), args.repeats)
            except Exception as error:  # compilers raise many kinds, and each is this line's result
                print(f"  {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
                break
            told = f"  {1e6 * found.seconds:6.2f}  {found.error:5.2f}  {found.drift:5.2f}"
            print(told, "yes" if found.equal else "NO", "" if found.right(mesh.size) else "WRONG", flush=True)
            rows.append({"way": name, "rows": count, "us": 1e6 * found.seconds, "right": found.right(mesh.size)})
    report.write(args, "sums", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
