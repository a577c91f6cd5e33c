"""Two sources of drafts, one choice for each row and round: a model's draft, or what a suffix match goes on with.

The model drafts as it would alone, so its cache is the same. Of two chains each row then keeps the one that promises
more accepted tokens; a tree has room for both, so the match's chain is grafted onto the model's tree, and the likeliest
nodes of the two stay. All promises rest on what the text showed of either source, whichever was chosen
(`track_record`). Tiers that only look up run no model at all. Under coupled verification the text is the same under any
choice.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.speculation import budget
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.drafters import suffix
from jaxspec.speculation.drafters.suffix import SuffixMatcher, SuffixState
from jaxspec.speculation.drafters.track_record import NOTHING, Proposal, TrackRecord
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree, ancestors
from jaxspec.tier import Tier

#: The sources, in the record's order.
_SUFFIX, _MODEL = 0, 1
#: Confidences from which a kind of the model's drafts begins, at each of the first depths; deeper ones are as the last.
_CONFIDENCES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_DEPTHS = 4
#: By how much the matches have to promise more: of two estimates the larger one errs upwards.
_MARGIN = 1.05
_CELLS = suffix.CELLS + _DEPTHS * (len(_CONFIDENCES) + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridState:
    """Attributes:
    suffix: of the matcher, with the record of both. model: the other drafter's.
    """

    suffix: SuffixState
    model: Any


class HybridDrafter:
    """Drafts by `model` or by the matcher, whichever promises more."""

    def __init__(self, model: Drafter[Any, Any], matcher: SuffixMatcher):
        self.model, self.matcher = model, matcher
        self.aux_layers, self.lookahead = model.aux_layers, model.lookahead
        self.lags, self.extends_by_params = model.lags, model.extends_by_params
        self.supports_trees, self.max_topk = model.supports_trees, model.max_topk
        self.window, self.catch_up_tokens = model.window, model.catch_up_tokens

    @property
    def corpus_tokens(self) -> int:
        return self.matcher.corpus_tokens

    def init_state(self, geo: Geometry) -> HybridState:
        return HybridState(self.matcher.init_state(geo, _CELLS, 2), self.model.init_state(geo))

    def admit(self, draft: HybridState, slot_B: jax.Array, cached_B: jax.Array) -> HybridState:
        return HybridState(self.matcher.admit(draft.suffix, slot_B), self.model.admit(draft.model, slot_B, cached_B))

    def remember(self, draft: HybridState, tokens_L: jax.Array, count: jax.Array) -> HybridState:
        return dataclasses.replace(draft, suffix=self.matcher.remember(draft.suffix, tokens_L, count))

    def forget(self, draft: HybridState) -> HybridState:
        return dataclasses.replace(draft, suffix=self.matcher.forget(draft.suffix))

    def prefill(
        self, params: Any, draft: HybridState, text: Ragged, tokens_1T: jax.Array, aux_1TA: jax.Array | None
    ) -> HybridState:
        return dataclasses.replace(draft, model=self.model.prefill(params, draft.model, text, tokens_1T, aux_1TA))

    def catch_up(self, params: Any, draft: HybridState, rows: Rows, tokens_SL: jax.Array) -> HybridState:
        return dataclasses.replace(draft, model=self.model.catch_up(params, draft.model, rows, tokens_SL))

    def extend(
        self, params: Any, draft: HybridState, rows: Rows, aux_BDA: jax.Array | None, count_B: jax.Array
    ) -> HybridState:
        return dataclasses.replace(draft, model=self.model.extend(params, draft.model, rows, aux_BDA, count_B))

    def draft(
        self, params: Any, draft: HybridState, rows: Rows, tokens_SL: jax.Array, tier: Tier,
        sampling: SamplingState | None, noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, HybridState]:  # fmt: skip
        assert not sample, "a choice between drafts is exact for deterministic ones"
        record, model_state = draft.suffix.record.judged(rows, tokens_SL), draft.model
        state = dataclasses.replace(draft.suffix, record=record)
        state, proposal = self.matcher.propose(state, rows, tokens_SL, tier.depth)
        tree = suffix.chain_of(rows, proposal, record.departure(rows, _SUFFIX))
        other = None
        if not tier.lookup:
            drafted, model_state = self.model.draft(
                params, draft.model, rows, tokens_SL, tier, sampling, noise_BDV, False
            )
            drafted, other = _weighed(drafted, rows, record, tier)
            tree = _either(tree, drafted, tier) if tier.is_chain else _grafted(tree, drafted, tier)
        record = record.proposed(rows, [proposal, other])
        return tree, HybridState(dataclasses.replace(state, record=record), model_state)


def _weighed(tree: DraftTree, rows: Rows, record: TrackRecord, tier: Tier) -> tuple[DraftTree, Proposal]:
    """The model's draft with calibrated confidences, and its likeliest path."""
    assert tree.confidence_BN is not None
    said_BN = jnp.where(jnp.isnan(tree.confidence_BN), 0.0, tree.confidence_BN)
    kind_BN = sum((said_BN >= edge).astype(jnp.int32) for edge in _CONFIDENCES)
    depth_BN = jnp.clip(tree.depths_BN - 1, 0, _DEPTHS - 1)
    cells_BN = suffix.CELLS + depth_BN * (len(_CONFIDENCES) + 1) + kind_BN
    chance_BN = record.chance(cells_BN, said_BN)
    mine_BN = jnp.clip(chance_BN * record.departure(rows, _MODEL)[:, None], 0.0, 1.0)
    weighed = dataclasses.replace(tree, confidence_BN=jnp.where(tree.depths_BN == 0, 1.0, mine_BN))
    if tier.is_chain:
        return weighed, Proposal(tree.tokens_BN[:, 1:], cells_BN[:, 1:], chance_BN[:, 1:])
    node_B1, nodes = jnp.zeros((tree.tokens_BN.shape[0], 1), jnp.int32), []
    dead_B1 = node_B1 > 0
    for depth in range(1, tier.depth + 1):
        child_BN = (tree.parents_BN == node_B1) & (tree.depths_BN == depth)
        node_B1 = jnp.argmax(jnp.where(child_BN, chance_BN, -1.0), axis=1, keepdims=True).astype(jnp.int32)
        dead_B1 = dead_B1 | ~jnp.any(child_BN, axis=1, keepdims=True)
        nodes.append(jnp.where(dead_B1, 0, node_B1))
    path_BD = jnp.concatenate(nodes, axis=1)
    along = lambda x_BN, none: jnp.where(path_BD > 0, jnp.take_along_axis(x_BN, path_BD, axis=1), none)
    return weighed, Proposal(along(tree.tokens_BN, -1), along(cells_BN, NOTHING), along(chance_BN, 0.0))


