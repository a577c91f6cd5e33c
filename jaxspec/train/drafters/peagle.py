"""`python -m jaxspec.train peagle`: a head that drafts all positions in one pass, on sampled anchors (P-EAGLE).

A chain starts at an anchor n: slot 0 is EAGLE-3's entry (the token at n + 1 and the target's features at n), slots 1,
2, .. hold the mask token and the learned feature. Slot d has rotary position n + d, sees the slots 0 of its text up to
n and its own chain up to itself, and is about token n + 2 + d. There is no training-time test: nothing is fed back.
Every position is an anchor at depth 0; deeper slots are trained for a nested sample of anchors that shrinks with the
depth (conditional-on-distribution sampling), or memory would grow with depth times length.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.base import FULL_ATTENTION, Attend, AttentionOptions, TargetModel
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import drafts, eagle, starts
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective.attention import packed_attention
from jaxspec.train.objective.chunks import best_tokens, draft_vocabulary_logits, map_positions
from jaxspec.train.objective.loss import masked_mean, soft_cross_entropy
from jaxspec.train.run import command

#: Of a new head; None: the target's.
GEOMETRY = {
    "layers": 4, "hidden_size": None, "intermediate_size": None, "heads": None, "kv_heads": None, "head_dim": None,
    "aux_layers": None, "draft_vocab_size": None, "coverage": 0.985, "mask_token": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Slots:
    """Which slots of which chains a forward pass holds, S = N + sum(sizes) a row.

    Attributes:
      anchors_BK: int32, chains that go beyond depth 0, the ones that go deepest first; K = sizes[0].
      sizes: how many of them, from the left, have a slot at depth 1, 2, ..; never increasing.
    """

    anchors_BK: jax.Array
    sizes: tuple[int, ...]

    @classmethod
    def every(cls, batch: int, count: int, depth: int) -> Slots:
        """All anchors at all of `depth` depths."""
        anchors_BN = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None, :], (batch, count))
        return cls(anchors_BN, (count,) * (depth - 1))

    def concatenate(self, first_BN: jax.Array, deeper: Callable[[int, jax.Array], jax.Array]) -> jax.Array:
        """[B, S, ...] of what depth 0 holds and of deeper(depth, its anchors)."""
        parts = [deeper(d, self.anchors_BK[:, :size]) for d, size in enumerate(self.sizes, start=1)]
        return jnp.concatenate([first_BN, *parts], axis=1)

    def gather(self, values_BT: jax.Array, ahead: int) -> jax.Array:
        """Values [B, T, ...] at anchor + depth + ahead of each slot, [B, S, ...]; beyond a row's end its last."""
        length = values_BT.shape[1]
        end = jnp.int32(length - 1)
        pick = lambda d, anchors: _take(values_BT, jnp.minimum(anchors + jnp.int32(d + ahead), end))
        first = jnp.arange(length - 1, dtype=jnp.int32)[None, :] + jnp.zeros((values_BT.shape[0], 1), jnp.int32)
        return self.concatenate(pick(0, first), pick)

    def chains(self, slots_BS: jax.Array) -> jax.Array:
        """Slots beyond depth 0 as chains, [B, K, D - 1, ...]; zeros where a chain has ended."""
        first = slots_BS.shape[1] - sum(self.sizes)
        parts, start = [], first
        for size in self.sizes:
            part = slots_BS[:, start : start + size]
            parts.append(jnp.pad(part, [(0, 0), (0, self.sizes[0] - size)] + [(0, 0)] * (part.ndim - 2)))
            start += size
        return jnp.stack(parts, axis=2)

    def unchain(self, chains_BKD: jax.Array) -> jax.Array:
        """The inverse of `chains`, [B, sum(sizes), ...]."""
        return jnp.concatenate([chains_BKD[:, :size, d] for d, size in enumerate(self.sizes)], axis=1)


def _take(values_BT: jax.Array, index_BN: jax.Array) -> jax.Array:
    return jax.vmap(lambda values, index: values[index])(values_BT, index_BN)


