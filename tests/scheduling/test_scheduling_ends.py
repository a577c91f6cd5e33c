"""Scheduler policy, one rule at a time: preemption, the end, and what others reuse afterwards."""

from __future__ import annotations

import pytest
from tiny_scheduler import make, make_request, prefilled, step

from jaxspec.request import ErrorKind, FinishReason, Request, RequestStatus
from jaxspec.scheduling import Scheduler

# Preemption.


def tight() -> tuple[Scheduler, Request, Request]:
    """Two running requests that hold all 6 pages; the next growth of either needs one more."""
    scheduler = make(num_pages=6, page_size=2, pages_per_seq=22, max_depth=1)
    a, b = make_request("a", prompt=4, max_tokens=6), make_request("b", prompt=2, max_tokens=6)
    prefilled(scheduler, a)  # 3 pages
    prefilled(scheduler, b)  # 2 pages, and one in reserve
    return scheduler, a, b


def test_the_youngest_is_preempted_and_resumes_with_its_outputs():
    scheduler, a, b = tight()
    late = step(scheduler, growth=2)
    assert list(late.decode.requests) == [a, b] and b.pages
    plan = step(scheduler, growth=2)  # a takes the last free page; b asks for one more and is itself the youngest
    assert plan.preempted == (b,) and list(plan.decode.requests) == [a]
    assert (b.status, b.slot, b.pages, b.epoch) == (RequestStatus.WAITING, None, [], 1)
    scheduler.commit_round(late.decode, [[6], [7, 7]])
    assert a.output_token_ids == [1, 6] and b.output_token_ids == [1], "of b's slot the round in flight is stale"
    assert b.metrics.preemptions == scheduler.stats.preemptions == 1
    assert scheduler.abort("a")
    plan = step(scheduler)
    (chunk,) = plan.prefill
    assert chunk.request is b and chunk.is_first and chunk.is_last
    assert chunk.end == 3, "prompt of 2 and the output known"
    assert scheduler.commit(b, 1, [8]) and b.output_token_ids == [1, 8] and scheduler.slots.computed(b) == 3


def test_nothing_is_admitted_in_a_plan_that_preempted():
    scheduler = make(num_pages=9, page_size=2, pages_per_seq=22, max_depth=1, enable_prefix_caching=False)
    a, b = make_request("a", prompt=2, max_tokens=12), make_request("b", prompt=2, max_tokens=12)
    prefilled(scheduler, a, b)
    plans = []
    while not (plan := step(scheduler, growth=2)).preempted:
        assert not plan.empty
        plans.append(plan)
    assert plan.preempted == (b,) and not plan.prefill
    assert scheduler.stats.free_pages == 4, "enough for b's 3 known tokens, a round, and a page for a"
    for late in (*plans, plan):
        scheduler.commit_round(late.decode, [[1]] * len(late.decode))  # a turns out short and needs no page
    plan = scheduler.plan()
    assert [chunk.request for chunk in plan.prefill] == [b]


def test_a_lower_priority_loses_before_a_later_arrival():
    scheduler = make(num_pages=9, page_size=2, pages_per_seq=22, max_depth=1, enable_prefix_caching=False)
    low = make_request("l", prompt=2, max_tokens=9, priority=1)
    first, second = make_request("f", prompt=2, max_tokens=9), make_request("s", prompt=2, max_tokens=9)
    prefilled(scheduler, low, first, second)
    preempted: list[Request] = []
    while not preempted:
        preempted += step(scheduler, growth=2).preempted
    assert preempted == [low]
    assert scheduler.stats.waiting == 1 and first.pages and second.pages


def test_preempted_request_goes_before_later_arrivals():
    scheduler, a, b = tight()
    scheduler.add(make_request("c", prompt=1, max_tokens=2))
    step(scheduler, growth=2)
    step(scheduler, growth=2)
    assert b.status is RequestStatus.WAITING
    scheduler.finish(a, FinishReason.STOP)
    plan = step(scheduler)
    assert [chunk.request.request_id for chunk in plan.prefill] == ["b", "c"]


def test_cached_pages_are_evicted_before_anybody_is_preempted():
    scheduler = make(num_pages=6)
    old = make_request("o", prompt=12, max_tokens=2)
    prefilled(scheduler, old)
    scheduler.finish(old, FinishReason.STOP)
    assert (scheduler.stats.cached_pages, scheduler.stats.free_pages) == (3, 3)
    request = make_request("a", prompt=4, max_tokens=14)
    prefilled(scheduler, request)
    for _ in range(6):
        assert not step(scheduler).preempted
    assert len(request.pages) == 6 and scheduler.stats.cached_pages == 0


# The end.


