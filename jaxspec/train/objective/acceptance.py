"""Simulated acceptance: rounds of speculation walked over a text as an engine would walk them.

A text that the target wrote greedily is its own verdict: a draft is accepted as long as it repeats the text. Rounds
start where the round before ended, so positions count as often as an engine would draft there; a mean over all
positions overstates the acceptance, because rounds that accept much skip much.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.train.data.batch import Batch


def rounds(matches_BND: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Walks each run of learned tokens.

    Args:
      matches_BND: of the chain drafted after token n + 1, token n + 2 + i was right. N is at most T - 1 - D.

    Returns:
      (number of rounds, int32 [D + 1] how many of them accepted exactly so many drafts). Rounds whose drafts would
      reach beyond their run's end are left out.
    """
    _, n, depth = matches_BND.shape
    run_BN = batch.learned(1, n)  # the target gave token n + 1 itself
    own_BN = jax.lax.slice_in_dim(batch.learn_BT, 0, n, axis=1)
    start_BN = run_BN & ~own_BN
    whole_BN = run_BN
    for i in range(depth):
        whole_BN = whole_BN & batch.learned(2 + i, n)
    accepted_BN = jnp.sum(jnp.cumprod(matches_BND.astype(jnp.int32), axis=2), axis=2)

    def step(next_B: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        index, start_B, accepted_B = at
        next_B = jnp.where(start_B, index, next_B)
        here_B = next_B == index
        return jnp.where(here_B, index + accepted_B + 1, next_B), here_B

    columns = (jnp.arange(n, dtype=jnp.int32), start_BN.T, accepted_BN.T)
    _, here_NB = jax.lax.scan(step, jnp.full((matches_BND.shape[0],), -1, jnp.int32), columns)
    counted_BN = here_NB.T & whole_BN
    histogram = jnp.stack([jnp.sum(counted_BN & (accepted_BN == i)) for i in range(depth + 1)])
    return jnp.sum(counted_BN), histogram.astype(jnp.int32)


def summary(histogram: jax.Array) -> dict[str, jax.Array]:
    """Acceptance by position and length, from how many rounds accepted exactly 0, 1, .. D drafts.

    Returns:
      accept_1, accept_2, ...: the share accepted there of the rounds that got there; length: tokens a round, the
      bonus included. All 0 (length 1) where there was no round.
    """
    counts = histogram.astype(jnp.float32)
    reached = jnp.cumsum(counts[::-1])[::-1]  # rounds that accepted at least i
    metrics = {f"accept_{i}": reached[i] / jnp.maximum(reached[i - 1], 1.0) for i in range(1, histogram.shape[0])}
    metrics["length"] = 1.0 + jnp.sum(reached[1:]) / jnp.maximum(reached[0], 1.0)
    return metrics
