"""Qwen2 and Qwen2.5: Llama's layers with biases on q, k and v; some releases slide in their last layers."""

from __future__ import annotations

from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, Wrapped, read_windows, write_windows
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import transformer_weights


def windows(hf: dict[str, Any]) -> dict[str, Any]:
    """Qwen's windows: of the layers from `max_window_layers` on, where `use_sliding_window` says so."""
    first = hf.get("max_window_layers", 28)
    return read_windows(hf, lambda layer: layer >= first, 4096, switched=True)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Qwen2 config.json as ModelConfig."""
    fields = common_fields(hf, bos=None, eos=None, max_positions=32768, windows=True)
    return ModelConfig(family="qwen2", attention_bias=True, **windows(hf), **fields)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {"model_type": "qwen2", **common_config(cfg), **write_windows(cfg, switched=True)}


#: Published with all fields side by side. What is here files leave out, or might.
_IMAGES = Wrapped(
    "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text",
    dict(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, rms_norm_eps=1e-5, max_window_layers=80, bos_token_id=151643, eos_token_id=151645,
        rope_parameters=dict(rope_theta=1e6),
    ),
    flat=True,
)  # fmt: skip
FAMILY = Family(
    "qwen2", ("Qwen2ForCausalLM",), read_config, write_config, Transformer, transformer_weights, wrapped=(_IMAGES,)
)
