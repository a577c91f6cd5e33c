"""Rounds of rows whose text a grammar constrains: drafting, the target's forward, verification, each a function.

The host reads the drafts after the first and works out what may follow each node while the
second runs. Together they leave what `round_fn` leaves of a sampled batch: the phases are the
same functions. Must not know grammars.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.speculation.layouts import Batch
from jaxspec.speculation.round import Drafted, Forward, Phases, RoundSpec, forward_phase, grow_tables
from jaxspec.speculation.state import DecodeState, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.speculation.verifier import verifies_in_xla
from jaxspec.tier import Tier


def draft_fn(spec: RoundSpec, tier: Tier) -> Callable[..., tuple[DecodeState, Drafted, jax.Array]]:
    """The traced function that drafts.

    Takes (draft state, DecodeState, batch_BX as round_fn's, allowed_BDW as Rows') and returns the state with the
    drafter's part and the page tables brought forward, the drafts, and tokens and parents for the host, [B, 2, N].
    """

    def run(draft_params: Any, state: DecodeState, batch_BX: jax.Array, allowed_BDW: jax.Array) -> Any:
        batch = Batch(batch_BX)
        state = grow_tables(state, batch)
        rows = dataclasses.replace(Rows.gather(state, batch.slot_B, spec.geo), allowed_BDW=allowed_BDW)
        draft_state, drafted = Phases(spec, tier, True).draft(draft_params, state, rows)
        tree = dataclasses.replace(drafted.tree, confidence_BN=None)  # all of it is verified
        drafted = dataclasses.replace(drafted, tree=tree)
        shown = jnp.stack([tree.tokens_BN, tree.parents_BN], axis=1)
        return dataclasses.replace(state, draft=draft_state), drafted, shown

    return run


def forward_fn(spec: RoundSpec) -> Callable[..., Forward]:
    """The traced function of the target over trees, the same for every tier of as many nodes.

    Takes (target state, DecodeState after `draft_fn`, batch_BX, tokens_BN, depths_BN, ancestors_BNN).
    """

    def run(
        target: Any, state: DecodeState, batch_BX: jax.Array, tokens_BN: jax.Array, depths_BN: jax.Array,
        ancestors_BNN: jax.Array,
    ) -> Forward:  # fmt: skip
        rows = Rows.gather(state, Batch(batch_BX).slot_B, spec.geo)
        return forward_phase(spec, target, state, rows, tokens_BN, depths_BN, ancestors_BNN)

    return run


def settle_fn(spec: RoundSpec, tier: Tier) -> Callable[..., tuple[DecodeState, jax.Array, jax.Array]]:
    """The traced function that verifies and commits.

    Takes (draft state where the drafter `extends_by_params`, else (), DecodeState after `draft_fn`, batch_BX, Drafted,
    Forward, allowed_BNW as round_fn's) and returns the new DecodeState, the packed result and the path's nodes
    [B, depth + 1].
    """

    def run(
        draft_params: Any, state: DecodeState, batch_BX: jax.Array, drafted: Drafted, forward: Forward,
        allowed_BNW: jax.Array,
    ) -> Any:  # fmt: skip
        batch = Batch(batch_BX)
        rows = Rows.gather(state, batch.slot_B, spec.geo)
        return Phases(spec, tier, True).settle(draft_params, state, rows, batch.cap_B, drafted, forward, allowed_BNW)

    return run


def parts(spec: RoundSpec, tier: Tier, bucket: int, dtype: jnp.dtype) -> tuple[Drafted, Forward]:
    """The shapes that pass between the three parts of a round.

    Args:
      dtype: of the target's activations and the pool.
    """
    cfg, n, d = spec.config, tier.num_nodes, tier.depth

    def shape(*sizes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((bucket, *sizes), dtype)

    wide = lambda count, present: shape(count, cfg.vocab_size, dtype=jnp.float32) if present else None
    probs = wide(d, spec.draws_drafts(tier, True))
    tree = DraftTree(shape(n), shape(n), shape(n), shape(n, n, dtype=jnp.bool_), probs)
    noise = wide(d + 1, spec.typical is None and verifies_in_xla(spec.geo.kernels))
    kv: Any = jax.ShapeDtypeStruct((cfg.num_layers, bucket, n, cfg.num_kv_heads, cfg.kv_width), dtype)
    logits = shape(n, cfg.vocab_size, dtype=jnp.float32)
    aux = shape(n, len(spec.aux_layers) * cfg.hidden_size, dtype=dtype) if spec.aux_layers else None
    touched: Any = None if cfg.experts is None else jax.ShapeDtypeStruct((), jnp.int32)
    return Drafted(tree, noise), Forward(logits, kv, aux, touched)
