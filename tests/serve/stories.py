"""What asynchronous tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from serve.core.errors import StatusError

T = TypeVar("T")
#: Guards against hangs alone: far beyond what a slow machine takes.
GUARD_SECONDS, EVENTUALLY_SECONDS = 240.0, 120.0


def run(story: Coroutine[Any, Any, T], seconds: float = GUARD_SECONDS) -> T:
    """The result of an asynchronous test, which must not hang; tasks that it leaves behind are an error."""

    async def guarded() -> T:
        async with asyncio.timeout(seconds):
            result = await story
        for _ in range(20):  # tasks that were cancelled on the way out may need a few turns
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if not left:
                return result
            await asyncio.sleep(0.01)
        raise AssertionError(f"tasks were left behind: {left}")

    return asyncio.run(guarded())


async def eventually(condition: Callable[[], bool], seconds: float = EVENTUALLY_SECONDS) -> None:
    """Returns when the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def fails(awaitable: Any, code: str) -> StatusError:
    """The StatusError that it must raise, whose code has this name."""
    with pytest.raises(StatusError) as caught:
        await awaitable
    assert caught.value.code.name == code, caught.value
    return caught.value


class Stories:
    """What asynchronous tests share; test modules cannot import each other."""

    run, eventually, fails = staticmethod(run), staticmethod(eventually), staticmethod(fails)
