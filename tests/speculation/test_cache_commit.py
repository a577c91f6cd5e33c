"""The commit writes what it is told to, where it is told to, and not a byte elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import cache
from jaxspec.cache import TreeKV, commit, init_pages

LAYERS, PAGES, GROUPS, PAGE, CHANNELS = 2, 6, 2, 4, 3
_commit = jax.jit(commit, static_argnames="num_pages")


def expected(pages, kv, table, position, write):
    """The definition, token by token."""
    out = pages.copy()
    for layer, row, node in itertools.product(range(kv.shape[0]), range(kv.shape[1]), range(kv.shape[2])):
        p = position[row, node]
        if write[row, node] and 0 <= p < table.shape[1] * PAGE and 0 <= table[row, p // PAGE] < PAGES:
            out[layer * PAGES + table[row, p // PAGE], :, p % PAGE] = kv[layer, row, node]
    return out


@pytest.mark.parametrize(
    ("seed", "layers", "b", "n", "m"), [*((seed, LAYERS, 3, 5, 2) for seed in range(5)), (5, 19, 4, 9, 1)]
)
def test_commit_follows_its_definition(seed: int, layers: int, b: int, n: int, m: int, monkeypatch: pytest.MonkeyPatch):
    """Sentinel pages, positions before and behind the table, and rows that do not write; of many tokens some layers at
    a time, as GPUs have it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rng = np.random.default_rng(seed)
    pages = rng.normal(size=(layers * PAGES, GROUPS, PAGE, 2 * CHANNELS)).astype(np.float32)
    kv = rng.normal(size=(layers, b, n, GROUPS, 2 * CHANNELS)).astype(np.float32)
    table = rng.permutation(PAGES)[: b * m].reshape(b, m).astype(np.int32)
    table[rng.random((b, m)) < 0.3] = PAGES
    position = (rng.integers(-6, m * PAGE + 4, (b, 1)) + np.arange(n)).astype(np.int32)
    write = rng.random((b, n)) < 0.7
    ready = np.ones(b, bool)
    out = _commit(*map(jnp.asarray, (pages, kv, table, position, write)), num_pages=PAGES, ready_B=jnp.asarray(ready))
    np.testing.assert_array_equal(out, expected(pages, kv, table, position, write))


@pytest.mark.parametrize(
    ("position", "page", "write"),
    [(0, PAGES, True), (-1, 0, True), (PAGE, 0, True), (2**30, 0, True), (0, 0, False), (0, 10 * PAGES, True)],
    ids=[
        "sentinel page",
        "before the start",
        "behind the table",
        "far behind",
        "not to be written",
        "page out of range",
    ],
)
def test_nothing_is_written_without_a_place(position: int, page: int, write: bool):
    """Above all no other layer's pages, and not the last page (what an index of -1 would hit)."""
    pages = init_pages(LAYERS, PAGES, GROUPS, PAGE, 2 * CHANNELS, jnp.dtype(jnp.float32)) + 7.0
    kv = jnp.full((LAYERS, 1, 1, GROUPS, 2 * CHANNELS), jnp.nan)
    out = _commit(
        pages, kv, jnp.asarray([[page]]), jnp.asarray([[position]]), jnp.asarray([[write]]), num_pages=PAGES,
        ready_B=jnp.asarray([True]),
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.full(pages.shape, 7.0, np.float32))


def test_layers_go_in_as_many_scatters_as_they_shall_of_places_that_are_all_different():
    """Else XLA's scatter for GPUs writes numbers of 16 bits by atomic operations."""
    rng = np.random.default_rng(0)
    kv = jnp.asarray(rng.normal(size=(5, 2, 3, GROUPS, 2 * CHANNELS)), jnp.float32)
    pages = init_pages(5, PAGES, GROUPS, PAGE, 2 * CHANNELS, jnp.dtype(jnp.float32))
    table, position = jnp.asarray([[4], [2]]), jnp.asarray([[0, 1, 2], [1, 2, 3]])
    write = jnp.asarray([[True, False, True], [False, True, True]])
    found = {}
    for each, scatters in ((None, 1), (5, 1), (2, 3), (1, 5)):
        made = jax.jit(lambda *given, each=each: commit(*given, PAGES, ready_B=jnp.ones(2, bool), each=each))
        lowered = made.lower(pages, kv, table, position, write)
        text = lowered.as_text()
        assert text.count('"stablehlo.scatter"(') == scatters == text.count("unique_indices = true"), each
        found[each] = np.asarray(lowered.compile()(pages, kv, table, position, write))
        np.testing.assert_array_equal(found[each], found[None])
    assert found[None].any()


