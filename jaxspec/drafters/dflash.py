"""DFlash heads (arXiv 2602.06036): a block of tokens from one pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxspec.checkpointing import dflash, heads
from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind, Overrides, Saving
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.dflash import BlockDrafter
from jaxspec.speculation.drafters.dflash_head import DflashHead
from jaxspec.speculation.state import Geometry


class Dflash(DrafterKind[DflashHead]):
    """As deep as its blocks are long."""

    name = "dflash"
    layouts = dflash.LAYOUTS
    module_type = DflashHead
    trainer = "jaxspec.train.drafters.dflash"

    def architectures(self) -> Sequence[str]:
        return dflash.ARCHITECTURES

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        return not set(dflash.ARCHITECTURES).isdisjoint(heads.architectures(config)) or dflash.OWN in config

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> DflashHead:
        return dflash.load_head(directory, target, dtype, overrides)

    def save(self, module: DflashHead, directory: Path, target: TargetModel, how: Saving) -> None:
        dflash.save_head(
            module, directory, target.config, tokenizer=how.tokenizer, dtype=how.dtype, layout=how.layout,
            verifier=how.verifier,
        )  # fmt: skip

    def bind(self, module: DflashHead, geo: Geometry, speculation: SpeculationConfig) -> tuple[BlockDrafter, Any]:
        drafter = BlockDrafter(module, geo)
        return drafter, drafter.take_params()

    def deepest(self, module: DflashHead) -> int:
        return module.config.drafts

    def aux_layers(self, module: DflashHead) -> tuple[int, ...]:
        return module.config.aux_layer_ids


KIND = Dflash()
