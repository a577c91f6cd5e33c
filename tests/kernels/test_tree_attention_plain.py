"""The Mosaic kernel for float32 and heads of any width: interpreted with race detection, and Hopper's compiler.

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
from pallas_kernels.tree_attention import mosaic_plain
from pallas_kernels.tree_attention.cases import CASES, Case
from pallas_kernels.tree_attention.reference import TreeAttentionArgs
from tests.kernels import hopper

#: With stretches. Widths that are no power of two, pages of odd sizes, prefixes of 0 and at the edges of pages.
SMALL = (
    (Case("tree", 3, 3, 2, 1, 80, 16, 150, lengths="ragged", dtype="float32", prior=70), 2),
    (Case("causal", 3, 2, 3, 1, 96, 24, 100, mask="causal", lengths="ragged", sinks=True), 1),
    (Case("window", 3, 2, 2, 2, 24, 16, 150, lengths="ragged", dtype="float32", window=70, sinks=True), 2),
    (Case("soft-cap", 2, 2, 2, 1, 104, 64, 100, mask="causal", dtype="float32", soft_cap=3.0), 1),
    (Case("latent", 2, 2, 2, 1, 200, 16, 70, lengths="ragged", dtype="float32", values=136), 2),
)


def run(args: TreeAttentionArgs, splits: int) -> jax.Array:
    params = None
    if jax.default_backend() != "gpu":
        params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(functools.partial(mosaic_plain.tree_attention, splits=splits, interpret=params))(args)


@hopper.interpreted
@pytest.mark.parametrize(("case", "splits"), SMALL, ids=lambda x: getattr(x, "name", ""))
def test_agrees_with_the_definition_and_has_no_races(case: Case, splits: int, capfd: pytest.CaptureFixture[str]):
    args = case.draw(0, poison=True)
    got, want = np.asarray(run(args, splits).astype(jnp.float32)), case.defined(args)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < {"float32": 2e-6, "bfloat16": 4e-3}[case.dtype]
    assert "RACE" not in capfd.readouterr().out


@hopper.interpreted
@pytest.mark.parametrize("mask", ["causal", "tree"])
def test_broken_new_tokens_stay_with_those_who_see_them(mask: Any):
    case = dataclasses.replace(SMALL[0][0], batch=2, nodes=4, prior=0, mask=mask)
    args = case.draw(0)
    k, v = (x.at[1, 2].set(jnp.nan) for x in (args.tree_k_BTGC, args.tree_v_BTGC))
    out = np.asarray(run(dataclasses.replace(args, tree_k_BTGC=k, tree_v_BTGC=v), 1))
    want = np.zeros((case.batch, case.nodes), bool)
    want[1] = np.asarray(args.mask)[1, :, 2]
    np.testing.assert_array_equal(np.isnan(out).any(axis=(2, 3)), want)


@hopper.proved
@pytest.mark.parametrize("name", ["d80", "d96", "f32", "f32-d256", "latent-f32"])
def test_compiles_for_hopper_without_spills(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, found = hopper.compiled(mosaic_plain.tree_attention, CASES[name].shapes(), tmp_path, monkeypatch)
    assert found and max(kernel.spill_bytes for kernel in found) <= worker.MAX_SPILL_BYTES
    assert not any(kernel.serialized for kernel in found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        (dict(head_dim=576, values=512), None),
        (dict(head_dim=100), "multiple of 8, got 100"),
        (dict(head_dim=200, values=100), "multiple of 8, got 200 with values of 100"),
    ],
)
def test_what_it_serves(change: dict[str, Any], said: str | None):
    why = mosaic_plain.refusal(dataclasses.replace(SMALL[0][0], **change).shapes())
    assert why is None if said is None else said in (why or "")
