"""Which drafted nodes of a batch the target looks at: those that are likeliest to survive, over all its rows.

Owns how probable it is that a node is accepted, and the choice under a budget (vLLM's adaptive verification and
DSpark, arXiv 2607.05147, choose the same way). Whatever is chosen, coupled verification emits the same tokens: the
target's token at a position is fixed by the request's seed and the position. Must not know models, nor how a node is
verified.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.speculation.tree import DraftTree

#: How close to 0 and 1 a confidence may come before its logit is taken; fits on the host take the same.
EDGE = 1e-4


class Selection(NamedTuple):
    """T of the B * N nodes of a batch, row after row.

    Attributes:
      node_T: which (row * N + node); B * N where the budget found nothing more to spend on.
      slot_BN: the place in node_T of each node; T where it was left out.
    """

    node_T: jax.Array
    slot_BN: jax.Array

    @property
    def admitted(self) -> jax.Array:
        """Whether each node was chosen."""
        return self.slot_BN < self.node_T.shape[0]


def calibrated(
    confidence_BN: jax.Array, depths_BN: jax.Array, calibration_D2: jax.Array, offset_B: jax.Array
) -> jax.Array:
    """Probability that the target continues a node's parent with the node, [B, N] in [0, 1]; 1 for roots.

    Args:
      confidence_BN: as DraftTree's. What is not a number counts as 0, and 0 stays 0.
      calibration_D2: slope and intercept of the logit of confidences at depths 1 to D; (1, 0) changes nothing.
      offset_B: added to the logits of a row.
    """
    inside = jnp.clip(confidence_BN, EDGE, 1 - EDGE)
    fit_BN2 = jnp.take(calibration_D2, jnp.maximum(depths_BN - 1, 0), axis=0, mode="clip")
    logit_BN = fit_BN2[..., 0] * (jnp.log(inside) - jnp.log1p(-inside)) + fit_BN2[..., 1] + offset_B[:, None]
    p_BN = jnp.where(confidence_BN > 0, jax.nn.sigmoid(logit_BN), 0.0)
    return jnp.where(depths_BN == 0, 1.0, jnp.where(jnp.isnan(p_BN), 0.0, p_BN))


def survival(p_BN: jax.Array, parents_BN: jax.Array, depth: int) -> jax.Array:
    """Probability that a node's whole path is accepted, [B, N]; never above its parent's.

    Args:
      p_BN: of each node given its parent, in [0, 1]; 1 for roots.
      depth: of the deepest node.
    """
    out_BN = p_BN
    for _ in range(depth - 1):
        # From the parent's own value: the rounding of a product in another order could put a child above it.
        out_BN = p_BN * jnp.take_along_axis(out_BN, parents_BN, axis=1)
    return out_BN


def select(
    survival_BN: jax.Array, depths_BN: jax.Array, eligible_BN: jax.Array, tokens: int, weight_B: jax.Array | None = None
) -> Selection:
    """The roots, and the eligible nodes of highest survival times weight; ties by depth, then row, then node.

    A chosen node's ancestors are chosen, where nodes that are not eligible have no eligible descendants.

    Args:
      tokens: how many nodes (T), at least B.
      weight_B: what a token of each row is worth, relative to others'; below 0 and NaN count as 0.
    """
    b, n = survival_BN.shape
    assert b <= tokens <= b * n, (b, n, tokens)
    worth_BN = survival_BN
    if weight_B is not None:
        worth_BN = worth_BN * jnp.clip(jnp.where(jnp.isnan(weight_B), 0.0, weight_B), 0.0, 1e9)[:, None]
    worth_BN = jnp.where(eligible_BN, worth_BN, -1.0)
    worth_BN = jnp.where(depths_BN == 0, jnp.inf, worth_BN).reshape(b * n)
    node_X = jnp.arange(b * n, dtype=jnp.int32)
    keys = (-worth_BN, depths_BN.reshape(b * n), node_X)
    falling_X, _, order_X = jax.lax.sort(keys, num_keys=3)
    # In the rows' order again: so a budget for every node leaves each where it was.
    node_T = jnp.sort(jnp.where(falling_X <= 0, order_X, b * n)[:tokens])
    slot_X = jnp.full((b * n,), tokens, jnp.int32).at[node_T].set(jnp.arange(tokens, dtype=jnp.int32), mode="drop")
    return Selection(node_T, slot_X.reshape(b, n))


def spend(
    tree: DraftTree, valid_B: jax.Array, cap_B: jax.Array, tokens: int, calibration_D2: jax.Array,
    offset_B: jax.Array, weight_B: jax.Array, *, depth: int,
) -> Selection:  # fmt: skip
    """The nodes of a draft that `tokens` packed tokens verify.

    Args:
      valid_B: rows that are not padding. cap_B: most drafts of each that may be accepted.
      depth: of the deepest node.
    """
    assert tree.confidence_BN is not None
    p_BN = calibrated(tree.confidence_BN, tree.depths_BN, calibration_D2, offset_B)
    eligible_BN = valid_B[:, None] & (tree.depths_BN <= cap_B[:, None])
    return select(survival(p_BN, tree.parents_BN, depth), tree.depths_BN, eligible_BN, tokens, weight_B)
