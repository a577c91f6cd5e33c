"""EAGLE-1 and EAGLE-2 heads (Li et al. 2024); the two differ in the tree that is drafted, not in the head."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxspec.checkpointing import eagle1
from jaxspec.drafters.kind import HeadKind, Overrides, Saving
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.eagle1_head import Eagle1Head


class Eagle1(HeadKind[Eagle1Head]):
    """Published as language models: their tensors tell them, and that they norm no hidden states, as EAGLE-3 does."""

    name = "eagle1"
    layouts = eagle1.LAYOUTS
    module_type = Eagle1Head
    trainer = "jaxspec.train.drafters.eagle"

    def architectures(self) -> Sequence[str]:
        return eagle1.ARCHITECTURES

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        if names is None or any(name.endswith(".hidden_norm.weight") for name in names):
            return False
        return "fc.weight" in names or "model.fc.weight" in names

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> Eagle1Head:
        return eagle1.load_head(directory, target, dtype, overrides)

    def save(self, module: Eagle1Head, directory: Path, target: TargetModel, how: Saving) -> None:
        eagle1.save_head(module, directory, target.config, tokenizer=how.tokenizer, dtype=how.dtype)


KIND = Eagle1()