def sample_slots(key: jax.Array, valid_BND: jax.Array, sizes: tuple[int, ...]) -> Slots:
    """A nested uniform sample of anchors, those first that still have something to predict.

    Args:
      valid_BND: whether slot d of the chain at n counts in the loss; D - 1 = len(sizes).
    """
    batch, count, _ = valid_BND.shape
    luck_BN = jax.random.uniform(key, (batch, count))
    kept_BN = jnp.ones((batch, count), bool)
    depth_BN = jnp.zeros((batch, count), jnp.int32)
    for d, size in enumerate(sizes, start=1):
        score_BN = jnp.where(kept_BN, luck_BN + valid_BND[..., d].astype(jnp.float32), -1.0)
        least_B1 = jax.lax.top_k(score_BN, size)[0][:, -1:]
        kept_BN = kept_BN & (score_BN >= least_B1)
        depth_BN = depth_BN + kept_BN.astype(jnp.int32)
    if not sizes:
        return Slots(jnp.zeros((batch, 0), jnp.int32), ())
    # Equal scores may keep one too many at a depth; the order makes it the one that is cut off.
    return Slots(jnp.argsort(-depth_BN, axis=1, stable=True)[:, : sizes[0]].astype(jnp.int32), sizes)


def forward_slots(head: Eagle3Head, batch: Batch, aux_BTA: jax.Array, slots: Slots) -> jax.Array:
    """Hidden states of every slot in one pass of the head, [B, S, E]; `head.logits` reads them. N is T - 1."""
    assert head.mask_hidden is not None and head.config.mask_token_id is not None
    rows, count = batch.tokens_BT.shape[0], batch.tokens_BT.shape[1] - 1
    masked = sum(slots.sizes)
    mask_BS = jnp.full((rows, masked), head.config.mask_token_id, batch.tokens_BT.dtype)
    feature_BNE = head.fuse(aux_BTA[:, :count])
    mask_feature_11E = head.fuse(head.mask_hidden[...][None, None, :].astype(aux_BTA.dtype))
    mask_feature_BSE = jnp.broadcast_to(mask_feature_11E, (rows, masked, feature_BNE.shape[-1]))
    positions_BS = slots.concatenate(
        batch.positions_BT[:, :count],
        lambda d, anchors: _take(batch.positions_BT, anchors) + jnp.int32(d),
    )
    return head(
        jnp.concatenate([batch.tokens_BT[:, 1:], mask_BS], axis=1),
        jnp.concatenate([feature_BNE, mask_feature_BSE], axis=1),
        positions_BS,
        slot_attention(slots, batch.segments_BT[:, :count]),
    )


