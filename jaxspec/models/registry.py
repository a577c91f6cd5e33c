"""Which families there are, and what in a config.json none of them can honour.

Owns the way from Hugging Face's architecture names to a family's reader, and the checks
that all families share. Must not know weights' names or files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.models import llama, qwen2, qwen3
from jaxspec.models.base import ConfigReader, ModelConfig
from jaxspec.models.layers import Transformer


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's reader and writer of config.json; the first architecture is the one written."""

    architectures: tuple[str, ...]
    read: ConfigReader
    write: Callable[[ModelConfig], dict[str, Any]]


FAMILIES: dict[str, Family] = {
    "llama": Family(llama.ARCHITECTURES, llama.read_config, llama.write_config),
    "qwen2": Family(qwen2.ARCHITECTURES, qwen2.read_config, qwen2.write_config),
    "qwen3": Family(qwen3.ARCHITECTURES, qwen3.read_config, qwen3.write_config),
}
_BY_ARCHITECTURE = {name: family for family in FAMILIES.values() for name in family.architectures}
_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_config(hf_config: dict[str, Any]) -> ModelConfig:
    """config.json of a supported architecture as ModelConfig.

    Raises:
      ValueError: an unknown architecture, a missing or impossible field, or a feature that
        is not implemented (quantized weights, sliding windows, other activations or RoPE
        rules): nothing that changes the model's output is ignored.
    """
    names = hf_config.get("architectures")
    known = [n for n in names if n in _BY_ARCHITECTURE] if isinstance(names, list) else []
    if not known:
        raise ValueError(f"config.json: architectures {names!r} is not supported; supported are {supported()}")
    _check(hf_config)
    return _BY_ARCHITECTURE[known[0]].read(hf_config)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config.

    Raises:
      ValueError: an unknown family, or fields that its config.json cannot express.
    """
    if cfg.family not in FAMILIES:
        raise ValueError(f"ModelConfig.family must be one of {sorted(FAMILIES)}, got {cfg.family!r}")
    family = FAMILIES[cfg.family]
    config = {"architectures": [family.architectures[0]], **family.write(cfg)}
    back = read_config(config)
    if back != cfg:
        wrong = [f.name for f in dataclasses.fields(cfg) if getattr(back, f.name) != getattr(cfg, f.name)]
        pairs = ", ".join(f"{n}={getattr(cfg, n)!r} (would read as {getattr(back, n)!r})" for n in wrong)
        raise ValueError(f"a {cfg.family} config.json cannot express {pairs}")
    return config


def build(cfg: ModelConfig, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None = None) -> Transformer:
    """A model with random weights, or with zeros (rngs None) that a checkpoint fills.

    Raises:
      ValueError: an unknown family.
    """
    if cfg.family not in FAMILIES:
        raise ValueError(f"ModelConfig.family must be one of {sorted(FAMILIES)}, got {cfg.family!r}")
    return Transformer(cfg, dtype=jnp.dtype(dtype), rngs=rngs)


def supported() -> list[str]:
    """Hugging Face's names of the supported architectures."""
    return sorted(_BY_ARCHITECTURE)


def _check(hf: dict[str, Any]) -> None:
    for name in _COUNTS:
        _positive(hf, name, required=True)
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        _positive(hf, name)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if hf.get("head_dim") is None and hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = hf.get("head_dim") or hidden // heads
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act {hf['hidden_act']!r} is not supported; supported is 'silu'")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "of an unknown kind")
        raise ValueError(f"config.json: quantized weights ({method}) are not supported; use the unquantized checkpoint")
    sliding = [t for t in hf.get("layer_types") or () if t != "full_attention"]
    if hf.get("use_sliding_window") or sliding:
        given = f"use_sliding_window={hf.get('use_sliding_window')!r}, layer_types {sorted(set(sliding))}"
        raise ValueError(f"config.json: only full attention is implemented, got {given}")
    rope = hf.get("rope_parameters") or {}
    partial = hf.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor must be 1.0, got {partial!r}")


def _positive(hf: dict[str, Any], name: str, *, required: bool = False) -> None:
    value = hf.get(name)
    if value is None and not required:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name} must be a positive integer, got {value!r}")
