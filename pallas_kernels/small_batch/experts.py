"""A mixture of experts for few rows in plain XLA: the specification of `gpu_router` and `gpu_experts`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.small_batch import reference
from pallas_kernels.small_batch.reference import TILE, Stream

#: Experts at most: a program has them all in registers.
MOST = 128
#: Rows whose choice takes registers at once; experts of a row that they may pick.
GROUP, MOST_PICKED = 8, 8


class Choice(NamedTuple):
    """Which experts rows use.

    Attributes:
      order_X: int32, the experts in use by number, -1 after the last. ranks_X: how many are in use up to each expert.
      weights_XR: float32, of each expert for each row, 0 where a row does not use it; R is M rounded up to 8.
    """

    order_X: jax.Array
    ranks_X: jax.Array
    weights_XR: jax.Array


class Picks(NamedTuple):
    """Each row's experts, the best first, of groups of GROUP rows.

    Attributes:
      experts_GP: int32, the expert of pair GROUP * i + row: the row's i-th; -1 where there is none.
      weights_GP: float32, and what it weighs.
      order_X, begins_X: of one group: int32, the experts in use by number, -1 after the last; and how many are before
        each. None of one row, whose experts are in use in the order of its choice, and of several groups.
    """

    experts_GP: jax.Array
    weights_GP: jax.Array
    order_X: jax.Array | None = None
    begins_X: jax.Array | None = None


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
    _, weights_MX, chosen_MX = _chosen(stream, router_EX, eps, per_token, rows, normalised)
    order_X, ranks_X = _in_use(chosen_MX, count)
    return Choice(order_X, ranks_X, jnp.pad(weights_MX.T, ((0, 0), (0, -m % GROUP))))


def pick(
    stream: Stream, router_EX: jax.Array, eps: float, per_token: int, rows: int, *, normalised: bool = True,
    interpret: Any = None,
) -> Picks:  # fmt: skip
    """The same as lists; of at most MOST_PICKED experts a row."""
    del interpret
    count = router_EX.shape[1]
    experts_MK, weights_MX, chosen_MX = _chosen(stream, router_EX, eps, per_token, rows, normalised)
    there_M1 = jnp.arange(experts_MK.shape[0])[:, None] < rows
    listed_MK, weights_MK = jnp.where(there_M1, experts_MK, -1), jnp.take_along_axis(weights_MX, experts_MK, axis=1)
    picks = picked(listed_MK, weights_MK)
    if experts_MK.shape[0] == 1 or picks.experts_GP.shape[0] > 1:
        return picks
    order_X, ranks_X = _in_use(chosen_MX, count)
    return picks._replace(order_X=order_X, begins_X=ranks_X - jnp.any(chosen_MX, axis=0).astype(jnp.int32))


def picked(experts_MK: jax.Array, weights_MK: jax.Array) -> Picks:
    """Rows' experts and weights as groups have them."""
    k = experts_MK.shape[1]
    assert k <= MOST_PICKED, k
    more = (0, -experts_MK.shape[0] % GROUP), (0, MOST_PICKED - k)
    grow = lambda x, value: jnp.pad(x, more, constant_values=value)
    grouped = lambda x: x.reshape(-1, GROUP, MOST_PICKED).swapaxes(1, 2).reshape(-1, GROUP * MOST_PICKED)
    return Picks(grouped(grow(experts_MK.astype(jnp.int32), -1)), grouped(grow(weights_MK, 0.0)))


def by_rows(picks: Picks) -> tuple[jax.Array, jax.Array]:
    """Experts and weights [rows, MOST_PICKED], of whole groups; -1 and anything where there is none."""
    by_row = lambda x_GP: x_GP.reshape(-1, MOST_PICKED, GROUP).swapaxes(1, 2).reshape(-1, MOST_PICKED)
    return by_row(picks.experts_GP), by_row(picks.weights_GP)


def _chosen(
    stream: Stream, router_EX: jax.Array, eps: float, per_token: int, rows: int, normalised: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows' experts [M, K], and of each expert its weight and whether a row uses it [M, X]."""
    m, count = stream.h_ME.shape[0], router_EX.shape[1]
    logits_MX = reference.normed_product(stream, router_EX, eps)
    best_MK, experts_MK = jax.lax.top_k(logits_MX, per_token)
    chosen_MX = jnp.any(experts_MK[:, :, None] == jnp.arange(count)[None, None], axis=1)
    chosen_MX = chosen_MX & (jnp.arange(m)[:, None] < rows)
    likely_MX = jnp.exp(logits_MX - best_MK[:, :1])
    mine_MX = jnp.where(chosen_MX, likely_MX, 0.0)
    weights_MX = mine_MX / jnp.sum(mine_MX if normalised else likely_MX, axis=1, keepdims=True)
    return experts_MK, jnp.where(chosen_MX, weights_MX, 0.0), chosen_MX


def _in_use(chosen_MX: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """See Choice."""
    used_X = jnp.any(chosen_MX, axis=0)
    order_X = jnp.nonzero(used_X, size=count, fill_value=-1)[0].astype(jnp.int32)
    return order_X, jnp.cumsum(used_X).astype(jnp.int32)


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
