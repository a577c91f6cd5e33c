"""Scheduler policy, one rule at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxspec.request import ErrorKind, FinishReason, Request, RequestStatus, SamplingParams
from jaxspec.scheduling import Plan, Scheduler, SchedulerConfig
from jaxspec.scheduling.pace import Repeats
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.sizes import Sizes


def make(**changes: Any) -> Scheduler:
    """16 pages of 4 tokens, rounds of up to 3 tokens."""
    config: dict[str, Any] = {
        "slots": 4,
        "num_pages": 16,
        "page_size": 4,
        "pages_per_seq": 11,
        "max_seq_len": 40,
        "max_depth": 2,
        "prefill_chunk": 8,
        "max_num_batched_tokens": 8,
        "max_rounds": 1,
    }
    sizes = Sizes(**{name: changes.pop(name, value) for name, value in config.items()})
    return Scheduler(SchedulerConfig(sizes, **changes), clock=lambda: 5.0)


def make_request(name: str, prompt: int | list[int] = 4, max_tokens: int = 8, priority: int = 0) -> Request:
    tokens = prompt if isinstance(prompt, list) else [ord(name[0])] * prompt
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), seed=0, priority=priority)


def step(scheduler: Scheduler, growth: int = 3, beside: PrefillShape | None = None) -> Plan:
    plan = scheduler.plan(beside=beside)
    scheduler.dispatched(plan, growth)
    return plan


def prefilled(scheduler: Scheduler, *requests: Request) -> None:
    """Adds requests and brings them to their first token, growing nobody."""
    for request in requests:
        scheduler.add(request)
        while request.status is not RequestStatus.RUNNING:
            chunks = scheduler._chunks(admit=True)
            assert [chunk.request for chunk in chunks] == [request]
            scheduler.dispatched(Plan(chunks, scheduler.slots.due().kept([]).decode(()), ()))
        assert scheduler.commit(request, request.epoch, [1])


def test_a_long_prompt_goes_in_shorter_chunks_while_others_decode():
    scheduler = make(num_pages=40, shorter_chunks=((8, 4), (16, 2)))
    prefilled(scheduler, alone := make_request("a", prompt=20))
    assert alone.num_tokens == 21 and scheduler.config.chunk_at(7) == 8
    scheduler.add(make_request("b", prompt=20))
    spans = [[(c.start, c.end) for c in step(scheduler, growth=1).prefill] for _ in range(5)]
    assert spans == [[(0, 8)], [(8, 12)], [(12, 16)], [(16, 18)], [(18, 20)]]
    scheduler.abort("a")
    scheduler.add(make_request("c", prompt=20))
    scheduler.abort("b")
    assert [(c.start, c.end) for _ in range(3) for c in step(scheduler).prefill] == [(0, 8), (8, 16), (16, 20)]


# Boundary.


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("a", prompt=0), "prompt must hold at least 1 token, got 0"),
        (make_request("a", prompt=40), "shorter than max_seq_len = 40 tokens, got 40"),
    ],
)
def test_add_refuses_what_can_never_run(request_: Request, message: str):
    scheduler = make()
    with pytest.raises(ValueError, match=message):
        scheduler.add(request_)
    assert not scheduler.has_work and scheduler.plan().empty
    assert scheduler.stats.free_pages == 16


def test_add_refuses_what_the_pool_can_never_hold():
    scheduler = make(num_pages=5)
    with pytest.raises(ValueError, match=r"17 \+ 1 \+ 3 tokens need 6 pages of 4, but num_pages = 5"):
        scheduler.add(make_request("a", prompt=17))
    scheduler.add(make_request("a", prompt=16))


@pytest.mark.parametrize(
    ("prompt", "asked", "pages", "allowed"),
    [(30, 10, 16, 10), (30, 11, 16, 10), (39, 2**31 - 1, 16, 1), (1, None, 16, 39), (10, 8, 5, 7), (10, None, 5, 7)],
)
def test_what_the_context_or_the_pool_cannot_hold_is_cut(prompt: int, asked: int | None, pages: int, allowed: int):
    request = Request("a", [1] * prompt, SamplingParams(max_tokens=asked), seed=0)
    make(num_pages=pages).add(request)
    assert request.max_tokens == allowed and request.params.max_tokens == asked


def test_add_refuses_a_second_live_request_of_the_same_id():
    scheduler = make()
    scheduler.add(make_request("a"))
    with pytest.raises(ValueError, match="unique among live requests, got 'a' again"):
        scheduler.add(make_request("a"))
    assert scheduler.abort("a")
    scheduler.add(make_request("a"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 0}, "num_pages must be an integer of at least 1, got 0"),
        ({"prefix_lookahead": -1}, "prefix_lookahead must be an integer of at least 0, got -1"),
        ({"max_depth": True}, "max_depth must be an integer of at least 0, got True"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens must be at least prefill_chunk = 8, got 7"),
        ({"pages_per_seq": 10}, "pages_per_seq must hold .* 43 tokens, got 10 pages of 4"),
    ],
)
def test_config_names_field_and_both_values(changes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        make(**changes)


# Prefill.


def test_long_prompt_is_prefilled_in_chunks_and_decodes_from_the_next_plan_on():
    scheduler = make()
    request = make_request("a", prompt=18)
    scheduler.add(request)
    chunks = [chunk for _ in range(3) for chunk in step(scheduler).prefill]
    assert [(c.start, c.end, c.is_first, c.is_last) for c in chunks] == [
        (0, 8, True, False),
        (8, 16, False, False),
        (16, 18, False, True),
    ]
    assert request.status is RequestStatus.RUNNING and request.num_computed == 18
    assert scheduler.slots.in_flight(request) == (1, 0)
    assert all(c.page_table == tuple(request.pages) for c in chunks)
    assert len(request.pages) == 6, "18 tokens and a round of 3"
    plan = step(scheduler)
    assert not plan.prefill and list(plan.decode.requests) == [request]


def chunks_of(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """A step's chunks: request and positions."""
    return [(chunk.request.request_id, chunk.start, chunk.end) for chunk in step(scheduler).prefill]


