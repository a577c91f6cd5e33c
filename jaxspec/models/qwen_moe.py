"""Qwen2-MoE and Qwen3-MoE: the layers of Qwen2 and Qwen3 with experts in some or all of them."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.family import Family, Wrapped, check_positive, flag, read_windows, write_windows
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.mixtral import read_experts
from jaxspec.models.weight_map import ExpertNames, LayerNames, transformer_weights

_NAMES = LayerNames(experts=ExpertNames())


def _experts(hf: dict[str, Any], inner: int, **usual: Any) -> Experts | None:
    """None where no layer has any: `mlp_only_layers` and `decoder_sparse_step` leave them out."""
    check_positive(hf, "decoder_sparse_step")
    check_positive(hf, "moe_intermediate_size")
    step, without = int(hf.get("decoder_sparse_step") or 1), hf.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(isinstance(i, int) for i in without):
        raise ValueError(f"config.json: mlp_only_layers must be layers' numbers, got {without!r}")
    layers = tuple(i for i in range(hf["num_hidden_layers"]) if i not in without and (i + 1) % step == 0)
    if hf.get("num_experts") == 0 or not layers:
        return None
    normalised = flag(hf, "norm_topk_prob")
    return read_experts(hf, int(hf.get("moe_intermediate_size") or inner), layers, normalised=normalised, **usual)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    own: dict[str, Any] = {"num_experts": 0}
    if cfg.experts is not None:
        own = {
            "num_experts": cfg.experts.count,
            "num_experts_per_tok": cfg.experts.per_token,
            "moe_intermediate_size": cfg.experts.inner,
            "norm_topk_prob": cfg.experts.normalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(cfg.num_layers) if i not in cfg.experts.layers],
        }
    return {"model_type": cfg.family, **common_config(cfg), **own}


def read_qwen2(hf: dict[str, Any]) -> ModelConfig:
    """A Qwen2-MoE config.json as ModelConfig: a shared expert beside the chosen ones."""
    fields = common_fields(hf, bos=None, eos=None, max_positions=32768, windows=True)
    check_positive(hf, "shared_expert_intermediate_size")
    shared = int(hf.get("shared_expert_intermediate_size") or 5632)
    mixture = _experts(hf, 1408, shared_inner=shared, count=60, per_token=4)
    first = hf.get("max_window_layers", 28)
    windows = read_windows(hf, lambda i: i % 2 == 0 and i < first, 4096, switched=True)
    bias = flag(hf, "qkv_bias", True)
    return ModelConfig(family="qwen2_moe", attention_bias=bias, experts=mixture, **windows, **fields)


def write_qwen2(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_qwen2, without `architectures`."""
    shared = {} if cfg.experts is None else {"shared_expert_intermediate_size": cfg.experts.shared_inner}
    return {**_write(cfg), **shared, "qkv_bias": cfg.attention_bias, **write_windows(cfg, switched=True)}


def read_qwen3(hf: dict[str, Any]) -> ModelConfig:
    """A Qwen3-MoE config.json as ModelConfig."""
    bias = flag(hf, "attention_bias")
    fields = common_fields(hf, bos=None, eos=None, max_positions=32768, windows=True)
    windows = read_windows(hf, lambda _: True, 4096, switched=True)
    mixture = _experts(hf, 768, count=128, per_token=8)
    return ModelConfig(
        family="qwen3_moe", qk_norm=True, attention_bias=bias, output_bias=bias, experts=mixture, **windows, **fields
    )


def write_qwen3(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_qwen3, without `architectures`."""
    windows = {"sliding_window": cfg.sliding_window, "use_sliding_window": bool(cfg.sliding_layers)}
    return {**_write(cfg), "attention_bias": cfg.attention_bias, **windows}


_weights = functools.partial(transformer_weights, names=_NAMES)
FAMILY = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), read_qwen2, write_qwen2, experts.build, _weights)
#: What files might leave out.
_IMAGES = Wrapped(
    "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text",
    dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=128000, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, norm_topk_prob=True, rope_parameters=dict(rope_theta=5e5),
    ),
)  # fmt: skip
QWEN3 = Family(
    "qwen3_moe", ("Qwen3MoeForCausalLM",), read_qwen3, write_qwen3, experts.build, _weights, wrapped=(_IMAGES,)
)
