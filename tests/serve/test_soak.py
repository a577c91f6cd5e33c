"""Many requests for a long time: nothing leaks, and every greedy output is the offline engine's.

An hour of traffic compressed by count: requests follow each other without pause. The full length is for --exhaustive,
and so are the shipped models, where they are compiled as users do (--optimized).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxspec.engine import Engine
from jaxspec.llm import LLM
from jaxspec.request import SamplingParams
from serve.app import Server
from serve.config import ServerConfig
from serve.proto import admin_pb2
from serve.proto import generation_pb2 as pb
from serve.proto.services import ADMIN, GENERATION, Stub

#: Streams at once.
STREAMS = 256
#: Requests at once of those that leave and of the soak, and seconds that each test may take.
LEAVING_AT_ONCE, SOAK_AT_ONCE, SECONDS = 96, 24, 600
#: What the process may grow to after the first tenth of the soak.
GROWTH = 1.05
Code = grpc.StatusCode


@dataclasses.dataclass(frozen=True)
class Load:
    """What an engine is asked for.

    Attributes:
      requests: of the soak. leaving: requests of clients that leave.
      patience: seconds after which the last of those that leave early have left.
    """

    kit: Any
    prompts: tuple[str, ...]
    requests: int
    leaving: int
    patience: float


@pytest.fixture(scope="module")
def demo_engine(kept_executables: Path) -> Engine:
    few = dict(max_batch_size=16, batch_buckets=(1, 4, 16), variants=("greedy",), max_seq_len=256, warmup="eager")
    return LLM("demo", compile_cache=kept_executables, progress=False, **few).engine


@pytest.fixture(params=["tiny", pytest.param("demo", marks=pytest.mark.exhaustive("the shipped model"))])
def load(request: pytest.FixtureRequest, kit_of: Any) -> Load:
    exhaustive = request.config.getoption("--exhaustive")
    if request.param == "tiny":
        prompts = ("abc", "cab", "abc" * 6, "hella", "lkjihgfedcba", "a", "gagagag", "badcab" * 4)
        kit = request.getfixturevalue("kit")
        # 12,000 are an hour at ten in three seconds.
        requests, leaving = (12_000, 2000) if exhaustive else (480, 300)
        return Load(kit, prompts, requests, leaving, patience=0.2)
    if not request.config.getoption("--optimized"):
        pytest.skip("the shipped models are for --optimized")
    kit = kit_of(request.getfixturevalue("demo_engine"))
    prompts = ("def read(path):\n", "class Stack:\n    def __init__(self", "import ", "And the king said", "In the ")
    return Load(kit, prompts, requests=1_200, leaving=2000, patience=4.0)


def request_of(prompt: str, max_tokens: int, request_id: str | None = None) -> pb.GenerateRequest:
    sampling = pb.Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=prompt, sampling=sampling, request_id=request_id)


class Bed:
    """A served engine under load.

    Attributes:
      expected: offline tokens of each prompt, longer than any request asks for.
      tasks: of the loop when nothing had been asked for.
    """

    def __init__(self, load: Load):
        self.kit = load.kit
        params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        encode = self.kit.engine.facts.tokenizer.encode
        outputs = self.kit.offline([(encode(prompt), params) for prompt in load.prompts])
        self.expected = {p: output[0].token_ids for p, output in zip(load.prompts, outputs, strict=True)}

    async def __aenter__(self) -> Bed:
        self.facade = facade = self.kit.clean()
        self.compilations = facade.stats.compilations_after_warmup
        config = ServerConfig(
            host="127.0.0.1", port=0, metrics_port=0, withdrawal_seconds=0.0, max_waiting=4096,
            max_waiting_pages=10**6, log_level="error",
        )  # fmt: skip
        self.server = Server(config, build=lambda: facade)
        await self.server.start()
        await self.server.ready()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.generation = Stub(GENERATION, self.channel)
        self.admin = Stub(ADMIN, self.channel)
        await self.admin.GetLoads(admin_pb2.GetLoadsRequest())
        self.tasks = len(asyncio.all_tasks())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close()
        await self.server.stop()

    async def stream(self, prompt: str, max_tokens: int) -> None:
        """One request to its end; its tokens are the offline engine's."""
        tokens: list[int] = []
        async for message in self.generation.GenerateStream(request_of(prompt, max_tokens)):
            tokens += message.delta.token_ids
        assert tokens == self.expected[prompt][:max_tokens], prompt

    async def at_rest(self) -> None:
        """Waits until no request, page or task is left."""
        async with asyncio.timeout(120):
            while True:
                loads = await self.admin.GetLoads(admin_pb2.GetLoadsRequest())
                info = await self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
                memory = info.memory
                idle = loads.running_requests == loads.waiting_requests == 0
                if idle and memory.free_pages + memory.cached_pages == memory.pages:
                    break
                await asyncio.sleep(0.02)
        assert info.compilations_after_warmup == self.compilations
        scheduler, generator, live = self.kit.engine.scheduler, self.server.generator, self.server.engine._live
        assert len(scheduler._free_slots) == scheduler.sizes.slots and not scheduler._by_id
        assert generator.live == generator.in_engine == 0 and not generator._by_id
        assert not (live._live or live._holding or live._submitted)
        # Calls that were left end a little later.
        await self.kit.eventually(lambda: len(asyncio.all_tasks()) <= self.tasks + 1)


