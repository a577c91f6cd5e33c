"""Chunks of prompts: the target over them, what they leave in the state, and the tokens after those that end.

Its steps stand on their own: `mixed` runs them with a round in between. Must not know requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import TreeKV, after_reads, commit, distinct
from jaxspec.models.base import TargetModel
from jaxspec.models.sharded import everywhere
from jaxspec.speculation.ending import ends
from jaxspec.speculation.layouts import Chunks, End, Packed
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.ring import FeatureRing
from jaxspec.speculation.round import RoundSpec, admit
from jaxspec.speculation.sampling import adjust_logits, restrict_logits
from jaxspec.speculation.state import DecodeState, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.speculation.verifier import verify
from jaxspec.tier import PLAIN


def chunks_of(spec: RoundSpec, state: DecodeState, chunks: Chunks[jax.Array], size: int, width: int) -> Ragged:
    """The chunks' texts; their tokens are in the state already."""
    return Ragged.of(Rows.gather(state, chunks.slot_B, spec.geo), chunks.count_B, size, width)


def chunk_kv(spec: RoundSpec, state: DecodeState, text: Ragged, asked: int | None = None) -> TreeKV:
    """What collects the chunks' keys and values, each chunk's tokens one after another; asked: see there."""
    rows, geo = text.rows, spec.geo
    return TreeKV(state.pages, rows.table_BM, rows.length_B, None, geo.num_pages, kernels=geo.kernels, asked=asked)


def last_layer(spec: RoundSpec, model: TargetModel) -> int | None:
    """The layer behind which nobody asks for other tokens of chunks than the last; None: somebody does."""
    layers = spec.config.num_layers
    return layers - 1 if model.narrows and all(0 <= i < layers for i in spec.aux_layers) else None


class First(NamedTuple):
    """The tokens after chunks, whether their logits were finite, and the logits themselves."""

    token_B1: jax.Array
    finite_B: jax.Array
    logits_B1V: jax.Array


def first_tokens(
    spec: RoundSpec, state: DecodeState, text: Ragged, logits_B1V: jax.Array, allowed_BW: jax.Array | None = None
) -> First:
    """The tokens after chunks, from the logits of their last tokens, by the rule of every other token.

    Args:
      allowed_BW: which each may be, int32 sets of bits; None: any.
    """
    sampling = state.sampling.rows(text.rows.slot_B)
    position = (text.rows.length_B + text.count_B)[:, None]
    root = DraftTree.chain(jnp.zeros_like(position))
    adjusted = adjust_logits(logits_B1V, sampling, position, root.tokens_BN, root.ancestors_BNN)
    if allowed_BW is not None:
        adjusted = restrict_logits(adjusted, allowed_BW[:, None])
    verdict = verify(root, adjusted, sampling, position[:, 0], PLAIN, kernels=spec.geo.kernels)
    return First(verdict.next_token_B[:, None], verdict.finite_B, logits_B1V)


def keep_chunks(
    spec: RoundSpec, draft_params: Any, state: DecodeState, text: Ragged, tokens_1T: jax.Array, kv: TreeKV,
    aux_1TA: jax.Array | None, ready_B: jax.Array,
) -> DecodeState:  # fmt: skip
    """The state with the chunks' keys and values in the pool, and seen by the drafter.

    Args:
      kv: after the target's forward. aux_1TA: what that told of the tokens. ready_B: see `commit`.
    """
    draft, ring, rows = state.draft, state.ring, text.rows
    if spec.drafter is not None:
        draft = spec.drafter.prefill(draft_params, draft, text, tokens_1T, spec.drafters(aux_1TA))
    if isinstance(ring, FeatureRing):
        assert aux_1TA is not None
        ring = ring.chunks(text, state.sampling, tokens_1T, aux_1TA)
    length = state.length_S.at[rows.slot_B].add(text.count_B, mode="drop")
    pages = commit(
        state.pages, kv.stacked(), rows.table_BM, text.index_BN, text.real_BN, spec.geo.num_pages, ready_B=ready_B
    )
    return dataclasses.replace(state, pages=pages, draft=draft, length_S=length, ring=ring)


