"""What a round says, read for all its rows at once: only those that end are looked at token by token.

Owns what that takes to know of the completions that rounds bring forward, by slot. Must not know policies, pages or who
hears of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.facts import EngineFacts
from jaxspec.laps import Laps
from jaxspec.output import OutputProcessor
from jaxspec.request import FinishReason
from jaxspec.runtime.results import Result
from jaxspec.tier import Tier


@dataclasses.dataclass
class Said:
    """What the rows of a round said.

    Attributes:
      outputs: None for rows that no longer are.
      tokens, texts: that belong to them.
      reasons: why rows end, by row.
    """

    outputs: list[OutputProcessor | None]
    tokens: list[Sequence[int]]
    texts: list[str]
    reasons: dict[int, FinishReason]


class RoundReader:
    """The completions that rounds bring forward.

    Args:
      facts: of the engine.
      laps: where the time goes.
    """

    def __init__(self, facts: EngineFacts, laps: Laps):
        slots = facts.sizes.slots
        self._laps = laps
        self._at: list[OutputProcessor | None] = [None] * slots
        #: Slots whose completions are read token by token, and those that have stop strings; how many there are.
        self._guided_S, self._watched_S = np.zeros((2, slots), bool)
        self._guided = self._watching = 0
        #: Rounds of each tier by how many drafts were accepted, as far as the requests' metrics do not have them.
        self._rounds_SA: dict[tuple[Tier, bool], np.ndarray] = {}
        #: And the drafts that packed ones, which are told apart above, have verified.
        self._verified_S = np.zeros(slots, np.int64)

    def enter(self, output: OutputProcessor) -> None:
        """Rounds bring a completion forward from now on."""
        params, slot = output.request.params, output.request.slot
        assert slot is not None and self._at[slot] is None
        self._at[slot], output.slot = output, slot
        self._guided_S[slot], self._watched_S[slot] = output.matcher is not None, bool(params.stop)
        self._number(output, 1)

    def leave(self, output: OutputProcessor) -> None:
        """A completion ends, or waits for a slot again."""
        self.tell(output)
        if output.slot is not None:
            self._number(output, -1)
            self._at[output.slot] = output.slot = None

    def _number(self, output: OutputProcessor, by: int) -> None:
        self._guided += by * (output.matcher is not None)
        self._watching += by * bool(output.request.params.stop)

    def tell(self, output: OutputProcessor) -> None:
        """Adds the rounds so far to its request's metrics."""
        request = output.request
        if output.slot is None:
            return
        for (tier, is_packed), rounds_SA in self._rounds_SA.items():
            if rounds_SA[output.slot].any():
                limit = request.draft_limit(tier.depth)
                drafted = tier.num_nodes - 1 if limit == tier.depth else limit
                request.metrics.record_rounds(tier.name, 0 if is_packed else drafted, rounds_SA[output.slot].tolist())
                rounds_SA[output.slot] = 0
        request.metrics.drafted += int(self._verified_S[output.slot])
        self._verified_S[output.slot] = 0

    def read(self, tier: Tier, slots_B: np.ndarray, alive_B: np.ndarray, result: Result) -> Said:
        """Takes the results of a round, or of several in one dispatch.

        Args:
          alive_B: which rows still are in their slots.
        """
        outputs = [self._at[slot] for slot in slots_B.tolist()]
        whole = np.count_nonzero(alive_B) == len(outputs)
        if not whole:
            outputs = [output if alive else None for output, alive in zip(outputs, alive_B.tolist(), strict=True)]
        said = Said(outputs, list(result.tokens), [""] * len(outputs), {})
        read_B = result.over_B | ~result.finite_B  # the device has looked at stop tokens and lengths
        if self._guided:
            read_B = read_B | self._guided_S[slots_B]
        closely = set(read_B.nonzero()[0].tolist())
        if self._watching:
            read_B = read_B | self._watched_S[slots_B]
        read = read_B.nonzero()[0].tolist()
        for row in read:
            output, tokens = outputs[row], result.tokens[row]
            if output is not None:
                finite = bool(result.finite_B[row])
                kept = output.take(tokens, finite) if row in closely else output.until_stop(tokens)
                said.tokens[row], said.texts[row] = kept.tokens, kept.text
                if kept.reason is not None:
                    said.reasons[row] = kept.reason
                # Else it would say nothing more, and wait for ever.
                assert kept.reason is not None or not result.over_B[row], f"{tokens} end nothing"
        self._laps.lap("stops")
        if whole and not read:
            said.texts = [output.go_on(new) for output, new in zip(outputs, result.tokens, strict=True) if output]
        else:
            for row in set(range(len(outputs))).difference(read):
                output = outputs[row]
                if output is not None:
                    said.texts[row] = output.go_on(result.tokens[row])
        self._laps.lap("detokenize")
        counts_RB = result.counts_RB
        if not whole or said.reasons:
            # Of a row that ends, the rounds of which something belongs to it.
            kept = [0 if output is None else len(new) for output, new in zip(outputs, said.tokens, strict=True)]
            began_RB = np.cumsum(counts_RB, axis=0) - counts_RB
            counts_RB = np.where(began_RB < np.asarray(kept), counts_RB, 0)
        self._count(tier, slots_B, counts_RB, result)
        return said

    def _count(self, tier: Tier, slots_B: np.ndarray, counts_RB: np.ndarray, result: Result) -> None:
        """Tallies the rounds for the rows that got tokens of them."""
        drafts = result.drafts
        rounds_SA = self._rounds_SA.get((tier, drafts is not None))
        if rounds_SA is None:
            rounds_SA = np.zeros((len(self._at), tier.depth + 1), np.int64)
            self._rounds_SA[tier, drafts is not None] = rounds_SA
        told_RB = counts_RB > 0
        at_RB = slots_B * (tier.depth + 1) + counts_RB - 1
        # A slot may be counted several times.
        np.add.at(rounds_SA.reshape(-1), at_RB.ravel() if told_RB.all() else at_RB[told_RB], 1)
        if drafts is not None:
            (told_B,) = told_RB
            verified_BM = np.frombuffer(drafts.verified, np.uint8).reshape(len(slots_B), -1)
            self._verified_S[slots_B[told_B]] += verified_BM[told_B].sum(axis=1, dtype=np.int64)
