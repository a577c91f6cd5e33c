"""Scheduler policy, one rule at a time: what is let in, and whose prompt is computed when."""

from __future__ import annotations

import math

import pytest
from tiny_scheduler import make, make_request, prefilled, step

from jaxspec.request import FinishReason, Request, RequestStatus, SamplingParams
from jaxspec.scheduling import Scheduler


def test_a_long_prompt_goes_in_shorter_chunks_while_others_decode():
    scheduler = make(num_pages=40, shorter_chunks=((8, 4), (16, 2)))
    prefilled(scheduler, alone := make_request("a", prompt=20))
    assert alone.num_tokens == 21 and scheduler.config.chunk_at(7, True) == 8
    scheduler.add(make_request("b", prompt=20))
    spans = [[(c.start, c.end) for c in step(scheduler, growth=1).prefill] for _ in range(5)]
    assert spans == [[(0, 8)], [(8, 12)], [(12, 16)], [(16, 18)], [(18, 20)]]
    scheduler.abort("a")
    scheduler.add(make_request("c", prompt=20))
    scheduler.abort("b")
    assert [(c.start, c.end) for _ in range(3) for c in step(scheduler).prefill] == [(0, 8), (8, 16), (16, 20)]


def test_a_step_computes_less_of_prompts_while_others_decode():
    scheduler = make(
        num_pages=40, prefill_chunk=16, max_num_batched_tokens=20, shorter_chunks=((0, 8),), batched_beside=10
    )
    prefilled(scheduler, make_request("a", prompt=3))
    for name, prompt in (("b", 20), ("c", 2), ("d", 6)):
        scheduler.add(make_request(name, prompt=prompt))
    spans = lambda: [(c.request.request_id, c.start, c.end) for c in step(scheduler, growth=1).prefill]
    assert [spans() for _ in range(3)] == [[("b", 0, 8), ("c", 0, 2)], [("b", 8, 16)], [("b", 16, 20), ("d", 0, 6)]]
    for name in "abcd":
        scheduler.abort(name)
    for name, prompt in (("e", 20), ("f", 4)):
        scheduler.add(make_request(name, prompt=prompt))
    assert [spans() for _ in range(2)] == [[("e", 0, 16), ("f", 0, 4)], [("e", 16, 20)]]


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
