"""The scheduler against a device that keeps the true lengths and the contents of every page.

The device runs a step when it is dispatched; the host sees the results one step later. Tokens are a function of
(seed, position), as in the engine, so that a resumed request must continue with the very same outputs.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from jaxspec.request import FinishReason, Request, RequestStatus, SamplingParams
from jaxspec.scheduling import DecodeRows, Plan, PrefillChunk, Scheduler, SchedulerConfig
from jaxspec.scheduling.pace import Repeats
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.sizes import Sizes


def token_at(seed: int, position: int) -> int:
    return random.Random(seed * 1_000_003 + position).randrange(50)


@dataclasses.dataclass
class Slot:
    request: Request
    table: list[int]
    tokens: list[int]  # true tokens, the pending root last
    length: int = 0


class Device:
    """Slots and a pool. `pool` holds tokens, `drafter` pairs of tokens as an EAGLE drafter's cache would."""

    def __init__(self, config: SchedulerConfig, rng: random.Random, eos: int | None) -> None:
        self.config, self.sizes, self.rng, self.eos = config, config.sizes, rng, eos
        self.slots: dict[int, Slot] = {}
        self.pool: dict[tuple[int, int], int] = {}
        self.drafter: dict[tuple[int, int], tuple[int, int]] = {}

    def _address(self, slot: Slot, position: int) -> tuple[int, int] | None:
        index, offset = divmod(position, self.sizes.page_size)
        page = slot.table[index] if index < len(slot.table) else self.sizes.num_pages
        return None if page == self.sizes.num_pages else (page, offset)

    def _write(self, slot: Slot, start: int, end: int, *, drafter: bool = True) -> None:
        last_useful = len(slot.request.prompt_token_ids) + slot.request.max_tokens
        for position in range(start, end):
            address = self._address(slot, position)
            if address is None:
                assert position >= last_useful, f"position {position} has no page, useful are {last_useful}"
                continue
            self.pool[address] = slot.tokens[position]
            pair = slot.tokens[position : position + 2]
            self.drafter.pop(address, None)
            if drafter and len(pair) == 2:
                self.drafter[address] = (pair[0], pair[1])

    def _check(self, slot: Slot, end: int, *, drafter: bool = False) -> None:
        lowest = 0 if self.config.window is None else max(0, slot.length - self.config.window + 1)
        for position in range(lowest, end):
            address = self._address(slot, position)
            assert address is not None and self.pool.get(address) == slot.tokens[position], (position, end, address)
            if drafter:
                assert self.drafter.get(address) == tuple(slot.tokens[position : position + 2]), position

    def admit(self, chunk: PrefillChunk) -> None:
        """Before any chunk of the step is computed: what its request reuses must be there by then."""
        sizes, request = self.sizes, chunk.request
        table = list(chunk.page_table) + [sizes.num_pages] * (sizes.pages_per_seq - len(chunk.page_table))
        assert len(table) == sizes.pages_per_seq
        slot = self.slots[chunk.slot] = Slot(request, table, request.token_ids)
        slot.length = chunk.start
        self._check(slot, chunk.start, drafter=self.config.prefix_lookahead > 0)

    def prefill(self, chunk: PrefillChunk) -> list[int]:
        sizes, request = self.sizes, chunk.request
        slot = self.slots[chunk.slot]
        assert slot.request is request and list(chunk.page_table) == slot.table[: len(chunk.page_table)]
        self._check(slot, slot.length)
        assert 0 < chunk.end - chunk.start <= sizes.prefill_chunk and chunk.is_last == (chunk.end == len(slot.tokens))
        if chunk.is_last:
            slot.tokens.append(token_at(request.seed, chunk.end))
        self._write(slot, chunk.start, chunk.end)
        slot.length = chunk.end
        return slot.tokens[chunk.end :] if chunk.is_last else []

    def decode(self, rows: DecodeRows, growth: int, *, drafter: bool) -> list[list[int]]:
        for row, first, pages in rows.grants:
            table = self.slots[rows.slots_B[row]].table
            assert 0 < len(pages) <= self.sizes.growth_pages
            assert table[first : first + len(pages)] == [self.sizes.num_pages] * len(pages)
            table[first : first + len(pages)] = pages
        said: list[list[int]] = [[] for _ in rows.requests]
        for _ in range(rows.rounds):
            for row, (slot, request) in enumerate(zip(rows.slots_B.tolist(), rows.requests, strict=True)):
                said[row] += self._decode(self.slots[slot], request, growth, drafter)
        return said

    def _decode(self, slot: Slot, request: Request, growth: int, drafter: bool) -> list[int]:
        assert slot.request is request
        useful, outputs = (
            len(request.prompt_token_ids) + request.max_tokens,
            slot.tokens[len(request.prompt_token_ids) :],
        )
        if len(slot.tokens) >= useful or self.eos in outputs:  # over: the device has seen it
            return []
        self._check(slot, slot.length)
        gained = self.rng.randint(1, growth)
        first = len(slot.tokens)
        slot.tokens += [token_at(request.seed, first + i) for i in range(gained)]
        self._write(slot, slot.length, slot.length + gained, drafter=drafter)
        slot.length += gained
        assert slot.length == len(slot.tokens) - 1
        return slot.tokens[first:]


