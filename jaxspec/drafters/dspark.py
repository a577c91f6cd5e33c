"""DSpark heads (arXiv 2607.05147): DFlash's, whose drafts know the token before and how sure they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxspec.checkpointing import dspark, heads
from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind, Overrides, Saving
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.dspark import DsparkDrafter
from jaxspec.speculation.drafters.dspark_head import DsparkHead
from jaxspec.speculation.state import Geometry


class Dspark(DrafterKind[DsparkHead]):
    """As deep as its blocks are long."""

    name = "dspark"
    layouts = dspark.LAYOUTS
    module_type = DsparkHead
    trainer = "jaxspec.train.drafters.dspark"

    def architectures(self) -> Sequence[str]:
        return dspark.ARCHITECTURES

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        key, value = dspark.PROJECTOR
        own = config.get(dspark.OWN) or {}
        return not set(dspark.ARCHITECTURES).isdisjoint(heads.architectures(config)) or own.get(key) == value

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> DsparkHead:
        return dspark.load_head(directory, target, dtype, overrides)

    def save(self, module: DsparkHead, directory: Path, target: TargetModel, how: Saving) -> None:
        dspark.save_head(
            module, directory, target.config, tokenizer=how.tokenizer, dtype=how.dtype, layout=how.layout,
            verifier=how.verifier,
        )  # fmt: skip

    def bind(self, module: DsparkHead, geo: Geometry, speculation: SpeculationConfig) -> tuple[DsparkDrafter, Any]:
        drafter = DsparkDrafter(module, geo)
        return drafter, drafter.take_params()

    def deepest(self, module: DsparkHead) -> int:
        return module.config.drafts

    def aux_layers(self, module: DsparkHead) -> tuple[int, ...]:
        return module.config.aux_layer_ids


KIND = Dspark()
