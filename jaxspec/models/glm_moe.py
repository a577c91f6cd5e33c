"""GLM-4.5 to 4.7: half of each head's channels turn, and DeepSeek-V3's experts in the layers after the first dense.

GLM-4.7-Flash (Glm4MoeLite) has DeepSeek's latent attention instead.
"""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts
from jaxspec.models.base import ModelConfig
from jaxspec.models.deepseek import NAMES, build, read_experts, read_latent, write_experts, write_latent
from jaxspec.models.family import Family, flag, refuse
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import transformer_weights

#: What transformers assumes for absent fields of the experts.
_USUAL: dict[str, Any] = dict(
    first_k_dense_replace=1, n_routed_experts=128, n_shared_experts=1, moe_intermediate_size=1408,
    routed_scaling_factor=1.0, n_group=1, topk_group=1, num_experts_per_tok=8, norm_topk_prob=True,
)  # fmt: skip

_LITE: dict[str, Any] = dict(
    _USUAL, kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
    n_routed_experts=64, moe_intermediate_size=1536, routed_scaling_factor=1.8, num_experts_per_tok=4,
)  # fmt: skip


def _mixture(hf: dict[str, Any]) -> dict[str, Any]:
    """What both know of their experts besides config.json's numbers."""
    refuse(hf, scoring_func="sigmoid", topk_method="noaux_tc")
    normalised = flag(hf, "norm_topk_prob", True)
    return dict(scores="sigmoid", normalised=normalised, corrected=True, grouped=True, group_best=2)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A GLM-4.5 config.json as ModelConfig."""
    hf = {**_USUAL, **hf}
    fields = common_fields(hf, bos=None, eos=None, max_positions=131072, eps=1e-5, partial=0.5)
    return ModelConfig(
        family="glm4_moe",
        attention_bias=flag(hf, "attention_bias"),
        qk_norm=flag(hf, "use_qk_norm"),
        experts=read_experts(hf, fields["num_layers"], **_mixture(hf)),
        **fields,
    )


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {
        "model_type": "glm4_moe",
        **common_config(cfg),
        **write_experts(cfg),
        "partial_rotary_factor": cfg.partial_rotary_factor,
        "attention_bias": cfg.attention_bias,
        "use_qk_norm": cfg.qk_norm,
    }


def read_lite(hf: dict[str, Any]) -> ModelConfig:
    """A GLM-4.7-Flash config.json as ModelConfig; `mlp_layer_types` may say which layers are dense."""
    kinds = hf.get("mlp_layer_types")
    if kinds is not None:
        dense = kinds.count("dense") if isinstance(kinds, list) else -1
        count = hf["num_hidden_layers"]
        if kinds != ["dense"] * dense + ["sparse"] * (count - dense):
            raise ValueError(
                f"config.json: mlp_layer_types must be 'dense' and then 'sparse' for {count} layers, got {kinds!r}"
            )
        hf = {**hf, "first_k_dense_replace": dense}
    neighbours = flag(hf, "rope_interleave", True)
    return read_latent(
        "glm4_moe_lite", hf, _LITE, _mixture(hf), neighbours, bos=0, eos=1, max_positions=202752, eps=1e-5
    )


def write_lite(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_lite, without `architectures`."""
    sparse = () if cfg.experts is None else cfg.experts.layers
    kinds = ["sparse" if i in sparse else "dense" for i in range(cfg.num_layers)]
    return {**write_latent(cfg), "mlp_layer_types": kinds, "rope_interleave": cfg.rope_interleaved}


_weights = functools.partial(transformer_weights, names=NAMES)
FAMILY = Family("glm4_moe", ("Glm4MoeForCausalLM",), read_config, write_config, experts.build, _weights)
LITE = Family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), read_lite, write_lite, build, _weights)