class Simulation:
    """An engine without a model: random arrivals, tiers, stops, aborts and failures."""

    def __init__(self, seed: int, *, lookahead: int, caching: bool, hostile: bool, window: int | None = None) -> None:
        self.rng = rng = random.Random(seed)
        page_size, max_growth, max_seq_len = rng.choice([1, 2, 4]), rng.randint(1, 6), rng.choice([24, 40])
        needed = -(-(max_seq_len + max_growth) // page_size)
        self.sizes = Sizes(
            slots=rng.randint(1, 6),
            num_pages=needed + rng.randint(0, needed * 2),
            page_size=page_size,
            pages_per_seq=needed + rng.randint(0, 2),
            max_seq_len=max_seq_len,
            max_depth=max_growth - 1,
            prefill_chunk=(chunk := rng.choice([3, 8, 64])),
            max_num_batched_tokens=chunk * rng.choice([1, 1, 4]),
            max_rounds=rng.choice([1, 2, 5]),
        )
        cuts = random.Random(seed + 2)
        shorter, together = cuts.choice([(), ((0, 4),), ((0, 8), (10, 2))]), cuts.choice([None, 2, 8, 64])
        self.config = SchedulerConfig(
            self.sizes, enable_prefix_caching=caching, prefix_lookahead=lookahead, window=window,
            shorter_chunks=shorter, batched_beside=together,
        )  # fmt: skip
        self.hostile = hostile
        self.steps = self.most_chunks = self.several = self.queued = self.freed = self.pieces = 0
        self.besides = random.Random(seed + 1)
        self.scheduler = Scheduler(self.config, clock=lambda: float(self.steps))
        self.eos = 7 if hostile else None
        self.device = Device(self.config, rng, self.eos)
        self.requests: list[Request] = []
        #: Results the host has not seen: first tokens with their requests' epochs, and a round.
        self.pending: tuple[list[tuple[Request, int, list[int]]], DecodeRows, list[list[int]]] | None = None

    def new_request(self) -> None:
        rng, limit = self.rng, self.sizes.max_seq_len
        done = [r.token_ids for r in self.requests if r.finished]
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, limit // 2))]
        if done and rng.random() < 0.5:  # a further turn of an earlier conversation
            prompt = (rng.choice(done) + prompt[: rng.randint(0, 4)])[: limit - 1]
        asked = rng.randint(1, limit - len(prompt))
        beyond: dict[int, int | None] = {0: None, 1: asked + limit}  # some ask for more than the context leaves
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            SamplingParams(max_tokens=beyond.get(asked % 7, asked)),
            seed=rng.randrange(4),
            arrival_time=float(self.steps),
            priority=rng.choice([0, 0, 0, 1, -1]) if self.hostile else 0,
        )
        self.requests.append(request)
        self.scheduler.add(request)

    def cut(self, request: Request, tokens: list[int]) -> list[int]:
        tokens = tokens[: request.max_tokens - len(request.output_token_ids)]
        return tokens[: tokens.index(self.eos) + 1] if self.eos is not None and self.eos in tokens else tokens

    def finish(self, request: Request) -> None:
        tokens = request.output_token_ids
        if self.eos is not None and tokens and tokens[-1] == self.eos:
            self.scheduler.finish(request, FinishReason.STOP)
        elif len(tokens) == request.max_tokens:
            self.scheduler.finish(request, FinishReason.LENGTH)

    def commit(self) -> None:
        if self.pending is None:
            return
        started, rows, tokens = self.pending
        for request, epoch, first in started:
            if self.scheduler.commit(request, epoch, self.cut(request, first)):
                self.finish(request)
        alive = self.scheduler.slots.alive(rows)
        cut = [self.cut(request, new) for request, new in zip(rows.requests, tokens, strict=True)]
        self.scheduler.commit_round(rows, cut)
        for request in [request for request, lives in zip(rows.requests, alive, strict=True) if lives]:
            self.finish(request)

    def dispatch(self, plan: Plan) -> None:
        growth = self.rng.randint(1, self.sizes.max_growth)
        gap = self.config.prefix_lookahead > 0 and growth == 1  # plain decoding leaves the drafter's cache behind
        slots = {chunk.slot for chunk in plan.prefill} | set(plan.decode.slots_B.tolist())
        assert len(slots) == len(plan.prefill) + len(plan.decode)
        self.most_chunks = max(self.most_chunks, len(plan.prefill))
        self.check_chunks(plan)
        for chunk in plan.prefill:
            if chunk.is_first:
                self.device.admit(chunk)
        started = [(chunk.request, chunk.request.epoch, self.device.prefill(chunk)) for chunk in plan.prefill]
        tokens = self.device.decode(plan.decode, growth, drafter=not gap)
        for request in plan.decode.requests:
            request.cacheable_generated &= not gap
        self.scheduler.dispatched(plan, growth)
        self.check_pages()
        self.commit()
        self.pending = [first for first in started if first[2]], plan.decode, tokens

    def check_chunks(self, plan: Plan) -> None:
        """What stood beside them when they were planned decodes in the plan, or lost its pages there."""
        others = len(plan.decode) > 0
        lengths = [chunk.end - chunk.start for chunk in plan.prefill]
        assert sum(lengths) <= self.config.batched(others)
        for chunk, length in zip(plan.prefill, lengths, strict=True):
            assert length <= self.config.chunk_at(chunk.start, others)

    def step(self) -> None:
        self.steps += 1
        known = self.rng.random(), 1 + self.rng.random(), self.rng.choice([0.0, 0.1])
        size = self.besides.choice([0, 2, 5])
        beside = PrefillShape(size, self.besides.randint(1, 3), size) if size else None
        plan = self.scheduler.plan(Repeats(self.rng.randint(1, self.sizes.max_rounds), *known), beside)
        counts = [chunk.end - chunk.start for chunk in plan.prefill]
        if beside is not None and len(plan.decode) and sum(counts) <= size and len(counts) <= beside.rows:
            self.pieces += any(not chunk.is_last for chunk in plan.prefill)
        several = plan.decode.rounds
        if several > 1:
            assert not plan.prefill and not plan.preempted
            self.several += 1
            self.queued += self.scheduler.stats.waiting > 0
            plan.decode.rounds = self.rng.choice([1, several])  # as where the policy wants another tier
        # With results to wait for, an empty plan is fine; without, somebody has to run.
        waits = self.pending is not None and (self.pending[0] is not None or len(self.pending[1]))
        assert not plan.empty or waits or plan.preempted or not self.scheduler.has_work
        self.dispatch(plan)
        live = [r for r in self.requests if not r.finished]
        if self.hostile and live and self.rng.random() < 0.03:
            assert self.scheduler.abort(self.rng.choice(live).request_id)
        elif self.hostile and live and self.rng.random() < 0.01:
            self.scheduler.finish(self.rng.choice(live), FinishReason.ERROR)
        self.check_pages()

    def check_pages(self) -> None:
        pages, tables = self.scheduler.pages, [r.pages[r.num_freed_pages :] for r in self.requests if r.pages]
        self.freed = max(self.freed, *(r.num_freed_pages for r in self.requests), 0)
        holders = Counter(page for table in tables for page in table)
        assert all(holders[page] == pages.references(page) for page in range(self.sizes.num_pages))
        assert pages.free_count + pages.idle_count + len(holders) == self.sizes.num_pages
        assert all(len(set(table)) == len(table) for table in tables)
        shared = {page for page, count in holders.items() if count > 1}
        cached = {page for r in self.requests for page in r.pages[: r.num_cached_pages]}
        if self.config.window is not None:  # what an evicted parent took with it
            cached |= shared
        assert shared <= cached
        slots = [r.slot for r in self.requests if r.slot is not None]
        assert len(set(slots)) == len(slots) <= self.sizes.slots

    def run(self, num_requests: int) -> None:
        while len(self.requests) < num_requests or self.scheduler.has_work:
            while len(self.requests) < num_requests and self.rng.random() < 0.3:
                self.new_request()
            self.step()
            assert self.steps < 400 * num_requests, "starved"


