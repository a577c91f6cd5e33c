"""P-EAGLE: EAGLE-3 heads with placeholders, which draft in one pass."""

from __future__ import annotations

from typing import Any

from jaxspec.config import SpeculationConfig
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head
from jaxspec.speculation.drafters.parallel import ParallelDrafter
from jaxspec.speculation.state import Geometry


class Peagle(Eagle3):
    name = "peagle"
    trainer = "jaxspec.train.drafters.peagle"
    placeholders = True

    def bind(self, module: Eagle3Head, geo: Geometry, speculation: SpeculationConfig) -> tuple[ParallelDrafter, Any]:
        core = HeadCore(module)
        return ParallelDrafter(core, geo), core.take_params()


KIND = Peagle()
