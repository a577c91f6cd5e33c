"""The GPU kernel in Pallas' interpreter against a dense float64 reference, with everything unused poisoned.

The interpreter knows nothing of Triton's types, registers or memory: the compile proofs
(test_aot.py) are the other half, and on a GPU the same cases run compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import api, gpu
from pallas_kernels.tree_attention.cases import CASES, SMALL, Case
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

_TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}


def run(case: Case, blocks: gpu.Blocks | None, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    args = case.draw(seed, poison=True)
    return np.asarray(kernel(blocks)(args).astype(jnp.float32)), case.defined(args)


def kernel(blocks: gpu.Blocks | None) -> Callable[[TreeAttentionArgs], jax.Array]:
    return jax.jit(functools.partial(gpu.tree_attention, blocks=blocks, interpret=jax.default_backend() != "gpu"))


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_small_case(case: Case):
    blocks = gpu.Blocks(rows=16, keys=16, warps=4, stages=2, programs=0, splits=2)
    assert error(*run(case, blocks)) < _TOLERANCE[case.dtype]


@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("keys", [16, 32])
def test_blocks_and_splits_change_nothing(splits: int, keys: int):
    # 16 keys are a part of a page, 32 are two pages; 7 stretches leave some without a token.
    case = dataclasses.replace(CASES["small-tree"], page=16, context=70)
    blocks = gpu.Blocks(rows=32, keys=keys, warps=4, stages=2, programs=0, splits=splits)
    assert error(*run(case, blocks, seed=splits)) < _TOLERANCE["float32"]


def test_blocks_by_device():
    case = dataclasses.replace(CASES["small-bf16"], batch=2, page=64, context=192)
    assert error(*run(case, None)) < _TOLERANCE["bfloat16"]


def test_several_row_blocks():
    case = dataclasses.replace(CASES["small-prefill"], nodes=21, prior=3)
    blocks = gpu.Blocks(rows=16, keys=16, warps=4, stages=2, programs=0, splits=2)
    assert error(*run(case, blocks)) < _TOLERANCE["float32"]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("keys", [16, 32])
def test_without_a_mask_every_block_of_rows_stops_at_its_diagonal(splits: int, keys: int):
    # Rows of 8 nodes: some blocks of the prefix and of the tree are whole, and the last nodes fill no block.
    case = dataclasses.replace(CASES["small-causal"], page=16, context=70)
    blocks = gpu.Blocks(rows=16, keys=keys, warps=4, stages=2, programs=0, splits=splits)
    assert error(*run(case, blocks, seed=splits)) < _TOLERANCE["float32"]


def test_without_a_mask_later_tokens_cannot_reach_earlier_ones():
    case = CASES["small-causal"]
    args = case.draw(0)
    k, v = (x.at[1, 40].set(jnp.nan) for x in (args.tree_k_BTGC, args.tree_v_BTGC))
    blocks = gpu.Blocks(rows=16, keys=16, warps=4, stages=2, programs=0, splits=1)
    out = np.asarray(kernel(blocks)(dataclasses.replace(args, tree_k_BTGC=k, tree_v_BTGC=v)))
    nan = np.isnan(out).any(axis=(2, 3))
    want = np.zeros_like(nan)
    want[1, 40:] = True
    np.testing.assert_array_equal(nan, want)


def test_broken_draft_stays_with_those_who_see_it():
    case = CASES["small-tree"]
    args = case.draw(0)
    mask = np.asarray(args.mask)
    blind = np.argwhere(~mask[1].any(axis=0) | ~mask[1, -1])[-1, 0]
    k, v = (x.at[1, blind].set(jnp.nan) for x in (args.tree_k_BTGC, args.tree_v_BTGC))
    args = dataclasses.replace(args, tree_k_BTGC=k, tree_v_BTGC=v)
    blocks = gpu.Blocks(rows=16, keys=16, warps=4, stages=2, programs=0, splits=1)
    nan = np.isnan(np.asarray(kernel(blocks)(args))).any(axis=(2, 3))
    want = np.zeros_like(nan)
    want[1] = mask[1, :, blind]
    np.testing.assert_array_equal(nan, want)


def by_name(shapes: TreeAttentionArgs) -> None:
    jax.eval_shape(lambda args: api.tree_attention(**vars(args), implementation="gpu"), shapes)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(head_dim=68), "multiple of 8 in .16, 256., got 68"),
        (dict(head_dim=512), "got 512"),
        (dict(page=24), "power of two of at least 8, got 24"),
        (dict(kv_heads=1, head_dim=576, values=440), "at most 512 channels and 128 behind them, .* got 440 of 576"),
    ],
)
def test_refusals_name_the_constraint(change: dict[str, int], message: str):
    case = dataclasses.replace(CASES["small-bf16"], **change)
    with pytest.raises(ValueError, match=message):
        by_name(case.shapes())


def test_without_a_mask_every_query_brings_its_entry():
    shapes = dataclasses.replace(CASES["small-prior"].shapes(), tree_mask_BNT=None)
    with pytest.raises(ValueError, match="as many tree entries as queries, got 37 and 4"):
        by_name(shapes)


def test_mixed_dtypes_are_refused():
    shapes = CASES["small-bf16"].shapes()
    pages: Any = jax.ShapeDtypeStruct(shapes.pages.shape, jnp.float32)
    with pytest.raises(ValueError, match="share a dtype, got bfloat16, float32"):
        by_name(dataclasses.replace(shapes, pages=pages))


@pytest.mark.parametrize("channels", [8, 128, 192, 384, 512])
def test_stretches_are_merged_by_warps_that_triton_takes(channels: int):
    acc, sums = jnp.zeros((9, 1, 1, 1, channels)), jnp.zeros((9, 1, 1, 1))
    merge = functools.partial(gpu._merge, dtype=jnp.bfloat16, interpret=False)
    calls = [e for e in jax.make_jaxpr(merge)(acc, sums, sums).eqns if e.primitive.name == "pallas_call"]
    warps = calls[0].params["compiler_params"].num_warps
    assert 4 <= warps <= 16 and warps & (warps - 1) == 0


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case not in SMALL])
def test_sizes_fit_every_case(name: str):
    case = CASES[name]
    rows = case.nodes * case.heads // case.kv_heads
    for device in ("NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "?"):
        blocks = gpu.blocks_for(case.head_dim, jnp.dtype(case.dtype), rows, device, causal=case.mask == "causal")
        for size in (blocks.rows, blocks.keys):
            assert size >= 16 and size & (size - 1) == 0
        # Double-buffered keys and values must fit the chip's shared memory beside the queries.
        values = case.values or case.head_dim
        query = sum(1 << (size - 1).bit_length() for size in (values, case.head_dim - values) if size)
        entry = 2 * query if case.values is None else query
        used = jnp.dtype(case.dtype).itemsize * (entry * blocks.keys * (blocks.stages - 1) + query * blocks.rows)
        limit = {"L4": 99, "A1": 163}.get(device[7:9], 227)
        assert used <= limit * 1024