def expected_outputs(request: Request) -> list[int]:
    first = len(request.prompt_token_ids)
    return [token_at(request.seed, first + i) for i in range(len(request.output_token_ids))]


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_keeps_every_invariant(seed: int):
    simulation = Simulation(seed, lookahead=seed % 2, caching=seed % 5 != 0, hostile=seed % 4 < 2)
    simulation.run(25)
    scheduler, requests = simulation.scheduler, simulation.requests
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    assert all(request.output_token_ids == expected_outputs(request) for request in requests)
    stats = scheduler.stats
    assert stats.free_pages + stats.cached_pages == simulation.sizes.num_pages
    assert (stats.running, stats.waiting, scheduler.has_work) == (0, 0, False)
    scheduler.prefix_cache.reset()
    assert scheduler.stats.free_pages == simulation.sizes.num_pages
    if not simulation.hostile:
        assert all(len(r.output_token_ids) == r.max_tokens for r in requests)
        cut = [r for r in requests if r.max_tokens != r.params.max_tokens]
        assert cut and all(r.num_tokens == simulation.sizes.max_seq_len for r in cut)
        started = [r.metrics.first_scheduled_time or 0.0 for r in requests]
        assert started == sorted(started), "first come, first served"


@pytest.mark.parametrize("seed", range(20))
def test_pages_behind_every_window_go_back_and_nobody_notices(seed: int):
    """The device reads nothing that its window hides; whatever it sees must be the request's own."""
    window = random.Random(seed).choice([1, 3, 7, 12])
    simulation = Simulation(seed, lookahead=0, caching=seed % 5 != 0, hostile=seed % 4 < 2, window=window)
    simulation.run(25)
    scheduler, requests = simulation.scheduler, simulation.requests
    assert all(request.output_token_ids == expected_outputs(request) for request in requests)
    stats = scheduler.stats
    assert stats.free_pages + stats.cached_pages == simulation.sizes.num_pages and simulation.freed > 1
    scheduler.prefix_cache.reset()
    assert scheduler.stats.free_pages == simulation.sizes.num_pages


def test_traffic_reaches_preemption_resume_and_reuse():
    """The simulations above mean something only if they get there."""
    preemptions = hits = resumed = together = several = queued = cut = 0
    for seed in range(40):
        simulation = Simulation(seed, lookahead=seed % 2, caching=True, hostile=False)
        simulation.run(12)
        together += simulation.most_chunks > 1
        several, queued, cut = several + simulation.several, queued + simulation.queued, cut + simulation.pieces
        preemptions += simulation.scheduler.stats.preemptions
        hits += simulation.scheduler.stats.prefix_hits
        resumed += sum(r.metrics.preemptions > 0 and len(r.output_token_ids) > 1 for r in simulation.requests)
    assert preemptions > 20 and hits > 200 and resumed > 10 and together > 10, (preemptions, hits, resumed, together)
    assert several > 100 and queued > 50 and cut > 50, (several, queued, cut)
