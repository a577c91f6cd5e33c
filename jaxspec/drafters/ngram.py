"""Prompt lookup: the smallest setting of suffix decoding, the latest of the longest matches in the text itself."""

from __future__ import annotations

from jaxspec.config import SpeculationConfig
from jaxspec.drafters.kind import DrafterKind
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.suffix import SuffixDrafter, prompt_lookup
from jaxspec.speculation.state import Geometry


class Ngram(DrafterKind[int]):
    """Matches of ngram_min to ngram_max tokens: what users of vLLM's `ngram` know."""

    name = "ngram"
    trees, looks_up = False, True

    def for_target(self, target: TargetModel) -> int:
        return target.config.vocab_size

    def bind(self, module: int, geo: Geometry, speculation: SpeculationConfig) -> tuple[SuffixDrafter, tuple[()]]:
        return prompt_lookup(module, speculation.ngram_min, speculation.ngram_max), ()


KIND = Ngram()
