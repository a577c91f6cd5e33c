"""What a drafter would draft after every position of a text, and which of it the target would accept.

Owns what a chain of drafts is, computed for all positions at once, and the rules of acceptance for it and for the trees
that drafts in one pass make; each kind's trainer brings its chains. Must not know kinds, nor the engine: `evaluate`
compares with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp

from jaxspec.drafters.kind import DrafterKind
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.proposals import Ranking, propose_block
from jaxspec.speculation.drafters.walks import walked
from jaxspec.speculation.state import Rows
from jaxspec.tier import Tier
from jaxspec.train.data.batch import Batch
from jaxspec.train.objective.chunks import best_tokens, map_positions
from jaxspec.train.objective.ttt import unroll
from pallas_kernels.rejection_sampling.reference import follow


@dataclasses.dataclass(frozen=True)
class Chain:
    """Drafts after every position, the text given as the drafts before.

    Attributes:
      hidden: for each draft i, [B, N, E] with N = T - 1 - D: at n, about token n + 2 + i, where the target itself gave
        token n + 1.
      logits: of the hidden states of each draft, float32 over the draft vocabulary; those of a whole batch are large.
      target_ids_V: the target's id of each draft id; None where the vocabularies are equal.
      vocab_size: of the drafts.
      one_pass: whether no draft depends on those before it.
      walk: where a draft depends on the one before alone, the head that says how; of its hidden states, joined with
        what the tokens before make of them, are these.
    """

    hidden: list[jax.Array]
    logits: list[Callable[[jax.Array], jax.Array]]
    target_ids_V: jax.Array | None
    vocab_size: int
    one_pass: bool = False
    walk: Any = None


class Trainer(Protocol):
    """A command that trains one kind of drafter or several: a module of this package."""

    def add_arguments(self, p: argparse.ArgumentParser) -> None: ...

    def main(self, args: argparse.Namespace) -> dict[str, Any]:
        """Trains, writes the drafter and returns the record that lies beside it as training.json."""
        ...

    def chain(self, module: Any, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> Chain:
        """What a module drafts on a batch; aux_BTA: the target's streams that the kind's `aux_layers` names."""
        ...


def trainer_of(kind: DrafterKind[Any]) -> Trainer:
    """The trainer of a kind.

    Raises:
      ValueError: it has none.
    """
    if kind.trainer is None:
        raise ValueError(f"a drafter of kind {kind.name!r} has no trainer, which would know what it drafts on a text")
    return cast(Trainer, importlib.import_module(kind.trainer))


def with_room(x_BTE: jax.Array, batch: Batch, depth: int, start: int = 0) -> jax.Array:
    """As many positions, from `start` on, as have a whole round after them in the batch's rows, [B, N, E]."""
    return jax.lax.slice_in_dim(x_BTE, start, start + batch.tokens_BT.shape[1] - 1 - depth, axis=1)


def head_chain(head: Any, batch: Batch, states: Sequence[jax.Array], *, one_pass: bool = False) -> Chain:
    """The chain of a FeatureHead from its hidden states for each draft i, which at n are about token n + 2 + i."""
    cfg, depth = head.config, len(states)
    ids_V = None if cfg.draft_vocab_size == cfg.vocab_size else head.target_ids[...]
    hidden = [with_room(x, batch, depth) for x in states]
    return Chain(hidden, [head.logits] * depth, ids_V, cfg.draft_vocab_size, one_pass)


