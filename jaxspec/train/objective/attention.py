"""Attention over packed rows, and over a head unrolled through its own drafts; never [T, T] for all heads and steps.

Owns masks and memory: in rows longer than a block queries go block by block, and blocks are computed again in the
backward pass, so scores take O(block * T) whatever the steps. Plain XLA: the fused kernels that
`jax.nn.dot_product_attention` offers take segments only as a [T, T] mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.models.base import FULL_ATTENTION, Attend, AttentionOptions

#: Queries of a block: [B, H, BLOCK, T] scores live at a time.
BLOCK = 512


def packed_attention(segments_BT: jax.Array, block: int = BLOCK) -> Attend:
    """Causal attention within each text of packed rows, for any model.

    Args:
      segments_BT: int, the number of the text within its row; 0 (padding) is a text as others are.
    """

    def attend(
        _layer: int, q_BTHC: jax.Array, k_BTGC: jax.Array, v_BTGC: jax.Array, options: AttentionOptions = FULL_ATTENTION
    ) -> jax.Array:
        return _causal(q_BTHC, k_BTGC, v_BTGC, segments_BT, block, options)[0]

    return attend


class UnrolledAttention:
    """The attention of EAGLE-3's training-time test (Li et al. 2025, section 3.2); an `Attend` for one step at a time.

    Step 0 is `packed_attention`. In step i, position n sees step 0's keys up to n in its text and its own keys of the
    steps 1 .. i, all under one softmax: the causal part comes as (output, logsumexp) from its blocks, and the own keys
    are merged into it. So nothing of a step's [T, T] scores outlives the step.

    Args:
      segments_BN: of the positions that the head runs on.
    """

    def __init__(self, segments_BN: jax.Array, block: int = BLOCK):
        self._segments_BN, self._block = segments_BN, block
        self._keys: dict[int, list[jax.Array]] = {}
        self._values: dict[int, list[jax.Array]] = {}

    def stop_gradient(self) -> None:
        """Makes constants of the keys and values so far."""
        self._keys, self._values = jax.lax.stop_gradient((self._keys, self._values))

    def __call__(
        self, layer: int, q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array,
        options: AttentionOptions = FULL_ATTENTION,
    ) -> jax.Array:  # fmt: skip
        options.refuse("training's attention")
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(k_BNGC)
        values.append(v_BNGC)
        out_BNHC, normaliser_BNH = _causal(q_BNHC, keys[0], values[0], self._segments_BN, self._block)
        if len(keys) == 1:
            return out_BNHC
        return _with_own(q_BNHC, out_BNHC, normaliser_BNH, keys[1:], values[1:])


def _causal(
    q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array, segments_BN: jax.Array, block: int,
    options: AttentionOptions = FULL_ATTENTION,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(output [B, N, H, C] as wide as values, logsumexp of the scaled scores [B, N, H] float32)."""
    batch, count, heads, channels = q_BNHC.shape
    groups = k_BNGC.shape[2]
    q_BGRNC = q_BNHC.reshape(batch, count, groups, heads // groups, channels).transpose(0, 2, 3, 1, 4)
    k_BGNC, v_BGNC = k_BNGC.transpose(0, 2, 1, 3), v_BNGC.transpose(0, 2, 1, 3)
    if count <= block:
        out_BGRNC, normaliser_BGRN = _block(q_BGRNC, k_BGNC, v_BGNC, segments_BN, segments_BN, jnp.int32(0), options)
    else:
        pad = lambda x, axis: jnp.pad(x, [(0, -count % block if i == axis else 0) for i in range(x.ndim)])
        q_BGRNC, k_BGNC, v_BGNC = pad(q_BGRNC, 3), pad(k_BGNC, 2), pad(v_BGNC, 2)
        segments_BN = pad(segments_BN, 1)
        blocks = q_BGRNC.shape[3] // block
        # Two loops, because each has one extent of keys: 3/4 of the square are computed where one loop would take all.
        parts = [
            _blocks(q_BGRNC, k_BGNC, v_BGNC, segments_BN, block, start, stop, options)
            for start, stop in ((0, blocks // 2), (blocks // 2, blocks))
        ]
        out_BGRNC, normaliser_BGRN = (jnp.concatenate(x, axis=3)[:, :, :, :count] for x in zip(*parts, strict=True))
    out_BNHC = out_BGRNC.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads, v_BNGC.shape[3])
    return out_BNHC, normaliser_BGRN.transpose(0, 3, 1, 2).reshape(batch, count, heads)


def _blocks(
    q_BGRNC: jax.Array, k_BGNC: jax.Array, v_BGNC: jax.Array, segments_BN: jax.Array, block: int, start: int, stop: int,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Blocks [start, stop) of queries one after the other against the keys up to the last one's end."""
    seen = stop * block
    k_BGMC, v_BGMC, segments_BM = k_BGNC[:, :, :seen], v_BGNC[:, :, :seen], segments_BN[:, :seen]

    # A loop, because XLA's CPU backend would run blocks written out side by side, all scores alive.
    @jax.checkpoint
    def one(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = index * jnp.int32(block)
        q_BGRnC = jax.lax.dynamic_slice_in_dim(q_BGRNC, first, block, 3)
        own_Bn = jax.lax.dynamic_slice_in_dim(segments_BN, first, block, 1)
        return _block(q_BGRnC, k_BGMC, v_BGMC, own_Bn, segments_BM, first, options)

    found = jax.lax.map(one, jnp.arange(start, stop, dtype=jnp.int32))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], (stop - start) * block, *x.shape[5:]), found
    )


def _block(
    q_BGRNC: jax.Array, k_BGMC: jax.Array, v_BGMC: jax.Array, own_BN: jax.Array, segments_BM: jax.Array,
    first: jax.Array, options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Queries of the positions from `first` against keys of the positions from 0."""
    batch, groups, repeats, count, channels = q_BGRNC.shape
    scale = jnp.asarray(channels**-0.5 if options.scale is None else options.scale, q_BGRNC.dtype)
    rows_BGQC = (q_BGRNC * scale).reshape(batch, groups, repeats * count, channels)
    scores = jnp.einsum("bgqc,bgmc->bgqm", rows_BGQC, k_BGMC, preferred_element_type=jnp.float32)
    scores_BGRNM = scores.reshape(batch, groups, repeats, count, -1)
    if options.soft_cap is not None:
        scores_BGRNM = options.soft_cap * jnp.tanh(scores_BGRNM / options.soft_cap)
    apart_NM = first + jnp.arange(count)[:, None] - jnp.arange(k_BGMC.shape[2])[None, :]
    past_NM = apart_NM >= 0
    if options.window is not None:
        past_NM = past_NM & (apart_NM < options.window)
    mask_BNM = past_NM[None] & (own_BN[:, :, None] == segments_BM[:, None, :])
    scores_BGRNM = jnp.where(mask_BNM[:, None, None], scores_BGRNM, -jnp.inf)
    # Each query sees itself at least, so its largest score is finite.
    largest_BGRN = jax.lax.stop_gradient(scores_BGRNM.max(axis=-1))
    sinks_GR = None
    if options.sinks_H is not None:
        sinks_GR = options.sinks_H.astype(jnp.float32).reshape(1, groups, repeats, 1)
        largest_BGRN = jnp.maximum(largest_BGRN, jax.lax.stop_gradient(sinks_GR))
    weights_BGRNM = jnp.exp(scores_BGRNM - largest_BGRN[..., None])
    sum_BGRN = weights_BGRNM.sum(axis=-1)
    if sinks_GR is not None:
        sum_BGRN = sum_BGRN + jnp.exp(sinks_GR - largest_BGRN)
    flat_BGQM = weights_BGRNM.astype(v_BGMC.dtype).reshape(batch, groups, repeats * count, -1)
    out = jnp.einsum("bgqm,bgmc->bgqc", flat_BGQM, v_BGMC, preferred_element_type=jnp.float32)
    out_BGRNC = out.reshape(batch, groups, repeats, count, v_BGMC.shape[3]) / sum_BGRN[..., None]
    return out_BGRNC.astype(q_BGRNC.dtype), jnp.log(sum_BGRN) + largest_BGRN


def _with_own(
    q_BNHC: jax.Array,
    out_BNHC: jax.Array,
    normaliser_BNH: jax.Array,
    keys: list[jax.Array],
    values: list[jax.Array],
) -> jax.Array:
    """Joins each position's own later keys [B, N, G, C] to the causal part under one softmax."""
    batch, count, heads, channels = q_BNHC.shape
    groups = keys[0].shape[2]
    shape = (batch, count, groups, heads // groups)
    q_BNGRC = q_BNHC.reshape(*shape, channels) * jnp.asarray(channels**-0.5, q_BNHC.dtype)
    scores = [normaliser_BNH.reshape(shape)]
    scores += [jnp.sum((q_BNGRC * k[:, :, :, None]).astype(jnp.float32), axis=-1) for k in keys]
    weights_BNGRJ = jax.nn.softmax(jnp.stack(scores, axis=-1), axis=-1)
    joined = out_BNHC.reshape(*shape, channels).astype(jnp.float32) * weights_BNGRJ[..., :1]
    for j, v_BNGC in enumerate(values, start=1):
        joined = joined + weights_BNGRJ[..., j : j + 1] * v_BNGC[:, :, :, None].astype(jnp.float32)
    return joined.reshape(batch, count, heads, channels).astype(q_BNHC.dtype)