def test_a_step_computes_as_many_prompts_as_its_tokens_go_round():
    """In order: a chunk that does not fit waits for the next step, and so does what came after it."""
    scheduler = make(num_pages=40, max_num_batched_tokens=12)
    for name, prompt in (("a", 5), ("b", 6), ("c", 2), ("d", 20), ("e", 1)):
        scheduler.add(make_request(name, prompt))
    assert chunks_of(scheduler) == [("a", 0, 5), ("b", 0, 6)]
    assert chunks_of(scheduler) == [("c", 0, 2), ("d", 0, 8)]
    assert scheduler.abort("a") and scheduler.stats.waiting == 1
    assert chunks_of(scheduler) == [("d", 8, 16), ("e", 0, 1)]
    assert chunks_of(scheduler) == [("d", 16, 20)]


@pytest.mark.parametrize("length", [12, 13])
def test_a_prompt_waits_for_the_pages_that_another_is_computing(length: int):
    """Not for more than it can reuse: of a prompt of whole pages the last is computed anyway."""
    scheduler = make(num_pages=40, max_num_batched_tokens=32)
    prompt = list(range(length))
    for name, tokens in (("a", prompt), ("b", prompt), ("c", [*prompt[:4], 99]), ("d", [98])):
        scheduler.add(make_request(name, tokens))
    assert chunks_of(scheduler) == [("a", 0, 8)]
    hit = 4 * ((length - 1) // 4)
    if length == 12:  # b has by now what it can have
        assert chunks_of(scheduler) == [("a", 8, 12), ("b", 8, 12), ("c", 4, 5), ("d", 0, 1)]
    else:
        assert chunks_of(scheduler) == [("a", 8, 13)]
        assert chunks_of(scheduler) == [("b", hit, 13), ("c", 4, 5), ("d", 0, 1)]


def test_prompts_that_begin_alike_do_not_wait_without_prefix_caching():
    scheduler = make(num_pages=40, max_num_batched_tokens=32, enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(make_request(name, list(range(8))))
    assert chunks_of(scheduler) == [("a", 0, 8), ("b", 0, 8)]


def test_decode_rounds_run_beside_the_prefill_of_others():
    scheduler = make()
    prefilled(scheduler, make_request("a"))
    scheduler.add(make_request("b", prompt=12))
    plan = step(scheduler)
    assert [chunk.request.request_id for chunk in plan.prefill] == ["b"]
    assert [request.request_id for request in plan.decode.requests] == ["a"]


def test_queue_is_ordered_by_priority_then_arrival():
    scheduler = make()
    for name, priority, arrival in [("a", 0, 2.0), ("b", 0, 1.0), ("c", -1, 3.0), ("d", 0, 2.0)]:
        request = make_request(name, priority=priority)
        request.arrival_time = arrival
        scheduler.add(request)
    order = [chunk.request.request_id for _ in range(4) for chunk in step(scheduler).prefill]
    assert order == ["c", "b", "a", "d"]


def test_priorities_age_so_that_nobody_waits_for_ever():
    scheduler = make(aging_seconds=5.0)
    for name, priority, arrival in [("patient", 2, 0.0), ("early", 0, 9.0), ("late", 0, 11.0), ("urgent", -1, 12.0)]:
        request = make_request(name, priority=priority)
        request.arrival_time = arrival
        scheduler.add(request)
    order = [chunk.request.request_id for _ in range(4) for chunk in step(scheduler).prefill]
    assert order == ["urgent", "early", "patient", "late"]


@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan])
def test_aging_must_be_positive_and_finite(seconds: float):
    with pytest.raises(ValueError, match="aging_seconds must be positive and finite"):
        make(aging_seconds=seconds)


