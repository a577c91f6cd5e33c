"""Cache events: one view for all subscribers, which none of them can hold up, and which is nobody's by default."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import types
from collections.abc import Iterable
from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto", reason="the events are the gateway's messages")

from smg_grpc_proto import vllm_engine_pb2_grpc as rpc
from smg_grpc_proto.generated import common_pb2 as pb

from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.prefix_cache import PrefixCache
from serve.app import Server
from serve.config import ServerConfig
from serve.core.errors import StatusError
from serve.vllm import kv_events
from serve.vllm.kv_events import CacheView, KvEvents, cached_pages


class Picture:
    """What a subscriber makes of events: {block: (parent, tokens)}."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, events: Iterable[pb.KvCacheEvent]) -> None:
        for event in events:
            if event.HasField("cleared"):
                self.blocks.clear()
            for gone in event.removed.block_hashes:
                del self.blocks[gone]
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            for block in event.stored.blocks:
                assert parent is None or parent in self.blocks
                assert block.block_hash not in self.blocks
                self.blocks[block.block_hash] = parent, tuple(block.token_ids)
                parent = block.block_hash


def stays() -> None:
    """What a hub calls to end a subscriber that takes nothing, where none is to be."""
    raise AssertionError("a subscriber was taken for one that stalls")


def test_a_snapshot_is_what_all_changes_lead_to() -> None:
    rng, pages = random.Random(1), PageAllocator(24)
    cache = PrefixCache(pages, 2)
    engine: Any = types.SimpleNamespace(scheduler=types.SimpleNamespace(prefix_cache=cache))
    view, followed = CacheView(2), Picture()
    for step in range(300):
        for _ in range(rng.randrange(4)):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(3, 12))]
            table = cache.match(tokens)
            pages.share(table)
            fresh = len(tokens) // 2 - len(table)
            while pages.free_count < fresh and pages.idle_count:
                cache.evict()
            known, table = len(table), table + pages.allocate(fresh)
            cache.register(tokens, table, known, len(table))
            pages.release(table)
        if rng.random() < 0.02:
            cache.reset()
        followed.apply(view.advance(cached_pages(engine)))
        newcomer = Picture()
        newcomer.apply(view.snapshot())
        assert newcomer.blocks == followed.blocks and len(followed.blocks) == len(cache) == len(view), step
        assert not view.advance(cached_pages(engine))


def test_a_look_at_an_unchanged_cache_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    original = kv_events._identity
    monkeypatch.setattr(kv_events, "_identity", lambda *key: hashed.append(key) or original(*key))
    view = CacheView(2)
    cache = {page: (page - 1, (page, page)) for page in range(1000)}
    assert view.advance(dict(cache)) and len(hashed) == 1000
    cache[1000] = (999, (1, 1))
    assert not view.advance({page: key for page, key in cache.items() if page < 1000})
    assert len(view.advance(dict(cache))) == 1 and len(hashed) == 1001


