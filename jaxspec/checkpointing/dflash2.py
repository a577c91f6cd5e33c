"""DFlash 2 heads as directories.

Owns the names and fields of what DFlash 2 adds to DFlash, in both of its layouts; the rest of a directory is read and
written as DFlash's. Must not know how a head drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.checkpointing import dflash, heads
from jaxspec.checkpointing.dflash import LAYOUTS, NON_CAUSAL, OWN
from jaxspec.models import weight_map
from jaxspec.models.base import ModelConfig
from jaxspec.speculation.drafters.dflash2_head import Dflash2Config, Dflash2Head
from jaxspec.speculation.drafters.dflash_head import DflashConfig

ARCHITECTURES = ("DFlash2DraftModel",)
#: Our fields' names in both layouts.
FIELDS = {
    "conv_taps": "conv_kernel_size", "conv_group": "conv_group_size", "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
}  # fmt: skip


def head_weights(head: Dflash2Head) -> Iterator[weight_map.Weight]:
    """Every parameter but the tables."""
    yield from dflash.head_weights(head)
    width, selector = head.config.layer.hidden_size, head.selector
    for i, layer in enumerate(head.layers):
        for part in ("attn", "mlp"):
            conv, name = getattr(layer, f"{part}_conv"), f"layers.{i}.{'attention' if part == 'attn' else part}_conv"
            yield weight_map.Weight(conv.base, (f"{name}.base_kernel",), (width,))
            yield from weight_map.linear_weights(conv.own, [f"{name}.kernel_projection"])
    rank = (head.config.selector_rank,)
    yield weight_map.Weight(selector.before, ("candidate_selector.predecessor_codebook",), rank)
    yield weight_map.Weight(selector.after, ("candidate_selector.successor_codebook",), rank)
    yield from weight_map.linear_weights(selector.project, ["candidate_selector.hidden_projection"])


def read_config(
    raw: Mapping[str, Any], target: ModelConfig, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Dflash2Config:
    """A head's config.json, checked against its target.

    Args:
      overrides: Dflash2Config's fields that config.json has wrong.

    Raises:
      ValueError: see `dflash.read_config`; sizes of DFlash 2's parts that are missing or do not fit.
    """
    nested = heads.LAYER in raw
    own = dict(raw if nested else raw.get(OWN) or {})
    mine = {ours: own.pop(name) for ours, name in FIELDS.items() if own.get(name) is not None}
    missing = [name for ours, name in FIELDS.items() if ours not in mine]
    if missing and not nested:
        raise ValueError(f"config.json: {OWN} of a DFlash 2 head needs {missing}, got {sorted(own)}")
    # These heads see their whole block in sliding layers, too, where nothing else is said.
    own.setdefault(NON_CAUSAL, True)
    rest = own if nested else {**raw, OWN: own}
    fields = {f.name for f in dataclasses.fields(DflashConfig)}
    base = dflash.read_config(rest, target, {k: v for k, v in overrides.items() if k in fields})
    return heads.replaced(Dflash2Config(**{name: getattr(base, name) for name in fields}, **mine), overrides)


def config_dict(
    cfg: Dflash2Config, target: ModelConfig, dtype: DTypeLike = jnp.bfloat16, *, layout: str = LAYOUTS[0],
    verifier: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """config.json of a head; `read_config` gives `cfg` back.

    Raises:
      ValueError: an unknown dtype, a head of another target, or one that the layout cannot express.
    """
    config = dflash.config_dict(cfg.dflash, target, dtype, layout=layout, verifier=verifier)
    own = {name: getattr(cfg, ours) for ours, name in FIELDS.items()}
    config["architectures"] = [ARCHITECTURES[0]]
    if layout == "speculators":
        config |= {heads.KIND: "dflash2", **own, NON_CAUSAL: cfg.sliding_non_causal or not cfg.sliding_layers}
        config[heads.WRAPPER] = config[heads.WRAPPER] | {"algorithm": "dflash2"}
    else:
        config[OWN] = config[OWN] | own
    back = read_config(config, target)
    layer = dataclasses.replace(heads.bare(cfg.layer), family=back.layer.family)
    heads.check_written(dataclasses.replace(cfg, layer=layer), back)
    return config


FORMAT = dflash.BlockFormat(Dflash2Head, head_weights, read_config, config_dict, dflash.tables_to_write)
