"""Granite (dense): Llama's layers with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, flag
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import transformer_weights

#: ModelConfig's fields and Granite's, which are 1 where config.json has none.
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}


def _positive(hf: dict[str, Any], name: str) -> float:
    value = hf.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Granite config.json as ModelConfig."""
    bias = flag(hf, "attention_bias")
    return ModelConfig(
        family="granite",
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=flag(hf, "mlp_bias"),
        **{field: _positive(hf, name) for field, name in _SCALES.items()},
        **common_fields(hf),
    )


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {
        "model_type": "granite",
        **common_config(cfg),
        "attention_bias": cfg.attention_bias,
        "mlp_bias": cfg.mlp_bias,
        **{name: 1.0 if getattr(cfg, field) is None else getattr(cfg, field) for field, name in _SCALES.items()},
    }


FAMILY = Family("granite", ("GraniteForCausalLM",), read_config, write_config, Transformer, transformer_weights)
