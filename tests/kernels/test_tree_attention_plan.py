"""Which blocks of which requests attention on Mosaic GPU computes as one item: each once, and nobody much more."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import mosaic_plan
from pallas_kernels.tree_attention.mosaic_few import Few
from pallas_kernels.tree_attention.mosaic_launch import Launch


@pytest.mark.parametrize("per", [1, mosaic_plan.FEW, mosaic_plan.GROUP, None])
@pytest.mark.parametrize(("news", "window", "causal"), [(4, None, True), (70, None, False), (4, 70, True)])
def test_the_plan_covers_every_block_once(
    per: int | None, news: int, window: int | None, causal: bool, monkeypatch: pytest.MonkeyPatch
):
    lengths = np.asarray([0, 1, 63, 64, 255, 256, 257, 5000, 640, 4096])
    monkeypatch.setattr(mosaic_plan, "_SINGLE", 1000 if per == 1 else 0)
    monkeypatch.setattr(mosaic_plan, "_QUARTER", 1000 if per == mosaic_plan.FEW else 0)
    blocks = -(-(5056 + news) // 64)
    sizes = mosaic_plan.Sizes(units=1, threads=1, blocks=blocks, whole=per is None)
    plan = jax.jit(lambda lengths: mosaic_plan.plan(lengths, news, sizes, window, causal))
    items, count, ends = map(np.asarray, plan(jnp.asarray(lengths)))
    covers(items, count, ends, lengths, news, window, causal)
    assert items.shape[1] == sizes.items(len(lengths)) and count[1] == (per is None)
    np.testing.assert_array_equal(ends[4], per or blocks)
    sizes_of_lasts = (items[2] - items[1])[: len(lengths)]
    assert sorted(items[0, : len(lengths)]) == list(range(len(lengths)))  # the last ones come before the long ones
    assert (np.diff(sizes_of_lasts) * (1 if per else -1) >= 0).all()  # the shortest first, or whole ones the longest


def covers(
    items: np.ndarray, count: np.ndarray, ends: np.ndarray, lengths: np.ndarray, news: int, window: int | None,
    causal: bool,
) -> None:  # fmt: skip
    """Asserts that a plan's items are each request's blocks, once, and that the arrays agree about them."""
    assert count[0] <= items.shape[1]
    b, begin, stop, length, others = items[:, : count[0]]
    first, end, long, last, per = ends
    np.testing.assert_array_equal(length, lengths[b])
    np.testing.assert_array_equal(others, (end - first - 1)[b])
    assert (stop > begin).all() and (stop - begin <= per[b]).all()
    for i, length in enumerate(lengths):
        own = np.asarray([*range(long[i], long[i] + end[i] - first[i] - 1), last[i]])
        assert (b[own] == i).all()
        np.testing.assert_array_equal(begin[own] // per[i], np.arange(first[i], end[i]))
        low = 0 if window is None else max(0, length - window + 1) // 64
        place = length if causal else -(-length // 64) * 64
        covered = np.concatenate([np.arange(begin[x], stop[x]) for x in own])
        np.testing.assert_array_equal(covered, np.arange(low, -(-(place + news) // 64)))


def busiest(items: np.ndarray, count: np.ndarray, units: int, threads: int) -> int:
    """Blocks of the warpgroup that has the most to do, turns going to and fro."""
    blocks = np.repeat((items[2] - items[1])[: count[0]], units)
    turns = np.pad(blocks, (0, -len(blocks) % threads)).reshape(-1, threads)
    turns[1::2] = turns[1::2, ::-1]
    return int(turns.sum(axis=0).max())


@pytest.mark.parametrize(
    ("kind", "lengths", "whole"),
    [
        ("alike", [1000] * 32, True),
        ("half of a bucket", [1000] * 17 + [0] * 15, True),
        ("up to 2,000", list(range(40, 2088, 64)), True),
        ("one of 8k", [500] * 20 + [8192] + [500] * 11, False),
        ("one of 32k", [32_000] + [500] * 63, False),
        ("some long ones", [9000, 7000, 4000, 4000] + [900] * 124, False),
        ("two turns", [2000] * 64, True),
        ("a third turn for few", [8000] * 67, False),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize(("news", "window", "causal"), [(4, None, True), (8, None, False), (1, 600, True)])
def test_requests_much_longer_than_others_are_cut(
    kind: str, lengths: list[int], whole: bool, news: int, window: int | None, causal: bool
):
    """As long as it takes to wait for them; a warpgroup then has little more to do than the others."""
    shape = len(lengths), news, news, 32, 8, 128, 64, causal, window, 0.1, 132, 2, True
    sizes = mosaic_plan.Sizes.of(Few(*shape), 65_536)
    if not sizes.mixed:  # a number of requests that others are made for
        sizes = dataclasses.replace(sizes, whole=False, straight=False, mixed=True, room=2000)
    plan = jax.jit(lambda lengths: mosaic_plan.plan(lengths, news, sizes, window, causal))
    items, count, ends = map(np.asarray, plan(jnp.asarray(lengths, jnp.int32)))
    covers(items, count, ends, np.asarray(lengths), news, window, causal)
    assert (np.diff((items[2] - items[1])[: count[0]]) <= 0).all()  # the longest first
    if window is None:
        assert bool(count[1]) == whole
        mean = int((items[2] - items[1])[: count[0]].sum()) * 8 / 264
        assert whole or busiest(items, count, 8, 264) <= mean + mosaic_plan.GROUP + 1


@pytest.mark.parametrize(
    ("batch", "others", "most"), [(32, 500, 25), (32, 2000, 60), (64, 500, 41), (64, 4000, 168), (128, 900, 61)]
)
def test_a_request_is_cut_once_waiting_for_it_takes_longer_than_pieces(batch: int, others: int, most: int):
    """Of a batch of equals the first one has so many blocks, and then one more."""
    shape = batch, 4, 4, 32, 8, 128, 64, True, None, 0.1, 132, 2, True
    sizes = mosaic_plan.Sizes.of(Few(*shape), 65_536)
    plan = jax.jit(lambda lengths: mosaic_plan.plan(lengths, 4, sizes, None, True)[1])
    whole = [int(plan(jnp.asarray([64 * n - 10] + [others] * (batch - 1), jnp.int32))[1]) for n in (most, most + 1)]
    assert whole == [1, 0]


@pytest.mark.parametrize(
    ("lengths", "news"),
    [
        ([32_768] + [2500] * 127, 8),
        ([131_072] + [12_000] * 63, 4),
        ([131_072] * 4 + [1024] * 28, 8),
        ([100_000] + [100] * 7, 4),
    ],
    ids=["128 of 32k", "64 of 131k", "four of 131k", "8 of 131k"],
)
def test_pieces_of_long_texts_have_room(lengths: list[int], news: int):
    shape = len(lengths), news, news, 32, 8, 128, 64, True, None, 0.1, 132, 2, True
    sizes = mosaic_plan.Sizes.of(Few(*shape), 132_096)
    assert sizes.mixed
    plan = jax.jit(lambda lengths: mosaic_plan.plan(lengths, news, sizes, None, True))
    items, count, ends = map(np.asarray, plan(jnp.asarray(lengths, jnp.int32)))
    covers(items, count, ends, np.asarray(lengths), news, None, True)
    mean = int((items[2] - items[1])[: count[0]].sum()) * 8 / 264
    assert not count[1] and busiest(items, count, 8, 264) <= mean + mosaic_plan.GROUP + 1


def test_requests_are_whole_where_there_is_no_room_for_pieces():
    lengths = np.asarray([32_000] + [500] * 31)
    sizes = mosaic_plan.Sizes(8, 264, 1025, False, mixed=True, room=40)
    plan = jax.jit(lambda lengths: mosaic_plan.plan(lengths, 1, sizes, None, True))
    items, count, ends = map(np.asarray, plan(jnp.asarray(lengths)))
    assert items.shape == (5, 40) and tuple(count) == (32, 1)
    covers(items, count, ends, lengths, 1, None, True)


def test_windows_that_begin_and_end_within_a_few_blocks_have_room():
    """Eight requests of equal lengths, and as many blocks as are taken a few at a time."""
    shape = 8, 4, 4, 32, 8, 128, 64, True, 4096, 0.1, 132, 2, True
    sizes = mosaic_plan.Sizes.of(Launch(*shape), 8192)
    plan = jax.jit(lambda lengths: mosaic_plan.plan(lengths, 4, sizes, 4096, True)[:2])
    counts = []
    for length in range(7676, 7680):
        items, count = map(np.asarray, plan(jnp.full((8,), length, jnp.int32)))
        assert count[0] <= items.shape[1]
        counts.append(int(count[0]))
    assert max(counts) == 144 > sizes.most[1] // mosaic_plan.FEW + 8