def test_finish_frees_at_once_and_drops_what_is_in_flight():
    scheduler = make(enable_prefix_caching=False)
    request = make_request("a")
    prefilled(scheduler, request)
    rows = step(scheduler).decode
    scheduler.finish(request, FinishReason.STOP)
    assert request.finished and request.finish_reason is FinishReason.STOP
    assert scheduler.stats.free_pages == 16 and not scheduler.has_work
    scheduler.commit_round(rows, [[2]])
    assert request.output_token_ids == [1]
    assert request.metrics.finished_time == 5.0 and request.metrics.output_tokens == 1


@pytest.mark.parametrize("steps", [0, 1, 3])  # waiting, prefilling, running
def test_abort_at_any_time_returns_everything(steps: int):
    scheduler = make(enable_prefix_caching=False)
    request = make_request("a", prompt=12)
    scheduler.add(request)
    for _ in range(steps):
        step(scheduler)
    assert scheduler.abort("a") and not scheduler.abort("a")
    assert request.finish_reason is FinishReason.ABORT
    assert scheduler.stats.free_pages == 16 and not scheduler.has_work and scheduler.plan().empty


def test_a_request_aborted_between_plan_and_dispatch_stays_out():
    scheduler = make()
    running, prefilling = make_request("a"), make_request("b", prompt=12)
    prefilled(scheduler, running)
    scheduler.add(prefilling)
    plan = scheduler.plan()
    assert scheduler.abort("a") and scheduler.abort("b")
    scheduler.dispatched(plan, 3)
    assert not scheduler.slots.alive(plan.decode).any()
    assert prefilling.num_computed == 0 and scheduler.plan().empty


# Prefix reuse.


def test_prompt_pages_are_reused_while_the_first_request_still_runs():
    scheduler = make()
    prompt = list(range(10))
    first, second = make_request("a", prompt), make_request("b", [*prompt[:9], 99])
    prefilled(scheduler, first)
    scheduler.add(second)
    (chunk,) = step(scheduler).prefill
    assert (chunk.start, chunk.end, chunk.is_first) == (8, 10, True)
    assert second.pages[:2] == first.pages[:2] and not set(second.pages[2:]) & set(first.pages)
    assert second.metrics.cached_prompt_tokens == 8
    assert (scheduler.stats.prefix_hits, scheduler.stats.prefix_queries) == (8, 20)


def reused(scheduler: Scheduler, tokens: list[int]) -> int:
    """Tokens that a request with this prompt finds."""
    request = make_request("probe", tokens, max_tokens=1)
    scheduler.add(request)
    (chunk,) = step(scheduler).prefill
    scheduler.abort("probe")
    return chunk.start


@pytest.mark.parametrize(("cacheable", "hit"), [(True, 8), (False, 4)])
def test_generated_pages_are_reused_after_the_end_unless_forbidden(cacheable: bool, hit: int):
    scheduler = make()
    request = make_request("a", [1, 2, 3, 4, 5])
    prefilled(scheduler, request)
    for _ in range(2):
        scheduler.commit_round(step(scheduler, growth=2).decode, [[6, 7]])
    request.cacheable_generated = cacheable
    scheduler.finish(request, FinishReason.LENGTH)  # 5 + 5 tokens, the last one's keys and values not written
    assert reused(scheduler, [*request.token_ids, 9, 9, 9]) == hit


def test_lookahead_holds_back_the_page_whose_next_token_is_unknown():
    scheduler = make(prefix_lookahead=1)
    request = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8])
    scheduler.add(request)
    step(scheduler)
    assert request.num_cached_pages == 1
    assert scheduler.commit(request, 0, [9])
    scheduler.finish(request, FinishReason.STOP)
    assert reused(scheduler, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]) == 8
    assert reused(scheduler, [1, 2, 3, 4, 5, 6, 7, 8, 1, 1]) == 4


def test_nothing_is_reused_without_prefix_caching():
    scheduler = make(enable_prefix_caching=False)
    prefilled(scheduler, make_request("a", prompt=9))
    assert reused(scheduler, [ord("a")] * 9) == 0


@pytest.mark.parametrize(("kind", "pages"), [(ErrorKind.NON_FINITE, 0), (ErrorKind.GRAMMAR, 2)])
def test_what_an_error_leaves_of_a_prefix(kind: ErrorKind, pages: int):
    """Nothing after numbers that are not finite; a grammar that fails costs nobody a cached one."""
    scheduler = make()
    request = make_request("a", prompt=9)
    prefilled(scheduler, request)
    request.error_kind = kind
    scheduler.finish(request, FinishReason.ERROR)
    assert scheduler.stats.free_pages == 16 - pages
    assert reused(scheduler, [ord("a")] * 9) == 4 * pages