def test_admission_waits_for_a_slot():
    scheduler = make(slots=1)
    a, b = make_request("a"), make_request("b")
    prefilled(scheduler, a)
    scheduler.add(b)
    assert not step(scheduler).prefill and scheduler.stats.waiting == 1
    scheduler.finish(a, FinishReason.STOP)
    plan = step(scheduler)
    assert [(chunk.request, chunk.slot) for chunk in plan.prefill] == [(b, 0)]


def test_admission_leaves_a_page_for_each_running_request():
    scheduler = make(num_pages=6, enable_prefix_caching=False)
    a, b = make_request("a", prompt=5), make_request("b", prompt=13)  # 2 pages and 4 pages
    prefilled(scheduler, a)
    scheduler.add(b)
    assert not step(scheduler, growth=1).prefill
    scheduler.finish(a, FinishReason.STOP)
    assert step(scheduler).prefill


def test_a_request_that_does_not_fit_is_not_looked_up_again_before_pages_are_released(monkeypatch: pytest.MonkeyPatch):
    scheduler = make(num_pages=8)
    a = make_request("a", prompt=13, max_tokens=10)
    prefilled(scheduler, a)
    scheduler.add(make_request("b", prompt=17))
    lookups: list[int] = []
    match = scheduler.prefix_cache.match
    monkeypatch.setattr(scheduler.prefix_cache, "match", lambda tokens: lookups.append(len(tokens)) or match(tokens))
    for _ in range(5):
        assert not step(scheduler, growth=1).prefill
    assert lookups == [17]
    scheduler.finish(a, FinishReason.STOP)
    assert step(scheduler).prefill and lookups == [17, 17]


def test_head_of_the_queue_is_not_overtaken():
    scheduler = make(num_pages=8, enable_prefix_caching=False)
    a = make_request("a", prompt=13)
    prefilled(scheduler, a)
    scheduler.add(make_request("b", prompt=17))  # 5 pages of 4
    scheduler.add(make_request("c", prompt=1))
    assert not step(scheduler).prefill
    scheduler.finish(a, FinishReason.STOP)
    plan = step(scheduler)
    assert [chunk.request.request_id for chunk in plan.prefill] == ["b"]


# Decode.


def test_pages_are_reserved_for_the_upper_bound_of_the_length():
    scheduler = make()
    request = make_request("a", prompt=4, max_tokens=30)
    prefilled(scheduler, request)
    assert len(request.pages) == 2  # 4 + 3 tokens
    first, second = step(scheduler, growth=3), step(scheduler, growth=1)
    assert first.decode.grants == [] and len(request.pages) == 3
    assert second.decode.grants == [(0, 2, [request.pages[2]])], "4 known + 3 in flight + 3 to come"
    assert scheduler.slots.in_flight(request) == (2, 4)
    scheduler.commit_round(first.decode, [[1]])
    assert scheduler.slots.in_flight(request) == (1, 1)
    assert (scheduler.slots.computed(request), request.num_tokens) == (5, 6)


