"""What rounds ask of the running requests, as arrays by slot: a plan looks at a batch, not at its rows.

NumPy and the standard library only. Must not know queues, or where pages come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.request import Request
from jaxspec.scheduling.pace import Repeats
from jaxspec.scheduling.plan import NO_LIMIT, DecodeRows, Grant

#: Columns of the two tables; see SlotTable.
_STAMP, _CAP, _SHAPED, _LOGPROBS, _LONGEST, _PAGES = range(6)
_COMPUTED, _LEFT, _FLYING, _GROWTH = range(4)


class Due(NamedTuple):
    """Running requests that need a further round.

    Attributes:
      requests: oldest first.
      slots_B: theirs. about_BF: of each what rounds do not change; see SlotTable.
      computed_B: tokens whose keys and values are known to be in the pool.
      bound_B: most tokens that their pages have to hold before the last of the rounds planned, which adds to them.
      most_rounds: that one of them could need beyond those in flight, where each gives it one token.
      limited: whether some accept only so many drafts.
    """

    requests: Sequence[Request]
    slots_B: np.ndarray
    about_BF: np.ndarray
    computed_B: np.ndarray
    bound_B: np.ndarray
    most_rounds: int
    limited: bool

    @property
    def pages_B(self) -> np.ndarray:  # noqa: N802  (named as the arrays beside it)
        """Pages that they have."""
        return self.about_BF[:, _PAGES]

    def kept(self, keep: Sequence[int]) -> Due:
        """Some of them."""
        at = np.asarray(keep, np.intp)
        requests, (slots, about, computed, bound) = [self.requests[i] for i in keep], self[1:5]
        return Due(requests, slots[at], about[at], computed[at], bound[at], self.most_rounds, self.limited)

    def decode(self, grants: Sequence[Grant], rounds: int = 1) -> DecodeRows:
        """As the rows of a round, or of several."""
        about = self.about_BF
        return DecodeRows(
            self.requests, self.slots_B, about[:, _STAMP], about[:, _CAP] if self.limited else None, self.computed_B,
            about[:, _SHAPED], about[:, _LOGPROBS], grants, rounds,
        )  # fmt: skip


class SlotTable:
    """Two rows of numbers for each slot.

    The first holds a stamp that changes whenever the slot changes hands, and of the running request that has it the
    most drafts that it accepts in a round; whether it asks for more than the argmax; whether it wants
    log-probabilities; the most that its prompt and outputs can be; its pages. The second what rounds change: the tokens
    whose keys and values are known to be in the pool; those that it may still generate; its rounds in flight, and the
    most tokens that they add to the pool.

    Args:
      running: those requests, which their owner keeps in order; `changed` says that it was.
    """

    def __init__(self, slots: int, running: Sequence[Request]) -> None:
        self._about_SF, self._state_SF = np.zeros((slots, 6), np.int64), np.zeros((slots, 4), np.int64)
        self._running, self._order_B = running, np.zeros(0, np.intp)
        self._changed, self._limited = True, False

    def begin(self, request: Request) -> None:
        """A request's prompt is dispatched, its first token is in flight."""
        params, slot = request.params, request.slot
        assert slot is not None
        cap = NO_LIMIT if request.max_depth is None else request.max_depth
        left = request.max_tokens - len(request.output_token_ids)
        longest = len(request.prompt_token_ids) + request.max_tokens
        shaped, wants = not params.plain_greedy, params.logprobs is not None
        self._about_SF[slot, _CAP:] = cap, shaped, wants, longest, len(request.pages)
        self._state_SF[slot] = request.num_computed, left, 1, 0
        self._changed = True

    def end(self, slot: int) -> None:
        """Whoever had the slot has it no longer."""
        self._about_SF[slot, _STAMP] += 1
        self._changed = True

    def _order(self) -> np.ndarray:
        """Slots of the running requests, in their order."""
        if self._changed:
            self._order_B = np.asarray([request.slot for request in self._running], np.intp)
            self._limited = any(request.max_depth is not None for request in self._running)
            self._changed = False
        return self._order_B

    def due(self, ahead: int = 0) -> Due:
        """The running requests that need a further round: rounds in flight bring at least one token each.

        Args:
          ahead: tokens that rounds before the last of those planned may add.
        """
        slots, requests = self._order(), list(self._running)
        about, state = self._about_SF.take(slots, axis=0), self._state_SF.take(slots, axis=0)
        missing = state[:, _LEFT] - state[:, _FLYING]
        needs = missing > 0
        if np.count_nonzero(needs) < len(requests):
            slots, about, state = slots[needs], about[needs], state[needs]
            requests = [requests[i] for i in np.flatnonzero(needs)]
        bound = np.minimum(state[:, _COMPUTED] + state[:, _GROWTH] + ahead, about[:, _LONGEST])
        most = int(missing.max(initial=0))
        return Due(requests, slots, about, state[:, _COMPUTED], bound, most, self._limited)

    def idle_rounds(self, repeats: Repeats) -> float:
        """Rounds that the slots of requests which end would be idle for several rounds instead of one, in expectation.

        A request that ends in those in flight leaves its slot for all of the next dispatch, whose length is at stake;
        one that ends in that dispatch leaves it for the rest of it.
        """
        state_BF, rounds = self._state_SF.take(self._order(), axis=0), repeats.rounds
        flying_B = state_BF[:, _FLYING]
        to_go_B = np.ceil(state_BF[:, _LEFT] / repeats.tokens - flying_B)
        by_length = (rounds - to_go_B).clip(0, rounds - 1).sum()
        by_stops = repeats.stops * (rounds - 1) * (flying_B.sum() + len(flying_B) * rounds / 2)
        return float(by_length + by_stops)

    def granted(self, request: Request) -> None:
        """A running request has got pages."""
        self._about_SF[request.slot, _PAGES] = len(request.pages)

    def alive(self, rows: DecodeRows) -> np.ndarray:
        """Which rows still have their slots, bool [B]."""
        return self._about_SF[:, _STAMP].take(rows.slots_B) == rows.stamps_B

    def dispatched(self, rows: DecodeRows) -> None:
        """Rounds are on their way."""
        alive_B = self.alive(rows)
        slots = rows.slots_B if np.count_nonzero(alive_B) == len(rows) else rows.slots_B[alive_B]
        self._add(slots, np.asarray([0, 0, rows.rounds, rows.growth]))

    def came(
        self, slots_B: np.ndarray, growth: int, counts_B: np.ndarray, rounds: int = 1, *, first: bool = False
    ) -> None:
        """Rounds that were to add up to `growth` tokens to the pool gave `counts_B`.

        Args:
          first: they follow a prefill, which has added its own.
        """
        change = np.empty((len(slots_B), 4), np.int64)
        change[:, 0], change[:, 1], change[:, 2], change[:, 3] = 0 if first else counts_B, -counts_B, -rounds, -growth
        self._add(slots_B, change)

    def _add(self, slots_B: np.ndarray, change: np.ndarray) -> None:
        # `take` is several times faster than an index here.
        self._state_SF[slots_B] = self._state_SF.take(slots_B, axis=0) + change

    def computed(self, request: Request) -> int:
        """Tokens of a running request whose keys and values are known to be in the pool."""
        return int(self._state_SF[request.slot, _COMPUTED])

    def in_flight(self, request: Request) -> tuple[int, int]:
        """A running request's rounds in flight, and the most tokens that they add to the pool."""
        return int(self._state_SF[request.slot, _FLYING]), int(self._state_SF[request.slot, _GROWTH])
