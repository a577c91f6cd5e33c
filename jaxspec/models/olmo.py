"""OLMo 2 and 3, with norms on what comes out of attention and MLP; OLMoE. Norms over all heads of q and k at once."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts
from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, flag, read_windows, refuse, write_windows
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.mixtral import read_experts
from jaxspec.models.rope_fields import by_layer_type, of_full_layers
from jaxspec.models.weight_map import ExpertNames, LayerNames, transformer_weights

_NAMES = LayerNames(
    attn_norm="", attn_out_norm="post_attention_layernorm", mlp_norm="", mlp_out_norm="post_feedforward_layernorm"
)


def _read(family: str, hf: dict[str, Any], **fields: Any) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    return ModelConfig(
        family=family,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        qk_norm_wide=True,
        pre_norms=False,
        post_norms=True,
        norm_gain="float32",
        **fields,
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {"model_type": cfg.family, **common_config(cfg), "attention_bias": cfg.attention_bias}


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """An OLMo 2 config.json as ModelConfig."""
    return _read("olmo2", hf, **common_fields(hf, bos=None, eos=50279, eps=1e-5))


def read_olmo3(hf: dict[str, Any]) -> ModelConfig:
    """An OLMo 3 config.json as ModelConfig: three of four layers slide, and scalings are for the others."""
    one, local = of_full_layers(hf, hf.get("rope_theta") or 500000.0)
    fields = common_fields(one, bos=None, eos=50279, eps=1e-5, theta=500000.0, windows=True)
    windows = read_windows(hf, lambda i: (i + 1) % 4 != 0, 4096)
    same = local == fields["rope_theta"] and fields["rope_scaling"] is None
    return _read("olmo3", hf, local_rope_theta=None if same else local, **windows, **fields)


def write_olmo3(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_olmo3, without `architectures`."""
    return {**_write(cfg), **write_windows(cfg), **by_layer_type(cfg)}


def read_olmoe(hf: dict[str, Any]) -> ModelConfig:
    """An OLMoE config.json as ModelConfig: norms before attention and experts, as Llama's."""
    refuse(hf, clip_qkv=None)
    fields = common_fields(hf, bos=None, eos=50279, max_positions=4096, eps=1e-5)
    mixture = read_experts(
        hf, fields["intermediate_size"], tuple(range(fields["num_layers"])), count=64, per_token=8,
        normalised=flag(hf, "norm_topk_prob"),
    )  # fmt: skip
    bias = flag(hf, "attention_bias")
    return ModelConfig(
        family="olmoe",
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        qk_norm_wide=True,
        experts=mixture,
        **fields,
    )


def write_olmoe(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_olmoe, without `architectures`."""
    assert cfg.experts is not None
    own = {
        "num_experts": cfg.experts.count,
        "num_experts_per_tok": cfg.experts.per_token,
        "norm_topk_prob": cfg.experts.normalised,
    }
    return {**_write(cfg), **own}


_weights = functools.partial(transformer_weights, names=_NAMES)
FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), read_config, _write, Transformer, _weights)
OLMOE = Family(
    "olmoe", ("OlmoeForCausalLM",), read_olmoe, write_olmoe, experts.build,
    functools.partial(transformer_weights, names=LayerNames(experts=ExpertNames())),
)  # fmt: skip
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM",), read_olmo3, write_olmo3, Transformer, _weights)
