"""The second kernel of attention with equal bits: adds the items' sums in the one order, from wherever they stopped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.tree_attention.mosaic_launch import LANES, Launch
from pallas_kernels.tree_attention.mosaic_plan import FEW, GROUP
from pallas_kernels.tree_attention.mosaic_rows import MASKED, ROWS, div, params, rem
from pallas_kernels.tree_attention.mosaic_sums import LINE

#: Weighted values, maxima and weights: of a thread's channels each its own, then one for all of them.
Sums = tuple[jax.Array, ...]


def _body(kernel: Launch, sinks: bool, ins: dict[str, Any], out: Any) -> None:
    """Adds the items' sums of some neighbouring query heads of a node in their order."""
    overlap.begin(kernel.interpret)
    overlap.wait(kernel.interpret)
    c, width = kernel.head_dim, kernel.width
    count = width * LANES // c
    program = lax.axis_index("program")
    row = program * count  # of [B, N, H]
    b, node = div(row, kernel.nodes * kernel.heads), rem(div(row, kernel.heads), kernel.nodes)
    first, end, long, last, per = (ins["ends"][i, b] for i in range(5))
    start = nothing(kernel, width)
    heads = [rem(row, kernel.heads) + i for i in range(count)]
    bases = []  # where the heads' rows lie behind an item's first
    for head in heads:
        at = node * kernel.group + rem(head, kernel.group)
        tile = div(head, kernel.group) * kernel.tiles + div(at, ROWS)
        bases.append(tile * kernel.height + rem(at, ROWS))

    size = kernel.kv_heads * kernel.tiles * kernel.height  # rows of an item
    gather = lambda item: tuple(kernel.gather((ins["acc"], ins["top"], ins["total"]), bases, item * size))
    # Where a request is alone its last item comes first and the others lie behind it in their order (see `plan`), so
    # that they are read without a look at how many there are.
    alone = kernel.batch == 1 and kernel.window is None and not kernel.mixed
    final = gather(jnp.int32(0)) if alone else start
    most = ins["top"].shape[0] * ins["top"].shape[1] // size

    def load(i: Any) -> list[Sums]:
        """A few items of the request; any others for those that there are not."""
        places = (i * FEW + j for j in range(FEW))
        if alone:
            return [gather(jnp.minimum(at + 1, most - 1)) for at in places]
        return [gather(jnp.where((at >= first) & (at < end - 1), long + at - first, last)) for at in places]

    def held(i: Any, items: list[Sums]) -> list[Sums]:
        """Those that there are; not before they are needed, which would wait for them."""
        found = []
        for at, item in zip((i * FEW + j for j in range(FEW)), items, strict=True):
            item = _choose(at == end - 1, final, item) if alone else item
            found.append(_choose((at >= first) & (at < end), item, start))
        return found

    bottom, stop = jnp.int32(0) if alone else div(first, FEW), div(end + FEW - 1, FEW)
    *acc, top, total = in_order(kernel, load, held, per == 1, per >= GROUP, bottom, stop, start)
    if sinks:
        sink = _of_heads(kernel, [ins["sinks"][head] for head in heads])
        *acc, top, total = with_sink(kernel, (*acc, top, total), sink)
    kernel.write(out, [x / total for x in acc], program)


def nothing(kernel: Launch, width: int) -> Sums:
    """Sums of so many channels a thread over no item."""
    full = lambda value: kernel.cast(jnp.full((LANES,), value, jnp.float32), LINE)
    return *[full(0.0)] * width, full(MASKED), full(0.0)


def _choose(taken: Any, more: Sums, less: Sums) -> Sums:
    return tuple(jnp.where(taken, x, y) for x, y in zip(more, less, strict=True))


def add_sums(kernel: Launch, sums: Sums, more: Sums) -> Sums:
    """Sums of what comes first and of what comes next; of nothing, on either side, nothing changes."""
    *acc, top, total = sums
    *acc_j, top_j, total_j = more
    new = jnp.maximum(top, top_j)
    keep, weight = jnp.exp2(top - new), jnp.exp2(top_j - new)
    acc = [kernel.fused(y, weight, x, keep, LINE) for x, y in zip(acc, acc_j, strict=True)]
    return *acc, new, kernel.fused(total_j, weight, total, keep, LINE)


def with_sink(kernel: Launch, sums: Sums, sink: jax.Array) -> Sums:
    """Sums with the weight of a score that has no value."""
    *acc, top, total = sums
    new = jnp.maximum(top, sink)
    keep, one = jnp.exp2(top - new), kernel.cast(jnp.ones((LANES,), jnp.float32), LINE)
    return *(x * keep for x in acc), new, kernel.fused(one, jnp.exp2(sink - new), total, keep, LINE)


def in_order(
    kernel: Launch, load: Callable[[Any], list[Sums]], held: Callable[[Any, list[Sums]], list[Sums]], single: Any,
    groups: Any, bottom: Any, stop: Any, start: Sums,
) -> Sums:  # fmt: skip
    """The sums of a few items after the other, added up in the order that does not depend on what items are.

    They are blocks, of which a few are added up, and these to a group; a few of them; or groups, which are added one by
    one to those before.

    Args:
      load, held: read the i-th few, long before they are used, and leave `start` of those that there are not.
      single, groups: whether items are blocks, and groups. bottom, stop: the first few and the end.
    """
    add = functools.partial(add_sums, kernel)

    def step(turn: Any, carry: tuple[Sums, Sums, list[Sums], list[Sums]]) -> Any:
        i, (whole, group, now, later) = bottom + turn, carry
        then, now = load(i + 2), held(i, now)
        few = functools.reduce(add, now[1:], add(_choose(groups, whole, start), now[0]))
        group = add(group, few)
        closes = jnp.logical_not(single) | (rem(i, GROUP // FEW) == GROUP // FEW - 1) | (i == stop - 1)
        whole = _choose(groups, few, _choose(closes, add(whole, group), whole))
        return whole, _choose(closes, start, group), later, then

    begin = start, start, load(bottom), load(bottom + 1)
    # Where a compiler sees that there is a first turn, it reads all that is known of the request at once.
    return lax.fori_loop(0, jnp.maximum(stop - bottom, 1), step, begin)[0]


def _of_heads(kernel: Launch, values: Sequence[Any]) -> jax.Array:
    """Of each thread the value of its query head."""
    lane, each = kernel.iota((LANES,), 0, LINE), LANES // len(values)
    full = lambda value: kernel.cast(jnp.full((LANES,), value, jnp.float32), LINE)
    found = full(values[0])
    for i, value in enumerate(values[1:], 1):
        found = jnp.where(lane >= i * each, full(value), found)
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("interpret",))
def merge(kernel: Launch, dtype: Any, sinks: bool, ins: dict[str, jax.Array], *, interpret: Any = None) -> jax.Array:
    names, line = list(ins), LANES * kernel.width
    programs = kernel.batch * kernel.nodes * kernel.heads * kernel.head_dim // line
    values = line // kernel.head_dim * kernel.channels

    def tree_attention_merge(*refs: Any) -> None:
        _body(kernel, sinks, dict(zip(names, refs[:-1], strict=True)), refs[-1])

    extra = {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        tree_attention_merge, out_type=jax.ShapeDtypeStruct((programs, values), dtype), grid=(programs,),
        grid_names=("program",), compiler_params=params(), **extra,
    )(*ins.values())  # fmt: skip
