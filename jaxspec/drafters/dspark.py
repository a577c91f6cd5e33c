"""DSpark heads (arXiv 2607.05147): DFlash's, whose drafts know the token before and how sure they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxspec.checkpointing import dspark, heads
from jaxspec.drafters.blocks import BlockKind
from jaxspec.speculation.drafters.dspark_head import DsparkHead
from jaxspec.speculation.drafters.walks import WalkingDrafter


class Dspark(BlockKind[DsparkHead]):
    name = "dspark"
    layouts = dspark.LAYOUTS
    module_type = DsparkHead
    trainer = "jaxspec.train.drafters.dspark"
    files = dspark.FORMAT
    drafter = WalkingDrafter

    def architectures(self) -> Sequence[str]:
        return dspark.ARCHITECTURES

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        key, value = dspark.PROJECTOR
        own = config.get(dspark.OWN) or {}
        return not set(dspark.ARCHITECTURES).isdisjoint(heads.architectures(config)) or own.get(key) == value


KIND = Dspark()
