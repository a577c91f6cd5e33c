"""Which calls compute a step's chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxspec.scheduling.shapes import Call, PrefillShape, cover, cover_beside, shapes_for, shorter_chunks
from jaxspec.sizes import Sizes

SEVERAL = (PrefillShape(256, 16, 64), PrefillShape(1024, 32, 128))


def sizes(chunk: int = 1024, together: int = 1024, slots: int = 32) -> Sizes:
    return Sizes(slots, 1000, 16, 130, 3, 2048, chunk, together)


SHAPES = shapes_for(sizes(), (64, 256), SEVERAL)
ONE = PrefillShape.of_one


def used(calls: list[Call]) -> list[tuple[PrefillShape, int]]:
    """Each call's shape and how many chunks it has."""
    return [(shape, len(pieces)) for shape, pieces in calls]


def test_an_engine_compiles_what_its_sizes_can_fill():
    assert list(SHAPES) == [ONE(64), ONE(256), SEVERAL[0], ONE(1024), SEVERAL[1]]
    small = sizes(chunk=48, together=96, slots=4)
    assert shapes_for(small, (16, 64), SEVERAL) == (ONE(16), ONE(48), PrefillShape(96, 4, 48))
    assert shapes_for(sizes(slots=1), (64, 256), SEVERAL) == (ONE(64), ONE(256), ONE(1024))


def test_chunks_get_shorter_where_tokens_get_dearer():
    """None takes more than twice the prompt's first one, but where the smallest does."""
    (middle, a), (far, b) = found = shorter_chunks([64, 1024, 256], 256, 30_000.0)
    assert (a, b) == (256, 64) and 30_000 < middle < far
    cost = lambda size, start: 256 + size * (1 + (start + size / 2) / 30_000)
    for start in (0, middle - 1, middle + 2, far - 1):
        size = min([1024, *(most for position, most in found if start >= position)])
        assert cost(size, start) <= 2 * cost(1024, 0) and (size == 1024 or cost(4 * size, start) > 2 * cost(1024, 0))
    assert shorter_chunks([64, 256], 256, None) == () == shorter_chunks([64], 256, 10.0)


@pytest.mark.parametrize(
    ("counts", "overhead", "expected"),
    [
        ([20], 256, [(ONE(64), 1)]),
        ([100], 8, [(ONE(64), 1), (ONE(64), 1)]),  # where tokens are dear, padding is
        ([100], 256, [(ONE(256), 1)]),  # where calls are
        ([1024], 256, [(ONE(1024), 1)]),
        ([32] * 32, 256, [(SEVERAL[1], 32)]),
        ([32] * 16, 256, [(SEVERAL[0], 8), (SEVERAL[0], 8)]),
        ([200, 200], 256, [(ONE(256), 1), (ONE(256), 1)]),  # too wide to share the small call
        ([700, 60, 60], 256, [(ONE(1024), 1), (SEVERAL[0], 2)]),
    ],
)
def test_the_cheapest_calls_are_chosen(counts: list[int], overhead: int, expected: list[tuple[PrefillShape, int]]):
    assert used(cover(counts, SHAPES, overhead)) == expected


def test_what_is_not_compiled_yet_is_done_without():
    assert used(cover([150, 20], (ONE(64),), 256)) == [(ONE(64), 1)] * 4


def test_every_token_is_computed_once_and_in_order():
    rng = random.Random(0)
    for _ in range(200):
        shapes = [ONE(16), *rng.sample(SHAPES, rng.randint(0, len(SHAPES)))]
        counts = [rng.randint(1, rng.choice([8, 80, 1024])) for _ in range(rng.randint(1, 40))]
        done = [0] * len(counts)
        for shape, pieces in cover(counts, shapes, rng.choice([1, 8, 256])):
            assert (
                shape in shapes and len(pieces) <= shape.rows and len({piece.chunk for piece in pieces}) == len(pieces)
            )
            assert max(piece.count for piece in pieces) <= shape.width
            assert sum(piece.count for piece in pieces) <= shape.size
            for piece in pieces:
                assert piece.count > 0 and piece.start == done[piece.chunk]
                done[piece.chunk] += piece.count
        assert done == counts


TAKEN = PrefillShape(128, 4, 128)


@pytest.mark.parametrize(
    ("counts", "overhead", "along", "after"),
    [
        ([20], 256, [20], []),
        ([60, 60], 256, [60, 60], []),
        ([60, 60, 60], 256, [60, 60], [(ONE(64), 1)]),
        ([60, 100], 256, [60, 68], [(ONE(64), 1)]),  # the start of the second: what is left fits a smaller call
        ([20] * 5, 256, [20] * 4, [(ONE(64), 1)]),
        ([300], 256, [128], [(ONE(256), 1)]),
        ([256], 256, [], [(ONE(256), 1)]),  # 128 and a call of 256 for the others are no less
        ([20], 8, [], [(ONE(64), 1)]),  # where reading weights is nothing, nor is not reading them
    ],
)
def test_what_a_round_takes_along(counts: list[int], overhead: int, along: list[int], after: list[tuple[Any, int]]):
    pieces, calls = cover_beside(counts, SHAPES, overhead, TAKEN)
    assert [piece.count for piece in pieces] == along and used(calls) == after


def test_with_what_goes_along_every_token_is_computed_once_and_in_order():
    rng = random.Random(1)
    taken = 0
    for _ in range(200):
        joined = PrefillShape(size := rng.choice([16, 128]), rng.randint(1, 4), size)
        counts = [rng.randint(1, rng.choice([8, 80, 1024])) for _ in range(rng.randint(1, 12))]
        pieces, calls = cover_beside(counts, SHAPES, rng.choice([8, 256]), joined)
        assert len(pieces) <= joined.rows and sum(piece.count for piece in pieces) <= joined.size
        taken += len(pieces)
        done = [0] * len(counts)
        for piece in (piece for some in (pieces, *(some for _, some in calls)) for piece in some):
            assert piece.count > 0 and piece.start == done[piece.chunk]
            done[piece.chunk] += piece.count
        assert done == counts
    assert taken > 100
