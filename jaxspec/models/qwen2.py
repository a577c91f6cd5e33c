"""Qwen2 and Qwen2.5: Llama's layers with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import transformer_weights


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Qwen2 config.json as ModelConfig."""
    return ModelConfig(
        family="qwen2", attention_bias=True, **common_fields(hf, bos=None, eos=None, max_positions=32768)
    )


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {"model_type": "qwen2", **common_config(cfg), "use_sliding_window": False}


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), read_config, write_config, Transformer, transformer_weights)
