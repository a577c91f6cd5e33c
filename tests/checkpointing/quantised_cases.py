"""Quantised checkpoints of tiny models in every published format, and what their weights stand for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from jaxspec.checkpointing import hf, tensors
from jaxspec.models.layers import causal_attention
from jaxspec.models.tiny import tiny_target

#: Widths of which 64 divides some and not others, and fused parts that blocks of 24 outputs do not divide.
SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16
)
GROUP = 32
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]], np.int32)
Tensors = dict[str, np.ndarray]
Made = tuple[Tensors, np.ndarray]


def word(values: list[int]) -> int:
    """Nibbles or octets, the lowest first, as a signed word."""
    bits = 32 // len(values)
    total = sum(int(v) << (bits * i) for i, v in enumerate(values))
    return total - (1 << 32) if total >= 1 << 31 else total


def pack(values_RC: np.ndarray, bits: int = 4, places: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Rows of unsigned integers in words; `places` says which logical column each nibble holds."""
    each = 32 // bits
    rows = [[word([row[i + p] for p in places[:each]]) for i in range(0, len(row), each)] for row in values_RC]
    return np.array(rows, np.int32)


def groups(x_FG: np.ndarray, d_in: int) -> np.ndarray:
    return np.repeat(x_FG, d_in // x_FG.shape[1], axis=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A format: its config, and a module's tensors with the weight [out, in] that they stand for."""

    config: dict[str, Any]
    make: Callable[[np.random.Generator, str, int, int], Made]


def fp8_values(rng: np.random.Generator, out: int, into: int) -> np.ndarray:
    return (rng.standard_normal((out, into)) * 40).astype(ml_dtypes.float8_e4m3fn)


def positive(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(rng.uniform(0.5, 1.5, shape) * 0.004, np.float32)


def fp8_block(name: str) -> Callable[..., Made]:
    def make(rng: np.random.Generator, module: str, out: int, into: int) -> Made:
        w, scale = fp8_values(rng, out, into), positive(rng, -(-out // 24), into // GROUP)
        spread = groups(np.repeat(scale, 24, axis=0)[:out], into)
        return {f"{module}.weight": w, f"{module}.{name}": scale}, w.astype(np.float32) * spread

    return make


def fp8_tensor(rng: np.random.Generator, module: str, out: int, into: int) -> Made:
    w, scale = fp8_values(rng, out, into), positive(rng)
    extra = {f"{module}.input_scale": np.array([0.1], np.float32)}
    return {f"{module}.weight": w, f"{module}.weight_scale": scale, **extra}, w.astype(np.float32) * scale


def fp8_channel(rng: np.random.Generator, module: str, out: int, into: int) -> Made:
    w, scale = fp8_values(rng, out, into), positive(rng, out, 1).astype(ml_dtypes.bfloat16)
    return {f"{module}.weight": w, f"{module}.weight_scale": scale}, w.astype(np.float32) * scale.astype(np.float32)


def int8(zeros: bool) -> Callable[..., Made]:
    def make(rng: np.random.Generator, module: str, out: int, into: int) -> Made:
        w, scale = rng.integers(-128, 128, (out, into)).astype(np.int8), positive(rng, out, 1) / 2
        zero = rng.integers(-9, 9, (out, 1)).astype(np.int8) * zeros
        more = {f"{module}.weight_zero_point": zero} if zeros else {}
        return {f"{module}.weight": w, f"{module}.weight_scale": scale, **more}, (w - zero.astype(np.float32)) * scale

    return make


def packed(bits: int, group: int | None, *, zeros: bool = False, order: bool = False) -> Callable[..., Made]:
    def make(rng: np.random.Generator, module: str, out: int, into: int) -> Made:
        each, top, count = 32 // bits, 1 << bits, 1 if group is None else into // group
        q, scale = rng.integers(0, top, (out, into)), positive(rng, out, count) * 256 / top
        z = rng.integers(0, top, (out, count)) if zeros else np.full((out, count), top // 2)
        g_idx = np.arange(into) * count // into
        if order:  # the same inputs, the same order
            g_idx = np.random.default_rng(into).permutation(g_idx)
        made = {
            f"{module}.weight_packed": pack(q, bits), f"{module}.weight_scale": scale,
            f"{module}.weight_shape": np.array([out, into], np.int64),
        }  # fmt: skip
        if zeros:
            made[f"{module}.weight_zero_point"] = pack(z.T, bits, tuple(range(each))).T.copy()
        if order:
            made[f"{module}.weight_g_idx"] = g_idx.astype(np.int32)
        return made, (q - z[:, g_idx]) * scale[:, g_idx]

    return make


#: The sixteen values of NVFP4 by their codes.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2, np.float32) * np.repeat([1, -1], 8)


def nvfp4(values: str, factor: str, group: int = 16) -> Callable[..., Made]:
    def make(rng: np.random.Generator, module: str, out: int, into: int) -> Made:
        codes = rng.integers(0, 16, (out, into)).astype(np.uint8)
        scale = rng.uniform(2, 400, (out, into // group)).astype(ml_dtypes.float8_e4m3fn)
        whole = rng.uniform(0.5, 2) * 2e4
        stored = {
            f"{module}.{values}": codes[:, ::2] | codes[:, 1::2] << 4, f"{module}.weight_scale": scale,
            f"{module}.{factor}": np.array([whole] if factor == "weight_global_scale" else 1 / whole, np.float32),
            f"{module}.input_{'global_' * (values != 'weight')}scale": np.array([3.0], np.float32),
        }  # fmt: skip
        return stored, E2M1[codes] * groups(scale.astype(np.float32), into) / np.float32(whole)

    return make


def awq(rng: np.random.Generator, module: str, out: int, into: int) -> Made:
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    q, z = rng.integers(0, 16, (into, out)), rng.integers(0, 16, (into // GROUP, out))
    scale = (positive(rng, into // GROUP, out) * 16).astype(np.float16)
    made = {
        f"{module}.qweight": pack(q, 4, places), f"{module}.qzeros": pack(z, 4, places), f"{module}.scales": scale,
    }  # fmt: skip
    return made, ((q - np.repeat(z, GROUP, 0)) * np.repeat(scale.astype(np.float32), GROUP, 0)).T


def gptq(bits: int = 4, less: int = 1, order: bool = False, group: int | None = GROUP) -> Callable[..., Made]:
    def make(rng: np.random.Generator, module: str, out: int, into: int) -> Made:
        top, count = 1 << bits, 1 if group is None else into // group
        q, z = rng.integers(0, top, (into, out)), rng.integers(less, top, (count, out))
        scale = (positive(rng, count, out) * 256 / top).astype(np.float16)
        g_idx = np.arange(into) * count // into
        if order:
            g_idx = np.random.default_rng(into).permutation(g_idx)
        made = {
            f"{module}.qweight": pack(q.T, bits).T.copy(), f"{module}.qzeros": pack(z - less, bits),
            f"{module}.scales": scale, f"{module}.g_idx": g_idx.astype(np.int32),
        }  # fmt: skip
        return made, ((q - z[g_idx]) * scale.astype(np.float32)[g_idx]).T

    return make


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}}
    return dict(quant_method="compressed-tensors", format=form, config_groups={"group_0": group}, ignore=["lm_head"])


def pack_config(bits: int = 4, group: int | None = GROUP, **more: Any) -> dict[str, Any]:
    strategy = dict(strategy="channel") if group is None else dict(strategy="group", group_size=group)
    return compressed("pack-quantized", type="int", num_bits=bits, **strategy, **more)


BLOCK = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[24, GROUP])
GPTQ = dict(quant_method="gptq", bits=4, group_size=GROUP)
CASES = {
    "fp8 block": Case(BLOCK, fp8_block("weight_scale_inv")),
    "fp8 block, weight_scale": Case(BLOCK, fp8_block("weight_scale")),
    "fp8 tensor": Case(dict(quant_method="fp8", activation_scheme="static"), fp8_tensor),
    "float channel": Case(compressed("float-quantized", type="float", num_bits=8, strategy="channel"), fp8_channel),
    "float block": Case(
        compressed("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[24, GROUP]),
        fp8_block("weight_scale"),
    ),
    "int8 channel": Case(compressed("int-quantized", type="int", num_bits=8, strategy="channel"), int8(False)),
    "int8 zeros": Case(compressed("int-quantized", type="int", num_bits=8, strategy="channel"), int8(True)),
    "packed": Case(pack_config(), packed(4, GROUP)),
    "packed zeros": Case(pack_config(symmetric=False), packed(4, GROUP, zeros=True)),
    "packed order": Case(pack_config(actorder="group"), packed(4, GROUP, zeros=True, order=True)),
    "packed 8": Case(pack_config(8), packed(8, GROUP)),
    "packed channel": Case(pack_config(group=None), packed(4, None)),
    "nvfp4": Case(
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        nvfp4("weight_packed", "weight_global_scale"),
    ),
    "modelopt nvfp4": Case(
        dict(quant_method="modelopt", quant_algo="NVFP4", group_size=32, ignore=["lm_head"]),
        nvfp4("weight", "weight_scale_2", 32),
    ),
    "modelopt fp8": Case(dict(quant_method="modelopt", quant_algo="FP8"), fp8_tensor),
    "awq": Case(dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="GEMM"), awq),
    "gptq": Case(GPTQ, gptq()),
    "gptq_v2 order": Case({**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"}, gptq(less=0, order=True)),
    "gptq 8 whole": Case({**GPTQ, "bits": 8, "group_size": -1}, gptq(8, group=None)),
}


def modules(plain: Tensors) -> list[str]:
    return [name.removesuffix(".weight") for name in plain if "_proj.weight" in name]


def write(directory: Path, case: Case, edit: Callable[[Tensors, dict[str, Any]], object] | None = None) -> Tensors:
    """A directory in the case's format; returns the unquantised tensors that it stands for."""
    hf.save_model(tiny_target(1, **SIZES), directory, dtype=jnp.float32)
    plain = load_file(directory / hf.WEIGHTS)
    stored, rng = dict(plain), np.random.default_rng(0)
    for module in modules(plain):
        weight = f"{module}.weight"
        made, expanded = case.make(rng, module, *stored.pop(weight).shape)
        plain[weight] = expanded.astype(np.float32)
        stored |= made
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": dict(case.config)}
    if edit is not None:
        edit(stored, config["quantization_config"])
    tensors.write_json(directory / "config.json", config)
    tensors.write_safetensors(directory / hf.WEIGHTS, stored)
    return plain


def logits(model: Any) -> np.ndarray:
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state: forward(nnx.merge(graph, state)))(state))


def forward(model: Any) -> jax.Array:
    return model.logits(model(TOKENS, np.arange(TOKENS.shape[1])[None], causal_attention)[0])
