"""The Mosaic kernel for many rows: interpreted with race detection, its walk over blocks, and Hopper's compiler.

On a Hopper GPU it runs compiled, as test_tree_attention_mosaic's does.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.aot import worker
from pallas_kernels.tree_attention import api, mosaic_wide
from pallas_kernels.tree_attention.cases import CASES, Case
from pallas_kernels.tree_attention.mosaic_walk import Walk
from pallas_kernels.tree_attention.mosaic_wide import Blocks
from pallas_kernels.tree_attention.reference import TreeAttentionArgs
from tests.kernels import hopper

#: Chunks and trees of several tiles; prefixes of 0 and at the edges of pages; pages shorter and longer than a block.
SMALL = (
    (Case("causal", 2, 70, 4, 2, 64, 64, 300, mask="causal", lengths="ragged"), Blocks(64, 2, stages=2, splits=1)),
    (Case("causal-split", 3, 70, 4, 1, 64, 64, 300, mask="causal", lengths="ragged"), Blocks(64, 1, 3, splits=2)),
    (Case("tree", 2, 36, 4, 1, 64, 16, 150, lengths="ragged", prior=60), Blocks(64, 1, stages=2, splits=2)),
    (Case("tree-odd", 2, 21, 4, 1, 64, 64, 150, lengths="ragged", prior=110), Blocks(128, 2, stages=2, splits=1)),
    (Case("group7", 2, 20, 7, 1, 128, 256, 400, mask="causal", lengths="ragged"), Blocks(128, 1, stages=2, splits=1)),
    (
        Case("window-sinks", 3, 40, 4, 2, 64, 64, 400, mask="causal", lengths="ragged", window=70, sinks=True),
        Blocks(64, 1, stages=2, splits=2),
    ),
    (
        Case("cluster", 2, 70, 4, 1, 64, 64, 300, mask="causal", lengths="ragged"),
        Blocks(64, 2, stages=2, splits=1, members=2),
    ),
    (Case("d96", 2, 40, 4, 2, 96, 64, 200, lengths="ragged"), Blocks(64, 1, stages=2, splits=2)),
    (
        Case("cluster-tree-page8", 2, 36, 8, 2, 64, 8, 150, lengths="ragged", prior=60),
        Blocks(64, 2, stages=2, splits=2, members=2),
    ),
    (Case("d224", 2, 3, 4, 1, 224, 64, 100, lengths="ragged"), Blocks(stages=1, splits=2)),
    (Case("window-tree", 3, 20, 4, 1, 64, 64, 200, lengths="ragged", window=70), Blocks(64, 1, stages=2, splits=1)),
    (
        Case("few-d256-soft-cap", 2, 3, 4, 1, 256, 64, 100, mask="causal", lengths="ragged", soft_cap=2.0),
        Blocks(stages=1, splits=2),
    ),
)


BY_NAME = {case.name: (case, blocks) for case, blocks in SMALL}


def run(args: TreeAttentionArgs, blocks: Blocks) -> jax.Array:
    params = None
    if jax.default_backend() != "gpu":
        params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(functools.partial(mosaic_wide.tree_attention, blocks=blocks, interpret=params))(args)


@hopper.interpreted
@pytest.mark.parametrize(("case", "blocks"), SMALL, ids=lambda x: getattr(x, "name", ""))
def test_agrees_with_the_definition_and_has_no_races(case: Case, blocks: Blocks, capfd: pytest.CaptureFixture[str]):
    args = case.draw(0, poison=True)
    got, want = np.asarray(run(args, blocks).astype(jnp.float32)), case.defined(args)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 4e-3
    assert "RACE" not in capfd.readouterr().out


def steep(case: Case, args: TreeAttentionArgs) -> TreeAttentionArgs:
    """Keys that grow along the prefixes of even requests and shrink along others': maxima are passed often, or never
    again; queries of every third node are so small that they pass none after the first."""
    pages, q = np.asarray(args.pages.astype(jnp.float32)), np.asarray(args.q_BNHC.astype(jnp.float32)).copy()
    pages = pages.copy()
    for i, length in enumerate(np.asarray(args.length_B)):
        at = np.arange(length)
        ramp = 0.05 + 30.0 * (at if i % 2 == 0 else at[::-1]) / max(1, length)
        pages[np.asarray(args.table_BM)[i, at // case.page], :, at % case.page, : case.head_dim] *= ramp[:, None, None]
    q[:, ::3] *= 0.05
    of = lambda x: jnp.asarray(x).astype(args.pages.dtype)
    return dataclasses.replace(args, pages=of(pages), q_BNHC=of(q))


@hopper.interpreted
@pytest.mark.parametrize(
    ("name", "change"),
    [("causal", dict(dtype="float16")), ("group7", {}), ("window-sinks", dict(window=260))],
    ids=["float16", "group7", "window-sinks"],
)
def test_maxima_that_are_passed_and_those_that_are_not(name: str, change: dict[str, Any]):
    """In float16 weights far above 1 would be infinite."""
    case, blocks = BY_NAME[name]
    case = dataclasses.replace(case, **change)
    args = steep(case, case.draw(0))
    got, want = np.asarray(run(args, blocks).astype(jnp.float32)), case.defined(args)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 4e-3


@hopper.interpreted
def test_a_row_does_not_depend_on_the_maxima_of_its_neighbours():
    case, blocks = BY_NAME["causal"]
    args = steep(case, case.draw(0))
    other = dataclasses.replace(args, q_BNHC=args.q_BNHC.at[:, 1::2].multiply(20))
    found, again = (np.asarray(run(x, blocks).astype(jnp.float32)) for x in (args, other))
    np.testing.assert_array_equal(found[:, ::2], again[:, ::2])
    assert (found[:, 1::2] != again[:, 1::2]).any()


@hopper.interpreted
@pytest.mark.parametrize("mask", ["causal", "tree"])
def test_broken_new_tokens_stay_with_those_who_see_them(mask: Any):
    case, blocks = BY_NAME["tree"]
    case = dataclasses.replace(case, prior=0, mask=mask)
    args = case.draw(0)
    k, v = (x.at[1, 12].set(jnp.nan) for x in (args.tree_k_BTGC, args.tree_v_BTGC))
    out = np.asarray(run(dataclasses.replace(args, tree_k_BTGC=k, tree_v_BTGC=v), blocks).astype(jnp.float32))
    want = np.zeros((case.batch, case.nodes), bool)
    want[1] = np.asarray(args.mask)[1, :, 12]
    np.testing.assert_array_equal(np.isnan(out).any(axis=(2, 3)), want)


@pytest.mark.parametrize(
    ("causal", "window", "members"),
    [(True, None, 1), (True, 150, 1), (False, None, 1), (True, None, 2), (True, 150, 2), (False, None, 2)],
)
def test_a_walk_meets_every_block_once_and_masks_what_some_row_does_not_see(
    causal: bool, window: int | None, members: int
):
    kernel = dataclasses.replace(KERNEL, causal=causal, members=members)
    keys, lengths, height = kernel.keys, np.asarray([0, 1, 127, 128, 129, 700]), 128 * members
    places = np.stack(np.meshgrid(lengths, np.arange(kernel.blocks), np.arange(kernel.splits), indexing="ij"), -1)
    steps = np.arange(-(-700 // keys) + -(-kernel.entries // keys) + 1)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=0)
    def walk(place: jax.Array) -> Any:
        length, block, split = place
        first, last = (jnp.minimum(block * height + i, kernel.rows - 1) // kernel.group for i in (0, height - 1))
        lowest, highest = (jnp.maximum(0, length + i - (window or 2**20) + 1) for i in (first, last))
        walk = Walk.of(kernel, length, lowest, highest, block, split)
        return (walk.begin, walk.end, walk.whole, walk.lowest), jax.vmap(walk.place)(jnp.asarray(steps))

    (begin, end, whole, lowest), (prefix, block) = jax.tree.map(np.asarray, walk(jnp.asarray(places.reshape(-1, 3))))
    for i in range(0, len(begin), kernel.splits):
        length, tile, _ = places.reshape(-1, 3)[i]
        own = slice(i, i + kernel.splits)
        assert begin[i] == 0 and (begin[own][1:] == end[own][:-1]).all()
        total, first = end[own][-1], lowest[i]
        nodes = np.arange(tile * height, min(tile * height + height, kernel.rows)) // kernel.group
        low = np.maximum(0, length + nodes - window + 1) if window is not None else np.zeros_like(nodes)
        assert first == low.min()
        last = nodes.max() if causal else kernel.entries - 1
        met = {(bool(prefix[i, step]), int(block[i, step])) for step in range(total)}
        assert len(met) == total
        seen = {(True, x // keys) for x in range(first, length)} | {(False, x // keys) for x in range(last + 1)}
        assert seen <= met
        for step in range(whole[i]):
            at = block[i, step] * keys
            if prefix[i, step]:
                assert at >= low.max() and at + keys <= length
            else:
                assert causal and at + keys - 1 <= nodes.min()


KERNEL = mosaic_wide.kernel_of(
    dataclasses.replace(BY_NAME["causal"][0], batch=1, nodes=150, heads=8).shapes(), Blocks(128, 2, splits=3)
)


@hopper.proved
@pytest.mark.parametrize(
    "case",
    [
        *(CASES[name] for name in ("prefill512-4k", "prefill256-4k", "tree64-b8-8k", "one-kv-head", "soft-cap")),
        CASES["d96-prefill256"], Case("tree64-odd", 2, 64, context=1024, prior=67),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_compiles_for_hopper_without_spills(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, found = hopper.compiled(mosaic_wide.tree_attention, case.shapes(), tmp_path, monkeypatch)
    assert found and max(kernel.spill_bytes for kernel in found) <= worker.MAX_SPILL_BYTES
    assert not any(kernel.serialized for kernel in found)


def test_takes_the_place_of_triton_on_hopper_with_the_others(monkeypatch: pytest.MonkeyPatch):
    taken = []
    monkeypatch.setattr(api.gpu, "tree_attention", lambda args, **launch: taken.append(("triton", launch)))
    for module in (api.gpu_mosaic, mosaic_wide, api.mosaic_latent, api.mosaic_plain):
        name = module.__name__.rpartition("_")[2]
        monkeypatch.setattr(module, "tree_attention", lambda args, name=name: taken.append((name, {})))
    run = api.OPERATION.implementations["gpu"].run
    monkeypatch.setattr(api, "supported", lambda: "another device")
    run(CASES["tree64-b8-8k"].shapes())
    monkeypatch.setattr(api, "supported", lambda: None)
    served = "tree64-b8-8k", "decode-b8-8k", "d256", "page16", "latent-h128", "latent-prefill256", "f32", "d96", "d80"
    for name in served:
        run(CASES[name].shapes())
    run(CASES["tree64-b8-8k"].shapes(), blocks=1)
    names = "triton", "wide", "mosaic", "wide", "wide", "latent", "latent", "plain", "mosaic", "triton"
    assert taken == [*((name, {}) for name in names), ("triton", {"blocks": 1})]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        (dict(head_dim=128, page=16), None),
        (dict(mask="tree"), None),
        (dict(dtype="float32"), "must be bfloat16 or float16, got float32"),
        (dict(head_dim=256, soft_cap=30.0), None),
        (dict(head_dim=96), None),
        (dict(head_dim=80), "must be 32, 64, 96, 128, 224 or 256, got 80"),
        (dict(head_dim=160), "must be 32, 64, 96, 128, 224 or 256, got 160"),
        (dict(page=24), "power of two of at least 8, got 24"),
        (dict(window=64, mask="tree"), None),
    ],
)
def test_what_it_serves(change: dict[str, Any], said: str | None):
    why = mosaic_wide.refusal(dataclasses.replace(BY_NAME["causal"][0], **change).shapes())
    assert why is None if said is None else said in (why or "")


def test_steps_are_of_64_or_128_keys():
    with pytest.raises(ValueError, match="keys of a step must be 64 or 128, got 256"):
        mosaic_wide.kernel_of(BY_NAME["causal"][0].shapes(), Blocks(keys=256))
