"""The engine in a process of its own: what crosses, who outlives whom, and that nobody is left behind."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import time
from typing import Any

import pytest

from jaxspec.bench.online.stub import Stub
from serve.config import ServerConfig
from serve.core.engine_client import EngineClient
from serve.core.engine_process import EngineEndedError, ProcessLink
from serve.core.generator import Generator

QUICK, HANGING = Stub(1e-3, 0.0, slots=4), Stub(1000.0, 0.0, slots=4)


class Apart:
    """A stub in its process, and what serves it."""

    def __init__(self, kit: Any, stub: Stub):
        self.kit, self.link, self.metrics = (
            kit,
            ProcessLink(stub.build, operator.attrgetter("pool_bytes")),
            kit.recorder(),
        )
        self.engine = EngineClient(self.link)
        self.generator = Generator(self.engine, ServerConfig(), self.metrics)

    async def __aenter__(self) -> Apart:
        self.engine.start()
        await self.engine.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.generator.close()
        await self.engine.stop(0.0 if self.engine.step_seconds else 10.0)
        assert not self.link.alive

    async def start(self, **options: Any) -> Any:
        return await self.generator.start(self.kit.job([1, 2, 3], **options))


async def what_crosses(kit: Any) -> None:
    async with Apart(kit, QUICK) as apart:
        engine, pid = apart.engine, apart.link.pid
        assert pid not in (None, os.getpid()) and engine.description == 0 and engine.known().sizes.slots == 4
        generations = [await apart.start(max_tokens=20, n=1 + i % 2) for i in range(6)]
        read = await asyncio.gather(*map(kit.read, generations))
        assert all(tokens == [7] * 20 for result in read for tokens in result.tokens)
        assert sum(count for _, count, _ in apart.metrics.tokens) == 9 * 20
        assert apart.metrics.reasons == ["length"] * 9 and sum(len(r.num_accepted) for r in apart.metrics.rounds) >= 180
        aborted = await apart.start(max_tokens=2000)
        await anext(aborted)
        assert await apart.generator.abort([aborted.job.request_id]) == 1
        await kit.fails(kit.read(aborted), "CANCELLED")
        assert await engine.call(operator.methodcaller("flush_prefix_cache")) == 0
        with pytest.raises(AttributeError, match="nothing"):
            await engine.call(operator.attrgetter("nothing"))
        with pytest.raises(TypeError, match="cannot be told to another process"):
            await engine.call(operator.attrgetter("__class__.step.__code__"))
        with pytest.raises(Exception, match="pickle"):
            await engine.call(lambda engine: 1)
        for number in (signal.SIGINT, signal.SIGTERM):  # the server's to obey
            os.kill(pid or 0, number)
        assert await engine.call(operator.attrgetter("warm"))
        await kit.eventually(lambda: engine.step_seconds == 0 and apart.generator.in_engine == 0)
    assert engine.state == "stopped" and apart.metrics.reasons[-1] == "abort"


async def its_death_is_heard(kit: Any) -> None:
    async with Apart(kit, QUICK) as apart:
        generation = await apart.start(max_tokens=2000)
        await anext(generation)
        os.kill(apart.link.pid or 0, signal.SIGKILL)
        assert (await kit.fails(kit.read(generation), "UNAVAILABLE")).reason == "dead"
        assert apart.engine.state == "dead" and isinstance(apart.engine.error, EngineEndedError)
        assert "was ended by SIGKILL" in str(apart.engine.error) and apart.metrics.reasons == ["error"]


async def it_goes_with_the_server(kit: Any) -> None:
    """Its end of the connection is all that it sees of a server that was killed, here in the middle of a step."""
    async with Apart(kit, HANGING) as apart:
        await apart.start(max_tokens=20)
        apart.link._close()
        await kit.eventually(lambda: not apart.link.alive)
        apart.link._ended = True  # nobody was there to hear


async def a_step_that_hangs_stops_nobody(kit: Any) -> None:
    async with Apart(kit, HANGING) as apart:
        await apart.start(max_tokens=20)
        await kit.eventually(lambda: apart.engine.step_seconds > 0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 100 and apart.engine.state == "stopped"


def test_the_engine_in_a_process_of_its_own(kit_of: Any) -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            for part in (what_crosses, its_death_is_heard, it_goes_with_the_server, a_step_that_hangs_stops_nobody):
                tasks.create_task(part(kit_of))

    kit_of.run(story())
