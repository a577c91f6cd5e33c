"""Where a trainee's parameters come from: a saved head of its kind, or geometry from the arguments.

Must not know any kind of drafter, nor how it is trained.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer as Backend

from jaxspec.drafters import directories, registry
from jaxspec.models.base import TargetModel
from jaxspec.models.layers import Shared
from jaxspec.text.tokenizer import Tokenizer

#: What unused special tokens are called, those first that no text can hold.
_MASKS = (r"mask", r"unused|reserved", r"pad")


def load_initial(kind: str, directory: Path, target: TargetModel) -> Any:
    """A saved drafter of this kind: its own parameters in float32, the target's as the target has them.

    Raises:
      ValueError: the directory holds something else, or a drafter that does not fit the target.
    """
    # A drafter may lie in the target's own checkpoint, whose config.json names none.
    if not registry.find(kind).within(directory):
        found = directories.read_kind(directory)
        if found != kind:
            raise ValueError(f"--init-from {directory} holds a drafter of kind {found!r}; this command trains {kind!r}")
    module = directories.load_drafter(kind, directory, target, jnp.float32)
    for _, node in nnx.iter_graph(module):
        if isinstance(node, Shared):
            node.set_value(node.get_value().astype(target.embedding[...].dtype))
    return module


def geometry(args: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    """The values of arguments that shape a new trainee, `defaults` where they were left out (None).

    Raises:
      ValueError: one of them was given beside --init-from, whose checkpoint decides.
    """
    given = {name: getattr(args, name) for name in defaults if getattr(args, name) is not None}
    if args.init_from is not None and given:
        flags = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        raise ValueError(f"{flags}: --init-from {args.init_from} decides that; leave it out")
    return {**defaults, **given}


def check_layout(kind: str, layout: str | None) -> str:
    """The layout to write in; refuses one that the kind is not written in, before training instead of after.

    Raises:
      ValueError: names the layouts that there are.
    """
    known = registry.find(kind).layouts
    if layout is not None and layout not in known:
        raise ValueError(f"--layout of a {kind} drafter must be one of {known}, got {layout!r}")
    return layout or known[0]


def check_length(length: int, depth: int) -> None:
    """Refuses rows that hold no round of a chain of `depth`.

    Raises:
      ValueError: names both.
    """
    if length < depth + 3:
        raise ValueError(f"chains of {depth} drafts need --length of at least {depth + 3}, got {length}")


def mask_token(given: str | None, directory: Path, tokenizer: Tokenizer | None, used_V: np.ndarray) -> int:
    """The id of the token that placeholders hold.

    Args:
      given: its name or id; None for a special token whose name says that texts do not use it, or a row of the
        target's embedding that the tokenizer does not know.
      tokenizer: None where the target has none; then `given` must be an id.
      used_V: how often each token of the target's vocabulary occurs.

    Raises:
      ValueError: an unknown or used token; with None, when there is no such token (names the special ones there are).
    """
    backend = None if tokenizer is None else Backend.from_str(tokenizer.to_json())
    added = {} if backend is None else backend.get_added_tokens_decoder()
    special = {i: token.content for i, token in sorted(added.items()) if token.special}
    if given is not None:
        found = None if backend is None else backend.token_to_id(given)
        if found is None and given.isdigit() and int(given) < len(used_V):
            found = int(given)
        if found is None:
            raise ValueError(
                f"--mask-token must be a token's name or an id below {len(used_V)}, got {given!r}; special tokens: "
                f"{list(special.values())[:20]}"
            )
        if used_V[found]:
            raise ValueError(f"--mask-token {given!r} (id {found}) occurs {used_V[found]} times in the texts")
        return found
    if tokenizer is None:
        raise ValueError(f"--mask-token must be given: {directory} has no tokenizer to choose one from")
    ends = {tokenizer.bos_token_id, *tokenizer.eos_token_ids}
    free = {i: name for i, name in special.items() if i not in ends and i < len(used_V) and not used_V[i]}
    for pattern in _MASKS:
        for i, name in free.items():
            if re.search(pattern, name, re.IGNORECASE):
                return i
    if tokenizer.vocab_size < len(used_V) and not used_V[-1]:
        return len(used_V) - 1
    raise ValueError(
        "the tokenizer has no mask, padding or reserved token that could stand for drafted positions; name one with "
        f"--mask-token (special tokens that the texts do not use: {list(free.values())[:20]})"
    )
