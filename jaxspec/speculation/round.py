"""The round: draft -> target forward over the tree -> verify -> commit -> extend, as one traced function.

Its phases stand on their own: `guided` runs them with the host in between.

Owns the order of things on the device. Must not know requests, policies or compilation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import TreeKV, commit
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.layouts import Admission, Batch, Chunk, Packed, PackedLogprobs
from jaxspec.speculation.sampling import SamplingState, adjust_logits, restrict_logits, top_logprobs
from jaxspec.speculation.state import DecodeState, Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.speculation.typical import Typical
from jaxspec.speculation.verifier import verifies_in_xla, verify
from jaxspec.tier import PLAIN, Tier
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise
from pallas_kernels.rejection_sampling.reference import Verdict


@dataclasses.dataclass(frozen=True)
class RoundSpec:
    """Everything static about the functions below except the tier.

    Attributes:
      graph: of a TargetModel (nnx.split).
      config: the target's geometry.
      drafter: None where the engine never drafts.
      rejection: rejection verification for sampled rows of drafters that can sample.
      typical: typical acceptance for sampled rows, where it is asked for.
    """

    graph: nnx.GraphDef[Any]
    config: ModelConfig
    geo: Geometry
    drafter: Drafter | None
    rejection: bool
    typical: Typical | None = None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.drafter.aux_layers if self.drafter is not None else ()

    def draws_drafts(self, tier: Tier, sampled: bool) -> bool:
        """Whether drafts are drawn from the drafter's own distribution."""
        can = self.drafter is not None and self.drafter.supports_trees
        return self.rejection and sampled and tier.depth > 0 and tier.is_chain and can


def grow_tables(state: DecodeState, batch: Batch[jax.Array]) -> DecodeState:
    """Writes the pages that the host granted into the rows' tables."""
    slot, first, pages = batch.slot_B, batch.first_B, batch.pages_BP
    column = first[:, None] + jnp.arange(pages.shape[1])[None, :]
    table = state.table_SM.at[slot[:, None], column].set(pages, mode="drop")
    return dataclasses.replace(state, table_SM=table)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafted:
    """What drafting leaves for verification.

    Attributes:
      noise_BDV: the target's Gumbel noise at the tier's depth + 1 positions, where the round has it anyway.
    """

    tree: DraftTree
    noise_BDV: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """What the target made of a tree.

    Attributes:
      logits_BNV: raw.
      kv_LBNGc: its nodes' keys and values. aux_BNA: what the drafter wants to see of them.
    """

    logits_BNV: jax.Array
    kv_LBNGc: jax.Array
    aux_BNA: jax.Array | None


# The phases of a round.


def _target_noise(sampling: SamplingState, rows: Rows, count: int, vocab_size: int) -> jax.Array:
    """The target's noise of the next `count` positions, [B, count, V]; zeros where every row is greedy.

    Greedy rows read none of it. So one executable serves greedy and sampled batches at the cost of its own kind.
    """
    position_BD = rows.length_B[:, None] + 1 + jnp.arange(count)[None, :]
    shape = (*position_BD.shape, vocab_size)
    return jax.lax.cond(
        jnp.any(sampling.temperature_S > 0),
        lambda: gumbel_noise(sampling.seed_S, position_BD, vocab_size, Purpose.TARGET),
        lambda: jnp.zeros(shape, jnp.float32),
    )


@functools.partial(jax.jit, static_argnums=0)
def forward_phase(
    spec: RoundSpec, target: Any, state: DecodeState, rows: Rows, tokens_BN: jax.Array, depths_BN: jax.Array,
    ancestors_BNN: jax.Array,
) -> Forward:  # fmt: skip
    """The target over a tree; reads the pool.

    Traced once for all the functions that call it with as many rows and nodes: warming up is mostly tracing.
    """
    model: TargetModel = nnx.merge(spec.graph, target)
    geo = spec.geo
    kv = TreeKV(state.pages, rows.table_BM, rows.length_B, ancestors_BNN, geo.num_pages, kernels=geo.kernels)
    hidden, aux = model(tokens_BN, rows.length_B[:, None] + depths_BN, kv.attend, spec.aux_layers)
    return Forward(model.logits(hidden), kv.stacked(), aux)


