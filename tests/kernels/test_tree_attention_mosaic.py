"""The Mosaic kernel for Hopper, interpreted with race detection, and the bits of chains against tokens one by one.

On a Hopper GPU the same runs compiled: `pytest --noconftest tests/kernels/test_tree_attention_mosaic.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.aot import worker
from pallas_kernels.aot.targets import TARGETS
from pallas_kernels.tree_attention import api, gpu, gpu_mosaic, mosaic_near, mosaic_plan
from pallas_kernels.tree_attention.cases import CASES as OTHERS
from pallas_kernels.tree_attention.cases import Case
from pallas_kernels.tree_attention.mosaic_few import Few
from pallas_kernels.tree_attention.reference import Shared, TreeAttentionArgs
from tests.kernels import hopper

compiled = jax.default_backend() == "gpu"

#: Of at least a page of 64; prefixes of 0, of several stretches and at the edges of pages.
CASES = (
    Case("mosaic-decode", 3, 1, 2, 1, 64, 64, 640, mask="causal", lengths="ragged"),
    Case("mosaic-alone", 1, 2, 2, 1, 64, 64, 330, mask="causal"),
    Case("mosaic-chain", 6, 4, 4, 2, 64, 64, 300, mask="causal", lengths="ragged"),
    Case("mosaic-chain-group7-sinks", 2, 3, 7, 1, 128, 128, 400, mask="causal", lengths="ragged", sinks=True),
    Case("mosaic-d96", 3, 3, 4, 2, 96, 64, 300, mask="causal", lengths="ragged"),
    Case("mosaic-d32", 2, 2, 4, 2, 32, 64, 200, mask="causal", lengths="ragged"),
    Case("mosaic-d96-tree-sinks", 2, 11, 2, 1, 96, 64, 200, lengths="ragged", sinks=True),
    Case("mosaic-tree", 3, 5, 4, 2, 64, 64, 300, lengths="ragged"),
    Case("mosaic-tree-several-tiles", 2, 40, 4, 2, 64, 64, 90, lengths="ragged", prior=3),
    Case("mosaic-window-fews", 1, 2, 2, 1, 64, 64, 1700, mask="causal", window=1300),
    Case("mosaic-whole-window-sinks", 4, 4, 4, 2, 64, 64, 400, mask="causal", lengths="ragged", window=70, sinks=True),
    Case("mosaic-tree-window", 6, 5, 4, 2, 64, 64, 300, lengths="ragged", window=70),
    Case("mosaic-tree-window-prior", 2, 4, 4, 2, 64, 64, 700, lengths="ragged", window=300, prior=3),
    Case("mosaic-chain-soft-cap", 3, 4, 4, 2, 64, 64, 300, mask="causal", lengths="ragged", soft_cap=3.0),
)

#: What the real compiler is asked for: plain decoding, chains and trees, narrow heads with a window and sinks.
PROVED = (
    *(OTHERS[name] for name in ("decode-b64-8k", "verify8-b8-8k", "tp4-verify8-b16-8k", "prior-levels")),
    dataclasses.replace(OTHERS["sinks"], mask="causal"), Case("chain3-b8", 8, 4, context=1024, mask="causal"),
    Case("d96", 8, 4, 32, 32, 96, context=1024, mask="causal"), Case("chain3-b1", 1, 4, context=8000, mask="causal"),
    Case("decode-b2", 2, 1, context=1024, mask="causal"), Case("tree-b1", 1, 6, context=1024),
    dataclasses.replace(OTHERS["sinks"], name="sinks-b1", mask="causal", batch=1, nodes=4),
    dataclasses.replace(OTHERS["sinks"], name="sinks-b32", mask="causal", batch=32, nodes=4, window=None),
    Case("tree-b64", 64, 8, context=2048), Case("tree-window-b64", 64, 8, context=2048, window=512),
    Case("soft-cap-b32", 32, 4, 32, 16, 128, context=2048, mask="causal", soft_cap=50.0),
    Case("d96-b32", 32, 4, 32, 8, 96, context=2048, mask="causal"), Case("d96-tree", 4, 40, 32, 32, 96, context=1024),
)  # fmt: skip


def error(got: jax.Array, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got.astype(jnp.float32)) - want) / np.linalg.norm(want))


def kernel(**options: Any) -> Callable[[TreeAttentionArgs], jax.Array]:
    options = {"members": 0, **options}
    if not compiled:
        params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
        options |= {"programs": 2, "interpret": params}
    return jax.jit(functools.partial(gpu_mosaic.tree_attention, **options))


@hopper.interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_definition_and_has_no_races(case: Case, capfd: pytest.CaptureFixture[str]):
    args = case.draw(0, poison=True)
    assert error(kernel()(args), case.defined(args)) < 4e-3
    assert "RACE" not in capfd.readouterr().out


@hopper.interpreted
@pytest.mark.parametrize("members", [2, *([4, 8] if compiled else [])])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.batch < 6 and case.nodes < 40], ids=lambda case: case.name
)
def test_clusters_give_the_same_bits_and_have_no_races(case: Case, members: int, capfd: pytest.CaptureFixture[str]):
    """Of a request each KV head by the programs of a cluster, which send each other their sums."""
    args = case.draw(0, poison=True)
    out = kernel(members=members)(args)
    assert error(out, case.defined(args)) < 4e-3
    np.testing.assert_array_equal(out.astype(jnp.float32), kernel()(args).astype(jnp.float32))
    assert "RACE" not in capfd.readouterr().out


@hopper.interpreted
@pytest.mark.parametrize("length", [64 * 16 - 2, 64 * 16, 64 * 40 + 1, 64 * 63, 64 * 64 + 7])
def test_clusters_give_the_same_bits_whatever_a_piece_is(length: int):
    """Single blocks, a few and groups: there is room for 16 pieces."""
    case = dataclasses.replace(CASES[1], heads=4, context=length)
    args = case.draw(0)
    near = mosaic_near.Near.of(Few(*SHAPE, 132, 2, not compiled), 2)
    assert near.workers * near.held == 16
    np.testing.assert_array_equal(kernel(members=2)(args).astype(jnp.float32), kernel()(args).astype(jnp.float32))


@hopper.interpreted
@pytest.mark.parametrize("form", [dict(members=2), dict(whole=True), dict(whole=False)], ids=str)
def test_layers_share_a_table_and_a_plan(form: dict[str, Any]):
    """Of two layers with a window and two without the second of each has what the first made of the lengths."""
    args, params = CASES[1].draw(0), {}
    if not compiled:
        params = {"programs": 2, "interpret": plgpu.InterpretGPUParams()}  # pyright: ignore[reportAttributeAccessIssue]
    count = args.pages.shape[0]
    pool = jnp.concatenate([jnp.full_like(args.pages, jnp.nan), args.pages])
    made = []

    def layers(args: TreeAttentionArgs, pool: jax.Array, shared: bool) -> list[jax.Array]:
        own, out = Shared() if shared else None, []
        for window in (None, 70, None, 70):
            layer = dataclasses.replace(args, pages=pool, first_page=count, shared=own, window=window)
            out.append(gpu_mosaic.tree_attention(layer, **{"members": 0, **form, **params}))
            made.append(0 if own is None else len(own.plans))
        return out

    run = jax.jit(layers, static_argnums=2)
    found = run(args, pool, True)
    for got, want in zip(found, run(args, pool, False), strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    np.testing.assert_array_equal(found[-1].astype(jnp.float32), kernel(**form)(dataclasses.replace(args, window=70)))
    assert made[:4] == ([0, 0, 0, 0] if "members" in form else [1, 2, 2, 2])


@pytest.mark.skipif(not overlap.overlaps(None), reason="this JAX launches no kernel early")
@hopper.proved
@pytest.mark.parametrize(
    ("batch", "nodes", "context", "waits"), [(1, 1, 2048, 1), (4, 1, 2048, 1), (32, 1, 2048, 2), (8, 4, 131072, 2)]
)
def test_what_is_read_early_was_read_by_a_layer_before(
    batch: int, nodes: int, context: int, waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the real compiler, of layers with a window and without: a later one's integers are an earlier one's.

    Clusters for all layers, where one of them waits first; or programs that walk along plans, for all layers or for
    those without a window, and one of each kind does.
    """
    args, slot = Case("layers", batch, nodes, context=context, mask="causal").shapes(), jnp.arange(batch)

    def layers(args: TreeAttentionArgs) -> jax.Array:
        q, shared = args.q_BNHC, Shared()
        args = dataclasses.replace(args, table_BM=args.table_BM[slot] + 1, length_B=args.length_B[slot] + 1)
        for i, window in enumerate((None, 128, None, 128)):
            own = dataclasses.replace(args, q_BNHC=q, window=window, first_page=i, shared=shared)
            q = jnp.tanh(gpu_mosaic.tree_attention(own, programs=132))
        return q

    executable, _ = hopper.compiled(layers, args, tmp_path, monkeypatch)
    made = dict(re.findall(r"(%[\w.-]+) = (.*)", executable.as_text()))

    def integers(call: str) -> set[str]:
        names = re.findall(r"%[\w.-]+", call[call.index("custom-call(") : call.index(")", call.index("custom-call("))])
        return {name for name in names if re.match(r"[su]32", made[name]) and "constant(" not in made[name]}

    # What merges items reads one array of integers, attention several.
    attention = [found for call in made.values() if "custom-call(" in call and len(found := integers(call)) > 1]
    assert len(attention) == 4 and attention[2] == attention[0] and attention[3] == attention[1]
    assert (attention[1] == attention[0]) == (waits == 1)
    codes = {path.name: path.read_text() for path in tmp_path.glob("*.ptx") if "merge" not in path.name}
    early = [code.split("griddepcontrol.wait;")[0] for code in codes.values()]
    assert all(code.count("griddepcontrol.wait;") == 1 for code in codes.values())
    kinds = sorted(("cp.async.bulk.tensor" in code, "ld.global" in code) for code in early)
    assert kinds == [(False, False)] * waits + [(True, True)] * 2
    assert not any("st.global" in code or "st.async" in code for code in early)


