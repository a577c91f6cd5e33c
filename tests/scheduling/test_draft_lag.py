"""When a drafter's cache has to catch up with the text, and which pages it spoils."""

from __future__ import annotations

import pytest

from jaxspec.request import Request, SamplingParams
from jaxspec.scheduling import DraftLag

LAG = DraftLag(window=4, catch_up_tokens=6)


def make_request() -> Request:
    return Request("a", [1], SamplingParams(), seed=0)


def rounds(request: Request, *depths: int, can_catch_up: bool = True) -> list[bool]:
    return [LAG.before_round([request], depth, can_catch_up=can_catch_up) for depth in depths]


def test_rounds_that_draft_never_lag():
    request = make_request()
    assert rounds(request, *[3] * 20) == [False] * 20
    assert request.cacheable_generated


@pytest.mark.parametrize(("plain", "catches_up"), [(1, False), (3, False), (4, True), (9, True)])
def test_what_a_window_does_not_hold_is_caught_up_with(plain: int, catches_up: bool):
    """Before plain rounds one token is unseen already: the prefill's."""
    request = make_request()
    assert rounds(request, *[0] * plain, 2, 2) == [*[False] * plain, catches_up, False]
    assert request.cacheable_generated


def test_longer_runs_of_plain_rounds_leave_a_gap():
    request = make_request()
    assert not any(rounds(request, *[0] * 9)) and request.cacheable_generated
    assert rounds(request, 0, 2) == [False, True]
    assert not request.cacheable_generated


def test_a_round_that_cannot_wait_for_catching_up_leaves_a_gap():
    """Where the executable has not come yet. Rows that are not behind lose nothing."""
    behind, close = make_request(), make_request()
    rounds(behind, 0, 0, 0, 0)
    assert not LAG.before_round([behind, close], 2, can_catch_up=False)
    assert not behind.cacheable_generated and close.cacheable_generated
    assert rounds(behind, 2) == [False]


def test_a_batch_catches_up_for_the_row_that_is_behind():
    behind, close = make_request(), make_request()
    rounds(behind, 0, 0, 0, 0)
    assert LAG.before_round([close, behind], 1, can_catch_up=True)
