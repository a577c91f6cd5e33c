"""Which kinds of policies there are. A kind's module is imported when it is asked for."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from jaxspec.names import nearest

if TYPE_CHECKING:
    from jaxspec.adaptive.kind import PolicyKind

#: What is taken where a user names no policy; the same where a depth is given; and the policy that never drafts.
DEFAULT, FIXED, OFF = "adaptive", "static", "off"
#: Where each kind that has a name is: module and object. A new kind is such an object and a line here.
KINDS: dict[str, tuple[str, str]] = {
    DEFAULT: ("jaxspec.adaptive.adaptive", "KIND"),
    FIXED: ("jaxspec.adaptive.static", "KIND"),
    OFF: ("jaxspec.adaptive.static", "OFF"),
    "heuristic": ("jaxspec.adaptive.heuristic", "KIND"),
    "schedule": ("jaxspec.adaptive.schedule", "KIND"),
    "threshold": ("jaxspec.adaptive.threshold", "KIND"),
    "specinfer": ("jaxspec.adaptive.specinfer", "KIND"),
    "survival": ("jaxspec.adaptive.survival", "KIND"),
    "adaspec": ("jaxspec.adaptive.adaspec", "KIND"),
    "adaspec-drafter": ("jaxspec.adaptive.adaspec", "DRAFTER"),
    "adaspec-verifier": ("jaxspec.adaptive.adaspec", "VERIFIER"),
}
#: The kind of what is named by the path of a file.
_OF_FILES = ("jaxspec.adaptive.sglang", "KIND")


def names() -> tuple[str, ...]:
    """What users can name, besides files."""
    return tuple(KINDS)


def find(name: str) -> PolicyKind:
    """The kind of a name, or of files where no kind has that name.

    Raises:
      ValueError: a bare word that neither a kind nor a file is called.
    """
    module, attribute = KINDS.get(name, _OF_FILES)
    bare = not os.path.splitext(name)[1] and os.path.basename(name) == name
    if name not in KINDS and bare and not os.path.exists(name):
        close = nearest(name, KINDS)
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(f"policy must be one of {names()} or the path of a JSON file, got {name!r}{hint}")
    return getattr(importlib.import_module(module), attribute)


def kinds() -> list[PolicyKind]:
    """Every kind that has a name."""
    return [find(name) for name in KINDS]
