"""What trainers of heads share that walk along their blocks: the tokens before each draft, chains, and how they begin.

In training the tokens before are the text's: a draft counts only where the target accepted those before it. Must not
know what a head makes of them; it offers `joined` and `joined_logits` (speculation/drafters/dspark_head.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.drafters.directories import read_kind
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import dflash, drafts, starts
from jaxspec.train.run import command

#: What a head may go on from that lacks the walk.
BEGINNING = "dflash"


class WalkedRecipe(dflash.BlockRecipe):
    """A BlockRecipe of heads that walk."""

    def logits(self, head: Any, batch: Batch, hidden_BkDE: jax.Array, anchors_Bk: jax.Array) -> jax.Array:
        b, k, d, _ = hidden_BkDE.shape
        joined = head.joined(hidden_BkDE, tokens_before(batch, anchors_Bk, d))
        return head.joined_logits(joined.reshape(b, k * d, -1)).reshape(b, k, d, -1)


def tokens_before(batch: Batch, anchors_BK: jax.Array, drafts: int) -> jax.Array:
    """The text's token before each draft of blocks, [B, K, drafts]; the first one's is the anchor."""
    at_BKD = anchors_BK[:, :, None] + jnp.arange(drafts, dtype=jnp.int32)[None, None]
    at_BKD = jnp.minimum(at_BKD, batch.tokens_BT.shape[1] - 1)
    return jax.vmap(lambda tokens, at: tokens[at])(batch.tokens_BT, at_BKD)


def chain(module: Any, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> drafts.Chain:
    """See drafts.Trainer."""
    assert aux_BTA is not None
    cfg = module.config
    read = lambda hidden, anchors: module.joined(hidden, tokens_before(batch, anchors, depth))
    joined_BNDX = dflash.every_block(module, batch, aux_BTA, depth, read)
    ids_V = None if cfg.draft_vocab_size == cfg.vocab_size else module.target_ids[...]
    joined = [joined_BNDX[:, :, d] for d in range(depth)]
    return drafts.Chain(joined, [module.joined_logits] * depth, ids_V, cfg.draft_vocab_size, walk=module)


def with_parts(config_type: Any, config: Any, parts: dict[str, Any]) -> Any:
    """A DflashConfig's fields and others as a configuration of `config_type`."""
    return config_type(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)}, **parts)


def initial(
    kind: str, head_type: Any, config_type: Any, setup: command.Setup, parts: dict[str, Any], given: dict[str, Any]
) -> Any:
    """The head of --init-from; one of DFlash's gets new parts, and then drafts as it did.

    Args:
      parts: fields of `config_type` that DFlash's configuration lacks. given: those of them that were asked for.

    Raises:
      ValueError: see starts.load_initial; parts were asked for that the head has already.
    """
    directory = setup.args.init_from
    if read_kind(directory) == BEGINNING:
        head = starts.load_initial(BEGINNING, directory, setup.target)
        rngs = nnx.Rngs(params=setup.args.seed)
        return head_type.on(head, with_parts(config_type, head.config, parts), rngs)
    head = starts.load_initial(kind, directory, setup.target)
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        raise ValueError(f"{flags}: the head of kind {kind!r} in --init-from {directory} decides that; leave it out")
    return head
