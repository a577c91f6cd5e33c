"""Verification: which drafted path the target accepts, and the token after it.

Owns the choice of the rule; the arithmetic is pallas_kernels.rejection_sampling.

Coupled (default): the target's own token is drawn at every node; a child is accepted when
it is that token. For deterministic proposals this is also exactly what rejection sampling
does (accept x with probability p(x), else renormalise without x), so the rule is one.

Rejection (chains whose tokens were sampled from q): accept min(1, p/q), residual (p - q)+
(Leviathan, Kalman, Matias 2023).

Typical (opt-in, not lossless): see jaxspec.speculation.typical.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec.models.sharded import TENSOR_AXIS, shards
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.tree import DraftTree
from jaxspec.speculation.typical import Typical, accept_typical
from jaxspec.tier import Tier
from pallas_kernels.rejection_sampling import sharded
from pallas_kernels.rejection_sampling.api import rejection_sampling
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, SamplingRows, Verdict


def _over_a_mesh() -> bool:
    return shards() > 1


def verifies_in_xla(kernels: str | None) -> bool:
    """Whether the target's noise over the whole vocabulary is made for `verify` anyway, on one device."""
    reference = jax.default_backend() == "cpu" if kernels is None else kernels == "reference"
    return reference and not _over_a_mesh()


def verify(
    tree: DraftTree, logits_BNV: jax.Array, sampling: SamplingState | None, position_B: jax.Array, tier: Tier, *,
    noise_BDV: jax.Array | None = None, kernels: str | None = None, typical: Typical | None = None,
) -> Verdict:  # fmt: skip
    """The target's verdict on a draft.

    Args:
      logits_BNV: at every node, after bias and penalties.
      sampling: None where all rows are greedy.
      position_B: absolute position of the first drafted token.
      noise_BDV: the target's Gumbel noise at that position and the tier.depth ones after it, where it is known already.
      kernels: see pallas_kernels.dispatch. Where the vocabulary is split over a mesh each device verifies its part
        (rejection_sampling.sharded); in rejection mode the reference runs, which XLA partitions.
      typical: accept sampled rows' drafts by this rule instead; plain XLA, whatever `kernels` says.
    """
    if typical is not None and sampling is not None and tier.depth:
        return accept_typical(tree, logits_BNV, sampling.draws, position_B, typical, tier.depth)
    if sampling is None:
        zero, one = jnp.zeros(position_B.shape, jnp.float32), jnp.ones(position_B.shape, jnp.float32)
        draws = SamplingRows(zero, zero.astype(jnp.int32), one, zero, zero.astype(jnp.uint32))
    else:
        draws = sampling.draws
    drafts = None if sampling is None or tier.depth == 0 else tree.draft_probs_BDV
    if _over_a_mesh() and drafts is None and logits_BNV.shape[2] % shards() == 0:
        return _by_shards(tree, logits_BNV, draws, position_B, tier, greedy=sampling is None)
    if _over_a_mesh():
        kernels = "reference"
    return rejection_sampling(
        logits_BNV, tree.tokens_BN, tree.parents_BN, tree.depths_BN, draws, position_B,
        None if sampling is None else tree.draft_probs_BDV,
        depth=tier.depth, chain=tier.is_chain or tier.depth == 0, greedy=sampling is None, noise_BDV=noise_BDV,
        implementation=kernels,
    )  # fmt: skip


def _by_shards(
    tree: DraftTree, logits_BNV: jax.Array, draws: SamplingRows, position_B: jax.Array, tier: Tier, *, greedy: bool
) -> Verdict:
    def own(logits_BNv: jax.Array, tokens_BN: jax.Array, parents_BN: jax.Array, depths_BN: jax.Array,
            draws: SamplingRows, position_B: jax.Array) -> Verdict:  # fmt: skip
        args = RejectionSamplingArgs(
            logits_BNv, tokens_BN, parents_BN, depths_BN, draws, position_B,
            depth=tier.depth, chain=tier.is_chain or tier.depth == 0, greedy=greedy,
        )  # fmt: skip
        return sharded.rejection_sampling(args, TENSOR_AXIS)

    whole = PartitionSpec()
    specs = (PartitionSpec(None, None, TENSOR_AXIS), *[whole] * 5)
    return jax.shard_map(own, in_specs=specs, out_specs=whole, check_vma=False)(
        logits_BNV, tree.tokens_BN, tree.parents_BN, tree.depths_BN, draws, position_B
    )
