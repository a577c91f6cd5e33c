"""Which page holds which prefix: full pages of earlier requests, found again by their tokens.

Standard library only. Must not know requests or slots. Page ownership is the allocator's.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.scheduling.pages import PageAllocator

_ROOT = -1  # parent of a sequence's first page; only ever a dictionary key


class PrefixCache:
    """A tree of full pages. A node is its parent's page number and the tokens of its own page.

    The parent's number stands for everything before: whoever holds a child holds its parents too, and pages become
    idle, and are evicted, last first. Only requests that gave pages behind their windows back (Scheduler) hold children
    without parents: when such a parent is evicted, what hangs below it is forgotten too. Tokens themselves are
    compared, so a hit is never false.

    Args:
      allocator: owner of the pages.
      page_size: tokens a page.
      lookahead: further tokens that a page's contents depend on. 0 for keys and values of a causal model; 1 when an
        EAGLE drafter shares the page table, whose entry at position p is computed from token p + 1.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, lookahead: int = 0) -> None:
        self.lookahead = lookahead
        self._allocator = allocator
        self._page_size = page_size
        self._page_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._children: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """Pages known, held or idle."""
        return len(self._key_of)

    def pages(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        """What each known page holds: {page: (the page before it or -1, its tokens with the lookahead)}."""
        return dict(self._key_of)

    def _key(self, parent: int, tokens: Sequence[int], index: int) -> tuple[int, tuple[int, ...]]:
        start = index * self._page_size
        return parent, tuple(tokens[start : start + self._page_size + self.lookahead])

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest known prefix; always leaves at least one token to compute. Changes nothing."""
        pages: list[int] = []
        parent = _ROOT
        for index in range((len(tokens) - max(1, self.lookahead)) // self._page_size):
            page = self._page_of.get(self._key(parent, tokens, index))
            if page is None:
                break
            pages.append(page)
            parent = page
        return pages

    def missing(self, tokens: Sequence[int], pages: Sequence[int], known: int) -> tuple[int, tuple[int, ...]] | None:
        """Names what follows the `known` leading pages of a table; equal where two texts go on alike for a page.

        None where the text ends before it would fill that page (and the lookahead).
        """
        if (known + 1) * self._page_size + self.lookahead > len(tokens):
            return None
        return self._key(pages[known - 1] if known else _ROOT, tokens, known)

    def register(self, tokens: Sequence[int], pages: Sequence[int], known: int, full: int) -> int:
        """Makes pages known..full-1 of a page table findable and returns how many leading pages now are.

        Stops where another page already holds the same prefix: this table does not hold that page, so its own
        further pages cannot hang below it.

        Args:
          tokens: at least full * page_size + lookahead tokens of the sequence.
          pages: its page table.
          known: leading pages that are in the cache already.
          full: leading pages whose contents are written, or will be by work already dispatched.
        """
        parent = pages[known - 1] if known else _ROOT
        if known and parent not in self._key_of:  # the cache was reset meanwhile
            return known
        for index in range(known, full):
            key = self._key(parent, tokens, index)
            if key in self._page_of:
                return index
            parent = pages[index]
            self._page_of[key] = parent
            self._key_of[parent] = key
            self._children.setdefault(key[0], set()).add(parent)
            self._allocator.keep(parent)
        return max(known, full)

    def evict(self) -> None:
        """Frees the idle page that was used the longest ago; there must be one."""
        self._remove(self._allocator.oldest_idle())

    def reset(self) -> None:
        """Forgets every prefix; pages still held by a table are freed at their release."""
        for page in list(self._children.get(_ROOT, ())):
            self._remove(page)

    def _remove(self, page: int) -> None:
        """Forgets a page and all below it."""
        siblings = self._children[self._key_of[page][0]]
        siblings.remove(page)
        if not siblings:
            del self._children[self._key_of[page][0]]
        below = [page]
        while below:
            page = below.pop()
            below += self._children.pop(page, ())
            del self._page_of[self._key_of.pop(page)]
            self._allocator.forget(page)
