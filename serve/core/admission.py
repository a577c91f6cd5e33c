"""Who may enter: bounds on the requests that queue and on the pages that they will need.

Exact, because it counts what the loop itself has let in and not yet seen start or end; a burst cannot overshoot it.
Must not know the engine, streams or gRPC calls.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(slots=True)
class Place:
    """What a completion that was let in counts for.

    Attributes:
      pages: that it may come to need. prompt_tokens: length of its prompt.
      waits: it was not seen to start.
    """

    pages: int
    prompt_tokens: int
    waits: bool = True


class Admission:
    """The bounds and what counts against them.

    Args:
      slots: completions that the engine decodes together; as many beyond `max_waiting` may be live.
      max_waiting: completions that may wait for a slot.
      max_waiting_pages: pages that those may come to need. An empty queue takes any request that fits the pool.
      clock: seconds; injected so that tests own the time.

    Attributes:
      live: completions let in that have not ended.
      waiting: of those, the ones that have not been seen to start.
      waiting_pages: what those may come to need.
      waiting_prompt_tokens: the length of their prompts, each completion's counted.
    """

    def __init__(
        self, slots: int, max_waiting: int, max_waiting_pages: int, clock: Callable[[], float] = time.monotonic
    ):
        self.max_live, self.max_waiting_pages = slots + max_waiting, max_waiting_pages
        self._clock = clock
        self.live = self.waiting = self.waiting_pages = self.waiting_prompt_tokens = 0
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)

    def enter(self, count: int, pages: int, prompt_tokens: int) -> list[Place]:
        """Lets completions of one prompt in, all or none; a place for each.

        Args:
          pages: that each may come to need.
          prompt_tokens: length of the prompt.

        Raises:
          StatusError: RESOURCE_EXHAUSTED with a time to retry; INVALID_ARGUMENT for more completions than ever fit.
        """
        if count > self.max_live:
            raise invalid(f"n must be at most {self.max_live}, what this server runs and queues, got {count}")
        too_many = self.live + count - self.max_live
        if too_many > 0:
            room = f"{self.live} of {self.max_live} requests are running or waiting"
            raise self._full(f"the queue is full: {room}, and this one brings {count}", "queue_full", too_many)
        too_large = self.waiting_pages + pages * count - self.max_waiting_pages
        if self.waiting and too_large > 0:
            held = f"waiting requests will need {self.waiting_pages} of {self.max_waiting_pages} pages"
            share = too_large * self.waiting / max(self.waiting_pages, 1)
            raise self._full(f"the queue is full: {held}, and this one {pages * count}", "queue_pages", share)
        self.live += count
        self._wait(count, pages, prompt_tokens)
        return [Place(pages, prompt_tokens) for _ in range(count)]

    def started(self, place: Place) -> None:
        """A completion got its first slot."""
        if place.waits:
            place.waits = False
            self._wait(-1, place.pages, place.prompt_tokens)

    def ended(self, place: Place) -> None:
        """A completion is gone, its slot and pages free. To be said once."""
        self.started(place)
        self.live -= 1
        self._ends.append(self._clock())

    def _wait(self, count: int, pages: int, prompt_tokens: int) -> None:
        self.waiting += count
        self.waiting_pages += count * pages
        self.waiting_prompt_tokens += count * prompt_tokens

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
