"""Tree attention: one interface, several implementations."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Implementation, Operation, log_once, no_triton
from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch.gpu import supported
from pallas_kernels.tree_attention import gpu, gpu_mosaic, mosaic_latent, mosaic_plain, mosaic_wide, reference, tpu
from pallas_kernels.tree_attention.reference import Shared, TreeAttentionArgs

#: Kernels on Mosaic GPU by what they are for, in the order in which they are asked.
_MOSAIC = {"few rows": gpu_mosaic, "many rows": mosaic_wide, "latent": mosaic_latent, "any shape": mosaic_plain}


def _on_mosaic(args: TreeAttentionArgs) -> tuple[str | None, str]:
    """The first kernel on Mosaic GPU that serves these arguments and leaves them to no other, and why none before.

    Where there is no Triton the first that serves them, but for the one for any shape, which plain XLA may outrun.
    """
    if (why := supported()) is not None:
        return None, why
    reasons, serving = [], []
    for name, kernel in _MOSAIC.items():
        if (said := kernel.refusal(args)) is None:
            if (said := kernel.slower(args)) is None:
                return name, "; ".join(reasons)
            serving.append(name)
        reasons.append(f"{name}: {said}")
    left = [name for name in serving if no_triton() is not None and name != "any shape"]
    return next(iter(left), None), "; ".join(reasons)


def _on_gpu(args: TreeAttentionArgs, **launch: Any) -> jax.Array:
    """On Mosaic GPU where a kernel is to be taken there, else on Triton; `launch` is Triton's, and asks for it."""
    asked = bool(launch) and no_triton() is None
    name, reason = (None, "its sizes are given") if asked else _on_mosaic(args)
    if name is None:
        log_once(logging.INFO, f"tree_attention: gpu on Triton: {reason}")
        return gpu.tree_attention(args, **launch)
    log_once(logging.INFO, f"tree_attention: gpu on Mosaic GPU, {name}")
    return _MOSAIC[name].tree_attention(args)


def _gpu_refusal(args: TreeAttentionArgs) -> str | None:
    """Why no kernel for GPUs is to serve these arguments, or None."""
    if (why := no_triton()) is None:
        return gpu.refusal(args)
    name, reason = _on_mosaic(args)
    return None if name else f"{why}; on Mosaic GPU {reason}"


_interpreted = functools.partial(tpu.tree_attention, interpret=pltpu.InterpretParams())
OPERATION = Operation(
    "tree_attention",
    {
        "reference": Implementation(reference.tree_attention),
        "tpu": Implementation(tpu.tree_attention, tpu.refusal),
        "gpu": Implementation(_on_gpu, _gpu_refusal),
        "batch_invariant": Implementation(
            gpu_mosaic.tree_attention, lambda args: supported() or gpu_mosaic.refusal(args)
        ),
        "interpret": Implementation(_interpreted, tpu.refusal),
    },
)


