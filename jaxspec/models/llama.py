"""Llama 2 and 3.x: configuration of Hugging Face checkpoints, and the fields that its relatives share."""

from __future__ import annotations

from typing import Any

from jaxspec.models.base import ModelConfig, RopeScaling
from jaxspec.models.family import Family, check_positive, token_ids
from jaxspec.models.layers import Transformer
from jaxspec.models.weight_map import transformer_weights

_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def rope_parameters(hf: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from either spelling: `rope_scaling` + `rope_theta`, or `rope_parameters`.

    Raises:
      ValueError: a scaling rule that is not implemented, or one without its factor.
    """
    new_style = hf.get("rope_parameters") or {}
    theta = float(hf.get("rope_theta") or new_style.get("rope_theta") or 10000.0)
    raw = hf.get("rope_scaling") or new_style or {}
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    if kind not in ("llama3", "linear"):
        raise ValueError(
            f"config.json: rope_type {kind!r} is not supported; supported are 'default', 'linear', 'llama3'"
        )
    factor = raw.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1:
        raise ValueError(f"config.json: rope_type {kind!r} needs a factor of at least 1, got {factor!r}")
    if kind == "linear":
        return theta, RopeScaling(rope_type=kind, factor=float(factor))
    return theta, RopeScaling(
        rope_type=kind,
        factor=float(factor),
        low_freq_factor=float(raw.get("low_freq_factor", 1.0)),
        high_freq_factor=float(raw.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(
            raw.get("original_max_position_embeddings", hf.get("max_position_embeddings", 8192))
        ),
    )


def common_fields(
    hf: dict[str, Any],
    *,
    bos: int | None = 1,
    eos: int | None = 2,
    max_positions: int = 2048,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """The fields that Llama-shaped families share; the arguments are what transformers assumes for absent ones.

    Raises:
      ValueError: a missing or impossible field, or a feature that is not implemented (quantized weights, sliding
        windows, other activations or RoPE rules): nothing that changes the model's output is ignored.
    """
    _check(hf)
    theta, scaling = rope_parameters(hf)
    heads = int(hf["num_attention_heads"])
    bos_ids = token_ids(hf.get("bos_token_id", bos))
    return dict(
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        intermediate_size=int(hf["intermediate_size"]),
        num_layers=int(hf["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=int(hf.get("head_dim") or head_dim or int(hf["hidden_size"]) // heads),
        rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        max_position_embeddings=int(hf.get("max_position_embeddings") or max_positions),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=token_ids(hf.get("eos_token_id", eos)),
    )


def common_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of common_fields, in the spelling that every transformers release reads."""
    scaling: dict[str, Any] | None = None
    if cfg.rope_scaling is not None:
        scaling = {"rope_type": cfg.rope_scaling.rope_type, "factor": cfg.rope_scaling.factor}
        if cfg.rope_scaling.rope_type == "llama3":
            names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            scaling |= {name: getattr(cfg.rope_scaling, name) for name in names}
    eos = list(cfg.eos_token_ids)
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "max_position_embeddings": cfg.max_position_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
    }


def _check(hf: dict[str, Any]) -> None:
    """What no Llama-shaped model can be, or what is not implemented."""
    for name in _COUNTS:
        check_positive(hf, name, required=True)
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        check_positive(hf, name)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if hf.get("head_dim") is None and hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = hf.get("head_dim") or hidden // heads
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act {hf['hidden_act']!r} is not supported; supported is 'silu'")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "of an unknown kind")
        raise ValueError(f"config.json: quantized weights ({method}) are not supported; use the unquantized checkpoint")
    sliding = [t for t in hf.get("layer_types") or () if t != "full_attention"]
    if hf.get("use_sliding_window") or sliding:
        given = f"use_sliding_window={hf.get('use_sliding_window')!r}, layer_types {sorted(set(sliding))}"
        raise ValueError(f"config.json: only full attention is implemented, got {given}")
    rope = hf.get("rope_parameters") or {}
    partial = hf.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor must be 1.0, got {partial!r}")


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Llama config.json as ModelConfig."""
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig(
        family="llama",
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        **common_fields(hf),
    )


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {
        "model_type": "llama",
        **common_config(cfg),
        "attention_bias": cfg.attention_bias,
        "mlp_bias": cfg.mlp_bias,
    }


FAMILY = Family("llama", ("LlamaForCausalLM",), read_config, write_config, Transformer, transformer_weights)
