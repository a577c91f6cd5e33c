"""SmolLM3: Llama's layers, of which every fourth gives no positions to its attention (NoPE)."""

from __future__ import annotations

from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, flag, read_windows, write_windows
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import transformer_weights


def _no_rope(hf: dict[str, Any]) -> tuple[int, ...]:
    """Layers without positions, from a list of a 1 for each layer that has them, or from how often one has none."""
    count, given = int(hf["num_hidden_layers"]), hf.get("no_rope_layers")
    if given is None:
        every = hf.get("no_rope_layer_interval") or 4
        given = [int((i + 1) % every != 0) for i in range(count)]
    if not isinstance(given, list) or len(given) != count or not set(given) <= {0, 1}:
        raise ValueError(f"config.json: no_rope_layers must be 0 or 1 for each of {count} layers, got {given!r}")
    return tuple(i for i, has in enumerate(given) if not has)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A SmolLM3 config.json as ModelConfig."""
    fields = common_fields(hf, bos=128000, eos=128001, max_positions=32768, theta=2000000.0, tied=True, windows=True)
    bias, no_rope = flag(hf, "attention_bias"), _no_rope(hf)
    return ModelConfig(
        family="smollm3",
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=flag(hf, "mlp_bias"),
        no_rope_layers=no_rope,
        **read_windows(hf, lambda i: i in no_rope, switched=True),
        **fields,
    )


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    return {
        "model_type": "smollm3",
        **common_config(cfg),
        **write_windows(cfg, switched=True),
        "attention_bias": cfg.attention_bias,
        "mlp_bias": cfg.mlp_bias,
        "no_rope_layers": [int(i not in cfg.no_rope_layers) for i in range(cfg.num_layers)],
    }


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), read_config, write_config, Transformer, transformer_weights)
