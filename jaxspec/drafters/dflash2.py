"""DFlash 2 heads (Inco AI and z-lab): DFlash's, with convolutions and a candidate selector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxspec.checkpointing import dflash2, heads
from jaxspec.drafters.blocks import BlockKind
from jaxspec.speculation.drafters.dflash2_head import Dflash2Head
from jaxspec.speculation.drafters.walks import WalkingDrafter


class Dflash2(BlockKind[Dflash2Head]):
    name = "dflash2"
    layouts = dflash2.LAYOUTS
    module_type = Dflash2Head
    trainer = "jaxspec.train.drafters.dflash2"
    files = dflash2.FORMAT
    drafter = WalkingDrafter

    def architectures(self) -> Sequence[str]:
        return dflash2.ARCHITECTURES

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        return not set(dflash2.ARCHITECTURES).isdisjoint(heads.architectures(config))


KIND = Dflash2()
