"""Two sources of drafts, one choice for each row and round: a model's draft, or what a suffix match goes on with.

The model drafts as it would alone, so its cache is the same; each row then keeps the draft that promises more accepted
tokens. Both promises rest on what the text showed of either source, whichever was chosen (`track_record`). Tiers that
only look up run no model at all. Under coupled verification the text is the same under any choice.
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
from jaxspec.speculation.tree import DraftTree
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
            tree = _either(_spread(tree, tier, self.matcher.vocab_size), drafted, tier)
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


def _spread(chain: DraftTree, tier: Tier, nothing: int) -> DraftTree:
    """A chain in the tier's shape; the nodes that are left are children of the root with the token `nothing`."""
    left = tier.num_nodes - tier.depth - 1
    if not left:
        return chain
    assert chain.confidence_BN is not None
    pad = lambda x, value: jnp.pad(x, ((0, 0), (0, left)), constant_values=value)
    n = tier.num_nodes
    ancestors = jnp.pad(chain.ancestors_BNN, ((0, 0), (0, left), (0, left)))
    alone_NN = jnp.eye(n, dtype=bool) | (jnp.arange(n) == 0)[None, :]
    return DraftTree(
        pad(chain.tokens_BN, nothing), pad(chain.parents_BN, 0), pad(chain.depths_BN, 1),
        jnp.where((jnp.arange(n) > tier.depth)[None, :, None], alone_NN[None], ancestors), None,
        pad(chain.confidence_BN, 0.0),
    )  # fmt: skip
