"""python -m jaxspec.bench.studies.bits: whether a token's bits depend on what is computed beside it, part by part.

In bfloat16 speculation repeats plain decoding where every part of a pass gives a row the same bits alone, among the
rows of a verified chain, and beside other requests. Random weights in the shapes of Llama 3.1 8B's layers, each part
alone: the first row of 1 to 32 for products, and for attention the tokens of a chain verified at once against the same
tokens one after the other, the earlier ones already in the pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.studies import report
from jaxspec.bench.studies.few_rows import NAMES, SHAPES, inputs, run, weight
from pallas_kernels.small_batch import gpu, reference
from pallas_kernels.tree_attention.api import tree_attention

#: Rows of a plain step at batch 1 and 8, of chains of 3 and 5 at batch 1 and of 3 at batch 8.
ROWS = (1, 4, 6, 8, 32)
SHAPE, PAGE = SHAPES["8b"], 64


def products(name: str) -> Iterator[tuple[str, bool]]:
    """Whether each kernel's first row has the same bits among any number of rows."""
    for i, (part, shape) in enumerate(SHAPE.weights.items()):
        w = {part: weight(jax.random.key(i), name, *shape)}
        call = jax.jit(lambda w, rows, part=part: run(SHAPE, part, w, rows, True))
        yield f"{name} {part}", first_rows(lambda m, call=call, w=w: call(w, padded(m)))


def padded(m: int) -> dict[str, Any]:
    """As `models.few_rows` pads: beyond 8 to whole groups of 8."""
    return inputs(SHAPE, m if m <= 8 else -(-m // 8) * 8)


def first_rows(call: Callable[[int], Any]) -> bool:
    """Whether the first row of results is the same for all ROWS; sums of squares have rows last."""
    row = lambda leaf: leaf[:, 0] if leaf.shape[0] in (64, 128) and leaf.dtype == jnp.float32 else leaf[0]
    found = [[row(leaf) for leaf in jax.tree.leaves(call(m))] for m in ROWS]
    return all(bool((a == b).all()) for other in found for a, b in zip(found[0], other, strict=True))


def output_layer() -> Iterator[tuple[str, bool]]:
    """The output layer by its kernel and by XLA."""
    w = weight(jax.random.key(3), "bf16", SHAPE.embed, SHAPE.vocabulary)
    by_kernel, by_xla = jax.jit(gpu.logits), jax.jit(reference.logits)
    yield "output layer", first_rows(lambda m: by_kernel(padded(m)["out"], w))
    # One row is padded to two, as `layers.product` does.
    yield "output layer by XLA", first_rows(lambda m: by_xla(inputs(SHAPE, max(2, m))["out"], w))


def attention(context: int) -> Iterator[tuple[str, bool]]:
    """Chains against tokens one by one, and both beside other requests."""
    heads, kv, c = *SHAPE.heads[:2], 128
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)
    columns = -(-(context + PAGE) // PAGE)
    pages = normal(1, 8 * columns, kv, PAGE, 2 * c)
    table = jnp.arange(8 * columns, dtype=jnp.int32).reshape(8, columns)
    call = jax.jit(tree_attention)
    for depth in (3, 5):
        n = depth + 1
        q, k, v = (normal(seed, 8, n, count, c) for seed, count in ((2, heads), (3, kv), (4, kv)))
        lengths = jnp.full((8,), context, jnp.int32)
        chain = call(q, pages, table, lengths, k, v)
        alone = call(q[:1], pages, table[:1], lengths[:1], k[:1], v[:1])
        yield f"attention, chain-{depth} at batch 1 and 8", bool((chain[:1] == alone).all())
        filled, same = pages, []
        for j in range(n):
            at = (slice(j, j + 1),)
            one = call(q[:1, *at], filled, table[:1], lengths[:1] + j, k[:1, *at], v[:1, *at])
            same.append(bool((one[0, 0] == alone[0, j]).all()))
            page, row = divmod(context + j, PAGE)
            filled = filled.at[table[0, page], :, row].set(jnp.concatenate([k[0, j], v[0, j]], axis=-1))
        yield f"attention, chain-{depth} and its tokens one by one {same}", all(same)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 1 where some part's bits depend on the rows."""
    parser = report.parser("bits", __doc__)
    parser.add_argument("--formats", nargs="*", choices=NAMES, default=["bf16"])
    parser.add_argument("--context", type=int, default=1000, help="tokens of a prefix")
    args = parser.parse_args(argv)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, rows {ROWS}")
    parts = [products(name) for name in args.formats] + [attention(args.context), output_layer()]
    rows = []
    for part in parts:
        for name, same in part:
            print(f"{'same' if same else 'DIFFER':6s}  {name}", flush=True)
            rows.append({"part": name, "same": same})
    report.write(args, "bits", rows)
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
