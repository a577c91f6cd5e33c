"""Two sources of drafts, one choice for each row and round: a model's draft, or what a suffix match goes on with.

The model drafts as it would alone, so its cache is the same. Of two chains each row then keeps the one that promises
more accepted tokens; a tree has room for both, so the match's chain is grafted onto the model's tree, and the likeliest
nodes of the two stay. A token more of a match costs no pass, so the model may stop at a depth from which matches go on.
All promises rest on what the text showed of either source, whichever was chosen (`track_record`). Tiers that only look
up run no model at all. Under coupled verification the text is the same under any choice.
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
from jaxspec.speculation.drafters.track_record import NOTHING, Proposal, TrackRecord, departure
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree, ancestors
from jaxspec.tier import Tier, max_nodes

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
    """Drafts by `model` or by the matcher, whichever promises more.

    Attributes:
      chain_depth, tree_depth: most tokens in a row that the model drafts in chains and in trees; None: as many as the
        tier.
    """

    def __init__(
        self, model: Drafter[Any, Any], matcher: SuffixMatcher, chain_depth: int | None = None,
        tree_depth: int | None = None,
    ):  # fmt: skip
        self.model, self.matcher, self.chain_depth, self.tree_depth = model, matcher, chain_depth, tree_depth
        self.stepwise = model.stepwise
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
        (record, sums_BA2), model_state = draft.suffix.record.judged(rows, tokens_SL), draft.model
        state = dataclasses.replace(draft.suffix, record=record)
        proposal = self.matcher.propose(state, rows, tokens_SL, tier.depth)
        tree = suffix.chain_of(rows, proposal, departure(sums_BA2, _SUFFIX))
        other = None
        if not tier.lookup:
            own = _up_to(tier, self.chain_depth if tier.is_chain else self.tree_depth)
            drafted, model_state = self.model.draft(
                params, draft.model, rows, tokens_SL, own, sampling, noise_BDV, False
            )
            drafted, other = _weighed(drafted, record, departure(sums_BA2, _MODEL), own)
            drafted = _filled(drafted, tier, self.matcher.vocab_size)
            tree = _either(tree, drafted, tier) if tier.is_chain else _grafted(tree, drafted, tier)
        record = record.proposed(rows, sums_BA2, [proposal, other])
        return tree, HybridState(dataclasses.replace(state, record=record), model_state)


def _up_to(tier: Tier, depth: int | None) -> Tier:
    """The tier, no deeper than that."""
    if depth is None or depth >= tier.depth:
        return tier
    return Tier(depth, tier.topk, min(tier.num_nodes, max_nodes(depth, tier.topk)))


def _filled(tree: DraftTree, tier: Tier, nothing: int) -> DraftTree:
    """With as many nodes as the tier has: those that are added propose nothing, and promise nothing."""
    missing = tier.num_nodes - tree.tokens_BN.shape[1]
    if not missing:
        return tree
    more = lambda x_BN, value: jnp.pad(x_BN, ((0, 0), (0, missing)), constant_values=value)
    tokens_BN, confidence_BN = more(tree.tokens_BN, nothing), more(tree.confidence_BN, 0.0)
    if tier.is_chain:
        return DraftTree.chain(tokens_BN, confidence_BN=confidence_BN)
    parents_BN = more(tree.parents_BN, 0)
    return DraftTree(
        tokens_BN, parents_BN, more(tree.depths_BN, 1), ancestors(parents_BN, tier.depth), None, confidence_BN
    )


def _weighed(
    tree: DraftTree, record: TrackRecord, departure_B: jax.Array, tier: Tier
) -> tuple[DraftTree, Proposal]:  # fmt: skip
    """The model's draft with calibrated confidences, and its likeliest path."""
    assert tree.confidence_BN is not None
    said_BN = jnp.where(jnp.isnan(tree.confidence_BN), 0.0, tree.confidence_BN)
    kind_BN = sum((said_BN >= edge).astype(jnp.int32) for edge in _CONFIDENCES)
    depth_BN = jnp.clip(tree.depths_BN - 1, 0, _DEPTHS - 1)
    cells_BN = suffix.CELLS + depth_BN * (len(_CONFIDENCES) + 1) + kind_BN
    chance_BN = record.chance(cells_BN, said_BN)
    mine_BN = jnp.clip(chance_BN * departure_B[:, None], 0.0, 1.0)
    weighed = dataclasses.replace(tree, confidence_BN=jnp.where(tree.depths_BN == 0, 1.0, mine_BN))
    if tier.is_chain:
        return weighed, Proposal(tree.tokens_BN[:, 1:], cells_BN[:, 1:], chance_BN[:, 1:])
    # From the root down the likeliest child, the first of equal ones: where no node is one that a sibling surpasses.
    above_BNN = _comes_first(chance_BN)
    parents_BN = jnp.where(tree.depths_BN > 0, tree.parents_BN, -1)  # the root has no siblings
    siblings_BNN = parents_BN[:, :, None] == parents_BN[:, None, :]
    surpassed_BN = jnp.any(above_BNN & siblings_BNN, axis=1)
    path_BD = _nodes_along(tree, ~surpassed_BN, tier.depth)
    along = lambda x_BN, none: jnp.where(path_BD > 0, jnp.take_along_axis(x_BN, path_BD, axis=1), none)
    return weighed, Proposal(along(tree.tokens_BN, -1), along(cells_BN, NOTHING), along(chance_BN, 0.0))


