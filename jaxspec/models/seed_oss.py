"""Seed-OSS: Llama's layers with biases on q, k and v; those of the output projection have a field of their own."""

from __future__ import annotations

from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, flag
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import transformer_weights


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Seed-OSS config.json as ModelConfig."""
    return ModelConfig(
        family="seed_oss",
        attention_bias=flag(hf, "attention_bias", True),
        output_bias=flag(hf, "attention_out_bias"),
        mlp_bias=flag(hf, "mlp_bias"),
        **common_fields(hf, bos=0, max_positions=524288, head_dim=128),
    )


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {
        "model_type": "seed_oss",
        **common_config(cfg),
        "attention_bias": cfg.attention_bias,
        "attention_out_bias": cfg.output_bias,
        "mlp_bias": cfg.mlp_bias,
    }


FAMILY = Family("seed_oss", ("SeedOssForCausalLM",), read_config, write_config, Transformer, transformer_weights)
