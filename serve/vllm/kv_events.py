"""What the prefix cache holds, as a stream of events: a gateway routes a prompt to the replica that knows its prefix.

One view of the cache serves all subscribers: while there are any, it is brought up to date off the event loop, every
LOOK_SECONDS, at the cost of one shallow copy of a dictionary to the engine's thread. A newcomer hears a snapshot, then
what changes; whoever falls behind hears a new snapshot instead of what it missed. There is no history: whoever comes
back with a cursor is sent for a snapshot too (OUT_OF_RANGE). Events carry the token ids of cached prompts, everybody's:
a server tells them only where ServerConfig.kv_events is set. Needs the extra "smg".
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable

import grpc
from smg_grpc_proto.generated import common_pb2 as pb

from jaxspec.stats import EngineStats
from serve.core.engine_client import EngineClient
from serve.core.engine_core import Pages, cached_pages
from serve.core.errors import StatusError
from serve.core.looks import Looks

#: Seconds between two looks at the cache.
LOOK_SECONDS = 0.5
#: Seconds after which a load record is repeated though nothing changed.
HEARTBEAT_SECONDS = 5.0
#: Blocks a message, far below the 4 MiB that clients accept by default.
BLOCKS_A_BATCH = 1024
#: Subscriptions at once: replicas of a gateway, and somebody who looks.
MAX_SUBSCRIBERS = 16
#: Batches of changes that may wait for a subscriber before a new snapshot takes their place.
MAX_BEHIND = 64
_log = logging.getLogger("serve")


@dataclasses.dataclass(frozen=True)
class _Block:
    """A page as last reported: what it held, and its identity in the stream."""

    key: tuple[int, tuple[int, ...]]
    parent: int | None
    hash: int


class CacheView:
    """The cache as it was last looked at.

    Args:
      page_size: tokens a page; what a key holds beyond them is the drafter's lookahead.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._known: dict[int, _Block] = {}  # parents before children
        self._last: Pages = {}
        self._events = 0

    def __len__(self) -> int:
        """Blocks stored and not removed."""
        return len(self._known)

    def snapshot(self) -> list[pb.KvCacheEvent]:
        """The events that lead from any picture to this one; as they were never published, their event_id is 0."""
        cleared = pb.KvCacheEvent(cleared=pb.KvCacheCleared())
        return [cleared, *(pb.KvCacheEvent(stored=run) for run in self._stored(self._known.values()))]

    def advance(self, pages: Pages) -> list[pb.KvCacheEvent]:
        """The events that lead from the last look to this one: removals first, parents before children."""
        if pages == self._last:
            return []
        known, last, self._last = self._known, self._last, pages
        gone = {known.pop(page).hash for page in known.keys() - pages.keys()}
        renewed: set[int] = set()
        fresh: list[_Block] = []
        for page, key in pages.items():
            if last.get(page) == key and key[0] not in renewed:
                continue
            renewed.add(page)
            if page in known:
                gone.add(known.pop(page).hash)  # and in again behind its parent
            parent = None if key[0] < 0 else known[key[0]].hash
            known[page] = _Block(key, parent, _identity(parent, key[1]))
            fresh.append(known[page])
        if gone and not known:
            return [self._event(cleared=pb.KvCacheCleared())]
        moved = gone & {block.hash for block in fresh}  # the same prefix in another page
        events = []
        if gone - moved:
            events.append(self._event(removed=pb.KvBlocksRemoved(block_hashes=sorted(gone - moved))))
        runs = self._stored(block for block in fresh if block.hash not in moved)
        return [*events, *(self._event(stored=run) for run in runs)]

    def _stored(self, blocks: Iterable[_Block]) -> list[pb.KvBlocksStored]:
        """Blocks in order, those that follow one another in one record."""
        runs: list[pb.KvBlocksStored] = []
        last: int | None = None
        for block in blocks:
            if last is None or block.parent != last:
                runs.append(pb.KvBlocksStored(parent_block_hash=block.parent))
            runs[-1].blocks.append(
                pb.KvBlock(block_hash=block.hash, token_ids=block.key[1][: self._page_size], block_size=self._page_size)
            )
            last = block.hash
        return runs

    def _event(self, **data: pb.KvBlocksStored | pb.KvBlocksRemoved | pb.KvCacheCleared) -> pb.KvCacheEvent:
        self._events += 1
        return pb.KvCacheEvent(event_id=self._events, **data)  # pyright: ignore[reportArgumentType]


