"""python -m jaxspec.bench.studies.clusters: attention of few requests by clusters, or in two kernels.

Device microseconds by the profiler of each form's kernels (XLA's list of items left out) beside the form that the
library chooses for a page table of the longest request (`mosaic_near.MEMBERS` and `MOST_BLOCKS`): of one request few KV
heads, and of several requests equal and unequal lengths, in bfloat16 with 4 query heads of 128 channels a KV head,
without a mask. Calls go through the pages of a pool that no cache holds. The time between two launches does not show.
Results of all forms must have the same bits.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.studies import report
from pallas_kernels.profile import Event, record
from pallas_kernels.sizes import MULTIPROCESSORS
from pallas_kernels.tree_attention import gpu_mosaic, mosaic_near
from pallas_kernels.tree_attention.cases import Case
from pallas_kernels.tree_attention.mosaic_few import Few
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

#: Bytes of pages that calls go through, several times what a cache holds.
_POOL_BYTES = 256 << 20
_PAGE = 64
#: Tokens of the requests of a call, by KV heads: whole pages, so that tables have no room for more.
LENGTHS: dict[int, tuple[tuple[int, ...], ...]] = {
    **{kv_heads: ((1984,), (8000,), (32000,)) for kv_heads in (1, 2, 4)},
    8: (
        *((long, *[512] * (batch - 1)) for batch in (2, 4, 8) for long in (4032, 8000)),
        (1024,) * 3,
        (4032,) * 3,
        (4032, 512, 512),
    ),
}
#: Forms by the programs of a cluster; 0 is two kernels.
FORMS = 0, 2, 4, 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """Calls that differ in their lengths alone."""

    kv_heads: int
    batch: int
    nodes: int

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        """See LENGTHS."""
        return [lengths for lengths in LENGTHS[self.kv_heads] if len(lengths) == self.batch]

    def case(self, tokens: int) -> Case:
        """With a table of so many tokens a request."""
        case = Case("clusters", self.batch, self.nodes, 4 * self.kv_heads, self.kv_heads, context=tokens, mask="causal")
        return dataclasses.replace(case, pool=_POOL_BYTES // (2 * self.kv_heads * _PAGE * case.wide))

    def kernel(self, programs: int) -> Few:
        """By which the library chooses."""
        case = self.case(_PAGE)
        heads = case.heads, case.kv_heads, case.head_dim
        return Few(self.batch, self.nodes, self.nodes, *heads, _PAGE, True, None, 0.1, programs, 2, False)

    def fits(self, form: int, tokens: int, programs: int) -> bool:
        """Whether clusters run at once and have room for a table of so many tokens."""
        if not form:
            return True
        try:
            mosaic_near.check(self.kernel(programs), tokens, form)
        except ValueError:
            return False
        return form * self.batch * self.kv_heads <= programs

    def tokens(self, form: int, programs: int) -> int:
        """Of the longest of its requests that a form has room for; 0: none."""
        return max((n for n in map(max, self.lengths) if self.fits(form, n, programs)), default=0)


def compiled(shape: Shape, form: int, tokens: int) -> Any:
    """A form's executable for tables of so many tokens."""
    run = functools.partial(gpu_mosaic.tree_attention, members=form)
    return jax.jit(run).lower(shape.case(tokens).shapes()).compile()


def drawn(shape: Shape, pages: jax.Array) -> TreeAttentionArgs:
    """Arguments, but for tables and lengths."""
    rng, like = np.random.default_rng(0), shape.case(_PAGE).shapes()
    normal = lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)).astype(x.dtype)
    new = {name: normal(getattr(like, name)) for name in ("q_BNHC", "tree_k_BTGC", "tree_v_BTGC")}
    return dataclasses.replace(like, pages=pages, **new)


