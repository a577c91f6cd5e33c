"""Suffix decoding, which has no parameters: what followed earlier places that end as the text does now."""

from __future__ import annotations

from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.suffix import SuffixDrafter, SuffixMatcher
from jaxspec.speculation.state import Geometry


class Suffix(DrafterKind[int]):
    """All that it needs is the size of the target's vocabulary."""

    name = "suffix"
    trees, looks_up, remembers = False, True, True

    def for_target(self, target: TargetModel) -> int:
        return target.config.vocab_size

    def bind(self, module: int, geo: Geometry, speculation: SpeculationConfig) -> tuple[SuffixDrafter, tuple[()]]:
        return SuffixDrafter(SuffixMatcher(module, corpus_tokens=speculation.suffix_corpus_tokens)), ()


KIND = Suffix()
