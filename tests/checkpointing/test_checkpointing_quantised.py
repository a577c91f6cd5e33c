"""Quantised checkpoints: every format gives the logits of its weights expanded, and what does not fit is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quantised_cases import (
    CASES,
    GROUP,
    SIZES,
    TOKENS,
    Tensors,
    forward,
    fp8_values,
    logits,
    positive,
    write,
)
from safetensors.numpy import load_file

from jaxspec.checkpointing import formats, heads, hf, mtp, tensors
from jaxspec.checkpointing.rounding import FORMATS
from jaxspec.drafters.directories import load_drafter, save_drafter
from jaxspec.models import quantised, registry
from jaxspec.models.layers import Linear, Shared, causal_attention, shared_lm_head
from jaxspec.models.layouts import column_blocks, tensor_parallel
from jaxspec.models.quantised import Quantised
from jaxspec.models.sharded import BY_XLA
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_config, tiny_target
from jaxspec.quantize import quantise_directory
from jaxspec.runtime.sharding import Sharing, parameter_shardings, tensor_mesh
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from pallas_kernels import sizes

ROOT = Path(__file__).resolve().parents[2]
#: Those whose kernels differ in what an accelerator's products look at.
FLAT = ("fp8 block", "int8 zeros", "packed order", "nvfp4")


@pytest.fixture(scope="module")
def expanded() -> Callable[[Tensors], np.ndarray]:
    """The logits of weights [out, in] in float32."""
    model = tiny_target(1, **SIZES)
    graph, _ = nnx.split(model)
    run = jax.jit(lambda state: forward(nnx.merge(graph, state)))

    class Held:
        names = ()

        def shape(self, name: str) -> tuple[int, ...]:
            return plain[name].shape

        def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
            assert plain[name].shape == tuple(shape)
            return plain[name]

    plain: Tensors = {}

    def of(tensors_: Tensors) -> np.ndarray:
        plain.clear()
        plain.update(tensors_)
        hf.load_weights(registry.weights(model), Held())  # pyright: ignore[reportArgumentType]
        return np.asarray(run(nnx.split(model)[1]))

    return of


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_weights_expanded(
    name: str, tmp_path: Path, expanded: Callable[[Tensors], np.ndarray]
) -> None:
    plain = write(tmp_path, CASES[name])
    model = hf.load_model(tmp_path)
    kernels = [node.kernel[...] for _, node in nnx.iter_graph(model) if isinstance(node, Linear)]
    few = [k for k in kernels if isinstance(k, Quantised)]
    served = ("int4", "int8", "float8_e4m3fn", "float4_e2m1fn")
    assert len(few) == 4 and all(str(k.values.dtype) in served for k in few)
    want = expanded(plain)
    assert want.std() > 0.1
    np.testing.assert_allclose(logits(column_blocks(model)), want, atol=1e-3 * np.abs(want).max())
    if name in FLAT:
        np.testing.assert_allclose(logits(model), want, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("name", FLAT)
def test_many_rows_expand_a_share_of_the_columns_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, CASES[name])
    linear = next(node for _, node in nnx.iter_graph(hf.load_model(tmp_path)) if isinstance(node, Linear))
    kernel = linear.kernel[...]
    d_in, d_out = kernel.shape
    x_ME = jax.random.normal(jax.random.key(0), (200, d_in))
    want = x_ME @ kernel.dequantised()
    for parts in (1, 4):
        monkeypatch.setattr(sizes, "EXPANDED", 4 * d_in * d_out // parts)
        made = jax.jit(lambda x, w: quantised.product(x, w)).trace(x_ME, kernel)
        assert str(made.jaxpr).count("scan[") == (parts > 1 and kernel.groups > 1)
        got = made.lower().compile()(x_ME, kernel)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


Q, QKV = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.[qkv]_proj"


def config(**changes: Any) -> Callable[[Tensors, dict[str, Any]], object]:
    return lambda _, config: config.update(changes)


def drop(name: str) -> Callable[[Tensors, dict[str, Any]], object]:
    return lambda stored, _: stored.pop(name)


def put(name: str, value: np.ndarray) -> Callable[[Tensors, dict[str, Any]], object]:
    return lambda stored, _: stored.update({name: value})


def swap_order(stored: Tensors, _: Any) -> None:
    stored[f"{Q}.weight_g_idx"] = stored[f"{Q}.weight_g_idx"][::-1].copy()


def unquantise(stored: Tensors, _: Any) -> None:
    stored.pop(f"{Q}.weight_scale")
    stored[f"{Q}.weight"] = stored[f"{Q}.weight"].astype(np.float32)


FLOAT6 = dict(targets=["Linear"], weights=dict(type="float", num_bits=6, group_size=16))
FLOAT4 = dict(targets=["Linear"], weights=dict(type="float", num_bits=4, strategy="channel"))
ONES = np.ones((64, 1), np.float32)


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        ("fp8 block", config(quant_method="bitsandbytes"), "quant_method 'bitsandbytes' is not served; .*'gptq'"),
        ("fp8 block", config(weight_block_size=[128]), r"weight_block_size must be two positive integers, got \[128\]"),
        ("fp8 block", config(fmt="e5m2"), "fmt must be 'e4m3', got 'e5m2'"),
        ("fp8 block", drop(f"{Q}.weight_scale_inv"), f"'{Q}.weight_scale' is missing"),
        ("fp8 block", put(f"{Q}.weight_scale_inv", ONES), rf"'{Q}.weight_scale_inv' in .* \(64, 1\).*\[\(3, 2\)\]"),
        ("fp8 block", put(f"{Q}.qweight", ONES), f"holds '{Q}' twice: '{Q}.weight' and '{Q}.qweight'"),
        ("fp8 tensor", put(f"{Q}.weight_scale", ONES), r"has shape \(64, 1\)"),
        ("fp8 tensor", put(f"{Q}.k_scale", ONES), f"no place for: '{Q}.k_scale'"),
        ("float channel", unquantise, f"{Q} is not quantised but .*multiplied as one"),
        ("float channel", config(format="mxfp4-pack-quantized"), "format 'mxfp4-pack-quantized' is not served"),
        ("float channel", config(config_groups={"a": FLOAT6}), "a.weights: 'float' of 6 bits is not served"),
        ("nvfp4", config(config_groups={"a": FLOAT4}), "needs strategy 'tensor_group', got 'channel'"),
        ("nvfp4", drop(f"{Q}.weight_global_scale"), f"'{Q}.weight_global_scale' is missing"),
        ("nvfp4", put(f"{Q}.weight_global_scale", np.zeros((1,), np.float32)), f"scales of '{Q}' .* not all numbers"),
        ("nvfp4", put(f"{Q}.weight_packed", np.zeros((64, 16), np.uint8)), r"\(64, 16\); config.json asks.*\(64, 32\)"),
        ("modelopt nvfp4", config(group_size=16), rf"{Q}.weight_scale' .* \(64, 2\); .*\(64, 4\)"),
        ("modelopt nvfp4", config(quant_algo="W4A8_AWQ"), "quant_algo 'W4A8_AWQ' is not served; .*'NVFP4'"),
        ("modelopt fp8", put(f"{Q}.k_scale", ONES), f"no place for: '{Q}.k_scale'"),
        ("float channel", config(config_groups={}), "config_groups must name groups, got {}"),
        ("float channel", config(transform_config={"config_groups": {}}), "transform_config is not served, got {'con"),
        ("float channel", config(sparsity_config={"format": "sparse-24"}), "format must be 'dense', got 'sparse-24'"),
        ("float channel", config(ignore=["re:.*q_proj"]), f"'{Q}' is quantised, but config.json has no group for it"),
        ("packed", drop(f"{Q}.weight_packed"), f"'{Q}.weight' is missing"),
        ("packed", drop(f"{Q}.weight_shape"), f"'{Q}.weight_shape' is missing"),
        ("packed", put(f"{Q}.weight_shape", np.array([64, 63])), r"weight_shape' says \(64, 63\).*asks for \(64, 64\)"),
        ("packed", put(f"{Q}.weight_packed", np.zeros((64, 7), np.int32)), r"\(64, 7\); config.json asks.*\(64, 8\)"),
        ("packed order", swap_order, f"{Q}, .*order them differently"),
        ("packed order", put(f"{Q}.weight_g_idx", np.zeros(64, np.int32)), f"must put 32 inputs of '{Q}' into each"),
        ("awq", config(version="gemv"), "AWQ's version must be 'gemm', got 'gemv'"),
        ("awq", config(bits=3), r"bits must be one of \[4\], got 3"),
        ("awq", config(group_size=48), "has 64 inputs, which groups of 48 do not divide"),
        ("awq", put(f"{Q}.scales", np.zeros((1, 64), np.float16)), rf"{Q}.scales' .* \(1, 64\); .*\(2, 64\)"),
        ("gptq", config(checkpoint_format="marlin"), "checkpoint_format must be 'gptq' or 'gptq_v2', got 'marlin'"),
        ("gptq", config(dynamic={"-:lm_head": {}}), "settings by module .dynamic. are not served"),
        ("gptq", config(group_size=0), "group_size must be positive or -1, got 0"),
        ("gptq", put(f"{Q}.qzeros", np.zeros((2, 8), np.float32)), f"'{Q}.qzeros' in .* has type F32"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(case: str, edit: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, CASES[case], edit)
    with pytest.raises(ValueError, match=message):
        hf.load_model(tmp_path)


@pytest.mark.parametrize(
    ("case", "settings", "scales", "said"),
    [
        ("modelopt fp8", {"kv_cache_quant_algo": "FP8"}, ("k_proj.k_scale", "v_proj.v_scale"), "algo 'FP8'.*2 scales"),
        ("float channel", {"kv_cache_scheme": {"num_bits": 8}}, ("k_scale", "v_scale"), "scheme {'num_bits': 8}.*2"),
        ("fp8 tensor", {}, ("k_proj.output_scale",), "by its tensors.*1 scales"),
        ("fp8 tensor", {}, (), None),
    ],
)
def test_a_quantised_cache_is_said_and_stays_as_it_is(
    case: str, settings: dict[str, Any], scales: tuple[str, ...], said: str | None, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def edit(stored: Tensors, config: dict[str, Any]) -> None:
        config.update(settings)
        stored.update({f"model.layers.0.self_attn.{name}": np.ones((1,), np.float32) for name in scales})

    write(tmp_path / "plain", CASES[case])
    write(tmp_path / "cache", CASES[case], edit)
    want = logits(hf.load_model(tmp_path / "plain"))
    caplog.clear()
    np.testing.assert_array_equal(logits(hf.load_model(tmp_path / "cache")), want)
    found = [record.getMessage() for record in caplog.records if "key-value cache" in record.getMessage()]
    assert len(found) == (said is not None) and (said is None or re.search(said, found[0]))


def test_modelopt_says_how_weights_are_in_a_file_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, CASES["modelopt nvfp4"])
    want = logits(hf.load_model(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {k: v for k, v in config.pop("quantization_config").items() if k != "quant_method"}
    tensors.write_json(tmp_path / "config.json", config)
    for said in ({"producer": {"name": "modelopt"}, "quantization": settings}, {}):
        tensors.write_json(tmp_path / "hf_quant_config.json", said)
        if said:
            np.testing.assert_array_equal(logits(hf.load_model(tmp_path)), want)
            with pytest.raises(ValueError, match=r"is quantised already \(modelopt\)"):
                quantise_directory(tmp_path, tmp_path / "again", FORMATS["int8"])
        else:
            with pytest.raises(ValueError, match="hf_quant_config.json must have settings under 'quantization'"):
                hf.load_model(tmp_path)


def test_a_truncated_shard_and_a_tensor_in_two_are_refused(tmp_path: Path) -> None:
    write(tmp_path, CASES["int8 channel"])
    stored = tensors.read_tensors(tmp_path)
    names = sorted(stored.names)
    weights = load_file(tmp_path / hf.WEIGHTS)
    (tmp_path / hf.WEIGHTS).unlink()
    halves = {"one.safetensors": names[:9], "two.safetensors": names[8:]}
    for file, part in halves.items():
        tensors.write_safetensors(tmp_path / file, {name: weights[name] for name in part})
    index = {name: file for file, part in reversed(halves.items()) for name in part}
    tensors.write_json(tmp_path / tensors.INDEX, {"weight_map": index})
    with pytest.raises(ValueError, match=f"tensor '{names[8]}' is in one.safetensors and in two.safetensors"):
        hf.load_model(tmp_path)
    tensors.write_safetensors(tmp_path / "two.safetensors", {name: weights[name] for name in names[9:]})
    assert str(jax.tree.leaves(nnx.state(hf.load_model(tmp_path)))[1].dtype) == "int8"
    whole = (tmp_path / "two.safetensors").read_bytes()
    (tmp_path / "two.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="two.safetensors is not a whole safetensors file"):
        hf.load_model(tmp_path)


def test_a_quantised_model_is_not_written_as_another(tmp_path: Path) -> None:
    write(tmp_path, CASES["int8 channel"])
    with pytest.raises(ValueError, match="q_proj.weight' is quantised; copy the directory"):
        hf.save_model(hf.load_model(tmp_path), tmp_path / "again")  # pyright: ignore[reportArgumentType]


#: Whose words, orders or groups devices cut in other ways.
CUT = ("fp8 block", "packed zeros", "packed order", "awq")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in CUT else pytest.mark.exhaustive("formats that are cut as others are"))
        for name in CASES
    ],
)
def test_two_devices_share_a_quantised_model(name: str, tmp_path: Path) -> None:
    """What each reads for itself is its part of the whole; one model computes what it should."""
    write(tmp_path, CASES[name])
    mesh, model = tensor_mesh(2), hf.load_model(tmp_path)
    graph, want = nnx.split(tensor_parallel(model, 2))
    found = nnx.state(hf.load_model(tmp_path, devices=Sharing(mesh, BY_XLA)))
    assert jax.tree.structure(found) == jax.tree.structure(want)
    shardings = jax.tree.leaves(parameter_shardings(mesh, want))
    for x, y, sharding in zip(jax.tree.leaves(found), jax.tree.leaves(want), shardings, strict=True):
        assert x.sharding == sharding and x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    if name != "packed zeros":
        return
    mlp = nnx.merge(graph, found).layers[0].mlp  # pyright: ignore[reportAttributeAccessIssue]
    assert mlp.gate_up.kernel[...].scale.sharding.shard_shape((2, 256)) == (2, 128)
    assert mlp.down.kernel[...].values.sharding.shard_shape((128, 64)) == (64, 64)
    assert mlp.down.kernel[...].zero.sharding.shard_shape((4, 64)) == (2, 64)
    with jax.set_mesh(mesh):
        shared = np.asarray(jax.jit(lambda state: forward(nnx.merge(graph, state)))(found))
    np.testing.assert_allclose(shared, logits(model), atol=1e-4)


def test_int8_activations_are_for_what_multiplies_integers(tmp_path: Path) -> None:
    write(tmp_path, CASES["int8 channel"])
    found = [logits(hf.load_model(tmp_path, int8_activations=rounded)) for rounded in (False, True)]
    difference = np.abs(found[1] - found[0]).max() / np.abs(found[0]).max()
    assert 1e-4 < difference < 0.1
    for name, message in (
        ("int8 zeros", "int8 in 1 groups, with zero points"), ("packed", "'.*q_proj' has int4 in 2 groups, no zero")
    ):  # fmt: skip
        write(tmp_path, CASES[name])
        with pytest.raises(ValueError, match=f"int8_activations is for int8 weights .*{message}"):
            hf.load_model(tmp_path, int8_activations=True)
    hf.save_model(tiny_target(1, **SIZES), tmp_path / "plain")
    with pytest.raises(ValueError, match="int8_activations is for int8 weights .*, got unquantised weights"):
        hf.load_model(tmp_path / "plain", int8_activations=True)


#: In a process of its own, whose allocator gives every large piece back at once: RssAnon then is what is held.
LOAD = """
import sys, threading, time
import jax
from flax import nnx
from jaxspec.checkpointing import hf
from jaxspec.models.quantised import stored_bytes

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def watch():
    while not done.wait(0.002):
        seen.append(held())

