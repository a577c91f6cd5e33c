"""EXAONE 4: norms on what comes out of attention and MLP; sliding layers have positions, full ones beside them none."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models.base import ModelConfig
from jaxspec.models.family import Family, check_positive, read_windows, write_windows
from jaxspec.models.layers import Transformer
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import LayerNames, transformer_weights

_NAMES = LayerNames(
    attn_norm="", attn_out_norm="post_attention_layernorm", mlp_norm="", mlp_out_norm="post_feedforward_layernorm"
)
_WINDOW = 4096


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """An EXAONE 4 config.json as ModelConfig: without a `sliding_window` all layers are full, and have positions."""
    hf = {"sliding_window": _WINDOW, "sliding_window_pattern": 4, **hf}
    fields = common_fields(hf, bos=0, eps=1e-5, windows=True)
    window, every = hf["sliding_window"], hf["sliding_window_pattern"]
    if window is not None and hf.get("layer_types") is None:  # a pattern of letters stands beside layer_types only
        check_positive(hf, "sliding_window_pattern", required=True)
    windows = read_windows(hf, lambda i: (i + 1) % every != 0)
    full = tuple(i for i in range(fields["num_layers"]) if i not in windows["sliding_layers"])
    return ModelConfig(
        family="exaone4",
        qk_norm=True,
        pre_norms=False,
        post_norms=True,
        no_rope_layers=() if window is None else full,
        **windows,
        **fields,
    )


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    written = {"model_type": "exaone4", **common_config(cfg), **write_windows(cfg)}
    if cfg.no_rope_layers and cfg.sliding_window is None:  # no layer slides, and still none has positions
        written["sliding_window"] = _WINDOW
    return written


_weights = functools.partial(transformer_weights, names=_NAMES)
FAMILY = Family("exaone4", ("Exaone4ForCausalLM",), read_config, write_config, Transformer, _weights)
