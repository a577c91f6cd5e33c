"""The paged KV cache's arithmetic: where a token's keys and values lie, and the commit.

Pools are [layers * P, G, page, 2C]: keys and values side by side (or [..., C], keys alone,
where values are the first channels of these: `AttentionOptions.value_channels`), the layers
flattened into the page axis, so that one scatter commits many layers and no layer is ever sliced
out. The padding sentinel of every index is the axis' size, never -1 (a negative index
wraps, and would write the last row).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec.models.base import FULL_ATTENTION, Answering, Attend, AttentionOptions
from jaxspec.models.sharded import TENSOR_AXIS, shards
from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.reference import Shared

#: Layers that a GPU's scatter commits of so many tokens and more; of fewer it commits all. XLA makes one operation of
#: the layers' arrays and their scatter, in which every number looks for its array: slower by itself, but one launch.
_LAYERS, _MANY = 8, 32
#: Lanes of a TPU's tiles. A pool there is a whole number of them wide: XLA would copy another one for the kernel.
_LANES = 128


def distinct(index: jax.Array, size: int) -> jax.Array:
    """Indices of an axis of `size`; those beyond its end, which are dropped, become numbers that are all different.

    For scatters with `unique_indices`, without which GPUs write numbers of 8 and 16 bits by atomic operations.
    """
    beyond = size + jnp.arange(index.size, dtype=index.dtype).reshape(index.shape)
    return jnp.where(index < size, index, beyond)


def init_pages(
    num_layers: int, num_pages: int, kv_heads: int, page_size: int, width: int, dtype: jnp.dtype,
    kernels: str | None = None,
) -> jax.Array:  # fmt: skip
    """An empty pool, [layers * P, G, page, width]; for TPU kernels the width is rounded up to whole tiles of lanes.

    Args:
      width: numbers of a token and head (`ModelConfig.kv_width`).
      kernels: the implementation that will read it (pallas_kernels.dispatch).
    """
    if kernels == "tpu" or (kernels is None and jax.default_backend() == "tpu"):
        width = -(-width // _LANES) * _LANES
    return jnp.zeros((num_layers * num_pages, kv_heads, page_size, width), dtype)


def _per_device(
    fn: Callable[..., jax.Array], kv_heads: int, heads_at: Sequence[int | None], result_at: int, whole: bool
) -> Callable[..., jax.Array]:
    """`fn`, run by every device of the ambient mesh on its own heads: XLA cannot split a kernel, and not every scatter.

    Where the mesh does not divide the KV heads, every device computes with all of them.

    Args:
      heads_at: which axis of each argument holds heads, None for none. result_at: the same of the result.
      whole: every device has all heads, whatever divides them.
    """
    if shards() == 1:
        return fn
    name = TENSOR_AXIS if kv_heads % shards() == 0 and not whole else None
    spec = lambda at: PartitionSpec() if at is None else PartitionSpec(*[None] * at, name)
    return jax.shard_map(fn, in_specs=tuple(map(spec, heads_at)), out_specs=spec(result_at), check_vma=False)


def attend_paged(
    q_BNHC: jax.Array, pages: jax.Array, table_BM: jax.Array, length_B: jax.Array, k_BTGC: jax.Array,
    v_BTGC: jax.Array, mask_BNT: jax.Array | None, options: AttentionOptions, *, offset_BN: jax.Array | None = None,
    kernels: str | None = None, whole: bool = False, first_page: int = 0, shared: Shared | None = None,
) -> jax.Array:  # fmt: skip
    """Tree attention (see its api) by every device on its own heads.

    Args:
      table_BM: page numbers of one layer. first_page: of the layer in the whole pool. shared: see the api.
      options: what the layer asks for. offset_BN: of queries to the prefix's end, where there is a window.
      whole: every device of a mesh has the whole pool, and attends with all heads.
    """
    attention = functools.partial(
        tree_attention, scale=options.scale, soft_cap=options.soft_cap, value_channels=options.value_channels,
        implementation=kernels, first_page=first_page,
    )  # fmt: skip
    heads_at: list[int | None] = [2, 1, None, None, 2, 2, None]
    args = [q_BNHC, pages, table_BM, length_B, k_BTGC, v_BTGC, mask_BNT]
    if options.window is not None:
        attention = functools.partial(attention, window=options.window)

    shared = shared or Shared()
    # What is made in the trace of one call for several devices cannot be used in another's.
    own = shared if shards() == 1 else Shared(read=shared.read)

    def attend(offset_BN: jax.Array | None, sinks_H: jax.Array | None, *args: Any) -> jax.Array:
        return attention(*args, offset_BN=offset_BN, sinks_H=sinks_H, shared=own)

    offset_BN = None if options.window is None else offset_BN
    split = _per_device(attend, pages.shape[1], [None, 0, *heads_at], 2, whole)
    out = split(offset_BN, options.sinks_H, *args)
    shared.read = own.read
    return out


class TreeKV:
    """Collects a forward's new keys and values while it attends to the pool and to them.

    One object serves one forward: pass `attend` to the model, read `stacked()` after it.

    Args:
      pages: [layers * P, G, page, 2C].
      table_BM: page numbers in one layer's range [0, P]; P stands for none.
      length_B: committed tokens a row.
      mask_BNT: whether new token n sees new token t (earlier ones first where `prior` is given); None: causal.
      num_pages: P.
      prior: keys and values [layers, B, T0, G, 2C] of tokens that precede the new ones and
        are not in the pool; they take the first T0 columns of the mask.
      place_BT: place of each token outside the pool, counted from the pool's last; layers with a window read it. None:
        as the mask says, whose rows then mark whole paths of the new tokens.
      kernels: the implementation of tree attention (pallas_kernels.dispatch).
      whole: see `attend_paged`.
      asked: the last layer answers the last so many tokens alone, which takes a mask, or none; None: all.
    """

    def __init__(
        self,
        pages: jax.Array,
        table_BM: jax.Array,
        length_B: jax.Array,
        mask_BNT: jax.Array | None,
        num_pages: int,
        prior: jax.Array | None = None,
        place_BT: jax.Array | None = None,
        kernels: str | None = None,
        whole: bool = False,
        asked: int | None = None,
    ):
        self._whole, self._asked = whole, asked
        self._pages, self._table, self._length, self._mask = pages, table_BM, length_B, mask_BNT
        self._num_pages, self._prior, self._place, self._kernels = num_pages, prior, place_BT, kernels
        self._new: dict[int, jax.Array] = {}
        self._shared = Shared()
        self._windows: dict[int, tuple[jax.Array | None, jax.Array | None]] = {}
        self._last = pages.shape[0] // num_pages - 1
        pick: Callable[[jax.Array], jax.Array] = lambda x: x[:, x.shape[1] - (asked or 0) :]
        self.attend: Attend = self._attend if asked is None else Answering(self._attend, self._last, pick)

    def _attend(
        self, layer: int, q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array,
        options: AttentionOptions = FULL_ATTENTION,
    ) -> jax.Array:  # fmt: skip
        mask_BNT, offset_BN = self._mask, None
        if options.window is not None:
            if options.window not in self._windows:
                self._windows[options.window] = self._within(options.window, *q_BNHC.shape[:2])
            mask_BNT, offset_BN = self._windows[options.window]
        c, values = q_BNHC.shape[-1], options.value_channels
        kv = k_BNGC if values is not None else jnp.concatenate([k_BNGC, v_BNGC], axis=-1)
        kv = kv.astype(self._pages.dtype)
        self._new[layer] = kv
        if self._prior is not None:
            kv = jnp.concatenate([self._prior[layer], kv], axis=1)
        v_BTGC = kv[..., c:] if values is None else kv[..., :values]
        if self._asked is not None and layer == self._last:
            if self._asked == 0:
                return q_BNHC[:, :0, :, :values]
            assert mask_BNT is not None
            begin = q_BNHC.shape[1] - self._asked
            q_BNHC, mask_BNT = q_BNHC[:, begin:], mask_BNT[:, begin:]
            offset_BN = None if offset_BN is None else offset_BN[:, begin:]
        return attend_paged(
            q_BNHC, self._pages, self._table, self._length, kv[..., :c], v_BTGC, mask_BNT, options,
            offset_BN=offset_BN, kernels=self._kernels, whole=self._whole, first_page=layer * self._num_pages,
            shared=self._shared,
        )  # fmt: skip

    def _within(self, window: int, b: int, n: int) -> tuple[jax.Array | None, jax.Array | None]:
        """The mask without the tokens that a window hides, and the queries' places; neither where attention knows."""
        mask_BNT, place_BT = self._mask, self._place
        if mask_BNT is None:
            if n <= window:  # nothing new is hidden, and queries stand one behind the other as without a mask
                return None, None
            place_BT = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (b, n))
            mask_BNT = jnp.tril(jnp.ones((n, n), bool))[None]
        elif place_BT is None:
            place_BT = jnp.broadcast_to(mask_BNT.sum(axis=-1, dtype=jnp.int32) - 1, (b, n))
        place_BN = place_BT[:, place_BT.shape[1] - n :]
        return mask_BNT & (place_BT[:, None, :] > place_BN[:, :, None] - window), place_BN

    def stacked(self) -> jax.Array:
        """Keys and values of the new tokens, [layers, B, N, G, 2C], as the pool has them."""
        return jnp.stack([self._new[i] for i in range(len(self._new))])


