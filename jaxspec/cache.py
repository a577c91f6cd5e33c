"""The paged KV cache's arithmetic: where a token's keys and values lie, and the commit.

Pools are [layers * P, G, page, 2C]: keys and values side by side, the layers flattened
into the page axis, so that one scatter commits every layer and no layer is ever sliced
out. The padding sentinel of every index is the axis' size, never -1 (a negative index
wraps, and would write the last row).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.models.base import Attend
from pallas_kernels.tree_attention.reference import tree_attention


def init_pages(
    num_layers: int, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype
) -> jax.Array:
    """An empty pool, [layers * P, G, page, 2C]."""
    return jnp.zeros((num_layers * num_pages, kv_heads, page_size, 2 * head_dim), dtype)


class TreeKV:
    """Collects a forward's new keys and values while it attends to the pool and to them.

    One object serves one forward: pass `attend` to the model, read `stacked()` after it.

    Args:
      pages: [layers * P, G, page, 2C].
      table_BM: page numbers in one layer's range [0, P]; P stands for none.
      length_B: committed tokens a row.
      mask_BNT: whether new token n sees new token t (earlier ones first where `prior` is given).
      num_pages: P.
      prior: keys and values [layers, B, T0, G, 2C] of tokens that precede the new ones and
        are not in the pool; they take the first T0 columns of the mask.
    """

    def __init__(
        self,
        pages: jax.Array,
        table_BM: jax.Array,
        length_B: jax.Array,
        mask_BNT: jax.Array,
        num_pages: int,
        prior: jax.Array | None = None,
    ):
        self._pages, self._table, self._length, self._mask = pages, table_BM, length_B, mask_BNT
        self._num_pages, self._prior = num_pages, prior
        self._new: dict[int, jax.Array] = {}
        self.attend: Attend = self._attend

    def _attend(self, layer: int, q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array) -> jax.Array:
        kv = jnp.concatenate([k_BNGC, v_BNGC], axis=-1).astype(self._pages.dtype)
        self._new[layer] = kv
        if self._prior is not None:
            kv = jnp.concatenate([self._prior[layer], kv], axis=1)
        c = q_BNHC.shape[-1]
        return tree_attention(
            q_BNHC,
            self._pages,
            self._table + layer * self._num_pages,
            self._length,
            kv[..., :c],
            kv[..., c:],
            self._mask,
            block_tokens=self._pages.shape[2],
        )

    def stacked(self) -> jax.Array:
        """Keys and values of the new tokens, [layers, B, N, G, 2C]."""
        return jnp.stack([self._new[i] for i in range(len(self._new))])


def commit(
    pages: jax.Array, kv_LBNGc: jax.Array, table_BM: jax.Array, position_BN: jax.Array, write_BN: jax.Array,
    num_pages: int, *, ready_B: jax.Array,
) -> jax.Array:  # fmt: skip
    """Writes new tokens' keys and values of every layer at their positions, in place on a donated pool.

    Args:
      kv_LBNGc: [layers, B, N, G, 2C].
      position_BN: where each token goes, in tokens from the sequence's start.
      write_BN: tokens to write; the others, and positions without a page, are dropped.
      ready_B: true, but computed from results of every read of the pool. Without a dependency
        that XLA cannot remove (it drops optimization barriers before it assigns buffers) the
        scatter may be scheduled before the last read, and the whole pool is copied.
    """
    layers, page = kv_LBNGc.shape[0], pages.shape[2]
    column_BN = position_BN // page
    in_table = (column_BN >= 0) & (column_BN < table_BM.shape[1])
    page_BN = jnp.take_along_axis(table_BM, jnp.where(in_table, column_BN, 0), axis=1)
    write = write_BN & ready_B[:, None] & in_table & (page_BN < num_pages)
    index_LBN = page_BN[None] + (jnp.arange(layers, dtype=page_BN.dtype) * num_pages)[:, None, None]
    index_LBN = jnp.where(write[None], index_LBN, layers * num_pages)
    offset_LBN = jnp.broadcast_to((position_BN % page)[None], index_LBN.shape)
    return pages.at[index_LBN, :, offset_LBN].set(kv_LBNGc.astype(pages.dtype), mode="drop")
