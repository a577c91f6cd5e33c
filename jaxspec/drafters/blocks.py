"""What the kinds share whose heads draft in blocks over the target's states: reading, writing and binding."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from jax.typing import DTypeLike

from jaxspec.checkpointing.dflash import BlockFormat
from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind, Module, Overrides, Saving
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.dflash import BlockDrafter
from jaxspec.speculation.state import Geometry


class BlockKind(DrafterKind[Module]):
    """As deep as its blocks are long.

    Attributes:
      files: how its directories are read and written. drafter: how it drafts.
    """

    files: ClassVar[BlockFormat[Any]]
    drafter: ClassVar[type[BlockDrafter]]

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> Module:
        return self.files.load_head(directory, target, dtype, overrides)

    def save(self, module: Module, directory: Path, target: TargetModel, how: Saving) -> None:
        self.files.save_head(
            module, directory, target.config, tokenizer=how.tokenizer, dtype=how.dtype, layout=how.layout,
            verifier=how.verifier,
        )  # fmt: skip

    def bind(self, module: Any, geo: Geometry, speculation: SpeculationConfig) -> tuple[BlockDrafter, Any]:
        drafter = self.drafter(module, geo)
        return drafter, drafter.take_params()

    def deepest(self, module: Any) -> int:
        return module.config.drafts

    def aux_layers(self, module: Any) -> tuple[int, ...]:
        return module.config.aux_layer_ids
