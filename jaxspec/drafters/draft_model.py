"""Draft models: small language models with the target's vocabulary (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxspec.checkpointing import heads, hf
from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind, Overrides, Saving
from jaxspec.models import registry
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import DraftModelCore
from jaxspec.speculation.state import Geometry


class DraftModel(DrafterKind[TargetModel]):
    """What is left when no head's tensors are found in a checkpoint that is named as a model."""

    name = "draft_model"
    place = "draft"
    layouts = ("huggingface",)
    module_type = TargetModel
    whole_model = True
    trainer = "jaxspec.train.drafters.draft_model"

    def architectures(self) -> Sequence[str]:
        return registry.supported()

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        return names is not None

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> TargetModel:
        if overrides:
            raise ValueError(f"overrides are for draft heads, got {sorted(overrides)} for a draft model")
        model = hf.load_model(directory, dtype)
        heads.check_fits("vocab_size", model.config.vocab_size, "vocab_size", target.config.vocab_size)
        return model

    def save(self, module: TargetModel, directory: Path, target: TargetModel, how: Saving) -> None:
        hf.save_model(module, directory, tokenizer=how.tokenizer, dtype=how.dtype)

    def bind(
        self, module: TargetModel, geo: Geometry, speculation: SpeculationConfig
    ) -> tuple[AutoregressiveDrafter, Any]:
        core = DraftModelCore(module)
        return AutoregressiveDrafter(core, geo), core.take_params()


KIND = DraftModel()
