"""DFlash heads (arXiv 2602.06036): a block of tokens from one pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxspec.checkpointing import dflash, heads
from jaxspec.drafters.blocks import BlockKind
from jaxspec.speculation.drafters.dflash import BlockDrafter
from jaxspec.speculation.drafters.dflash_head import DflashHead


class Dflash(BlockKind[DflashHead]):
    name = "dflash"
    layouts = dflash.LAYOUTS
    module_type = DflashHead
    trainer = "jaxspec.train.drafters.dflash"
    files = dflash.FORMAT
    drafter = BlockDrafter

    def architectures(self) -> Sequence[str]:
        return dflash.ARCHITECTURES

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        return not set(dflash.ARCHITECTURES).isdisjoint(heads.architectures(config)) or dflash.OWN in config


KIND = Dflash()
