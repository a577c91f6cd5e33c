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
      max_num_batched_tokens: most tokens of all prefill chunks of a step; 0 stands for prefill_chunk.
      max_rounds: most rounds of one dispatch.

    Raises:
      ValueError: a count below its minimum, a page table too short for max_seq_len tokens and a round's, or steps too
        small for a chunk.
    """

    slots: int
    num_pages: int
    page_size: int
    pages_per_seq: int
    max_depth: int
    max_seq_len: int = 0
    prefill_chunk: int = 0
    max_num_batched_tokens: int = 0
    max_rounds: int = 1

    def __post_init__(self) -> None:
        for name in (
            "slots", "num_pages", "page_size", "pages_per_seq", "max_rounds", "max_depth", "max_seq_len",
            "prefill_chunk", "max_num_batched_tokens",
        ):  # fmt: skip
            value, low = getattr(self, name), int(name == "max_rounds" or not name.startswith(("max", "prefill")))
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
        object.__setattr__(self, "max_num_batched_tokens", self.max_num_batched_tokens or self.prefill_chunk)
        if self.max_num_batched_tokens < self.prefill_chunk:
            raise ValueError(
                f"Sizes.max_num_batched_tokens must be at least prefill_chunk = {self.prefill_chunk}, "
                f"got {self.max_num_batched_tokens}"
            )

    def allowed(self, prompt: int, max_tokens: int | None) -> int:
        """Most tokens that a request may generate: those it asks for, as far as the context and the pool go.

        Args:
          prompt: tokens of its prompt.
          max_tokens: what it asks for; None: all that there is room for.

        Raises:
          ValueError: an empty prompt, or one that leaves no room for a token, so that it could not even run alone.
        """
        if not prompt:
            raise ValueError("prompt must hold at least 1 token, got 0")
        if prompt >= self.max_seq_len:
            raise ValueError(f"prompt must be shorter than max_seq_len = {self.max_seq_len} tokens, got {prompt}")
        needed = self.pages_for(prompt + 1)
        if needed > self.num_pages:
            raise ValueError(
                f"prompt + 1 + max_growth = {prompt} + 1 + {self.max_growth} tokens need {needed} pages of "
                f"{self.page_size}, but num_pages = {self.num_pages}"
            )
        room = self.longest - prompt
        return room if max_tokens is None else min(max_tokens, room)

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
        """Most pages that the scheduler grants a row before a dispatch of rounds."""
        return -(-self.max_rounds * self.max_growth // self.page_size) + 1
