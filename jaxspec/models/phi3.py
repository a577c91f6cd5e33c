"""Phi-3, 3.5 and 4: Llama's layers with fused projections, a share of rotated channels, longrope and a window."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, read_windows
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import LayerNames, transformer_weights

_NAMES = LayerNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
_ORIGINAL = "original_max_position_embeddings"


def _renamed(hf: dict[str, Any]) -> dict[str, Any]:
    """With today's name of longrope, which the first Phi-3 checkpoints called "su" and "yarn", and its context."""
    out = {**hf, _ORIGINAL: hf.get(_ORIGINAL) or 4096}
    for field in ("rope_scaling", "rope_parameters"):
        given = hf.get(field)
        if given and given.get("rope_type", given.get("type")) in ("su", "yarn"):
            out[field] = {**given, "rope_type": "longrope"}
    return out


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Phi-3 config.json as ModelConfig."""
    fields = common_fields(_renamed(hf), eos=32000, max_positions=4096, eps=1e-5, partial=1.0, windows=True)
    return ModelConfig(family="phi3", **read_windows(hf, lambda _: True), **fields)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    original = 4096 if cfg.rope_scaling is None else cfg.rope_scaling.original_max_position_embeddings
    return {
        "model_type": "phi3",
        **common_config(cfg),
        "partial_rotary_factor": cfg.partial_rotary_factor,
        _ORIGINAL: original,
        "sliding_window": cfg.sliding_window,
    }


_weights = functools.partial(transformer_weights, names=_NAMES)
FAMILY = Family("phi3", ("Phi3ForCausalLM",), read_config, write_config, Transformer, _weights)