def tables(shape: Shape, lengths: Sequence[int], count: int) -> list[np.ndarray]:
    """At most so many page tables, of different pages."""
    used = [length // _PAGE for length in lengths]
    pool, size = np.random.default_rng(1).permutation(shape.case(_PAGE).num_pages), sum(used)
    found = []
    for i in range(min(count, len(pool) // size)):
        table = np.zeros((shape.batch, max(used)), np.int32)
        for row, own in zip(table, np.split(pool[i * size :][:size], np.cumsum(used)[:-1]), strict=True):
            row[: len(own)] = own
        found.append(table)
    return found


def by_call(found: Sequence[Event], count: int) -> list[list[float]]:
    """Of each of so many calls its kernels' microseconds; a call is one kernel, or one and the merge behind it."""
    own = [event for event in found if "tree_attention" in event.name]
    begins = [i for i, event in enumerate(own) if "merge" not in event.name]
    if len(begins) != count:
        raise RuntimeError(f"the profile has {len(begins)} calls, {count} were made")
    parts = itertools.pairwise([*begins, len(own)])
    return [[1e6 * event.seconds for event in own[first:end]] for first, end in parts]


def measured(
    shape: Shape, calls: dict[int, tuple[int, Any]], pages: jax.Array, programs: int, repeats: int
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each of a shape's lengths, all from one profile.

    Args:
      calls: by form the tokens of its tables and its executable.
    """
    args, rows, jobs = drawn(shape, pages), [], []

    def of(form: int, table: np.ndarray, lengths: Sequence[int]) -> tuple[Any, TreeAttentionArgs]:
        tokens, call = calls[form]
        table = np.pad(table, ((0, 0), (0, tokens // _PAGE - table.shape[1])))
        length = jnp.asarray(lengths, jnp.int32)
        return call, dataclasses.replace(args, table_BM=jnp.asarray(table), length_B=length)

    for lengths in shape.lengths:
        forms = [form for form, (tokens, _) in calls.items() if max(lengths) <= tokens]
        found = tables(shape, lengths, repeats * len(forms))
        firsts = [of(form, found[0], lengths) for form in forms]
        outs = [call(args) for call, args in firsts]  # all alive, as a result could take another's memory
        want, *others = (np.asarray(out.astype(jnp.float32)) for out in outs)
        order = forms * repeats
        jobs.append((order, [of(form, found[i % len(found)], lengths) for i, form in enumerate(order)]))
        chosen = mosaic_near.members(shape.kernel(programs), max(lengths))
        equal = all(bool((out == want).all()) for out in others)
        rows.append({**dataclasses.asdict(shape), "lengths": lengths, "chosen": chosen, "equal": equal})
    count = sum(len(order) for order, _ in jobs)
    events = record(lambda: [call(args) for _, each in jobs for call, args in each][-1])
    us = iter(by_call(events, count))
    for row, (order, _) in zip(rows, jobs, strict=True):
        own: dict[int, list[list[float]]] = {}
        for form in order:
            own.setdefault(form, []).append(next(us))
        row["us"] = {form: [statistics.median(x) for x in zip(*each, strict=True)] for form, each in own.items()}
        row["least"] = min(own, key=lambda form: sum(row["us"][form]))
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    shown = [" + ".join(f"{x:.2f}" for x in row["us"].get(form, ())) or "-" for form in FORMS]
    long, *short = row["lengths"]
    lengths = f"{long}" + (f" + {len(short)} x {short[0]}" if short else "")
    chosen, least = (f"{row[name] or 'two'}" for name in ("chosen", "least"))
    left = f"{row['kv_heads']:8d}  {row['batch']:5d}  {row['nodes']:5d}  {lengths:15s}  {shown[0]:>14s}"
    bits = "" if row["equal"] else "  BITS DIFFER"
    return left + "".join(f"  {x:>7s}" for x in shown[1:]) + f"  {chosen:>6s}  {least:>5s}{bits}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 1 where bits differ or a form fails."""
    parser = report.parser("clusters", __doc__)
    add = parser.add_argument
    add("--kv-heads", type=int, nargs="+", choices=sorted(LENGTHS), default=sorted(LENGTHS), help="of keys and values")
    add("--nodes", type=int, nargs="+", default=[1, 4], help="tokens of each request, each number for itself")
    add("--repeats", type=int, default=24, help="calls of each form and length, of whose kernels medians are taken")
    add("--within", type=float, default=140, metavar="S", help="seconds after which nothing new is begun")
    args = report.parse(parser, argv, gpu=True)
    began, kind = time.perf_counter(), jax.devices()[0].device_kind
    programs = next((count for name, count in MULTIPROCESSORS.items() if name in kind.lower()), 132)
    print(f"{kind}, jax {jax.__version__}; us, of two kernels each", flush=True)
    print(f"KV heads  batch  nodes  {'lengths':15s}  {'two kernels':>14s}     of 2     of 4     of 8  chosen  least")
    batches = {kv_heads: sorted(set(map(len, LENGTHS[kv_heads]))) for kv_heads in args.kv_heads}
    shapes = [Shape(g, batch, nodes) for g in args.kv_heads for batch in batches[g] for nodes in args.nodes]
    rows, wrong, pages = [], False, None
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        jobs: dict[Shape, dict[int, tuple[int, Any]]] = {}
        for shape in shapes:
            room = {form: shape.tokens(form, programs) for form in FORMS}
            jobs[shape] = {form: (n, pool.submit(compiled, shape, form, n)) for form, n in room.items() if n}
        for shape, forms in jobs.items():
            if time.perf_counter() - began > args.within:
                wrong = True
                print("out of time", flush=True)
                pool.shutdown(wait=False, cancel_futures=True)
                break
            like = shape.case(_PAGE).shapes().pages
            if pages is None or pages.shape != like.shape:
                pages = None  # before the next are made
                pages = jax.random.normal(jax.random.key(0), like.shape, like.dtype)
            try:
                calls = {form: (tokens, job.result()) for form, (tokens, job) in forms.items()}
                found = measured(shape, calls, pages, programs, args.repeats)
            except Exception as error:  # compilers raise many kinds, and each is this shape's result
                wrong = True
                print(f"{shape}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
                continue
            wrong |= not all(row["equal"] for row in found)
            rows += found
            print(*map(line, found), sep="\n", flush=True)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    report.write(args, "clusters", rows)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