def slot_attention(slots: Slots, segments_BN: jax.Array) -> Attend:
    """Each slot sees the slots 0 of its text up to its anchor, and its own chain up to itself; one softmax over both.

    Beyond depth 0 the first part is computed for blocks of slots, the second on the chains laid side by side; nothing
    is of [S, S].
    """
    rows, count = segments_BN.shape
    first = packed_attention(segments_BN)
    anchors_BM = slots.concatenate(jnp.zeros((rows, 0), jnp.int32), lambda _, anchors: anchors)
    texts_BM = _take(segments_BN, anchors_BM)
    column_N = jnp.arange(count, dtype=jnp.int32)

    def attend(
        layer: int, q_BSHC: jax.Array, k_BSGC: jax.Array, v_BSGC: jax.Array, options: AttentionOptions = FULL_ATTENTION
    ) -> jax.Array:
        batch, total, heads, channels = q_BSHC.shape
        groups = k_BSGC.shape[2]
        q_BSGRC = q_BSHC.reshape(batch, total, groups, heads // groups, channels)
        q_BSGRC = q_BSGRC * jnp.asarray(channels**-0.5, q_BSHC.dtype)
        k_BNGC, v_BNGC = k_BSGC[:, :count], v_BSGC[:, :count]

        def part(q_BnGRC: jax.Array, anchors_Bn: jax.Array, texts_Bn: jax.Array) -> tuple[jax.Array, jax.Array]:
            seen_BnN = (column_N[None, None, :] <= anchors_Bn[:, :, None]) & (
                segments_BN[:, None, :] == texts_Bn[:, :, None]
            )
            scores = jnp.einsum("bsgrc,bngc->bsgrn", q_BnGRC, k_BNGC, preferred_element_type=jnp.float32)
            return _weighted(scores, seen_BnN[:, :, None, None, :], v_BNGC, "bsgrn,bngc->bsgrc")

        first_BNHC = first(layer, q_BSHC[:, :count], k_BNGC, v_BNGC, options)
        if not slots.sizes:
            return first_BNHC
        text_BMGRC, text_mass = map_positions(part, (q_BSGRC[:, count:], anchors_BM, texts_BM), heads * count)
        q_BKDGRC, k_BKDGC, v_BKDGC = slots.chains(q_BSGRC), slots.chains(k_BSGC), slots.chains(v_BSGC)
        scores = jnp.einsum("bkdgrc,bkegc->bkdgre", q_BKDGRC, k_BKDGC, preferred_element_type=jnp.float32)
        past_DE = jnp.tril(jnp.ones((len(slots.sizes), len(slots.sizes)), bool))
        own, own_mass = _weighted(scores, past_DE[None, None, :, None, None, :], v_BKDGC, "bkdgre,bkegc->bkdgrc")
        own_BMGRC, own_mass = slots.unchain(own), slots.unchain(own_mass)
        share = jax.nn.sigmoid(own_mass - text_mass)[..., None].astype(q_BSHC.dtype)
        deeper_BMGRC = own_BMGRC * share + text_BMGRC * (1 - share)
        return jnp.concatenate([first_BNHC, deeper_BMGRC.reshape(batch, -1, heads, channels)], axis=1)

    return attend


def _weighted(scores: jax.Array, seen: jax.Array, values: jax.Array, einsum: str) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis times the values, and the logarithm of the softmax's denominator."""
    scores = jnp.where(seen, scores, -jnp.inf)
    mass = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - mass[..., None]).astype(values.dtype)
    return jnp.einsum(einsum, weights, values), mass


def one_pass_states(head: Eagle3Head, batch: Batch, aux_BTA: jax.Array, depth: int) -> list[jax.Array]:
    """Hidden states of what the head drafts after every position; `head.logits` reads them.

    Returns:
      For each i below depth [B, T - 1, E]: at n, about token n + 2 + i.
    """
    rows, count = batch.tokens_BT.shape[0], batch.tokens_BT.shape[1] - 1
    return jnp.split(forward_slots(head, batch, aux_BTA, Slots.every(rows, count, depth)), depth, axis=1)


