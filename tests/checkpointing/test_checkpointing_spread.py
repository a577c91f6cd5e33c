"""Weights that go straight to the devices that share a model: as laid out after loading, and nothing else is read."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxspec.checkpointing import hf, spread, tensors
from jaxspec.models import registry
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.sharded import BY_XLA, SPLIT
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_config, tiny_target
from jaxspec.quantize import FORMATS, quantise_directory
from jaxspec.runtime.sharding import Sharing, parameter_shardings, tensor_mesh

ROOT = Path(__file__).resolve().parents[2]
SHARDS = 2
FAMILIES: dict[str, dict[str, Any]] = {
    "tied, and biases": dict(tie_word_embeddings=True, attention_bias=True, output_bias=True, mlp_bias=True),
    "fused": FAMILY_FIELDS["phi3"],
    "experts": FAMILY_FIELDS["qwen3_moe"],
    "shared experts": FAMILY_FIELDS["qwen2_moe"],
    "experts in turns": FAMILY_FIELDS["gpt_oss"],
    "latent attention": FAMILY_FIELDS["deepseek_v2"],
}
#: Whose parts others have, but for a gate that every device holds whole.
LIKE = {"shared experts": pytest.mark.exhaustive("its parts are in other families' files")}


class OneOf:
    """A process with one of the devices: what it loads stays as it is."""

    def __init__(self, shard: int):
        self.shards, self.own, self.sums = SHARDS, (shard,), BY_XLA

    def put(self, part: Any, shard: int) -> Any:
        assert shard in self.own
        return part

    def joined(self, like: Any, axis: int | None, parts: Sequence[Any]) -> Any:
        return parts[0]


def own_part(directory: Path, shard: int) -> tuple[Any, int]:
    """What a process with one device holds, and the bytes that it read."""
    cfg = hf.load_config(directory)
    with tensors.read_tensors(directory) as reader:
        model = spread.load(
            lambda: registry.build(cfg, jnp.float32), registry.weights, reader, None, OneOf(shard), lambda *_: None
        )
        return nnx.state(model), reader.bytes_read


def assert_spread(directory: Path) -> Any:
    """What is loaded onto devices is what is laid out for them after loading; returns it."""
    mesh = tensor_mesh(SHARDS)
    want = nnx.state(tensor_parallel(hf.load_model(directory), SHARDS))
    found = nnx.state(hf.load_model(directory, devices=Sharing(mesh, BY_XLA)))
    assert jax.tree.structure(found) == jax.tree.structure(want)
    shardings = jax.tree.leaves(parameter_shardings(mesh, want))
    for x, y, sharding in zip(jax.tree.leaves(found), jax.tree.leaves(want), shardings, strict=True):
        assert x.sharding == sharding and x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=LIKE.get(name, ())) for name in FAMILIES])
def test_parts_are_those_of_a_model_laid_out(name: str, tmp_path: Path) -> None:
    """In one process, and each in a process of its own, which reads the bytes of its parts and no others."""
    hf.save_model(tiny_target(0, **{**FAMILIES[name], "vocab_size": 16}), tmp_path, dtype=jnp.float32)
    found = assert_spread(tmp_path)
    if name == "experts":
        fuse_experts(tmp_path)
        assert_spread(tmp_path)
    for shard in range(SHARDS):
        own, read = own_part(tmp_path, shard)
        for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y.addressable_shards[shard].data))
        assert read == sum(leaf.nbytes for leaf in jax.tree.leaves(own))
    halves = [p for p in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, nnx.Variable)) if p.has_metadata(SPLIT)]
    assert len(halves) > 8


@pytest.mark.parametrize("form", ["int8", "mxfp4"])
def test_experts_in_few_bits_are_cut_too(form: str, tmp_path: Path) -> None:
    """By outputs and inputs, and the scales of blocks with them; those that cannot be are whole on each device."""
    if form == "int8":
        hf.save_model(tiny_target(0, **FAMILY_FIELDS["qwen3_moe"]), tmp_path / "whole", dtype=jnp.float32)
        quantise_directory(tmp_path / "whole", tmp_path / "few", FORMATS["int8"])
    else:
        in_mxfp4(tmp_path / "few", inner=64)
    halves = 0
    for path, param in nnx.to_flat_state(assert_spread(tmp_path / "few")):
        if path[-1] in ("gate_up", "down") and "mlp" in path:
            for leaf in jax.tree.leaves(param):
                halves += leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    if form == "int8":
        plain = [f"model.layers.{layer}.mlp.experts.{e}.down_proj" for layer in range(2) for e in range(8)]
        quantise_directory(tmp_path / "whole", tmp_path / "half", FORMATS["int8"], ignore=[*plain, "lm_head"])
        assert_spread(tmp_path / "half")
    assert halves == (2 * 3 if form == "int8" else 2 * 4), "scales of outputs are whole beside inputs that are cut"
    if form == "mxfp4":
        in_mxfp4(tmp_path / "odd", inner=32)  # one block of inputs
        flat = dict(nnx.to_flat_state(assert_spread(tmp_path / "odd")))
        down = next(param for path, param in flat.items() if path[-1] == "down" and "mlp" in path)
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(down))


def in_mxfp4(directory: Path, inner: int) -> None:
    """A tiny gpt-oss with random codes and scales."""
    fields = FAMILY_FIELDS["gpt_oss"]
    own = dataclasses.replace(fields["experts"], inner=inner)
    target = tiny_target(0, **{**fields, "experts": own, "intermediate_size": inner, "vocab_size": 16})
    hf.save_model(target, directory, dtype=jnp.float32)
    stored, rng = load_file(directory / hf.WEIGHTS), np.random.default_rng(0)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        count, d_in, d_out = stored.pop(name).shape
        stored[f"{name}_blocks"] = rng.integers(0, 256, (count, d_out, d_in // 32, 16), np.uint8)
        stored[f"{name}_scales"] = rng.integers(118, 122, (count, d_out, d_in // 32), np.uint8)
    save_file(stored, directory / hf.WEIGHTS)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def fuse_experts(directory: Path) -> None:
    """All experts of a layer in one tensor, as newer files have them."""
    file = directory / hf.WEIGHTS
    apart = load_file(file)
    fused = {name: x for name, x in apart.items() if ".experts." not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        one = lambda e, part, at=at: apart[f"{at}.{e}.{part}_proj.weight"]
        both = [np.concatenate([one(e, "gate"), one(e, "up")]) for e in range(8)]
        fused[f"{at}.gate_up_proj"] = np.stack(both)
        fused[f"{at}.down_proj"] = np.stack([one(e, "down") for e in range(8)])
    save_file(fused, file)


def test_a_tied_head_that_differs_on_the_last_device_is_seen(tmp_path: Path) -> None:
    hf.save_model(tiny_target(0, vocab_size=16, tie_word_embeddings=True), tmp_path, dtype=jnp.float32)
    stored = load_file(tmp_path / hf.WEIGHTS)
    head = stored["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    save_file({**stored, "lm_head.weight": head}, tmp_path / hf.WEIGHTS)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but 'lm_head.weight' differs"):
        hf.load_model(tmp_path, devices=Sharing(tensor_mesh(SHARDS), BY_XLA))


#: In a process of its own, whose allocator gives every large piece back at once. The kernel's account of the most
#: memory that it had, mapped files included, begins anew at the second load; the first compiles what loading compiles.
LOAD = """
import sys
import jax
from flax import nnx
from jaxspec.checkpointing import hf
from jaxspec.models.sharded import BY_XLA
from jaxspec.runtime.sharding import Sharing, tensor_mesh

