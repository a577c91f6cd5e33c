"""`python -m jaxspec.train dflash2`: DFlash with convolutions and a candidate selector (DFlash 2).

What a place says by itself is trained as DFlash's. The selector learns to choose among the best of that, given the
text's token before: by a cross entropy over these alone, to which the right one is added where it is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.dflash2_head import Dflash2Config, Dflash2Head
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import dflash, starts, walked
from jaxspec.train.drafters.dflash import DflashRecipe
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.drafters.walked import chain as chain
from jaxspec.train.objective.chunks import map_positions
from jaxspec.train.objective.loss import soft_cross_entropy
from jaxspec.train.run import command

#: Of DFlash 2's parts, which a DFlash head to go on from does not have either.
PARTS = {"conv_taps": 2, "conv_group": 16, "selector_rank": 256, "selector_top_k": 16}


@dataclasses.dataclass(frozen=True)
class Dflash2Recipe(walked.WalkedRecipe, DflashRecipe):
    """DFlash's loss + selector * the selector's cross entropy, of which the right candidate is as that loss has it.

    That is the target's own choice with "kl", the text's token with "ce". It takes the place of the last candidate
    where it is none (reference: `speculators`).
    """

    selector: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.selector >= 0:
            raise ValueError(f"selector must be at least 0, got {self.selector}")

    def block_loss(
        self, head: Any, target: TargetModel, batch: Batch, states: TargetStates, anchors_BK: jax.Array,
        kept_BK: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
        """See BlockRecipe; logged are the plain mean of each draft's own loss and the selector's, weighed."""
        assert states.aux_BTA is not None
        cfg, (rows, count) = head.config, anchors_BK.shape
        entries = head.entries(states.aux_BTA, batch.positions_BT)
        hidden_BKDE = dflash.forward_blocks(head, batch, entries, anchors_BK)
        about_BKD, valid_BKD = dflash.learned_drafts(cfg.drafts, batch, anchors_BK, kept_BK)
        about_BM = about_BKD.reshape(rows, -1)
        take = jax.vmap(lambda values, index: values[index])

        def part(joined_BmX: jax.Array, about_Bm: jax.Array, labels_Bm: jax.Array) -> tuple[jax.Array, jax.Array]:
            own_BmV, features_Bmr = head.parts(joined_BmX)
            if self.loss_kind == "kl":
                theirs = jax.lax.stop_gradient(target.logits(take(states.hidden_BTE, about_Bm - 1)))
                log_probs = jax.nn.log_softmax(theirs, axis=-1)
                each = soft_cross_entropy(own_BmV, jnp.exp(log_probs)) + jnp.sum(jnp.exp(log_probs) * log_probs, -1)
                labels_Bm = jnp.argmax(theirs, axis=-1).astype(jnp.int32)
            else:
                each = optax.softmax_cross_entropy_with_integer_labels(own_BmV, labels_Bm)
            ids_BmK = jax.lax.top_k(jax.lax.stop_gradient(own_BmV), cfg.selector_top_k)[1]
            there_BmK = ids_BmK == labels_Bm[..., None]
            right_Bm = jnp.where(there_BmK.any(-1), jnp.argmax(there_BmK, axis=-1), cfg.selector_top_k - 1)
            ids_BmK = ids_BmK.at[..., -1].set(jnp.where(there_BmK.any(-1), ids_BmK[..., -1], labels_Bm))
            scores = jnp.take_along_axis(own_BmV, ids_BmK, axis=-1) + head.selector.scores(features_Bmr, ids_BmK)
            return each, optax.softmax_cross_entropy_with_integer_labels(scores, right_Bm)

        joined_BMX = head.joined(hidden_BKDE, walked.tokens_before(batch, anchors_BK, cfg.drafts))
        arrays = (joined_BMX.reshape(rows, count * cfg.drafts, -1), about_BM, take(batch.tokens_BT, about_BM))
        found = map_positions(part, arrays, 3 * cfg.vocab_size)
        each_BKD, chosen_BKD = (x.reshape(about_BKD.shape) for x in found)
        chosen = self.weighed(chosen_BKD, valid_BKD)
        logged = dflash.by_draft(each_BKD, valid_BKD) | {"selector": jax.lax.stop_gradient(chosen)}
        return self.weighed(each_BKD, valid_BKD) + self.selector * chosen, logged


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Geometry not given is the target's; DFlash 2's own parts may be given beside --init-from a DFlash head, too."""
    dflash.add_arguments(p)
    p.add_argument("--conv-taps", type=int, help="places that a convolution mixes (default: 2)")
    p.add_argument("--conv-group", type=int, help="channels that share a place's weights (default: 16)")
    p.add_argument("--selector-rank", type=int, help="of the selector's scores (default: 256)")
    p.add_argument("--selector-top-k", type=int, help="candidates of a place (default: 16)")
    p.add_argument("--selector", type=float, default=1.0, help="share of the selector's loss")


def build(setup: command.Setup, shape: dict[str, Any], parts: dict[str, Any]) -> Dflash2Head:
    """A new head; its tables are the target's."""
    config, ids_V = dflash.new_config(setup, shape)
    tables = dflash.new_tables(setup.target, ids_V)
    rngs = nnx.Rngs(params=setup.args.seed)
    head = Dflash2Head(walked.with_parts(Dflash2Config, config, parts), *tables, rngs=rngs)
    return dflash.begin(head, setup.target, ids_V)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out and returns the record.

    Raises:
      ValueError: options out of range or that exclude each other, no mask token, or --init-from that holds neither a
        DFlash 2 nor a DFlash head.
    """
    layout = starts.check_layout("dflash2", args.layout)
    shape = starts.geometry(args, dflash.GEOMETRY)
    given = {name: getattr(args, name) for name in PARTS if getattr(args, name) is not None}
    parts = {**PARTS, **given}
    if layout == "zlab" and args.init_from is None and shape["sample_from_anchor"]:
        raise ValueError("--layout zlab cannot say --sample-from-anchor; leave it out, or --layout")
    gamma = dflash.chosen_gamma(args, shape)
    settings = dict(
        anchors=args.anchors, loss_kind=args.loss, weights=args.weights, gamma=gamma, alpha=args.alpha,
        selector=args.selector,
    )  # fmt: skip
    Dflash2Recipe((), **settings)
    setup = command.prepare(args)
    if args.init_from:
        head = walked.initial("dflash2", Dflash2Head, Dflash2Config, setup, parts, given)
    else:
        head = build(setup, shape, parts)
    return dflash.fit_blocks(setup, Dflash2Recipe(head.config.aux_layer_ids, **settings), head, "dflash2", settings)
