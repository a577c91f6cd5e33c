"""Tree rejection sampling: one interface, several implementations."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Implementation, Operation, log_once, no_triton
from pallas_kernels.rejection_sampling import gpu, gpu_mosaic, reference, tpu
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, SamplingRows, Verdict


def _interpreted(args: RejectionSamplingArgs) -> Verdict:
    # TPU interpret mode cannot copy bfloat16 rows viewed as words; the plain one can.
    return tpu.rejection_sampling(args, interpret=args.logits_BNV.dtype == jnp.bfloat16 or pltpu.InterpretParams())


def _on_gpu(args: RejectionSamplingArgs, **launch: Any) -> Verdict:
    """On Mosaic GPU where that is possible, else on Triton; `launch` is Triton's, and asks for it."""
    asked = bool(launch) and no_triton() is None
    reason = "its sizes are given" if asked else _mosaic_refusal(args)
    if reason is None:
        log_once(logging.INFO, "rejection_sampling: gpu on Mosaic GPU")
        return gpu_mosaic.rejection_sampling(args)
    log_once(logging.INFO, f"rejection_sampling: gpu on Triton: {reason}")
    return gpu.rejection_sampling(args, **launch)


def _mosaic_refusal(args: RejectionSamplingArgs) -> str | None:
    return gpu_mosaic.unsupported() or gpu_mosaic.refusal(args)


def _gpu_refusal(args: RejectionSamplingArgs) -> str | None:
    """Why no kernel for GPUs serves these arguments, or None."""
    if (why := no_triton()) is None:
        return gpu.refusal(args)
    mosaic = _mosaic_refusal(args)
    return None if mosaic is None else f"{why}; on Mosaic GPU {mosaic}"


OPERATION = Operation(
    "rejection_sampling",
    {
        "reference": Implementation(reference.rejection_sampling),
        "tpu": Implementation(tpu.rejection_sampling, tpu.refusal),
        "gpu": Implementation(_on_gpu, _gpu_refusal),
        "interpret": Implementation(_interpreted, tpu.refusal),
    },
)


def rejection_sampling(
    logits_BNV: jax.Array, tokens_BN: jax.Array, parents_BN: jax.Array, depths_BN: jax.Array, sampling: SamplingRows,
    position_B: jax.Array, draft_probs_BXV: jax.Array | None = None, *, depth: int, chain: bool, greedy: bool = False,
    noise_BDV: jax.Array | None = None, implementation: str | None = None,
) -> Verdict:  # fmt: skip
    """Which drafted path the target accepts, and the token after it.

    Coupled mode (no draft_probs): the target's own token is drawn at each node of the path, and
    the child that holds it is accepted; siblings hold distinct tokens. Rejection mode: children
    are i.i.d. draws from their parent's draft_probs, tried in the order of their indices
    (`reference` has the rule). Greedy rows take the argmax (the lowest of ties) in both.

    What a request gets depends on its own arguments only: neither on the batch, its place in
    it, tiles or shards, nor, but for the last bits of logarithms, on the implementation.

    Args:
      logits_BNV: target logits at each node after bias and penalties, float32 or bfloat16.
      tokens_BN: int32 token of each node; one outside [0, V) is no proposal, and is passed over.
      parents_BN: int32 index of each node's parent, before it; the root names itself.
      depths_BN: int32 distance to the root.
      position_B: int32 absolute position of the token that the root's logits predict.
      draft_probs_BXV: float32, a row for each of the first X nodes; the others are leaves.
      depth: of the deepest node. chain: every node's parent is the one before it (N = depth + 1).
      greedy: every row is greedy, whatever its temperature says; compiles no noise.
      noise_BDV: the Gumbel noise (noise.Purpose.TARGET) of positions position_B + 0..depth, where the
        caller has it anyway; the reference takes it, kernels make their own.
      implementation: see dispatch.

    Raises:
      ValueError: shapes that do not fit each other, or that a named kernel does not serve.
    """
    args = RejectionSamplingArgs(
        logits_BNV, tokens_BN, parents_BN, depths_BN, sampling, position_B, draft_probs_BXV, noise_BDV,
        depth=depth, chain=chain, greedy=greedy,
    )  # fmt: skip
    _check(args)
    return OPERATION(args, implementation)


def _check(args: RejectionSamplingArgs) -> None:
    logits, sampling, depth = args.logits_BNV, args.sampling, args.depth
    if logits.ndim != 3 or 0 in logits.shape:
        raise ValueError(f"logits must be [B, N, V] and not empty, got {logits.shape}")
    b, n, v = logits.shape
    whole = {name: (getattr(args, f"{name}_BN"), (b, n)) for name in ("tokens", "parents", "depths")}
    whole |= {"position": (args.position_B, (b,)), "top_k": (sampling.top_k_B, (b,))}
    real = {name: (getattr(sampling, f"{name}_B"), (b,)) for name in ("temperature", "top_p", "min_p")}
    wanted = {jnp.int32: whole, jnp.float32: real, jnp.uint32: {"seed": (sampling.seed_B, (b,))}}
    for dtype, fields in wanted.items():
        for name, (got, shape) in fields.items():
            if got.shape != shape or got.dtype != dtype:
                raise ValueError(
                    f"{name} must be {jnp.dtype(dtype)} {shape} beside logits {logits.shape}, "
                    f"got {got.dtype} {got.shape}"
                )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if not 0 <= depth < n or (args.chain and depth != n - 1):
        raise ValueError(f"depth must be {n - 1 if args.chain else f'0 to {n - 1}'} for {n} nodes, got {depth}")
    if (draft_probs := args.draft_probs_BXV) is not None:
        b_draft, x, v_draft = draft_probs.shape if draft_probs.ndim == 3 else (0, 0, 0)
        if (b_draft, v_draft) != (b, v) or x > n or (x < depth):
            raise ValueError(
                f"draft_probs must be [{b}, {depth} to {n}, {v}] beside logits {logits.shape} and depth {depth}, "
                f"got {draft_probs.shape}"
            )
    expected = (b, depth + 1, v)
    if args.noise_BDV is not None and args.noise_BDV.shape != expected:
        raise ValueError(f"noise must be {expected} beside logits {logits.shape}, got {args.noise_BDV.shape}")