@pytest.mark.slow
def test_256_concurrent_streams(load: Load):
    async def story() -> None:
        async with Bed(load) as bed:
            bed.facade.hold()
            prompts = [load.prompts[i % len(load.prompts)] for i in range(STREAMS)]
            streams = [asyncio.create_task(bed.stream(prompt, 24)) for prompt in prompts]
            await load.kit.eventually(lambda: bed.server.generator.in_engine == STREAMS)
            bed.facade.release()
            await asyncio.gather(*streams)
            await bed.at_rest()

    load.kit.run(story(), SECONDS)


@pytest.mark.slow
def test_requests_of_clients_that_leave_and_lose_patience(load: Load):
    """Random aborts, deadlines, cancellations and connections that close; those that stay get all of theirs."""
    dice = random.Random(0)
    ends: collections.Counter[str] = collections.Counter()

    async def one(bed: Bed, i: int) -> None:
        prompt, length = load.prompts[i % len(load.prompts)], dice.randint(1, 40)
        fate = dice.choice(["stay", "stay", "abort", "deadline", "cancel", "disconnect"])
        name = f"request-{i}"
        request = request_of(prompt, length, name)
        tokens: list[int] = []
        patience = dice.uniform(0.0, load.patience) if fate == "deadline" else None
        try:
            if fate == "disconnect":
                async with grpc.aio.insecure_channel(f"127.0.0.1:{bed.server.port}") as channel:
                    call = Stub(GENERATION, channel).GenerateStream(request)
                    for _ in range(dice.randint(0, 3)):
                        await call.read()
                ends[fate] += 1
                return
            call = bed.generation.GenerateStream(request, timeout=patience)
            if fate == "abort":
                loop = asyncio.get_running_loop()
                later = asyncio.Event()
                loop.call_later(dice.uniform(0.0, load.patience), later.set)
                reader = asyncio.create_task(_tokens(call))
                await later.wait()
                await bed.generation.Abort(pb.AbortRequest(request_ids=[name]))
                tokens = await reader
            elif fate == "cancel":
                for _ in range(dice.randint(0, 4)):
                    await call.read()
                call.cancel()
                raise asyncio.CancelledError
            else:
                tokens = await _tokens(call)
            assert tokens == bed.expected[prompt][:length]
            ends["whole"] += 1
        except asyncio.CancelledError:
            ends["cancel"] += 1
        except grpc.aio.AioRpcError as e:
            assert (fate, e.code()) in {("abort", Code.CANCELLED), ("deadline", Code.DEADLINE_EXCEEDED)}, e
            ends[fate] += 1

    async def story() -> None:
        async with Bed(load) as bed:
            limit = asyncio.Semaphore(LEAVING_AT_ONCE)

            async def bounded(i: int) -> None:
                async with limit:
                    await one(bed, i)

            await asyncio.gather(*(bounded(i) for i in range(load.leaving)))
            await bed.at_rest()

    load.kit.run(story(), SECONDS)
    fates = ("whole", "abort", "deadline", "cancel", "disconnect")
    assert sum(ends.values()) == load.leaving and all(ends[fate] > load.leaving / 40 for fate in fates), ends


async def _tokens(call: Any) -> list[int]:
    tokens: list[int] = []
    async for message in call:
        tokens += message.delta.token_ids
    return tokens


@pytest.mark.slow
def test_a_soak_of_requests_leaves_no_memory_behind(load: Load):
    dice = random.Random(1)

    async def story() -> list[int]:
        async with Bed(load) as bed:

            async def worker(count: int) -> None:
                for _ in range(count):
                    await bed.stream(dice.choice(load.prompts), dice.randint(1, 12))

            sizes: list[int] = []
            for _ in range(10):
                await asyncio.gather(*(worker(load.requests // (10 * SOAK_AT_ONCE)) for _ in range(SOAK_AT_ONCE)))
                await bed.at_rest()
                sizes.append(load.kit.resident_bytes())
            return sizes

    began = time.monotonic()
    sizes = load.kit.run(story(), SECONDS)
    shown = " ".join(f"{size / 2**20:.0f}" for size in sizes)
    print(f"{load.requests} requests in {time.monotonic() - began:.0f} s; MiB after each tenth: {shown}")
    assert max(sizes[1:]) <= GROWTH * sizes[0], f"MiB after each tenth: {shown}"
