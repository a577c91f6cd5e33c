"""Scheduler policy, one rule at a time: who decodes, for how many rounds, with which pages."""

from __future__ import annotations

import pytest
from tiny_scheduler import make, make_request, prefilled, step

from jaxspec.request import FinishReason
from jaxspec.scheduling.pace import Repeats
from jaxspec.scheduling.shapes import PrefillShape

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
