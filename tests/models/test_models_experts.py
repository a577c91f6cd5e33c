"""Mixtures of experts against plain loops over tokens, and the two forms of their tensors."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxspec.checkpointing import hf
from jaxspec.models import experts, mixing, registry, stacked
from jaxspec.models.base import Experts, ModelConfig, touched
from jaxspec.models.layers import causal_attention, narrow_product
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_config, tiny_target
from jaxspec.models.weight_map import Part, StackedWeight
from jaxspec.quantize import FORMATS, quantise_directory
from jaxspec.runtime.sharding import parameter_shardings, tensor_mesh
from pallas_kernels import sizes
from pallas_kernels.small_batch import packed_experts

COUNT, CHOSEN, INNER = 6, 2, 24


def mixture(**fields: Any) -> experts.MixtureOfExperts:
    return drawn(tiny_config(experts=Experts(COUNT, CHOSEN, INNER, (0,), **fields)))


def drawn(cfg: ModelConfig, dtype: Any = jnp.float32) -> experts.MixtureOfExperts:
    """With random parameters, biases too; by NumPy, as JAX would compile programs for every shape."""
    made = nnx.eval_shape(lambda: experts.MixtureOfExperts(cfg, dtype=jnp.dtype(dtype), rngs=None))
    for i, (_, param) in enumerate(nnx.iter_graph(made)):
        if isinstance(param, nnx.Param):
            normal = np.asarray(jax.random.normal(jax.random.key(i), param.shape))
            param.set_value(jnp.asarray((normal / max(1, param.shape[-2:][0]) ** 0.5).astype(param.dtype)))
    return made


def by_token(made: experts.MixtureOfExperts, x_ME: np.ndarray) -> np.ndarray:
    """The definition, in float64."""
    own, value = made.experts, lambda param: np.asarray(param[...], np.float64)
    silu, sigmoid = (lambda x: x / (1 + np.exp(-x))), (lambda x: 1 / (1 + np.exp(-x)))
    out_ME = np.zeros(x_ME.shape)
    for i, x in enumerate(x_ME.astype(np.float64)):
        logits = x @ value(made.router.kernel)
        if own.bias:
            logits = logits + value(made.router.bias)
        scores = sigmoid(logits) if own.scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        choice = scores + (0 if made.correction is None else value(made.correction))
        groups = choice.reshape(own.groups, -1)
        rated = np.sort(groups, axis=1)[:, -own.group_best :].sum(axis=1)
        groups[np.argsort(-rated)[own.groups_used :]] = -np.inf
        best = np.argsort(-groups.reshape(-1))[: own.per_token]
        weights = scores[best]
        weights = weights / weights.sum() if own.normalised or own.scores == "top_k" else weights
        weights = weights * own.scale
        for expert, weight in zip(best, weights, strict=True):
            both = x @ value(made.gate_up)[expert]
            both = both + value(made.gate_up_bias)[expert] if own.bias else both
            gate, up = both[:INNER], both[INNER:]
            if own.hidden_act == "clamped_swiglu":
                gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
                hidden = (up + 1) * gate * sigmoid(1.702 * gate)
            else:
                hidden = silu(gate) * up
            y = hidden @ value(made.down)[expert]
            out_ME[i] += weight * (y + value(made.down_bias)[expert] if own.bias else y)
        if made.shared is not None:
            gate, up = np.split(x @ value(made.shared.gate_up.kernel), 2)
            shared = (silu(gate) * up) @ value(made.shared.down.kernel)
            out_ME[i] += shared if made.shared_gate is None else sigmoid(x @ value(made.shared_gate.kernel)) * shared
    return out_ME


@pytest.mark.parametrize(
    "fields",
    [
        dict(normalised=False, shared_inner=40),
        dict(),
        dict(scores="top_k", bias=True, hidden_act="clamped_swiglu"),
        dict(scores="sigmoid", corrected=True, groups=3, groups_used=2, group_best=2, scale=2.5),
    ],
    ids=["qwen2", "qwen3", "gpt-oss", "deepseek"],
)
def test_each_token_gets_its_experts_whatever_is_beside_it(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = mixture(**fields)
    x_ME = np.asarray(4 * jax.random.normal(jax.random.key(9), (41, 32)), np.float32)
    run = jax.jit(lambda x: made(x[None])[0])
    whole = np.asarray(run(x_ME))
    np.testing.assert_allclose(whole, by_token(made, x_ME), atol=2e-5, rtol=2e-5)
    for way in ("pairs", "all"):  # of GPUs
        with monkeypatch.context() as patched:
            patched.setattr(made.__class__, "way", lambda _, pairs, way=way: way)
            patched.setattr(mixing, "_AT_ONCE", 16)
            other = np.asarray(jax.jit(lambda x: made(x[None])[0])(x_ME))
        np.testing.assert_allclose(other, whole, atol=2e-5, rtol=2e-5)
    if made.shared is None:  # the shared expert's products are layers.MLP's
        for few in (slice(0, 1), slice(5, 8), slice(30, 41)):
            np.testing.assert_array_equal(np.asarray(run(x_ME[few])), whole[few])


@pytest.mark.parametrize(("width", "count"), [(32, 6), (2048, 32), (2048, 60), (64, 40)])
def test_a_routers_bits_do_not_depend_on_the_number_of_rows(width: int, count: int) -> None:
    kernel = jax.random.normal(jax.random.key(0), (width, count))
    x = np.asarray(jax.random.normal(jax.random.key(1), (130, width)))
    run = jax.jit(lambda x: narrow_product(x, kernel, jnp.dtype(jnp.float32)))
    whole = np.asarray(run(x))
    np.testing.assert_allclose(whole, np.asarray(x, np.float64) @ np.asarray(kernel, np.float64), rtol=2e-4, atol=2e-4)
    for rows in (1, 2, 5, 16, 41, 64, 65):
        np.testing.assert_array_equal(np.asarray(run(x[:rows])), whole[:rows])


@pytest.mark.parametrize("way", ["blocks", "pairs", "all"])
def test_two_devices_share_every_expert_and_exchange_one_sum(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts.MixtureOfExperts, "way", lambda _, pairs: way)
    made, mesh = mixture(scores="top_k", bias=True, hidden_act="clamped_swiglu"), tensor_mesh(2)
    x_1ME = jax.random.normal(jax.random.key(9), (1, 7, 32))
    graph, params = nnx.split(tensor_parallel(made, 2))
    placed = jax.device_put(params, parameter_shardings(mesh, params))
    for kernel, axis in ((placed["gate_up"], 2), (placed["down"], 1)):
        sizes = {shard.data.shape[axis] for shard in kernel.get_value().addressable_shards}
        assert sizes == {kernel.get_value().shape[axis] // 2}
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda params, x: nnx.merge(graph, params)(x)).lower(placed, x_1ME).compile()
        found = compiled(placed, x_1ME)
    np.testing.assert_allclose(np.asarray(found)[0], by_token(made, np.asarray(x_1ME)[0]), atol=2e-5, rtol=2e-5)
    # Whatever the number of blocks: inside a loop there is none.
    assert len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text() or "")) == 1


@pytest.mark.parametrize("tokens", [1, 3, 19])
def test_blocks_hold_every_pair_once_and_read_experts_no_more_than_they_need(tokens: int) -> None:
    chosen_MK = np.sort(np.asarray([np.random.default_rng(i).permutation(9)[:4] for i in range(tokens)]), axis=1)
    blocks = jax.jit(mixing.in_blocks, static_argnums=(1, 2))(jnp.asarray(chosen_MK), 9, 4)
    rows_S = np.asarray(blocks.rows_NR).reshape(-1)
    places = np.asarray(blocks.places_MK)
    assert len(set(places.reshape(-1).tolist())) == places.size
    for (token, k), place in np.ndenumerate(places):
        assert rows_S[place] == token
        assert blocks.experts_N[place // 4] == chosen_MK[token, k]
    assert np.sum(rows_S < tokens) == places.size
    assert touched([(jnp.asarray(chosen_MK), 9)]) == len(set(chosen_MK.reshape(-1).tolist()))
    used = np.asarray(blocks.experts_N)[(np.asarray(blocks.rows_NR) < tokens).any(axis=1)]
    full = np.bincount(chosen_MK.reshape(-1), minlength=9)
    np.testing.assert_array_equal(np.bincount(used, minlength=9), -(-full // 4))
    assert set(np.asarray(blocks.experts_N).tolist()) == set(used.tolist())


def test_experts_are_read_one_by_one_or_all_in_one_but_not_both(tmp_path: Path) -> None:
    hf.save_model(tiny_target(**FAMILY_FIELDS["qwen3_moe"]), tmp_path, dtype=jnp.float32)
    file, model = tmp_path / "model.safetensors", hf.load_model(tmp_path)
    apart = load_file(file)
    stacked = {k: v for k, v in apart.items() if ".experts." not in k}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        one = lambda e, part, at=at: apart[f"{at}.{e}.{part}_proj.weight"]
        both = [np.concatenate([one(e, "gate"), one(e, "up")]) for e in range(8)]
        stacked |= {
            f"{at}.gate_up_proj": np.stack(both),
            f"{at}.down_proj": np.stack([one(e, "down") for e in range(8)]),
        }
    save_file(stacked, file)
    other = hf.load_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))
    save_file({**apart, "model.layers.1.mlp.experts.down_proj": stacked["model.layers.1.mlp.experts.down_proj"]}, file)
    with pytest.raises(ValueError, match="experts twice: as 'model.layers.1.mlp.experts.down_proj' and as .*down_proj"):
        hf.load_model(tmp_path)
    del apart["model.layers.0.mlp.experts.5.up_proj.weight"]
    save_file(apart, file)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.experts.5.up_proj.weight' is missing"):
        hf.load_model(tmp_path)


def test_experts_in_one_may_have_their_inputs_first() -> None:
    """As Qwen3-VL's files have them, whole and a device's part; the shape tells."""
    fields = {**FAMILY_FIELDS["qwen3_moe"], "experts": Experts(4, 2, 12, (0,))}
    found = [w for w in registry.weights(tiny_target(**fields)) if isinstance(w, StackedWeight)]
    assert len(found) == 2
    for w in found:
        value = np.asarray(w.param[...])
        for stored in (value, value.transpose(0, 2, 1)):
            form = w.as_stored([w.fused], lambda _, stored=stored: stored.shape)
            assert list(form.shapes) == [stored.shape]
            np.testing.assert_array_equal(form.join([stored]), value)
            for axis in (1, 2):
                part = Part.of(axis, value.shape[axis], 2, 1)
                half = form.join([stored[piece.part] for piece in form.pieces(part)])
                np.testing.assert_array_equal(half, np.split(value, 2, axis=axis)[1])


def test_quantised_experts_are_read_one_by_one_and_stay_in_their_bits(tmp_path: Path) -> None:
    hf.save_model(tiny_target(**FAMILY_FIELDS["qwen3_moe"]), tmp_path / "whole", dtype=jnp.float32)
    quantise_directory(tmp_path / "whole", tmp_path / "int8", FORMATS["int8"])
    model: Any = hf.load_model(tmp_path / "int8")
    other: Any = hf.load_model(tmp_path / "int8")
    expanded = jax.jit(lambda few: jnp.stack([mixing.one_of(few, e).dequantised() for e in range(8)]))
    for layer in other.layers:
        assert not isinstance(layer.mlp.router.kernel[...], Quantised)
        for param in (layer.mlp.gate_up, layer.mlp.down):
            stacked = param[...]
            assert isinstance(stacked, Quantised) and stacked.values.dtype == jnp.int8
            param.set_value(expanded(stacked))
    ids, positions = jnp.arange(9)[None] % 13, jnp.arange(9)[None]
    run = nnx.jit(lambda model: model(ids, positions, causal_attention)[0])
    np.testing.assert_allclose(*(np.asarray(run(m)) for m in (model, other)), atol=1e-3, rtol=1e-3)

    file = tmp_path / "int8" / "model.safetensors"
    tensors, odd = load_file(file), "model.layers.1.mlp.experts.3.down_proj"
    scale = tensors.pop(f"{odd}.weight_scale")
    save_file({**tensors, f"{odd}.weight": tensors[f"{odd}.weight"] * scale}, file)
    with pytest.raises(ValueError, match="experts.0.down_proj.*experts.3.down_proj.*different ways"):
        hf.load_model(tmp_path / "int8")


def test_what_experts_cannot_be_is_refused(tmp_path: Path) -> None:
    hf.save_model(tiny_target(**FAMILY_FIELDS["qwen2_moe"]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        (dict(num_experts_per_tok=7), "at most the 6 experts, got 7"),
        (dict(num_experts="8"), "num_experts must be a positive integer, got '8'"),
        (dict(mlp_only_layers=2), "mlp_only_layers must be layers' numbers, got 2"),
        (dict(decoder_sparse_step=0), "decoder_sparse_step must be a positive integer, got 0"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=message):
            hf.load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "decoder_sparse_step": 3, "mlp_only_layers": []}))
    assert hf.load_config(tmp_path).experts is None


def test_distinct_experts_of_rows() -> None:
    qwen3 = Experts(128, 8, 768, (0,))
    assert [round(qwen3.expected(rows)) for rows in (1, 4, 8, 16, 32)] == [8, 29, 52, 82, 112]
    assert dataclasses.replace(qwen3, count=8).expected(1) == 8


def few_bits(form: str, shape: tuple[int, int, int], seed: int) -> Any:
    """Random experts [X, in, out] in few bits."""
    (count, d_in, d_out), rng = shape, np.random.default_rng(seed)
    if form == "mxfp4":
        codes = rng.integers(0, 256, (count, d_in // 2, d_out), np.uint8)
        return Mxfp4(jnp.asarray(codes), jnp.asarray(rng.integers(121, 125, (count, d_in // 32, d_out), np.uint8)))
    groups = {"int8": 1, "int8-zeros": 1, "fp8": d_in // 16, "int4": d_in // 8, "nvfp4": d_in // 32}[form]
    scale = jnp.asarray(rng.uniform(0.5, 1.5, (count, groups, d_out)).astype(np.float32) / d_in)
    if form == "fp8":
        return Quantised(jnp.asarray(rng.normal(0, 4, shape).astype(ml_dtypes.float8_e4m3fn)), scale)
    if form == "nvfp4":
        return Quantised(jnp.asarray(rng.normal(0, 2, shape).astype(ml_dtypes.float4_e2m1fn)), scale)
    values = jnp.asarray(rng.integers(-8, 8, shape).astype(np.int8))
    if form == "int8":
        return Quantised(values, scale)
    zero = jnp.asarray(rng.integers(-3, 4, scale.shape).astype(np.int8))
    if form == "int8-zeros":
        return Quantised(values, scale.astype(jnp.bfloat16), zero)
    return Quantised(values.astype(jnp.int4), scale, zero)


@pytest.mark.parametrize("piece", [16, 64])
def test_pairs_are_multiplied_by_experts_in_few_bits(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of several groups, of one and of a part of one give what the expanded kernels give."""
    monkeypatch.setattr(stacked, "_PIECE", piece)
    kernels = {form: few_bits(form, (5, 64, 12), 3) for form in ("int8", "fp8", "int4", "mxfp4", "nvfp4")}
    # As many inputs share a scale as MXFP4's do, for which they must not be taken.
    assert stacked.packing_refusal(few_bits("nvfp4", (5, 64, 64), 3), 1, 1) == "they are NVFP4"
    x_PE = jax.random.normal(jax.random.key(0), (7, 64))
    experts_P = np.asarray([4, 0, 0, 3, 1, 4, 2])

    @jax.jit
    def run(kernels: dict[str, Any], x_PE: jax.Array) -> dict[str, Any]:
        pairs = lambda kernel: stacked.pair_products(x_PE, kernel, jnp.asarray(experts_P))
        # The expansion of MXFP4 has a test of its own.
        one = lambda kernel: None if isinstance(kernel, Mxfp4) else mixing.one_of(kernel, 3).dequantised()
        whole = lambda kernel: stacked.expanded(kernel, jnp.float32)
        return {form: (pairs(kernel), whole(kernel), one(kernel)) for form, kernel in kernels.items()}

    for form, (found_PF, whole_XEF, one_EF) in run(kernels, x_PE).items():
        if form != "mxfp4":
            np.testing.assert_array_equal(np.asarray(whole_XEF)[3], one_EF)
        expected_PF = np.einsum(
            "pe,pef->pf", np.asarray(x_PE, np.float64), np.asarray(whole_XEF, np.float64)[experts_P]
        )
        assert expected_PF.std() > 0.1
        np.testing.assert_allclose(np.asarray(found_PF), expected_PF, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["int4", "int8-zeros", "mxfp4"])
