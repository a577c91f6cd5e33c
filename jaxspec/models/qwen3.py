"""Qwen3 (dense): Llama's layers with an RMSNorm over each head of q and k."""

from __future__ import annotations

from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, Wrapped, flag, write_windows
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.qwen2 import windows
from jaxspec.models.weight_map import transformer_weights


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Qwen3 config.json as ModelConfig."""
    bias = flag(hf, "attention_bias")
    fields = common_fields(hf, bos=None, eos=None, max_positions=32768, head_dim=128, windows=True)
    return ModelConfig(family="qwen3", qk_norm=True, attention_bias=bias, output_bias=bias, **windows(hf), **fields)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    own = {"attention_bias": cfg.attention_bias, **write_windows(cfg, switched=True)}
    return {"model_type": "qwen3", **common_config(cfg), **own}


#: What files might leave out.
_IMAGES = Wrapped(
    "Qwen3VLForConditionalGeneration", "qwen3_vl_text",
    dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=128000, rope_parameters=dict(rope_theta=5e5),
    ),
)  # fmt: skip
FAMILY = Family(
    "qwen3", ("Qwen3ForCausalLM",), read_config, write_config, Transformer, transformer_weights, wrapped=(_IMAGES,)
)
