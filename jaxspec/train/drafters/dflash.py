"""`python -m jaxspec.train dflash`: a head that drafts a block in one pass, on sampled anchors (DFlash).

A block starts at an anchor n, a token that the target gave: its first place holds that token, the others the mask
token. Every place sees the target's states of the positions before n in its text, and its own block; a sliding layer
sees less of both. What the head makes of a text, its context, is computed once and shared by all blocks.
"""

from __future__ import annotations

import abc
import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxspec.checkpointing import heads
from jaxspec.checkpointing.dflash import default_layers
from jaxspec.models.base import FULL_ATTENTION, Attend, AttentionOptions, ModelConfig, TargetModel
from jaxspec.models.layers import Linear, Shared, Transformer, shared_lm_head
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import drafts, eagle, starts
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective.chunks import best_tokens, draft_vocabulary_logits, map_positions
from jaxspec.train.objective.loss import soft_cross_entropy
from jaxspec.train.run import command

#: Of a new head; None: the target's.
GEOMETRY = {
    "layers": 5, "intermediate_size": None, "heads": None, "kv_heads": None, "head_dim": None, "aux_layers": None,
    "draft_vocab_size": None, "mask_token": None, "block_size": 8, "sample_from_anchor": False,
}  # fmt: skip
#: Of a batch's rows, acceptance is reported of one in so many.
_REPORTED = 4
LOSSES, WEIGHTS = ("kl", "ce"), ("decay", "dpace")


def _take(values_BT: jax.Array, index_BN: jax.Array) -> jax.Array:
    return jax.vmap(lambda values, index: values[index])(values_BT, index_BN)


def sample_anchors(key: jax.Array, batch: Batch, count: int) -> tuple[jax.Array, jax.Array]:
    """Anchors of each row, int32 [B, K], drawn without replacement, and which of them can be learned from, bool [B, K].

    An anchor is a learned token whose next one is learned too; a row with fewer than `count` of them has others, which
    do not count.
    """
    valid_BT = batch.learn_BT & batch.learned_ahead(1)
    luck_BT = jax.random.uniform(key, valid_BT.shape) + valid_BT.astype(jnp.float32)
    best_BK, anchors_BK = jax.lax.top_k(luck_BT, min(count, luck_BT.shape[1]))
    return anchors_BK.astype(jnp.int32), best_BK >= 1.0


def forward_blocks(head: DflashHead, batch: Batch, entries_LBTGc: jax.Array, anchors_BK: jax.Array) -> jax.Array:
    """Hidden states of the predicting places of blocks at these anchors, [B, K, drafts, E].

    Args:
      entries_LBTGc: of the context, from `head.entries`.
    """
    cfg, (rows, count) = head.config, anchors_BK.shape
    offset_N = jnp.arange(cfg.block_size, dtype=jnp.int32)
    flat = lambda x_BKN: x_BKN.reshape(rows, count * cfg.block_size, *x_BKN.shape[3:])
    tokens_BKN = head.block(_take(batch.tokens_BT, anchors_BK))
    positions_BKN = _take(batch.positions_BT, anchors_BK)[:, :, None] + offset_N[None, None]
    attend = block_attention(cfg, entries_LBTGc, batch.segments_BT, anchors_BK)
    hidden_BME = head(flat(tokens_BKN), flat(positions_BKN), attend)
    hidden_XNE = hidden_BME.reshape(rows * count, cfg.block_size, -1)
    return head.predicting(hidden_XNE).reshape(rows, count, cfg.drafts, -1)