def unrolled(head: Any, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> Chain:
    """The chain of a FeatureHead that drafts token by token; see Trainer.chain."""
    assert aux_BTA is not None
    return head_chain(head, batch, unroll(head, batch, aux_BTA, depth))


def greedy_matches(chain: Chain, target: TargetModel, hidden_BTE: jax.Array) -> jax.Array:
    """Whether each draft is the target's own greedy choice, bool [B, N, D].

    Args:
      hidden_BTE: the target's, after its final norm.
    """
    best_BT, matches = best_tokens(target, hidden_BTE), []
    for i, (hidden_BNE, logits) in enumerate(zip(chain.hidden, chain.logits, strict=True)):

        def part(hidden_BnE: jax.Array, best_Bn: jax.Array, logits: Any = logits) -> jax.Array:
            choice_Bn = jnp.argmax(logits(hidden_BnE), axis=-1)
            return (choice_Bn if chain.target_ids_V is None else chain.target_ids_V[choice_Bn]) == best_Bn

        best_BN = jax.lax.slice_in_dim(best_BT, i + 1, i + 1 + hidden_BNE.shape[1], axis=1)
        matches.append(map_positions(part, (hidden_BNE, best_BN), chain.vocab_size))
    return jnp.stack(matches, axis=-1)


def coupled_matches(
    chain: Chain, target: TargetModel, hidden_BTE: jax.Array, tokens_BT: jax.Array, temperature: jax.Array,
    key: jax.Array,
) -> jax.Array:  # fmt: skip
    """Draws whether each draft is accepted when target and drafter share their noise, bool [B, N, D].

    The text is what the target drew. With Gumbel noise in common both draw token y with probability
    1 / sum_x max(p_x / p_y, q_x / q_y) (Daliri, Musco, Suresh 2025), so the draft is y with that over p_y.
    """
    matches = []
    for i, (hidden_BNE, logits) in enumerate(zip(chain.hidden, chain.logits, strict=True)):

        def part(
            hidden_BnE: jax.Array, target_BnE: jax.Array, drawn_Bn: jax.Array, uniform_Bn: jax.Array,
            logits: Any = logits,
        ) -> jax.Array:  # fmt: skip
            p_BnV = jax.nn.log_softmax(target.logits(target_BnE) / temperature, axis=-1)
            own_BnV = logits(hidden_BnE)
            if chain.target_ids_V is not None:
                own_BnV = jnp.full(p_BnV.shape, -jnp.inf, jnp.float32).at[..., chain.target_ids_V].set(own_BnV)
            q_BnV = jax.nn.log_softmax(own_BnV / temperature, axis=-1)
            own_p, own_q = (jnp.take_along_axis(x, drawn_Bn[..., None], axis=-1) for x in (p_BnV, q_BnV))
            ratio_BnV = jnp.maximum(p_BnV - own_p, jnp.where(jnp.isneginf(own_q), jnp.inf, q_BnV - own_q))
            return uniform_Bn < jnp.exp(-jax.nn.logsumexp(ratio_BnV, axis=-1) - own_p[..., 0])

        count = hidden_BNE.shape[1]
        of = lambda x, start, count=count: jax.lax.slice_in_dim(x, start, start + count, axis=1)
        uniform_BN = jax.random.uniform(jax.random.fold_in(key, i), hidden_BNE.shape[:2])
        arrays = (hidden_BNE, of(hidden_BTE, i + 1), of(tokens_BT, i + 2), uniform_BN)
        matches.append(map_positions(part, arrays, 3 * target.config.vocab_size))
    return jnp.stack(matches, axis=-1)


def tree_matches(
    chain: Chain, tier: Tier, target: TargetModel, hidden_BTE: jax.Array, tokens_BT: jax.Array,
    temperature: jax.Array | None = None, key: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Whether the tree after every position holds the target's tokens up to each depth, bool [B, N, D].

    Trees are those that the engine drafts. At a temperature the text is what the target drew, and the noise that it
    shares with them is drawn given that text: the largest of perturbed logits tells nothing of which it is, and the
    others lie below it (Maddison, Tarlow, Minka 2014).

    Args:
      temperature, key: of sampled text; None: the target's own greedy choices are what counts.

    Raises:
      ValueError: drafts that depend on those before them, or a tier that is deeper than the chain or wider than what
        can be drafted.
    """
    head = chain.walk
    if not chain.one_pass and head is None:
        raise ValueError(f"trees are simulated of drafters that draft in one pass, and this one does not; got {tier}")
    if tier.depth > len(chain.hidden) or tier.topk > chain.vocab_size:
        raise ValueError(
            f"trees may be at most {len(chain.hidden)} deep with topk {chain.vocab_size}, which this drafter can "
            f"propose, got {tier}"
        )
    count, ids_V, vocab_size = chain.hidden[0].shape[1], chain.target_ids_V, target.config.vocab_size
    of = lambda x, start: jax.lax.slice_in_dim(x, start, start + count, axis=1)
    at = range(tier.depth)
    if temperature is None:
        best_BT = best_tokens(target, hidden_BTE)
        right_BND, theirs = jnp.stack([of(best_BT, i + 1) for i in at], axis=-1), ()
    else:
        assert key is not None
        right_BND = jnp.stack([of(tokens_BT, i + 2) for i in at], axis=-1)
        keys_BN = jax.random.key_data(jax.random.split(key, right_BND.shape[:2]))
        theirs = (keys_BN, *(of(hidden_BTE, i + 1) for i in at))
    hidden, logits = chain.hidden[: tier.depth], chain.logits
    if head is not None:
        hidden = [x[..., : head.config.layer.hidden_size] for x in hidden]
        logits = [head.logits] * tier.depth

    def part(right_BnD: jax.Array, root_Bn: jax.Array, *arrays: jax.Array) -> jax.Array:
        b, n, d = right_BnD.shape
        rows = lambda x: x.reshape(b * n, *x.shape[2:])
        scores = []
        for i in at:
            score_RV = rows(logits[i](arrays[i]))
            if temperature is not None:
                key_R = jax.vmap(lambda data, i=i: jax.random.fold_in(jax.random.wrap_key_data(data), i))(
                    rows(arrays[d])
                )
                p_RV = jax.nn.log_softmax(rows(target.logits(arrays[d + 1 + i])) / temperature, axis=-1)
                noise_RV = _noise_given(p_RV, rows(right_BnD)[:, i], key_R)
                score_RV = score_RV / temperature + (noise_RV if ids_V is None else noise_RV[:, ids_V])
            scores.append(score_RV)
        scores_RDV, none_R, root_R = jnp.stack(scores, axis=1), jnp.zeros((b * n,), jnp.int32), rows(root_Bn)
        ranking = Ranking(Rows(none_R, none_R == 0, none_R[:, None], none_R, root_R), None, None, vocab_size, ids_V)
        if head is None:
            tree = propose_block(scores_RDV, ranking, tier, sample=False)
        else:
            hidden_RDE = jnp.stack([rows(x) for x in arrays[:d]], axis=1)
            tree, _ = walked(head, root_R, hidden_RDE, scores_RDV, ranking, tier, temperature=temperature)
        # Off the text's own path it does not matter what would be right, and the deepest nodes have no children.
        right_RN = jnp.take_along_axis(rows(right_BnD), jnp.minimum(tree.depths_BN, d - 1), axis=1)
        sound_RN = jnp.ones(right_RN.shape, bool)
        verdict = follow(
            right_RN, sound_RN, tree.tokens_BN, tree.parents_BN, tree.depths_BN, depth=d, chain=tier.is_chain
        )
        return (verdict.num_accepted_B[:, None] > jnp.arange(d)[None]).reshape(b, n, d)

    arrays = (right_BND, of(tokens_BT, 1), *hidden, *theirs)
    return map_positions(part, arrays, 4 * tier.depth * vocab_size)


def _noise_given(logprobs_RV: jax.Array, drawn_R: jax.Array, key_R: jax.Array) -> jax.Array:
    """Gumbel noise with which each row draws the token that it drew, [R, V]."""
    v = logprobs_RV.shape[1]
    fresh_RV = jax.vmap(lambda key: jax.random.gumbel(key, (v + 1,)))(key_R)
    largest_R1, others_RV = fresh_RV[:, v:], logprobs_RV + fresh_RV[:, :v]
    below_RV = -jnp.logaddexp(-largest_R1, -others_RV)
    return jnp.where(jnp.arange(v)[None] == drawn_R[:, None], largest_R1, below_RV) - logprobs_RV
