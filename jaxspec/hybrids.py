"""A drafter as a configuration wants it: alone, or one that shares its work with suffix matches."""

from __future__ import annotations

from typing import Any

from jaxspec.config import SpeculationConfig
from jaxspec.speculation.drafter import Drafter, Remembering
from jaxspec.speculation.drafters.hybrid import HybridDrafter
from jaxspec.speculation.drafters.suffix import SuffixDrafter, SuffixMatcher


def joined(drafter: Drafter[Any, Any], vocab_size: int, speculation: SpeculationConfig) -> Drafter[Any, Any]:
    """The drafter that runs.

    Raises:
      ValueError: a hybrid of two that look up, or room for texts in which nobody would look.
    """
    room = drafter.corpus_tokens if isinstance(drafter, Remembering) else 0
    speculation.check_lookups(isinstance(drafter, SuffixDrafter), room == speculation.suffix_corpus_tokens)
    if speculation.hybrid:
        matcher = SuffixMatcher(vocab_size, corpus_tokens=speculation.suffix_corpus_tokens)
        drafter = HybridDrafter(drafter, matcher, speculation.hybrid_depth)
    return drafter
