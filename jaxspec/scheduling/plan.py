"""What the scheduler is told, and what it hands to whoever drives the device.

NumPy and the standard library only. Must not know how a plan comes about, or how it is run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.request import Request
from jaxspec.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler hands out, and by which rules.

    Attributes:
      sizes: of the device state.
      enable_prefix_caching: reuse pages of earlier requests.
      prefix_lookahead: see PrefixCache.
      aging_seconds: what a step of priority is worth in waiting: a request of priority p queues as if it had come
        p * aging_seconds later, so that nobody waits for ever.
      window: tokens that every layer sees at most which reads the pool: pages behind them go back to it while their
        request runs. None: some layer sees all.
      shorter_chunks: (position, most tokens) of prefill chunks while others decode; see shapes.shorter_chunks.
      batched_beside: most tokens of all prefill chunks of a step while others decode, and so of one of them; None: the
        sizes' max_num_batched_tokens, as while nobody does.

    Raises:
      ValueError: names the field, what was given and what is allowed.
    """

    sizes: Sizes
    enable_prefix_caching: bool = True
    prefix_lookahead: int = 0
    aging_seconds: float = 10.0
    shorter_chunks: tuple[tuple[int, int], ...] = ()
    window: int | None = None
    batched_beside: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.aging_seconds < math.inf:
            raise ValueError(f"SchedulerConfig.aging_seconds must be positive and finite, got {self.aging_seconds!r}")
        if type(self.prefix_lookahead) is not int or self.prefix_lookahead < 0:
            raise ValueError(
                f"SchedulerConfig.prefix_lookahead must be an integer of at least 0, got {self.prefix_lookahead!r}"
            )

    def batched(self, others: bool) -> int:
        """Most tokens of all prefill chunks of a step.

        Args:
          others: whether others decode.
        """
        most = self.sizes.max_num_batched_tokens
        return min(most, self.batched_beside or most) if others else most

    def chunk_at(self, start: int, others: bool) -> int:
        """Most tokens of a chunk from this position on; others: see `batched`."""
        shorter = (most for position, most in self.shorter_chunks if start >= position) if others else ()
        return min([self.sizes.prefill_chunk, self.batched(others), *shorter])


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Tokens [start, end) of a request's prompt, and of its outputs so far when it resumes.

    Attributes:
      request: its `token_ids` are what is prefilled; they do not change until the last chunk's token is committed.
      slot: row of the device state.
      start, end: positions; on a prefix-cache hit the first chunk starts behind the hit.
      is_last: the next token is sampled from this chunk's last position.
      is_first: the slot is new to the request: upload tokens, sampling parameters and page table.
      page_table: all pages of the request, enough for the tokens and one round's growth.
    """

    request: Request
    slot: int
    start: int
    end: int
    is_last: bool
    is_first: bool
    page_table: tuple[int, ...]


#: `DecodeRows.caps_B` of a request that sets no limit.
NO_LIMIT = 2**31 - 1


class Grant(NamedTuple):
    """Pages that a row gets before the round.

    Attributes:
      row: of the batch.
      first: first entry of the slot's page table to write.
      pages: what to write there; at most `Sizes.growth_pages`.
    """

    row: int
    first: int
    pages: Sequence[int]


@dataclasses.dataclass
class DecodeRows:
    """The requests that take part in a round, oldest first.

    Attributes:
      requests: one a row.
      slots_B: rows of the device state.
      stamps_B: by which the scheduler knows, when the result comes, whether the slot has changed hands meanwhile.
      caps_B: most drafts that each accepts, NO_LIMIT for any number; None: no row sets a limit.
      computed_B: tokens of each whose keys and values are known to be in the pool.
      shaped_B: not 0 where it asks for more than the argmax. logprobs_B: not 0 where it wants log-probabilities.
      grants: new pages, often none.
      rounds: how many rounds in a row their pages allow; once they are dispatched, how many those are.
      growth: most tokens that they add to a row, once they are dispatched.
    """

    requests: Sequence[Request]
    slots_B: np.ndarray
    stamps_B: np.ndarray
    caps_B: np.ndarray | None
    computed_B: np.ndarray
    shaped_B: np.ndarray
    logprobs_B: np.ndarray
    grants: Sequence[Grant] = ()
    rounds: int = 1
    growth: int = 0

    def __len__(self) -> int:
        return len(self.requests)

    @functools.cached_property
    def context_tokens(self) -> int:
        """Over all rows."""
        return sum(self.computed_B.tolist())

    @property
    def deepest(self) -> int | None:
        """Most drafts that any of the rows may accept; None where one sets no limit."""
        most = NO_LIMIT if self.caps_B is None else int(self.caps_B.max(initial=0))
        return None if most == NO_LIMIT else most

    def parts(self, most: int) -> list[DecodeRows]:
        """The same rows in rounds of at most so many."""
        if len(self) <= most:
            return [self]
        return [self._part(slice(first, first + most)) for first in range(0, len(self), most)]

    def _part(self, at: slice) -> DecodeRows:
        grants = [g._replace(row=g.row - at.start) for g in self.grants if at.start <= g.row < at.stop]
        return DecodeRows(
            self.requests[at], self.slots_B[at], self.stamps_B[at], None if self.caps_B is None else self.caps_B[at],
            self.computed_B[at], self.shaped_B[at], self.logprobs_B[at], grants,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step's work.

    Attributes:
      prefill: chunks of different requests, in the order in which those run.
      decode: rows of the round; never holds a request of `prefill`.
      preempted: requests that lost slot and pages while this was planned.
    """

    prefill: tuple[PrefillChunk, ...]
    decode: DecodeRows
    preempted: tuple[Request, ...]

    @property
    def empty(self) -> bool:
        """Nothing to dispatch."""
        return not self.prefill and not len(self.decode)


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """A snapshot.

    Attributes:
      running, waiting: requests with a slot, and without.
      free_pages, cached_pages: pages that hold nothing, and those that only the prefix cache holds.
      preemptions: since the start.
      prefix_hits, prefix_queries: tokens found in the prefix cache, of those admitted since the start.
    """

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    preemptions: int
    prefix_hits: int
    prefix_queries: int
