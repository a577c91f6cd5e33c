"""What the scheduler is told about the device state, and what it hands to whoever drives the device.

Standard library only. Must not know how a plan comes about, or how it is run.
"""

from __future__ import annotations

import dataclasses
import math

from jaxspec.request import Request


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """The device state that the scheduler hands out.

    Attributes:
      max_batch_size: slots, rows of the device state.
      num_pages, page_size: the pool, and tokens a page.
      max_pages_per_seq: entries of a slot's page table.
      max_seq_len: most tokens of prompt and outputs.
      max_growth: most tokens a round adds to a row (depth of the deepest tier + 1).
      prefill_chunk: most tokens of a prefill chunk.
      enable_prefix_caching: reuse pages of earlier requests.
      prefix_lookahead: see PrefixCache.
      aging_seconds: what a step of priority is worth in waiting: a request of priority p queues as if it had come
        p * aging_seconds later, so that nobody waits for ever.

    Raises:
      ValueError: a count below its minimum, or a page table too short for max_seq_len + max_growth tokens.
    """

    max_batch_size: int
    num_pages: int
    page_size: int
    max_pages_per_seq: int
    max_seq_len: int
    max_growth: int
    prefill_chunk: int
    enable_prefix_caching: bool = True
    prefix_lookahead: int = 0
    aging_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.aging_seconds < math.inf:
            raise ValueError(f"SchedulerConfig.aging_seconds must be positive and finite, got {self.aging_seconds!r}")
        for field in dataclasses.fields(self):
            if field.name == "aging_seconds":
                continue
            value, low = getattr(self, field.name), int(field.name != "prefix_lookahead")
            if field.name != "enable_prefix_caching" and (type(value) is not int or value < low):
                raise ValueError(f"SchedulerConfig.{field.name} must be an integer of at least {low}, got {value!r}")
        if self.max_pages_per_seq * self.page_size < self.max_seq_len + self.max_growth:
            raise ValueError(
                f"SchedulerConfig.max_pages_per_seq must hold max_seq_len + max_growth = "
                f"{self.max_seq_len + self.max_growth} tokens, got {self.max_pages_per_seq} pages of {self.page_size}"
            )

    def check(self, prompt: int, max_tokens: int) -> None:
        """Whether a request of so many tokens could run alone.

        Raises:
          ValueError: an empty prompt, or more tokens than the context or the pool can ever hold.
        """
        if not prompt:
            raise ValueError("prompt must hold at least 1 token, got 0")
        if prompt >= self.max_seq_len:
            raise ValueError(f"prompt must be shorter than max_seq_len = {self.max_seq_len} tokens, got {prompt}")
        if prompt + max_tokens > self.max_seq_len:
            raise ValueError(
                f"prompt + max_tokens must be at most max_seq_len = {self.max_seq_len}, "
                f"got {prompt} + {max_tokens} = {prompt + max_tokens}"
            )
        needed = self.pages_for(prompt + max_tokens)
        if needed > self.num_pages:
            raise ValueError(
                f"prompt + max_tokens + max_growth = {prompt} + {max_tokens} + {self.max_growth} tokens need "
                f"{needed} pages of {self.page_size}, but num_pages = {self.num_pages}"
            )

    def pages_for(self, tokens: int) -> int:
        """Pages for so many tokens and one round of the deepest tier."""
        return -(-(tokens + self.max_growth) // self.page_size)

    @property
    def longest(self) -> int:
        """Most tokens of prompt and outputs that the context and the pool hold for one request."""
        return min(self.max_seq_len, self.num_pages * self.page_size - self.max_growth)

    @property
    def growth_pages(self) -> int:
        """Most pages that a plan adds to a row."""
        return -(-self.max_growth // self.page_size) + 1


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
      new_pages: what to write there; at most `SchedulerConfig.growth_pages`, often none.
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
