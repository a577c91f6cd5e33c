"""Where the end of a text occurred in it before: running match lengths, O(context) for each new token.

Owns the recurrence and the choice of the best earlier positions. A length is a function of the text alone, so nothing
depends on which rounds ran. Must not know corpora, nor what is drafted. (Source of the recurrence: the diagonal of the
table of common suffixes; TensorRT-LLM keeps an automaton, vLLM compares the tail anew.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

#: A text of which nothing was seen yet.
UNSEEN = -(1 << 20)


def advance(
    run_BL: jax.Array, seen_B: jax.Array, tokens_BL: jax.Array, root_B: jax.Array, longest: int
) -> jax.Array:  # fmt: skip
    """How many tokens up to each index equal the text's last ones, uint8 [B, L]: at most `longest`, 0 from the root on.

    Args:
      run_BL: the same when the text ended at index seen_B (UNSEEN: anything). Texts that grew by more than `longest`
        tokens since then are begun anew, which gives the same lengths.
      root_B: index of the last token.
    """
    anew_B = seen_B < root_B - longest
    at_B = jnp.maximum(jnp.where(anew_B, root_B - longest, seen_B), -1)
    run_BL = jnp.where(anew_B[:, None], jnp.uint8(0), run_BL)
    index_1L = jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)[None, :]

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at_B, run_BL = carry
        behind_B, at_B = at_B < root_B, jnp.minimum(at_B + 1, root_B)
        token_B1 = jnp.take_along_axis(tokens_BL, at_B[:, None], axis=1, mode="clip")
        before_BL = jnp.pad(run_BL, ((0, 0), (1, 0)))[:, :-1]
        longer_BL = jnp.minimum(before_BL, jnp.uint8(longest - 1)) + jnp.uint8(1)
        same_BL = (tokens_BL == token_B1) & (index_1L < at_B[:, None])
        new_BL = jnp.where(same_BL, longer_BL, jnp.uint8(0))
        return at_B, jnp.where(behind_B[:, None], new_BL, run_BL)

    return jax.lax.while_loop(lambda carry: jnp.any(carry[0] < root_B), step, (at_B, run_BL))[1]


def best(run_BL: jax.Array, count: int, shortest: int) -> tuple[jax.Array, jax.Array]:
    """(length, index) of the `count` longest matches, the latest of equal ones first, int32 [B, count] both.

    A length below `shortest` counts as 0: there is none.
    """
    length = run_BL.shape[1]
    key_BL = run_BL.astype(jnp.int32) * length + jnp.arange(length, dtype=jnp.int32)[None, :]
    if count == 1:
        at_BC = jnp.argmax(key_BL, axis=1, keepdims=True).astype(jnp.int32)
    else:
        # Backends select the largest floats without sorting. Beyond 2^24 the latest of equal ones may be missed.
        at_BC = jax.lax.top_k(key_BL.astype(jnp.float32), count)[1].astype(jnp.int32)
    run_BC = jnp.take_along_axis(run_BL, at_BC, axis=1).astype(jnp.int32)
    return jnp.where(run_BC >= shortest, run_BC, 0), at_BC


def continuations(tokens_BL: jax.Array, at_BC: jax.Array, root_B: jax.Array, depth: int) -> jax.Array:
    """The tokens after each index, [B, C, depth]; what ends close to the text's end goes on period after period."""
    step_D = jnp.arange(depth, dtype=jnp.int32)[None, None, :]
    period_BC = jnp.maximum(root_B[:, None] - at_BC, 1)[:, :, None]
    index_BCD = at_BC[:, :, None] + 1 + step_D % period_BC
    b, c, d = index_BCD.shape
    return jnp.take_along_axis(tokens_BL, index_BCD.reshape(b, c * d), axis=1, mode="clip").reshape(b, c, d)