def after_reads(kv_LBNGc: jax.Array) -> jax.Array:
    """`ready_B` of `commit`, of a pass whose last layer reads nothing: its entries depend on all reads before."""
    return jnp.argmax(kv_LBNGc[-1, :, 0, 0], axis=-1) >= 0


def commit(
    pages: jax.Array, kv_LBNGc: jax.Array, table_BM: jax.Array, position_BN: jax.Array, write_BN: jax.Array,
    num_pages: int, *, ready_B: jax.Array, whole: bool = False, each: int | None = None,
) -> jax.Array:  # fmt: skip
    """Writes new tokens' keys and values of every layer at their positions, in place on a donated pool.

    Args:
      kv_LBNGc: [layers, B, N, G, 2C].
      position_BN: where each token goes, in tokens from the sequence's start.
      write_BN: tokens to write; the others, and positions without a page, are dropped.
      ready_B: true, but computed from results of every read of the pool. Without a dependency
        that XLA cannot remove (it drops optimization barriers before it assigns buffers) the
        scatter may be scheduled before the last read, and the whole pool is copied.
      whole: every device of a mesh has the whole pool.
      each: layers of one scatter; None: as many as is fastest.
    """
    layers, page = kv_LBNGc.shape[0], pages.shape[2]
    column_BN = position_BN // page
    in_table = (column_BN >= 0) & (column_BN < table_BM.shape[1])
    page_BN = jnp.take_along_axis(table_BM, jnp.where(in_table, column_BN, 0), axis=1)
    write = write_BN & ready_B[:, None] & in_table & (page_BN < num_pages)
    index_LBN = page_BN[None] + (jnp.arange(layers, dtype=page_BN.dtype) * num_pages)[:, None, None]
    offset_LBN = jnp.broadcast_to((position_BN % page)[None], index_LBN.shape)
    index_LBN = distinct(jnp.where(write[None], index_LBN, layers * num_pages), layers * num_pages)

    def put(pages: jax.Array, kv_LBNGc: jax.Array, index_LBN: jax.Array, offset_LBN: jax.Array) -> jax.Array:
        # Heads are indexed, not sliced: for a slice between two indexed axes a TPU transposes the whole pool, and back.
        head_G, tokens = jnp.arange(pages.shape[1])[None, None, None, :], math.prod(kv_LBNGc.shape[1:3])
        at_once = _LAYERS if tokens >= _MANY and jax.default_backend() == "gpu" else layers
        at_once = at_once if each is None else each
        for first in range(0, layers, at_once):
            own = slice(first, first + at_once)
            at = index_LBN[own][..., None], head_G, offset_LBN[own][..., None]
            pages = pages.at[at].set(kv_LBNGc[own], mode="drop", unique_indices=True)
        return pages

    spare = pages.shape[3] - kv_LBNGc.shape[-1]
    kv_LBNGc = jnp.pad(kv_LBNGc.astype(pages.dtype), ((0, 0),) * 4 + ((0, spare),))
    split = _per_device(put, pages.shape[1], (1, 3, None, None), 1, whole)
    return split(pages, kv_LBNGc, index_LBN, offset_LBN)
