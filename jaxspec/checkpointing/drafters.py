"""Drafters of every kind as directories: what a directory holds, and the way to its reader or writer.

Owns the dispatch by kind and layout. Must not know names of tensors beyond what tells one kind from another.
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

from jaxspec.checkpointing import eagle1, eagle3, heads, hf, medusa, mtp
from jaxspec.checkpointing.tensors import read_json, read_tensors
from jaxspec.models import registry
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.eagle1_head import Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head
from jaxspec.speculation.drafters.medusa_head import MedusaHeads
from jaxspec.speculation.drafters.mtp_head import MtpHead

#: Kinds and the layouts that each can be written in, the default first.
LAYOUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "eagle3": eagle3.LAYOUTS,
        "peagle": eagle3.LAYOUTS,
        "eagle1": eagle1.LAYOUTS,
        "medusa": medusa.LAYOUTS,
        "mtp": mtp.LAYOUTS,
        "draft_model": ("huggingface",),
    }
)
_NESTED = ("eagle3", "peagle", "mtp")


def read_kind(directory: str | os.PathLike[str]) -> str:
    """Which kind of drafter a directory holds: a key of LAYOUTS.

    config.json decides. Where it only names a language model, as published EAGLE-1 heads do, the names of the tensors
    tell a head from a whole model. A target that carries an MTP module is a whole model (see has_mtp).

    Raises:
      ValueError: no directory or config.json, a kind that is not supported, or no readable weights to tell by.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    raw = read_json(directory / "config.json")
    if heads.KIND in raw:
        if raw[heads.KIND] not in _NESTED:
            raise ValueError(
                f"{directory / 'config.json'}: {heads.KIND} must be one of {_NESTED}, got {raw[heads.KIND]!r}"
            )
        return raw[heads.KIND]
    if "medusa_num_heads" in raw:
        return "medusa"
    found = raw.get("architectures")
    architectures = set(found if isinstance(found, list) else [])
    eagle = "draft_vocab_size" in raw or "eagle_config" in raw or architectures & set(eagle3.ARCHITECTURES)
    if not eagle and architectures & {*eagle1.ARCHITECTURES, *registry.supported()}:
        kind = _kind_by_names(directory)
        if kind != "eagle3":
            return kind
        eagle = True
    if eagle:
        return "eagle3" if eagle3.mask_token(raw) is None else "peagle"
    raise ValueError(
        f"{directory / 'config.json'}: architectures {found!r} name no drafter that is supported: "
        f"{[*eagle3.ARCHITECTURES, *eagle1.ARCHITECTURES, *registry.supported()]}, a Medusa configuration "
        f"(medusa_num_heads) or one of speculators ({heads.KIND} {', '.join(_NESTED)})"
    )


def has_mtp(directory: str | os.PathLike[str]) -> bool:
    """Whether a target's own checkpoint carries a multi-token prediction module.

    Raises:
      ValueError: a directory that cannot be read.
    """
    raw = read_json(Path(directory) / "config.json")
    with read_tensors(directory) as reader:
        return mtp.find_layout(raw, reader) in ("deepseek", "qwen3_next")


def load_drafter(
    kind: str,
    directory: str | os.PathLike[str],
    target: TargetModel,
    dtype: DTypeLike = jnp.float32,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> nnx.Module:
    """A drafter for `target`, its weights cast to `dtype`.

    Args:
      kind: a key of LAYOUTS. "mtp" may name the target's own directory.
      overrides: fields of the head's configuration that its config.json has wrong. SpecForge's EAGLE-3.1 heads from
        before September 2026 say norm_output but feed the un-normed state back: {"norm_output": False}.

    Returns:
      Eagle3Head (also for "peagle"), Eagle1Head, MedusaHeads, MtpHead or TargetModel.

    Raises:
      ValueError: a directory of another kind, or whatever in it does not fit the target; the message names the file,
        field or tensor, and both values. Pickles are refused.
    """
    if kind not in LAYOUTS:
        raise ValueError(f"kind of a drafter must be one of {sorted(LAYOUTS)}, got {kind!r}")
    if kind != "mtp" or not has_mtp(directory):
        found = read_kind(directory)
        if found != kind and not (kind == "mtp" and found == "draft_model"):
            raise ValueError(f"{directory} holds a drafter of kind {found!r}, expected {kind!r}")
    if kind == "draft_model":
        if overrides:
            raise ValueError(f"overrides are for draft heads, got {sorted(overrides)} for a draft model")
        model = hf.load_model(directory, dtype)
        heads.check_fits("vocab_size", model.config.vocab_size, "vocab_size", target.config.vocab_size)
        return model
    load = {
        "eagle3": eagle3.load_head,
        "peagle": eagle3.load_head,
        "eagle1": eagle1.load_head,
        "medusa": medusa.load_heads,
        "mtp": mtp.load_head,
    }[kind]
    return load(directory, target, dtype, overrides)


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
      layout: one of the kind's LAYOUTS; None the first, which is speculators' where that has the kind.
        For MTP modules, "deepseek" and "qwen3_next" write a copy of the target with the module in it.
      verifier: name or path of the target, for layouts whose configuration names it. speculators' own from_pretrained
        opens it and reads no EAGLE head without it.
      tokens: drafted tokens a round that speculators' configuration proposes.

    Raises:
      ValueError: a module that is no drafter, an unknown layout, a configuration that the layout cannot express, or a
        path that names a file.
    """
    kind = _kind_of(module)
    chosen = LAYOUTS[kind][0] if layout is None else layout
    if chosen not in LAYOUTS[kind]:
        raise ValueError(f"layout of a drafter of kind {kind!r} must be one of {LAYOUTS[kind]}, got {layout!r}")
    nested: dict[str, Any] = dict(layout=chosen, verifier=verifier, tokens=tokens)
    if isinstance(module, Eagle3Head):
        eagle3.save_head(module, directory, target.config, tokenizer=tokenizer, dtype=dtype, **nested)
    elif isinstance(module, MtpHead):
        mtp.save_head(module, directory, target, tokenizer=tokenizer, dtype=dtype, **nested)
    elif isinstance(module, Eagle1Head):
        eagle1.save_head(module, directory, target.config, tokenizer=tokenizer, dtype=dtype)
    elif isinstance(module, MedusaHeads):
        medusa.save_heads(module, directory, target.config, tokenizer=tokenizer, dtype=dtype, verifier=verifier)
    elif isinstance(module, TargetModel):
        hf.save_model(module, directory, tokenizer=tokenizer, dtype=dtype)


def _kind_of(module: nnx.Module) -> str:
    if isinstance(module, Eagle3Head):
        return "eagle3" if module.config.mask_token_id is None else "peagle"
    kinds = {Eagle1Head: "eagle1", MedusaHeads: "medusa", MtpHead: "mtp", TargetModel: "draft_model"}
    for cls, kind in kinds.items():
        if isinstance(module, cls):
            return kind
    raise ValueError(
        f"a drafter must be one of {['Eagle3Head', *(c.__name__ for c in kinds)]}, got {type(module).__name__}"
    )


def _kind_by_names(directory: Path) -> str:
    """Tells an EAGLE head from a whole model where config.json says the same of both."""
    with read_tensors(directory) as reader:
        if any(n.endswith(".hidden_norm.weight") for n in reader.names):
            return "eagle3"
        return "eagle1" if reader.first("fc.weight", "model.fc.weight") else "draft_model"