@dataclasses.dataclass(frozen=True)
class Phases:
    """What comes before and after the target's forward in a round of one (tier, greedy or sampled)."""

    spec: RoundSpec
    tier: Tier
    sampled: bool

    def _sampling(self, state: DecodeState, rows: Rows) -> SamplingState | None:
        return state.sampling.rows(rows.slot_B) if self.sampled else None

    def draft(self, draft_params: Any, state: DecodeState, rows: Rows) -> tuple[Any, Drafted]:
        """The drafter's new state, and its tree."""
        spec, tier, drafter = self.spec, self.tier, self.spec.drafter
        # Typical acceptance asks how probable a draft is: then drafts are the likeliest tokens, not the noise's choice.
        sampling = self._sampling(state, rows)
        coupled = sampling if spec.typical is None else None
        noise = None
        if coupled is not None and verifies_in_xla(spec.geo.kernels):
            noise = _target_noise(coupled, rows, tier.depth + 1, spec.config.vocab_size)
        if tier.depth == 0 or drafter is None:
            return state.draft, Drafted(DraftTree.chain(rows.root_B[:, None]), noise)
        sample = spec.draws_drafts(tier, self.sampled)
        shared = None if noise is None or sample else noise[:, : tier.depth]
        tree, draft = drafter.draft(draft_params, state.draft, rows, state.tokens_SL, tier, coupled, shared, sample)
        return draft, Drafted(tree, noise)

    def settle(
        self, state: DecodeState, rows: Rows, cap_B: jax.Array, drafted: Drafted, forward: Forward,
        allowed_BNW: jax.Array | None,
    ) -> tuple[DecodeState, jax.Array, jax.Array]:  # fmt: skip
        """Verifies and commits: (state, packed, path_BD)."""
        spec, tier, tree = self.spec, self.tier, drafted.tree
        adjusted = forward.logits_BNV
        sampling = self._sampling(state, rows)
        if sampling is not None:
            position_BN = rows.length_B[:, None] + 1 + tree.depths_BN
            adjusted = adjust_logits(adjusted, sampling, position_BN, tree.tokens_BN, tree.ancestors_BNN)
        if allowed_BNW is not None:
            adjusted = restrict_logits(adjusted, allowed_BNW)
        verdict = verify(
            tree, adjusted, sampling, rows.length_B + 1, tier,
            noise_BDV=drafted.noise_BDV, kernels=spec.geo.kernels, typical=spec.typical,
        )  # fmt: skip
        if tier.depth:
            verdict = _at_most(verdict, cap_B, tree)
        state, emitted = self._commit(state, rows, tree, verdict, forward)
        bad_B = 1 - verdict.finite_B.astype(jnp.int32)
        return state, Packed.of((verdict.num_accepted_B + 1)[:, None], bad_B, emitted), verdict.path_BD

    def _commit(
        self, state: DecodeState, rows: Rows, tree: DraftTree, verdict: Verdict, forward: Forward
    ) -> tuple[DecodeState, jax.Array]:
        """Scatters the accepted path into the pool and the text; returns the emitted tokens [B, depth + 1]."""
        geo, drafter = self.spec.geo, self.spec.drafter
        path, accepted = verdict.path_BD, verdict.num_accepted_B
        kv_LBNGc, aux_BNA = forward.kv_LBNGc, forward.aux_BNA
        if not self.tier.is_chain:
            kv_LBNGc = jnp.take_along_axis(kv_LBNGc, path[None, :, :, None, None], axis=2)
            aux_BNA = None if aux_BNA is None else jnp.take_along_axis(aux_BNA, path[:, :, None], axis=1)
        step = jnp.arange(self.tier.depth + 1)[None, :]
        count = accepted + 1
        position = rows.length_B[:, None] + step
        write = (step < count[:, None]) & rows.valid_B[:, None]
        ready_B = verdict.next_token_B >= 0
        pages = commit(state.pages, kv_LBNGc, rows.table_BM, position, write, geo.num_pages, ready_B=ready_B)

        following = jnp.take_along_axis(tree.tokens_BN, jnp.concatenate([path[:, 1:], path[:, :1]], axis=1), axis=1)
        emitted = jnp.where(step == accepted[:, None], verdict.next_token_B[:, None], following)
        slot = jnp.where(write, rows.slot_B[:, None], geo.slots)
        tokens = state.tokens_SL.at[slot, position + 1].set(emitted, mode="drop")
        length = state.length_S.at[rows.slot_B].add(jnp.where(rows.valid_B, count, 0), mode="drop")
        draft = state.draft if drafter is None else drafter.extend(state.draft, rows, aux_BNA, count)
        sampling = state.sampling
        if self.sampled:
            counts = sampling.counts_SV.at[slot, emitted].add(1, mode="drop")
            sampling = dataclasses.replace(sampling, counts_SV=counts)
        state = dataclasses.replace(
            state, pages=pages, tokens_SL=tokens, length_S=length, draft=draft, sampling=sampling
        )
        return state, jnp.where(write, emitted, -1)


