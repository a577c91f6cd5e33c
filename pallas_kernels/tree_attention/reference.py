"""Tree attention in plain XLA: the specification, and the path that CPUs run.

Pages are read in blocks inside a loop whose trip count follows the longest context in
use, so the cost grows with the tokens in use and not with the size of the page table.
The partition into blocks does not depend on the number of query rows: a token's result
is the same arithmetic whether it is decoded alone or verified among others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention.masks import offsets

_MASKED = -1e30


def tree_attention(
    q_BNHC: jax.Array,
    pages: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    tree_k_BTGC: jax.Array,
    tree_v_BTGC: jax.Array,
    tree_mask_BNT: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    offset_BN: jax.Array | None = None,
    soft_cap: float | None = None,
    block_tokens: int | None = None,
) -> jax.Array:
    """Arguments and result as in `api.tree_attention`.

    Args:
      block_tokens: prefix tokens a loop iteration reads, rounded to whole pages; one page by default.
    """
    b, n, h, c = q_BNHC.shape
    num_pages, g, page, width = pages.shape
    m, t = table_BM.shape[1], tree_k_BTGC.shape[1]
    rows = n * (h // g)
    factor = c**-0.5 if scale is None else scale
    per_block = max(1, min((block_tokens or page) // page, m))
    span = per_block * page

    q_BGRC = q_BNHC.reshape(b, n, g, h // g, c).transpose(0, 2, 1, 3, 4).reshape(b, g, rows, c)

    def scores(k_BGTC: jax.Array) -> jax.Array:
        s = jax.lax.dot_general(q_BGRC, k_BGTC, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        s = s * factor
        return s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)

    def weighted(p_BGRT: jax.Array, v_BGTC: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            p_BGRT.astype(v_BGTC.dtype), v_BGTC, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
        )

    mask_BGRT = jnp.broadcast_to(tree_mask_BNT[:, None, :, None, :], (b, 1, n, h // g, t)).reshape(b, 1, rows, t)
    s = jnp.where(mask_BGRT, scores(tree_k_BTGC.transpose(0, 2, 1, 3)), _MASKED)
    top = s.max(axis=-1, keepdims=True)
    p = jnp.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    # A masked entry has weight 0, but 0 * NaN is NaN: one broken draft must not reach its siblings' rows.
    # A NaN that a query does see stays visible through its key.
    tree_v = jnp.where(jnp.isfinite(tree_v_BTGC), tree_v_BTGC, jnp.zeros((), tree_v_BTGC.dtype))
    acc = weighted(p, tree_v.transpose(0, 2, 1, 3))

    lowest_BR = None
    if window is not None:
        offset_BN = offsets(tree_mask_BNT) if offset_BN is None else offset_BN
        lowest_BN = length_B[:, None] + offset_BN - window
        lowest_BR = jnp.broadcast_to(lowest_BN[:, :, None], (b, n, h // g)).reshape(b, rows)

    blocks = (jnp.max(length_B) + span - 1) // span
    pad = -m % per_block
    table = jnp.pad(table_BM, ((0, 0), (0, pad)), constant_values=num_pages) if pad else table_BM

    def body(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, top, total, acc = carry
        ids = jax.lax.dynamic_slice_in_dim(table, i * per_block, per_block, axis=1)
        kv = jnp.take(pages, ids, axis=0, mode="clip")  # [B, per_block, G, page, 2C]
        kv = kv.transpose(0, 2, 1, 3, 4).reshape(b, g, span, width)
        position = i * span + jnp.arange(span)
        seen_BT = position[None, :] < length_B[:, None]
        seen_BGRT = seen_BT[:, None, None, :]
        if lowest_BR is not None:
            seen_BGRT = seen_BGRT & (position[None, None, None, :] > lowest_BR[:, None, :, None])
        s = jnp.where(seen_BGRT, scores(kv[..., :c]), _MASKED)
        new_top = jnp.maximum(top, s.max(axis=-1, keepdims=True))
        keep = jnp.exp(top - new_top)
        p = jnp.where(seen_BGRT, jnp.exp(s - new_top), 0.0)
        # Unused pages may hold anything, NaN included: 0 * NaN must not reach the sum.
        v = jnp.where(seen_BT[:, None, :, None], kv[..., c : 2 * c], jnp.zeros((), kv.dtype))
        return i + 1, new_top, total * keep + p.sum(axis=-1, keepdims=True), acc * keep + weighted(p, v)

    _, _, total, acc = jax.lax.while_loop(
        lambda carry: carry[0] < blocks, body, (jnp.zeros((), blocks.dtype), top, total, acc)
    )
    out = (acc / total).reshape(b, g, n, h // g, c).transpose(0, 2, 1, 3, 4)
    return out.reshape(b, n, h, c).astype(q_BNHC.dtype)