def cod_loss(
    head: Eagle3Head, target: TargetModel, batch: Batch, states: TargetStates, slots: Slots, valid_BS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean over the valid slots of KL(target || head), both on the draft vocabulary, nats.

    All slots weigh the same, so a depth weighs as many slots as were sampled for it (reference: `speculators`).

    Args:
      valid_BS: slots that count; slot d of anchor n is compared with the target's distribution after token n + 1 + d.

    Returns:
      (loss, float32 [D] the mean at each depth).
    """
    assert states.aux_BTA is not None
    hidden_BSE = forward_slots(head, batch, states.aux_BTA, slots)
    target_logits = draft_vocabulary_logits(target, head)

    def part(hidden_BnE: jax.Array, ahead_BnE: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(target_logits(ahead_BnE), axis=-1)
        probs = jnp.exp(log_probs)
        return soft_cross_entropy(head.logits(hidden_BnE), probs) + jnp.sum(probs * log_probs, axis=-1)

    arrays = (hidden_BSE, slots.gather(states.hidden_BTE, 1))
    divergence_BS = map_positions(part, arrays, 2 * head.config.draft_vocab_size)
    edges = [hidden_BSE.shape[1] - sum(slots.sizes)]
    for size in slots.sizes[:-1]:
        edges.append(edges[-1] + size)
    by_depth = zip(jnp.split(divergence_BS, edges, axis=1), jnp.split(valid_BS, edges, axis=1), strict=True)
    return masked_mean(divergence_BS, valid_BS), jnp.stack([masked_mean(x, m) for x, m in by_depth])


@dataclasses.dataclass(frozen=True)
class PeagleRecipe:
    """KL divergence to the target over sampled slots.

    Attributes:
      num_depths: slots of the longest chain, the real one included.
      ratio, floor: at depth d about max(ratio**d, floor) of the positions are anchors (reference: 0.7 and 0.2).
      depth: of the chains whose acceptance is reported. Rounds may start anywhere, so it takes a pass without
        gradients over every anchor: `depth` slots a position beside the 3 to 4 that are trained.
    """

    aux_layers: tuple[int, ...]
    num_depths: int = 8
    ratio: float = 0.7
    floor: float = 0.2
    depth: int = 5

    def __post_init__(self) -> None:
        if self.num_depths < 1:
            raise ValueError(f"num_depths must be at least 1, got {self.num_depths}")
        for name in ("ratio", "floor"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        if not 1 <= self.depth <= self.num_depths:
            raise ValueError(f"depth must lie between 1 and num_depths {self.num_depths}, got {self.depth}")

    def sizes(self, count: int) -> tuple[int, ...]:
        """Anchors at depth 1, 2, .. of rows of `count` positions."""
        return tuple(max(1, round(count * max(self.ratio**d, self.floor))) for d in range(1, self.num_depths))

    def loss(
        self, module: Eagle3Head, target: TargetModel, batch: Batch, states: TargetStates, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """See Recipe; `key` draws the anchors."""
        count = batch.tokens_BT.shape[1] - 1
        valid_BND = valid_slots(batch, self.num_depths)
        slots = sample_slots(key, valid_BND, self.sizes(count))
        valid_BS = slots.concatenate(valid_BND[..., 0], lambda d, anchors: _take(valid_BND[..., d], anchors))
        loss, by_depth = cod_loss(module, target, batch, states, slots, valid_BS)
        metrics = {f"loss_{d + 1}": by_depth[d] for d in range(self.num_depths)}
        graph, state = nnx.split(module)
        frozen = nnx.merge(graph, jax.lax.stop_gradient(state))
        return loss, self.matches(frozen, target, batch, states), metrics

    def matches(self, head: Eagle3Head, target: TargetModel, batch: Batch, states: TargetStates) -> jax.Array:
        """Whether each slot of every chain holds the target's own choice, bool [B, T - 1 - depth, depth]."""
        assert states.aux_BTA is not None
        rows, count = batch.tokens_BT.shape[0], batch.tokens_BT.shape[1] - 1
        ids_V = head.target_ids[...]
        hidden_BSE = forward_slots(head, batch, states.aux_BTA, Slots.every(rows, count, self.depth))
        choice_BS = map_positions(
            lambda hidden: ids_V[jnp.argmax(head.logits(hidden), axis=-1)], (hidden_BSE,), head.config.draft_vocab_size
        )
        best_BT = best_tokens(target, states.hidden_BTE)
        kept = count - self.depth
        same = [
            choice_BS[:, d * count : d * count + kept] == best_BT[:, d + 1 : d + 1 + kept] for d in range(self.depth)
        ]
        return jnp.stack(same, axis=-1)


def valid_slots(batch: Batch, num_depths: int) -> jax.Array:
    """Whether the token that slot d of the chain at n is about is learned and of the same text, bool [B, T - 1, D]."""
    length = batch.tokens_BT.shape[1]
    columns = []
    for d in range(num_depths):
        count = max(0, length - 2 - d)
        valid_BN = batch.learned(d + 2, count) if count else jnp.zeros((batch.tokens_BT.shape[0], 0), bool)
        columns.append(jnp.pad(valid_BN, ((0, 0), (0, length - 1 - count))))
    return jnp.stack(columns, axis=-1)


def chain(module: Eagle3Head, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> drafts.Chain:
    """See drafts.Trainer."""
    assert aux_BTA is not None
    return drafts.head_chain(module, batch, one_pass_states(module, batch, aux_BTA, depth), one_pass=True)


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Geometry not given is the target's."""
    command.add_common_arguments(p)
    p.add_argument("--layers", type=int, help="decoder layers (default: 4, as published heads have)")
    for name in ("hidden-size", "intermediate-size", "heads", "kv-heads", "head-dim"):
        p.add_argument(f"--{name}", type=int, help="default: the target's")
    p.add_argument("--aux-layers", type=int, nargs="+", help="layers whose input is read (default: 2, N/2, N-3)")
    p.add_argument("--draft-vocab-size", type=int, help="default: by --coverage")
    p.add_argument("--coverage", type=float, help="share of the learned tokens that can be drafted (default: 0.985)")
    p.add_argument("--mask-token", help="name or id of the token in drafted positions (default: an unused special one)")
    p.add_argument("--num-depths", type=int, default=8, help="longest chain that is trained")
    p.add_argument("--ratio", type=float, default=0.7, help="anchors kept from one depth to the next")
    p.add_argument("--floor", type=float, default=0.2, help="least share of anchors at any depth")
    p.add_argument("--depth", type=int, default=5, help="drafts a chain in the reported acceptance")


def build(setup: command.Setup, shape: dict[str, Any]) -> Eagle3Head:
    """A new head: an EAGLE-3 head's start (see eagle.new_head), further layers and the placeholder.

    Raises:
      ValueError: sizes, layers or a mask token that do not fit.
    """
    args, target = setup.args, setup.target
    cfg = target.config
    layers = tuple(shape["aux_layers"] or cfg.aux_layers)
    if not all(0 <= i <= cfg.num_layers for i in layers):
        raise ValueError(f"--aux-layers must lie in 0 .. {cfg.num_layers} (the target's), got {layers}")
    used_V = np.bincount(setup.rows.tokens[setup.rows.segments > 0], minlength=cfg.vocab_size)
    mask = starts.mask_token(shape["mask_token"], args.target, setup.tokenizer, used_V)
    target_ids = eagle.draft_vocabulary(setup.token_counts_V, shape["draft_vocab_size"], shape["coverage"])
    print(f"draft vocabulary: {len(target_ids)} tokens; mask token: id {mask}", flush=True)
    head_config = Eagle3Config(
        hidden_size=shape["hidden_size"] or cfg.hidden_size,
        target_hidden_size=cfg.hidden_size,
        intermediate_size=shape["intermediate_size"] or cfg.intermediate_size,
        num_heads=shape["heads"] or cfg.num_heads,
        num_kv_heads=shape["kv_heads"] or cfg.num_kv_heads,
        head_dim=shape["head_dim"] or cfg.head_dim,
        vocab_size=cfg.vocab_size,
        draft_vocab_size=len(target_ids),
        aux_layer_ids=layers,
        num_aux=len(layers),
        num_layers=shape["layers"],
        rms_norm_eps=cfg.rms_norm_eps,
        rope_theta=cfg.rope_theta,
        rope_scaling=cfg.rope_scaling,
        max_position_embeddings=cfg.max_position_embeddings,
        mask_token_id=mask,
    )
    return eagle.new_head(head_config, target, target_ids, args.seed)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out and returns the record.

    Raises:
      ValueError: options out of range or that exclude each other, no mask token, or --init-from that holds another
        drafter.
    """
    starts.check_layout("peagle", args.layout)
    shape = starts.geometry(args, GEOMETRY)
    PeagleRecipe((), args.num_depths, args.ratio, args.floor, args.depth)
    setup = command.prepare(args)
    starts.check_length(setup.rows.length, args.num_depths)
    if args.init_from is not None:
        head = starts.load_initial("peagle", args.init_from, setup.target)
        eagle.set_embedding(head, setup.target, True)  # placeholders need one of their own
        renewed = eagle.renewed(head, setup)
    else:
        head, renewed = build(setup, shape), {}
    recipe = PeagleRecipe(head.config.aux_layer_ids, args.num_depths, args.ratio, args.floor, args.depth)
    extra = {"num_depths": args.num_depths, "ratio": args.ratio, "floor": args.floor, **renewed}
    return command.fit(setup, recipe, head, kind="peagle", extra_record=extra)
