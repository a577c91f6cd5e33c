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
    if speculation.hybrid:
        if isinstance(drafter, SuffixDrafter):
            raise ValueError("hybrid joins suffix matches with a drafter of another kind; this one looks up by itself")
        drafter = HybridDrafter(drafter, SuffixMatcher(vocab_size, corpus_tokens=speculation.suffix_corpus_tokens))
    room = drafter.corpus_tokens if isinstance(drafter, Remembering) else 0
    if room != speculation.suffix_corpus_tokens:
        raise ValueError(
            f"suffix_corpus_tokens is for the drafter that looks up whole suffixes and for hybrids, of which this "
            f"engine has none; got {speculation.suffix_corpus_tokens}"
        )
    return drafter
