"""Which families there are.

Owns the way from Hugging Face's architecture names to a family, and from a configuration to a model.
Must not know any family's fields or names.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.models import (
    deepseek,
    dots,
    ernie,
    exaone,
    gemma,
    glm,
    glm_moe,
    gpt_oss,
    granite,
    llama,
    minimax,
    mistral,
    mixtral,
    olmo,
    phi3,
    qwen2,
    qwen3,
    qwen_moe,
    seed_oss,
    smollm3,
)
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.family import Family, Wrapped
from jaxspec.models.weight_map import Weight

_ALL: tuple[Family[Any], ...] = (
    llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY, mistral.FAMILY, mistral.MINISTRAL, smollm3.FAMILY, olmo.FAMILY,
    olmo.OLMO3, granite.FAMILY, phi3.FAMILY, glm.FAMILY, glm.GLM, gemma.FAMILY, gemma.GEMMA3, gpt_oss.FAMILY,
    mixtral.FAMILY, qwen_moe.FAMILY, qwen_moe.QWEN3, deepseek.FAMILY, deepseek.V3, glm_moe.FAMILY, glm_moe.LITE,
    minimax.FAMILY, seed_oss.FAMILY, exaone.FAMILY, ernie.FAMILY, ernie.MOE, olmo.OLMOE, dots.FAMILY,
)  # fmt: skip
FAMILIES: dict[str, Family[Any]] = {family.name: family for family in _ALL}


def of(cfg: ModelConfig) -> Family[Any]:
    """A configuration's family.

    Raises:
      ValueError: an unknown one.
    """
    if cfg.family not in FAMILIES:
        raise ValueError(f"ModelConfig.family must be one of {sorted(FAMILIES)}, got {cfg.family!r}")
    return FAMILIES[cfg.family]


def read_config(hf_config: dict[str, Any]) -> ModelConfig:
    """config.json of a supported architecture as ModelConfig.

    Raises:
      ValueError: an unknown architecture, a missing or impossible field, or a feature that
        is not implemented (quantized weights, sliding windows, other activations or RoPE
        rules): nothing that changes the model's output is ignored.
    """
    names = hf_config.get("architectures")
    by_name = _by_architecture()
    known = [n for n in names if n in by_name] if isinstance(names, list) else []
    if not known:
        given = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        alike = [near for name in given for near in difflib.get_close_matches(name, by_name, 1, 0.8)]
        hint = f"; the name most like it is {alike[0]!r}" if alike else ""
        raise ValueError(f"config.json: architectures {names!r} is not supported; supported are {supported()}{hint}")
    family = by_name[known[0]]
    around = _around(family, known[0])
    fields = hf_config if around is None else around.text_fields(hf_config)
    try:
        return family.read(fields)
    except Exception as e:
        if isinstance(e, ValueError) and str(e).startswith("config.json"):  # refused in words
            raise
        names = [name for name in fields if _reads(family, fields, without=name)]
        odd = names or [name for name, value in fields.items() if isinstance(value, str | list | dict)]
        names = [name for name in odd if repr(fields[name]) in str(e)] or names
        told = " or ".join(f"{name} ({fields[name]!r})" for name in names[:3]) or "a field"
        raise ValueError(f"config.json: {told} has a type or value that {known[0]} cannot have: {e}") from e


def wraps_text(hf_config: dict[str, Any]) -> bool:
    """Whether a config.json is of an architecture that has a family's model for text beside what sees images."""
    names, by_name = hf_config.get("architectures"), _by_architecture()
    known = [n for n in names if n in by_name] if isinstance(names, list) else []
    return bool(known) and _around(by_name[known[0]], known[0]) is not None


def _around(family: Family[Any], name: str) -> Wrapped | None:
    return next((each for each in family.wrapped if each.architecture == name), None)


def _reads(family: Family[Any], fields: dict[str, Any], *, without: str) -> bool:
    """Whether a config.json is read once a field is left out."""
    try:
        family.read({name: value for name, value in fields.items() if name != without})
    except Exception:
        return False
    return True


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_config.

    Raises:
      ValueError: an unknown family, or fields that its config.json cannot express.
    """
    family = of(cfg)
    config = {"architectures": [family.architectures[0]], **family.write(cfg)}
    back = read_config(config)
    if back != cfg:
        wrong = [f.name for f in dataclasses.fields(cfg) if getattr(back, f.name) != getattr(cfg, f.name)]
        pairs = ", ".join(f"{n}={getattr(cfg, n)!r} (would read as {getattr(back, n)!r})" for n in wrong)
        raise ValueError(f"a {cfg.family} config.json cannot express {pairs}")
    return config


def build(cfg: ModelConfig, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None = None) -> TargetModel:
    """A model with random weights, or with zeros (rngs None) that a checkpoint fills.

    Raises:
      ValueError: an unknown family.
    """
    return of(cfg).build(cfg, dtype=jnp.dtype(dtype), rngs=rngs)


def weights(model: TargetModel) -> Iterator[Weight]:
    """Every parameter of a model with its names in a checkpoint."""
    return of(model.config).weights(model)


def supported() -> list[str]:
    """Hugging Face's names of the supported architectures."""
    return sorted(_by_architecture())


def _by_architecture() -> dict[str, Family[Any]]:
    names = lambda family: (*family.architectures, *(each.architecture for each in family.wrapped))
    return {name: family for family in FAMILIES.values() for name in names(family)}
