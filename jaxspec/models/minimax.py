"""MiniMax-M2: experts in every layer, chosen by corrected sigmoids; norms over all heads of q and k at once."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts
from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, check_positive, refuse
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.mixtral import read_experts
from jaxspec.models.weight_map import ExpertNames, LayerNames, transformer_weights

_NAMES = LayerNames(
    experts=ExpertNames(
        module="block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias", fused=False
    )
)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A MiniMax-M2 config.json as ModelConfig; `rotary_dim` says how many channels of a head turn."""
    refuse(
        hf, attention_bias=False, scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True,
        qk_norm_type="per_layer", shared_intermediate_size=0,
    )  # fmt: skip
    if set(hf.get("attn_type_list") or ()) - {1}:
        raise ValueError(
            f"config.json: attn_type_list must be 1 (softmax attention) in every layer, got {hf['attn_type_list']!r}"
        )
    for name in ("rotary_dim", "head_dim"):
        check_positive(hf, name)
    width = hf.get("head_dim") or 128
    fields = common_fields(
        hf, bos=200034, eos=200020, max_positions=196608, head_dim=width, theta=5e6,
        partial=(hf.get("rotary_dim") or width) / width,
    )  # fmt: skip
    every = tuple(range(fields["num_layers"]))
    mixture = read_experts(
        hf, fields["intermediate_size"], every, count=256, per_token=8, scores="sigmoid", corrected=True
    )
    return ModelConfig(family="minimax_m2", qk_norm=True, qk_norm_wide=True, experts=mixture, **fields)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    assert cfg.experts is not None
    return {
        "model_type": "minimax_m2",
        **common_config(cfg),
        "partial_rotary_factor": cfg.partial_rotary_factor,
        "rotary_dim": cfg.rotary_dim,
        "num_local_experts": cfg.experts.count,
        "num_experts_per_tok": cfg.experts.per_token,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }


_weights = functools.partial(transformer_weights, names=_NAMES)
FAMILY = Family("minimax_m2", ("MiniMaxM2ForCausalLM",), read_config, write_config, experts.build, _weights)
