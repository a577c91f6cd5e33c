"""No drafter: plain decoding."""

from __future__ import annotations

from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind
from jaxspec.models.base import TargetModel
from jaxspec.speculation.state import Geometry


class NoDrafter(DrafterKind[None]):
    name = "none"
    drafts = False
    trees = False

    def for_target(self, target: TargetModel) -> None:
        return None

    def bind(self, module: None, geo: Geometry, speculation: SpeculationConfig) -> tuple[None, tuple[()]]:
        return None, ()


KIND = NoDrafter()