def tree_attention(
    q_BNHC: jax.Array, pages: jax.Array, table_BM: jax.Array, length_B: jax.Array, tree_k_BTGC: jax.Array,
    tree_v_BTGC: jax.Array, tree_mask_BNT: jax.Array | None = None, *, scale: float | None = None,
    window: int | None = None, offset_BN: jax.Array | None = None, soft_cap: float | None = None,
    sinks_H: jax.Array | None = None, value_channels: int | None = None, first_page: int = 0,
    shared: Shared | None = None, implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """Attention of N tokens a request over a paged prefix and over the tree's own keys and values.

    Serves draft trees, plain decoding (N = 1) and chunks of a prompt (no mask: causal) alike.
    No mask over the prefix exists: every query sees all of it, or its window's part.

    Args:
      q_BNHC: queries, rotary embedding applied.
      pages: [P, G, page, W], keys and values side by side, of one layer (or of all layers, see first_page). W is 2C, or
        2C rounded up to whole tiles of 128 lanes, which a TPU needs (XLA would copy another pool for the kernel). With
        value_channels it holds keys alone, and W is C.
      table_BM: int32 page numbers of each row; entries beyond the length may hold anything.
      length_B: int32 tokens of each prefix.
      tree_k_BTGC, tree_v_BTGC: the tree's keys and values; T may exceed N (earlier levels first).
      tree_mask_BNT: whether query n sees tree entry t ([1, N, T] serves every row); every query
        must see at least one. None: causal, query n sees the entries up to n, and T is N; kernels then leave out
        what lies above the diagonal.
      scale: of the scores; 1/sqrt(C) by default.
      window: a query at position p sees prefix tokens above p - window only. What a window hides
        among the tree's entries is the mask's business.
      offset_BN: int32, position of each query counted from the prefix's end; read with a window
        only. By default the entries a query sees less one, which is right for whole paths.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap).
      sinks_H: a score of each query head that takes its part of the softmax and has no value (gpt-oss); neither scale
        nor soft_cap applies to it.
      value_channels: values are the first so many channels of the keys (multi-head latent attention); C otherwise.
      first_page: of a layer, added to the table's numbers. Layers that differ in it alone share one table.
      shared: what layers have in common, so that kernels may read some of it early; None: nothing is known of others.
      implementation: see dispatch.

    Returns:
      [B, N, H, C] in q's dtype, or [B, N, H, value_channels]; scores and sums are float32.

    Raises:
      ValueError: shapes that do not fit each other, or that a named kernel does not serve.
    """
    args = TreeAttentionArgs(
        q_BNHC, pages, table_BM, length_B, tree_k_BTGC, tree_v_BTGC, tree_mask_BNT, offset_BN,
        sinks_H, scale=scale, window=window, soft_cap=soft_cap, value_channels=value_channels,
        first_page=first_page, shared=shared,
    )  # fmt: skip
    _check(args)
    b, n = q_BNHC.shape[:2]
    if table_BM.shape[1] == 0:  # nothing is ever committed: one page that no length reaches
        args = dataclasses.replace(args, table_BM=jnp.zeros((b, 1), jnp.int32))
    if tree_mask_BNT is not None:
        mask = jnp.broadcast_to(tree_mask_BNT, (b, n, tree_k_BTGC.shape[1]))
        args = dataclasses.replace(args, tree_mask_BNT=mask)
    return OPERATION(args, implementation)


def _check(args: TreeAttentionArgs) -> None:
    q, pages, k, mask = args.q_BNHC, args.pages, args.tree_k_BTGC, args.tree_mask_BNT
    if q.ndim != 4 or pages.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q, pages and tree_k must have 4 axes, got {q.shape}, {pages.shape} and {k.shape}")
    b, n, h, c = q.shape
    g = k.shape[2]
    expected = {
        "tree_k": (k.shape, (b, k.shape[1], g, c)),
        "tree_v": (args.tree_v_BTGC.shape, (*k.shape[:3], args.value_channels or c)),
        "pages": (pages.shape, (pages.shape[0], g, pages.shape[2], pages.shape[3])),
        "table": (args.table_BM.shape, (b, *args.table_BM.shape[1:2])),
        "length": (args.length_B.shape, (b,)),
    }
    if args.sinks_H is not None:
        expected["sinks"] = (args.sinks_H.shape, (h,))
    for name, (got, want) in expected.items():
        if got != want:
            raise ValueError(f"{name} must have shape {want} beside q {q.shape}, got {got}")
    if mask is None and k.shape[1] != n:
        raise ValueError(f"without a mask there must be as many tree entries as queries, got {k.shape[1]} and {n}")
    if mask is not None and mask.shape not in ((b, n, k.shape[1]), (1, n, k.shape[1])):
        raise ValueError(f"tree_mask must have shape {(b, n, k.shape[1])} or {(1, n, k.shape[1])}, got {mask.shape}")
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"tree_mask must be bool, got {mask.dtype}")
    width = 2 * c if args.value_channels is None else c
    if pages.shape[3] not in (width, round_up(width, 128)):
        raise ValueError(f"pages must be {width} or {round_up(width, 128)} wide for heads of {c}, got {pages.shape[3]}")
    if args.value_channels is not None and not 1 <= args.value_channels <= c:
        raise ValueError(f"value_channels must be from 1 to the {c} channels of a key, got {args.value_channels}")
    if h % g:
        raise ValueError(f"query heads must be a multiple of the {g} key-value heads, got {h}")
    if args.window is not None and args.window < 1:
        raise ValueError(f"window must be at least 1 token, got {args.window}")
    if args.soft_cap is not None and args.soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, got {args.soft_cap}")
