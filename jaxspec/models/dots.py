"""dots.llm1: Qwen3's attention, and DeepSeek-V3's experts in the layers after the first dense ones."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts
from jaxspec.models.base import ModelConfig
from jaxspec.models.deepseek import NAMES, read_experts, write_experts
from jaxspec.models.family import Family, flag, read_windows, refuse, write_windows
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import transformer_weights

#: What transformers assumes for absent fields of the experts; it has no counts.
_USUAL: dict[str, Any] = dict(
    first_k_dense_replace=0, n_routed_experts=None, n_shared_experts=None, moe_intermediate_size=1408,
    routed_scaling_factor=1.0, n_group=1, topk_group=1, num_experts_per_tok=None, norm_topk_prob=False,
)  # fmt: skip


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A dots.llm1 config.json as ModelConfig."""
    hf = {**_USUAL, **hf}
    if hf.get("scoring_func") != "noaux_tc":  # as the published files call V3's choice by sigmoids
        refuse(hf, scoring_func="sigmoid")
    refuse(hf, topk_method="noaux_tc", moe_layer_freq=1)
    fields = common_fields(hf, bos=None, eos=None, windows=True)
    first = hf.get("max_window_layers", 62)
    mixture = read_experts(
        hf, fields["num_layers"], scores="sigmoid", normalised=flag(hf, "norm_topk_prob"), corrected=True,
        grouped=True, group_best=2,
    )  # fmt: skip
    bias = flag(hf, "attention_bias")
    return ModelConfig(
        family="dots1",
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=mixture,
        **read_windows(hf, lambda layer: layer >= first, 4096),
        **fields,
    )


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    own = {"attention_bias": cfg.attention_bias, "scoring_func": "noaux_tc"}
    return {"model_type": "dots1", **common_config(cfg), **write_experts(cfg), **write_windows(cfg), **own}


_weights = functools.partial(transformer_weights, names=NAMES)
FAMILY = Family("dots1", ("Dots1ForCausalLM",), read_config, write_config, experts.build, _weights)