def held(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

devices = Sharing(tensor_mesh(4), BY_XLA)
hf.load_model(sys.argv[1], devices=devices)
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")
before = held("VmRSS")
model = hf.load_model(sys.argv[1], devices=devices)
leaves = jax.tree.leaves(nnx.state(model))
devices_have = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
print(held("VmHWM") - before, devices_have)
"""


@pytest.mark.exhaustive("200 MB of weights, in a process of its own")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's account of a process")
def test_loading_takes_no_more_of_the_host_than_one_tensor(tmp_path: Path) -> None:
    """Llama 70B's proportions, an eighth as wide and a tenth as deep: four devices here hold their parts in the host's
    memory, and what comes on top is at most 1.1 times what one of them holds."""
    sizes = dict(hidden_size=1024, intermediate_size=3584, num_layers=8, num_heads=16, num_kv_heads=8, head_dim=64)
    cfg, rng = tiny_config(**sizes, vocab_size=16000), np.random.default_rng(0)  # pyright: ignore[reportArgumentType]
    stored = {
        tensor: rng.standard_normal(shape, np.float32)
        for weight in registry.weights(nnx.eval_shape(lambda: registry.build(cfg)))
        for tensor, shape in zip(weight.names, weight.shapes, strict=True)
    }
    tensors.write_safetensors(tmp_path / hf.WEIGHTS, stored)
    tensors.write_json(tmp_path / "config.json", hf.config_dict(cfg, jnp.float32))
    env = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536", "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }  # fmt: skip
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    peak, devices_have = map(int, done.stdout.split())
    assert devices_have <= peak < devices_have + 1.1 * devices_have / 4
