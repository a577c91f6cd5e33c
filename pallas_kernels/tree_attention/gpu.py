"""Tree attention for NVIDIA GPUs: Pallas on Triton, split over the context.

A program owns one request, one key-value head, a block of query rows (node-major, so that
the heads of a group lie side by side) and one of S stretches of the prefix; stretch 0 also
takes the tree. A second small kernel merges the partial sums. S is chosen so that batch 1
fills the chip. Without a mask (chunks of prompts, which arithmetic bounds) whole blocks of the
prefix and of the tree below the diagonal go without any masking, and what lies above it is left out. Memory:

    pages   [P, G, page, 2C]   one head's page is one contiguous piece: K rows and V rows
    a block of `block_k` tokens is `block_k / page` pages, or a part of one

Where values are the first channels of their keys, pages hold keys alone, and a block of them is read once for both:
scores are two products, of the channels that are values and of those behind them, since blocks are powers of two.

Must not know the engine. Traps of Pallas on Triton: loop bounds are int32, blocks are
powers of two, and a masked-out index is never clamped onto a live one.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import on_triton
from pallas_kernels.dispatch import triton as plgpu
from pallas_kernels.sizes import MULTIPROCESSORS, device_kind, power_of_two
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

_MASKED = -1e30
_LOG2E = math.log2(math.e)
#: Channels of a head at most; of values that lie in their keys, and of what lies behind these.
_MOST_CHANNELS, _MOST_VALUES, _MOST_BEHIND = 256, 512, 128


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of a launch.

    Attributes:
      rows: query rows a program; a power of two of at least 16.
      keys: prefix tokens an iteration; a power of two of at least 16.
      warps, stages: Triton's.
      programs: programs to aim for by splitting the prefix.
      splits: stretches of the prefix; None: by `programs`.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    splits: int | None = None


_LARGE = ("gb200", "b200", "h200", "h100")  # 228 KiB of shared memory a multiprocessor


def blocks_for(head_dim: int, dtype: jnp.dtype, rows: int, device: str, *, causal: bool = False) -> Blocks:
    """The table of sizes; Hopper's were measured on an H200 (docs/kernels.md), the others only compiled.

    Args:
      rows: query rows of one key-value head: nodes times query heads a group.
      device: jax's device_kind; an unknown one is taken for an H100.
      causal: without a mask.
    """
    chip = next((name for name in MULTIPROCESSORS if name in device.lower()), "h100")
    count, large = MULTIPROCESSORS[chip], chip in _LARGE
    width = power_of_two(head_dim) * dtype.itemsize  # bytes of a padded key
    rows = max(16, power_of_two(rows))
    if head_dim > _MOST_CHANNELS and dtype.itemsize == 2 and large:  # latent; compiled, and not measured
        return Blocks(min(rows, 32), 32, 8, 2, count) if causal else Blocks(min(rows, 64), 32, 8, 2, count)
    if width > 512:
        return Blocks(16, 16, 4, 2 if width <= 2048 else 1, 2 * count)
    if width > 256:
        return Blocks(min(rows, 32 if large else 16), 32 if large else 16, 4, 2, 2 * count)
    if causal and rows >= 64 and large:
        # 256 rows spill on Blackwell.
        wide = rows >= 2048 and chip in ("h100", "h200")
        return Blocks(256, 64, 8, 2, count) if wide else Blocks(64, 64, 4, 3, 2 * count)
    if rows >= 128 and large:
        return Blocks(128, 128, 8, 2, count)
    if rows >= 64 and large:
        return Blocks(64, 64, 4, 2, 2 * count)
    return Blocks(min(rows, 32), 32, 2 if large else 4, 5 if large else 3, 3 * count)


def refusal(args: TreeAttentionArgs) -> str | None:
    """Why this kernel cannot serve these arguments, or None."""
    q, c, page = args.q_BNHC, args.q_BNHC.shape[3], args.pages.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float32, jnp.float16):
        return f"dtype must be bfloat16, float16 or float32, got {q.dtype}"
    dtypes = [x.dtype for x in (q, args.pages, args.tree_k_BTGC, args.tree_v_BTGC)]
    if any(dtype != q.dtype for dtype in dtypes):
        return f"q, pages, tree_k and tree_v must share a dtype, got {', '.join(map(str, dtypes[:3]))}"
    if (values := args.value_channels) is not None:
        if values % 8 or c % 8 or values > _MOST_VALUES or c - values > _MOST_BEHIND:
            return (
                f"values inside keys must be at most {_MOST_VALUES} channels and {_MOST_BEHIND} behind them, both "
                f"multiples of 8, got {values} of {c}"
            )
    elif c % 8 or not 16 <= c <= _MOST_CHANNELS:
        return f"head dimension must be a multiple of 8 in [16, {_MOST_CHANNELS}], got {c}"
    if page & (page - 1) or page < 8:
        return f"page size must be a power of two of at least 8, got {page}"
    return None


def _pack_words(mask_BNT: jax.Array) -> jax.Array:
    """Bit t % 32 of word t // 32 says whether query n sees tree entry t: uint32 [B, N, ceil(T / 32)]."""
    b, n, t = mask_BNT.shape
    words = -(-t // 32)
    bits = jnp.pad(mask_BNT, ((0, 0), (0, 0), (0, 32 * words - t))).reshape(b, n, words, 32).astype(jnp.uint32)
    return (bits << jnp.arange(32, dtype=jnp.uint32)[None, None, None, :]).sum(axis=-1, dtype=jnp.uint32)


def _kernel(
    q_ref,  # [B, N, H, C]
    k_ref,  # [B, T, G, C]
    v_ref,  # [B, T, G, V]; V = C but where values lie in keys
    words_ref,  # [B, N, ceil(T / 32)] uint32, read with a mask only
    pages_ref,  # [P, G, page, 2C], or keys alone
    table_ref,  # [B, M]
    length_ref,  # [B]
    offset_ref,  # [B, N], read with a window only
    sinks_ref,  # [H] float32, read with sinks only
    out_ref,  # [S, B, N, H, V] float32 sums, or [B, N, H, V] where S = 1
    *partial_refs,  # maxima and weights [S, B, N, H] where S > 1
    group: int, rows: int, keys: int, width: int, tree_keys: int, splits: int, scale: float,
    window: int | None, soft_cap: float | None, causal: bool, sinks: bool, inside: bool,
) -> None:  # fmt: skip
    n, c = q_ref.shape[1], v_ref.shape[3]  # channels behind the values come apart
    behind = q_ref.shape[3] - c
    t, page, m = k_ref.shape[1], pages_ref.shape[2], table_ref.shape[1]
    row_blocks = -(-n * group // rows)
    b, split = pl.program_id(0), pl.program_id(2)
    head, first_row = pl.program_id(1) // row_blocks, (pl.program_id(1) % row_blocks) * rows

    row_R = first_row + jnp.arange(rows)
    node_R, query_head_R = row_R // group, head * group + row_R % group
    live_R = row_R < n * group
    channel_C = jnp.arange(width)
    live_C = channel_C < c
    live_RC = live_R[:, None] & live_C[None, :]
    at_RC = (b, node_R[:, None], query_head_R[:, None], channel_C[None, :])
    q_RC = plgpu.load(q_ref.at[at_RC], mask=live_RC, other=0.0)
    behind_D = c + jnp.arange(max(16, power_of_two(behind)))
    live_D = behind_D < c + behind
    at_RD = (b, node_R[:, None], query_head_R[:, None], behind_D[None, :])
    load_RD = functools.partial(plgpu.load, q_ref.at[at_RD], mask=live_R[:, None] & live_D[None, :], other=0.0)
    q_RD = load_RD() if behind else q_RC
    length = length_ref[b]
    precise = lax.Precision.HIGHEST if q_RC.dtype == jnp.float32 else lax.Precision.DEFAULT

    def attend(carry, k_KC, v_KC, k_KD, seen_RK=None):
        acc_RC, top_R, total_R = carry
        s_RK = plgpu.dot(q_RC, k_KC.T, precision=precise)
        if behind:
            s_RK = s_RK + plgpu.dot(q_RD, k_KD.T, precision=precise)
        if soft_cap is None:
            s_RK = s_RK * (scale * _LOG2E)
        else:
            s_RK = jnp.tanh(s_RK * (scale / soft_cap)) * (soft_cap * _LOG2E)
        if seen_RK is not None:
            s_RK = jnp.where(seen_RK, s_RK, _MASKED)
        new_R = jnp.maximum(top_R, s_RK.max(axis=1))
        keep_R = jnp.exp2(top_R - new_R)
        p_RK = jnp.exp2(s_RK - new_R[:, None])
        if seen_RK is not None:
            p_RK = jnp.where(seen_RK, p_RK, 0.0)
        acc_RC = acc_RC * keep_R[:, None] + plgpu.dot(p_RK.astype(v_KC.dtype), v_KC, precision=precise)
        return acc_RC, new_R, total_R * keep_R + p_RK.sum(axis=1)

    lowest = lowest_R = None
    if window is not None:
        offset_R = plgpu.load(offset_ref.at[b, node_R], mask=live_R, other=0)
        lowest_R = length + offset_R - window
        lowest = jnp.min(jnp.where(live_R, lowest_R, length))

    def prefix(i, carry, whole=False):
        start = i * keys
        key_K = jnp.arange(keys)
        live_K = jnp.ones((keys,), bool) if whole else start + key_K < length
        if lowest is not None:
            live_K = live_K & (start + key_K > lowest)  # pages behind every window may be others' by now
        if keys <= page:
            number = table_ref[b, start // page]
            at_K = (start % page) + key_K
            page_K1 = jnp.full((keys, 1), number, jnp.int32)
        else:
            # Only entries that hold tokens are read: what lies behind may be no page at all.
            column = (start + key_K) // page
            page_K1 = plgpu.load(table_ref.at[b, column], mask=live_K, other=0)[:, None]
            at_K = key_K % page
        load = functools.partial(plgpu.load, mask=live_K[:, None] & live_C[None, :], other=0.0)
        if whole and width == c:
            load = plgpu.load
        k_KC = load(pages_ref.at[page_K1, head, at_K[:, None], channel_C[None, :]])
        v_KC = k_KC if inside else load(pages_ref.at[page_K1, head, at_K[:, None], c + channel_C[None, :]])
        k_KD = None
        if behind:
            at_KD = pages_ref.at[page_K1, head, at_K[:, None], behind_D[None, :]]
            k_KD = plgpu.load(at_KD, mask=live_K[:, None] & live_D[None, :], other=0.0)
        if whole:
            return attend(carry, k_KC, v_KC, k_KD)
        seen_RK = jnp.broadcast_to(live_K[None, :], (rows, keys))
        if lowest_R is not None:
            seen_RK = seen_RK & (start + key_K[None, :] > lowest_R[:, None])
        return attend(carry, k_KC, v_KC, k_KD, seen_RK)

    def tree(i, carry, whole=False):
        entry_T = i * tree_keys + jnp.arange(tree_keys)
        at_TC = (b, entry_T[:, None], head, channel_C[None, :])
        load = functools.partial(plgpu.load, mask=(entry_T < t)[:, None] & live_C[None, :], other=0.0)
        if whole and width == c:
            load = plgpu.load
        k_TC, v_TC, k_TD = load(k_ref.at[at_TC]), load(v_ref.at[at_TC]), None
        if behind:
            at_TD = k_ref.at[b, entry_T[:, None], head, behind_D[None, :]]
            k_TD = plgpu.load(at_TD, mask=(entry_T < t)[:, None] & live_D[None, :], other=0.0)
        if whole:
            return attend(carry, k_TC, v_TC, k_TD)
        # A hidden entry weighs 0, but 0 * NaN is NaN: a broken draft must not reach its siblings.
        v_TC = jnp.where(jnp.abs(v_TC.astype(jnp.float32)) < jnp.inf, v_TC, jnp.zeros((), v_TC.dtype))
        live_RT = live_R[:, None] & (entry_T < t)[None, :]
        if causal:
            return attend(carry, k_TC, v_TC, k_TD, live_RT & (entry_T[None, :] <= node_R[:, None]))
        word_RT = plgpu.load(
            words_ref.at[b, node_R[:, None], (entry_T // 32)[None, :]], mask=live_RT, other=jnp.uint32(0)
        )
        seen_RT = ((word_RT >> (entry_T % 32).astype(jnp.uint32)[None, :]) & jnp.uint32(1)) == jnp.uint32(1)
        return attend(carry, k_TC, v_TC, k_TD, seen_RT & live_RT)

    top_R, total_R = jnp.full((rows,), _MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32)
    if sinks:
        # A sink is the first entry of stretch 0: a score, and no value.
        sink_R = plgpu.load(sinks_ref.at[query_head_R], mask=live_R, other=0.0) * _LOG2E
        first_R = jnp.broadcast_to(split == 0, (rows,))
        top_R, total_R = jnp.where(first_R, sink_R, top_R), jnp.where(first_R, 1.0, total_R)
    carry = jnp.zeros((rows, width), jnp.float32), top_R, total_R
    first_block = jnp.int32(0)
    blocks = pl.cdiv(jnp.minimum(length, m * page), keys)
    if lowest is not None:
        first_block = jnp.maximum(lowest + 1, 0) // keys
    per_split = pl.cdiv(jnp.maximum(blocks - first_block, 0), splits)
    start = first_block + split * per_split
    end = jnp.minimum(start + per_split, blocks)
    tree_start, tree_end = jnp.int32(0), jnp.int32(-(-t // tree_keys))
    if causal:
        last_node = (first_row + rows - 1) // group
        tree_end = jnp.minimum(tree_end, last_node // tree_keys + 1)
        if window is None:
            whole = jnp.maximum(start, jnp.minimum(end, length // keys))
            carry = lax.fori_loop(start, whole, functools.partial(prefix, whole=True), carry)
            start = whole
            # Dead rows behind the last node see what its first node does; nothing reads them.
            tree_start = jnp.where(split == 0, (first_row // group + 1) // tree_keys, 0)
            carry = lax.fori_loop(0, tree_start, functools.partial(tree, whole=True), carry)
    carry = lax.fori_loop(start, end, prefix, carry)
    tree_end = jnp.where(split == 0, tree_end, jnp.int32(0))
    acc_RC, top_R, total_R = lax.fori_loop(tree_start, tree_end, tree, carry)

    if splits == 1:
        plgpu.store(out_ref.at[at_RC], (acc_RC / total_R[:, None]).astype(out_ref.dtype), mask=live_RC)
    else:
        top_ref, total_ref = partial_refs
        plgpu.store(out_ref.at[(split, *at_RC)], acc_RC, mask=live_RC)
        plgpu.store(top_ref.at[split, b, node_R, query_head_R], top_R, mask=live_R)
        plgpu.store(total_ref.at[split, b, node_R, query_head_R], total_R, mask=live_R)


def _merge_kernel(acc_ref, top_ref, total_ref, out_ref, *, width: int, stretches: int) -> None:
    """One query row and head: [S, rows, C], [S, rows] -> [rows, C]."""
    splits, _, c = acc_ref.shape
    row = pl.program_id(0)
    split_S, channel_C = jnp.arange(stretches), jnp.arange(width)
    live_S, live_C = split_S < splits, channel_C < c
    top_S = plgpu.load(top_ref.at[split_S, row], mask=live_S, other=_MASKED)
    total_S = plgpu.load(total_ref.at[split_S, row], mask=live_S, other=0.0)
    live_SC = live_S[:, None] & live_C[None, :]
    acc_SC = plgpu.load(acc_ref.at[split_S[:, None], row, channel_C[None, :]], mask=live_SC, other=0.0)
    weight_S = jnp.exp2(top_S - top_S.max())
    out_C = (acc_SC * weight_S[:, None]).sum(axis=0) / (total_S * weight_S).sum()
    plgpu.store(out_ref.at[row, channel_C], out_C.astype(out_ref.dtype), mask=live_C)


def tree_attention(args: TreeAttentionArgs, *, blocks: Blocks | None = None, interpret: bool = False) -> jax.Array:
    """See api.tree_attention.

    Args:
      blocks: sizes; by `blocks_for` for the device at hand.
      interpret: run in Pallas' interpreter, on any backend.
    """
    on_triton()
    q = args.q_BNHC
    b, n, h, c = q.shape
    t, g = args.tree_k_BTGC.shape[1:3]
    values = c if args.value_channels is None else args.value_channels
    group, width, causal = h // g, max(16, power_of_two(values)), args.tree_mask_BNT is None
    if blocks is None:
        blocks = blocks_for(c, q.dtype, n * group, device_kind(), causal=causal)
    row_blocks = -(-n * group // blocks.rows)
    splits = blocks.splits
    if splits is None:
        most = args.table_BM.shape[1] * args.pages.shape[2] // (2 * blocks.keys)
        # Rounded down: a last wave of a few programs would cost as much as a full one.
        splits = max(1, min(most, blocks.programs // (b * g * row_blocks), 64))
    offset = jnp.zeros((1, 1), jnp.int32) if args.window is None else args.offsets.astype(jnp.int32)
    sinks = jnp.zeros((1,), jnp.float32) if args.sinks_H is None else args.sinks_H.astype(jnp.float32)
    words = jnp.zeros((1, 1, 1), jnp.uint32) if args.tree_mask_BNT is None else _pack_words(args.tree_mask_BNT)
    kernel = functools.partial(
        _kernel, group=group, rows=blocks.rows, keys=blocks.keys, width=width,
        tree_keys=max(16, min(blocks.keys if causal else 64, power_of_two(t))), splits=splits, scale=args.factor,
        window=args.window, soft_cap=args.soft_cap, causal=causal, sinks=args.sinks_H is not None,
        inside=args.value_channels is not None,
    )  # fmt: skip
    part = lambda *shape: jax.ShapeDtypeStruct((splits, *shape), jnp.float32)
    whole = jax.ShapeDtypeStruct((b, n, h, values), q.dtype)
    parts = [part(b, n, h, values), part(b, n, h), part(b, n, h)]
    out, *sums = pl.pallas_call(
        kernel,
        grid=(b, g * row_blocks, splits),
        out_shape=[whole] if splits == 1 else parts,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="tree_attention",
    )(
        q, args.tree_k_BTGC, args.tree_v_BTGC, words, args.pages, args.placed().table_BM,
        args.length_B, offset, sinks,
    )  # fmt: skip
    return out if splits == 1 else _merge(out, *sums, dtype=q.dtype, interpret=interpret)


def _merge(acc: jax.Array, top: jax.Array, total: jax.Array, dtype: jnp.dtype, interpret: bool) -> jax.Array:
    """The stretches' sums [S, B, N, H, C], maxima and weights [S, B, N, H] as one result."""
    splits, *rows, c = acc.shape
    count = math.prod(rows)
    warps = 2 if splits <= 8 else 4  # and twice as many from 256 channels on, for a power of two it must be
    merged = pl.pallas_call(
        functools.partial(_merge_kernel, width=max(16, power_of_two(c)), stretches=power_of_two(splits)),
        grid=(count,),
        out_shape=jax.ShapeDtypeStruct((count, c), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps * max(1, power_of_two(c + 1) // 256), num_stages=1),
        interpret=interpret,
        name="tree_attention_merge",
    )(acc.reshape(splits, count, c), top.reshape(splits, count), total.reshape(splits, count))
    return merged.reshape(*rows, c)
