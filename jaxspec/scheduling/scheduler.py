"""Who runs next: admission, chunked prefill, page reservation for decode rounds, preemption.

Standard library only. Must not know models, tiers' executables, tokenizers or stop conditions: the engine decides
when a request ends and tells the scheduler.

The device executes what is dispatched in order. Therefore the pages and the slot of a finished or preempted request
are free at once, although a round that writes to them may still be in flight: whoever gets them is dispatched later,
and overwrites before it reads. The result of that round carries an old epoch and is dropped.
"""

from __future__ import annotations

import bisect
import heapq
import time
from collections.abc import Callable, Sequence

from jaxspec.request import ErrorKind, FinishReason, Request, RequestStatus
from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.plan import DecodeRow, Plan, PrefillChunk, SchedulerConfig, SchedulerStats
from jaxspec.scheduling.prefix_cache import PrefixCache


class Scheduler:
    """First come, first served, shifted by priorities (which age); preemption by recompute when pages run out.

    A step of the engine: `plan()`, dispatch it, `dispatched(plan, growth)`; then, a round late, `commit` every row of
    the step before, and `finish` those that are done.

    Args:
      config: what it hands out.
      clock: seconds; injected so that tests own the time.
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
        self._prefilling: Request | None = None
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

    def plan(self) -> Plan:
        """Chooses the next step's rows and prefill chunk, and takes the pages they need.

        Decode rows come first, oldest first, so that requests already running are the last to starve. In a step that
        preempted, nothing is admitted. A plan that is not empty must be dispatched.
        """
        rows: list[DecodeRow] = []
        preempted: list[Request] = []
        for request in tuple(self._running):
            if request.status is RequestStatus.RUNNING and self._needs_round(request):
                row = self._grow(request, preempted)
                if row is not None:
                    rows.append(row)
        prefill = self._next_chunk(admit=not preempted)
        return Plan(prefill, tuple(rows), tuple(preempted))

    def dispatched(self, plan: Plan, growth: int = 0) -> None:
        """The plan is on the device's queue.

        Args:
          plan: the latest plan.
          growth: most tokens its round adds to a row (the tier's depth + 1); unused without decode rows.
        """
        assert not plan.decode or 1 <= growth <= self.sizes.max_growth, f"growth {growth} of {self.sizes.max_growth}"
        for row in plan.decode:
            if row.epoch == row.request.epoch:
                row.request.in_flight.append(growth)
        chunk = plan.prefill
        if chunk is None or chunk.request is not self._prefilling:
            return
        chunk.request.num_computed = chunk.end
        self._register(chunk.request)
        if chunk.is_last:
            self._prefilling = None
            chunk.request.status = RequestStatus.RUNNING
            chunk.request.in_flight.append(0)
            self._enqueue(self._running, chunk.request)

    def commit(self, request: Request, epoch: int, tokens: Sequence[int]) -> bool:
        """Takes the oldest result in flight of a row: appends its tokens to the request's outputs.

        Args:
          request: the row.
          epoch: the row's epoch when the result was dispatched.
          tokens: the prefill's single token, or a round's accepted drafts and new root. Fewer only when the engine
            cuts them because the request ends here, and calls `finish` next.

        Returns:
          False when the request was preempted or finished meanwhile; then nothing changed.
        """
        if epoch != request.epoch:
            return False
        assert request.in_flight, f"{request.request_id} has no result in flight"
        growth = request.in_flight.pop(0)
        assert len(tokens) <= max(growth, 1), f"{len(tokens)} tokens from a result of at most {max(growth, 1)}"
        request.output_token_ids.extend(tokens)
        if growth:
            request.num_computed += len(tokens)
        metrics = request.metrics
        metrics.output_tokens = len(request.output_token_ids)
        if tokens and metrics.first_token_time is None:
            metrics.first_token_time = self._clock()
        return True

    # Decode.

    @staticmethod
    def _needs_round(request: Request) -> bool:
        """Results in flight bring at least one token each; is a further one needed?"""
        return len(request.output_token_ids) + len(request.in_flight) < request.max_tokens

    def _pages_for(self, request: Request, length: int) -> int:
        """Pages for `length` tokens and one round of the deepest tier.

        A round in flight may take a row past max_tokens before the host has seen it. What it writes further than
        max_growth behind the last useful token meets the table's padding, or lies behind the table: the device has
        to drop it. It could only have served tokens that are cut.
        """
        longest = len(request.prompt_token_ids) + request.max_tokens
        return self.sizes.pages_for(min(length, longest))

    def _grow(self, request: Request, preempted: list[Request]) -> DecodeRow | None:
        """Reserves the row's next round for the deepest tier; None when the row itself was preempted for lack of pages.

        The length is known only up to the growth of rounds in flight, so the upper bound counts.
        """
        assert request.slot is not None
        longest = request.num_computed + sum(request.in_flight)
        missing = max(0, self._pages_for(request, longest) - len(request.pages))
        assert missing <= self.sizes.growth_pages
        while (new_pages := self._reserve(missing)) is None:
            victim = self._youngest()
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return None
        index = len(request.pages)
        request.pages.extend(new_pages)
        return DecodeRow(request, request.slot, request.epoch, index, tuple(new_pages))

    def _youngest(self) -> Request:
        """The request that loses its pages first. Alone it can always grow: `add` has checked the pool."""
        scheduled = self._running if self._prefilling is None else [*self._running, self._prefilling]
        assert len(scheduled) > 1, "a single request does not fit the pool"
        return max(scheduled, key=self._ranks.__getitem__)

    def _preempt(self, request: Request) -> None:
        self._take_out(request)
        request.status = RequestStatus.WAITING
        request.metrics.preemptions += 1
        self._preemptions += 1
        self._enqueue(self._waiting, request)

    # Prefill.

    def _next_chunk(self, admit: bool) -> PrefillChunk | None:
        is_first = self._prefilling is None
        if is_first and admit:
            self._prefilling = self._admit()
        request = self._prefilling
        if request is None:
            return None
        assert request.slot is not None
        start, total = request.num_computed, request.num_tokens
        end = min(start + self.sizes.prefill_chunk, total)
        return PrefillChunk(request, request.slot, start, end, end == total, is_first, tuple(request.pages))

    def _admit(self) -> Request | None:
        """Gives the first of the queue a slot and pages for its tokens and one round; None when it has to wait.

        While others run, a page for each of them stays in reserve: a request that is preempted right after its
        prefill has only cost time.
        """
        if not self._waiting or not self._free_slots:
            return None
        request = self._waiting[0]
        if self._blocked == (request, self._releases):  # nothing was released since it did not fit
            return None
        tokens = request.token_ids
        cached = self.prefix_cache.match(tokens) if self.config.enable_prefix_caching else []
        self.pages.share(cached)
        missing = self._pages_for(request, len(tokens)) - len(cached)
        if missing + len(self._running) > self.pages.available_count:
            self.pages.release(cached)
            self._blocked = (request, self._releases)
            return None
        pages = self._reserve(missing)
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

    def _register(self, request: Request) -> None:
        """Lets later requests reuse the pages that are full and whose lookahead tokens are known."""
        if self.config.enable_prefix_caching:
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
            if request is self._prefilling:
                self._prefilling = None
            else:
                self._running.remove(request)
            if request.cacheable_generated:
                self._register(request)
            heapq.heappush(self._free_slots, request.slot)
            self.pages.release(request.pages)
            self._releases += 1
        request.slot = None
        request.pages = []
        request.num_computed = request.num_cached_pages = 0
        request.in_flight.clear()
        request.epoch += 1
