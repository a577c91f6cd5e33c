"""`python -m jaxspec.train draft_model`: a small language model distilled from the target (Leviathan et al. 2023)."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.checkpointing import hf
from jaxspec.models import registry
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.train.data.batch import Batch, ahead
from jaxspec.train.drafters import drafts, starts
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective.attention import packed_attention
from jaxspec.train.objective.chunks import mixed_cross_entropy
from jaxspec.train.objective.loss import masked_mean
from jaxspec.train.run import command

#: The demo draft model's.
GEOMETRY = {
    "hidden_size": 192, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 64, "intermediate_size": 512
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DraftModelRecipe:
    """hard_share of the cross entropy to the text, the rest to the target's distribution.

    Attributes:
      depth: of the chains whose acceptance is reported.
    """

    hard_share: float = 0.0
    depth: int = 5
    aux_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.hard_share <= 1.0:
            raise ValueError(f"hard_share must lie between 0 and 1, got {self.hard_share}")
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")

    def loss(
        self, module: TargetModel, target: TargetModel, batch: Batch, states: TargetStates, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """See Recipe. A draft is compared where the text led up to it, as it is verified."""
        kept = batch.tokens_BT.shape[1] - 1 - self.depth
        hidden_BTE, _ = module(batch.tokens_BT, batch.positions_BT, packed_attention(batch.segments_BT))
        labels_BT = ahead(batch.tokens_BT, 1)
        entropy_BT, same_BT = mixed_cross_entropy(
            module.logits, target, hidden_BTE, states.hidden_BTE, labels_BT, self.hard_share
        )
        matches_BND = jnp.stack([same_BT[:, i + 1 : i + 1 + kept] for i in range(self.depth)], axis=-1)
        return masked_mean(entropy_BT, batch.learned_ahead(1)), matches_BND, {}


def new_draft_model(cfg: ModelConfig, target: TargetModel, seed: int) -> TargetModel:
    """A tied model whose embedding starts as the target's, projected on its principal directions."""
    draft = registry.build(cfg, rngs=nnx.Rngs(params=seed))
    table_VE = np.asarray(target.embedding[...], np.float32)
    directions_EH = np.linalg.svd(table_VE, full_matrices=False)[2][: cfg.hidden_size].T
    width = directions_EH.shape[1]
    draft.embedding[...] = draft.embedding[...].at[:, :width].set(table_VE @ directions_EH)
    return draft


def chain(module: TargetModel, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> drafts.Chain:
    """See drafts.Trainer."""
    hidden_BTE, _ = module(batch.tokens_BT, batch.positions_BT, packed_attention(batch.segments_BT))
    hidden = [drafts.with_room(hidden_BTE, batch, depth, i + 1) for i in range(depth)]
    return drafts.Chain(hidden, [module.logits] * depth, None, module.config.vocab_size)


def add_arguments(p: argparse.ArgumentParser) -> None:
    """What only draft models have; the geometry's defaults are the demo draft model's."""
    command.add_common_arguments(p)
    for name, value in GEOMETRY.items():
        p.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default: {value}")
    p.add_argument("--hard-share", type=float, default=0.0, help="weight of the cross entropy to the text itself")
    p.add_argument("--depth", type=int, default=5, help="drafts a chain in the reported acceptance")
    p.set_defaults(lr=4e-3)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out, a Hugging Face directory, and returns the record.

    Raises:
      ValueError: options out of range or that exclude each other, or a model of another vocabulary.
    """
    starts.check_layout("draft_model", args.layout)
    recipe = DraftModelRecipe(args.hard_share, args.depth)
    shape = starts.geometry(args, GEOMETRY)
    setup = command.prepare(args)
    starts.check_length(setup.rows.length, recipe.depth)
    target = setup.target
    if args.init_from is not None:
        draft = hf.load_model(args.init_from, dtype=jnp.float32)
        if draft.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"--init-from {args.init_from}: vocab_size must be the target's {target.config.vocab_size}, "
                f"got {draft.config.vocab_size}"
            )
    else:
        cfg = dataclasses.replace(
            target.config,
            hidden_size=shape["hidden_size"],
            intermediate_size=shape["intermediate_size"],
            num_layers=shape["layers"],
            num_heads=shape["heads"],
            num_kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            tie_word_embeddings=True,
        )
        draft = new_draft_model(cfg, target, args.seed)
    extra = {"hard_share": args.hard_share}
    return command.fit(setup, recipe, draft, kind="draft_model", extra_record=extra)