def test_reservation_stops_at_what_max_tokens_can_need():
    scheduler = make()
    request = make_request("a", prompt=4, max_tokens=5)  # 4 + 5 + 3 = 12 tokens: 3 pages
    prefilled(scheduler, request)
    for _ in range(4):
        assert len(step(scheduler, growth=3).decode)
    assert len(request.pages) == 3


def test_a_row_whose_rounds_in_flight_suffice_is_left_out():
    scheduler = make()
    request = make_request("a", max_tokens=3)
    prefilled(scheduler, request)  # one token known
    assert [len(step(scheduler, growth=1).decode) for _ in range(3)] == [1, 1, 0]
    assert scheduler.has_work


def test_a_single_token_needs_no_round():
    scheduler = make()
    request = make_request("a", max_tokens=1)
    scheduler.add(request)
    assert step(scheduler).prefill
    assert step(scheduler).empty
    assert scheduler.commit(request, request.epoch, [3])
    assert request.output_token_ids == [3] and request.metrics.first_token_time == 5.0


def test_several_rounds_need_pages_for_all_of_them_and_no_prompt_that_could_begin():
    scheduler = make(max_rounds=3, enable_prefix_caching=False)
    request, other = make_request("a", prompt=4, max_tokens=30), make_request("b", prompt=12, max_tokens=7)
    prefilled(scheduler, request)
    scheduler.add(other)
    plan = scheduler.plan(Repeats(3))
    assert plan.decode.rounds == 1 and plan.prefill, "b's prompt begins"
    scheduler.dispatched(plan, growth=1)
    assert scheduler.plan(Repeats(3)).decode.rounds == 1, "and goes on"
    scheduler.finish(other, FinishReason.ABORT)
    scheduler.commit_round(plan.decode, [[]])
    plan = scheduler.plan(Repeats(3))
    assert plan.decode.rounds == 3 and len(request.pages) == 4, "4 known + 3 times 3 to come"
    scheduler.dispatched(plan, growth=2)
    assert plan.decode.growth == 6 and scheduler.slots.in_flight(request) == (3, 6)
    scheduler.commit_round(plan.decode, [[1, 1, 1, 1]])
    assert scheduler.slots.in_flight(request) == (0, 0) and scheduler.slots.computed(request) == 8
    taken = scheduler.pages.allocate(scheduler.pages.free_count)
    assert taken is not None and len(request.pages) == 4
    assert scheduler.plan(Repeats(3)).decode.rounds == 1, "8 known + 3 to come have their pages, 9 have not"
    scheduler.pages.release(taken)
    assert scheduler.plan(Repeats(3)).decode.rounds == 3


