"""What may enter is bounded exactly, and whoever is refused is told when to come back."""

from __future__ import annotations

from typing import Any

import pytest

from serve.core.admission import RETRY_SECONDS, Admission, Place, default_waiting_pages
from serve.core.errors import StatusError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Named(Admission):
    """Whose places go by names."""

    def __init__(self, slots: int, max_waiting: int, max_waiting_pages: int, clock: Clock):
        super().__init__(slots, max_waiting, max_waiting_pages, clock)
        self._places: dict[str, Place] = {}

    def let_in(self, ids: list[str], pages: int, prompt_tokens: int) -> None:
        self._places |= dict(zip(ids, self.enter(len(ids), pages, prompt_tokens), strict=True))

    def start(self, name: str) -> None:
        self.started(self._places[name])

    def end(self, name: str) -> None:
        self.ended(self._places[name])


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refusal(admission: Named, ids: list[str], pages: int = 1) -> StatusError:
    before = (admission.live, admission.waiting, admission.waiting_pages)
    with pytest.raises(StatusError) as caught:
        admission.let_in(ids, pages, 7)
    assert (admission.live, admission.waiting, admission.waiting_pages) == before
    return caught.value


def enter(admission: Named, ids: list[str], pages: int) -> None:
    admission.let_in(ids, pages, 7)
    assert admission.waiting_prompt_tokens == 7 * admission.waiting


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def test_as_many_as_slots_and_queue_hold(clock: Clock) -> None:
    admission = Named(slots=4, max_waiting=2, max_waiting_pages=1000, clock=clock)
    for name in names("a", 6):
        enter(admission, [name], 1)
    assert refusal(admission, ["b"]).code.name == "RESOURCE_EXHAUSTED"
    for name in names("a", 4):
        admission.start(name)
    assert admission.waiting == 2
    error = refusal(admission, ["b"])
    assert error.reason == "queue_full" and "6 of 6" in error.message
    admission.end("a0")
    enter(admission, ["b"], 1)
    refusal(admission, ["c"])


def test_every_completion_counts_and_all_enter_or_none(clock: Clock) -> None:
    admission = Named(slots=4, max_waiting=4, max_waiting_pages=1000, clock=clock)
    enter(admission, names("a", 5), 1)
    assert refusal(admission, names("b", 4)).code.name == "RESOURCE_EXHAUSTED"
    enter(admission, names("b", 3), 1)
    assert admission.live == 8
    # More than ever fits is the request's own fault: no retry would help.
    error = refusal(admission, names("c", 9))
    assert error.code.name == "INVALID_ARGUMENT" and error.retry_seconds is None and "8" in error.message


def test_no_queue_at_all(clock: Clock) -> None:
    admission = Named(slots=2, max_waiting=0, max_waiting_pages=10, clock=clock)
    enter(admission, ["a"], 5)
    enter(admission, ["b"], 5)
    refusal(admission, ["c"])


def test_the_pages_of_the_queue_are_bounded(clock: Clock) -> None:
    admission = Named(slots=4, max_waiting=100, max_waiting_pages=20, clock=clock)
    enter(admission, ["big"], 30)  # an empty queue takes what fits the pool
    error = refusal(admission, ["a"], 1)
    assert error.reason == "queue_pages" and error.code.name == "RESOURCE_EXHAUSTED"
    admission.start("big")
    assert admission.waiting_pages == 0
    enter(admission, names("a", 2), 10)
    assert admission.waiting_pages == 20
    refusal(admission, ["b"], 1)
    admission.start("a0")
    admission.start("a0")  # heard twice, counted once
    assert (admission.waiting_pages, admission.waiting_prompt_tokens) == (10, 7)
    enter(admission, ["b"], 10)
    for name in ("big", "a0", "a1", "b"):
        admission.end(name)
    assert (admission.live, admission.waiting, admission.waiting_pages, admission.waiting_prompt_tokens) == (0, 0, 0, 0)


def test_retry_follows_the_speed_of_the_queue(clock: Clock) -> None:
    admission = Named(slots=1, max_waiting=9, max_waiting_pages=1000, clock=clock)
    enter(admission, names("a", 10), 1)
    low, high = RETRY_SECONDS
    unknown = refusal(admission, ["b"]).retry_seconds
    assert unknown is not None and low <= unknown <= high

    def end_every(seconds: float, count: int) -> None:
        for i in range(count):
            clock.now += seconds
            admission.end(f"a{i}")
            enter(admission, [f"a{i}"], 1)

    clock.now = 1000.0
    end_every(2.0, 10)
    retry = refusal(admission, ["b"]).retry_seconds
    assert retry == pytest.approx(2.0, rel=0.2)
    longer = refusal(admission, names("b", 5)).retry_seconds
    assert longer == pytest.approx(5 * 2.0, rel=0.2)
    clock.now += 1000  # what was long ago says nothing of now
    assert refusal(admission, ["b"]).retry_seconds == unknown
    end_every(0.001, 10)
    assert refusal(admission, ["b"]).retry_seconds == low
    clock.now += 1000
    end_every(29.0, 3)
    assert refusal(admission, names("b", 10)).retry_seconds == high


def test_what_ended_without_starting_leaves_no_trace(clock: Any) -> None:
    admission = Named(slots=1, max_waiting=9, max_waiting_pages=9, clock=clock)
    enter(admission, names("a", 3), 3)
    for name in names("a", 3):
        admission.end(name)
    assert (admission.live, admission.waiting, admission.waiting_pages, admission.waiting_prompt_tokens) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("slots", "max_waiting", "page_size", "max_seq_len"), [(8, 256, 64, 2048), (2, 256, 64, 512), (32, 2000, 16, 8192)]
)
def test_the_default_for_pages_lets_a_full_queue_of_usual_requests_in_and_stops_huge_ones(
    slots: int, max_waiting: int, page_size: int, max_seq_len: int, clock: Clock
) -> None:
    growth = 8
    need = lambda tokens: -(-(tokens + growth) // page_size)
    num_pages = slots * need(max_seq_len)
    limit = default_waiting_pages(slots, max_waiting, num_pages)
    usual = Named(slots, max_waiting, limit, clock)
    for name in names("a", slots + max_waiting):
        usual.let_in([name], need(30 + 64), 30)
        if int(name[1:]) < slots:
            usual.start(name)
    assert usual.waiting == max_waiting
    assert refusal(usual, ["b"]).reason == "queue_full"
    huge = Named(slots, max_waiting, limit, clock)
    count = limit // need(max_seq_len)
    for name in names("a", count):
        huge.let_in([name], need(max_seq_len), max_seq_len)
    assert refusal(huge, ["b"], need(max_seq_len)).reason == "queue_pages"
    assert 4 * slots <= count <= max(4 * slots, max_waiting // 4)


def test_the_default_for_pages_is_never_below_four_pools() -> None:
    assert default_waiting_pages(slots=256, max_waiting=1, num_pages=100) == 400
