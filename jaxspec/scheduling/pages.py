"""Ownership of the pool's pages: free, referenced by page tables, or idle in the prefix cache.

Standard library only. Must not know requests or tokens. Page numbers are 0 to num_pages - 1; `num_pages` itself
stands for "no page" wherever a table has to be padded (a scatter drops it, whereas -1 would be the last page).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PageAllocator:
    """Counts the page tables that hold each page.

    A page that no table holds any more is free, unless it was kept: then it is idle, its contents stay, and it can
    be shared again or evicted. Idle pages are evicted in the order in which they became idle.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free_count(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def idle_count(self) -> int:
        """Pages that no table holds, but whose contents are kept."""
        return len(self._idle)

    @property
    def available_count(self) -> int:
        """Pages that a table can get: free ones, and idle ones after eviction."""
        return len(self._free) + len(self._idle)

    def references(self, page: int) -> int:
        """Page tables that hold the page."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each held by one table. Raises ValueError when fewer are free."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"cannot allocate {count} pages, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Another table holds these pages; each must be held or idle. Raises ValueError for a free page."""
        for page in pages:
            if not self._references[page] and page not in self._idle:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._idle.pop(page, None)
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """A table gives up its pages, last first, so that idle pages are evicted from the end of a sequence.

        Raises ValueError for a page that no table holds (a double free).
        """
        for page in reversed(pages):
            if not self._references[page]:
                raise ValueError(f"page {page} is released, but no page table holds it")
            self._references[page] -= 1
            if not self._references[page]:
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """The contents of a held page are to survive its release."""
        assert self._references[page] and page not in self._kept
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """The contents are needed no longer: an idle page becomes free, a held one at its release."""
        self._kept.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def oldest_idle(self) -> int:
        """The page to evict next; there must be one."""
        return next(iter(self._idle))
