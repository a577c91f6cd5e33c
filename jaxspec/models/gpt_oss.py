"""gpt-oss: a sink in every head's softmax, windows in every other layer, and experts with biases and clamped gates."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts
from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, flag, read_windows, refuse, write_windows
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.mixing import CLAMP, SHARPNESS
from jaxspec.models.mixtral import read_experts
from jaxspec.models.weight_map import ExpertNames, LayerNames, transformer_weights

_NAMES = LayerNames(experts=ExpertNames(router="router", in_turns=True))
#: What transformers assumes where config.json says nothing of rotary scaling.
_ROPE = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A gpt-oss config.json as ModelConfig."""
    refuse(hf, swiglu_alpha=SHARPNESS, swiglu_limit=CLAMP)
    if "rope_scaling" not in hf and "rope_parameters" not in hf:
        hf = {**hf, "rope_scaling": _ROPE}
    fields = common_fields(
        hf, bos=None, eos=None, max_positions=131072, head_dim=64, eps=1e-5, theta=150000.0, windows=True
    )
    mixture = read_experts(
        hf, fields["intermediate_size"], tuple(range(fields["num_layers"])), count=128, per_token=4,
        scores="top_k", bias=True, hidden_act="clamped_swiglu",
    )  # fmt: skip
    bias = flag(hf, "attention_bias", True)
    return ModelConfig(
        family="gpt_oss", attention_bias=bias, output_bias=bias, attention_sinks=True, norm_gain="float32",
        experts=mixture, **read_windows(hf, lambda i: i % 2 == 0, 128), **fields,
    )  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    assert cfg.experts is not None
    common = common_config(cfg)
    return {
        "model_type": "gpt_oss",
        **common,
        "rope_scaling": common["rope_scaling"] or {"rope_type": "default"},
        **write_windows(cfg),
        "attention_bias": cfg.attention_bias,
        "num_local_experts": cfg.experts.count,
        "num_experts_per_tok": cfg.experts.per_token,
        "swiglu_alpha": SHARPNESS,
        "swiglu_limit": CLAMP,
    }


_weights = functools.partial(transformer_weights, names=_NAMES)
FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), read_config, write_config, experts.build, _weights)