def _identity(parent: int | None, tokens: tuple[int, ...]) -> int:
    """A signed 64-bit number for a page and everything before it."""
    digest = hashlib.blake2b(array.array("q", (0 if parent is None else parent, *tokens)).tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)


def batched(events: list[pb.KvCacheEvent]) -> list[list[pb.KvCacheEvent]]:
    """The same events in groups of at most BLOCKS_A_BATCH blocks; a long event is cut."""
    groups: list[list[pb.KvCacheEvent]] = [[]]
    room = BLOCKS_A_BATCH
    for event in events:
        for part, size in _cut(event):
            if size > room and groups[-1]:
                groups.append([])
                room = BLOCKS_A_BATCH
            groups[-1].append(part)
            room -= size
    return groups


def _cut(event: pb.KvCacheEvent) -> list[tuple[pb.KvCacheEvent, int]]:
    if len(event.removed.block_hashes) > BLOCKS_A_BATCH:
        hashes = event.removed.block_hashes
        return [
            (pb.KvCacheEvent(event_id=event.event_id, removed=pb.KvBlocksRemoved(block_hashes=part)), len(part))
            for part in (hashes[i : i + BLOCKS_A_BATCH] for i in range(0, len(hashes), BLOCKS_A_BATCH))
        ]
    if len(event.stored.blocks) <= BLOCKS_A_BATCH:
        return [(event, len(event.stored.blocks) + len(event.removed.block_hashes))]
    blocks = event.stored.blocks
    parts = []
    for start in range(0, len(blocks), BLOCKS_A_BATCH):
        own = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
        stored = pb.KvBlocksStored(parent_block_hash=blocks[start - 1].block_hash if start else own)
        stored.blocks.extend(blocks[start : start + BLOCKS_A_BATCH])
        parts.append((pb.KvCacheEvent(event_id=event.event_id, stored=stored), len(stored.blocks)))
    return parts


@dataclasses.dataclass
class _Message:
    """Events of a batch, the same for all subscribers."""

    events: list[pb.KvCacheEvent]
    snapshot: pb.KvSnapshotChunk | None = None


class _Subscriber:
    """What waits for one subscriber.

    Attributes:
      on_stall: ends whoever takes the batches.
      behind: it needs a snapshot: at the beginning, and when it was too slow.
      away_since: when it took a batch that it has not come back from; None while it waits for news.
    """

    def __init__(self, on_stall: Callable[[], None]) -> None:
        self.on_stall = on_stall
        self.behind = True
        self.away_since: float | None = time.monotonic()
        self.waiting: deque[_Message] = deque()
        self.error: StatusError | None = None
        self.news = asyncio.Event()

    def put(self, messages: list[_Message]) -> None:
        self.waiting.extend(messages)
        if not self.behind and sum(message.snapshot is None for message in self.waiting) > MAX_BEHIND:
            self.waiting.clear()
            self.behind = True
        self.news.set()


