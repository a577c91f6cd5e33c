"""Drafters of every kind as directories: which kind a directory holds, and the way to its reader or writer.

Owns the order in which kinds are asked. Must not know any one of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing import heads
from jaxspec.checkpointing.tensors import located, read_json, read_tensors
from jaxspec.drafters import registry
from jaxspec.drafters.kind import DrafterKind, Saving
from jaxspec.models.base import TargetModel

#: What training says of a drafter, beside its checkpoint; and there, the template arguments of the chats it learned.
TRAINING, CHAT_MODES = "training.json", "chat_template_kwargs"


def chat_modes(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The template arguments of the chats that a drafter learned from, each once; empty where nothing says so.

    Raises:
      ValueError: they are no object and no list of objects.
    """
    path = Path(directory) / TRAINING
    found = read_json(path).get(CHAT_MODES) if path.exists() else None
    modes = [found] if isinstance(found, dict) else [] if found is None else found
    if not isinstance(modes, list) or not all(isinstance(mode, dict) for mode in modes):
        raise ValueError(f"{path}: {CHAT_MODES} must be an object or a list of objects, got {found!r}")
    return modes


def stored_kinds() -> list[DrafterKind[Any]]:
    """The kinds that have checkpoints."""
    return [kind for kind in registry.kinds() if kind.layouts]


def read_kind(directory: str | os.PathLike[str]) -> str:
    """The name of the kind of drafter that a directory holds.

    config.json decides. Where it only names a language model, as published EAGLE-1 heads do, the names of the tensors
    tell a head from a whole model. A target that carries a drafter (see `DrafterKind.within`) is a whole model.

    Raises:
      ValueError: no directory or config.json, a kind that is not supported, or no readable weights to tell by.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    raw, kinds = read_json(directory / "config.json"), stored_kinds()
    nested = tuple(kind.name for kind in kinds if "speculators" in kind.layouts)
    if heads.KIND in raw:
        if raw[heads.KIND] not in nested:
            raise ValueError(
                f"{directory / 'config.json'}: {heads.KIND} must be one of {nested}, got {raw[heads.KIND]!r}"
            )
        return raw[heads.KIND]
    told = next((kind.name for kind in kinds if kind.recognise(raw, None)), None)
    if told is not None:
        return told
    found = raw.get("architectures")
    known = list(dict.fromkeys(name for kind in kinds for name in kind.architectures()))
    if not set(known).isdisjoint(heads.architectures(raw)):
        with read_tensors(directory) as reader:
            told = next((kind.name for kind in kinds if kind.recognise(raw, reader.names)), None)
        if told is not None:
            return told
    others = ", ".join(kind.told_by for kind in kinds if kind.told_by)
    raise ValueError(
        f"{directory / 'config.json'}: architectures {found!r} name no drafter that is supported: {known}, {others} "
        f"or one of speculators ({heads.KIND} {', '.join(nested)})"
    )


def kind_of(module: object) -> DrafterKind[Any]:
    """The kind of a module.

    Raises:
      ValueError: a module that is no drafter.
    """
    kinds = stored_kinds()
    for kind in kinds:
        if kind.owns(module):
            return kind
    types = list(dict.fromkeys(kind.module_type.__name__ for kind in kinds if kind.module_type))
    raise ValueError(f"a drafter must be one of {types}, got {type(module).__name__}")


def load_drafter(
    kind: str,
    directory: str | os.PathLike[str],
    target: TargetModel,
    dtype: DTypeLike = jnp.float32,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A drafter for `target`, its weights cast to `dtype`: a module of the kind's `module_type`.

    Args:
      kind: a name of the registry. A kind may also lie in the target's own directory (see `DrafterKind.within`).
      overrides: fields of the head's configuration that its config.json has wrong. SpecForge's EAGLE-3.1 heads from
        before September 2026 say norm_output but feed the un-normed state back: {"norm_output": False}.

    Raises:
      ValueError: a directory of another kind, or whatever in it does not fit the target; the message names the file,
        field or tensor, and both values. Pickles are refused.
    """
    known = {stored.name: stored for stored in stored_kinds()}
    if kind not in known:
        raise ValueError(f"kind of a drafter must be one of {sorted(known)}, got {kind!r}")
    directory = Path(directory)
    if not known[kind].within(directory):
        found = registry.find(read_kind(directory))
        if not known[kind].accepts(found):
            raise ValueError(f"{directory} holds a drafter of kind {found.name!r}, expected {kind!r}")
    with located(directory):
        return known[kind].load(directory, target, dtype, overrides)


def check_layout(kind: str, layout: str | None, what: str = "layout") -> str:
    """The layout to write a drafter of this kind in; None is its default.

    Args:
      what: the name of the setting, for the message.

    Raises:
      ValueError: a layout that the kind is not written in; names those that there are.
    """
    known = registry.find(kind).layouts
    if layout is not None and layout not in known:
        raise ValueError(f"{what} of a drafter of kind {kind!r} must be one of {known}, got {layout!r}")
    return known[0] if layout is None else layout


def save_drafter(
    module: nnx.Module,
    directory: str | os.PathLike[str],
    *,
    target: TargetModel,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    layout: str | None = None,
    verifier: str | None = None,
    tokens: int = 3,
) -> None:
    """Writes a drafter that `load_drafter` and its kind's other users read; all or nothing.

    Args:
      layout: one of the kind's; None the first, which is speculators' where that has the kind.
        For MTP modules, "deepseek" and "qwen3_next" write a copy of the target with the module in it.
      verifier: name or path of the target, for layouts whose configuration names it. speculators' own from_pretrained
        opens it and reads no EAGLE head without it.
      tokens: drafted tokens a round that speculators' configuration proposes.

    Raises:
      ValueError: a module that is no drafter, an unknown layout, a configuration that the layout cannot express, or a
        path that names a file.
    """
    kind = kind_of(module)
    how = Saving(check_layout(kind.name, layout), tokenizer, dtype, verifier, tokens)
    kind.save(module, Path(directory), target, how)
