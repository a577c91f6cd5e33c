"""The Mosaic kernel for values that lie in their keys: interpreted with race detection, and Hopper's compiler.

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
from pallas_kernels.tree_attention import mosaic_latent
from pallas_kernels.tree_attention.cases import CASES, Case
from pallas_kernels.tree_attention.mosaic_wide import Blocks
from pallas_kernels.tree_attention.reference import TreeAttentionArgs
from tests.kernels import hopper

#: Several tiles of rows and one that is not full; prefixes of 0 and at the edges of pages; pages shorter than a block;
#: rings that come round.
SMALL = (
    (Case("tree", 3, 9, 8, 1, 192, 64, 150, lengths="ragged", values=128), Blocks(stages=2, splits=2)),
    (Case("causal", 2, 3, 12, 1, 128, 16, 100, mask="causal", lengths="ragged", values=128), Blocks(splits=1)),
    (Case("tree-round", 2, 3, 8, 1, 128, 64, 500, lengths="ragged", values=128), Blocks(stages=2, splits=1)),
    (
        Case("causal-round", 2, 3, 8, 1, 128, 16, 420, mask="causal", lengths="ragged", values=128),
        Blocks(stages=1, splits=2),
    ),
)


def run(args: TreeAttentionArgs, blocks: Blocks) -> jax.Array:
    params = None
    if jax.default_backend() != "gpu":
        params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(functools.partial(mosaic_latent.tree_attention, blocks=blocks, interpret=params))(args)


@hopper.interpreted
@pytest.mark.parametrize(("case", "blocks"), SMALL, ids=lambda x: getattr(x, "name", ""))
def test_agrees_with_the_definition_and_has_no_races(case: Case, blocks: Blocks, capfd: pytest.CaptureFixture[str]):
    args = case.draw(0, poison=True)
    got, want = np.asarray(run(args, blocks).astype(jnp.float32)), case.defined(args)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 4e-3
    assert "RACE" not in capfd.readouterr().out


@hopper.interpreted
@pytest.mark.parametrize("mask", ["causal", "tree"])
def test_broken_new_tokens_stay_with_those_who_see_them(mask: Any):
    case = dataclasses.replace(SMALL[0][0], mask=mask)
    args = case.draw(0)
    broken = dataclasses.replace(args, tree_k_BTGC=args.tree_k_BTGC.at[1, 4].set(jnp.nan))
    out = np.asarray(run(broken, SMALL[0][1]).astype(jnp.float32))
    want = np.zeros((case.batch, case.nodes), bool)
    want[1] = np.asarray(args.mask)[1, :, 4]
    np.testing.assert_array_equal(np.isnan(out).any(axis=(2, 3)), want)


@hopper.proved
@pytest.mark.parametrize("name", ["latent-h16", "latent-h128", "latent-prefill256"])
def test_compiles_for_hopper_without_spills(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, found = hopper.compiled(mosaic_latent.tree_attention, CASES[name].shapes(), tmp_path, monkeypatch)
    assert found and max(kernel.spill_bytes for kernel in found) <= worker.MAX_SPILL_BYTES
    assert not any(kernel.serialized for kernel in found)
    (code,) = (path.read_text() for path in tmp_path.glob("*.ptx") if "merge" not in path.name)
    assert hopper.meets_before_copies(code)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        (dict(head_dim=576, values=512, dtype="float16", page=16), None),
        (dict(values=None), "values are not part of their keys"),
        (dict(dtype="float32"), "must be bfloat16 or float16, got float32"),
        (dict(head_dim=640, values=512), "multiple of 64 channels up to 576, got 640"),
        (dict(values=96), "must be 128, 256 or 512 channels, got 96"),
        (dict(page=24), "power of two of at least 8, got 24"),
        (dict(kv_heads=2), "one KV head, got 2"),
        (dict(window=64), "a window with values inside keys"),
    ],
)
def test_what_it_serves(change: dict[str, Any], said: str | None):
    why = mosaic_latent.refusal(dataclasses.replace(SMALL[0][0], **change).shapes())
    assert why is None if said is None else said in (why or "")