def test_keys_and_values_are_stored_in_the_pools_dtype():
    pages = init_pages(1, 2, 1, PAGE, 2 * CHANNELS, jnp.dtype(jnp.bfloat16))
    out = commit(
        pages, jnp.full((1, 1, 1, 1, 2 * CHANNELS), 1.00390625), jnp.asarray([[1]]), jnp.asarray([[2]]),
        jnp.asarray([[True]]), 2, ready_B=jnp.asarray([True]),
    )  # fmt: skip
    assert out.dtype == jnp.bfloat16 and float(out[1, 0, 2, 0]) == 1.0 and not out[0].any()


@pytest.mark.parametrize("kernels", [None, "tpu"])
def test_attention_over_the_pool_equals_attention_over_new_tokens(kernels: str | None):
    """Tokens seen as new ones, then from the pool after their commit: the same result, layer by layer.

    A TPU's pool is wider than its keys and values; the reference reads it all the same.
    """
    rng = np.random.default_rng(3)
    t, heads = 6, 4
    table, tril = jnp.asarray([[4, 1]]), jnp.tril(jnp.ones((t, t), bool))[None]
    pages = init_pages(LAYERS, PAGES, GROUPS, PAGE, 2 * CHANNELS, jnp.dtype(jnp.float32), kernels) + jnp.nan
    assert pages.shape[3] == (2 * CHANNELS if kernels is None else 128)
    q = [jnp.asarray(rng.normal(size=(1, t, heads, CHANNELS)), jnp.float32) for _ in range(LAYERS)]
    k, v = (jnp.asarray(rng.normal(size=(LAYERS, 1, t, GROUPS, CHANNELS)), jnp.float32) for _ in range(2))

    @jax.jit
    def attended(pages: jax.Array) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        at_once = TreeKV(pages, table, jnp.asarray([0]), tril, PAGES)
        whole = [at_once.attend(i, q[i], k[i], v[i]) for i in range(LAYERS)]
        stacked = at_once.stacked()
        assert stacked.shape == (LAYERS, 1, t, GROUPS, 2 * CHANNELS)
        position, write = jnp.arange(t)[None], jnp.asarray([[True] * 5 + [False]])
        pool = commit(pages, stacked, table, position, write, PAGES, ready_B=jnp.asarray([True]))
        last = TreeKV(pool, table, jnp.asarray([5]), jnp.ones((1, 1, 1), bool), PAGES)
        prior = TreeKV(pages, table, jnp.asarray([0]), tril[:, 5:], PAGES, prior=stacked[:, :, :5])
        one = lambda view, i: view.attend(i, q[i][:, 5:], k[i][:, 5:], v[i][:, 5:])
        return whole, [[one(view, i) for view in (last, prior)] for i in range(LAYERS)]

    for together, alone in zip(*attended(pages), strict=True):
        for out in alone:
            np.testing.assert_allclose(out, together[:, 5:], rtol=1e-5, atol=1e-6)


def test_layers_share_what_the_first_has_read(monkeypatch: pytest.MonkeyPatch):
    """Kernels may read that before the kernel before has ended, so it must be the very arrays, and be there by then."""
    seen: list[dict[str, Any]] = []

    def attend(q, pages, table, length, *_, shared, **options):
        seen.append(options | {"arrays": (pages, table, length), "shared": shared, "read": shared.read})
        shared.read = True  # as kernels do that read them as they are
        return q

    monkeypatch.setattr(cache, "tree_attention", attend)
    pages = init_pages(3, PAGES, GROUPS, PAGE, 2 * CHANNELS, jnp.dtype(jnp.float32))
    x = jnp.ones((1, 1, GROUPS, CHANNELS))
    kv = TreeKV(pages, jnp.asarray([[0]]), jnp.asarray([0]), None, PAGES)
    for layer in (0, 2):
        kv.attend(layer, x, x, x)
    assert [(own["first_page"], own["read"]) for own in seen] == [(0, False), (2 * PAGES, True)]
    assert seen[0]["shared"] is seen[1]["shared"]
    assert all(a is b for a, b in zip(seen[0]["arrays"], seen[1]["arrays"], strict=True))
