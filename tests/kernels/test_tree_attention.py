"""Tree attention against the definition in float64, on inputs whose unused parts are NaN."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import api, gpu, reference
from pallas_kernels.tree_attention.cases import SMALL
from pallas_kernels.tree_attention.reference import TreeAttentionArgs


@functools.partial(jax.jit, static_argnames=("scale", "block_tokens"))
def tree_attention(*arrays, scale: float | None = None, sinks_H=None, block_tokens: int | None = None) -> jax.Array:
    args = TreeAttentionArgs(*arrays, sinks_H=sinks_H, scale=scale)
    return reference.tree_attention(args, block_tokens=block_tokens)


def naive(q, pages, table, length, k, v, mask, scale, sinks_H=None):
    """Softmax over the prefix and the visible tree entries, query by query."""
    b, n, h, c = q.shape
    group = h // k.shape[2]
    page = pages.shape[2]
    out = np.zeros((b, n, h, c))
    for i in range(b):
        prefix = [pages[table[i, p // page], :, p % page] for p in range(length[i])]  # each [G, 2C]
        for j in range(n):
            for head in range(h):
                g = head // group
                keys = [e[g, :c] for e in prefix] + [k[i, t, g] for t in np.flatnonzero(mask[i, j])]
                values = [e[g, c:] for e in prefix] + [v[i, t, g] for t in np.flatnonzero(mask[i, j])]
                score = np.asarray(keys, np.float64) @ q[i, j, head].astype(np.float64) * scale
                if sinks_H is not None:
                    score, values = np.append(score, sinks_H[head]), [*values, np.zeros(c)]
                weight = np.exp(score - score.max())
                out[i, j, head] = weight / weight.sum() @ np.asarray(values, np.float64)
    return out


def case(lengths, n, heads, kv_heads, channels, page, spare, prior=0, seed=0):
    """Ragged rows over a shuffled pool; every page slot that no row owns is NaN."""
    rng = np.random.default_rng(seed)
    b, columns = len(lengths), max(-(-max(lengths) // page) + spare, 1)
    num_pages = sum(-(-x // page) for x in lengths) + 3
    pages = np.full((num_pages, kv_heads, page, 2 * channels), np.nan, np.float32)
    order = iter(rng.permutation(num_pages))
    # Entries behind the length: the sentinel, a poisoned page, or far out of range.
    table = rng.choice([num_pages, num_pages - 1, 10 * num_pages], (b, columns)).astype(np.int32)
    for i, tokens in enumerate(lengths):
        for p in range(-(-tokens // page)):
            table[i, p] = next(order)
            used = min(page, tokens - p * page)
            pages[table[i, p], :, :used] = rng.normal(size=(kv_heads, used, 2 * channels))
    t = prior + n
    mask = np.tril(rng.random((b, n, t)) < 0.5, k=prior)
    mask[:, np.arange(n), prior + np.arange(n)] = True
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    q, k, v = normal(b, n, heads, channels), normal(b, t, kv_heads, channels), normal(b, t, kv_heads, channels)
    return q, pages, table, np.asarray(lengths, np.int32), k, v, mask


CASES = {
    "ragged": case([0, 1, 7, 8, 9, 31, 17], 5, 4, 2, 8, 8, spare=2),
    "page edges": case([16, 15, 32, 33], 3, 4, 4, 4, 16, spare=0),
    "one group": case([5, 12], 2, 6, 1, 8, 4, spare=5),
    "prior entries": case([3, 11, 0], 4, 4, 2, 8, 4, spare=1, prior=6),
    "nothing committed": case([0, 0], 4, 2, 1, 4, 4, spare=3),
    "page of one token": case([6, 2, 0], 2, 2, 2, 4, 1, spare=1),
    "one query": case([40, 3, 24], 1, 8, 2, 8, 8, spare=1),
}


@pytest.mark.parametrize("block", [1, 24, 4096])
@pytest.mark.parametrize("name", CASES)
def test_reference_follows_the_definition(name: str, block: int):
    args = CASES[name]
    out = tree_attention(*args, block_tokens=block)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, naive(*args, scale=args[0].shape[-1] ** -0.5), rtol=2e-5, atol=2e-6)


def test_scale_and_large_scores():
    q, pages, table, length, k, v, mask = CASES["ragged"]
    args = (q * 40, pages, table, length, k, v, mask)
    out = tree_attention(*args, scale=2.0, block_tokens=8)
    np.testing.assert_allclose(out, naive(*args, scale=2.0), rtol=1e-4, atol=1e-4)


def test_sinks_take_their_part_and_give_nothing():
    args = CASES["ragged"]
    sinks_H = np.asarray([-50.0, 0.5, 3.0, 60.0], np.float32)
    out = tree_attention(*args, sinks_H=sinks_H, block_tokens=8)
    want = naive(*args, scale=args[0].shape[-1] ** -0.5, sinks_H=sinks_H)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-6)
    assert np.abs(out[:, :, 3]).max() < 1e-6, "what the largest sink leaves of its head"


@pytest.mark.parametrize("implementation", ["reference", "interpret", "triton"])
def test_a_layers_pages_may_lie_behind_others(implementation: str):
    args = dataclasses.replace(SMALL[0], lengths="full").draw(0)
    run = functools.partial(gpu.tree_attention, interpret=True)
    run = run if implementation == "triton" else api.OPERATION.implementations[implementation].run
    run, pages = jax.jit(run), np.asarray(args.pages)
    pool = jnp.asarray(np.concatenate([np.full_like(pages, np.nan), pages]))
    own = dataclasses.replace(args, pages=pool, first_page=args.pages.shape[0])
    np.testing.assert_array_equal(run(own), run(args))


def test_values_may_be_the_first_channels_of_their_keys():
    q, pages, table, length, k, _, mask = CASES["one group"]
    alone = np.concatenate([pages[..., :8], pages[..., :8]], axis=-1)  # for the definition
    want = naive(q, alone, table, length, k, k, mask, 0.3)[..., :5]
    given = [jnp.asarray(x) for x in (q, pages[..., :8], table, length, k, k[..., :5], mask)]
    of = functools.partial(api.tree_attention, scale=0.3, value_channels=5, implementation="reference")
    out = jax.jit(of)(*given)
    assert out.shape == (*q.shape[:3], 5)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-6)
    messages = {"tpu": "values are the first 5 channels of their keys", "gpu": "both multiples of 8, got 5 of 8"}
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message):
            api.tree_attention(*given, value_channels=5, implementation=name)
    with pytest.raises(ValueError, match="from 1 to the 8 channels of a key, got 9"):
        api.tree_attention(*given[:5], jnp.asarray(np.zeros((*k.shape[:3], 9))), given[6], value_channels=9)


def test_a_mask_is_bool():
    *given, mask = (jnp.asarray(x) for x in CASES["one group"])
    with pytest.raises(ValueError, match="tree_mask must be bool, got int32"):
        api.tree_attention(*given, mask.astype(jnp.int32), implementation="reference")


def test_what_every_window_hides_may_be_anything():
    """Pages that went back to the pool, in a block with others: those of another request by now, with its NaN."""
    q, pages, table, length, k, v, mask = CASES["ragged"]
    poisoned = pages.copy()
    hidden = [page for row, tokens in zip(table, length, strict=True) for page in row[: max(0, tokens - 5) // 8]]
    assert len(hidden) > 3
    poisoned[hidden] = np.nan
    run = jax.jit(functools.partial(reference.tree_attention, block_tokens=16))
    out = [run(TreeAttentionArgs(q, given, table, length, k, v, mask, window=6)) for given in (pages, poisoned)]
    np.testing.assert_array_equal(*out)


def test_bfloat16_keeps_its_dtype_and_float32_sums():
    args = CASES["ragged"]
    cast = [jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else jnp.asarray(x) for x in args]
    out = tree_attention(*cast, block_tokens=8)
    assert out.dtype == jnp.bfloat16
    exact = [np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else np.asarray(x) for x in cast]
    np.testing.assert_allclose(
        np.asarray(out, np.float32), naive(*exact, scale=args[0].shape[-1] ** -0.5), rtol=0.05, atol=0.05
    )


def test_rows_do_not_see_each_other():
    """A row alone, among others, and at another place in the batch: the same bits."""
    q, pages, table, length, k, v, mask = CASES["ragged"]
    run = jax.jit(lambda *a: tree_attention(*a, block_tokens=8))
    shared = np.asarray(run(q, pages, table, length, k, v, mask))
    turn = np.roll(np.arange(len(length)), 3)
    rolled = np.asarray(run(q[turn], pages, table[turn], length[turn], k[turn], v[turn], mask[turn]))
    np.testing.assert_array_equal(rolled, shared[turn])
    # A neighbour's NaN stays its own.
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[2], bad_v[2] = np.nan, np.nan
    after = np.asarray(run(q, pages, table, length, bad_k, bad_v, mask))
    others = np.arange(len(length)) != 2
    np.testing.assert_array_equal(after[others], shared[others])
    assert np.isnan(after[2]).all()


def test_the_longest_row_costs_nothing_to_the_others():
    """The trip count follows the longest row; blocks behind a row's length change none of its bits."""
    q, pages, table, length, k, v, mask = CASES["one query"]
    run = jax.jit(lambda *a: tree_attention(*a, block_tokens=8))
    together = np.asarray(run(q, pages, table, length, k, v, mask))
    alone = np.asarray(run(q, pages, table, np.where(np.arange(3) == 1, length, 0).astype(np.int32), k, v, mask))
    np.testing.assert_array_equal(alone[1], together[1])


@pytest.mark.parametrize(("window", "blocks"), [(None, 7), (9, 2), (17, 3), (200, 7)])
def test_windows_are_read_and_nothing_before_them(window: int | None, blocks: int, monkeypatch: pytest.MonkeyPatch):
    """Rows of unequal length walk their own windows side by side: as many blocks as the one with most of them."""
    q, pages, table, length, k, v, mask = case([53, 21, 3], 3, 4, 2, 8, 8, 0)
    args = TreeAttentionArgs(q, pages, table, length, k, v, np.tril(np.ones_like(mask)), window=window)
    weighted = []
    kept = reference._weighted
    monkeypatch.setattr(reference, "_weighted", lambda p, v: weighted.append(p) or kept(p, v))
    with jax.disable_jit():
        out = reference.tree_attention(args)
    assert len(weighted) == 1 + blocks  # the tree first
    assert np.isfinite(np.asarray(out)).all()
