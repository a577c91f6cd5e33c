"""Packed verification: a round whose target computes T tokens, wherever in the batch they are worth most.

The rows draft as always; `budget` chooses T of their nodes, roots included. Embedding, norms, projections, MLP and
lm_head run on those alone, as one row of T tokens. Attention sees the rectangle [B, N] again, with nothing where a
node was left out, which costs it little: it is bound by reading the prefix. The target's own token is drawn at every
packed node just as plain decoding draws it, and the drafts are followed along these tokens; a node that was left out
is no proposal. So the text does not depend on the choice. Must not know policies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import TreeKV
from jaxspec.models.base import FULL_ATTENTION, AttentionOptions, TargetModel, counting_experts, touched
from jaxspec.speculation import budget
from jaxspec.speculation.budget import Selection
from jaxspec.speculation.layouts import Batch, Budget, PackedDrafts
from jaxspec.speculation.round import Drafted, Forward, Phases, RoundSpec, grow_tables
from jaxspec.speculation.sampling import adjust_along, drafted_paths
from jaxspec.speculation.state import DecodeState, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.speculation.verifier import verify
from jaxspec.tier import PLAIN, Tier
from pallas_kernels.rejection_sampling.reference import Verdict, follow


def _pack(x_BN: jax.Array, chosen: Selection) -> jax.Array:
    """Nodes [B, N, ...] as [T, ...]; anything where there is none."""
    return jnp.take(x_BN.reshape(-1, *x_BN.shape[2:]), chosen.node_T, axis=0, mode="clip")


def _unpack(x_T: jax.Array, chosen: Selection) -> jax.Array:
    """Packed nodes [T, ...] as [B, N, ...]; 0 where one was left out."""
    return jnp.take(x_T, chosen.slot_BN, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    spec: RoundSpec, chain: bool, target: Any, state: DecodeState, rows: Rows, tree: DraftTree, chosen: Selection
) -> Forward:
    """The target over the chosen nodes; logits are [1, T, V], keys, values and aux states the rectangle's."""
    model: TargetModel = nnx.merge(spec.graph, target)
    geo = spec.geo
    mask_BNN = None if chain else tree.ancestors_BNN
    kv = TreeKV(state.pages, rows.table_BM, rows.length_B, mask_BNN, geo.num_pages, kernels=geo.attention)

    def attend(
        layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions = FULL_ATTENTION
    ) -> jax.Array:
        q, k, v = (_unpack(x[0], chosen) for x in (q, k, v))
        return _pack(kv.attend(layer, q, k, v, options), chosen)[None]

    tokens_T = _pack(tree.tokens_BN, chosen)
    position_T = _pack(rows.length_B[:, None] + tree.depths_BN, chosen)
    with counting_experts() as mixtures:
        hidden, aux = model(tokens_T[None], position_T[None], attend, spec.aux_layers)
    aux_BNA = None if aux is None else _unpack(aux[0], chosen)
    return Forward(model.logits(hidden), kv.stacked(), aux_BNA, touched(mixtures))


