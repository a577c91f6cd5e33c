"""DeepSeek-V2 and V3: latent attention, experts in groups beside shared ones, dense layers first.

V2 scores experts by a softmax over all; V3 by sigmoids, and chooses by these with a bias of each expert's besides.
"""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts, latent
from jaxspec.models.base import Experts, Latent, ModelConfig
from jaxspec.models.family import Family, check_number, check_positive, flag, refuse
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.rope_fields import grown
from jaxspec.models.weight_map import ExpertNames, LayerNames, transformer_weights

NAMES = LayerNames(experts=ExpertNames(shared="shared_experts", fused=False))
#: What transformers assumes for absent fields, by V2 and V3.
_V2: dict[str, Any] = dict(
    kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    first_k_dense_replace=0, n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1407,
    routed_scaling_factor=1.0, n_group=None, topk_group=None, num_experts_per_tok=None, norm_topk_prob=False,
)  # fmt: skip
_V3: dict[str, Any] = dict(
    _V2, first_k_dense_replace=3, n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048,
    routed_scaling_factor=2.5, n_group=8, topk_group=4, num_experts_per_tok=8, norm_topk_prob=True,
)  # fmt: skip
_COUNTS = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"


def read_latent(
    family: str, hf: dict[str, Any], usual: dict[str, Any], mixture: dict[str, Any], neighbours: bool, **own: Any
) -> ModelConfig:
    """A config.json of DeepSeek or a relative with latent attention as ModelConfig.

    Args:
      usual: what transformers assumes for absent fields. mixture: see read_experts.
      neighbours: whether neighbouring channels rotate together. own: see common_fields.

    Raises:
      ValueError: see common_fields and read_experts; shapes that latent attention does not have.
    """
    hf = {**usual, **hf}
    refuse(hf, attention_bias=False, moe_layer_freq=1)
    for name in _COUNTS:
        check_positive(hf, name, required=True)
    check_positive(hf, "q_lora_rank")
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ValueError(
            f"config.json: num_key_value_heads must be num_attention_heads {heads} (latent attention), got {kv_heads!r}"
        )
    shape = Latent(
        hf["kv_lora_rank"], hf["qk_rope_head_dim"], hf["qk_nope_head_dim"], hf["v_head_dim"], hf["q_lora_rank"]
    )
    fields = common_fields({**hf, "head_dim": shape.rotary}, **own)
    scale, scaling = (shape.key + shape.rotary) ** -0.5, fields["rope_scaling"]
    if scaling is not None and scaling.mscale_all_dim:
        scale *= grown(scaling.factor, scaling.mscale_all_dim) ** 2
    return ModelConfig(
        family=family, latent=shape, attention_scale=scale, rope_interleaved=neighbours,
        experts=read_experts(hf, fields["num_layers"], **mixture),
        **{**fields, "num_kv_heads": 1, "head_dim": shape.rank + shape.rotary},
    )  # fmt: skip


def read_experts(hf: dict[str, Any], layers: int, **mixture: Any) -> Experts | None:
    """The experts of DeepSeek and its relatives, in all layers after the first dense ones; None where all are dense.

    Args:
      hf: config.json with the family's defaults in it. layers: how many the model has.
      mixture: what the family knows besides: fields of Experts, and `grouped`: whether groups count.

    Raises:
      ValueError: numbers that are missing, impossible or do not suit each other; names them.
    """
    for name in ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"):
        check_positive(hf, name, required=True)
    for name in ("n_group", "topk_group"):
        check_positive(hf, name)
    first, shared, scale = (hf[k] for k in ("first_k_dense_replace", "n_shared_experts", "routed_scaling_factor"))
    for name, value in (("first_k_dense_replace", first), ("n_shared_experts", shared or 0)):
        if type(value) is not int or value < 0:
            raise ValueError(f"config.json: {name} must be an integer of at least 0, got {value!r}")
    check_number(hf, "routed_scaling_factor")
    count, chosen, inner = hf["n_routed_experts"], hf["num_experts_per_tok"], hf["moe_intermediate_size"]
    if chosen > count:
        raise ValueError(f"config.json: num_experts_per_tok {chosen} is more than n_routed_experts {count}")
    groups, used = (hf["n_group"] or 1, hf["topk_group"] or 1) if mixture.pop("grouped") else (1, 1)
    best = mixture["group_best"] if groups > 1 else 1
    if count % groups or used > groups or not best <= count // groups or chosen > used * (count // groups):
        raise ValueError(
            f"config.json: n_group {groups} and topk_group {used} do not suit n_routed_experts {count} of which "
            f"num_experts_per_tok {chosen} are used: groups are of one size, at least {best}, and hold what is used"
        )
    if first >= layers:
        return None
    return Experts(
        count, chosen, inner, tuple(range(first, layers)), groups=groups, groups_used=used, scale=float(scale),
        shared_inner=inner * (shared or 0), shared_gate=False, **{**mixture, "group_best": best},
    )  # fmt: skip


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A DeepSeek-V2 config.json as ModelConfig."""
    refuse(hf, scoring_func="softmax", norm_topk_prob=False)  # what transformers would ignore
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"config.json: topk_method must be 'greedy' or 'group_limited_greedy', got {method!r}")
    mixture = dict(normalised=False, grouped=method != "greedy", group_best=1)
    return read_latent("deepseek_v2", hf, _V2, mixture, True)


def read_v3(hf: dict[str, Any]) -> ModelConfig:
    """A DeepSeek-V3 config.json as ModelConfig."""
    refuse(hf, scoring_func="sigmoid", topk_method="noaux_tc")
    normalised = flag(hf, "norm_topk_prob", True)
    mixture = dict(scores="sigmoid", normalised=normalised, corrected=True, grouped=True, group_best=2)
    neighbours = flag(hf, "rope_interleave", True)
    return read_latent("deepseek_v3", hf, _V3, mixture, neighbours, bos=0, eos=1, max_positions=4096)


def write_experts(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_experts."""
    mixture = cfg.experts
    if mixture is None:
        return {"first_k_dense_replace": cfg.num_layers}
    return {
        "first_k_dense_replace": min(mixture.layers),
        "n_routed_experts": mixture.count,
        "num_experts_per_tok": mixture.per_token,
        "moe_intermediate_size": mixture.inner,
        "n_shared_experts": mixture.shared_inner // mixture.inner,
        "routed_scaling_factor": mixture.scale,
        "n_group": mixture.groups,
        "topk_group": mixture.groups_used,
        "norm_topk_prob": mixture.normalised,
    }


def write_latent(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_latent."""
    own = cfg.latent
    assert own is not None
    return {
        "model_type": cfg.family,
        **common_config(cfg),
        "num_key_value_heads": cfg.num_heads,
        "head_dim": own.rotary,
        "kv_lora_rank": own.rank,
        "q_lora_rank": own.query_rank,
        "qk_nope_head_dim": own.key,
        "qk_rope_head_dim": own.rotary,
        "v_head_dim": own.value,
        **write_experts(cfg),
    }


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    grouped = cfg.experts is not None and cfg.experts.groups > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return {**write_latent(cfg), "scoring_func": "softmax", "topk_method": method}


def write_v3(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_v3, without `architectures`."""
    own = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": cfg.rope_interleaved}
    return {**write_latent(cfg), **own}


build = functools.partial(experts.build, attn=latent.attention)
_weights = functools.partial(transformer_weights, names=NAMES)
FAMILY = Family("deepseek_v2", ("DeepseekV2ForCausalLM",), read_config, write_config, build, _weights)
V3 = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), read_v3, write_v3, build, _weights)
