"""EAGLE-1 and EAGLE-2 heads as directories, in SafeAILab's layout.

Owns the map between `Eagle1Head` and the published names: `fc`, `layers.{i}.*` (the first layer usually without
`input_layernorm`) and, where the head brings its own, `embed_tokens` and `lm_head`. Names that start with `model.`
(vLLM's converted heads) are read as well.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing import heads, hf
from jaxspec.checkpointing.tensors import read_json, read_tensors
from jaxspec.models import llama, weight_map
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head

ARCHITECTURES = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
LAYOUTS = ("safeailab",)


def head_weights(head: Eagle1Head, prefix: str = "") -> Iterator[weight_map.Weight]:
    """Every parameter but the tables; the layers' names start with `prefix`."""
    yield from weight_map.linear_weights(head.fc, ["fc"])
    for i, layer in enumerate(head.layers):
        yield from weight_map.layer_weights(layer, f"{prefix}layers.{i}")


def read_config(
    raw: dict[str, Any],
    target: ModelConfig,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    *,
    first_norm: bool = False,
) -> Eagle1Config:
    """A head's config.json, checked against its target.

    Args:
      overrides: Eagle1Config's fields that config.json has wrong, for example {"bias": False}.
      first_norm: whether the tensors hold a norm before the first layer, of which config.json says nothing.

    Raises:
      ValueError: a feature that is not implemented, or a head of another target; names the field and both values.
    """
    heads.check_known("an EAGLE-1 head", raw, ("bias", "qkv_bias"))
    layer = heads.read_layer(raw, "qwen3" if raw.get("model_type") == "qwen3" else "llama")
    if "qkv_bias" in raw:
        layer = dataclasses.replace(layer, attention_bias=bool(raw["qkv_bias"]))
    layer = dataclasses.replace(layer, family="eagle1")
    cfg = Eagle1Config(layer, target.num_layers, bias=bool(raw.get("bias", True)), first_norm=first_norm)
    cfg = heads.replaced(cfg, overrides)
    heads.check_fits("vocab_size", cfg.vocab_size, "vocab_size", target.vocab_size)
    heads.check_fits("hidden_size", cfg.layer.hidden_size, "hidden_size", target.hidden_size)
    return cfg


def config_dict(cfg: Eagle1Config, target: ModelConfig, dtype: DTypeLike = jnp.bfloat16) -> dict[str, Any]:
    """config.json of a head; `read_config` gives `cfg` back.

    Raises:
      ValueError: an unknown dtype, a head of another target, or one that no configuration can express.
    """
    layer = heads.bare(cfg.layer)
    config = {
        **llama.common_config(layer),
        "architectures": [ARCHITECTURES[0]],
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "attention_bias": layer.output_bias,
        "mlp_bias": layer.mlp_bias,
        "bias": cfg.bias,
        "qkv_bias": layer.attention_bias,
        "torch_dtype": hf.dtype_name(dtype),
    }
    back = read_config(config, target, first_norm=cfg.first_norm)
    heads.check_written(dataclasses.replace(layer, family="eagle1"), back.layer)
    heads.check_fits("target_layers", cfg.target_layers, "num_layers", target.num_layers)
    return config


def load_head(
    directory: str | os.PathLike[str],
    target: TargetModel,
    dtype: DTypeLike = jnp.float32,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Eagle1Head:
    """A head for `target`, its weights cast to `dtype`. Tables that equal the target's, or are absent, are `Shared`.

    Raises:
      ValueError: whatever does not fit; the message names the file or field, and both values.
    """
    directory = Path(directory)
    raw = read_json(directory / "config.json")
    with read_tensors(directory) as reader:
        prefix = "model." if reader.first("model.layers.0.self_attn.q_proj.weight") else ""
        cfg = read_config(
            raw, target.config, overrides, first_norm=f"{prefix}layers.0.input_layernorm.weight" in reader
        )
        shape = (cfg.vocab_size, cfg.layer.hidden_size)
        tables = heads.lend_tables(
            target,
            dtype,
            heads.stored_table(reader, shape, "embed_tokens", "model.embed_tokens"),
            heads.stored_table(reader, shape, "lm_head"),
        )
        new = functools.partial(Eagle1Head, cfg, dtype=jnp.dtype(dtype))
        return heads.read_head(new, lambda head: head_weights(head, prefix), tables, reader, dtype)


def save_head(
    head: Eagle1Head,
    directory: str | os.PathLike[str],
    target: ModelConfig,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> None:
    """Writes config.json and model.safetensors, with the tables that are the head's own; all or nothing.

    Raises:
      ValueError: as config_dict; a path that names a file.
    """
    config = config_dict(head.config, target, dtype)
    tables = heads.own_tables(head.embedding, head.lm_head, "embed_tokens", "lm_head")
    heads.write_head(directory, config, hf.named_tensors([*tables, *head_weights(head)], dtype), tokenizer)