def _promise(tree: DraftTree, tier: Tier) -> jax.Array:
    """Tokens that a round is expected to bring, [B]: paths of a tree exclude one another."""
    assert tree.confidence_BN is not None
    return budget.survival(tree.confidence_BN, tree.parents_BN, tier.depth).sum(axis=1)


def _either(chain: DraftTree, drafted: DraftTree, tier: Tier) -> DraftTree:
    """Of each row the draft that promises more."""
    better_B = _promise(chain, tier) > _MARGIN * _promise(drafted, tier)
    pick = lambda a, b: jnp.where(better_B.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    return DraftTree(
        pick(chain.tokens_BN, drafted.tokens_BN), pick(chain.parents_BN, drafted.parents_BN),
        pick(chain.depths_BN, drafted.depths_BN), pick(chain.ancestors_BNN, drafted.ancestors_BNN), None,
        pick(chain.confidence_BN, drafted.confidence_BN),
    )  # fmt: skip


def _grafted(chain: DraftTree, drafted: DraftTree, tier: Tier) -> DraftTree:
    """Of each row the likeliest nodes of the model's tree and of the chain together, in the tier's shape.

    As far as the chain repeats a path of the tree they are the same nodes, and as likely as the likelier source says.
    """
    assert chain.confidence_BN is not None and drafted.confidence_BN is not None
    b, n = drafted.tokens_BN.shape
    at_B1 = jnp.zeros((b, 1), jnp.int32)
    repeats_B1, p_BN = at_B1 == 0, drafted.confidence_BN
    index_1N = jnp.arange(n, dtype=jnp.int32)[None]
    parents, own = [], []
    for depth in range(1, tier.depth + 1):
        said_B1 = chain.confidence_BN[:, depth : depth + 1] / _MARGIN
        same_BN = (drafted.parents_BN == at_B1) & (drafted.tokens_BN == chain.tokens_BN[:, depth : depth + 1])
        same_BN = same_BN & (index_1N > 0) & repeats_B1
        repeats_B1 = jnp.any(same_BN, axis=1, keepdims=True)
        p_BN = jnp.where(same_BN, jnp.maximum(p_BN, said_B1), p_BN)
        parents.append(at_B1)
        own.append(jnp.where(repeats_B1, 0.0, said_B1))  # of one that the tree has already nothing is left
        at_B1 = jnp.where(repeats_B1, jnp.argmax(same_BN, axis=1, keepdims=True).astype(jnp.int32), n + depth - 1)
    both = lambda ours_BN, theirs: jnp.concatenate([ours_BN, *theirs], axis=1)
    tokens_BM = both(drafted.tokens_BN, [chain.tokens_BN[:, 1:]])
    parents_BM, p_BM = both(drafted.parents_BN, parents), both(p_BN, own)
    depths_BM = both(drafted.depths_BN, [chain.depths_BN[:, 1:]])
    # No node is likelier than its parent, which comes first, and of equal ones the first is taken: so they are a tree.
    survival_BM = budget.survival(p_BM, parents_BM, tier.depth)
    _, chosen_BN = jax.lax.top_k(survival_BM[:, 1:], n - 1)
    chosen_BN = jnp.pad(jnp.sort(chosen_BN.astype(jnp.int32) + 1, axis=1), ((0, 0), (1, 0)))
    of = lambda x_BM: jnp.take_along_axis(x_BM, chosen_BN, axis=1)
    place_BN = jnp.argmax(chosen_BN[:, None, :] == of(parents_BM)[:, :, None], axis=2).astype(jnp.int32)
    return DraftTree(
        of(tokens_BM), place_BN, of(depths_BM), ancestors(place_BN, tier.depth), None, of(p_BM)
    )  # fmt: skip
