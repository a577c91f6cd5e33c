"""Prompt lookup, which has no parameters: the continuation of an earlier match of the text's own suffix."""

from __future__ import annotations

from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.ngram import NgramDrafter
from jaxspec.speculation.state import Geometry


class Ngram(DrafterKind[int]):
    """All that it needs is the size of the target's vocabulary."""

    name = "ngram"
    trees = False

    def for_target(self, target: TargetModel) -> int:
        return target.config.vocab_size

    def bind(self, module: int, geo: Geometry, speculation: SpeculationConfig) -> tuple[NgramDrafter, tuple[()]]:
        return NgramDrafter(module, speculation.ngram_min, speculation.ngram_max), ()


KIND = Ngram()
