"""Medusa heads as directories: config.json and medusa_lm_head.safetensors.

Owns the map between `MedusaHeads` and Medusa's names, `{h}.{block}.linear.{weight,bias}` and `{h}.{blocks}.weight`.
The same tensors in a pickle (medusa_lm_head.pt) are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing import heads, hf
from jaxspec.checkpointing.tensors import read_json, read_tensors
from jaxspec.models import weight_map
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.speculation.drafters.medusa_head import MedusaConfig, MedusaHeads

FILE = "medusa_lm_head.safetensors"
LAYOUTS = ("medusa",)
_PREFIXES = ("", "medusa_heads.", "medusa_head.")


def head_weights(module: MedusaHeads, prefix: str = "") -> Iterator[weight_map.Weight]:
    """Every parameter."""
    for h, head in enumerate(module.heads):
        for i, block in enumerate(head.blocks):
            yield from weight_map.linear_weights(block, [f"{prefix}{h}.{i}.linear"])
        yield from weight_map.linear_weights(head.lm_head, [f"{prefix}{h}.{len(head.blocks)}"])


def read_config(
    raw: dict[str, Any], target: ModelConfig, overrides: Mapping[str, Any] = MappingProxyType({})
) -> MedusaConfig:
    """A config.json, checked against its target; sizes that it does not give are the target's.

    Args:
      overrides: MedusaConfig's fields that config.json has wrong (older ones count heads that the file lacks).

    Raises:
      ValueError: no or impossible counts, or heads of another target; names the field and both values.
    """
    counts = ("medusa_num_heads", "medusa_num_layers")
    heads.check_known("Medusa heads", raw, (*counts, "base_model_name_or_path"))
    for name in counts:
        value = raw.get(name, 1 if name == "medusa_num_layers" else None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {name} must be a positive integer, got {value!r}")
    cfg = MedusaConfig(
        num_heads=raw["medusa_num_heads"],
        num_layers=raw.get("medusa_num_layers", 1),
        hidden_size=int(raw.get("hidden_size") or target.hidden_size),
        vocab_size=int(raw.get("vocab_size") or target.vocab_size),
        target_layers=target.num_layers,
    )
    cfg = heads.replaced(cfg, overrides)
    heads.check_fits("hidden_size", cfg.hidden_size, "hidden_size", target.hidden_size)
    heads.check_fits("vocab_size", cfg.vocab_size, "vocab_size", target.vocab_size)
    return cfg


def config_dict(
    cfg: MedusaConfig, target: ModelConfig, dtype: DTypeLike = jnp.bfloat16, verifier: str | None = None
) -> dict[str, Any]:
    """config.json of a set of heads; `read_config` gives `cfg` back.

    Raises:
      ValueError: an unknown dtype, or heads of another target.
    """
    config: dict[str, Any] = {
        "model_type": "medusa",
        "medusa_num_heads": cfg.num_heads,
        "medusa_num_layers": cfg.num_layers,
        "hidden_size": cfg.hidden_size,
        "vocab_size": cfg.vocab_size,
        "torch_dtype": hf.dtype_name(dtype),
    }
    if verifier is not None:
        config["base_model_name_or_path"] = verifier
    heads.check_written(cfg, read_config(config, target))
    return config


def load_heads(
    directory: str | os.PathLike[str],
    target: TargetModel,
    dtype: DTypeLike = jnp.float32,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> MedusaHeads:
    """Heads for `target`, their weights cast to `dtype`.

    Raises:
      ValueError: whatever does not fit; the message names the file or field, and both values.
    """
    directory = Path(directory)
    cfg = read_config(read_json(directory / "config.json"), target.config, overrides)
    module = nnx.eval_shape(lambda: MedusaHeads(cfg, dtype=jnp.dtype(dtype)))
    with read_tensors(directory, also=(FILE,)) as reader:
        prefix = next((p for p in _PREFIXES if f"{p}0.0.linear.weight" in reader), "")
        hf.load_weights(head_weights(module, prefix), reader)
        reader.refuse_unread(heads.IGNORED)
    return module


def save_heads(
    module: MedusaHeads,
    directory: str | os.PathLike[str],
    target: ModelConfig,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    verifier: str | None = None,
) -> None:
    """Writes config.json and medusa_lm_head.safetensors; all or nothing.

    Raises:
      ValueError: as config_dict; a path that names a file.
    """
    config = config_dict(module.config, target, dtype, verifier)
    heads.write_head(directory, config, hf.named_tensors(head_weights(module), dtype), tokenizer, FILE)
