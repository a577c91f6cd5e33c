"""When a drafter's cache has to catch up with the text, and which pages it spoils."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.request import Request, SamplingParams
from jaxspec.scheduling import DecodeRows, DraftLag


class Batch:
    """Requests in slots of their own, and the lag of their drafter."""

    def __init__(self, count: int = 1) -> None:
        self.lag = DraftLag(window=4, catch_up_tokens=6, slots=count)
        self.requests = [Request("a", [1], SamplingParams(), seed=0) for _ in range(count)]
        self.stamps = np.zeros(count, np.int64)

    def before_round(self, depth: int, *rows: int, can_catch_up: bool = True, elsewhere: bool = False) -> bool:
        at = np.asarray(rows or (0,))
        none = np.zeros(len(at), np.int64)
        batch = DecodeRows([self.requests[i] for i in at], at, self.stamps[at], none, none, none > 0, none > 0)
        return self.lag.before_round(batch, depth, can_catch_up=can_catch_up, elsewhere=elsewhere)

    def rounds(self, *depths: int) -> list[bool]:
        return [self.before_round(depth) for depth in depths]


def test_rounds_that_draft_never_lag():
    batch = Batch()
    assert batch.rounds(*[3] * 20) == [False] * 20
    assert batch.requests[0].cacheable_generated


@pytest.mark.parametrize(("plain", "catches_up"), [(1, False), (3, False), (4, True), (9, True)])
def test_what_a_window_does_not_hold_is_caught_up_with(plain: int, catches_up: bool):
    """Before plain rounds one token is unseen already: the prefill's."""
    batch = Batch()
    assert batch.rounds(*[0] * plain, 2, 2) == [*[False] * plain, catches_up, False]
    assert batch.requests[0].cacheable_generated


def test_longer_runs_of_plain_rounds_leave_a_gap():
    batch = Batch()
    assert not any(batch.rounds(*[0] * 9)) and batch.requests[0].cacheable_generated
    assert batch.rounds(0, 2) == [False, True]
    assert not batch.requests[0].cacheable_generated


def test_rounds_that_only_look_up_commit_more_than_plain_ones():
    """Up to 4 tokens each, of which the drafter takes in none."""
    batch = Batch()
    assert not batch.before_round(3, elsewhere=True) and batch.rounds(2) == [True]
    assert not batch.before_round(3, elsewhere=True) and batch.requests[0].cacheable_generated
    assert not batch.before_round(3, elsewhere=True) and not batch.requests[0].cacheable_generated


def test_a_slot_that_changes_hands_begins_anew():
    batch = Batch()
    batch.rounds(*[0] * 9)
    batch.stamps += 1
    assert batch.rounds(2, 2) == [False, False]


def test_a_round_that_cannot_wait_for_catching_up_leaves_a_gap():
    """Where the executable has not come yet. Rows that are not behind lose nothing."""
    batch = Batch(2)
    batch.rounds(0, 0, 0, 0)
    assert not batch.before_round(2, 0, 1, can_catch_up=False)
    behind, close = batch.requests
    assert not behind.cacheable_generated and close.cacheable_generated
    assert batch.rounds(2) == [False]


def test_a_batch_catches_up_for_the_row_that_is_behind():
    batch = Batch(2)
    batch.rounds(0, 0, 0, 0)
    assert batch.before_round(1, 1, 0)