def _choices(
    phases: Phases, state: DecodeState, rows: Rows, drafted: Drafted, chosen: Selection, logits_1TV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The target's own token at every chosen node and whether its logits were finite, [B, N] both."""
    spec, tree = phases.spec, drafted.tree
    b, n = tree.tokens_BN.shape
    adjusted_T1V = logits_1TV[0][:, None]
    row_T = jnp.minimum(chosen.node_T // n, b - 1)
    position_T = _pack(rows.length_B[:, None] + 1 + tree.depths_BN, chosen)
    sampling_T = noise_T1V = None
    if phases.sampled:
        sampling_T = state.sampling.rows(jnp.take(rows.slot_B, row_T))
        path_TM = _pack(drafted_paths(tree.tokens_BN, tree.ancestors_BNN, spec.config.vocab_size), chosen)
        adjusted_T1V = adjust_along(adjusted_T1V, sampling_T, position_T[:, None], path_TM[:, None])
        if drafted.noise_BDV is not None:
            noise_T1V = drafted.noise_BDV[row_T, _pack(tree.depths_BN, chosen)][:, None]
    # T rows of plain decoding.
    alone = DraftTree.chain(jnp.zeros((len(row_T), 1), jnp.int32))
    drawn = verify(
        alone, adjusted_T1V, sampling_T, position_T, PLAIN, noise_BDV=noise_T1V, kernels=spec.geo.kernels
    )  # fmt: skip
    return _unpack(drawn.next_token_B, chosen), _unpack(drawn.finite_B, chosen)


def _labels(
    tree: DraftTree, verdict: Verdict, choice_BN: jax.Array, chosen: Selection, valid_B: jax.Array, vocab_size: int
) -> jax.Array:
    """What a policy learns from, as `PackedDrafts`; of rows that are not valid, nothing is known."""
    assert tree.confidence_BN is not None
    accepted = tree.depths_BN <= verdict.num_accepted_B[:, None]
    at_depth = jnp.take_along_axis(verdict.path_BD, tree.depths_BN, axis=1)
    on_path = accepted & (at_depth == jnp.arange(at_depth.shape[1])[None, :])
    above = lambda x_BN: jnp.take_along_axis(x_BN, tree.parents_BN, axis=1)
    proposed = (tree.tokens_BN >= 0) & (tree.tokens_BN < vocab_size)
    known = above(on_path) & proposed & (verdict.finite_B & valid_B)[:, None]
    right = known & (tree.tokens_BN == above(choice_BN))
    confidence = jnp.where(jnp.isnan(tree.confidence_BN), 0.0, tree.confidence_BN)
    told = confidence, tree.depths_BN, chosen.admitted, known, right, tree.parents_BN
    return PackedDrafts(*(x[:, 1:] for x in told)).columns()


def packed_fn(
    spec: RoundSpec, tier: Tier, sampled: bool, tokens: int
) -> Callable[..., tuple[DecodeState, jax.Array, tuple[jax.Array, jax.Array] | None]]:
    """The traced function of a round that verifies `tokens` nodes over the whole batch, roots included.

    The result takes what `round_fn`'s takes, but for the masks, and a calibration float32 [D, 2] (see `budget`; D
    may exceed the tier's depth) and a `Budget`. It returns the same, with `PackedDrafts` behind the `Packed` tokens;
    the logits are [1, T, V] and the path names their rows.

    Raises:
      ValueError: a tier that drafts nothing, or verification whose distribution depends on what is looked at.
    """
    if spec.rejection or spec.typical is not None:
        rule = "rejection" if spec.typical is None else "typical"
        raise ValueError(f"a budget that live confidences spend needs coupled verification, got {rule!r}")
    if tier.depth == 0:
        raise ValueError(f"a budget is for drafted tokens, got tier {tier}")
    phases, vocab_size = Phases(spec, tier, sampled), spec.config.vocab_size

    def run(
        target: Any, draft_params: Any, state: DecodeState, batch_BX: jax.Array, calibration_D2: jax.Array,
        budget_B2: jax.Array,
    ) -> Any:  # fmt: skip
        batch, given = Batch(batch_BX), Budget(budget_B2)
        state = grow_tables(state, batch)
        rows = Rows.gather(state, batch.slot_B, spec.geo)
        draft_state, drafted = phases.draft(draft_params, state, rows)
        tree = drafted.tree
        if tree.confidence_BN is None:  # a drafter that says nothing of its drafts: the shallow ones go first
            tree = dataclasses.replace(tree, confidence_BN=jnp.full(tree.tokens_BN.shape, 0.5, jnp.float32))
        chosen = budget.spend(
            tree, rows.valid_B, batch.cap_B, tokens, calibration_D2, given.offset_B, given.weight_B, depth=tier.depth
        )
        forward = _forward(spec, tier.is_chain, target, state, rows, tree, chosen)
        state = dataclasses.replace(state, draft=draft_state)
        choice_BN, finite_BN = _choices(phases, state, rows, drafted, chosen, forward.logits_BNV)
        tokens_BN = jnp.where(chosen.admitted, tree.tokens_BN, vocab_size)
        verdict = follow(
            choice_BN, finite_BN, tokens_BN, tree.parents_BN, tree.depths_BN, depth=tier.depth, chain=tier.is_chain
        )
        state, packed = phases.conclude(draft_params, state, rows, batch.cap_B, tree, verdict, forward)
        packed = jnp.concatenate([packed, _labels(tree, verdict, choice_BN, chosen, rows.valid_B, vocab_size)], axis=1)
        path_BD = jnp.take_along_axis(chosen.slot_BN, verdict.path_BD, axis=1)
        return state, packed, (forward.logits_BNV, path_BD) if sampled else None

    return run
