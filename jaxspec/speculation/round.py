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

from jaxspec.cache import TreeKV, commit, distinct
from jaxspec.models.base import ModelConfig, TargetModel, counting_experts, touched
from jaxspec.models.sharded import everywhere
from jaxspec.speculation.drafter import Drafter, Remembering
from jaxspec.speculation.ending import ends
from jaxspec.speculation.layouts import Admission, Batch, End, Packed, PackedLogprobs, Text
from jaxspec.speculation.ring import FeatureRing, ring_layers
from jaxspec.speculation.sampling import SamplingState, adjust_logits, restrict_logits, top_logprobs
from jaxspec.speculation.state import DecodeState, Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.speculation.typical import Typical
from jaxspec.speculation.verifier import verifies_in_xla, verify
from jaxspec.tier import Tier
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
      eos: token ids that end a text.
    """

    graph: nnx.GraphDef[Any]
    config: ModelConfig
    geo: Geometry
    drafter: Drafter | None
    rejection: bool
    typical: Typical | None = None
    eos: tuple[int, ...] = ()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """What rounds ask of the target: the drafter's layers, and for a ring what that needs besides."""
        return ring_layers(self.config, self._own_layers) if self.geo.ring else self._own_layers

    @property
    def _own_layers(self) -> tuple[int, ...]:
        return self.drafter.aux_layers if self.drafter is not None else ()

    def drafters(self, aux: jax.Array | None) -> jax.Array | None:
        """The part of the target's states that the drafter wants to see."""
        return aux if aux is None or not self.geo.ring else aux[..., : len(self._own_layers) * self.config.hidden_size]

    def takes_drafter(self, tier: Tier) -> bool:
        """Whether rounds of a tier take the drafter's parameters; plain ones seldom pay even for the arguments."""
        return tier.depth > 0 or (self.drafter is not None and self.drafter.extends_by_params)

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
      touched: distinct experts that were read, over all layers; None where there are none.
    """

    logits_BNV: jax.Array
    kv_LBNGc: jax.Array
    aux_BNA: jax.Array | None
    touched: jax.Array | None = None


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
    ancestors_BNN: jax.Array | None,
) -> Forward:  # fmt: skip
    """The target over a tree, or over chains (no ancestors); reads the pool.

    Traced once for all the functions that call it with as many rows and nodes: warming up is mostly tracing.
    """
    model: TargetModel = nnx.merge(spec.graph, target)
    geo = spec.geo
    kv = TreeKV(state.pages, rows.table_BM, rows.length_B, ancestors_BNN, geo.num_pages, kernels=geo.attention)
    with counting_experts() as mixtures:
        hidden, aux = model(tokens_BN, rows.length_B[:, None] + depths_BN, kv.attend, spec.aux_layers)
    return Forward(model.logits(hidden), kv.stacked(), aux, touched(mixtures))


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
        self, draft_params: Any, state: DecodeState, rows: Rows, cap_B: jax.Array, drafted: Drafted, forward: Forward,
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
        state, packed = self.conclude(draft_params, state, rows, cap_B, tree, verdict, forward)
        return state, packed, verdict.path_BD

    def conclude(
        self, draft_params: Any, state: DecodeState, rows: Rows, cap_B: jax.Array, tree: DraftTree, verdict: Verdict,
        forward: Forward,
    ) -> tuple[DecodeState, jax.Array]:  # fmt: skip
        """Commits what was verified: (state, packed)."""
        if self.tier.depth:
            verdict = _at_most(verdict, cap_B, tree)
        return self._commit(draft_params, state, rows, tree, verdict, forward)

    def _commit(
        self, draft_params: Any, state: DecodeState, rows: Rows, tree: DraftTree, verdict: Verdict, forward: Forward
    ) -> tuple[DecodeState, jax.Array]:
        """Scatters the accepted path into the pool and the text; returns the `Packed` tokens."""
        geo, drafter = self.spec.geo, self.spec.drafter
        path, accepted = verdict.path_BD, verdict.num_accepted_B
        kv_LBNGc, aux_BNA = forward.kv_LBNGc, forward.aux_BNA
        if not self.tier.is_chain:
            kv_LBNGc = jnp.take_along_axis(kv_LBNGc, path[None, :, :, None, None], axis=2)
            aux_BNA = None if aux_BNA is None else jnp.take_along_axis(aux_BNA, path[:, :, None], axis=1)
        step = jnp.arange(self.tier.depth + 1)[None, :]
        count = jnp.where(rows.valid_B & verdict.finite_B, accepted + 1, 0)
        position = rows.length_B[:, None] + step
        write = step < count[:, None]
        ready_B = verdict.next_token_B >= 0
        pages = commit(state.pages, kv_LBNGc, rows.table_BM, position, write, geo.num_pages, ready_B=ready_B)

        following = jnp.take_along_axis(tree.tokens_BN, jnp.concatenate([path[:, 1:], path[:, :1]], axis=1), axis=1)
        emitted = jnp.where(step == accepted[:, None], verdict.next_token_B[:, None], following)
        slot = jnp.where(write, rows.slot_B[:, None], geo.slots)
        tokens = state.tokens_SL.at[slot, position + 1].set(emitted, mode="drop")
        length = state.length_S.at[rows.slot_B].add(count, mode="drop")
        finite = verdict.finite_B | ~rows.valid_B
        end = ends(state.sampling, rows.slot_B, emitted, position + 1, write, finite, self.spec.eos)
        own_B = distinct(rows.slot_B, geo.slots)
        over = state.over_S.at[own_B].set(end != End.NOT_YET, mode="drop", unique_indices=True)
        draft, ring, own_BNA = state.draft, state.ring, self.spec.drafters(aux_BNA)
        if drafter is not None:
            draft = drafter.extend(draft_params, draft, rows, own_BNA, count)
        if isinstance(ring, FeatureRing):
            assert aux_BNA is not None
            ring = ring.round(rows, state.sampling, tokens, aux_BNA, count)
        sampling = state.sampling
        if self.sampled:
            counts = sampling.counts_SV.at[slot, emitted].add(1, mode="drop")
            sampling = dataclasses.replace(sampling, counts_SV=counts)
        state = dataclasses.replace(
            state, pages=pages, tokens_SL=tokens, length_S=length, over_S=over, draft=draft, sampling=sampling,
            ring=ring,
        )  # fmt: skip
        return state, Packed.of(count, end, jnp.where(write, emitted, -1), forward.touched)


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
        # Attention is told of chains: their nodes can have the bits of plain decoding.
        ancestors_BNN = None if tier.is_chain else tree.ancestors_BNN
        forward = forward_phase(spec, target, state, rows, tree.tokens_BN, tree.depths_BN, ancestors_BNN)
        state = dataclasses.replace(state, draft=draft_state)
        state, packed, path = phases.settle(draft_params, state, rows, batch.cap_B, drafted, forward, allowed_BNW)
        return state, packed, (forward.logits_BNV, path) if sampled else None

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


def admit(spec: RoundSpec, state: DecodeState, rows_BX: jax.Array, bias_BV: jax.Array | None = None) -> DecodeState:
    """Gives slots to requests.

    Args:
      rows_BX: as `Admission` packs them.
      bias_BV: logit biases; None: no request has any.
    """
    vocab = spec.config.vocab_size
    new = Admission.of(spec.geo, rows_BX)
    index, prompt_len_B1 = jnp.arange(new.tokens.shape[1])[None, :], new.numbers["prompt_len_S"][:, None]
    row = jnp.arange(rows_BX.shape[0])[:, None]
    where = lambda mask: (row, jnp.where(mask, new.tokens, vocab))
    none = jnp.zeros((rows_BX.shape[0], vocab), jnp.int32)
    # Else XLA would split them over devices as logits are, and gather them.
    in_prompt = everywhere(none.at[where(index < prompt_len_B1)].set(1, mode="drop")) > 0
    later = (index >= prompt_len_B1) & (index < new.total[:, None])
    counts = everywhere(none.at[where(later)].add(1, mode="drop"))
    bias = none.astype(jnp.float32) if bias_BV is None else bias_BV
    sampling = SamplingState(
        **new.numbers, stop_ids_SK=new.stop_ids, bias_SV=bias, counts_SV=counts, in_prompt_SV=in_prompt
    )
    slot_B = distinct(new.slot, spec.geo.slots)
    put = lambda table, value: table.at[slot_B].set(value, mode="drop", unique_indices=True)
    draft = state.draft if spec.drafter is None else spec.drafter.admit(state.draft, new.slot, new.cached)
    return dataclasses.replace(
        state,
        table_SM=put(state.table_SM, new.table),
        tokens_SL=put(state.tokens_SL, new.tokens),
        length_S=put(state.length_S, new.cached),
        over_S=put(state.over_S, jnp.zeros_like(new.slot, bool)),
        sampling=everywhere(jax.tree.map(put, state.sampling, sampling)),
        draft=draft,
        ring=state.ring.admit(new.slot) if isinstance(state.ring, FeatureRing) else state.ring,
    )


def admit_fn(spec: RoundSpec) -> Callable[..., DecodeState]:
    """The traced function of `admit` alone.

    Takes (DecodeState, rows_BX, logit biases [B, V]).
    """

    def run(state: DecodeState, rows_BX: jax.Array, bias_BV: jax.Array) -> DecodeState:
        return admit(spec, state, rows_BX, bias_BV)

    return run


def remember_fn(spec: RoundSpec) -> Callable[..., DecodeState]:
    """The traced function that puts a text into the drafter's corpus.

    Takes (DecodeState, `Text`).
    """

    def run(state: DecodeState, text_X: jax.Array) -> DecodeState:
        assert isinstance(spec.drafter, Remembering)
        text = Text(text_X)
        return dataclasses.replace(state, draft=spec.drafter.remember(state.draft, text.tokens_L, text.count))

    return run


def logprobs_fn(k: int) -> Callable[..., jax.Array]:
    """The traced function that reads log-probabilities of a finished round.

    Takes (logits_BNV, path_BD, packed) and returns `PackedLogprobs`. Packed rounds have the nodes of all rows in one,
    [1, T, V].
    """

    def run(logits_BNV: jax.Array, path_BD: jax.Array, packed: jax.Array) -> jax.Array:
        b, d = path_BD.shape
        v = logits_BNV.shape[-1]
        if logits_BNV.shape[0] == b:
            at = jnp.take_along_axis(logits_BNV, path_BD[:, :, None], axis=1).reshape(b * d, v)
        else:
            at = jnp.take(logits_BNV[0], path_BD.reshape(b * d), axis=0, mode="clip")
        tokens = jnp.clip(Packed(packed).tokens_BD[:, :d], 0, v - 1).reshape(b * d)
        return PackedLogprobs.of(*top_logprobs(at, tokens, min(k, v))).reshape(b, d, -1)

    return run
