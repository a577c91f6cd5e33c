"""DFlash 2: blocks as DFlash's, and a walk by the candidate selector."""

from __future__ import annotations

from jaxspec.speculation.drafters.dflash2_head import Dflash2Config, Dflash2Head
from jaxspec.speculation.drafters.walks import Steps, Sure, WalkingDrafter


class Dflash2Drafter(WalkingDrafter):
    """Chains and trees from a DFlash 2 head."""

    config: Dflash2Config

    @property
    def listed(self) -> int:
        return self.config.selector_top_k

    def walks(self, net: Dflash2Head) -> tuple[Steps, Sure | None]:
        return net.selector, None
