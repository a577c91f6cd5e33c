"""What LLM takes as arguments, and what those of other projects stand for.

Owns which arguments there are and what is said of others. Must not know what is built of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxspec.adaptive import registry as policies
from jaxspec.config import ENGINE_ELSEWHERE, SPECULATION_ELSEWHERE, EngineConfig, SpeculationConfig
from jaxspec.drafters import registry
from jaxspec.names import Advice, refuse_unknown
from jaxspec.request import SamplingParams

#: LLM's own; the others are EngineConfig's.
_OWN = frozenset({"model", "drafter", "speculation", "progress"})
_SPECULATES = [field.name for field in dataclasses.fields(SpeculationConfig)]
_inside = "speculation={{{0!r}: ...}}".format
_DRAFTER = {"method", "model", "speculative_model", "speculative_algorithm", "speculative_draft_model_path",
            "assistant_model"}  # fmt: skip
#: What stands elsewhere, or is called otherwise here: fields of SamplingParams, those of SpeculationConfig by their own
#: names and by others', and an engine's.
_ELSEWHERE = {
    **{field.name: f"SamplingParams({field.name}=...)" for field in dataclasses.fields(SamplingParams)},
    **{name: _inside(name) for name in _SPECULATES},
    **{name: _inside(here) for name, here in SPECULATION_ELSEWHERE.items() if here in _SPECULATES},
    **ENGINE_ELSEWHERE, **dict.fromkeys(_DRAFTER, "drafter"), "model_path": "model", "model_id": "model",
}  # fmt: skip
#: A field of vLLM's speculative_config and of SpeculationConfig.
_SCHEDULE = "num_speculative_tokens_per_batch_size"


def engine_config(given: Mapping[str, Any], **named: Any) -> EngineConfig:
    """The engine's configuration.

    Args:
      given: what LLM got besides the arguments that its signature names. named: fields that it names.

    Raises:
      ValueError: an argument that nobody has, with what was probably meant; a value out of range.
    """
    known = {*_OWN, *(field.name for field in dataclasses.fields(EngineConfig))}
    elsewhere = dict(_ELSEWHERE)
    if "speculative_config" in given:
        elsewhere["speculative_config"] = Advice(f"say {instead_of(given['speculative_config'])}")
    refuse_unknown("LLM", given, known, elsewhere)
    return EngineConfig(**named, **given)


def instead_of(config: Any) -> str:
    """LLM's arguments that ask for what vLLM's `speculative_config` asks, as they are written in a call.

    Args:
      config: a mapping, or one in JSON; None does not speculate.
    """
    if isinstance(config, str):
        with contextlib.suppress(ValueError):
            config = json.loads(config)
    if config is None:
        return f"drafter={registry.NONE!r}"
    if not isinstance(config, Mapping):
        return "drafter=..., speculation={'depth': ...}"
    asked = {str(name): value for name, value in config.items() if value is not None}
    method = str(asked.pop("method", "")).lower()
    method = next((name for name in registry.names() if f"_{method}".endswith(f"_{name}")), method)  # "deepseek_mtp"
    model = str(asked.pop("model", method)).strip("[]")  # "[ngram]" was no directory
    parts = {}
    if model and (model != method or method in registry.names()):
        parts["drafter"] = model
    if "draft_tensor_parallel_size" in asked:
        parts["draft_tensor_parallel"] = asked.pop("draft_tensor_parallel_size")
    here = {SPECULATION_ELSEWHERE.get(name, name): name for name in asked}
    left = sorted(name for own, name in here.items() if own not in _SPECULATES)
    speculation = {own: asked[name] for own, name in here.items() if own in _SPECULATES}
    if _SCHEDULE in speculation:  # which says what else `depth` would
        speculation.pop("depth", None)
        speculation["policy"] = next(kind.name for kind in policies.kinds() if _SCHEDULE in kind.fields)
    if "ngram_min" in speculation:  # either alone is both
        speculation.setdefault("ngram_max", speculation["ngram_min"])
    if speculation:
        parts["speculation"] = speculation
    said = ", ".join(f"{name}={value!r}" for name, value in parts.items())
    return (said or "nothing of it, the default drafts too") + (f" (and leave out {left})" if left else "")
