"""Packed and unrolled attention equal the dense formula, values and gradients, and never hold all scores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.train.objective.attention import UnrolledAttention, packed_attention

SEGMENTS = jnp.asarray([[1] * 5 + [2] * 6, [1] * 9 + [0] * 2])


def qkv(seed: int, count: int = 11) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((2, count, 4, 6), (2, count, 2, 6), (2, count, 2, 6))
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return q * 3, k, v


def dense(steps: list[tuple[jax.Array, jax.Array, jax.Array]], segments: jax.Array) -> jax.Array:
    """The last step's attention: its queries over all keys of step 0 and each position's own keys, one softmax."""
    q = steps[-1][0]
    count = q.shape[1]
    wide = lambda x: jnp.repeat(x, 2, axis=2)
    index = jnp.arange(count)
    block = (index[:, None] >= index[None, :])[None] & (segments[:, :, None] == segments[:, None, :])
    own = jnp.broadcast_to(jnp.eye(count, dtype=bool)[None], block.shape)
    mask = jnp.concatenate([block] + [own] * (len(steps) - 1), axis=-1)
    k, v = (jnp.concatenate([wide(step[i]) for step in steps], axis=1) for i in (1, 2))
    scores = jnp.einsum("bnhc,bmhc->bhnm", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhnm,bmhc->bnhc", weights, v)


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block", [3, 4, 64])
def test_packed_attention_is_the_dense_formula(block: int) -> None:
    weight = jax.random.normal(jax.random.key(9), (2, 11, 4, 6))

    def total(fn: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda step: jnp.sum(weight * fn(step)), has_aux=False))

    close(
        total(lambda step: packed_attention(SEGMENTS, block)(0, *step))(qkv(0)),
        total(lambda step: dense([step], SEGMENTS))(qkv(0)),
    )


@pytest.mark.parametrize("block", [4, 64])
def test_unrolled_attention_is_the_dense_formula(block: int) -> None:
    """Three steps of two layers that share nothing; each step's output and all gradients."""
    layers = [[qkv(10 * layer + step) for step in range(3)] for layer in range(2)]
    weights = jax.random.normal(jax.random.key(9), (2, 3, 2, 11, 4, 6))

    def ours(layers: Any) -> list[list[jax.Array]]:
        attend = UnrolledAttention(SEGMENTS, block)
        by_step = [[attend(layer, *layers[layer][step]) for layer in range(2)] for step in range(3)]
        return [[by_step[step][layer] for step in range(3)] for layer in range(2)]

    def wanted(layers: Any) -> list[list[jax.Array]]:
        return [[dense(steps[: i + 1], SEGMENTS) for i in range(3)] for steps in layers]

    def total(fn: Any) -> Any:
        def value(layers: Any) -> tuple[jax.Array, Any]:
            out = fn(layers)
            return jnp.sum(jnp.stack([jnp.stack(x) for x in out]) * weights), out

        return jax.jit(jax.value_and_grad(value, has_aux=True))

    close(total(ours)(layers), total(wanted)(layers))


def test_large_scores_do_not_overflow() -> None:
    q, k, v = qkv(3)
    step = (q * 100, k * 100, v)
    attend = UnrolledAttention(SEGMENTS, 4)
    first, second = attend(0, *step), attend(0, step[0], step[1] * 2, v)
    wanted = [dense([step], SEGMENTS), dense([step, (step[0], step[1] * 2, v)], SEGMENTS)]
    close([first, second], wanted, 1e-3)  # scores in the thousands are rounded


def test_scores_of_a_long_row_are_never_held_as_a_whole() -> None:
    """Memory of the gradient grows with the length, not with its square: blocks are computed again backwards."""

    def temporary(length: int) -> int:
        segments = jnp.ones((1, length), jnp.int32)
        q = jnp.zeros((1, length, 4, 8))
        fn = jax.grad(lambda x: jnp.sum(packed_attention(segments, 128)(0, x, x, x)))
        return jax.jit(fn).lower(q).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(1024), temporary(2048)
    assert long < 2.6 * short
    assert long < 4 * 2048 * 2048 * 4 / 2  # [H, T, T] float32, halved


def test_gradients_stop_where_they_are_told_to() -> None:
    def value(x: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        attend = UnrolledAttention(SEGMENTS)
        attend(0, *x)
        attend.stop_gradient()
        return jnp.sum(attend(0, *qkv(5)))

    assert all(float(jnp.abs(g).max()) == 0 for g in jax.grad(value)(qkv(4)))
