"""Tree attention in plain XLA: the specification, and the path that CPUs run.

Pages are read in blocks inside a loop whose trip count follows the longest context in
use, so the cost grows with the tokens in use and not with the size of the page table.
The partition into blocks does not depend on the number of query rows: a token's result
is the same arithmetic whether it is decoded alone or verified among others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import static

_MASKED = -1e30


class Shared:
    """What the attention of several layers has in common, in one trace.

    They are given the same pages, table and lengths, which nothing between them writes, and each depends on the one
    before by way of a product, or of any kernel that waits for all before it and only then lets another begin. So what
    one has read behind its wait a later one may read before its own (see overlap).

    Attributes:
      read: whether a kernel has been given these very arrays; of one that takes a plan XLA may make lengths anew.
      plans: what kernels made of the lengths, and were given with pages and table, by all else that it depends on.
    """

    def __init__(self, *, read: bool = False) -> None:
        self.read, self.plans = read, dict[Any, Any]()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeAttentionArgs:
    """The arguments of one call; `api.tree_attention` describes them.

    Attributes:
      first_page: see there; an implementation adds it itself, or reads the table of `placed`.
    """

    q_BNHC: jax.Array
    pages: jax.Array
    table_BM: jax.Array
    length_B: jax.Array
    tree_k_BTGC: jax.Array
    tree_v_BTGC: jax.Array
    tree_mask_BNT: jax.Array | None
    offset_BN: jax.Array | None = None
    sinks_H: jax.Array | None = None
    scale: float | None = static(default=None)
    window: int | None = static(default=None)
    soft_cap: float | None = static(default=None)
    value_channels: int | None = static(default=None)
    first_page: int = static(default=0)
    shared: Shared | None = static(default=None)  # noqa: RUF009  (a field)

    def placed(self) -> TreeAttentionArgs:
        """The same with `first_page` added to the table."""
        if not self.first_page:
            return self
        return dataclasses.replace(self, table_BM=self.table_BM + self.first_page, first_page=0)

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.q_BNHC.shape[3] ** -0.5 if self.scale is None else self.scale

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.q_BNHC.shape[1] * (self.q_BNHC.shape[2] // self.tree_k_BTGC.shape[2])

    @property
    def units(self) -> int:
        """Requests times KV heads."""
        return self.q_BNHC.shape[0] * self.tree_k_BTGC.shape[2]

    @property
    def mask(self) -> jax.Array:
        """Whether query n sees tree entry t, [B, N, T], written out where none was given."""
        if self.tree_mask_BNT is not None:
            return self.tree_mask_BNT
        b, n = self.q_BNHC.shape[:2]
        return jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (b, n, n))

    @property
    def offsets(self) -> jax.Array:
        """Query positions counted from the prefix's end; by the mask where each of its rows marks a whole path."""
        return self.mask.sum(axis=-1, dtype=jnp.int32) - 1 if self.offset_BN is None else self.offset_BN


#: Maxima, sums and weighted values of rows, [B, G, R, 1], [B, G, R, 1] and [B, G, R, C].
_Sums = tuple[jax.Array, jax.Array, jax.Array]


