"""Gemma 2 and 3 (text): windows between full layers, norms around everything with gains of 1 + w, scaled embeddings.

Gemma 2 caps scores and logits; Gemma 3 norms queries and keys instead, and its sliding layers have rotary positions of
their own.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, Wrapped, flag, read_windows, refuse, write_windows
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.rope_fields import of_full_layers
from jaxspec.models.weight_map import LayerNames, transformer_weights

_NAMES = LayerNames(
    attn_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_LOCAL = "rope_local_base_freq"


def _cap(hf: dict[str, Any], name: str, usual: float | None) -> float | None:
    value = hf.get(name, usual)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ValueError(f"config.json: {name} must be null or a positive number, got {value!r}")
    return None if value is None else float(value)


def _read(family: str, hf: dict[str, Any], max_positions: int, *, theta: float, **own: Any) -> ModelConfig:
    refuse(hf, use_bidirectional_attention=False)
    hf = {**hf, "head_dim": hf.get("head_dim") or 256}
    fields = common_fields(
        hf, bos=2, eos=1, max_positions=max_positions, theta=theta, tied=True, windows=True, activation="gelu_tanh"
    )
    bias, scalar = flag(hf, "attention_bias"), hf.get("query_pre_attn_scalar", 256)
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or not scalar > 0:
        raise ValueError(f"config.json: query_pre_attn_scalar must be a positive number, got {scalar!r}")
    return ModelConfig(
        family=family,
        attention_bias=bias,
        output_bias=bias,
        attention_scale=float(scalar) ** -0.5,
        post_norms=True,
        norm_gain="one_plus",
        embedding_scale=math.sqrt(fields["hidden_size"]),
        **own,
        **fields,
    )


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Gemma 2 config.json as ModelConfig."""
    return _read(
        "gemma2", hf, 8192, theta=10000.0,
        attention_soft_cap=_cap(hf, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_cap(hf, "final_logit_softcapping", 30.0),
        **read_windows(hf, lambda i: i % 2 == 0, 4096),
    )  # fmt: skip


def read_gemma3(hf: dict[str, Any]) -> ModelConfig:
    """A Gemma 3 text config.json as ModelConfig."""
    refuse(hf, attn_logit_softcapping=None)
    one, local = of_full_layers(hf, 10000.0, _LOCAL)
    every = hf.get("sliding_window_pattern") or 6
    return _read(
        "gemma3", one, 131072, theta=1000000.0, qk_norm=True, local_rope_theta=local,
        logit_soft_cap=_cap(hf, "final_logit_softcapping", None),
        **read_windows(hf, lambda i: (i + 1) % every != 0, 4096),
    )  # fmt: skip


def _write(cfg: ModelConfig) -> dict[str, Any]:
    common = common_config(cfg)
    scale = cfg.attention_scale or cfg.head_dim**-0.5
    return {
        **common,
        "hidden_activation": common["hidden_act"],
        **write_windows(cfg),
        "attention_bias": cfg.attention_bias,
        "query_pre_attn_scalar": round(scale**-2),
        "final_logit_softcapping": cfg.logit_soft_cap,
    }


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {"model_type": "gemma2", **_write(cfg), "attn_logit_softcapping": cfg.attention_soft_cap}


def write_gemma3(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_gemma3, without `architectures`."""
    return {"model_type": "gemma3_text", **_write(cfg), _LOCAL: cfg.local_rope_theta}


_weights = functools.partial(transformer_weights, names=_NAMES)
FAMILY = Family("gemma2", ("Gemma2ForCausalLM",), read_config, write_config, Transformer, _weights)
#: Files leave out what Gemma3TextConfig has.
_IMAGES = Wrapped(
    "Gemma3ForConditionalGeneration", "gemma3_text",
    dict(
        vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4,
    ),
)  # fmt: skip
GEMMA3 = Family("gemma3", ("Gemma3ForCausalLM",), read_gemma3, write_gemma3, Transformer, _weights, wrapped=(_IMAGES,))
