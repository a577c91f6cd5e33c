"""Qwen3 (dense): Llama's layers with an RMSNorm over each head of q and k."""

from __future__ import annotations

from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, write_windows
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.qwen2 import windows
from jaxspec.models.weight_map import transformer_weights


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Qwen3 config.json as ModelConfig."""
    bias = bool(hf.get("attention_bias", False))
    fields = common_fields(hf, bos=None, eos=None, max_positions=32768, head_dim=128, windows=True)
    return ModelConfig(family="qwen3", qk_norm=True, attention_bias=bias, output_bias=bias, **windows(hf), **fields)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    own = {"attention_bias": cfg.attention_bias, **write_windows(cfg, switched=True)}
    return {"model_type": "qwen3", **common_config(cfg), **own}


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), read_config, write_config, Transformer, transformer_weights)
