"""A mixture of experts for few rows in plain XLA: the specification of `gpu_experts`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.small_batch import reference
from pallas_kernels.small_batch.reference import TILE, Stream

#: Experts at most: a program has them all in registers.
MOST = 128


class Choice(NamedTuple):
    """Which experts rows use.

    Attributes:
      order_X: int32, the experts in use by number, -1 after the last. ranks_X: how many are in use up to each expert.
      weights_XR: float32, of each expert for each row, 0 where a row does not use it; R is M rounded up to 8.
    """

    order_X: jax.Array
    ranks_X: jax.Array
    weights_XR: jax.Array


def refusal(width: int, inner: int, count: int) -> str | None:
    """Why experts of such widths are not served, or None."""
    if count % TILE or count > MOST:
        return f"experts must be {TILE} or {MOST}, got {count}"
    if width % (2 * TILE) or inner % TILE:
        return f"experts must be multiples of {2 * TILE} and {TILE} wide, got {width} and {inner}"
    return None


def slots(m: int, per_token: int, count: int) -> int:
    """Experts that so many rows may use."""
    return min(m * per_token, count)


def choose(
    stream: Stream, router_EX: jax.Array, eps: float, per_token: int, rows: int, *, normalised: bool = True,
    interpret: Any = None,
) -> Choice:  # fmt: skip
    """The experts of each row by its router's logits, and their weights.

    Args:
      rows: how many of the stream's are meant; the others use none.
      normalised: whether weights are a softmax over a row's best alone, not over all.
    """
    del interpret
    m, count = stream.h_ME.shape[0], router_EX.shape[1]
    logits_MX = reference.normed_product(stream, router_EX, eps)
    best_MK, experts_MK = jax.lax.top_k(logits_MX, per_token)
    chosen_MX = jnp.any(experts_MK[:, :, None] == jnp.arange(count)[None, None], axis=1)
    chosen_MX = chosen_MX & (jnp.arange(m)[:, None] < rows)
    likely_MX = jnp.exp(logits_MX - best_MK[:, :1])
    mine_MX = jnp.where(chosen_MX, likely_MX, 0.0)
    weights_MX = mine_MX / jnp.sum(mine_MX if normalised else likely_MX, axis=1, keepdims=True)
    weights_MX = jnp.where(chosen_MX, weights_MX, 0.0)
    used_X = jnp.any(chosen_MX, axis=0)
    ranks_X = jnp.cumsum(used_X).astype(jnp.int32)
    order_X = jnp.nonzero(used_X, size=count, fill_value=-1)[0].astype(jnp.int32)
    return Choice(order_X, ranks_X, jnp.pad(weights_MX.T, ((0, 0), (0, -m % 8))))


def mix(
    stream: Stream, choice: Choice, gate_up_XEF: jax.Array, down_XFE: jax.Array, gain_E: jax.Array, eps: float,
    per_token: int, *, interpret: Any = None,
) -> Stream:  # fmt: skip
    """The stream after what the chosen experts make of its norm is added, weighted.

    Args:
      gate_up_XEF: each expert's gate beside its up. gain_E: of the norm that reads the stream next.
      per_token: experts of a row.
    """
    del interpret
    m, dtype = stream.h_ME.shape[0], stream.h_ME.dtype
    listed_S = choice.order_X[: slots(m, per_token, down_XFE.shape[0])]
    at_S = jnp.maximum(listed_S, 0)
    weights_SM1 = jnp.where(listed_S[:, None] < 0, 0.0, choice.weights_XR[at_S, :m])[..., None]
    normed = lambda w_EF: reference.project(stream, w_EF, eps).astype(jnp.float32)
    gate_SMF, up_SMF = jnp.split(jax.vmap(normed)(gate_up_XEF[at_S]), 2, axis=-1)
    hidden_SMF = gate_SMF * jax.nn.sigmoid(gate_SMF) * up_SMF * weights_SM1
    hidden_SMF = jnp.where(weights_SM1 != 0, hidden_SMF, 0.0).astype(dtype)
    y_ME = jnp.einsum("smf,sfe->me", hidden_SMF, down_XFE[at_S], preferred_element_type=jnp.float32).astype(dtype)
    return reference.begin((stream.h_ME.astype(jnp.float32) + y_ME.astype(jnp.float32)).astype(dtype), gain_E)
