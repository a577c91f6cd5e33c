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

from jaxspec.models.sharded import shards
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.tree import DraftTree
from jaxspec.speculation.typical import Typical, accept_typical
from jaxspec.tier import Tier
from pallas_kernels.rejection_sampling.api import rejection_sampling
from pallas_kernels.rejection_sampling.reference import SamplingRows, Verdict


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
      kernels: see pallas_kernels.dispatch. Where the vocabulary is split over a mesh the reference runs in any case:
        XLA partitions it into each device's own part and a merge of (score, token) pairs.
      typical: accept sampled rows' drafts by this rule instead; plain XLA, whatever `kernels` says.
    """
    if typical is not None and sampling is not None and tier.depth:
        return accept_typical(tree, logits_BNV, sampling.draws, position_B, typical, tier.depth)
    if _over_a_mesh():
        kernels = "reference"
    if sampling is None:
        zero, one = jnp.zeros(position_B.shape, jnp.float32), jnp.ones(position_B.shape, jnp.float32)
        draws = SamplingRows(zero, zero.astype(jnp.int32), one, zero, zero.astype(jnp.uint32))
    else:
        draws = sampling.draws
    return rejection_sampling(
        logits_BNV, tree.tokens_BN, tree.parents_BN, tree.depths_BN, draws, position_B,
        None if sampling is None else tree.draft_probs_BDV,
        depth=tier.depth, chain=tier.is_chain or tier.depth == 0, greedy=sampling is None, noise_BDV=noise_BDV,
        implementation=kernels,
    )  # fmt: skip
