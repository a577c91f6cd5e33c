"""DFlash 2 heads (Inco AI and z-lab): DFlash's, with convolutions and a candidate selector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxspec.checkpointing import dflash2, heads
from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind, Overrides, Saving
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.dflash2 import Dflash2Drafter
from jaxspec.speculation.drafters.dflash2_head import Dflash2Head
from jaxspec.speculation.state import Geometry


class Dflash2(DrafterKind[Dflash2Head]):
    """As deep as its blocks are long."""

    name = "dflash2"
    layouts = dflash2.LAYOUTS
    module_type = Dflash2Head
    trainer = "jaxspec.train.drafters.dflash2"

    def architectures(self) -> Sequence[str]:
        return dflash2.ARCHITECTURES

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        return not set(dflash2.ARCHITECTURES).isdisjoint(heads.architectures(config))

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> Dflash2Head:
        return dflash2.load_head(directory, target, dtype, overrides)

    def save(self, module: Dflash2Head, directory: Path, target: TargetModel, how: Saving) -> None:
        dflash2.save_head(
            module, directory, target.config, tokenizer=how.tokenizer, dtype=how.dtype, layout=how.layout,
            verifier=how.verifier,
        )  # fmt: skip

    def bind(self, module: Dflash2Head, geo: Geometry, speculation: SpeculationConfig) -> tuple[Dflash2Drafter, Any]:
        drafter = Dflash2Drafter(module, geo)
        return drafter, drafter.take_params()

    def deepest(self, module: Dflash2Head) -> int:
        return module.config.drafts

    def aux_layers(self, module: Dflash2Head) -> tuple[int, ...]:
        return module.config.aux_layer_ids


KIND = Dflash2()