#: One request of two nodes with four query heads of 64 channels on a KV head.
SHAPE = 1, 2, 2, 4, 1, 64, 64, True, None, 0.1


@pytest.mark.parametrize(
    ("change", "capacity", "members"),
    [
        ({}, 1024, 8),
        ({}, 60_000, 8),
        ({}, 1 << 16, 0),  # sums of its groups have no room
        (dict(batch=2), 1024, 4),
        (dict(batch=2), 4480, 4),
        (dict(batch=2), 4608, 0),  # one of the requests may be much longer than the other
        (dict(batch=2, window=2048), 1 << 17, 4),
        (dict(kv_heads=1, heads=4), 8192, 8),
        (dict(kv_heads=1, heads=4), 1 << 14, 0),  # eight programs read more slowly than the whole device
        (dict(batch=3), 4096, 4),
        (dict(batch=4), 2048, 2),
        (dict(batch=4), 4096, 0),
        (dict(batch=8), 1024, 2),
        (dict(batch=8, programs=114), 1024, 0),  # not all at once
        (dict(batch=9), 1024, 0),
        (dict(nodes=9, entries=9), 1024, 0),  # more than 32 rows
    ],
)
def test_few_requests_are_for_clusters(change: dict[str, Any], capacity: int, members: int):
    few = Few(1, 4, 4, 32, 8, 128, 64, True, None, 0.1, 132, 2, False)
    assert mosaic_near.members(dataclasses.replace(few, **change), capacity) == members


