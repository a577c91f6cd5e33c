"""Mistral and Ministral: Llama's layers, all of them or some with a window."""

from __future__ import annotations

from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, Wrapped, read_windows, write_windows
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import transformer_weights


def _read(family: str, hf: dict[str, Any]) -> ModelConfig:
    fields = common_fields(hf, max_positions=131072, windows=True)
    return ModelConfig(family=family, **read_windows(hf, lambda _: True, 4096), **fields)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Mistral config.json as ModelConfig: every layer has the window, or none."""
    return _read("mistral", hf)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {"model_type": "mistral", **common_config(cfg), "sliding_window": cfg.sliding_window}


def read_ministral(hf: dict[str, Any]) -> ModelConfig:
    """A Ministral config.json as ModelConfig: `layer_types` says which layers have the window."""
    return _read("ministral", hf)


def write_ministral(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_ministral, without `architectures`."""
    return {"model_type": "ministral", **common_config(cfg), **write_windows(cfg)}


FAMILY = Family(
    "mistral", ("MistralForCausalLM",), read_config, write_config, Transformer, transformer_weights,
    wrapped=(Wrapped("Mistral3ForConditionalGeneration", "mistral"),),
)  # fmt: skip
MINISTRAL = Family(
    "ministral", ("MinistralForCausalLM",), read_ministral, write_ministral, Transformer, transformer_weights
)
