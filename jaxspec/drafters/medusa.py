"""Medusa heads (Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxspec.checkpointing import medusa
from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind, Overrides, Saving
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.medusa import MedusaDrafter
from jaxspec.speculation.drafters.medusa_head import MedusaHeads
from jaxspec.speculation.state import Geometry


class Medusa(DrafterKind[MedusaHeads]):
    """As deep as it has heads."""

    name = "medusa"
    layouts = medusa.LAYOUTS
    module_type = MedusaHeads
    told_by = "a Medusa configuration (medusa_num_heads)"
    trainer = "jaxspec.train.drafters.medusa"

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        return "medusa_num_heads" in config

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> MedusaHeads:
        return medusa.load_heads(directory, target, dtype, overrides)

    def save(self, module: MedusaHeads, directory: Path, target: TargetModel, how: Saving) -> None:
        medusa.save_heads(
            module, directory, target.config, tokenizer=how.tokenizer, dtype=how.dtype, verifier=how.verifier
        )

    def bind(self, module: MedusaHeads, geo: Geometry, speculation: SpeculationConfig) -> tuple[MedusaDrafter, Any]:
        drafter = MedusaDrafter(module, geo)
        return drafter, drafter.take_params()

    def deepest(self, module: MedusaHeads) -> int:
        return module.config.num_heads

    def aux_layers(self, module: MedusaHeads) -> tuple[int, ...]:
        return module.config.aux_layer_ids


KIND = Medusa()
