"""ERNIE 4.5 (text): Llama's layers whose neighbouring channels rotate together, and the same with experts.

Experts are chosen by a softmax with a bias of each expert's, and weighted by it without.
"""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.family import Family, check_positive, flag, refuse
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import ExpertNames, LayerNames, transformer_weights

_NAMES = LayerNames(
    experts=ExpertNames(
        shared="shared_experts", correction="moe_statics.e_score_correction_bias", correction_ones=1, fused=False
    )
)
#: What transformers assumes for absent fields of the experts.
_USUAL: dict[str, Any] = dict(
    moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1,
    moe_layer_end_index=-1, moe_layer_interval=1,
)  # fmt: skip


def _read(family: str, hf: dict[str, Any], head_dim: int | None, **own: Any) -> ModelConfig:
    fields = common_fields(hf, max_positions=131072, head_dim=head_dim, eps=1e-5, theta=500000.0, tied=True)
    return ModelConfig(family=family, rope_interleaved=True, **own, **fields)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """An ERNIE 4.5 config.json (dense) as ModelConfig."""
    bias = flag(hf, "use_bias")
    return _read("ernie4_5", hf, 128, attention_bias=bias, output_bias=bias, mlp_bias=bias)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {"model_type": "ernie4_5", **common_config(cfg), "use_bias": cfg.attention_bias}


def _experts(hf: dict[str, Any]) -> Experts | None:
    """None where no layer has any."""
    hf = {**_USUAL, **hf}
    for name in ("moe_num_experts", "moe_k", "moe_intermediate_size", "moe_layer_interval"):
        check_positive(hf, name, required=True)
    names = "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index"
    for name, least in zip(names, (0, 0, -1), strict=True):
        if type(hf[name]) is not int or hf[name] < least:
            raise ValueError(f"config.json: {name} must be an integer of at least {least}, got {hf[name]!r}")
    count, chosen, inner = hf["moe_num_experts"], hf["moe_k"], hf["moe_intermediate_size"]
    if chosen > count:
        raise ValueError(f"config.json: moe_k must be at most the {count} experts, got {chosen}")
    shared, first, last = (hf[name] for name in names)
    every, last = range(hf["num_hidden_layers"]), hf["num_hidden_layers"] - 1 if last == -1 else last
    layers = tuple(i for i in every if first <= i <= last and (i + 1) % hf["moe_layer_interval"] == 0)
    if not layers:
        return None
    return Experts(count, chosen, inner, layers, corrected=True, shared_inner=shared * inner, shared_gate=False)


def read_moe(hf: dict[str, Any]) -> ModelConfig:
    """An ERNIE 4.5 config.json with experts as ModelConfig."""
    refuse(hf, use_bias=False, moe_norm_min=1e-12)
    return _read("ernie4_5_moe", hf, None, experts=_experts(hf))


def write_moe(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_moe, without `architectures`."""
    common, mixture = {"model_type": "ernie4_5_moe", **common_config(cfg)}, cfg.experts
    if mixture is None:
        return common | {"moe_layer_start_index": cfg.num_layers}
    apart = {b - a for a, b in zip(mixture.layers, mixture.layers[1:], strict=False)}
    return common | {
        "moe_num_experts": mixture.count,
        "moe_k": mixture.per_token,
        "moe_intermediate_size": mixture.inner,
        "moe_num_shared_experts": mixture.shared_inner // mixture.inner,
        "moe_layer_start_index": min(mixture.layers),
        "moe_layer_end_index": max(mixture.layers),
        "moe_layer_interval": max(apart, default=1),
    }


_DENSE = "Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"  # which the first files say
FAMILY = Family("ernie4_5", _DENSE, read_config, write_config, Transformer, transformer_weights)
_weights = functools.partial(transformer_weights, names=_NAMES)
MOE = Family("ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), read_moe, write_moe, experts.build, _weights)
