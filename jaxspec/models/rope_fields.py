"""The rotary fields of a config.json, in either spelling: `rope_scaling` beside `rope_theta`, or `rope_parameters`.

Owns the defaults that transformers gives absent fields. Must not know families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.models.base import ModelConfig, RopeScaling
from jaxspec.models.family import check_number

#: Names of scaling rules; "su" is longrope's in Phi-3's first checkpoints.
SUPPORTED = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
_ALIASES = {None: "default", "su": "longrope"}
#: Rules that count from the context of pre-training.
_ORIGINAL = ("llama3", "longrope", "yarn")


def read_rope(
    hf: Mapping[str, Any], head_dim: int, max_positions: int, *, theta: float = 10000.0, partial: float = 1.0
) -> dict[str, Any]:
    """The rotary fields of a ModelConfig, and max_position_embeddings, which YaRN extends.

    Args:
      max_positions: of the config.json. theta, partial: the family's defaults.

    Raises:
      ValueError: a rule that is not implemented, or one whose numbers are missing or impossible.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(hf.get(name) or {}, Mapping):
            raise ValueError(f"config.json: {name} must be an object, got {hf[name]!r}")
    new = hf.get("rope_parameters") or {}
    nested = sorted(k for k, v in new.items() if isinstance(v, dict))
    if nested:
        raise ValueError(f"config.json: rope_parameters by layer type ({nested}) are not supported; expected one set")
    given = hf.get("rope_scaling") or new
    for fields in (hf, new, given):
        check_number(fields, "rope_theta")
    theta = float(hf.get("rope_theta") or new.get("rope_theta") or given.get("rope_theta") or theta)
    share = hf.get("partial_rotary_factor", given.get("partial_rotary_factor", new.get("partial_rotary_factor")))
    partial = partial if share is None else share
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise ValueError(f"config.json: partial_rotary_factor must lie in (0, 1], got {partial!r}")
    channels = int(head_dim * partial)
    if channels % 2 or channels == 0:
        raise ValueError(
            f"config.json: partial_rotary_factor {partial!r} of head_dim {head_dim} gives {channels} rotary channels; "
            f"expected an even number"
        )
    scaling = _read_scaling(given, hf, max_positions, channels)
    if scaling is not None and scaling.rope_type == "yarn":
        max_positions = max(max_positions, int(scaling.factor * scaling.original_max_position_embeddings))
    return dict(
        rope_theta=theta, rope_scaling=scaling, partial_rotary_factor=float(partial),
        max_position_embeddings=max_positions,
    )  # fmt: skip


def of_full_layers(hf: Mapping[str, Any], local_theta: float, old_name: str = "") -> tuple[dict[str, Any], float]:
    """(config.json with the rotary fields of full layers alone, base of the sliding layers) of families with two sets.

    Args:
      local_theta: where config.json names none. old_name: of the field for it beside `rope_theta`.

    Raises:
      ValueError: sliding layers whose positions are scaled.
    """
    given = hf.get("rope_parameters") or {}
    full, local = given.get("full_attention"), given.get("sliding_attention") or {}
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"config.json: rope_type of sliding layers must be 'default', got {kind!r}")
    base = float(local.get("rope_theta") or hf.get(old_name) or local_theta)
    one = {**hf, "rope_parameters": full} if full is not None or local else dict(hf)
    return one, base


def _read_scaling(
    given: Mapping[str, Any], hf: Mapping[str, Any], max_positions: int, channels: int
) -> RopeScaling | None:
    named = given.get("rope_type", given.get("type"))
    kind = _ALIASES.get(named, named)
    if kind == "default":
        return None
    if kind not in SUPPORTED:
        known = ", ".join(repr(k) for k in SUPPORTED)
        raise ValueError(f"config.json: rope_type {kind!r} is not supported; supported are {known}")
    original = max_positions
    if kind in _ORIGINAL:
        name = "original_max_position_embeddings"
        original = hf.get(name) or given.get(name) or max_positions
        if isinstance(original, bool) or not isinstance(original, int) or original < 1:
            raise ValueError(f"config.json: {name} must be a positive integer, got {original!r}")
    factor = given.get("factor")
    if factor is None and kind in ("yarn", "longrope"):
        factor = max(1.0, max_positions / original)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1:
        raise ValueError(f"config.json: rope_type {kind!r} needs a factor of at least 1, got {factor!r}")
    factor, number = float(factor), lambda name, default: float(given.get(name) or default)
    match kind:
        case "llama3":
            return RopeScaling(
                kind, factor, number("low_freq_factor", 1.0), number("high_freq_factor", 4.0), int(original)
            )
        case "yarn":
            return RopeScaling(
                kind, factor, original_max_position_embeddings=int(original),
                attention_factor=_yarn_attention(given, factor), beta_fast=number("beta_fast", 32.0),
                beta_slow=number("beta_slow", 1.0), truncate=bool(given.get("truncate", True)),
                mscale_all_dim=number("mscale_all_dim", 0.0),
            )  # fmt: skip
        case "longrope":
            default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            return RopeScaling(
                kind, factor, original_max_position_embeddings=int(original),
                attention_factor=number("attention_factor", default),
                short_factor=_factors(given, "short_factor", channels),
                long_factor=_factors(given, "long_factor", channels), extended=max_positions > original,
            )  # fmt: skip
        case _:
            return RopeScaling(kind, factor)


def _yarn_attention(given: Mapping[str, Any], factor: float) -> float:
    """What scores grow by, the root of it (Peng et al. 2023, section 3.4; DeepSeek's two weights of its logarithm)."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(factor, given["mscale"]) / grown(factor, given["mscale_all_dim"])
    return grown(factor, 1.0)


def grown(factor: float, weight: float) -> float:
    """YaRN's growth for contexts of `factor` times the original one (ibid.)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _factors(given: Mapping[str, Any], name: str, channels: int) -> tuple[float, ...]:
    found = given.get(name)
    right = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x > 0
    if not isinstance(found, list) or len(found) != channels // 2 or not all(map(right, found)):
        what = f"{len(found)} values" if isinstance(found, list) else repr(found)
        raise ValueError(
            f"config.json: rope_type 'longrope' needs {channels // 2} positive numbers as {name}, got {what}"
        )
    return tuple(float(x) for x in found)


def write_rope(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_rope, in the spelling that every transformers release reads."""
    return {"rope_theta": cfg.rope_theta, "rope_scaling": _write_scaling(cfg)}


def by_layer_type(cfg: ModelConfig) -> dict[str, Any]:
    """What `of_full_layers` reads: transformers takes the older fields for full layers only."""
    full = _write_scaling(cfg) or {"rope_type": "default"}
    local = cfg.rope_theta if cfg.local_rope_theta is None else cfg.local_rope_theta
    return {
        "rope_parameters": {
            "full_attention": {**full, "rope_theta": cfg.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


def _write_scaling(cfg: ModelConfig) -> dict[str, Any] | None:
    scaling = cfg.rope_scaling
    if scaling is None:
        return None
    written: dict[str, Any] = {"rope_type": scaling.rope_type, "factor": scaling.factor}
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
        "longrope": ("original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
    }.get(scaling.rope_type, ())
    for name in (*names, *(("mscale_all_dim",) if scaling.mscale_all_dim else ())):
        value = getattr(scaling, name)
        written[name] = list(value) if isinstance(value, tuple) else value
    return written