def _at_most(verdict: Verdict, cap_B: jax.Array, tree: DraftTree) -> Verdict:
    """The verdict cut to `cap_B` drafts; the token after them is then the next draft, since it was accepted."""
    beyond = jnp.minimum(cap_B + 1, verdict.path_BD.shape[1] - 1)
    node = jnp.take_along_axis(verdict.path_BD, beyond[:, None], axis=1)
    token = jnp.take_along_axis(tree.tokens_BN, node, axis=1)[:, 0]
    token = jnp.where(verdict.num_accepted_B > cap_B, token, verdict.next_token_B)
    return verdict._replace(num_accepted_B=jnp.minimum(verdict.num_accepted_B, cap_B), next_token_B=token)


def round_fn(
    spec: RoundSpec, tier: Tier, sampled: bool
) -> Callable[..., tuple[DecodeState, jax.Array, tuple[jax.Array, jax.Array] | None]]:
    """The traced function of one (tier, greedy or sampled); the bucket is batch_BX's first axis.

    The result takes (target state, draft state, DecodeState, batch_BX, allowed_BNW) and returns the new
    DecodeState, the `Packed` tokens [B, depth + 1], and for sampled batches the raw logits with the path's nodes,
    from which `logprobs_fn` reads.

    batch_BX: a `Batch`.
    allowed_BNW: which tokens each node may be followed by, int32 sets of bits; None: any. Masks of drafted nodes are
    only known once there are drafts: such rounds run in parts (`guided`).
    """
    phases = Phases(spec, tier, sampled)

    def run(
        target: Any, draft_params: Any, state: DecodeState, batch_BX: jax.Array, allowed_BNW: jax.Array | None = None
    ) -> Any:
        batch = Batch(batch_BX)
        state = grow_tables(state, batch)
        rows = Rows.gather(state, batch.slot_B, spec.geo)
        draft_state, drafted = phases.draft(draft_params, state, rows)
        tree = drafted.tree
        forward = forward_phase(spec, target, state, rows, tree.tokens_BN, tree.depths_BN, tree.ancestors_BNN)
        state = dataclasses.replace(state, draft=draft_state)
        state, packed, path = phases.settle(state, rows, batch.cap_B, drafted, forward, allowed_BNW)
        return state, packed, (forward.logits_BNV, path) if sampled else None

    return run


def prefill_fn(spec: RoundSpec) -> Callable[..., tuple[DecodeState, jax.Array, tuple[jax.Array, jax.Array]]]:
    """The traced function of a prompt chunk of one slot; its length is the chunk bucket, static.

    The result takes (target state, draft state, DecodeState, a `Chunk`, what the token after the chunk may be as an
    int32 set of bits [1, W] or None, chunk length as a static range). The tokens are in the DecodeState already. It
    samples the token after the chunk where that ends the prompt, with the same rule as every other token.
    """
    geo, drafter = spec.geo, spec.drafter

    def run(
        target: Any, draft_params: Any, state: DecodeState, chunk_X: jax.Array, allowed_BW: jax.Array | None = None, *,
        size: int,
    ) -> Any:  # fmt: skip
        model: TargetModel = nnx.merge(spec.graph, target)
        chunk = Chunk(chunk_X)
        slot_B, count_B, last_B = chunk.slot_B, chunk.count_B, chunk.last_B > 0
        rows = Rows.gather(state, slot_B, geo)
        index = rows.length_B[:, None] + jnp.arange(size)[None, :]
        real = jnp.arange(size)[None, :] < count_B[:, None]
        tokens = rows.tokens_at(state.tokens_SL, index)
        causal = jnp.tril(jnp.ones((size, size), bool))[None]
        kv = TreeKV(state.pages, rows.table_BM, rows.length_B, causal, geo.num_pages, kernels=geo.kernels)
        hidden, aux = model(tokens, index, kv.attend, spec.aux_layers)
        draft = state.draft
        if drafter is not None:
            draft = drafter.prefill(draft_params, draft, rows, tokens, count_B, aux)

        final = jnp.take_along_axis(hidden, (count_B - 1)[:, None, None], axis=1)
        logits = model.logits(final)
        sampling = state.sampling.rows(rows.slot_B)
        position = (rows.length_B + count_B)[:, None]
        root = DraftTree.chain(jnp.zeros((1, 1), jnp.int32))
        adjusted = adjust_logits(logits, sampling, position, root.tokens_BN, root.ancestors_BNN)
        if allowed_BW is not None:
            adjusted = restrict_logits(adjusted, allowed_BW[:, None])
        verdict = verify(root, adjusted, sampling, position[:, 0], PLAIN, kernels=geo.kernels)
        token = verdict.next_token_B[:, None]
        new_kv, ready_B = kv.stacked(), token[:, 0] >= 0
        pages = commit(state.pages, new_kv, rows.table_BM, index, real, geo.num_pages, ready_B=ready_B)
        into = jnp.where(last_B[:, None], slot_B[:, None], geo.slots)
        state = dataclasses.replace(
            state,
            pages=pages,
            draft=draft,
            tokens_SL=state.tokens_SL.at[into, position].set(token, mode="drop"),
            length_S=state.length_S.at[slot_B].add(count_B, mode="drop"),
            sampling=dataclasses.replace(
                state.sampling, counts_SV=state.sampling.counts_SV.at[into, token].add(1, mode="drop")
            ),
        )
        bad_B = 1 - verdict.finite_B.astype(jnp.int32)
        packed = Packed.of(jnp.ones((1, 1), jnp.int32), bad_B, token)
        return state, packed, (logits, jnp.zeros((1, 1), jnp.int32))

    return run


