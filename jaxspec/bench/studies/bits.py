"""python -m jaxspec.bench.studies.bits: whether a token's bits depend on what is computed beside it, part by part.

In bfloat16 speculation repeats plain decoding where every part of a pass gives a row the same bits alone, among the
rows of a verified chain, and beside other requests. Random weights in the shapes of Llama 3.1 8B's layers, each part
alone: the first row of 1 to 128 for products, and for attention the tokens of a chain verified at once against the same
tokens one after the other, the earlier ones already in the pages, in batches of 1 to 128 requests of many lengths.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.studies import report
from jaxspec.bench.studies.few_rows import NAMES, SHAPES, inputs, run, weight
from pallas_kernels.small_batch import gpu, reference
from pallas_kernels.small_batch.reference import Stream
from pallas_kernels.tree_attention.api import tree_attention

#: Rows of a plain step at batch 1 and 8, of chains of 3 and 5 at batch 1, of 3 at batch 8 and 32, and others between.
ROWS = (1, 4, 6, 8, 32, 40, 128)
SHAPE, PAGE = SHAPES["8b"], 64


def products(name: str) -> Iterator[tuple[str, bool]]:
    """Whether each kernel's first row has the same bits among any number of rows."""
    for i, (part, shape) in enumerate(SHAPE.weights.items()):
        w = {part: weight(jax.random.key(i), name, *shape, invariant=True)}
        call = jax.jit(lambda w, rows, part=part: run(SHAPE, part, w, rows, True))
        served = [m for m in ROWS if name == "bf16" or m <= reference.FEW_ROWS]
        yield f"{name} {part}", first_rows(lambda m, call=call, w=w: call(w, padded(m)), served)


def padded(m: int) -> dict[str, Any]:
    """As `models.few_rows` pads: beyond 8 to whole groups of 8."""
    return inputs(SHAPE, m if m <= 8 else -(-m // 8) * 8)


def first_rows(call: Callable[[int], Any], counts: Sequence[int] = ROWS) -> bool:
    """Whether the first row of results is the same for so many; sums of squares have rows last."""
    turn = lambda result: result._replace(squares_TR=result.squares_TR.T) if isinstance(result, Stream) else result
    found = [[leaf[0] for leaf in jax.tree.leaves(turn(call(m)))] for m in counts]
    return all(bool((a == b).all()) for other in found for a, b in zip(found[0], other, strict=True))


def beginning() -> Iterator[tuple[str, bool]]:
    """The sums of squares that XLA makes for the first kernel."""
    call = jax.jit(functools.partial(reference.begin, in_order=True))
    yield "begin", first_rows(lambda m: call(padded(m)["out"], padded(m)["gain"]))


def output_layer() -> Iterator[tuple[str, bool]]:
    """The output layer by its kernel and by XLA."""
    w = weight(jax.random.key(3), "bf16", SHAPE.embed, SHAPE.vocabulary)
    by_kernel, by_xla = jax.jit(gpu.logits), jax.jit(reference.logits)
    yield "output layer", first_rows(lambda m: by_kernel(padded(m)["out"], w))
    # One row is padded to two, as `layers.product` does.
    yield "output layer by XLA", first_rows(lambda m: by_xla(inputs(SHAPE, max(2, m))["out"], w))


def lengths_around(context: int) -> jax.Array:
    """Prefixes of 128 requests: the given one, and others from which chains cross what kernels may cut at."""
    edges = [tokens - back for tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192) for back in (1, 2, 5)]
    return jnp.tile(jnp.asarray([context, 0, 1, *edges, 63, 700, 3000, 5000, 6500], jnp.int32), 4)


def attention(context: int, implementation: str | None) -> Iterator[tuple[str, bool]]:
    """Chains against tokens one by one, and both beside other requests."""
    me = f"attention, {implementation or 'default'}"
    heads, kv, c = *SHAPE.heads[:2], 128
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)
    all_lengths = lengths_around(context)
    most = len(all_lengths)
    columns = -(-(int(all_lengths.max()) + PAGE) // PAGE)
    pages = normal(1, most * columns, kv, PAGE, 2 * c)
    all_tables = jax.random.permutation(jax.random.key(9), most * columns).astype(jnp.int32).reshape(most, columns)
    call = jax.jit(functools.partial(tree_attention, implementation=implementation))
    put = jax.jit(lambda pages, page_B, row_B, k, v: pages.at[page_B, :, row_B].set(jnp.concatenate([k, v], axis=-1)))
    for depth in (3, 5):
        n = depth + 1
        news = [normal(seed, most, n, count, c) for seed, count in ((2, heads), (3, kv), (4, kv))]
        first = None
        for batch in (1, 8, 32, most):
            table, lengths = all_tables[:batch], all_lengths[:batch]
            q, k, v = (x[:batch] for x in news)
            chain = call(q, pages, table, lengths, k, v)
            first = chain[0] if first is None else first
            yield f"{me}: chain-{depth} at batch 1 and {batch}", bool((chain[0] == first).all())
            filled, same = pages, []
            for j in range(n):
                at = (slice(None), slice(j, j + 1))
                one = call(q[at], filled, table, lengths + j, k[at], v[at])
                same.append(bool((one[:, 0] == chain[:, j]).all()))
                column_B, row_B = jnp.divmod(lengths + j, PAGE)
                page_B = jnp.take_along_axis(table, column_B[:, None], axis=1)[:, 0]
                filled = put(filled, page_B, row_B, k[:, j], v[:, j])
            yield f"{me}: chain-{depth} and its tokens one by one at batch {batch} {same}", all(same)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 1 where some part's bits depend on the rows."""
    parser = report.parser("bits", __doc__)
    parser.add_argument("--formats", nargs="*", choices=NAMES, default=["bf16"], help="of the weights")
    parser.add_argument("--context", type=int, default=1000, help="tokens of a prefix")
    args = report.parse(parser, argv, gpu=True)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, rows {ROWS}")
    ways = [None] if gpu.supported() is not None else [None, "batch_invariant"]
    parts = [products(name) for name in args.formats] + [attention(args.context, way) for way in ways]
    parts += [beginning(), output_layer()]
    rows = []
    for part in parts:
        for name, same in part:
            print(f"{'same' if same else 'DIFFER':6s}  {name}", flush=True)
            rows.append({"part": name, "same": same})
    report.write(args, "bits", rows)
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