@pytest.mark.parametrize(
    ("change", "capacity", "members", "said"),
    [
        ({}, 1024, 3, "2, 4 or 8 programs for at most 32 rows, got 3 and 16"),
        (dict(nodes=9, entries=9), 1024, 8, "at most 32 rows, got 8 and 36"),
        ({}, 1 << 16, 8, "room for 1024 blocks of a request, got 1025"),
    ],
)
def test_clusters_without_room_are_refused(change: dict[str, Any], capacity: int, members: int, said: str):
    few = Few(1, 4, 4, 32, 8, 128, 64, True, None, 0.1, 132, 2, False)
    with pytest.raises(ValueError, match=said):
        mosaic_near.check(dataclasses.replace(few, **change), capacity, members)


@hopper.interpreted
def test_what_an_item_is_changes_no_bit(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Single blocks, a few, groups of them and whole requests; and the chain against its tokens one by one."""
    case = dataclasses.replace(CASES[2], batch=2, kv_heads=1, heads=2, context=1090)
    args = case.draw(0)
    args = dataclasses.replace(args, length_B=jnp.asarray([1022, 1090], jnp.int32))
    outs = [kernel(whole=True)(args)]
    for single, quarter in ((10, 0), (0, 10), (0, 0)):
        monkeypatch.setattr(mosaic_plan, "_SINGLE", single)
        monkeypatch.setattr(mosaic_plan, "_QUARTER", quarter)
        outs.append(kernel(whole=False)(args))
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])
    assert error(outs[0], case.defined(args)) < 4e-3
    assert "RACE" not in capfd.readouterr().out
    q, k, v, pages, page = args.q_BNHC, args.tree_k_BTGC, args.tree_v_BTGC, args.pages, case.page
    for j in range(case.nodes):
        length = args.length_B + j
        one = dataclasses.replace(
            args, q_BNHC=q[:, j : j + 1], pages=pages, length_B=length, tree_k_BTGC=k[:, j : j + 1],
            tree_v_BTGC=v[:, j : j + 1],
        )  # fmt: skip
        np.testing.assert_array_equal(kernel()(one)[:, 0], outs[0][:, j])
        number = jnp.take_along_axis(args.table_BM, (length // page)[:, None], axis=1)[:, 0]
        pages = pages.at[number, :, length % page].set(jnp.concatenate([k, v], axis=-1)[:, j])


@hopper.interpreted
def test_without_a_mask_later_tokens_cannot_reach_earlier_ones():
    args = CASES[2].draw(0)
    k, v = (x.at[1, 2].set(jnp.nan) for x in (args.tree_k_BTGC, args.tree_v_BTGC))
    out = np.asarray(kernel()(dataclasses.replace(args, tree_k_BTGC=k, tree_v_BTGC=v)).astype(jnp.float32))
    nan = np.isnan(out).any(axis=(2, 3))
    want = np.zeros_like(nan)
    want[1, 2:] = True
    np.testing.assert_array_equal(nan, want)


@hopper.interpreted
@pytest.mark.parametrize("piece", [-100, 100])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whole_and_cut_requests_of_one_launch(
    case: Case, piece: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Bits are compared on a GPU; in the interpreter the results, and that there are no races."""
    if case.nodes == 40 or (not compiled and case.batch > 3 and piece > 0):
        pytest.skip("more than one tile of rows, or of whole requests more than is needed")
    args, of = case.draw(0, poison=True), mosaic_plan.Sizes.of
    mixed = lambda *args: dataclasses.replace(of(*args), whole=False, straight=False, mixed=True)
    want = kernel(whole=True)(args)
    monkeypatch.setattr(mosaic_plan.Sizes, "of", mixed)
    monkeypatch.setattr(mosaic_plan, "_PIECE", piece)
    out = kernel()(args)
    if compiled:
        np.testing.assert_array_equal(out.astype(jnp.float32), want.astype(jnp.float32))
    assert error(out, case.defined(args)) < 4e-3
    assert "RACE" not in capfd.readouterr().out


def args_of(**change: Any) -> TreeAttentionArgs:
    return dataclasses.replace(CASES[2], **change).shapes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        (dict(head_dim=128, page=128), None),
        (dict(mask="tree"), None),
        (dict(dtype="float32"), "must be bfloat16 or float16, got float32"),
        (dict(head_dim=96), None),
        (dict(head_dim=80), "must be 32, 64, 96 or 128, got 80"),
        (dict(page=32), "multiple of 64, got 32"),
        (dict(heads=3, kv_heads=1), "multiple of 2, got 3"),
        (dict(window=64, mask="tree"), None),
        (dict(soft_cap=30.0), None),
    ],
)
def test_what_it_serves(change: dict[str, Any], said: str | None):
    why = gpu_mosaic.refusal(args_of(**change))
    assert why is None if said is None else said in (why or "")


