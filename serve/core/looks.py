"""Looks at how long others take, and whether a look says anything: not when this process itself stood still.

Event loop only. Must not know whom is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Looks:
    """One look after another, a while apart.

    A process that was stopped, starved, or frozen with its machine finds that everybody has taken long: the engine's
    step, and readers whose writes it did not let through. So a look that comes late by more than the time between two
    says nothing, and is left out; the next one is taken, however late.

    Args:
      look: called at every look that says something.
      seconds: between two looks.
    """

    def __init__(self, look: Callable[[], None], seconds: float):
        self._look, self._seconds = look, seconds
        self._timer: asyncio.TimerHandle | None = None
        self._left_out = False

    def schedule(self) -> None:
        """The next look comes; at most one is scheduled."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._on_time)

    def cancel(self) -> None:
        """No look is scheduled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        assert self._timer is not None
        late = asyncio.get_running_loop().time() - self._timer.when()
        self._timer = None
        self._left_out = late > self._seconds and not self._left_out
        if self._left_out:
            self.schedule()
        else:
            self._look()