class KvEvents:
    """The subscriptions of a server. Event loop only.

    Args:
      load: the engine's load record from its counters.
      serving: whether there is a point in going on.
      stall_seconds: after which a subscriber that takes nothing is ended.
    """

    def __init__(
        self,
        engine: EngineClient,
        load: Callable[[EngineStats], pb.EngineLoad],
        serving: Callable[[], bool],
        stall_seconds: float,
    ) -> None:
        self._engine, self._load, self._serving, self._stall_seconds = engine, load, serving, stall_seconds
        self._subscribers: set[_Subscriber] = set()
        self._view: CacheView | None = None
        self._look: asyncio.Task[None] | None = None
        self._sweeps = Looks(self._end_stalled, min(1.0, stall_seconds / 4))
        self._newcomer = asyncio.Event()

    async def subscribe(self, on_stall: Callable[[], None]) -> AsyncGenerator[pb.KvEventBatch, None]:
        """The snapshot, then what changes with the load, until this server or the caller stops.

        Args:
          on_stall: called once when the caller takes nothing; has to end it.

        Raises:
          StatusError: UNAVAILABLE when there is no engine or it is gone; RESOURCE_EXHAUSTED, too many subscribe.
        """
        self._engine.check()
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            message = f"{len(self._subscribers)} clients subscribe to cache events already"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, 30.0, reason="subscribers")
        subscriber = _Subscriber(on_stall)
        self._subscribers.add(subscriber)
        if self._look is None:
            self._look = asyncio.create_task(self._follow(), name="kv events")
        self._newcomer.set()
        self._sweeps.schedule()
        stream = _Stream(self._engine, self._load)
        try:
            while True:
                if subscriber.waiting:
                    batch = stream.batch(subscriber.waiting.popleft())
                elif subscriber.error is not None:
                    raise subscriber.error
                elif not self._serving():
                    return
                else:
                    batch = stream.changed_load() if stream.sequence else None
                    if batch is None:
                        subscriber.away_since = None
                        await _signalled(subscriber.news, LOOK_SECONDS)
                        continue
                subscriber.away_since = time.monotonic()
                yield batch
        finally:
            self._subscribers.discard(subscriber)
            if not self._subscribers:
                self._sweeps.cancel()
                if self._look is not None:
                    self._look.cancel()
                    self._look, self._view = None, None

    async def _follow(self) -> None:
        """Looks at the cache as long as anybody subscribes."""
        while True:
            try:
                await self._look_once()
            except Exception as e:
                if not isinstance(e, StatusError):
                    _log.error("the cache cannot be followed", exc_info=e)
                    e = StatusError(grpc.StatusCode.INTERNAL, "internal error")
                for subscriber in self._subscribers:
                    subscriber.error = e.again()
                    subscriber.news.set()
                self._look, self._view = None, None
                return
            await _signalled(self._newcomer, LOOK_SECONDS)

    async def _look_once(self) -> None:
        pages = await self._engine.call(cached_pages)
        if self._view is None:
            self._view = CacheView(self._engine.known().sizes.page_size)
        view = self._view
        changes = await asyncio.to_thread(lambda: [_Message(group) for group in batched(view.advance(pages)) if group])
        behind = [subscriber for subscriber in self._subscribers if subscriber.behind]
        whole = await asyncio.to_thread(_snapshot, view) if behind else []
        for subscriber in self._subscribers:
            if subscriber in behind:
                subscriber.behind = False
                subscriber.put(whole)
            elif changes and not subscriber.behind:
                subscriber.put(changes)

    def _end_stalled(self) -> None:
        """Ends subscribers that take nothing: one timer for all of them, while there are any."""
        now = time.monotonic()
        away = [subscriber for subscriber in self._subscribers if subscriber.away_since is not None]
        for subscriber in away:
            assert subscriber.away_since is not None
            if now - subscriber.away_since >= self._stall_seconds:
                self._subscribers.discard(subscriber)
                subscriber.on_stall()
        if self._subscribers:
            self._sweeps.schedule()


def _snapshot(view: CacheView) -> list[_Message]:
    groups = batched(view.snapshot())
    return [
        _Message(group, pb.KvSnapshotChunk(index=index, count=len(groups), blocks=len(view)))
        for index, group in enumerate(groups)
    ]


async def _signalled(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set, which is taken back, or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()


class _Stream:
    """The batches of one subscription.

    Attributes:
      sequence: number of the last one with events; 0: there was none.
    """

    def __init__(self, engine: EngineClient, load: Callable[[EngineStats], pb.EngineLoad]) -> None:
        self._engine, self._load = engine, load
        self.sequence = 0
        self._sample = 0
        self._last_load: tuple[bytes, float] = (b"", 0.0)

    def batch(self, message: _Message) -> pb.KvEventBatch:
        """The next batch with events."""
        self.sequence += 1
        batch = pb.KvEventBatch(
            sequence_number=self.sequence, timestamp=time.time(), events=message.events, snapshot=message.snapshot
        )
        load = self._new_load()
        if load is not None:
            batch.load.CopyFrom(load)
        return batch

    def changed_load(self) -> pb.KvEventBatch | None:
        """The load record alone, where it differs from the last one sent, or that one is old."""
        sent, at = self._last_load
        load = self._new_load(unless=sent if time.monotonic() - at <= HEARTBEAT_SECONDS else None)
        if load is None:
            return None
        load.load_only = True
        return pb.KvEventBatch(sequence_number=self.sequence, timestamp=time.time(), load=load)

    def _new_load(self, unless: bytes | None = None) -> pb.EngineLoad | None:
        """The next load record; None before the engine has counters, and where it would be `unless`."""
        stats = self._engine.snapshot
        if stats is None:
            return None
        load = self._load(stats)
        data = load.SerializeToString(deterministic=True)
        if data == unless:
            return None
        self._last_load = (data, time.monotonic())
        self._sample += 1
        load.sample = self._sample
        return load
