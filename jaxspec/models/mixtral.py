"""Mixtral: Mistral's layers with experts in place of every MLP."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.models import experts
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.family import Family, check_positive, read_windows
from jaxspec.models.llama import common_config, common_fields
from jaxspec.models.weight_map import ExpertNames, LayerNames, transformer_weights

_NAMES = LayerNames(experts=ExpertNames(module="block_sparse_moe", gate="w1", up="w3", down="w2", fused=False))


def read_experts(hf: dict[str, Any], inner: int, layers: tuple[int, ...], **fields: Any) -> Experts:
    """The experts of a config.json.

    Args:
      inner: width of each. fields: what the family knows besides; `count` and `per_token` for absent ones.

    Raises:
      ValueError: numbers that cannot be; names them.
    """
    for name in ("num_local_experts", "num_experts", "num_experts_per_tok"):
        check_positive(hf, name)
    count = int(hf.get("num_local_experts") or hf.get("num_experts") or fields.pop("count"))
    chosen = int(hf.get("num_experts_per_tok") or fields.pop("per_token"))
    if chosen > count:
        raise ValueError(f"config.json: num_experts_per_tok must be at most the {count} experts, got {chosen}")
    return Experts(**{**fields, "count": count, "per_token": chosen}, inner=inner, layers=layers)


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A Mixtral config.json as ModelConfig."""
    fields = common_fields(hf, max_positions=131072, eps=1e-5, theta=1e6, windows=True)
    every = tuple(range(fields["num_layers"]))
    mixture = read_experts(hf, fields["intermediate_size"], every, count=8, per_token=2)
    return ModelConfig(family="mixtral", experts=mixture, **read_windows(hf, lambda _: True), **fields)


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config, without `architectures`."""
    assert cfg.experts is not None
    own = {"num_local_experts": cfg.experts.count, "num_experts_per_tok": cfg.experts.per_token}
    return {"model_type": "mixtral", **common_config(cfg), "sliding_window": cfg.sliding_window, **own}


_weights = functools.partial(transformer_weights, names=_NAMES)
FAMILY = Family("mixtral", ("MixtralForCausalLM",), read_config, write_config, experts.build, _weights)