class Cache:
    """An engine's thread that only has a cache."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.looks = 0
        self.error: StatusError | None = None
        self.snapshot, self.facts = None, types.SimpleNamespace(sizes=types.SimpleNamespace(page_size=2))

    def check(self) -> None:
        pass

    def known(self) -> Any:
        return self.facts

    async def call(self, function: Any) -> Any:
        self.looks += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return dict(self.pages)

    def grow(self, count: int) -> None:
        for _ in range(count):
            page = len(self.pages)
            self.pages[page] = (page - 1, (page, page))


def events_of(cache: Any, stall_seconds: float = 60.0) -> KvEvents:
    return KvEvents(cache, lambda stats: pb.EngineLoad(), lambda: True, stall_seconds)


def test_subscribers_share_the_looks_and_a_slow_one_gets_a_snapshot(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(kv_events, "MAX_BEHIND", 4)

    async def story() -> None:
        cache = Cache()
        cache.grow(3)
        hub = events_of(cache)
        streams = [hub.subscribe(stays) for _ in range(10)]
        pictures = [Picture() for _ in streams]
        for stream, picture in zip(streams, pictures, strict=True):
            picture.apply((await anext(stream)).events)
            assert len(picture.blocks) == 3
        slow, picture = streams[0], pictures[0]
        before = cache.looks
        for size in range(4, 14):
            cache.grow(1)
            for stream, other in zip(streams[1:], pictures[1:], strict=True):
                while len(other.blocks) < size:
                    other.apply((await anext(stream)).events)
        assert cache.looks - before < 10 * 6  # not one for each subscriber
        waiting = [len(subscriber.waiting) for subscriber in hub._subscribers]
        assert max(waiting) <= 4 + 1
        numbers = []
        while len(picture.blocks) < 13:
            batch = await anext(slow)
            numbers.append((batch.sequence_number, batch.HasField("snapshot")))
            picture.apply(batch.events)
        assert picture.blocks == pictures[1].blocks
        assert [number for number, _ in numbers] == list(range(2, 2 + len(numbers)))
        assert numbers[0][1]  # instead of what it missed
        for stream in streams:
            await stream.aclose()
        assert hub._look is None and not hub._subscribers
        looks = cache.looks
        await asyncio.sleep(0.1)
        assert cache.looks == looks  # nobody listens, nobody looks

    kit.run(story())


def test_subscribers_are_few_and_hear_that_the_engine_is_gone(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(kv_events, "MAX_SUBSCRIBERS", 2)

    async def story() -> None:
        cache = Cache()
        hub = events_of(cache)
        first, second, third = (hub.subscribe(stays) for _ in range(3))
        await anext(first)
        await anext(second)
        error = await kit.fails(anext(third), "RESOURCE_EXHAUSTED")
        assert error.reason == "subscribers"
        await first.aclose()
        again = hub.subscribe(stays)
        assert (await anext(again)).HasField("snapshot")
        cache.error = StatusError(grpc.StatusCode.UNAVAILABLE, "the engine died")
        for stream in (second, again):
            await kit.fails(anext(stream), "UNAVAILABLE")
        assert hub._look is None

    kit.run(story())


def test_a_subscriber_that_takes_nothing_is_ended(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(kv_events, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(kv_events, "time", types.SimpleNamespace(monotonic=lambda: now, time=lambda: now))

    async def story() -> None:
        nonlocal now
        hub = events_of(Cache(), stall_seconds=0.1)

        async def follow(pause: float) -> int:
            taken, task = 0, asyncio.current_task()
            assert task is not None
            stream = hub.subscribe(task.cancel)
            try:
                async for _ in stream:
                    taken += 1
                    await asyncio.sleep(pause)  # a write
            finally:
                await stream.aclose()
            return taken

        stuck, reading = asyncio.create_task(follow(1e9)), asyncio.create_task(follow(0))
        waits = lambda: [subscriber.away_since is None for subscriber in hub._subscribers]
        await kit.eventually(lambda: sorted(waits()) == [False, True])
        now += 10
        with pytest.raises(asyncio.CancelledError):
            await stuck
        now += 100
        await asyncio.sleep(0.1)  # that one waits for news, which is no stall
        assert not reading.done() and len(hub._subscribers) == 1
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    kit.run(story())


def test_a_process_that_stood_still_takes_no_subscriber_for_slow(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writes stood still with it; whoever takes them now is no slower than others."""
    now = 0.0
    monkeypatch.setattr(kv_events, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(kv_events, "time", types.SimpleNamespace(monotonic=lambda: now, time=lambda: now))

    async def story() -> None:
        nonlocal now
        hub, written, taken = events_of(Cache(), stall_seconds=0.4), asyncio.Event(), 0

        async def follow() -> None:
            nonlocal taken
            async with contextlib.aclosing(hub.subscribe(stays)) as stream:
                async for _ in stream:
                    taken += 1
                    await written.wait()

        following = asyncio.create_task(follow())
        await kit.eventually(lambda: taken == 1)
        time.sleep(0.3)  # the whole process, and longer by its clock
        now += 10
        await asyncio.sleep(0.03)
        written.set()
        await asyncio.sleep(0.2)  # past the next look
        assert not following.done() and len(hub._subscribers) == 1
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert not hub._subscribers and hub._sweeps._timer is None

    kit.run(story())


def test_nobody_reads_others_prompts_unless_the_server_says_so(kit: Any) -> None:
    async def story(on: bool) -> grpc.StatusCode | None:
        facade = kit.clean()
        config: Any = dict(host="127.0.0.1", port=0, metrics_port=None, withdrawal_seconds=0.0)
        options: Any = {"kv_events": True} if on else {}
        async with (
            Server(ServerConfig(**config, **options), build=lambda: facade) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            stub: Any = rpc.VllmEngineStub(channel)
            call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
            try:
                assert (await call.read()).HasField("snapshot")
            except grpc.aio.AioRpcError as e:
                return e.code()
            call.cancel()
            return None

    assert kit.run(story(False)) is grpc.StatusCode.UNIMPLEMENTED
    assert kit.run(story(True)) is None
