"""The second kernel of attention with equal bits: adds the items' sums in the one order, from wherever they stopped."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import mosaic_rows
from pallas_kernels.tree_attention.mosaic_launch import Launch
from pallas_kernels.tree_attention.mosaic_plan import FEW, GROUP
from pallas_kernels.tree_attention.mosaic_rows import MASKED, ROWS, div, params, rem

#: Threads, and how a value for each lies.
_LANES = 128
_LINE = plgpu.Layout.WG_STRIDED((_LANES,), 1)

#: Weighted values, maxima and weights.
Sums = tuple[jax.Array, ...]


def _body(kernel: Launch, sinks: bool, ins: dict[str, Any], out: Any) -> None:
    """Adds the items' sums of 128 channels in their order: of one query head, or of two."""
    c, count = kernel.head_dim, _LANES // kernel.head_dim
    line = lax.axis_index("program")
    row = line * count  # of [B, N, H]
    b, node = div(row, kernel.nodes * kernel.heads), rem(div(row, kernel.heads), kernel.nodes)
    first, end, long, last, per = (ins["ends"][i, b] for i in range(5))
    lane = kernel.iota((_LANES,), 0, _LINE)
    fused = functools.partial(mosaic_rows.fused, layout=_LINE, pretend=kernel.interpret)
    cast = lambda x: kernel.cast(x, _LINE)
    full = lambda value: cast(jnp.full((_LANES,), value, jnp.float32))
    start = full(0.0), full(MASKED), full(0.0)
    places = []  # of the query heads: tile and row among a KV head's
    for i in range(count):
        head = rem(row + i, kernel.heads)
        at = node * kernel.group + rem(head, kernel.group)
        places.append((div(head, kernel.group) * kernel.tiles + div(at, ROWS), rem(at, ROWS)))

    def choose(values: Sequence[Any]) -> jax.Array:
        """Of each lane's query head."""
        found = cast(jnp.full((_LANES,), values[0], jnp.float32))
        for i, value in enumerate(values[1:], 1):
            found = jnp.where(lane >= i * c, cast(jnp.full((_LANES,), value, jnp.float32)), found)
        return found

    def add(sums: Sums, more: Sums) -> Sums:
        (acc, top, total), (acc_j, top_j, total_j) = sums, more
        new = jnp.maximum(top, top_j)
        keep, weight = jnp.exp2(top - new), jnp.exp2(top_j - new)
        return fused("sum", acc_j, weight, acc, keep), new, fused("sum", total_j, weight, total, keep)

    def load(i: Any) -> Sums:
        """Item i of the request; nothing where there is none."""
        live = (i >= first) & (i < end)
        item = jnp.where(i == end - 1, last, long + i - first)
        item = jnp.where(live, item, last)
        tiles = [(item * (kernel.kv_heads * kernel.tiles) + tile, at) for tile, at in places]
        acc = kernel.lanes(ins["acc"], tiles)
        top, total = (choose([ins[name][at] for at in tiles]) for name in ("top", "total"))
        return tuple(jnp.where(live, x, y) for x, y in zip((acc, top, total), start, strict=True))

    # A few items are added up first: blocks to a few, or these to a group. Groups are added one by one.
    single, together = per == 1, jnp.where(per >= GROUP, 1, FEW)
    of_group = jnp.where(single, GROUP // FEW, 1)
    bottom, stop = lax.div(first, together), lax.div(end + together - 1, together)

    def few(i: Any) -> list[Sums]:
        one, *others = (load(i * together + j) for j in range(FEW))
        alone = together == 1
        return [one, *(tuple(jnp.where(alone, y, x) for x, y in zip(more, start, strict=True)) for more in others)]

    def step(i: Any, carry: tuple[Sums, Sums, list[Sums]]) -> tuple[Sums, Sums, list[Sums]]:
        whole, group, loaded = carry
        later = few(i + 1)
        group = add(group, functools.reduce(add, loaded))
        closes = (lax.rem(i, of_group) == of_group - 1) | (i == stop - 1)
        added = add(whole, group)
        whole = tuple(jnp.where(closes, x, y) for x, y in zip(added, whole, strict=True))
        group = tuple(jnp.where(closes, x, y) for x, y in zip(start, group, strict=True))
        return whole, group, later

    (acc, top, total), *_ = lax.fori_loop(bottom, stop, step, (start, start, few(bottom)))
    if sinks:
        sink = choose([ins["sinks"][rem(row + i, kernel.heads)] for i in range(count)])
        new = jnp.maximum(top, sink)
        keep = jnp.exp2(top - new)
        acc, total = acc * keep, fused("sum", full(1.0), jnp.exp2(sink - new), total, keep)
    out.at[line][...] = (acc / total).astype(out.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("interpret",))
def merge(kernel: Launch, dtype: Any, sinks: bool, ins: dict[str, jax.Array], *, interpret: Any = None) -> jax.Array:
    names = list(ins)
    lines = kernel.batch * kernel.nodes * kernel.heads * kernel.head_dim // _LANES

    def tree_attention_merge(*refs: Any) -> None:
        _body(kernel, sinks, dict(zip(names, refs[:-1], strict=True)), refs[-1])

    extra = {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        tree_attention_merge, out_type=jax.ShapeDtypeStruct((lines, _LANES), dtype), grid=(lines,),
        grid_names=("program",), compiler_params=params(), **extra,
    )(*ins.values())  # fmt: skip