def catch_up_fn(spec: RoundSpec) -> Callable[..., DecodeState]:
    """The traced function that lets the drafter consume what rounds without drafting left behind.

    Takes (draft state, DecodeState, batch_BX as round_fn's).
    """

    def run(draft_params: Any, state: DecodeState, batch_BX: jax.Array) -> DecodeState:
        assert spec.drafter is not None
        batch = Batch(batch_BX)
        state = grow_tables(state, batch)
        rows = Rows.gather(state, batch.slot_B, spec.geo)
        return dataclasses.replace(state, draft=spec.drafter.catch_up(draft_params, state.draft, rows, state.tokens_SL))

    return run


def admit_fn(spec: RoundSpec) -> Callable[..., DecodeState]:
    """The traced function that gives a slot to a request.

    Takes (DecodeState, the two arrays of an `Admission`, table [M], tokens [L], bias [V]).
    """
    vocab = spec.config.vocab_size

    def run(
        state: DecodeState, ints: jax.Array, floats: jax.Array, table: jax.Array, tokens: jax.Array, bias: jax.Array
    ) -> DecodeState:
        slot, cached, total, numbers, stop_ids_K = Admission.of(ints, floats)
        prompt_len = numbers["prompt_len_S"]
        index = jnp.arange(tokens.shape[0])
        in_prompt = jnp.zeros((vocab,), bool).at[jnp.where(index < prompt_len, tokens, vocab)].set(True, mode="drop")
        output = (index >= prompt_len) & (index < total)
        counts = jnp.zeros((vocab,), jnp.int32).at[jnp.where(output, tokens, vocab)].add(1, mode="drop")
        row = SamplingState(**numbers, stop_ids_SK=stop_ids_K, bias_SV=bias, counts_SV=counts, in_prompt_SV=in_prompt)
        put = lambda table, value: table.at[slot].set(value, mode="drop")
        draft = state.draft if spec.drafter is None else spec.drafter.admit(state.draft, slot, cached)
        return dataclasses.replace(
            state,
            table_SM=put(state.table_SM, table),
            tokens_SL=put(state.tokens_SL, tokens),
            length_S=put(state.length_S, cached),
            sampling=jax.tree.map(put, state.sampling, row),
            draft=draft,
        )

    return run


def logprobs_fn(k: int) -> Callable[..., jax.Array]:
    """The traced function that reads log-probabilities of a finished round.

    Takes (logits_BNV, path_BD, packed) and returns `PackedLogprobs`.
    """

    def run(logits_BNV: jax.Array, path_BD: jax.Array, packed: jax.Array) -> jax.Array:
        b, d = path_BD.shape
        v = logits_BNV.shape[-1]
        at = jnp.take_along_axis(logits_BNV, path_BD[:, :, None], axis=1).reshape(b * d, v)
        tokens = jnp.clip(Packed(packed).tokens_BD, 0, v - 1).reshape(b * d)
        return PackedLogprobs.of(*top_logprobs(at, tokens, min(k, v))).reshape(b, d, -1)

    return run
