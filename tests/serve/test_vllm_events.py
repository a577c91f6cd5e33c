"""Cache events of vLLM's protocol: what subscribers make of them is what the engine has."""

from __future__ import annotations

import asyncio
import random
import types
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway import GREEDY, collect, refused, request, service
from smg_grpc_proto.generated import common_pb2

from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.prefix_cache import PrefixCache
from serve.vllm.kv_events import CacheView, batched, cached_pages


class Mirror:
    """What a gateway makes of the events."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, events: Any) -> None:
        for event in events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.blocks.clear()
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        del self.blocks[block_hash]
                case "stored":
                    parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                    for block in event.stored.blocks:
                        assert parent is None or parent in self.blocks
                        assert block.block_hash not in self.blocks
                        self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
                        parent = block.block_hash

    @property
    def prefixes(self) -> set[tuple[int, ...]]:
        """Every known prefix, whole."""

        def whole(block_hash: int | None) -> tuple[int, ...]:
            if block_hash is None:
                return ()
            parent, tokens = self.blocks[block_hash]
            return whole(parent) + tokens

        return {whole(block_hash) for block_hash in self.blocks}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_events_mirror_the_cache_through_any_history(lookahead: int) -> None:
    size, rng = 2, random.Random(0)
    pages = PageAllocator(24)
    cache = PrefixCache(pages, size, lookahead)
    engine: Any = types.SimpleNamespace(scheduler=types.SimpleNamespace(prefix_cache=cache))
    view, mirror = CacheView(size), Mirror()
    held: list[list[int]] = []
    largest = 0
    for step in range(400):
        for _ in range(rng.randrange(3)):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(3, 12))]
            full = (len(tokens) - lookahead) // size
            table = cache.match(tokens)
            pages.share(table)
            while pages.free_count < full - len(table) and pages.idle_count:
                cache.evict()
            known = len(table)
            if pages.free_count >= full - known:
                table = table + pages.allocate(full - known)
                cache.register(tokens, table, known, full)
            held.append(table)
        while len(held) > 3:
            pages.release(held.pop(rng.randrange(len(held))))
        if rng.random() < 0.02:
            cache.reset()
        mirror.apply([part for group in batched(view.advance(cached_pages(engine))) for part in group])
        assert len(mirror.blocks) == len(cache) == len(view), step
        largest = max(largest, len(cache))
    assert largest > 5
    assert mirror.prefixes and all(len(prefix) % size == 0 for prefix in mirror.prefixes)


def test_long_events_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.vllm.kv_events.BLOCKS_A_BATCH", 3)
    chain = {i: (i - 1, (i, i)) for i in range(8)}
    view, mirror = CacheView(2), Mirror()
    groups = batched(view.advance(chain))
    assert [sum(len(event.stored.blocks) for event in group) for group in groups] == [3, 3, 2]
    for group in groups:
        mirror.apply(group)
    assert max(mirror.prefixes, key=len) == tuple(i for i in range(8) for _ in range(2))
    groups = batched(view.advance({0: chain[0]}))
    assert [len(event.removed.block_hashes) for group in groups for event in group] == [3, 3, 1]
    for group in groups:
        mirror.apply(group)
    assert mirror.prefixes == {(0, 0)}


def test_a_subscriber_learns_the_cache_its_changes_and_the_load(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.vllm.kv_events.LOOK_SECONDS", 0.01)
    prompt = tuple(i % 5 for i in range(33))

    async def story() -> None:
        async with service(kit, kv_events=True) as (_, stub):
            mirror, sequences, snapshots, loads = Mirror(), [0], [], []

            async def follow() -> None:
                async for batch in stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()):
                    if batch.load.load_only:
                        assert not batch.events and batch.sequence_number == sequences[-1]
                    else:
                        assert batch.sequence_number == sequences[-1] + 1
                        sequences.append(batch.sequence_number)
                    if batch.HasField("snapshot"):
                        snapshots.append(batch.snapshot)
                        assert batch.events[0].HasField("cleared") or batch.snapshot.index
                    mirror.apply(batch.events)
                    loads.append(batch.load)

            await collect(stub.Generate(request(ids=prompt, **dict(GREEDY, max_tokens=4))))
            following = asyncio.create_task(follow())
            await kit.eventually(lambda: prompt[:32] in mirror.prefixes)
            assert [(chunk.index, chunk.count, chunk.unknown_before) for chunk in snapshots] == [(0, 1, 0)]
            other = (7, *prompt)
            await collect(stub.Generate(request(ids=other, **dict(GREEDY, max_tokens=4))))
            await kit.eventually(lambda: other[:32] in mirror.prefixes and prompt[:32] in mirror.prefixes)
            answer = await stub.FlushCache(common_pb2.FlushCacheRequest())
            assert answer.success
            await kit.eventually(lambda: not mirror.prefixes)
            assert loads[-1].max_running_requests == 4 and loads[-1].gen_throughput == 12.5
            assert [load.sample for load in loads] == list(range(1, len(loads) + 1))
            following.cancel()
            with pytest.raises(asyncio.CancelledError):
                await following

    kit.run(story())


def test_subscriptions_begin_anew_and_their_headers_come_at_once(kit: Any) -> None:
    async def story() -> None:
        async with service(kit, kv_events=True) as (stack, stub):
            stale = await refused(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=9)))
            assert stale.code() is grpc.StatusCode.OUT_OF_RANGE
            stack.facade.hold()
            call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
            await asyncio.wait_for(call.initial_metadata(), 120)
            stack.facade.release()
            assert (await call.read()).sequence_number == 1
            draining = asyncio.create_task(stack.lifecycle.drain(5.0))
            with pytest.raises(grpc.aio.AioRpcError, match="draining"):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            await draining

    kit.run(story())
