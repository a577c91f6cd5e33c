"""Who may enter: bounds on the requests that queue and on the pages that they will need.

Exact, because it counts what the loop itself has let in and not yet seen start or end; a burst cannot overshoot it.
Must not know the engine, streams or gRPC calls.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import grpc

from serve.core.errors import StatusError, invalid

#: Seconds that a refused client is told to wait, at least and at most.
RETRY_SECONDS = (0.1, 30.0)
#: What it is told while nothing has ended yet.
_FIRST_RETRY_SECONDS = 1.0
#: Ends from which the queue's speed is estimated, and how many seconds old they may be.
_REMEMBERED = 64
_MEMORY_SECONDS = 60.0
#: The bound on pages where none is configured; see `default_waiting_pages`.
_LEAST_POOLS, _SLOT_SHARE = 4, 0.25


def default_waiting_pages(slots: int, max_waiting: int, num_pages: int) -> int:
    """Pages that a queue may come to need where nobody says.

    A full queue passes while its requests take a quarter of what the pool has for a slot, on average; one of requests
    that fill their slots is cut at a quarter of its length. Whatever the queue's length, four pools may wait.

    Args:
      slots: completions that the engine decodes together.
      max_waiting: completions that may wait.
      num_pages: pages of the pool.
    """
    return max(_LEAST_POOLS * num_pages, math.ceil(_SLOT_SHARE * max_waiting * num_pages / slots))


class Admission:
    """The bounds and what counts against them.

    Args:
      slots: completions that the engine decodes together; as many beyond `max_waiting` may be live.
      max_waiting: completions that may wait for a slot.
      max_waiting_pages: pages that those may come to need. An empty queue takes any request that fits the pool.
      clock: seconds; injected so that tests own the time.
    """

    def __init__(
        self, slots: int, max_waiting: int, max_waiting_pages: int, clock: Callable[[], float] = time.monotonic
    ):
        self.max_live, self.max_waiting_pages = slots + max_waiting, max_waiting_pages
        self._clock = clock
        self._live: set[str] = set()
        self._waiting: dict[str, tuple[int, int]] = {}  # pages and prompt tokens
        self._waiting_pages = self._waiting_prompt_tokens = 0
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def live(self) -> int:
        """Completions let in that have not ended."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Of those, the ones that have not been seen to start."""
        return len(self._waiting)

    @property
    def waiting_pages(self) -> int:
        """What those may come to need."""
        return self._waiting_pages

    @property
    def waiting_prompt_tokens(self) -> int:
        """The length of their prompts, each completion's counted."""
        return self._waiting_prompt_tokens

    def enter(self, ids: list[str], pages: int, prompt_tokens: int) -> None:
        """Lets completions of one prompt in, all or none.

        Args:
          pages: that each may come to need.
          prompt_tokens: length of the prompt.

        Raises:
          StatusError: RESOURCE_EXHAUSTED with a time to retry; INVALID_ARGUMENT for more completions than ever fit.
        """
        if len(ids) > self.max_live:
            raise invalid(f"n must be at most {self.max_live}, what this server runs and queues, got {len(ids)}")
        too_many = len(self._live) + len(ids) - self.max_live
        if too_many > 0:
            room = f"{len(self._live)} of {self.max_live} requests are running or waiting"
            raise self._full(f"the queue is full: {room}, and this one brings {len(ids)}", "queue_full", too_many)
        too_large = self._waiting_pages + pages * len(ids) - self.max_waiting_pages
        if self._waiting and too_large > 0:
            held = f"waiting requests will need {self._waiting_pages} of {self.max_waiting_pages} pages"
            share = too_large * len(self._waiting) / max(self._waiting_pages, 1)
            raise self._full(f"the queue is full: {held}, and this one {pages * len(ids)}", "queue_pages", share)
        self._live.update(ids)
        for name in ids:
            self._waiting[name] = pages, prompt_tokens
        self._waiting_pages += pages * len(ids)
        self._waiting_prompt_tokens += prompt_tokens * len(ids)

    def started(self, name: str) -> None:
        """A completion got its first slot."""
        pages, prompt_tokens = self._waiting.pop(name, (0, 0))
        self._waiting_pages -= pages
        self._waiting_prompt_tokens -= prompt_tokens

    def ended(self, name: str) -> None:
        """A completion is gone, its slot and pages free."""
        self.started(name)
        self._live.discard(name)
        self._ends.append(self._clock())

    def _full(self, message: str, reason: str, ahead: float) -> StatusError:
        return StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, self._retry_after(ahead), reason=reason)

    def _retry_after(self, ahead: float) -> float:
        """Seconds until `ahead` more completions will have ended, at the speed of late."""
        now = self._clock()
        recent = [at for at in self._ends if now - at <= _MEMORY_SECONDS]
        if not recent:
            return _FIRST_RETRY_SECONDS
        low, high = RETRY_SECONDS
        return min(max(ahead * max(now - recent[0], 1e-3) / len(recent), low), high)
