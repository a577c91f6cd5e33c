"""DSpark heads as directories.

Owns the names and fields of what DSpark adds to DFlash; the rest of a directory is read and written as DFlash's. Must
not know how a head drafts. Layouts, whose tensors have the same names:

- "speculators": a nested configuration (PyPI speculators 0.9.0).
- "deepspec": Qwen3's fields and the head's own beside them, with copies of the target's tables (DeepSpec afdfa7c, which
  made DeepSeek's published heads).
- "specforge": Qwen3's fields, with a `dflash_config`; no tables (SpecForge a6b6b02).

In the flat ones the anchor's place always predicts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.checkpointing import dflash, heads
from jaxspec.checkpointing.dflash import OWN
from jaxspec.models import weight_map
from jaxspec.models.base import ModelConfig
from jaxspec.speculation.drafters.dflash_head import DflashConfig
from jaxspec.speculation.drafters.dspark_head import DsparkConfig, DsparkHead

LAYOUTS = ("speculators", "deepspec", "specforge")
#: Of speculators and SpecForge, and of DeepSpec.
ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")
#: What SpecForge's dflash_config calls this kind, under this name.
PROJECTOR = ("projector_type", "dspark")
#: Our fields' names in all layouts.
_FIELDS = {
    "markov_rank": "markov_rank", "markov_type": "markov_head_type", "confidence": "enable_confidence_head",
    "confidence_reads_token": "confidence_head_with_markov",
}  # fmt: skip
#: What DeepSpec has at the top and DFlash's flat layout in `dflash_config`.
_MOVED = ("mask_token_id", "target_layer_ids")
#: Fields of training, and one that repeats the numbers of heads.
_NO_MATTER = ("num_anchors", "confidence_head_alpha", "attention_mode")


def head_weights(head: DsparkHead) -> Iterator[weight_map.Weight]:
    """Every parameter but the tables."""
    yield from dflash.head_weights(head)
    markov, rank = head.markov, (head.config.markov_rank,)
    yield weight_map.Weight(markov.before, ("markov_head.markov_w1.weight",), rank)
    yield weight_map.Weight(markov.after, ("markov_head.markov_w2.weight",), rank)
    if markov.mix is not None:
        name = "gate_proj" if markov.kind == "gated" else "joint_proj"
        yield from weight_map.linear_weights(markov.mix, [f"markov_head.{name}"])
    if head.confidence is not None:
        yield from weight_map.linear_weights(head.confidence, ["confidence_head.proj"])


def read_config(
    raw: Mapping[str, Any], target: ModelConfig, overrides: Mapping[str, Any] = MappingProxyType({})
) -> DsparkConfig:
    """A head's config.json, checked against its target.

    Args:
      overrides: DsparkConfig's fields that config.json has wrong.

    Raises:
      ValueError: see `dflash.read_config`; a Markov head that is not known.
    """
    nested = heads.LAYER in raw
    rest = {k: v for k, v in raw.items() if k not in (*_NO_MATTER, *_FIELDS.values())}
    own: Mapping[str, Any] = raw
    if not nested:
        if OWN in raw:
            own = {**raw, **(raw[OWN] or {})}
            key, value = PROJECTOR
            if own.get(key) not in (None, value):
                raise ValueError(f"config.json: {OWN}.{key} must be {value!r}, got {own[key]!r}")
            left = (*_NO_MATTER, *_FIELDS.values(), key)
            rest[OWN] = {k: v for k, v in (raw[OWN] or {}).items() if k not in left}
        else:
            rest[OWN] = {name: rest.pop(name) for name in _MOVED if name in rest}
    # What is left out has speculators' defaults there; DeepSpec and SpecForge's heads without a field lack the part.
    missing = dict(confidence=True, confidence_reads_token=True) if nested else dict(confidence=False)
    mine = {ours: own[name] for ours, name in _FIELDS.items() if own.get(name) is not None}
    if not nested:
        missing["confidence_reads_token"] = False
    fields = {f.name for f in dataclasses.fields(DflashConfig)}
    base = dflash.read_config(rest, target, {k: v for k, v in overrides.items() if k in fields})
    shared = {name: getattr(base, name) for name in fields}
    shared["sample_from_anchor"] = not nested or bool(raw.get("sample_from_anchor", True))
    return heads.replaced(DsparkConfig(**{**shared, **missing, **mine}), overrides)


def config_dict(
    cfg: DsparkConfig, target: ModelConfig, dtype: DTypeLike = jnp.bfloat16, *, layout: str = LAYOUTS[0],
    verifier: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """config.json of a head; `read_config` gives `cfg` back.

    Raises:
      ValueError: an unknown dtype, a head of another target, or one that the layout cannot express.
    """
    own = {name: getattr(cfg, ours) for ours, name in _FIELDS.items()}
    if layout == "speculators":
        config = dflash.config_dict(cfg.dflash, target, dtype, verifier=verifier)
        config |= {"architectures": [ARCHITECTURES[0]], heads.KIND: "dspark", **own}
        config[heads.WRAPPER] = config[heads.WRAPPER] | {"algorithm": "dspark"}
    else:
        flat = dataclasses.replace(cfg.dflash, sample_from_anchor=False)
        config = dflash.config_dict(flat, target, dtype, layout="zlab")
        config["architectures"] = [ARCHITECTURES[layout == "deepspec"]]
        if layout == "specforge":
            config[OWN] = config[OWN] | own | dict([PROJECTOR])
        else:
            config |= config.pop(OWN) | own
    back = read_config(config, target)
    layer = dataclasses.replace(heads.bare(cfg.layer), family=back.layer.family)
    heads.check_written(dataclasses.replace(cfg, layer=layer), back)
    return config


def tables_to_write(head: DsparkHead, layout: str) -> list[weight_map.Weight]:
    """As DFlash's; "deepspec" has the tables even where they are shared.

    Raises:
      ValueError: tables of the head's own in a layout that has none.
    """
    if layout != "deepspec":
        return dflash.tables_to_write(head, layout)
    embedding = nnx.Param(head.embedding.get_value())
    out = nnx.Param(embedding.get_value() if head.lm_head is None else head.lm_head.kernel.get_value().T)
    named = {"embed_tokens.weight": embedding, "lm_head.weight": out}
    return [weight_map.Weight(table, (name,), (table.shape[1],)) for name, table in named.items()]


FORMAT = dflash.BlockFormat(DsparkHead, head_weights, read_config, config_dict, tables_to_write)
