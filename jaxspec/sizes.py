"""How many requests and tokens an engine holds: one record for the scheduler, the device state and the server.

Standard library only; every other part of jaxspec may import this.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Fixed when the engine is built.

    Attributes:
      slots: requests decoded together, each with a row of the device state.
      num_pages: pages a layer of the pool. page_size: tokens a page. pages_per_seq: entries of a row's page table.
      max_depth: of the deepest tier that can run.
      max_seq_len: most tokens of prompt and outputs; 0 stands for what a page table holds.
      prefill_chunk: most tokens of a prefill chunk; 0 stands for max_seq_len.

    Raises:
      ValueError: a count below its minimum, or a page table too short for max_seq_len tokens and a round's.
    """

    slots: int
    num_pages: int
    page_size: int
    pages_per_seq: int
    max_depth: int
    max_seq_len: int = 0
    prefill_chunk: int = 0

    def __post_init__(self) -> None:
        for name in ("slots", "num_pages", "page_size", "pages_per_seq", "max_depth", "max_seq_len", "prefill_chunk"):
            value, low = getattr(self, name), int(not name.startswith(("max", "prefill")))
            if type(value) is not int or value < low:
                raise ValueError(f"Sizes.{name} must be an integer of at least {low}, got {value!r}")
        room = self.pages_per_seq * self.page_size - self.max_growth
        if room < max(self.max_seq_len, 1):
            raise ValueError(
                f"Sizes.pages_per_seq must hold max_seq_len + max_growth = {self.max_seq_len + self.max_growth} "
                f"tokens, got {self.pages_per_seq} pages of {self.page_size}"
            )
        object.__setattr__(self, "max_seq_len", self.max_seq_len or room)
        object.__setattr__(self, "prefill_chunk", self.prefill_chunk or self.max_seq_len)

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
    def max_growth(self) -> int:
        """Most tokens that a round adds to a row."""
        return self.max_depth + 1

    @property
    def growth_pages(self) -> int:
        """Most pages that the scheduler grants a row before a round."""
        return -(-self.max_growth // self.page_size) + 1
