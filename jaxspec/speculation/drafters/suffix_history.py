"""Where the end of a text occurred in it before: the lengths of its matches, of all places in one pass.

Owns the lengths and the choice of the best earlier positions. A length is a function of the text alone: nothing is kept
between rounds, and nothing depends on which of them ran. A loop that brought kept lengths forward by each new token
compared less, but an accelerator's host has to look at the condition of every turn. Must not know corpora, nor what is
drafted. (vLLM compares the tail anew, too; TensorRT-LLM keeps an automaton.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def tail(tokens_BL: jax.Array, root_B: jax.Array, longest: int) -> jax.Array:
    """The last `longest` tokens of each text, the one at index root_B first, [B, longest]; -2 where there is none."""
    index_BK = root_B[:, None] - jnp.arange(longest, dtype=jnp.int32)[None, :]
    token_BK = jnp.take_along_axis(tokens_BL, jnp.maximum(index_BK, 0), axis=1, mode="clip")
    return jnp.where(index_BK >= 0, token_BK, -2)


def lengths(tokens_BL: jax.Array, root_B: jax.Array, tail_BK: jax.Array) -> jax.Array:
    """How many tokens up to each index equal the text's last ones, int32 [B, L]: at most K, 0 from the root on."""
    length, longest = tokens_BL.shape[1], tail_BK.shape[1]
    wide_BX = jnp.pad(tokens_BL, ((0, 0), (longest - 1, 0)), constant_values=-1)
    run_BL = jnp.full(tokens_BL.shape, longest, jnp.int32)
    for back in reversed(range(longest)):  # what stays is the first that differs
        start = longest - 1 - back
        same_BL = wide_BX[:, start : start + length] == tail_BK[:, back : back + 1]
        run_BL = jnp.where(same_BL, run_BL, back)
    return jnp.where(jnp.arange(length, dtype=jnp.int32)[None, :] < root_B[:, None], run_BL, 0)


def best(run_BL: jax.Array, count: int, shortest: int) -> tuple[jax.Array, jax.Array]:
    """(length, index) of the `count` longest matches, the latest of equal ones first, int32 [B, count] both.

    A length below `shortest` counts as 0: there is none.
    """
    length = run_BL.shape[1]
    key_BL = run_BL * length + jnp.arange(length, dtype=jnp.int32)[None, :]
    if count == 1:
        at_BC = jnp.argmax(key_BL, axis=1, keepdims=True).astype(jnp.int32)
    else:
        # Backends select the largest floats without sorting. Beyond 2^24 the latest of equal ones may be missed.
        at_BC = jax.lax.top_k(key_BL.astype(jnp.float32), count)[1].astype(jnp.int32)
    run_BC = jnp.take_along_axis(run_BL, at_BC, axis=1)
    return jnp.where(run_BC >= shortest, run_BC, 0), at_BC


def continuations(tokens_BL: jax.Array, at_BC: jax.Array, root_B: jax.Array, depth: int) -> jax.Array:
    """The tokens after each index, [B, C, depth]; what ends close to the text's end goes on period after period."""
    step_D = jnp.arange(depth, dtype=jnp.int32)[None, None, :]
    period_BC = jnp.maximum(root_B[:, None] - at_BC, 1)[:, :, None]
    index_BCD = at_BC[:, :, None] + 1 + step_D % period_BC
    b, c, d = index_BCD.shape
    return jnp.take_along_axis(tokens_BL, index_BCD.reshape(b, c * d), axis=1, mode="clip").reshape(b, c, d)
