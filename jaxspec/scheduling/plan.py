"""What the scheduler is told, and what it hands to whoever drives the device.

Standard library only. Must not know how a plan comes about, or how it is run.
"""

from __future__ import annotations

import dataclasses
import math

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

    Raises:
      ValueError: names the field, what was given and what is allowed.
    """

    sizes: Sizes
    enable_prefix_caching: bool = True
    prefix_lookahead: int = 0
    aging_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.aging_seconds < math.inf:
            raise ValueError(f"SchedulerConfig.aging_seconds must be positive and finite, got {self.aging_seconds!r}")
        if type(self.prefix_lookahead) is not int or self.prefix_lookahead < 0:
            raise ValueError(
                f"SchedulerConfig.prefix_lookahead must be an integer of at least 0, got {self.prefix_lookahead!r}"
            )


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


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """A request that takes part in the round.

    Attributes:
      request, slot: the row.
      epoch: goes back into `Scheduler.commit` with the result.
      page_index: first entry of the slot's page table to write.
      new_pages: what to write there; at most `Sizes.growth_pages`, often none.
    """

    request: Request
    slot: int
    epoch: int
    page_index: int
    new_pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step's work.

    Attributes:
      prefill: at most one chunk.
      decode: rows of the round, oldest first; never holds the request of `prefill`.
      preempted: requests that lost slot and pages while this was planned.
    """

    prefill: PrefillChunk | None
    decode: tuple[DecodeRow, ...]
    preempted: tuple[Request, ...]

    @property
    def empty(self) -> bool:
        """Nothing to dispatch."""
        return self.prefill is None and not self.decode


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