def test_experts_in_few_bits_are_gathered_or_expanded_some_at_a_time(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config(hidden_size=64, experts=Experts(COUNT, CHOSEN, 64, (0,), scores="top_k", bias=True))
    whole, made = drawn(cfg), drawn(cfg)
    expanded = jax.jit(lambda few: stacked.expanded(few, jnp.float32))
    for name in ("gate_up", "down"):
        few = few_bits(form, getattr(made, name)[...].shape, 7)
        getattr(made, name).set_value(few)
        getattr(whole, name).set_value(expanded(few))
    assert stacked.together(COUNT, 64 * 192, jnp.float32) == COUNT
    monkeypatch.setattr(sizes, "EXPANDED", 4 * 64 * 192 * 4)
    assert stacked.together(COUNT, 64 * 192, jnp.float32) == 3
    x_1ME = jax.random.normal(jax.random.key(9), (1, 9, 64))
    found = []
    for mixture, way in ((whole, "blocks"), (made, "pairs"), (made, "all")):
        with monkeypatch.context() as patched:
            patched.setattr(experts.MixtureOfExperts, "way", lambda _, pairs, way=way: way)
            found.append(np.asarray(jax.jit(mixture)(x_1ME)))
    if form == "int4":
        assert "one for every 128" in (made.packing_refusal() or "")  # groups of 8
        old = dataclasses.replace(made.down[...], zero=made.down[...].zero.astype(jnp.int16))
        assert stacked.packing_refusal(old, 1, 1) == "zero points must be int8, got int16"
    else:
        assert made.packing_refusal() is None and "float32, not of few bits" in (whole.packing_refusal() or "")
        made.pack()
        assert made.way(1) == made.way(8 * COUNT) == "packed"
        made.backend = "hopper"
        ways = [made.way(pairs) for pairs in (1, 32 * CHOSEN, 8 * COUNT - 1, max(8 * COUNT, 33 * CHOSEN))]
        assert ways == ["packed", "packed", "packed", "many"]
        made.backend = None
        for rows in (9, 4):  # at once, and some after the others
            monkeypatch.setattr(mixing, "_AT_ONCE", rows)
            found.append(np.asarray(jax.jit(lambda x: made(x))(x_1ME)))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("form", "way"), [
    (form, way)
    for form in ("int8", "int8-zeros", "int4", "mxfp4")
    for way in ("blocks", "pairs", "all", "packed", "many")
    if (form, way) != ("int4", "many")  # not packed, as the case of few rows says
])  # fmt: skip
def test_two_devices_share_experts_in_few_bits(form: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its part of every kernel and its scales; packed, what the kernels want of its own part."""
    if way == "many":  # in XLA's place: the same arguments
        way = "packed"
        monkeypatch.setitem(mixing.WAYS, "packed", mixing.WAYS["many"])
        monkeypatch.setattr(mixing.gpu_experts_many, "mix", packed_experts.mix)
    inner = 512 if form == "int8-zeros" else 192  # zero points of two blocks a device, and of a part of one
    own = Experts(COUNT, CHOSEN, inner, (0,), scores="top_k", bias=True, hidden_act="clamped_swiglu")
    cfg = tiny_config(hidden_size=128, experts=own)
    made = drawn(cfg)
    for name in ("gate_up", "down"):
        few = few_bits(form, getattr(made, name)[...].shape, 7)
        getattr(made, name).set_value(few)
    monkeypatch.setattr(experts.MixtureOfExperts, "way", lambda _, pairs: "all" if way == "packed" else way)
    x_1ME, mesh = jax.random.normal(jax.random.key(9), (1, 7, 128)), tensor_mesh(2)
    want = np.asarray(jax.jit(lambda x: made(x))(x_1ME))
    shared = tensor_parallel(made, 2)
    nnx.update(shared, jax.tree.map(jax.device_put, nnx.state(shared), parameter_shardings(mesh, nnx.state(shared))))
    if way == "packed":
        monkeypatch.setattr(experts.MixtureOfExperts, "way", lambda _, pairs: way)
        if form == "int4":  # groups of 8
            assert "one for every 128" in (shared.packing_refusal() or "")
            return
        assert shared.packing_refusal() is None
        shared.pack()
        assert shared.down[...].values.shape == (COUNT, 128, max(inner, 256)), "a part of 96 inputs fills a block up"
        if form == "int8-zeros":
            assert shared.down[...].groups == 4, "kernels read a block's own words"
    places = jax.tree.leaves(parameter_shardings(mesh, nnx.state(shared)))
    for leaf, place in zip(jax.tree.leaves(nnx.state(shared)), places, strict=True):
        assert leaf.sharding == place
    for param in (shared.gate_up, shared.down):
        values = jax.tree.leaves(param[...])[0]
        assert values.sharding.shard_shape(values.shape) != values.shape
    graph, params = nnx.split(shared)
    run = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
    with jax.set_mesh(mesh):
        found, text = np.asarray(run(params, x_1ME)), run.lower(params, x_1ME).compile().as_text() or ""
    np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max(), rtol=2e-5)
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1 and "all-gather" not in text


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_experts_of_which_one_kernel_is_quantised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints may leave either out. Inputs in another order are for products of blocks, and of one device."""
    made = mixture()
    assert len(made.splits(2)) == 3
    shape = getattr(made, name)[...].shape
    few = Quantised(jnp.zeros(shape, jnp.int8), jnp.ones((shape[0], 1, shape[2])))
    setattr(made, name, nnx.Param(few))
    assert len(made.splits(2)) == 3 and made.way(1) == "blocks"
    groups = Quantised(few.values, jnp.ones((shape[0], 3, shape[2])))
    setattr(made, name, nnx.Param(groups))
    assert len(made.splits(2)) == (3 if name == "gate_up" else 0)
    setattr(made, name, nnx.Param(few))
    monkeypatch.setattr(mixing.jax, "default_backend", lambda: "gpu")
    assert [made.way(pairs) for pairs in (1, 4 * COUNT, 4 * COUNT + 1)] == ["pairs", "pairs", "all"]
    order = jnp.broadcast_to(jnp.arange(shape[1])[None], shape[:2])
    setattr(made, name, nnx.Param(dataclasses.replace(few, order=order)))
    assert made.way(1) == made.way(100) == "blocks" and made.splits(2) == []


def test_kernels_for_many_rows_have_the_derivative_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads with a mixture are trained; the kernel itself has none."""
    cfg = tiny_config(hidden_size=64, experts=Experts(COUNT, CHOSEN, 64, (0,), bias=True))
    made = drawn(cfg, jnp.bfloat16)
    made.backend, most = "hopper", 32 * CHOSEN
    assert [made.way(pairs) for pairs in (COUNT - 1, most, most + 1)] == ["pairs", "all", "many"]
    asked = []

    def kernel(x_ME: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array, **given: Any) -> jax.Array:
        asked.append(given.pop("gates"))
        own = mixing.Stack(made.experts, **given)
        return jax.lax.stop_gradient(mixing._by_all(own, x_ME, mixing.Routing(experts_MK, weights_MK)))

    monkeypatch.setattr(mixing.gpu_experts_many, "mix", kernel)
    x_1ME = jax.random.normal(jax.random.key(9), (1, 40, 64), jnp.bfloat16)
    loss = lambda made, x: jnp.sum(made(x).astype(jnp.float32) ** 2)
    found = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(made, x_1ME)
    assert asked == [None]
    made.backend = "gpu"
    want = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(made, x_1ME)
    assert len(jax.tree.leaves(found)) == len(jax.tree.leaves(want)) == 8
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.abs(np.asarray(expected, np.float32)).max() > 0
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("inner", "act", "why"), [
    (64, "silu", None), (96, "silu", "multiples of 64 wide, got 64 and 96"), (64, "gelu_tanh", "gates are gelu_tanh"),
])  # fmt: skip
def test_which_mixtures_kernels_for_many_rows_serve(inner: int, act: str, why: str | None) -> None:
    cfg = tiny_config(hidden_size=64, experts=Experts(COUNT, CHOSEN, inner, (0,), hidden_act=act))
    made = drawn(cfg, jnp.bfloat16)
    assert (made.many_refusal() or "").endswith(why or "")
    assert (made.many_refusal() is None) == (why is None)
    made.down.set_value(made.down[...].astype(jnp.float32))
    assert "not bfloat16" in (made.many_refusal() or "")
