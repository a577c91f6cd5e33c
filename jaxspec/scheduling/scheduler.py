"""Who runs next: admission, chunked prefill, page reservation for decode rounds, preemption.

NumPy and the standard library only. Must not know models, tiers' executables, tokenizers or stop conditions: the
engine decides when a request ends and tells the scheduler.

The device executes what is dispatched in order. Therefore the pages and the slot of a finished or preempted request
are free at once, although a round that writes to them may still be in flight: whoever gets them is dispatched later,
and overwrites before it reads. The result of that round carries an old epoch and is dropped.
"""

from __future__ import annotations

import bisect
import heapq
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import numpy as np

from jaxspec.request import ErrorKind, FinishReason, Request, RequestStatus
from jaxspec.scheduling.pace import ALONE, Repeats
from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.plan import DecodeRows, Grant, Plan, PrefillChunk, SchedulerConfig, SchedulerStats
from jaxspec.scheduling.prefix_cache import PrefixCache
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.scheduling.slots import Due, SlotTable

#: Rounds that may take prompts along until all are computed. More would let first tokens wait for long.
_SOON = 4
#: What several rounds are to save while requests wait, by what slots are idle for them: both are means of what varies,
#: and first tokens come later.
_WORTH = 2.0


class Scheduler:
    """First come, first served, shifted by priorities (which age); preemption by recompute when pages run out.

    A step of the engine: `plan()`, dispatch it, `dispatched(plan, growth)`; then, a round late, `commit` the first
    tokens and `commit_round` the rounds of the step before, and `finish` the requests that are done.

    Args:
      config: what it hands out.
      clock: seconds; injected so that tests own the time.

    Attributes:
      slots: numbers of the running requests.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.sizes = config, config.sizes
        self.pages = PageAllocator(config.sizes.num_pages)
        self.prefix_cache = PrefixCache(self.pages, config.sizes.page_size, config.prefix_lookahead)
        self._clock = clock
        self._ranks: dict[Request, tuple[float, int]] = {}  # live requests; lower runs first
        self._by_id: dict[str, Request] = {}
        self._waiting: list[Request] = []  # by rank
        self._running: list[Request] = []  # by rank
        self.slots = SlotTable(config.sizes.slots, self._running)
        self._prefilling: list[Request] = []  # by rank
        self._free_slots = list(range(config.sizes.slots))
        self._added = self._releases = self._preemptions = self._hits = self._queries = 0
        self._blocked: tuple[Request | None, int] = (None, 0)

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queues a request, and cuts its max_tokens to what the context and the pool leave behind its prompt.

        Raises:
          ValueError: a duplicate id, or a prompt that is empty or leaves no room for a token.
        """
        if request.request_id in self._by_id:
            raise ValueError(f"request_id must be unique among live requests, got {request.request_id!r} again")
        request.max_tokens = self.sizes.allowed(len(request.prompt_token_ids), request.params.max_tokens)
        self._by_id[request.request_id] = request
        self._ranks[request] = (request.arrival_time + request.priority * self.config.aging_seconds, self._added)
        self._added += 1
        self._enqueue(self._waiting, request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a live request: slot and pages are free at once, results in flight will be dropped.

        After ErrorKind.NON_FINITE nothing of the request, and nothing cached before, is reused: its pages may hold NaN.
        Other errors are the request's own, and say nothing of what its pages hold.
        """
        assert request in self._ranks, f"{request.request_id} is not live"
        if request.error_kind is ErrorKind.NON_FINITE:
            self.prefix_cache.reset()
            request.cacheable_generated = False
        self._take_out(request)
        del self._ranks[request], self._by_id[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.metrics.output_tokens = len(request.output_token_ids)
        request.metrics.finished_time = self._clock()

    def abort(self, request_id: str) -> bool:
        """Ends a request with FinishReason.ABORT; False when no live request has this id."""
        request = self._by_id.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request is not None

    def flush_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many pages that freed. Live requests keep theirs."""
        freed = self.pages.idle_count
        self.prefix_cache.reset()
        return freed

    @property
    def has_work(self) -> bool:
        """Some request is not finished."""
        return bool(self._by_id)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._by_id) - len(self._waiting),
            waiting=len(self._waiting),
            free_pages=self.pages.free_count,
            cached_pages=self.pages.idle_count,
            preemptions=self._preemptions,
            prefix_hits=self._hits,
            prefix_queries=self._queries,
        )

    # A step: plan, dispatched, commit.

    def plan(self, repeats: Repeats = ALONE, beside: PrefillShape | None = None) -> Plan:
        """Chooses the next step's rows and prefill chunks, and takes the pages they need.

        Decode rows come first, oldest first, so that requests already running are the last to starve. In a step that
        preempted, nothing is admitted. A plan that is not empty must be dispatched.

        Args:
          repeats: rounds of one dispatch, which the plan grants where no prompt is under way or could begin, where
            pages are left for all of them, and where some request needs them all; else one. While requests wait for a
            slot or pages, only where the rounds save twice the time that slots are expected to be idle for them. Who
            waits gets a slot at most 2 * (rounds - 1) rounds later than otherwise: the rest of the dispatch in which a
            row ends, and the one that is in flight behind it.
          beside: what a round can take along of prompts (shapes.cover_beside). Where little is to be computed of them,
            a step with decode rows computes no more than that: rounds do it while they read the weights anyway.
        """
        assert 1 <= repeats.rounds <= self.sizes.max_rounds, f"{repeats} of {self.sizes.max_rounds} rounds"
        if self.config.window is not None:
            self._free_behind(self.config.window)
        rows, preempted = self._grow(repeats.rounds if self._may_repeat(repeats) else 1)
        if beside is not None and not (len(rows) and self._is_little(beside)):
            beside = None
        return Plan(self._chunks(not preempted, beside), rows, preempted)

    def _is_little(self, beside: PrefillShape) -> bool:
        """Whether rounds will soon have taken along all that is to be computed of prompts."""
        begun = (request.num_tokens - request.num_computed for request in self._prefilling)
        coming = (request.num_tokens for request in self._waiting[: len(self._free_slots)])
        return sum(begun) + sum(coming) <= _SOON * beside.size

    def _may_repeat(self, repeats: Repeats) -> bool:
        """Whether several rounds keep nobody waiting for more than they are worth."""
        if self._prefilling:
            return False
        if not self._waiting:
            return True
        if self._free_slots and self._blocked != (self._waiting[0], self._releases):
            return False  # its prompt may begin
        return _WORTH * self.slots.idle_rounds(repeats) < repeats.saved * repeats.rounds * len(self._running)

    def dispatched(self, plan: Plan, growth: int = 0) -> None:
        """The plan is on the device's queue.

        Args:
          plan: the latest plan.
          growth: most tokens that one of its rounds adds to a row (the tier's depth + 1); unused without decode rows.
        """
        if len(plan.decode):
            assert 1 <= growth <= self.sizes.max_growth, f"growth {growth} of {self.sizes.max_growth}"
            plan.decode.growth = growth * plan.decode.rounds
            self.slots.dispatched(plan.decode)
        for chunk in plan.prefill:
            request = chunk.request
            if request.slot != chunk.slot:  # it has ended since
                continue
            request.num_computed = chunk.end
            self._register(request)
            if chunk.is_last:
                self._prefilling.remove(request)
                request.status = RequestStatus.RUNNING
                self._enqueue(self._running, request)
                self.slots.begin(request)

    def commit(self, request: Request, epoch: int, tokens: Sequence[int]) -> bool:
        """Takes the first token after a prompt, or after outputs that were computed again.

        Args:
          epoch: the request's epoch when the prefill was dispatched.
          tokens: the token; none only when the request ends here, and the engine calls `finish` next.

        Returns:
          False when the request was preempted or finished meanwhile; then nothing changed.
        """
        if epoch != request.epoch:
            return False
        assert request.slot is not None and len(tokens) <= 1
        self.slots.came(np.asarray([request.slot]), 0, np.asarray([len(tokens)]), first=True)
        request.output_token_ids.extend(tokens)
        metrics = request.metrics
        metrics.output_tokens = len(request.output_token_ids)
        if tokens and metrics.first_token_time is None:
            metrics.first_token_time = self._clock()
        return True

    def commit_round(self, rows: DecodeRows, tokens: Sequence[Sequence[int]]) -> None:
        """Takes the oldest dispatch of rounds; rows that were preempted or finished meanwhile are passed over.

        Args:
          tokens: of each row, the accepted drafts and the new root of each round. Fewer only when the request ends
            here, and the engine calls `finish` next.
        """
        lengths = list(map(len, tokens))
        assert max(lengths, default=0) <= rows.growth, f"{max(lengths)} tokens where {rows.growth} are the most"
        alive, counts = self.slots.alive(rows), np.asarray(lengths, np.int64)
        slots, requests = rows.slots_B, rows.requests
        if np.count_nonzero(alive) < len(requests):
            kept = np.flatnonzero(alive).tolist()
            slots, counts = slots[alive], counts[alive]
            requests, tokens = [requests[i] for i in kept], [tokens[i] for i in kept]
        self.slots.came(slots, rows.growth, counts, rows.rounds)
        for request, new in zip(requests, tokens, strict=True):
            request.output_token_ids.extend(new)

    # Decode.

    def _grow(self, rounds: int) -> tuple[DecodeRows, tuple[Request, ...]]:
        """The rows of the next rounds, with their pages for the deepest tier, and who lost theirs for lack of pages.

        A row's length is known only up to the growth of rounds in flight, so the upper bound counts, but no more than
        its longest. The round that takes a row there is its last: the device sees it, and writes nothing more.
        """
        due = self.slots.due((rounds - 1) * self.sizes.max_growth)
        missing = self._missing(due)
        if rounds > 1 and (due.most_rounds < rounds or int(missing.clip(0).sum()) > self.pages.available_count):
            rounds, due = 1, self.slots.due()
            missing = self._missing(due)
        preempted: list[Request] = []
        granted: list[tuple[Request, Grant]] = []
        for row in (missing > 0).nonzero()[0].tolist():
            request, count = due.requests[row], int(missing[row])
            assert count <= self.sizes.growth_pages
            pages = None
            while request.slot is not None and (pages := self._reserve(count)) is None:
                preempted.append(self._youngest())
                self._preempt(preempted[-1])
            if pages is not None:
                granted.append((request, Grant(row, len(request.pages), pages)))
                request.pages.extend(pages)
                self.slots.granted(request)
        if preempted:
            keep = [row for row, request in enumerate(due.requests) if request.slot is not None]
            at = {row: new for new, row in enumerate(keep)}
            due = due.kept(keep)
            granted = [(r, g._replace(row=at[g.row])) for r, g in granted if r.slot is not None]
        return due.decode([grant for _, grant in granted], rounds), tuple(preempted)

    def _missing(self, due: Due) -> np.ndarray:
        """Pages that each row has to get; below 1 for none."""
        return self.sizes.pages_for(cast("Any", due.bound_B)) - due.pages_B

    def _youngest(self) -> Request:
        """The request that loses its pages first. Alone it can always grow: `add` has checked the pool."""
        scheduled = [*self._running, *self._prefilling]
        assert len(scheduled) > 1, "a single request does not fit the pool"
        return max(scheduled, key=self._ranks.__getitem__)

    def _preempt(self, request: Request) -> None:
        self._take_out(request)
        request.status = RequestStatus.WAITING
        request.metrics.preemptions += 1
        self._preemptions += 1
        self._enqueue(self._waiting, request)

    # Prefill.

    def _chunks(self, admit: bool, beside: PrefillShape | None = None) -> tuple[PrefillChunk, ...]:
        """First come, first served, as far as the step's tokens go: whole chunks, or what is left of a prompt.

        Args:
          beside: what all of them have to fit in; then parts of chunks will do.
        """
        left, rows, cut = self.config.batched(bool(self._running)), self.sizes.slots, beside is not None
        if beside is not None:
            left, rows = min(left, beside.size), beside.rows
        chunks: list[PrefillChunk] = []
        coming: set[object] = set()  # names of the pages that are computed next
        for request in self._prefilling[:rows]:
            chunk = self._chunk(request, left, cut, is_first=False)
            if chunk is None:
                return tuple(chunks)
            left -= chunk.end - chunk.start
            chunks.append(chunk)
            coming.add(self._coming(request))
        while admit and left and len(chunks) < rows and (request := self._admit(left, cut, coming)) is not None:
            self._enqueue(self._prefilling, request)
            chunk = self._chunk(request, left, cut, is_first=True)
            assert chunk is not None
            left -= chunk.end - chunk.start
            chunks.append(chunk)
            coming.add(self._coming(request))
        return tuple(chunks)

    def _coming(self, request: Request) -> object:
        """The name of the first page that it computes next; None where that cannot be told."""
        if not self._knows_parent(request):
            return None
        return self.prefix_cache.missing(request.token_ids, request.pages, request.num_cached_pages)

    def _chunk(self, request: Request, left: int, cut: bool, *, is_first: bool) -> PrefillChunk | None:
        """The next one of a prompt; None where so many tokens do not hold it, nor part of it if it may be cut."""
        assert request.slot is not None
        start, total = request.num_computed, request.num_tokens
        end = min(start + self._most(start), total)
        if end - start > left:
            if not (cut and left):
                return None
            end = start + left
        return PrefillChunk(request, request.slot, start, end, end == total, is_first, tuple(request.pages))

    def _most(self, start: int) -> int:
        """Tokens of a chunk from this position on."""
        return self.config.chunk_at(start, bool(self._running))

    def _admit(self, left: int, cut: bool, coming: Collection[object]) -> Request | None:
        """Gives the first of the queue a slot and pages for its tokens and one round; None when it has to wait.

        While others run, a page for each of them stays in reserve: a request that is preempted right after its
        prefill has only cost time.

        Args:
          left: tokens that its first chunk may have. cut: whether part of it will do.
          coming: names (PrefixCache.missing) of pages that this step computes: it waits for those that it can reuse.
        """
        if not self._waiting or not self._free_slots:
            return None
        request = self._waiting[0]
        if self._blocked == (request, self._releases):  # nothing was released since it did not fit
            return None
        tokens = request.token_ids
        cached = self.prefix_cache.match(tokens) if self.config.enable_prefix_caching else []
        start = len(cached) * self.sizes.page_size
        missing = len(tokens) - start
        if not cut and min(self._most(start), missing) > left:
            return None
        if self.config.enable_prefix_caching and missing > self.sizes.page_size:
            name = self.prefix_cache.missing(tokens, cached, len(cached))
            if name is not None and name in coming:
                return None
        self.pages.share(cached)
        needed = self.sizes.pages_for(len(tokens)) - len(cached)
        if needed + len(self._running) + len(self._prefilling) > self.pages.available_count:
            self.pages.release(cached)
            self._blocked = (request, self._releases)
            return None
        pages = self._reserve(needed)
        assert pages is not None
        del self._waiting[0]
        request.slot = heapq.heappop(self._free_slots)
        request.pages = cached + pages
        self._started(request, len(cached), len(tokens))
        return request

    def _started(self, request: Request, cached_pages: int, num_tokens: int) -> None:
        hit = cached_pages * self.sizes.page_size
        request.status = RequestStatus.PREFILLING
        request.num_computed = hit
        request.num_cached_pages = cached_pages
        self._hits += hit
        self._queries += num_tokens
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = self._clock()
            request.metrics.cached_prompt_tokens = hit

    # Queues and pages.

    def _enqueue(self, queue: list[Request], request: Request) -> None:
        bisect.insort(queue, request, key=self._ranks.__getitem__)

    def _reserve(self, count: int) -> list[int] | None:
        """Free pages, made by evicting idle ones where necessary; None, and nothing changed, when there are too few."""
        if count > self.pages.available_count:
            return None
        while self.pages.free_count < count:
            self.prefix_cache.evict()
        return self.pages.allocate(count)

    def _free_behind(self, window: int) -> None:
        """Gives pages back that no further query of their requests sees, once the prefix cache knows them.

        What is in flight may still read them: whoever gets them writes later. Their numbers stay in the page tables,
        on the device too, and are never read.
        """
        for request in (*self._prefilling, *self._running):
            running = request.status is RequestStatus.RUNNING
            computed = self.slots.computed(request) if running else request.num_computed
            passed = (computed - window + 1) // self.sizes.page_size
            if passed > request.num_freed_pages:
                request.num_computed = computed
                if request.cacheable_generated:
                    self._register(request)
                self.pages.release(request.pages[request.num_freed_pages : passed])
                request.num_freed_pages = passed
                self._releases += 1

    def _knows_parent(self, request: Request) -> bool:
        """Whether it still holds the page below which its next one would be found."""
        return not request.num_freed_pages or request.num_cached_pages > request.num_freed_pages

    def _register(self, request: Request) -> None:
        """Lets later requests reuse the pages that are full and whose lookahead tokens are known."""
        if self.config.enable_prefix_caching and self._knows_parent(request):
            known = min(request.num_computed, request.num_tokens - self.config.prefix_lookahead)
            full = max(known // self.sizes.page_size, request.num_cached_pages)
            request.num_cached_pages = self.prefix_cache.register(
                request.token_ids, request.pages, request.num_cached_pages, full
            )

    def _take_out(self, request: Request) -> None:
        """Out of every queue, without slot and pages; results in flight become stale."""
        if request.slot is None:
            self._waiting.remove(request)
        else:
            if request.status is RequestStatus.PREFILLING:
                self._prefilling.remove(request)
            else:
                self._running.remove(request)
                request.num_computed = self.slots.computed(request)
            self.slots.end(request.slot)
            if request.cacheable_generated:
                self._register(request)
            heapq.heappush(self._free_slots, request.slot)
            self.pages.release(request.pages[request.num_freed_pages :])
            self._releases += 1
        request.slot = None
        request.pages = []
        request.num_computed = request.num_cached_pages = request.num_freed_pages = 0
        request.epoch += 1
