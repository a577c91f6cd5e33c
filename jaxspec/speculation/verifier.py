"""Verification: which drafted path the target accepts, and the token after it.

Coupled (default): the target's own token is drawn at every node; a child is accepted when
it is that token. For deterministic proposals this is also exactly what rejection sampling
does (accept x with probability p(x), else renormalise without x), so the rule is one.

Rejection (chains whose tokens were sampled from q): accept min(1, p/q), residual (p - q)+
(Leviathan, Kalman, Matias 2023).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.speculation.sampling import (
    Purpose,
    SamplingState,
    filter_logits,
    gumbel_noise,
    uniform_noise,
)
from jaxspec.speculation.tree import DraftTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the target made of a draft.

    Attributes:
      path_BD: node index at each depth 0..depth of the accepted path; beyond it, unspecified but in range.
      num_accepted_B: accepted drafts, without the bonus.
      next_token_B: the bonus (or correction): the new root.
    """

    path_BD: jax.Array
    num_accepted_B: jax.Array
    next_token_B: jax.Array


def _at(x_BN: jax.Array, index_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BN, index_B[:, None], axis=1)[:, 0]


def verify_coupled(tree: DraftTree, choice_BN: jax.Array, depth: int, *, chain: bool) -> Verdict:
    """Walks the tree along the target's own tokens.

    Args:
      choice_BN: the target's token after each node.
      depth: the tier's depth.
      chain: whether every node's parent is the one before it.
    """
    b, n = tree.tokens_BN.shape
    if depth == 0:
        zero = jnp.zeros((b,), jnp.int32)
        return Verdict(zero[:, None], zero, choice_BN[:, 0])
    if chain:
        matched = (tree.tokens_BN[:, 1:] == choice_BN[:, :-1]).astype(jnp.int32)
        accepted = jnp.cumprod(matched, axis=1).sum(axis=1).astype(jnp.int32)
        path = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None, :], (b, n))
        return Verdict(path, accepted, _at(choice_BN, accepted))
    match_BN = tree.tokens_BN == jnp.take_along_axis(choice_BN, tree.parents_BN, axis=1)
    root = (jnp.arange(n) == 0)[None, :]
    alive_BN = jnp.broadcast_to(root, (b, n))
    for _ in range(depth):
        alive_BN = root | (match_BN & jnp.take_along_axis(alive_BN, tree.parents_BN, axis=1))
    # Siblings hold distinct tokens, so at most one node a depth is alive.
    at_depth = tree.depths_BN[:, None, :] == jnp.arange(depth + 1)[None, :, None]
    path = jnp.argmax(at_depth & alive_BN[:, None, :], axis=2).astype(jnp.int32)
    accepted = jnp.max(jnp.where(alive_BN, tree.depths_BN, 0), axis=1).astype(jnp.int32)
    return Verdict(path, accepted, _at(choice_BN, _at(path, accepted)))


def verify_rejection(
    tree: DraftTree, adjusted_BNV: jax.Array, choice_BN: jax.Array, rows: SamplingState, position_B: jax.Array
) -> Verdict:
    """Rejection sampling of a sampled chain; greedy rows compare with the argmax.

    Args:
      adjusted_BNV: target logits after bias and penalties.
      choice_BN: the target's own draw (used by greedy rows, and as the bonus after full acceptance).
      position_B: absolute position of the first drafted token.
    """
    assert tree.draft_probs_BDV is not None
    b, n = tree.tokens_BN.shape
    depth = n - 1
    target_probs = jax.nn.softmax(filter_logits(adjusted_BNV, rows), axis=-1)
    draft_probs = tree.draft_probs_BDV
    drafted = tree.tokens_BN[:, 1:]
    p_BD = jnp.take_along_axis(target_probs[:, :-1], drafted[:, :, None], axis=2)[:, :, 0]
    q_BD = jnp.take_along_axis(draft_probs, drafted[:, :, None], axis=2)[:, :, 0]
    position_BD = position_B[:, None] + jnp.arange(depth)[None, :]
    u_BD = uniform_noise(rows.seed_S, position_BD, Purpose.ACCEPT)[:, :, 0]
    greedy = rows.temperature_S == 0
    ok = jnp.where(greedy[:, None], drafted == choice_BN[:, :-1], u_BD * q_BD < p_BD)
    accepted = jnp.cumprod(ok.astype(jnp.int32), axis=1).sum(axis=1).astype(jnp.int32)
    stop = jnp.minimum(accepted, depth - 1)
    p_BV = jnp.take_along_axis(target_probs, stop[:, None, None], axis=1)[:, 0]
    q_BV = jnp.take_along_axis(draft_probs, stop[:, None, None], axis=1)[:, 0]
    residual = jnp.maximum(p_BV - q_BV, 0.0)
    # Where p = q up to rounding nothing is left over, and rejecting had probability about 0.
    residual = jnp.where(residual.sum(axis=-1, keepdims=True) > 1e-9, residual, p_BV)
    noise = gumbel_noise(rows.seed_S, (position_B + stop)[:, None], p_BV.shape[-1], Purpose.RESIDUAL)[:, 0]
    correction = jnp.argmax(jnp.log(residual) + noise, axis=-1).astype(jnp.int32)
    own = _at(choice_BN, accepted)
    next_token = jnp.where(greedy | (accepted == depth), own, correction)
    path = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None, :], (b, n))
    return Verdict(path, accepted, next_token)
