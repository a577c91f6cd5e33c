"""The draft tree: what a drafter proposes and the target verifies."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """N nodes a row, parents before children; node 0 is the last committed token.

    Attributes:
      tokens_BN: token of each node.
      parents_BN: index of each node's parent; the root names itself.
      depths_BN: distance to the root.
      ancestors_BNN: whether node m lies on node n's path, n included.
      draft_probs_BDV: the distributions that a chain's tokens were sampled from, in the
        target's vocabulary; None means deterministic proposals.
      confidence_BN: float32, how probable the drafter holds it that the target continues a node's parent with the
        node, in [0, 1] (a network that fails may leave NaN); 1 for the root; None beside draft_probs. It decides what
        is verified, never what is accepted.
    """

    tokens_BN: jax.Array
    parents_BN: jax.Array
    depths_BN: jax.Array
    ancestors_BNN: jax.Array
    draft_probs_BDV: jax.Array | None = None
    confidence_BN: jax.Array | None = None

    @classmethod
    def chain(
        cls, tokens_BN: jax.Array, draft_probs_BDV: jax.Array | None = None, confidence_BN: jax.Array | None = None
    ) -> DraftTree:
        """A chain: every node is the parent of the next."""
        b, n = tokens_BN.shape
        index = jnp.arange(n, dtype=jnp.int32)
        rows = lambda x: jnp.broadcast_to(x[None], (b, *x.shape))
        return cls(
            tokens_BN,
            rows(jnp.maximum(index - 1, 0)),
            rows(index),
            rows(jnp.tril(jnp.ones((n, n), bool))),
            draft_probs_BDV,
            confidence_BN,
        )


def ancestors(parents_BN: jax.Array, max_depth: int) -> jax.Array:
    """Ancestor matrix [B, N, N] of trees whose parents precede their children."""
    n = parents_BN.shape[1]
    eye = jnp.eye(n, dtype=bool)
    out = jnp.broadcast_to(eye[None], (*parents_BN.shape, n))
    node = parents_BN
    for _ in range(max_depth):
        out = out | (node[:, :, None] == jnp.arange(n)[None, None, :])
        node = jnp.take_along_axis(parents_BN, node, axis=1)
    return out