def begin(
    spec: RoundSpec, state: DecodeState, text: Ragged, last_B: jax.Array, first: First
) -> tuple[DecodeState, jax.Array]:
    """The state with the tokens after chunks that end their prompts, and `Packed` tokens [B, 1].

    Args:
      last_B: not 0 where a chunk does.
    """
    rows, ending = text.rows, last_B > 0
    into = distinct(jnp.where(ending, rows.slot_B, spec.geo.slots), spec.geo.slots)[:, None]
    # With a round behind it, XLA would split them as the logits that they change, and gather them.
    counts = everywhere(state.sampling.counts_SV.at[into, first.token_B1].add(1, mode="drop"))
    position = (rows.length_B + text.count_B)[:, None]
    end = ends(state.sampling, into[:, 0], first.token_B1, position, ending[:, None], first.finite_B, spec.eos)
    state = dataclasses.replace(
        state,
        tokens_SL=state.tokens_SL.at[into, position].set(first.token_B1, mode="drop"),
        over_S=state.over_S.at[into[:, 0]].set(end != End.NOT_YET, mode="drop", unique_indices=True),
        sampling=dataclasses.replace(state.sampling, counts_SV=counts),
    )
    return state, Packed.of(first.finite_B.astype(jnp.int32), end, first.token_B1)


def prefill_fn(spec: RoundSpec) -> Callable[..., Any]:
    """The traced function of chunks of prompts, one of each of several slots.

    The result takes (target state, draft state, DecodeState, `Chunks` of B slots, requests that get slots first as
    `admit` takes them, what the token after each chunk may be as int32 sets of bits [B, W] or None) and three static
    arguments: `size`, most tokens of all chunks together; `width`, most of one; `samples`. The tokens are in the
    DecodeState by then. Where a chunk ends its prompt, the token after it is sampled, with the same rule as every other
    token: it returns the new DecodeState, the `Packed` tokens [B, 1], and the logits with which nodes `logprobs_fn`
    reads. Without `samples` no chunk ends its prompt, nothing is multiplied by the output layer, and the DecodeState is
    all that it returns.
    """

    def run(
        target: Any, draft_params: Any, state: DecodeState, chunks_BX: jax.Array, new_CX: jax.Array,
        allowed_BW: jax.Array | None = None, *, size: int, width: int, samples: bool = True,
    ) -> Any:  # fmt: skip
        model: TargetModel = nnx.merge(spec.graph, target)
        state, chunks = admit(spec, state, new_CX), Chunks(chunks_BX)
        text = chunks_of(spec, state, chunks, size, width)
        ends = last_layer(spec, model)
        tokens = text.tokens(state.tokens_SL)
        kv = chunk_kv(spec, state, text, asked=None if samples or ends is None else 0)
        attend = text.attend(kv.attend, ends if samples else None)
        hidden, aux = everywhere(model(tokens, text.index_T[None], attend, spec.aux_layers))
        if not samples:
            ready_B = after_reads(kv.stacked()) if ends is not None else jnp.argmax(text.last(hidden), axis=-1) >= 0
            return keep_chunks(spec, draft_params, state, text, tokens, kv, aux, ready_B)
        final_B1E = (text.last(hidden) if ends is None else hidden[0])[:, None]
        first = first_tokens(spec, state, text, model.logits(final_B1E), allowed_BW)
        # Of it only the dependency matters; see `commit`.
        state = keep_chunks(spec, draft_params, state, text, tokens, kv, aux, first.token_B1[:, 0] >= 0)
        state, packed = begin(spec, state, text, chunks.last_B, first)
        return state, packed, (first.logits_B1V, jnp.zeros_like(first.token_B1))

    return run
