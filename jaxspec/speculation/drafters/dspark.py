"""DSpark: blocks as DFlash's, and a walk by the Markov head."""

from __future__ import annotations

from jaxspec.speculation.drafters.dspark_head import DsparkHead
from jaxspec.speculation.drafters.walks import Steps, Sure, WalkingDrafter

#: Candidates of a place; top 16 were as good as all in sfllm#42.
SHORTLIST = 16


class DsparkDrafter(WalkingDrafter):
    """Chains and trees from a DSpark head."""

    @property
    def listed(self) -> int:
        return SHORTLIST

    def walks(self, net: DsparkHead) -> tuple[Steps, Sure | None]:
        return net.markov, None if net.confidence is None else net.sure
