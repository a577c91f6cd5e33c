"""`python -m jaxspec.train dspark`: DFlash with a Markov head and a confidence head (DSpark).

Blocks are DFlash's. What a place says is held to the target given the tokens before it, which in training are the
text's; the Markov head sees the last of them. The confidence head learns how much of the target's distribution the
draft's covers, which is how probable it is that rejection sampling accepts the draft.
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
from jaxspec.speculation.drafters.dspark_head import MARKOV_TYPES, DsparkConfig, DsparkHead
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import dflash, starts, walked
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.drafters.walked import chain as chain
from jaxspec.train.objective.chunks import draft_vocabulary_logits, map_positions
from jaxspec.train.run import command

#: Of a new head; None: the target's.
GEOMETRY = dflash.GEOMETRY | {"block_size": 7, "sample_from_anchor": True}
#: Of DSpark's parts, which a DFlash head to go on from does not have either.
PARTS = {"markov_rank": 256, "markov_type": "vanilla", "confidence_reads_token": True}


@dataclasses.dataclass(frozen=True)
class DsparkRecipe(walked.WalkedRecipe):
    """ce * cross entropy to the text's token + l1 * distance to the target's distribution + the confidence's loss.

    With p the target's distribution on the draft vocabulary and q the draft's, the distance is sum |p - q|, and the
    confidence is held to 1 - half of it by `confidence` * binary cross entropy (arXiv 2607.05147, section 3.3). Tokens
    that cannot be drafted have no cross entropy. kl * KL(p || q), DFlash's loss, is ours: the distance has next to no
    gradient where q is far from p, as it is in a new head.
    """

    ce: float = 0.1
    l1: float = 0.9
    kl: float = 0.0
    confidence: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ce", "l1", "kl", "confidence"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.ce + self.l1 + self.kl > 0:
            raise ValueError(f"one of ce, l1 and kl must be above 0, got {self.ce}, {self.l1} and {self.kl}")

    def block_loss(
        self, head: DsparkHead, target: TargetModel, batch: Batch, states: TargetStates, anchors_BK: jax.Array,
        kept_BK: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
        """See BlockRecipe; logged are the terms, unweighed, and the mean of 1 - sum |p - q| / 2."""
        assert states.aux_BTA is not None
        cfg, (rows, count) = head.config, anchors_BK.shape
        entries = head.entries(states.aux_BTA, batch.positions_BT)
        hidden_BKDE = dflash.forward_blocks(head, batch, entries, anchors_BK)
        before_BKD = walked.tokens_before(batch, anchors_BK, cfg.drafts)
        about_BKD, valid_BKD = dflash.learned_drafts(cfg.drafts, batch, anchors_BK, kept_BK)
        about_BM = about_BKD.reshape(rows, -1)
        take = jax.vmap(lambda values, index: values[index])
        labels_BM, known_BM = dflash.draft_labels(head, take(batch.tokens_BT, about_BM))
        target_logits = draft_vocabulary_logits(target, head)

        def part(joined_BmX: jax.Array, about_Bm: jax.Array, labels_Bm: jax.Array) -> tuple[jax.Array, ...]:
            theirs_BmV = jax.lax.stop_gradient(target_logits(take(states.hidden_BTE, about_Bm - 1)))
            own_BmV = head.joined_logits(joined_BmX)
            entropy = optax.softmax_cross_entropy_with_integer_labels(own_BmV, labels_Bm)
            probs_BmV = jax.nn.softmax(theirs_BmV, axis=-1)
            apart = jnp.abs(jax.nn.softmax(own_BmV, axis=-1) - probs_BmV)
            found = entropy, jnp.sum(apart, axis=-1)
            return (*found, optax.kl_divergence(jax.nn.log_softmax(own_BmV, axis=-1), probs_BmV)) if self.kl else found

        joined_BMX = head.joined(hidden_BKDE, before_BKD).reshape(rows, count * cfg.drafts, -1)
        found = map_positions(part, (joined_BMX, about_BM, labels_BM), 3 * cfg.draft_vocab_size)
        entropy_BKD, apart_BKD, *divergence = (x.reshape(about_BKD.shape) for x in found)
        known_BKD = known_BM.reshape(about_BKD.shape)
        terms = {"ce": jnp.where(known_BKD, entropy_BKD, 0.0), "l1": apart_BKD}
        shares = {"ce": self.ce, "l1": self.l1}
        if divergence:
            terms["kl"], shares["kl"] = divergence[0], self.kl
        covered_BKD = jax.lax.stop_gradient(1.0 - 0.5 * apart_BKD)
        if head.confidence is not None:
            sure_BKD = head.sure(hidden_BKDE, head.markov.embed(before_BKD))
            terms["confidence"] = optax.sigmoid_binary_cross_entropy(sure_BKD, covered_BKD)
            shares["confidence"] = self.confidence
        weights = jnp.broadcast_to(dflash.decay_weights(cfg.drafts, self.gamma), about_BKD.shape)
        sums = {name: dflash.weighed(each, weights, valid_BKD) for name, each in terms.items()}
        logged = {name: jax.lax.stop_gradient(value) for name, value in sums.items()}
        logged["covered"] = dflash.weighed(covered_BKD, jnp.ones_like(covered_BKD), valid_BKD)
        return sum((shares[name] * value for name, value in sums.items()), jnp.float32(0.0)), logged


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Geometry not given is the target's; DSpark's own parts may be given beside --init-from a DFlash head, too."""
    dflash.add_block_arguments(p)
    p.add_argument("--block-size", type=int, help="places of a block, its anchor's included (default: 7)")
    p.add_argument(
        "--sample-from-anchor", action=argparse.BooleanOptionalAction, default=None,
        help="the anchor's place drafts too (default: it does)",
    )  # fmt: skip
    p.add_argument("--markov-rank", type=int, help="of the logits that depend on the token before (default: 256)")
    p.add_argument("--markov-type", choices=MARKOV_TYPES, help="what is made of that token (default: vanilla)")
    p.add_argument(
        "--confidence-reads-token", action=argparse.BooleanOptionalAction, default=None,
        help="the confidence head sees the token before (default: it does)",
    )  # fmt: skip
    p.add_argument("--ce", type=float, default=0.1, help="share of the cross entropy to the text's tokens")
    p.add_argument("--l1", type=float, default=0.9, help="share of the distance to the target's distributions")
    p.add_argument("--kl", type=float, default=0.0, help="share of KL(target || draft); the paper has none")
    p.add_argument("--confidence", type=float, default=1.0, help="share of the confidence's loss; 0: a head without")


