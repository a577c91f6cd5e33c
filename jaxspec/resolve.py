"""Where a model and its drafter lie: names, paths and hub ids become directories, and a drafter's kind."""

from __future__ import annotations

import os
from pathlib import Path

from jaxspec.checkpointing import hub
from jaxspec.drafters import directories, registry
from jaxspec.names import nearest


def demo_directory() -> Path:
    """Where the demo checkpoints lie: beside the package in a checkout, inside it when installed.

    Raises:
      ValueError: this installation has none.
    """
    package = Path(__file__).resolve().parent
    for directory in (package.parent / "checkpoints" / "demo", package / "checkpoints" / "demo"):
        if (directory / "target" / "config.json").exists():
            return directory
    raise ValueError("the demo checkpoints are not part of this installation; pass a Hugging Face directory as model")


def resolve_model(model: str | Path) -> Path:
    """The directory of a model's name, path or hub id ("organisation/model", which is downloaded if need be).

    Raises:
      ValueError: none of these, or a download that failed.
    """
    if str(model) == "demo":
        return demo_directory() / "target"
    if isinstance(model, str | Path) and str(model):  # of "" pathlib makes the current directory
        if (path := Path(model)).is_dir():
            return path
        if hub.is_hub_id(str(model)):
            return hub.download(str(model))
    what = repr(str(model) if isinstance(model, Path) else model)
    raise ValueError(
        f"model must be 'demo', a Hugging Face directory or a hub id ('organisation/model'), and {what} is none"
    )


def resolve_drafter(drafter: str | Path | None, model_dir: Path) -> tuple[str, Path | None]:
    """(kind, directory) of a drafter's name, path or hub id; the kind is one of jaxspec.drafters.registry.

    A kind that needs a checkpoint finds it beside the target or inside its directory, under its own name (a draft
    model under `draft`), or in the target's own checkpoint. None picks EAGLE-3 where such a head lies there, else
    n-gram.

    Raises:
      ValueError: an unknown name, or no checkpoint where one is needed.
    """
    if drafter is None:
        at_hand = (kind for kind in map(registry.find, registry.UNASKED) if not kind.layouts or kind.find(model_dir))
        drafter = next(at_hand).name
    name = str(drafter)
    if name not in registry.names():
        path = hub.download(name) if hub.is_hub_id(name) and not Path(name).is_dir() else Path(name)
        if not path.is_dir():
            if os.sep in name:
                raise ValueError(f"drafter {name!r}: no such directory")
            close = nearest(name, registry.names())
            hint = f"; did you mean {close!r}?" if close else ""
            raise ValueError(f"drafter must be one of {registry.names()}, a directory or a hub id, got {name!r}{hint}")
        return directories.read_kind(path), path
    kind = registry.find(name)
    found = kind.find(model_dir) if kind.layouts else None
    if found is None and kind.layouts:
        raise ValueError(f"drafter {name!r}: {kind.searched(model_dir)}; pass the drafter's directory instead")
    return name, found
