"""GLM-4, with norms before and after attention and MLP (0414 and later) or before only: neighbours rotate together."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, flag
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import LayerNames, transformer_weights

_GLM = LayerNames(gate_up=("gate_up_proj",))
_GLM4 = LayerNames(
    attn_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm", gate_up=("gate_up_proj",)
)


def _read(family: str, hf: dict[str, Any]) -> ModelConfig:
    fields = common_fields(
        hf, bos=None, eos=(151329, 151336, 151338), max_positions=131072, head_dim=128, eps=1.5625e-07, partial=0.5
    )
    return ModelConfig(
        family=family,
        attention_bias=flag(hf, "attention_bias", True),
        rope_interleaved=True,
        post_norms=family == "glm4",
        **fields,
    )


def read_glm(hf: dict[str, Any]) -> ModelConfig:
    """A GLM-4 config.json of 2024 as ModelConfig."""
    return _read("glm", hf)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A GLM-4-0414 config.json as ModelConfig."""
    return _read("glm4", hf)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of both, without `architectures`."""
    own = {"attention_bias": cfg.attention_bias, "partial_rotary_factor": cfg.partial_rotary_factor}
    return {"model_type": cfg.family, **common_config(cfg), **own}


FAMILY = Family(
    "glm4", ("Glm4ForCausalLM",), read_config, write_config, Transformer,
    functools.partial(transformer_weights, names=_GLM4),
)  # fmt: skip
GLM = Family(
    "glm", ("GlmForCausalLM",), read_glm, write_config, Transformer, functools.partial(transformer_weights, names=_GLM)
)