def tree_attention(args: TreeAttentionArgs, *, block_tokens: int | None = None) -> jax.Array:
    """See api.tree_attention.

    Args:
      block_tokens: prefix tokens a loop iteration reads, rounded to whole pages; one page by default.
    """
    args = args.placed()
    b, n, h, c = args.q_BNHC.shape
    _, g, page, _ = args.pages.shape
    q_BGRC = args.q_BNHC.reshape(b, n, g, h // g, c).transpose(0, 2, 1, 3, 4).reshape(b, g, n * (h // g), c)
    per_block = max(1, min((block_tokens or page) // page, args.table_BM.shape[1]))
    sums = _over_prefix(args, q_BGRC, _over_tree(args, q_BGRC), per_block)
    _, total, acc = sums if args.sinks_H is None else _with_sinks(args.sinks_H, sums)
    out = (acc / total).reshape(b, g, n, h // g, acc.shape[3]).transpose(0, 2, 1, 3, 4)
    return out.reshape(b, n, h, acc.shape[3]).astype(args.q_BNHC.dtype)


def _scores(args: TreeAttentionArgs, q_BGRC: jax.Array, k_BGTC: jax.Array) -> jax.Array:
    s = jax.lax.dot_general(q_BGRC, k_BGTC, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
    s = s * args.factor
    return s if args.soft_cap is None else args.soft_cap * jnp.tanh(s / args.soft_cap)


def _weighted(p_BGRT: jax.Array, v_BGTC: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        p_BGRT.astype(v_BGTC.dtype), v_BGTC, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )


def _over_tree(args: TreeAttentionArgs, q_BGRC: jax.Array) -> _Sums:
    mask_BNT = args.mask
    (b, n, t), rows = mask_BNT.shape, q_BGRC.shape[2]
    mask_BGRT = jnp.broadcast_to(mask_BNT[:, None, :, None, :], (b, 1, n, rows // n, t))
    mask_BGRT = mask_BGRT.reshape(b, 1, rows, t)
    s = jnp.where(mask_BGRT, _scores(args, q_BGRC, args.tree_k_BTGC.transpose(0, 2, 1, 3)), _MASKED)
    top = s.max(axis=-1, keepdims=True)
    p = jnp.exp(s - top)
    # A masked entry has weight 0, but 0 * NaN is NaN: one broken draft must not reach its siblings' rows.
    # A NaN that a query does see stays visible through its key.
    total, v = p.sum(axis=-1, keepdims=True), args.tree_v_BTGC
    v = jnp.where(jnp.isfinite(v), v, jnp.zeros((), v.dtype))
    return top, total, _weighted(p, v.transpose(0, 2, 1, 3))


def _over_prefix(args: TreeAttentionArgs, q_BGRC: jax.Array, sums: _Sums, per_block: int) -> _Sums:
    """Takes the prefix into the sums, `per_block` pages at a time."""
    (b, g, rows, c), n = q_BGRC.shape, args.q_BNHC.shape[1]
    num_pages, _, page, width = args.pages.shape
    span = per_block * page
    values = slice(c, 2 * c) if args.value_channels is None else slice(args.value_channels)
    lowest_BR = None
    if args.window is not None:
        offset_BN = args.offsets
        lowest_BN = args.length_B[:, None] + offset_BN - args.window
        lowest_BR = jnp.broadcast_to(lowest_BN[:, :, None], (b, n, rows // n)).reshape(b, rows)

    # Rows with windows begin at blocks of their own; blocks before the window of a row's first query are not read.
    first_B = jnp.zeros_like(args.length_B)
    if lowest_BR is not None:
        first_B = jnp.maximum(lowest_BR.min(axis=1) + 1, 0).astype(first_B.dtype) // span
    blocks = jnp.max((args.length_B + span - 1) // span - first_B)
    pad = -args.table_BM.shape[1] % per_block
    table = jnp.pad(args.table_BM, ((0, 0), (0, pad)), constant_values=num_pages) if pad else args.table_BM

    def body(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, top, total, acc = carry
        if lowest_BR is None:
            ids = jax.lax.dynamic_slice_in_dim(table, i * per_block, per_block, axis=1)
            position_BT = (i * span + jnp.arange(span))[None, :]
        else:
            column_BP = ((first_B + i) * per_block)[:, None] + jnp.arange(per_block)[None, :]
            ids = jnp.take_along_axis(table, column_BP, axis=1, mode="clip")
            position_BT = ((first_B + i) * span)[:, None] + jnp.arange(span)[None, :]
        kv = jnp.take(args.pages, ids, axis=0, mode="clip")  # [B, per_block, G, page, 2C]
        kv = kv.transpose(0, 2, 1, 3, 4).reshape(b, g, span, width)
        seen_BT = position_BT < args.length_B[:, None]
        seen_BGRT = seen_BT[:, None, None, :]
        if lowest_BR is not None:
            seen_BGRT = seen_BGRT & (position_BT[:, None, None, :] > lowest_BR[:, None, :, None])
        s = jnp.where(seen_BGRT, _scores(args, q_BGRC, kv[..., :c]), _MASKED)
        new_top = jnp.maximum(top, s.max(axis=-1, keepdims=True))
        keep = jnp.exp(top - new_top)
        p = jnp.where(seen_BGRT, jnp.exp(s - new_top), 0.0)
        # Unused pages, and those behind the windows, may hold anything, NaN included: 0 * NaN must not reach the sum.
        if lowest_BR is not None:
            seen_BT = seen_BT & (position_BT > lowest_BR.min(axis=1)[:, None])
        v = jnp.where(seen_BT[:, None, :, None], kv[..., values], jnp.zeros((), kv.dtype))
        return i + 1, new_top, total * keep + p.sum(axis=-1, keepdims=True), acc * keep + _weighted(p, v)

    start = (jnp.zeros((), blocks.dtype), *sums)
    _, top, total, acc = jax.lax.while_loop(lambda carry: carry[0] < blocks, body, start)
    return top, total, acc


def _with_sinks(sinks_H: jax.Array, sums: _Sums) -> _Sums:
    """The sums with each head's sink: a score without a value."""
    top, total, acc = sums
    g, rows = top.shape[1:3]
    heads_GR = sinks_H.astype(jnp.float32).reshape(g, -1)
    sink = jnp.tile(heads_GR, (1, rows // heads_GR.shape[1]))[None, :, :, None]  # rows are node-major
    new_top = jnp.maximum(top, sink)
    keep = jnp.exp(top - new_top)
    return new_top, total * keep + jnp.exp(sink - new_top), acc * keep