def _nodes_along(tree: DraftTree, on_BN: jax.Array, depth: int) -> jax.Array:
    """The node at each depth from 1 of the path whose nodes are all `on_BN`, the root included; 0 after its end.

    There has to be no more than one such path.
    """
    whole_BN = ~jnp.any(tree.ancestors_BNN & ~on_BN[:, None, :], axis=2)
    index_1N1 = jnp.arange(on_BN.shape[1], dtype=jnp.int32)[None, :, None]
    step_11D = jnp.arange(1, depth + 1, dtype=jnp.int32)[None, None]
    return jnp.where(whole_BN[:, :, None] & (tree.depths_BN[:, :, None] == step_11D), index_1N1, 0).max(axis=1)


def _comes_first(value_BN: jax.Array) -> jax.Array:
    """Whether node n comes before node m, [B, n, m]: by the higher value, of equal ones the first."""
    index_N = jnp.arange(value_BN.shape[1], dtype=jnp.int32)
    one_BN1, other_B1N = value_BN[:, :, None], value_BN[:, None, :]
    return (one_BN1 > other_B1N) | ((one_BN1 == other_B1N) & (index_N[:, None] < index_N[None])[None])


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
    n, deepest = drafted.tokens_BN.shape[1], tier.depth
    said_BN, step_1D = chain.confidence_BN / _MARGIN, jnp.arange(deepest, dtype=jnp.int32)[None]
    along = lambda x_BN: jnp.take_along_axis(x_BN, drafted.depths_BN, axis=1)
    same_BN = (drafted.tokens_BN == along(chain.tokens_BN)) | (drafted.depths_BN == 0)
    at_BD = _nodes_along(drafted, same_BN, deepest)
    repeats_BD = at_BD > 0
    index_1M = jnp.arange(n + deepest, dtype=jnp.int32)[None]
    mine_BN = jnp.any(at_BD[:, None, :] == index_1M[:, :n, None], axis=2) & (index_1M[:, :n] > 0)
    p_BN = jnp.where(mine_BN, jnp.maximum(drafted.confidence_BN, along(said_BN)), drafted.confidence_BN)
    own_BD = jnp.where(repeats_BD, 0.0, said_BN[:, 1:])  # of one that the tree has already nothing is left
    at_BD = jnp.where(repeats_BD, at_BD, n + step_1D)
    both = lambda *parts: jnp.concatenate(parts, axis=1)
    tokens_BM = both(drafted.tokens_BN, chain.tokens_BN[:, 1:])
    depths_BM = both(drafted.depths_BN, chain.depths_BN[:, 1:])
    parents_BM = both(drafted.parents_BN, jnp.pad(at_BD[:, :-1], ((0, 0), (1, 0))))
    p_BM = both(p_BN, own_BD)
    # No node is likelier than its parent, which comes first, and of equal ones the first is taken: so they are a tree,
    # the root among them. They are counted, not sorted: there are few.
    survival_BM = budget.survival(p_BM, parents_BM, deepest)
    kept_BM = _comes_first(survival_BM).sum(axis=1, dtype=jnp.int32) < n
    place_BM = (kept_BM[:, :, None] & (index_1M[0, :, None] < index_1M)[None]).sum(axis=1, dtype=jnp.int32)
    into_BNM = kept_BM[:, None, :] & (place_BM[:, None, :] == index_1M[:, :n, None])
    chosen_BN = jnp.where(into_BNM, index_1M[:, None], 0).max(axis=2)
    of = lambda x_BM, at_BN: jnp.take_along_axis(x_BM, at_BN, axis=1)
    parents_BN = of(place_BM, of(parents_BM, chosen_BN))
    return DraftTree(
        of(tokens_BM, chosen_BN), parents_BN, of(depths_BM, chosen_BN), ancestors(parents_BN, deepest), None,
        of(p_BM, chosen_BN),
    )  # fmt: skip