hf.load_model(sys.argv[1], blocked=True)  # what is compiled and kept for good
before, seen, done = held(), [], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
model = hf.load_model(sys.argv[1], blocked=True)
done.set()
watcher.join()
print((max(seen) - before) / sum(map(stored_bytes, jax.tree.leaves(nnx.state(model)))))
"""


@pytest.mark.exhaustive("400 MB of weights")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process")
@pytest.mark.parametrize("name", ["int8 channel", "packed"])
def test_loading_takes_little_more_than_the_weights(name: str, tmp_path: Path) -> None:
    sizes = dict(hidden_size=1024, intermediate_size=2816, num_layers=24, num_heads=8, num_kv_heads=8, head_dim=128)
    cfg, rng = tiny_config(**sizes, vocab_size=1024), np.random.default_rng(0)  # pyright: ignore[reportArgumentType]
    stored: Tensors = {}
    for weight in registry.weights(nnx.eval_shape(lambda: registry.build(cfg))):
        for tensor, shape in zip(weight.names, weight.shapes, strict=True):
            module = tensor.removesuffix(".weight")
            if "_proj" not in tensor:
                stored[tensor] = np.ones(shape, np.float32)
            elif name == "int8 channel":
                stored[tensor] = rng.integers(-127, 128, shape, np.int8)
                stored[f"{module}.weight_scale"] = np.ones((shape[0], 1), np.float32)
            else:
                words = shape[0], shape[1] // 8
                stored[f"{module}.weight_packed"] = rng.integers(-(1 << 31), 1 << 31, words).astype(np.int32)
                stored[f"{module}.weight_scale"] = np.ones((shape[0], shape[1] // GROUP), np.float16)
                stored[f"{module}.weight_shape"] = np.array(shape)
    tensors.write_safetensors(tmp_path / hf.WEIGHTS, stored)
    settings = {"quantization_config": CASES[name].config}
    tensors.write_json(tmp_path / "config.json", hf.config_dict(cfg, jnp.float32) | settings)
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert 0.8 < float(done.stdout) < 1.1  # some of it lies where the first model lay


def test_heads_share_a_quantised_output_layer(tmp_path: Path) -> None:
    hf.save_model(tiny_target(1, **SIZES), tmp_path / "plain", dtype=jnp.float32)
    quantise_directory(tmp_path / "plain", tmp_path / "few", FORMATS["int8"], ignore=())
    target = hf.load_model(tmp_path / "few")
    assert target.lm_head is not None
    kernel = target.lm_head.kernel.get_value()
    assert isinstance(kernel, Quantised) and kernel.shape == (64, 13)
    _, lent = heads.lend_tables(target, jnp.float32, None, None)
    assert lent is not None and isinstance(lent.kernel, Shared)
    assert lent.kernel.get_value().values is kernel.values, "the very array, no copy"
    ids = np.array([2, 3, 11])
    rows = heads.lend_rows(target, jnp.float32, ids, None).kernel
    assert isinstance(rows, Shared)
    np.testing.assert_array_equal(rows.get_value().dequantised(), kernel.dequantised()[:, ids])
    own = np.ones((13, 64), np.float32)
    _, stored = heads.lend_tables(target, jnp.float32, None, own)
    assert stored is not None and not isinstance(stored.kernel, Shared)
    np.testing.assert_array_equal(stored.kernel[...], own.T)


def test_latent_attention_and_modules_in_blocks(tmp_path: Path) -> None:
    """The maps by heads are expanded when they are read, all others stay as they lie, the module's too."""
    fields = dict(FAMILY_FIELDS["deepseek_v3"], hidden_size=64)
    target = tiny_target(3, **fields)
    cfg = MtpConfig(mtp.as_module(heads.bare(target.config)), 2)
    head = MtpHead(cfg, Shared(target.embedding[...]), shared_lm_head(target), rngs=nnx.Rngs(5))
    save_drafter(head, tmp_path / "whole", target=target, dtype=jnp.float32, layout="deepseek")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    stored, rng = load_file(tmp_path / "whole" / "model.safetensors"), np.random.default_rng(4)
    few, whole = dict(stored), dict(stored)
    for name in stored:
        if name.endswith(("_proj.weight", "_mqa.weight")) and "eh_proj" not in name:
            (out, into), module = stored[name].shape, name.removesuffix(".weight")
            values, scale = fp8_values(rng, out, into), positive(rng, -(-out // 24), -(-into // 16))
            few |= {name: values, f"{module}.weight_scale_inv": scale}
            spread = np.repeat(np.repeat(scale, 24, axis=0)[:out], 16, axis=1)[:, :into]
            whole[name] = values.astype(np.float32) * spread
    (tmp_path / "few").mkdir()
    tensors.write_safetensors(tmp_path / "whole" / "model.safetensors", whole)
    tensors.write_safetensors(tmp_path / "few" / "model.safetensors", few)
    block = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[24, 16])
    (tmp_path / "few" / "config.json").write_text(json.dumps({**config, "quantization_config": block}))

    @nnx.jit
    def run(model: Any, module: Any, feature: jax.Array) -> tuple[jax.Array, jax.Array]:
        text = jnp.asarray(TOKENS), jnp.arange(8)[None]
        drafted = module(text[0], feature, text[1], causal_attention)
        return model.logits(model(*text, causal_attention)[0]), module.logits(drafted)

    feature = jax.random.normal(jax.random.key(1), (1, 8, 64))
    found = []
    for name in ("whole", "few"):
        model: Any = hf.load_model(tmp_path / name)
        module: Any = load_drafter("mtp", tmp_path / name, model)
        found.append([np.asarray(x) for x in run(model, module, feature)])
    assert not isinstance(model.layers[1].attn.keys[...], Quantised)
    layers = (model.layers[1], module.layer)
    assert all(isinstance(layer.attn.down.kernel[...], Quantised) for layer in layers)
    assert all(isinstance(layer.mlp.gate_up[...], Quantised) for layer in layers)
    for expected, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-3 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(("bits", "stored", "zero"), [(4, 1, -7), (4, 16, 8), (8, 0, -128), (8, 255, 127)])
def test_zero_points_are_bytes(bits: int, stored: int, zero: int):
    """Of any format, as kernels want them."""
    values, scale = np.zeros((2, 4), np.uint8), np.ones((1, 2), np.float16)
    few = formats._kernel(values, bits, scale, np.full((1, 2), stored, np.uint8))
    assert few.zero is not None and few.zero.dtype == jnp.int8
    np.testing.assert_array_equal(few.zero, zero)