MANY = "of few rows it is for at most 132 requests times KV heads of 128 channels or less, got"


@pytest.mark.parametrize(
    ("change", "launch", "unsupported", "chosen"),
    [
        ({}, {}, None, "Mosaic GPU, few rows"),
        (dict(nodes=33), {}, None, "Mosaic GPU, many rows"),
        ({}, {"blocks": None}, None, "Triton: its sizes are given"),
        ({}, {}, "they need JAX 0.11 or newer", "Triton: they need JAX 0.11 or newer"),
        (dict(batch=132), {}, None, "Mosaic GPU, few rows"),
        (dict(batch=133), {}, None, "Mosaic GPU, few rows"),
        (dict(batch=67, soft_cap=30.0), {}, None, "Mosaic GPU, few rows"),
        (dict(batch=67, page=32), {}, None, f"many rows: {MANY} 134"),
        (dict(nodes=16, mask="tree"), {}, None, "Mosaic GPU, many rows"),
        (dict(nodes=15, mask="tree"), {}, None, "Mosaic GPU, few rows"),
        (dict(nodes=16, batch=67, mask="tree"), {}, None, "Mosaic GPU, few rows"),
        (dict(head_dim=256), {}, None, "Mosaic GPU, many rows"),
        (dict(head_dim=256, batch=67), {}, None, "Mosaic GPU, many rows"),
        (dict(head_dim=96), {}, None, "Mosaic GPU, few rows"),
        (dict(head_dim=96, nodes=16, mask="tree"), {}, None, "Mosaic GPU, few rows"),
        (dict(head_dim=96, page=32), {}, None, "Triton: few rows: page size must be a multiple of 64, got 32"),
        (dict(head_dim=96, nodes=33), {}, None, "Mosaic GPU, many rows"),
        (dict(head_dim=80), {}, None, "Triton: few rows: head dimension must be 32, 64, 96 or 128, got 80"),
        (dict(head_dim=192, values=128, kv_heads=1), {}, None, "Mosaic GPU, latent"),
        (dict(dtype="float32"), {}, None, "Mosaic GPU, any shape"),
        (dict(dtype="float32", nodes=33), {}, None, "any shape: it is for at most 16 query rows of a KV head, got 66"),
    ],
)
def test_gpus_run_it_where_it_serves_and_say_so(
    change: dict[str, Any], launch: dict[str, Any], unsupported: str | None, chosen: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    monkeypatch.setattr(api, "supported", lambda: unsupported)
    monkeypatch.setattr(api, "log_once", api.log_once.__wrapped__)
    for module, name in (*((module, name) for name, module in api._MOSAIC.items()), (gpu, "Triton")):
        monkeypatch.setattr(module, "tree_attention", lambda args, name=name, **_: name)
    caplog.set_level(logging.INFO, "pallas_kernels.dispatch")
    way: Any = api.OPERATION.implementations["gpu"].run
    name = way(args_of(**change), **launch)
    (said,) = (record.getMessage() for record in caplog.records)
    assert chosen in said and (f"Mosaic GPU, {name}" in said or (name == "Triton" and "on Triton: " in said))


@hopper.proved
@pytest.mark.parametrize("case", PROVED, ids=lambda case: case.name)
def test_compiles_for_hopper(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the real compiler, as the only kernels: they fit, spill little, and nothing copies the pool."""
    proof = case.proof("gpu", TARGETS["h200"].mesh().devices.flat[0])
    run = functools.partial(gpu_mosaic.tree_attention, programs=132)
    executable, found = hopper.compiled(run, proof.args, tmp_path, monkeypatch)
    memory = executable.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 100 << 20  # sums of items
    # Of requests that are one item each, and of those that clusters have, nothing is merged.
    alone = case.batch * case.kv_heads > 0.85 * 2 * 132 or (
        case.batch < 9 and case.context < 8192 and case.nodes * case.heads <= 32 * case.kv_heads
    )
    names = {"tree_attention_mosaic_gpu_kernel", *([] if alone else ["tree_attention_merge_mosaic_gpu_kernel"])}
    assert {kernel.entry for kernel in found} == names
    assert max(kernel.spill_bytes for kernel in found) <= worker.MAX_SPILL_BYTES
    assert not any(kernel.serialized for kernel in found)
    (code,) = (path.read_text() for path in tmp_path.glob("*.ptx") if "merge" not in path.name)
    assert hopper.meets_before_copies(code)
    assert hopper.counts_what_is_written(code) == (alone and case.context > 1536 and case.batch > 9)