def build(setup: command.Setup, shape: dict[str, Any], parts: dict[str, Any]) -> DsparkHead:
    """A new head; its tables are the target's."""
    config, ids_V = dflash.new_config(setup, shape)
    tables = dflash.new_tables(setup.target, ids_V)
    head = DsparkHead(walked.with_parts(DsparkConfig, config, parts), *tables, rngs=nnx.Rngs(params=setup.args.seed))
    return dflash.begin(head, setup.target, ids_V)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out and returns the record.

    Raises:
      ValueError: options out of range or that exclude each other, no mask token, or --init-from that holds neither a
        DSpark nor a DFlash head.
    """
    layout = starts.check_layout("dspark", args.layout)
    shape = starts.geometry(args, GEOMETRY)
    given = {name: getattr(args, name) for name in PARTS if getattr(args, name) is not None}
    parts = {**PARTS, **given, "confidence": args.confidence > 0}
    if layout != "speculators" and args.init_from is None and not (
        shape["sample_from_anchor"] and shape["draft_vocab_size"] is None
    ):  # fmt: skip
        raise ValueError(
            f"--layout {layout} cannot say --no-sample-from-anchor or --draft-vocab-size; leave them out, or --layout"
        )
    gamma = dflash.chosen_gamma(args, shape)
    settings = dict(anchors=args.anchors, gamma=gamma, ce=args.ce, l1=args.l1, kl=args.kl, confidence=args.confidence)
    DsparkRecipe((), **settings)
    setup = command.prepare(args)
    if args.init_from:
        head = walked.initial("dspark", DsparkHead, DsparkConfig, setup, parts, given)
    else:
        head = build(setup, shape, parts)
    return dflash.fit_blocks(setup, DsparkRecipe(head.config.aux_layer_ids, **settings), head, "dspark", settings)
