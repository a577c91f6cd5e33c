"""What rounds ask of the running requests, as arrays by slot: a plan looks at a batch, not at its rows.

NumPy and the standard library only. Must not know queues, or where pages come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.request import Request
from jaxspec.scheduling.plan import NO_LIMIT, DecodeRows, Grant

#: Columns of the table; see SlotTable.
_STAMP, _COMPUTED, _CAP, _SHAPED, _LOGPROBS, _LEFT, _LONGEST, _PAGES, _FLYING, _GROWTH = range(10)


class Due(NamedTuple):
    """Running requests that need a further round.

    Attributes:
      requests: oldest first.
      rows_BF: theirs of the table. slots_B: where they lie in it.
      bound_B: most tokens that their pages have to hold before the round, which adds to them.
      pages_B: pages that they have.
    """

    requests: Sequence[Request]
    rows_BF: np.ndarray
    slots_B: np.ndarray
    bound_B: np.ndarray
    pages_B: np.ndarray

    def kept(self, keep: Sequence[int]) -> Due:
        """Some of them."""
        at = np.asarray(keep, np.intp)
        return Due([self.requests[i] for i in keep], *(array[at] for array in self[1:]))

    def decode(self, grants: Sequence[Grant]) -> DecodeRows:
        """As the rows of a round."""
        rows = self.rows_BF
        shaped, wants = rows[:, _SHAPED] > 0, rows[:, _LOGPROBS] > 0
        about = rows[:, _STAMP], rows[:, _CAP], rows[:, _COMPUTED], shaped, wants
        return DecodeRows(self.requests, self.slots_B, *about, grants=grants)


class SlotTable:
    """A row of numbers for each slot.

    They are: a stamp that changes whenever the slot changes hands; of the running request that has it, the tokens whose
    keys and values are known to be in the pool; the most drafts that it accepts in a round; whether it asks for more
    than the argmax; whether it wants log-probabilities; the tokens that it may still generate; the most that its prompt
    and outputs can be; its pages; its results in flight, and the most tokens that they add to the pool.

    Args:
      running: those requests, which their owner keeps in order; `changed` says that it was.
    """

    def __init__(self, slots: int, running: Sequence[Request]) -> None:
        self._table_SF = np.zeros((slots, 10), np.int64)
        self._running, self._order_B = running, np.zeros(0, np.intp)
        self._changed = True

    def begin(self, request: Request) -> None:
        """A request's prompt is dispatched, its first token is in flight."""
        params, slot = request.params, request.slot
        assert slot is not None
        cap = NO_LIMIT if request.max_depth is None else request.max_depth
        left = request.max_tokens - len(request.output_token_ids)
        longest = len(request.prompt_token_ids) + request.max_tokens
        shaped, wants = not params.plain_greedy, params.logprobs is not None
        about = request.num_computed, cap, shaped, wants, left, longest, len(request.pages), 1, 0
        self._table_SF[slot, _COMPUTED:] = about
        self._changed = True

    def end(self, slot: int) -> None:
        """Whoever had the slot has it no longer."""
        self._table_SF[slot, _STAMP] += 1
        self._changed = True

    def due(self) -> Due:
        """The running requests that need a further round: results in flight bring at least one token each."""
        if self._changed:
            self._order_B = np.fromiter((request.slot for request in self._running), np.intp, len(self._running))
            self._changed = False
        slots, requests = self._order_B, list(self._running)
        rows = self._table_SF[slots]
        needs = rows[:, _LEFT] > rows[:, _FLYING]
        if not needs.all():
            slots, rows = slots[needs], rows[needs]
            requests = [requests[i] for i in np.flatnonzero(needs)]
        bound = np.minimum(rows[:, _COMPUTED] + rows[:, _GROWTH], rows[:, _LONGEST])
        return Due(requests, rows, slots, bound, rows[:, _PAGES])

    def granted(self, request: Request) -> None:
        """A running request has got pages."""
        self._table_SF[request.slot, _PAGES] = len(request.pages)

    def alive(self, rows: DecodeRows) -> np.ndarray:
        """Which rows still have their slots, bool [B]."""
        return self._table_SF[rows.slots_B, _STAMP] == rows.stamps_B

    def left(self, slots_B: np.ndarray) -> np.ndarray:
        """Tokens that requests may still generate, as far as the host has seen theirs."""
        return self._table_SF[slots_B, _LEFT]

    def dispatched(self, rows: DecodeRows, growth: int) -> None:
        """A round adds up to so many tokens to each row."""
        slots = rows.slots_B[self.alive(rows)]
        self._table_SF[slots, _FLYING] += 1
        self._table_SF[slots, _GROWTH] += growth

    def came(
        self, slots_B: np.ndarray | int, growth: int, counts_B: np.ndarray | int, added_B: np.ndarray | int
    ) -> None:
        """Results that were to add up to `growth` tokens to the pool gave `counts_B`, and added `added_B` to it."""
        table = self._table_SF
        table[slots_B, _FLYING] -= 1
        table[slots_B, _GROWTH] -= growth
        table[slots_B, _LEFT] -= counts_B
        table[slots_B, _COMPUTED] += added_B

    def computed(self, request: Request) -> int:
        """Tokens of a running request whose keys and values are known to be in the pool."""
        return int(self._table_SF[request.slot, _COMPUTED])

    def in_flight(self, request: Request) -> tuple[int, int]:
        """A running request's results in flight, and the most tokens that they add to the pool."""
        return int(self._table_SF[request.slot, _FLYING]), int(self._table_SF[request.slot, _GROWTH])
