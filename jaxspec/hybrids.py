"""A drafter as a configuration wants it: alone, or one that shares its work with suffix matches."""

from __future__ import annotations

from typing import Any

from jaxspec.config import SpeculationConfig
from jaxspec.speculation.drafter import Drafter, Remembering
from jaxspec.speculation.drafters.hybrid import HybridDrafter
from jaxspec.speculation.drafters.suffix import SuffixDrafter, SuffixMatcher

#: How deep a model whose every token takes a pass drafts in a hybrid's trees, where nobody says. A tree's other nodes
#: are better spent on matches and on siblings; a chain has none, so there the model is as deep as the tier that the
#: policy chose (docs/benchmarks.md, docs/notes.md).
_IN_TREES = 3


def joined(drafter: Drafter[Any, Any], vocab_size: int, speculation: SpeculationConfig) -> Drafter[Any, Any]:
    """The drafter that runs.

    Raises:
      ValueError: a hybrid of two that look up, or room for texts in which nobody would look.
    """
    room = drafter.corpus_tokens if isinstance(drafter, Remembering) else 0
    speculation.check_lookups(isinstance(drafter, SuffixDrafter), room == speculation.suffix_corpus_tokens)
    if speculation.hybrid:
        matcher = SuffixMatcher(vocab_size, corpus_tokens=speculation.suffix_corpus_tokens)
        said = speculation.hybrid_depth
        in_trees = _IN_TREES if said is None and drafter.stepwise else said
        drafter = HybridDrafter(drafter, matcher, said, in_trees)
    return drafter


def depths(drafter: Drafter[Any, Any] | None) -> str:
    """What the name of a hybrid says of how deep its model drafts, where that is not as deep as the tier; else ""."""
    if not isinstance(drafter, HybridDrafter) or drafter.tree_depth is None:
        return ""
    return f", {drafter.tree_depth} deep" if drafter.chain_depth else f", {drafter.tree_depth} deep in trees"
