"""A round and chunks of prompts in one pass: the target's weights are read once for both.

Embedding, norms, projections and MLP see the chunks' tokens and the rows' draft trees as one row, the output layer the
trees and each chunk's last token. Attention, drafting and verification are those of a round and of a prefill, apart.
So the tokens are those of the two one after the other. Must not know requests or policies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import TreeKV
from jaxspec.models.base import (
    FULL_ATTENTION,
    Answering,
    Attend,
    AttentionOptions,
    TargetModel,
    counting_experts,
    touched,
)
from jaxspec.models.sharded import everywhere
from jaxspec.speculation.layouts import Batch, Chunks
from jaxspec.speculation.prefill import begin, chunk_kv, chunks_of, first_tokens, keep_chunks, last_layer
from jaxspec.speculation.round import Forward, Phases, RoundSpec, admit, grow_tables
from jaxspec.speculation.state import DecodeState, Rows
from jaxspec.tier import Tier


def _apart(chunks: Attend, trees: Attend, size: int, nodes: tuple[int, int]) -> Attend:
    """Attention for layers that see [1, T]: the first `size` tokens attend by `chunks`, the others as [B, N].

    Where `chunks` answers some tokens alone, these stand before the others behind the last layer.
    """

    def attend(
        layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions = FULL_ATTENTION
    ) -> jax.Array:
        first = chunks(layer, q[:, :size], k[:, :size], v[:, :size], options)
        q, k, v = (x[0, size:].reshape(*nodes, *x.shape[2:]) for x in (q, k, v))
        rest = trees(layer, q, k, v, options)
        return jnp.concatenate([first, rest.reshape(1, -1, *rest.shape[2:])], axis=1)

    if not isinstance(chunks, Answering):
        return attend
    pick = chunks.pick
    return Answering(attend, chunks.layer, lambda x: jnp.concatenate([pick(x[:, :size]), x[:, size:]], axis=1))


def mixed_fn(spec: RoundSpec, tier: Tier, sampled: bool, size: int, width: int) -> Callable[..., Any]:
    """The traced function of a round of one (tier, greedy or sampled) and of chunks of other slots' prompts.

    The result takes (target state, draft state, DecodeState, batch_BX as round_fn's, `Chunks` of C slots, requests that
    get slots first as `admit` takes them) and returns the new DecodeState, what `round_fn` returns besides, and what
    `prefill_fn` does. Nothing restricts the tokens.

    Args:
      size: most tokens of all chunks together. width: most of one.
    """
    phases, geo = Phases(spec, tier, sampled), spec.geo

    def run(
        target: Any, draft_params: Any, state: DecodeState, batch_BX: jax.Array, chunks_CX: jax.Array,
        new_CX: jax.Array,
    ) -> Any:  # fmt: skip
        model: TargetModel = nnx.merge(spec.graph, target)
        batch, chunks = Batch(batch_BX), Chunks(chunks_CX)
        state = grow_tables(admit(spec, state, new_CX), batch)
        rows = Rows.gather(state, batch.slot_B, geo)
        draft, drafted = phases.draft(draft_params, state, rows)
        state, tree = dataclasses.replace(state, draft=draft), drafted.tree
        b, n = tree.tokens_BN.shape
        text = chunks_of(spec, state, chunks, size, width)
        prompts, prompt_kv = text.tokens(state.tokens_SL), chunk_kv(spec, state, text)
        kv = TreeKV(
            state.pages, rows.table_BM, rows.length_B, tree.ancestors_BNN, geo.num_pages, kernels=geo.kernels
        )  # fmt: skip

        flat = lambda x_BN: x_BN.reshape(1, b * n)
        tokens_1T = jnp.concatenate([prompts, flat(tree.tokens_BN)], axis=1)
        index_1T = jnp.concatenate([text.index_T[None], flat(rows.length_B[:, None] + tree.depths_BN)], axis=1)
        ends = last_layer(spec, model)
        attend = _apart(text.attend(prompt_kv.attend, ends), kv.attend, size, (b, n))
        with counting_experts() as mixtures:
            # Else the features that a head keeps would be split as they are, and gathered at the end: 27 MB a round.
            hidden, aux = everywhere(model(tokens_1T, index_1T, attend, spec.aux_layers))
        # Together: the output layer is read once.
        count = hidden.shape[1] - b * n
        last_BE = text.last(hidden) if ends is None else hidden[0, :count]
        logits = model.logits(jnp.concatenate([hidden[:, count:], last_BE[None]], axis=1))[0]
        aux_BNA = None if aux is None else aux[0, size:].reshape(b, n, -1)
        forward = Forward(logits[: b * n].reshape(b, n, -1), kv.stacked(), aux_BNA, touched(mixtures))

        first = first_tokens(spec, state, text, logits[b * n :][:, None])
        told = None if aux is None else aux[:, :size]
        # Every read of the pool is behind these products, the trees' as well.
        state = keep_chunks(spec, draft_params, state, text, prompts, prompt_kv, told, first.token_B1[:, 0] >= 0)
        state, begun = begin(spec, state, text, chunks.last_B, first)
        state, packed, path = phases.settle(draft_params, state, rows, batch.cap_B, drafted, forward, None)
        kept = (forward.logits_BNV, path) if sampled else None
        return state, packed, kept, begun, (first.logits_B1V, jnp.zeros_like(first.token_B1))

    return run
