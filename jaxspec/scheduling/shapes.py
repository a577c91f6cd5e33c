"""Shapes of the executables that compute prompts, and which of them to run for the chunks of a step.

Standard library only. Must not know requests, nor what an executable is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jaxspec.sizes import Sizes


@dataclasses.dataclass(frozen=True, order=True)
class PrefillShape:
    """What one call computes.

    Attributes:
      size: most tokens together.
      rows: chunks, each of another request.
      width: most tokens of one.
    """

    size: int
    rows: int
    width: int

    @classmethod
    def of_one(cls, size: int) -> PrefillShape:
        """For a single chunk."""
        return cls(size, 1, size)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens [start, start + count) of a step's chunk, counted from the chunk's first."""

    chunk: int
    start: int
    count: int


#: A call's shape and its pieces, at most one of a chunk.
Call = tuple[PrefillShape, tuple[Piece, ...]]


def shapes_for(sizes: Sizes, alone: Sequence[int], several: Sequence[PrefillShape]) -> tuple[PrefillShape, ...]:
    """What an engine of these sizes needs of the shapes that suit its device, ascending.

    Args:
      alone: sizes for single chunks; the largest chunk has one of its own.
      several: for several chunks together. Attention computes a rectangle of rows by width, which should not be much
        larger than the size.
    """
    chunk = sizes.prefill_chunk
    shapes = {PrefillShape.of_one(size) for size in (*alone, chunk) if size <= chunk}
    for shape in several:
        rows, size = min(shape.rows, sizes.slots), min(shape.size, sizes.max_num_batched_tokens)
        if rows > 1:
            shapes.add(PrefillShape(size, rows, min(shape.width, chunk)))
    return tuple(sorted(shapes))


#: How much longer than a prompt's first chunk one of its later ones may take while others decode.
_LONGER = 2.0


def shorter_chunks(sizes: Sequence[int], call: int, doubling: float | None) -> tuple[tuple[int, int], ...]:
    """(position, most tokens): how long chunks that begin there may be, so that those who decode meanwhile do not wait.

    A token costs more the more text it sees. A size is used as long as a chunk takes no more than twice what the
    largest takes at the start of a prompt; the smallest is used from there on.

    Args:
      sizes: of single chunks.
      call: as for `cover`.
      doubling: tokens of text at which a token costs twice what it does at the start; None: it always costs the same.
    """
    if doubling is None:
        return ()
    cost = lambda size, start: call + size * (1 + (start + size / 2) / doubling)
    ordered = sorted(set(sizes), reverse=True)
    most = _LONGER * cost(ordered[0], 0)
    ends = [max(0, int(((most - call) / size - 1) * doubling - size / 2)) for size in ordered]
    return tuple((end, size) for end, size in zip(ends, ordered[1:], strict=False))


@functools.lru_cache(maxsize=1 << 16)
def _alone(count: int, sizes: tuple[int, ...], call: int) -> tuple[int, int]:
    """What computing so many tokens of one chunk costs, and the first size: larger ones first, the smaller fill up."""
    if count <= 0:
        return 0, 0
    cost, size = min((_alone(count - size, sizes, call)[0] + size + call, -size) for size in sizes)
    return cost, -size


def cover(counts: Sequence[int], shapes: Sequence[PrefillShape], call: int) -> list[Call]:
    """The cheapest calls that compute chunks of so many tokens; chunks stay in order.

    Args:
      shapes: what can run; at least one of a single chunk.
      call: what a call costs beside its size, in tokens: about what reading the weights does.
    """
    singles = tuple(shape.size for shape in shapes if shape.rows == 1)
    several = [shape for shape in shapes if shape.rows > 1]
    best: list[tuple[int, int, PrefillShape | None]] = [(0, 0, None)]  # cost, first chunk of the last call, its shape
    for end in range(1, len(counts) + 1):
        found = (best[end - 1][0] + _alone(counts[end - 1], singles, call)[0], end - 1, None)
        total = width = 0
        for first in range(end - 1, -1, -1):
            total, width = total + counts[first], max(width, counts[first])
            shape = next((s for s in several if s.size >= total and s.rows >= end - first and s.width >= width), None)
            if shape is None:
                if not any(s.size >= total for s in several):
                    break
                continue
            cost = best[first][0] + shape.size + call
            if cost < found[0]:
                found = (cost, first, shape)
        best.append(found)
    calls: list[Call] = []
    end = len(counts)
    while end:
        _, first, shape = best[end]
        if shape is not None:
            calls.append((shape, tuple(Piece(i, 0, counts[i]) for i in range(first, end))))
        else:
            calls += reversed(_pieces(first, counts[first], singles, call))
        end = first
    return calls[::-1]


def cover_beside(
    counts: Sequence[int], shapes: Sequence[PrefillShape], call: int, joined: PrefillShape
) -> tuple[tuple[Piece, ...], list[Call]]:
    """What a round takes along of chunks of so many tokens, and the cheapest calls for what is left, to run after it.

    A round reads the weights anyway, so that what it takes along costs its size alone; nothing where that is no less.

    Args:
      shapes, call: see `cover`. joined: what a round can take along.
    """
    alone = cover(counts, shapes, call)
    best = _cost(alone, call), (), alone
    whole, room = 0, joined.size
    while whole < min(joined.rows, len(counts)) and counts[whole] <= min(joined.width, room):
        room -= counts[whole]
        whole += 1
    pieces = [Piece(i, 0, counts[i]) for i in range(whole)]
    options = [pieces] if pieces else []
    if whole < min(joined.rows, len(counts)) and room:  # and the start of the next one
        options.append([*pieces, Piece(whole, 0, min(room, joined.width))])
    for option in options:
        begun = option[-1].count if len(option) > whole else 0
        rest = [counts[whole] - begun, *counts[whole + 1 :]] if whole < len(counts) else []
        calls = [
            (shape, tuple(Piece(p.chunk + whole, p.start + begun * (p.chunk == 0), p.count) for p in some))
            for shape, some in cover(rest, shapes, call)
        ]
        found = joined.size + _cost(calls, call), tuple(option), calls
        if found[0] < best[0]:
            best = found
    return best[1], best[2]


def _cost(calls: Sequence[Call], call: int) -> int:
    return sum(shape.size + call for shape, _ in calls)


def _pieces(chunk: int, count: int, sizes: tuple[int, ...], call: int) -> list[Call]:
    calls: list[Call] = []
    start = 0
    while start < count:
        size = _alone(count - start, sizes, call)[1]
        calls.append((PrefillShape.of_one(size), (Piece(chunk, start, min(size, count - start)),)))
        start += size
    return calls