def block_attention(
    cfg: DflashConfig, entries_LBTGc: jax.Array, segments_BT: jax.Array, anchors_BK: jax.Array
) -> Attend:
    """Each place sees its anchor's context and its own block under one softmax; scores live for a part of them."""
    rows, count = anchors_BK.shape
    size, length = cfg.block_size, segments_BT.shape[1]
    column_T, offset_N = jnp.arange(length, dtype=jnp.int32), jnp.arange(size, dtype=jnp.int32)

    def attend(
        layer: int, q_BMHC: jax.Array, k_BMGC: jax.Array, v_BMGC: jax.Array, options: AttentionOptions = FULL_ATTENTION
    ) -> jax.Array:
        heads, channels = q_BMHC.shape[2:]
        groups = k_BMGC.shape[2]
        keys_BTGC, values_BTGC = jnp.split(entries_LBTGc[layer], 2, axis=-1)
        own_NN, above_N = cfg.block_mask(options), jnp.full((size,), -length, jnp.int32)
        if options.window is not None:
            window, counted_N = cfg.window(offset_N)
            above_N = counted_N - jnp.int32(window)
        block = lambda x, *shape: x.reshape(rows, count, size, *shape)
        q_BKNGRC = block(q_BMHC, groups, heads // groups, channels) * jnp.asarray(channels**-0.5, q_BMHC.dtype)

        def part(q_BkNGRC: jax.Array, k_BkNGC: jax.Array, v_BkNGC: jax.Array, anchors_Bk: jax.Array) -> jax.Array:
            texts_Bk = _take(segments_BT, anchors_Bk)
            anchor = anchors_Bk[:, :, None, None]
            seen_BkNT = (column_T[None, None, None] < anchor) & (
                column_T[None, None, None] > anchor + above_N[None, None, :, None]
            )
            seen_BkNT = seen_BkNT & (segments_BT[:, None, None] == texts_Bk[:, :, None, None])
            seen = jnp.concatenate([seen_BkNT, jnp.broadcast_to(own_NN, (*seen_BkNT.shape[:3], size))], axis=-1)
            text = jnp.einsum("bkngrc,btgc->bkngrt", q_BkNGRC, keys_BTGC, preferred_element_type=jnp.float32)
            own = jnp.einsum("bkngrc,bkmgc->bkngrm", q_BkNGRC, k_BkNGC, preferred_element_type=jnp.float32)
            scores = jnp.where(seen[:, :, :, None, None], jnp.concatenate([text, own], axis=-1), -jnp.inf)
            text, own = jnp.split(jax.nn.softmax(scores, axis=-1).astype(v_BMGC.dtype), [length], axis=-1)
            return jnp.einsum("bkngrt,btgc->bkngrc", text, values_BTGC) + jnp.einsum(
                "bkngrm,bkmgc->bkngrc", own, v_BkNGC
            )

        arrays = (q_BKNGRC, block(k_BMGC, groups, channels), block(v_BMGC, groups, channels), anchors_BK)
        return map_positions(part, arrays, 2 * size * heads * (length + size)).reshape(q_BMHC.shape)

    return attend


def decay_weights(drafts: int, gamma: float) -> jax.Array:
    """exp(-j / gamma) of the block's drafts j = 0, 1, .., float32 [drafts]."""
    return jnp.exp(-jnp.arange(drafts, dtype=jnp.float32) / gamma)


def dpace_weights(cross_entropy_BKD: jax.Array, valid_BKD: jax.Array, alpha: float) -> jax.Array:
    """D-PACE's weights (arXiv 2605.18810): what a draft adds to the tokens that are expected to be accepted.

    Of draft j, the sum over drafts from j on of the products up to each of the smoothed probabilities
    (1 - alpha) exp(-cross entropy) + alpha of the right tokens. Drafts that do not count are left out of both.
    """
    smooth_BKD = (1.0 - alpha) * jnp.exp(-jax.lax.stop_gradient(cross_entropy_BKD)) + alpha
    prefix_BKD = jnp.where(valid_BKD, jnp.cumprod(jnp.where(valid_BKD, smooth_BKD, 1.0), axis=-1), 0.0)
    return jnp.cumsum(prefix_BKD[..., ::-1], axis=-1)[..., ::-1]


@dataclasses.dataclass(frozen=True)
class BlockRecipe(abc.ABC):
    """Blocks at sampled anchors, each draft weighed by its place; what it is held to is the subclass's.

    Attributes:
      anchors: blocks of each row.
      gamma: draft j of a block weighs exp(-j / gamma), from 0.
      depth: of the chains whose acceptance is reported; that takes a pass without gradients over a block a position.
      reported: of a batch's rows the first one in so many, and of each its first `anchors` positions; None: all.
    """

    aux_layers: tuple[int, ...]
    anchors: int = 512
    gamma: float = 4.0
    depth: int = 5
    reported: int | None = None

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise ValueError(f"anchors must be at least 1, got {self.anchors}")
        if not self.gamma > 0:
            raise ValueError(f"gamma must be above 0, got {self.gamma}")

    @abc.abstractmethod
    def block_loss(
        self, head: Any, target: TargetModel, batch: Batch, states: TargetStates, anchors_BK: jax.Array,
        kept_BK: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
        """(nats, scalars to log) of the blocks at these anchors, of which some do not count."""

    def logits(self, head: Any, batch: Batch, hidden_BkDE: jax.Array, anchors_Bk: jax.Array) -> jax.Array:
        """Float32 logits [B, k, D, Vd] of the first drafts of blocks, the text given as the drafts before."""
        return head.logits(hidden_BkDE)

    def loss(
        self, module: Any, target: TargetModel, batch: Batch, states: TargetStates, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """See Recipe; `key` draws the anchors."""
        anchors_BK, kept_BK = sample_anchors(key, batch, self.anchors)
        loss, metrics = self.block_loss(module, target, batch, states, anchors_BK, kept_BK)
        graph, state = nnx.split(module)
        frozen = nnx.merge(graph, jax.lax.stop_gradient(state))
        return loss, self.matches(frozen, target, batch, states), metrics

    def matches(self, head: Any, target: TargetModel, batch: Batch, states: TargetStates) -> jax.Array:
        """Whether each draft is the target's own choice, bool [R, N, depth], N at most T - 1 - depth."""
        most = None
        if self.reported is not None:
            count, most = -(-len(batch.tokens_BT) // self.reported), self.anchors
            batch, states = jax.tree.map(lambda x: x[:count], (batch, states))
        depth, best_BT = self.depth, best_tokens(target, states.hidden_BTE)
        ids_V = head.target_ids[...]

        def choices(hidden_BkDE: jax.Array, anchors_Bk: jax.Array) -> jax.Array:
            return ids_V[jnp.argmax(self.logits(head, batch, hidden_BkDE, anchors_Bk), axis=-1)]

        assert states.aux_BTA is not None
        chosen_BND = every_block(head, batch, states.aux_BTA, depth, choices, most=most)
        kept = chosen_BND.shape[1]
        same = [chosen_BND[:, :, d] == best_BT[:, d + 1 : d + 1 + kept] for d in range(depth)]
        return jnp.stack(same, axis=-1)


def learned_drafts(drafts: int, batch: Batch, anchors_BK: jax.Array, kept_BK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(positions that the drafts of blocks are about, those after a row's end at its end; which are learned).

    Both [B, K, drafts]. A draft is learned where its token is, in its anchor's own text.
    """
    length = batch.tokens_BT.shape[1]
    about_BKD = anchors_BK[:, :, None] + 1 + jnp.arange(drafts, dtype=jnp.int32)[None, None]
    inside_BKD = jnp.minimum(about_BKD, length - 1)
    of_draft = lambda x_BT: _take(x_BT, inside_BKD.reshape(len(x_BT), -1)).reshape(about_BKD.shape)
    same_BKD = of_draft(batch.segments_BT) == _take(batch.segments_BT, anchors_BK)[:, :, None]
    return inside_BKD, same_BKD & of_draft(batch.learn_BT) & (about_BKD < length) & kept_BK[:, :, None]


def weighed(each_BKD: jax.Array, weights_BKD: jax.Array, valid_BKD: jax.Array) -> jax.Array:
    """Sum of what is weighed over the number of drafts that count (reference: `speculators`)."""
    counts_BKD = valid_BKD.astype(jnp.float32)
    return jnp.sum(each_BKD * weights_BKD * counts_BKD) / jnp.maximum(jnp.sum(counts_BKD), 1.0)


def by_draft(each_BKD: jax.Array, valid_BKD: jax.Array) -> dict[str, jax.Array]:
    """The plain mean of each draft of a block, to be logged."""
    counts = valid_BKD.astype(jnp.float32)
    mean_D = jnp.sum(each_BKD * counts, axis=(0, 1)) / jnp.maximum(jnp.sum(counts, axis=(0, 1)), 1.0)
    return {f"loss_{d + 1}": jax.lax.stop_gradient(mean_D[d]) for d in range(each_BKD.shape[-1])}


@dataclasses.dataclass(frozen=True)
class DflashRecipe(BlockRecipe):
    """DFlash's losses.

    Attributes:
      loss_kind: "kl" to the target's distribution on the draft vocabulary, or "ce", the cross entropy to the text's
        tokens.
      weights: "decay" (by gamma), or "dpace" (see dpace_weights; of "ce").
    """

    loss_kind: str = "kl"
    weights: str = "decay"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha must lie in [0, 1], got {self.alpha}")
        if self.weights == "dpace" and self.loss_kind != "ce":
            raise ValueError(f"weights 'dpace' are of the cross entropy, loss 'ce', got loss {self.loss_kind!r}")

    def block_loss(
        self, head: DflashHead, target: TargetModel, batch: Batch, states: TargetStates, anchors_BK: jax.Array,
        kept_BK: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
        """See BlockRecipe; logged is the plain mean of each draft."""
        assert states.aux_BTA is not None
        cfg, (rows, count) = head.config, anchors_BK.shape
        hidden_BKDE = forward_blocks(head, batch, head.entries(states.aux_BTA, batch.positions_BT), anchors_BK)
        about_BKD, valid_BKD = learned_drafts(cfg.drafts, batch, anchors_BK, kept_BK)
        hidden_BME = hidden_BKDE.reshape(rows, count * cfg.drafts, -1)
        about_BM = about_BKD.reshape(rows, -1)
        if self.loss_kind == "kl":
            each_BM = self._divergence(head, target, states.hidden_BTE, hidden_BME, about_BM)
        else:
            labels_BM, known_BM = draft_labels(head, _take(batch.tokens_BT, about_BM))
            valid_BKD = valid_BKD & known_BM.reshape(about_BKD.shape)
            part = lambda hidden, labels: optax.softmax_cross_entropy_with_integer_labels(head.logits(hidden), labels)
            each_BM = map_positions(part, (hidden_BME, labels_BM), cfg.draft_vocab_size)
        each_BKD = each_BM.reshape(about_BKD.shape)
        return self.weighed(each_BKD, valid_BKD), by_draft(each_BKD, valid_BKD)

    def weighed(self, each_BKD: jax.Array, valid_BKD: jax.Array) -> jax.Array:
        """Sum of the weighed losses over the number of drafts that count."""
        if self.weights == "dpace":
            return weighed(each_BKD, dpace_weights(each_BKD, valid_BKD, self.alpha), valid_BKD)
        decay_D = decay_weights(each_BKD.shape[-1], self.gamma)
        return weighed(each_BKD, jnp.broadcast_to(decay_D, each_BKD.shape), valid_BKD)

    def _divergence(
        self, head: DflashHead, target: TargetModel, target_hidden_BTE: jax.Array, hidden_BME: jax.Array,
        about_BM: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """KL(target || head) of each draft, [B, M]."""
        target_logits = draft_vocabulary_logits(target, head)

        def part(hidden_BmE: jax.Array, about_Bm: jax.Array) -> jax.Array:
            before_BmE = _take(target_hidden_BTE, about_Bm - 1)
            log_probs = jax.nn.log_softmax(jax.lax.stop_gradient(target_logits(before_BmE)), axis=-1)
            probs = jnp.exp(log_probs)
            return soft_cross_entropy(head.logits(hidden_BmE), probs) + jnp.sum(probs * log_probs, axis=-1)

        return map_positions(part, (hidden_BME, about_BM), 2 * head.config.draft_vocab_size)


def draft_labels(head: DflashHead, tokens_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draft ids of tokens, and whether the draft vocabulary has them; [B, N] both."""
    cfg = head.config
    if cfg.draft_vocab_size == cfg.vocab_size:
        return tokens_BN, jnp.ones_like(tokens_BN, bool)
    draft_V = jnp.full((cfg.vocab_size,), -1, jnp.int32)
    draft_V = draft_V.at[head.target_ids[...]].set(jnp.arange(cfg.draft_vocab_size, dtype=jnp.int32))
    labels_BN = draft_V[tokens_BN]
    return jnp.maximum(labels_BN, 0), labels_BN >= 0


def every_block(
    head: DflashHead, batch: Batch, aux_BTA: jax.Array, depth: int,
    read: Callable[[jax.Array, jax.Array], jax.Array], *, most: int | None = None,
) -> jax.Array:  # fmt: skip
    """read(hidden states [B, k, depth, E], anchors [B, k]) of a block after every position n, whose anchor is n + 1.

    [B, N, ..]; N is T - 1 - depth, the positions that have a whole round after them. Blocks go in parts.

    Args:
      most: no more than the first so many positions.

    Raises:
      ValueError: a chain longer than a block.
    """
    cfg, length = head.config, batch.tokens_BT.shape[1]
    if depth > cfg.drafts:
        raise ValueError(f"this DFlash head drafts {cfg.drafts} tokens a block, got chains of {depth}")
    entries_LBTGc = head.entries(aux_BTA, batch.positions_BT)
    count = length - 1 - depth if most is None else min(most, length - 1 - depth)
    anchors_BN = jnp.broadcast_to(jnp.arange(1, count + 1, dtype=jnp.int32), (len(aux_BTA), count))
    part = lambda anchors_Bk: read(forward_blocks(head, batch, entries_LBTGc, anchors_Bk)[:, :, :depth], anchors_Bk)
    width = max(cfg.block_size * cfg.layer.num_heads * length, depth * cfg.draft_vocab_size)
    return map_positions(part, (anchors_BN,), width)


def chain(module: DflashHead, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> drafts.Chain:
    """See drafts.Trainer."""
    assert aux_BTA is not None
    cfg = module.config
    hidden_BNDE = every_block(module, batch, aux_BTA, depth, lambda hidden, anchors: hidden)
    ids_V = None if cfg.draft_vocab_size == cfg.vocab_size else module.target_ids[...]
    hidden = [hidden_BNDE[:, :, d] for d in range(depth)]
    return drafts.Chain(hidden, [module.logits] * depth, ids_V, cfg.draft_vocab_size, one_pass=True)


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Geometry not given is the target's."""
    add_block_arguments(p)
    p.add_argument("--block-size", type=int, help="places of a block, its anchor's included (default: 8)")
    p.add_argument(
        "--sample-from-anchor", action="store_true", default=None,
        help="the anchor's place drafts too (default: not)",
    )  # fmt: skip
    p.add_argument("--loss", choices=LOSSES, default="kl", help="to the target's distributions, or the text's tokens")
    p.add_argument("--weights", choices=WEIGHTS, default="decay", help="of a block's drafts")
    p.add_argument("--alpha", type=float, default=0.5, help="smoothing of --weights dpace")


def add_block_arguments(p: argparse.ArgumentParser) -> None:
    """What kinds that draft from blocks have in common."""
    command.add_common_arguments(p)
    p.set_defaults(lr=6e-4, warmup=0.04, clip=1.0)
    p.add_argument("--layers", type=int, help="decoder layers (default: 5, as published heads have)")
    for name in ("intermediate-size", "heads", "kv-heads", "head-dim"):
        p.add_argument(f"--{name}", type=int, help="default: the target's")
    p.add_argument(
        "--aux-layers", type=int, nargs="+", help="layers whose input is read (default: as many as --layers, spread)"
    )
    p.add_argument("--draft-vocab-size", type=int, help="most frequent tokens that can be drafted (default: all)")
    p.add_argument("--mask-token", help="name or id of the token in drafted places (default: an unused special one)")
    p.add_argument("--anchors", type=int, default=512, help="blocks of each row")
    p.add_argument("--gamma", type=float, help="of weights exp(-j / gamma) (default: 7 from blocks of 16 on, else 4)")
    p.add_argument(
        "--depth", type=int, help="drafts a chain in the reported acceptance (default: a block's, at most 7)"
    )


def build(setup: command.Setup, shape: dict[str, Any]) -> DflashHead:
    """A new head of `new_config`'s geometry; its tables are the target's."""
    config, ids_V = new_config(setup, shape)
    head = DflashHead(config, *new_tables(setup.target, ids_V), rngs=nnx.Rngs(params=setup.args.seed))
    return begin(head, setup.target, ids_V)


def begin(head: Any, target: TargetModel, ids_V: np.ndarray) -> Any:
    """A new head that starts from the target, as far as it can; `ids_V` are the target's ids of its draft ids.

    Its context is the last state that it reads, and it reads its output as the target does its own.
    """
    head.target_ids[...] = jnp.asarray(ids_V, jnp.int32)
    kernel, width = head.fc.kernel, target.config.hidden_size
    kernel[...] = kernel[...].at[-width:].set(jnp.eye(width, dtype=kernel.dtype))
    if isinstance(target, Transformer):
        head.norm.weight[...] = target.norm.weight[...].astype(head.norm.weight.dtype)
    return head


def new_tables(target: TargetModel, ids_V: np.ndarray) -> tuple[Shared, Linear | None]:
    """The target's embedding, and what of its output layer drafts the tokens with these ids."""
    reduced = len(ids_V) < target.config.vocab_size
    lm_head = heads.lend_rows(target, jnp.float32, ids_V, None) if reduced else shared_lm_head(target)
    return Shared(target.embedding[...]), lm_head


def new_config(setup: command.Setup, shape: dict[str, Any]) -> tuple[DflashConfig, np.ndarray]:
    """(geometry of a new head, the target's id of each draft id).

    Raises:
      ValueError: sizes, layers or a mask token that do not fit.
    """
    args, target = setup.args, setup.target
    cfg = target.config
    layers = tuple(shape["aux_layers"] or default_layers(cfg.num_layers, shape["layers"]))
    if not all(0 <= i <= cfg.num_layers for i in layers):
        raise ValueError(f"--aux-layers must lie in 0 .. {cfg.num_layers} (the target's), got {layers}")
    used_V = np.bincount(setup.rows.tokens[setup.rows.segments > 0], minlength=cfg.vocab_size)
    mask = starts.mask_token(shape["mask_token"], args.target, setup.tokenizer, used_V)
    size = shape["draft_vocab_size"] or cfg.vocab_size
    ids_V = np.arange(cfg.vocab_size)
    if size != cfg.vocab_size:
        ids_V = eagle.draft_vocabulary(setup.token_counts_V, size, 1.0)
    print(f"draft vocabulary: {len(ids_V)} tokens; mask token: id {mask}; layers read: {layers}", flush=True)
    layer = ModelConfig(
        family="dflash",
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=shape["intermediate_size"] or cfg.intermediate_size,
        num_layers=shape["layers"],
        num_heads=shape["heads"] or cfg.num_heads,
        num_kv_heads=shape["kv_heads"] or cfg.num_kv_heads,
        head_dim=shape["head_dim"] or cfg.head_dim,
        rms_norm_eps=cfg.rms_norm_eps,
        rope_theta=cfg.rope_theta,
        rope_scaling=cfg.rope_scaling,
        qk_norm=True,
        max_position_embeddings=cfg.max_position_embeddings,
    )
    anchor = shape["sample_from_anchor"]
    return DflashConfig(layer, layers, shape["block_size"], mask, len(ids_V), sample_from_anchor=anchor), ids_V


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out and returns the record.

    Raises:
      ValueError: options out of range or that exclude each other, no mask token, or --init-from that holds another
        drafter.
    """
    layout = starts.check_layout("dflash", args.layout)
    shape = starts.geometry(args, GEOMETRY)
    if layout == "zlab" and args.init_from is None and (shape["sample_from_anchor"] or shape["draft_vocab_size"]):
        raise ValueError(
            "--layout zlab cannot say --sample-from-anchor or --draft-vocab-size; leave them out, or --layout"
        )
    gamma = chosen_gamma(args, shape)
    settings = dict(anchors=args.anchors, loss_kind=args.loss, weights=args.weights, gamma=gamma, alpha=args.alpha)
    DflashRecipe((), **settings)
    setup = command.prepare(args)
    head = starts.load_initial("dflash", args.init_from, setup.target) if args.init_from else build(setup, shape)
    return fit_blocks(setup, DflashRecipe(head.config.aux_layer_ids, **settings), head, "dflash", settings)


def chosen_gamma(args: argparse.Namespace, shape: dict[str, Any]) -> float:
    """--gamma, or what blocks of this size are usually trained with."""
    return args.gamma if args.gamma is not None else 7.0 if shape["block_size"] >= 16 else 4.0


def fit_blocks(
    setup: command.Setup, recipe: BlockRecipe, head: Any, kind: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Trains a head with a recipe, whose depths are --depth.

    Raises:
      ValueError: --depth or --length that the head's blocks do not fit; see `command.fit`.
    """
    drafts, given = head.config.drafts, setup.args.depth
    depth = min(drafts, 7) if given is None else given
    if not 1 <= depth <= drafts:
        raise ValueError(f"--depth must lie between 1 and the block's {drafts} drafts, got {given}")
    starts.check_length(setup.rows.length, drafts)
    whole = dataclasses.replace(recipe, depth=depth)
    # A report on all of them would cost as much as a third of what is trained, and more where rows are long.
    part = dataclasses.replace(whole, reported=_REPORTED)
    return command.fit(setup, part, head, kind=kind, extra_record=settings, held_out=whole)
