"""Typical acceptance: Medusa's rule, which takes drafts that the target finds plausible enough. Not lossless.

Owns the rule (Cai et al. 2024, section 3.3.1) in plain XLA. A child with token x is accepted where
p(x) > min(threshold, alpha * exp(-H)), p being the target's distribution at its parent after
temperature and filters and H its entropy. Of the paths whose nodes are all accepted the longest
wins, ties by the sum of log p along the path, then by the lowest index. The token after it is
drawn from the target's distribution as the coupled rule draws it. Greedy rows stay exact.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.speculation.tree import DraftTree
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise
from pallas_kernels.rejection_sampling.reference import SamplingRows, Verdict, choose, filter_logits


@dataclasses.dataclass(frozen=True)
class Typical:
    """The rule's constants.

    Attributes:
      threshold: tokens more probable than this are always accepted.
      alpha: of flat distributions, which accept tokens above alpha * exp(-entropy).
    """

    threshold: float = 0.09
    alpha: float = 0.3


def accept_typical(
    tree: DraftTree, logits_BNV: jax.Array, sampling: SamplingRows, position_B: jax.Array, rule: Typical, depth: int
) -> Verdict:
    """The verdict on a draft.

    Args:
      logits_BNV: the target's at every node, after bias and penalties.
      position_B: absolute position of the first drafted token.
      depth: of the deepest node.
    """
    b, n, v = logits_BNV.shape
    greedy_B = sampling.temperature_B == 0
    logp_BNV = jax.nn.log_softmax(filter_logits(logits_BNV, *sampling[:4]), axis=-1)
    p_BNV = jnp.exp(logp_BNV)
    entropy_BN = -jnp.where(p_BNV > 0, p_BNV * logp_BNV, 0.0).sum(axis=-1)
    least_BN = jnp.minimum(rule.threshold, rule.alpha * jnp.exp(-entropy_BN))

    index_BN = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None, :], (b, n))
    at_parent = lambda x_BN: jnp.take_along_axis(x_BN, tree.parents_BN, axis=1)
    token_BN = jnp.clip(tree.tokens_BN, 0, v - 1)
    proposed_BN = tree.tokens_BN == token_BN
    bi = jnp.arange(b, dtype=jnp.int32)[:, None]
    logp_BN = logp_BNV[bi, tree.parents_BN, token_BN]
    best_BN = jnp.argmax(logits_BNV, axis=-1).astype(jnp.int32)
    plausible_BN = jnp.where(greedy_B[:, None], token_BN == at_parent(best_BN), jnp.exp(logp_BN) > at_parent(least_BN))
    accepted_BN = (index_BN == 0) | (plausible_BN & proposed_BN)

    lineage_BNN = tree.ancestors_BNN
    alive_BN = jnp.all(accepted_BN[:, None, :] | ~lineage_BNN, axis=2)
    scored_BN = accepted_BN & (index_BN > 0) & ~greedy_B[:, None]
    total_BN = jnp.where(lineage_BNN & scored_BN[:, None, :], logp_BN[:, None, :], 0.0).sum(axis=2)
    length_B = jnp.max(jnp.where(alive_BN, tree.depths_BN, 0), axis=1).astype(jnp.int32)
    longest_BN = alive_BN & (tree.depths_BN == length_B[:, None])
    last_B = jnp.argmax(jnp.where(longest_BN, total_BN, -jnp.inf), axis=1).astype(jnp.int32)

    on_path_BN = jnp.take_along_axis(lineage_BNN, last_B[:, None, None], axis=1)[:, 0]
    at_depth_BDN = tree.depths_BN[:, None, :] == jnp.arange(depth + 1, dtype=jnp.int32)[None, :, None]
    path_BD = jnp.argmax(at_depth_BDN & on_path_BN[:, None, :], axis=2).astype(jnp.int32)

    noise = gumbel_noise(sampling.seed_B, (position_B + length_B)[:, None], v, Purpose.TARGET)
    row_B1V = jnp.take_along_axis(logits_BNV, last_B[:, None, None], axis=1)
    next_B = choose(row_B1V, sampling, noise)[:, 0]
    # The maximum of a row that holds a NaN is NaN.
    finite_BN = jnp.isfinite(jnp.max(logits_BNV, axis=-1))
    return Verdict(path_BD, length_B, next_B, jnp.all(finite_BN | ~on_path_BN, axis=1))
