"""Llama 2 and 3.x: configuration of Hugging Face checkpoints, and the fields that its relatives share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, check_number, check_positive, flag, token_ids
from jaxspec.models.layers import Transformer
from jaxspec.models.rope_fields import read_rope, write_rope
from jaxspec.models.weight_map import transformer_weights

#: Hugging Face's names of ModelConfig.hidden_act's.
ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def common_fields(
    hf: dict[str, Any],
    *,
    bos: int | None = 1,
    eos: int | Sequence[int] | None = 2,
    max_positions: int = 2048,
    head_dim: int | None = None,
    eps: float = 1e-6,
    theta: float = 10000.0,
    tied: bool = False,
    partial: float | None = None,
    windows: bool = False,
    activation: str = "silu",
) -> dict[str, Any]:
    """The fields that Llama-shaped families share; the arguments are what transformers assumes for absent ones.

    Args:
      partial: share of the channels that positions rotate; None: the family rotates all.
      windows: the family has sliding layers, and reads them itself (`family.read_windows`).
      activation: of the family's MLP (a key of ACTIVATIONS).

    Raises:
      ValueError: a missing or impossible field, or a feature that is not implemented (quantized weights, windows that
        the family does not have, other activations or RoPE rules): nothing that changes the model's output is ignored.
    """
    _check(hf, activation)
    if not windows:
        _refuse_windows(hf)
    heads = int(hf["num_attention_heads"])
    width = int(hf.get("head_dim") or head_dim or int(hf["hidden_size"]) // heads)
    rope = read_rope(
        hf, width, int(hf.get("max_position_embeddings") or max_positions), theta=theta, partial=partial or 1.0
    )
    if partial is None and rope["partial_rotary_factor"] != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor must be 1.0, got {rope['partial_rotary_factor']!r}")
    bos_ids = token_ids(hf.get("bos_token_id", bos), "bos_token_id")
    eos = list(eos) if isinstance(eos, Sequence) else eos
    return dict(
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        intermediate_size=int(hf["intermediate_size"]),
        num_layers=int(hf["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=width,
        rms_norm_eps=float(hf.get("rms_norm_eps", eps)),
        **rope,
        hidden_act=activation,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", tied),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=token_ids(hf.get("eos_token_id", eos), "eos_token_id"),
    )


def common_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of common_fields, in the spelling that every transformers release reads."""
    eos = list(cfg.eos_token_ids)
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": ACTIVATIONS[cfg.hidden_act][0],
        "rms_norm_eps": cfg.rms_norm_eps,
        **write_rope(cfg),
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "max_position_embeddings": cfg.max_position_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
    }


def _check(hf: dict[str, Any], activation: str) -> None:
    """What no Llama-shaped model can be, or what is not implemented."""
    for name in _COUNTS:
        check_positive(hf, name, required=True)
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        check_positive(hf, name)
    check_number(hf, "rms_norm_eps")
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
    names = ACTIVATIONS[activation]
    for field in ("hidden_act", "hidden_activation"):
        if (hf.get(field) or names[0]) not in names:
            raise ValueError(f"config.json: {field} {hf[field]!r} is not supported; supported is {names[0]!r}")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "of an unknown kind")
        raise ValueError(f"config.json: quantized weights ({method}) are not supported; use the unquantized checkpoint")


def _refuse_windows(hf: dict[str, Any]) -> None:
    sliding = [t for t in hf.get("layer_types") or () if t != "full_attention"]
    if hf.get("use_sliding_window") or sliding:
        given = f"use_sliding_window={hf.get('use_sliding_window')!r}, layer_types {sorted(set(sliding))}"
        raise ValueError(f"config.json: this architecture is served with full attention only, got {given}")


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Llama config.json as ModelConfig."""
    bias = flag(hf, "attention_bias")
    return ModelConfig(
        family="llama",
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=flag(hf, "mlp_bias"),
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