def test_several_rounds_run_though_requests_wait_who_cannot_begin():
    """For a slot, or for pages; not where a row may end before the dispatch does, and the slot is worth more."""
    scheduler = make(max_rounds=4, slots=2, num_pages=30, enable_prefix_caching=False)
    running = [make_request("a", prompt=4, max_tokens=30), make_request("b", prompt=4, max_tokens=8)]
    prefilled(scheduler, *running)
    scheduler.add(make_request("c", prompt=4))
    granted = lambda *what: scheduler.plan(Repeats(4, *what)).decode.rounds
    # What is saved is a share of 4 rounds of 2 rows, and has to be twice what is lost.
    assert granted(0.01) == granted(0.01, 2.0) == 4, "b has 7 tokens to come: 4 rounds at least"
    assert granted(0.2, 3.0) == 1 and granted(0.3, 3.0) == 4, "3 rounds, and one idle"
    assert granted(0.7, 7.0) == 1 and granted(0.8, 7.0) == 4, "one, and 3 idle"
    assert granted(0.4, 1.0, 0.2) == 1 and granted(0.4, 1.0, 0.1) == 4, "each row's stops leave 1.5 idle of 4"
    plan = scheduler.plan(Repeats(4, 0.01))
    scheduler.dispatched(plan, growth=1)
    assert granted(0.2) == 1 and granted(0.4) == 4, "3 of b's tokens are to come behind those in flight"
    assert granted(0.6, 1.0, 0.05) == 1 and granted(0.8, 1.0, 0.05) == 4, "and stops in flight leave all of them idle"
    scheduler.finish(running[1], FinishReason.STOP)
    taken = scheduler.pages.allocate(scheduler.pages.free_count - 2)
    assert granted(0.01) == 1, "c could begin"
    assert granted(0.01) == 4, "but lacks pages"
    scheduler.pages.release(taken or [])


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_who_waits_gets_a_slot_little_later_for_several_rounds(rounds: int):
    """Rounds that the device runs between the end of a text and the prompt behind it, wherever that end comes."""
    waited = []
    for ends in range(20, 28):
        scheduler = make(max_rounds=4, slots=1, num_pages=40, page_size=16, pages_per_seq=10, max_seq_len=100)
        request = make_request("a", prompt=4, max_tokens=80)
        prefilled(scheduler, request)
        scheduler.add(make_request("b"))
        ran, flight = 0, None
        while True:
            plan = scheduler.plan(Repeats(rounds))
            ran += plan.decode.rounds * bool(len(plan.decode))
            scheduler.dispatched(plan, growth=1)
            if plan.prefill:
                break
            flight, before = plan.decode, flight
            if before is not None:
                said = scheduler.slots.computed(request)
                scheduler.commit_round(before, [[1] * before.rounds])
                if said < ends <= said + before.rounds:
                    scheduler.finish(request, FinishReason.STOP)
        waited.append(ran + 4 - ends)
    assert max(waited) == 1 + 2 * (rounds - 1)


def test_a_step_computes_no_more_of_prompts_than_a_round_takes_along_where_that_is_little():
    """First tokens wait for a few rounds at most; without decode rows, or with much to do, nothing changes."""
    beside = PrefillShape(6, 2, 6)
    scheduler = make(slots=4, num_pages=40, enable_prefix_caching=False, prefill_chunk=8, max_num_batched_tokens=16)
    planned = lambda: [(c.request.request_id, c.start, c.end) for c in step(scheduler, beside=beside).prefill]
    scheduler.add(make_request("a", prompt=8, max_tokens=20))
    assert planned() == [("a", 0, 8)], "nobody decodes"
    scheduler.add(make_request("b", prompt=4))
    scheduler.add(make_request("c", prompt=9))
    assert planned() == [("b", 0, 4), ("c", 0, 2)]
    assert planned() == [("c", 2, 8)] and planned() == [("c", 8, 9)]
    scheduler.add(make_request("d", prompt=25))
    assert planned() == [("d", 0, 8)], "25 tokens are too many for 4 rounds"
    assert planned() == [("d", 8, 14)], "17 are not"


def test_several_rounds_are_for_requests_that_need_them():
    scheduler = make(max_rounds=4)
    request = make_request("a", prompt=4, max_tokens=5)
    prefilled(scheduler, request)  # one token known, 4 to come
    plan = scheduler.plan(Repeats(4))
    assert plan.decode.rounds == 4 and len(request.pages) == 3, "no more than max_tokens can need"
    scheduler.dispatched(plan, growth=1)
    assert scheduler.plan(Repeats(4)).empty
    scheduler.commit_round(plan.decode, [[1]])
    assert scheduler.plan(Repeats(4)).decode.rounds == 1, "3 to come"


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


def test_nothing_is_reused_after_numbers_that_are_not_finite():
    scheduler = make()
    request = make_request("a", prompt=9)
    prefilled(scheduler, request)
    request.error_kind = ErrorKind.NON_FINITE
    scheduler.finish(request, FinishReason.ERROR)
    assert scheduler.stats.free_pages == 16
    assert reused(scheduler, [ord("a")] * 9) == 0


def test_a_grammar_that_fails_costs_nobody_a_cached_prefix():
    scheduler = make()
    request = make_request("a", prompt=9)
    prefilled(scheduler, request)
    request.error_kind = ErrorKind.GRAMMAR
    scheduler.finish(request, FinishReason.ERROR)
    assert reused(scheduler, [ord("a")] * 9) == 8
