"""GLM-4.5 to 4.7: half of each head's channels turn, and DeepSeek-V3's experts in the layers after the first dense."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts
from jaxspec.models.base import ModelConfig
from jaxspec.models.deepseek import NAMES, read_experts, write_experts
from jaxspec.models.family import Family, refuse
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import transformer_weights

#: What transformers assumes for absent fields of the experts.
_USUAL: dict[str, Any] = dict(
    first_k_dense_replace=1, n_routed_experts=128, n_shared_experts=1, moe_intermediate_size=1408,
    routed_scaling_factor=1.0, n_group=1, topk_group=1, num_experts_per_tok=8, norm_topk_prob=True,
)  # fmt: skip


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A GLM-4.5 config.json as ModelConfig."""
    hf = {**_USUAL, **hf}
    refuse(hf, scoring_func="sigmoid", topk_method="noaux_tc")
    fields = common_fields(hf, bos=None, eos=None, max_positions=131072, eps=1e-5, partial=0.5)
    mixture = read_experts(
        hf, fields["num_layers"], scores="sigmoid", normalised=bool(hf["norm_topk_prob"]), corrected=True,
        grouped=True, group_best=2,
    )  # fmt: skip
    return ModelConfig(
        family="glm4_moe",
        attention_bias=bool(hf.get("attention_bias", False)),
        qk_norm=bool(hf.get("use_qk_norm", False)),
        experts=mixture,
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


_weights = functools.partial(transformer_weights, names=NAMES)
FAMILY = Family("glm4_moe", ("Glm4MoeForCausalLM",), read_config, write_config, experts.build, _weights)
