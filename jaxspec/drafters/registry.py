"""Which kinds of drafters there are. A kind's module is imported when it is asked for, so names cost no JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.drafters.kind import DrafterKind

#: The kind of plain decoding.
NONE = "none"
#: The module of each kind, which holds it as KIND. A new kind is such a module and a line here.
MODULES: dict[str, str] = {
    NONE: "jaxspec.drafters.none",
    "eagle3": "jaxspec.drafters.eagle3",
    "eagle1": "jaxspec.drafters.eagle1",
    "peagle": "jaxspec.drafters.peagle",
    # Before DFlash, which knows their fields too.
    "dspark": "jaxspec.drafters.dspark",
    "dflash2": "jaxspec.drafters.dflash2",
    "dflash": "jaxspec.drafters.dflash",
    "medusa": "jaxspec.drafters.medusa",
    "mtp": "jaxspec.drafters.mtp",
    "suffix": "jaxspec.drafters.suffix",
    "ngram": "jaxspec.drafters.ngram",
    "draft_model": "jaxspec.drafters.draft_model",
}
#: Where a user names no drafter: the first of these that is at hand.
UNASKED = ("eagle3", "ngram")


def names() -> tuple[str, ...]:
    """What users can name, "none" included."""
    return tuple(MODULES)


def find(name: str) -> DrafterKind[Any]:
    """The kind of a name.

    Raises:
      KeyError: no kind has it.
    """
    kind = importlib.import_module(MODULES[name]).KIND
    assert kind.name == name, (kind.name, name)
    return kind


def kinds() -> list[DrafterKind[Any]]:
    """Every kind. The first that recognises a checkpoint has it."""
    return [find(name) for name in MODULES]
