"""An engine that is made to fail, to hang, to be slow, and to say nothing, on demand."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from stories import GUARD_SECONDS, eventually

from jaxspec.engine import Engine
from jaxspec.events import Delta, Finished


class EngineFacade:
    """The engine with faults: everything goes through to it, and `step` does as told first.

    Attributes:
      steps: how many began.
      error: raised by the next step.
      hook: called before every step, on the engine's thread.
      idle: steps return at once and do nothing.
      held: set while a step waits because of `hold` or `advance`.
    """

    def __init__(self, engine: Engine):
        self.__dict__.update(_engine=engine, steps=0, error=None, hook=None, idle=False, held=threading.Event())
        self.__dict__.update(_gate=threading.Condition(), _hold_at=math.inf)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._engine, name, value)

    def hold(self, step: int = 1) -> None:
        """The `step`-th step from now waits until `release`."""
        with self._gate:
            self.held.clear()
            self._hold_at = self.steps + step

    def advance(self, steps: int = 1) -> None:
        """Lets an engine that is held do so many steps, the held one first; the one after them is held again."""
        assert self.held.is_set()
        with self._gate:
            self.held.clear()
            self._hold_at = self.steps + steps
            self._gate.notify_all()

    async def end_idling(self) -> None:
        """From `idle` to held, before the next step."""
        self.hold()
        self.idle = False
        await eventually(self.held.is_set)

    def release(self) -> None:
        """Lets steps run again."""
        with self._gate:
            self._hold_at = math.inf
            self._gate.notify_all()

    def step(self) -> Any:
        """The engine's step, after the fault."""
        self.steps += 1
        if self.hook is not None:
            self.hook()
        if self.idle:
            time.sleep(0.001)
            return []
        with self._gate:
            if self.steps >= self._hold_at:
                self.held.set()
                free = self._gate.wait_for(lambda: self.steps < self._hold_at, GUARD_SECONDS)
                assert free, "nobody released the step"
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self._engine.step()


class ChattyFacade(EngineFacade):
    """An engine that says nothing new of a live completion every other step: an event without tokens and text.

    Attributes:
      said: how often it did.
    """

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.__dict__.update(said=0, _heard=None)

    def step(self) -> Any:
        heard, self.__dict__["_heard"] = self._heard, None
        if heard is not None:
            self.said += 1
            time.sleep(0.005)  # the reader has taken what came before, with which this would be merged
            return [Delta(heard.request_id, heard.index, [], "", None if heard.logprobs is None else [])]
        events = super().step()
        ended = {event.request_id for event in events if isinstance(event, Finished)}
        live = (event for event in events if isinstance(event, Delta) and event.request_id not in ended)
        self.__dict__["_heard"] = next(live, None)
        return events
