"""Page ownership and the prefix cache."""

from __future__ import annotations

import pytest

from jaxspec.scheduling import PageAllocator, PrefixCache


def test_allocator_hands_out_each_page_once_and_takes_it_back():
    pages = PageAllocator(5)
    first, second = pages.allocate(2), pages.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4] and pages.free_count == 0
    with pytest.raises(ValueError, match="cannot allocate 1 pages, 0 are free"):
        pages.allocate(1)
    pages.release(second)
    assert pages.free_count == 3 and [pages.references(page) for page in first] == [1, 1]


def test_double_free_is_an_error():
    pages = PageAllocator(2)
    held = pages.allocate(1)
    pages.release(held)
    with pytest.raises(ValueError, match="no page table holds it"):
        pages.release(held)
    with pytest.raises(ValueError, match="is free and cannot be shared"):
        pages.share(held)


def test_shared_page_is_free_after_its_last_release():
    pages = PageAllocator(1)
    held = pages.allocate(1)
    pages.share(held)
    pages.release(held)
    assert pages.free_count == 0
    pages.release(held)
    assert pages.free_count == 1


def test_kept_page_is_idle_after_its_release_and_can_be_shared_again():
    pages = PageAllocator(2)
    held = pages.allocate(1)
    pages.keep(held[0])
    pages.release(held)
    assert (pages.free_count, pages.idle_count, pages.available_count) == (1, 1, 2)
    pages.share(held)
    assert pages.idle_count == 0 and pages.references(held[0]) == 1
    pages.forget(held[0])
    pages.release(held)
    assert pages.free_count == 2


def cached(
    tokens: list[int], *, num_pages: int = 8, lookahead: int = 0
) -> tuple[PageAllocator, PrefixCache, list[int]]:
    """A pool with pages of 2 tokens in which one sequence was computed and released."""
    pages = PageAllocator(num_pages)
    cache = PrefixCache(pages, page_size=2, lookahead=lookahead)
    table = pages.allocate(-(-len(tokens) // 2))
    full = (len(tokens) - lookahead) // 2
    assert cache.register(tokens, table, 0, full) == full
    pages.release(table)
    return pages, cache, table


def test_match_finds_the_longest_prefix_of_full_pages():
    _, cache, table = cached([1, 2, 3, 4, 5])
    assert len(cache) == 2
    assert cache.match([1, 2, 3, 4, 9]) == table[:2]
    assert cache.match([1, 2, 3, 9, 9]) == table[:1]
    assert cache.match([9, 2, 3, 4, 5]) == []
    assert cache.match([3, 4, 5]) == [], "a page counts only behind its own prefix"


def test_match_leaves_a_token_to_compute():
    _, cache, table = cached([1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4]) == table[:1]
    assert cache.match([1, 2]) == cache.match([1]) == cache.match([]) == []


def test_lookahead_makes_the_next_token_part_of_the_page():
    _, cache, table = cached([1, 2, 3, 4, 5], lookahead=1)
    assert cache.match([1, 2, 3, 4, 5, 6]) == table[:2]
    assert cache.match([1, 2, 3, 4, 6, 6]) == table[:1], "the second page was computed with 5 behind it"
    assert cache.match([1, 2, 3, 4]) == table[:1]


def test_equal_hashes_are_no_hit():
    assert hash(-1) == hash(-2), "CPython's one collision among small integers"
    _, cache, _ = cached([-1, -1, 7])
    assert cache.match([-2, -1, 7]) == []


def test_eviction_takes_the_least_recently_used_sequence_from_its_end():
    pages = PageAllocator(4)
    cache = PrefixCache(pages, page_size=2)
    old, new = pages.allocate(2), pages.allocate(2)
    cache.register([1, 2, 3, 4], old, 0, 2)
    cache.register([5, 6, 7, 8], new, 0, 2)
    pages.release(old)
    pages.release(new)
    cache.evict()
    assert cache.match([1, 2, 3, 4, 0]) == old[:1] and cache.match([5, 6, 7, 8, 0]) == new
    pages.share(old[:1])  # used again: now the younger sequence
    pages.release(old[:1])
    cache.evict()
    cache.evict()
    assert cache.match([1, 2, 3, 4, 0]) == old[:1] and cache.match([5, 6, 7, 8, 0]) == []
    assert pages.free_count == 3


def test_a_second_page_with_the_same_prefix_stays_private():
    pages = PageAllocator(6)
    cache = PrefixCache(pages, page_size=2)
    first, second = pages.allocate(1), pages.allocate(2)
    assert cache.register([1, 2], first, 0, 1) == 1
    assert cache.register([1, 2, 3, 4], second, 0, 2) == 0
    assert cache.match([1, 2, 3, 4, 5]) == first
    pages.release(second)
    assert pages.free_count == 5, "nothing of the second table is kept"


def test_reset_forgets_everything_and_held_pages_go_free_at_their_release():
    pages, cache, table = cached([1, 2, 3, 4, 5])
    pages.share(table[:1])
    cache.reset()
    assert len(cache) == 0 and cache.match([1, 2, 3, 4, 5]) == []
    assert pages.free_count == 7 and pages.idle_count == 0
    assert cache.register([1, 2, 3, 4], table[:1] + pages.allocate(1), 1, 2) == 1, "hangs below a page that is unknown"
    pages.release(table[:1])
    assert pages.free_count == 7 and len(cache) == 0
