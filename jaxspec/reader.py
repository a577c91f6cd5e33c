"""What a round says, read for all its rows at once: only those that may end are looked at token by token.

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
from jaxspec.request import MAX_STOP_TOKEN_IDS, FinishReason
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
        #: Whether a token ends a text, at -1 for none; stop ids of the slots' requests, -2 for none, and how many have.
        self._ends_V = np.zeros(facts.vocab_size + 1, bool)
        self._ends_V[[token for token in facts.eos if token < facts.vocab_size]] = True
        self._stops_SK, self._stopping = np.full((slots, MAX_STOP_TOKEN_IDS), -2), 0
        #: Slots whose completions are read token by token, and those that have stop strings.
        self._guided_S, self._watched_S = np.zeros((2, slots), bool)
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
        self._stops_SK[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self._stopping += bool(params.stop_token_ids)

    def leave(self, output: OutputProcessor) -> None:
        """A completion ends, or waits for a slot again."""
        self.tell(output)
        if output.slot is not None:
            self._stops_SK[output.slot] = -2
            self._stopping -= bool(output.request.params.stop_token_ids)
            self._at[output.slot] = output.slot = None

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

    def read(self, tier: Tier, slots_B: np.ndarray, alive_B: np.ndarray, left_B: np.ndarray, result: Result) -> Said:
        """Takes the results of a round.

        Args:
          alive_B: which rows still are in their slots.
          left_B: tokens that each may still generate.
        """
        outputs = [self._at[slot] for slot in slots_B.tolist()]
        said = Said(outputs, list(result.tokens), [""] * len(outputs), {})
        closely_B, watched_B = self._closely(slots_B, left_B, result), self._watched_S[slots_B]
        for row in np.flatnonzero((closely_B | watched_B) & alive_B).tolist():
            output, tokens = outputs[row], result.tokens[row]
            assert output is not None
            kept = output.take(tokens, bool(result.finite_B[row])) if closely_B[row] else output.until_stop(tokens)
            said.tokens[row], said.texts[row] = kept.tokens, kept.text
            if kept.reason is not None:
                said.reasons[row] = kept.reason
        self._laps.lap("stops")
        for row, (others, output) in enumerate(
            zip((~(closely_B | watched_B) & alive_B).tolist(), outputs, strict=True)
        ):
            if others and output is not None:
                said.texts[row] = output.go_on(result.tokens[row])
        self._laps.lap("detokenize")
        if not alive_B.all():
            said.outputs = [output if alive else None for output, alive in zip(outputs, alive_B.tolist(), strict=True)]
        failed = [row for row, reason in said.reasons.items() if reason is FinishReason.ERROR]
        if failed:
            alive_B = alive_B.copy()
            alive_B[failed] = False
        self._count(tier, slots_B, alive_B, result)
        return said

    def _closely(self, slots_B: np.ndarray, left_B: np.ndarray, result: Result) -> np.ndarray:
        """Which rows may end here, or have to be read token by token in any case, bool [B]."""
        tokens_BD = result.tokens_BD
        closely_B = (result.counts_B >= left_B) | ~result.finite_B | self._guided_S[slots_B]
        closely_B |= self._ends_V[tokens_BD].any(axis=1)
        if self._stopping:
            closely_B |= (tokens_BD[:, :, None] == self._stops_SK[slots_B][:, None]).any(axis=(1, 2))
        return closely_B

    def _count(self, tier: Tier, slots_B: np.ndarray, alive_B: np.ndarray, result: Result) -> None:
        key = tier, result.drafts is not None
        rounds_SA = self._rounds_SA.get(key)
        if rounds_SA is None:
            rounds_SA = self._rounds_SA[key] = np.zeros((len(self._at), tier.depth + 1), np.int64)
        rounds_SA[slots_B[alive_B], result.counts_B[alive_B] - 1] += 1
        if result.drafts is not None:
            verified_BM = np.frombuffer(result.drafts.verified, np.uint8).reshape(len(slots_B), -1)
            self._verified_S[slots_B[alive_B]] += verified_BM.sum(axis=1, dtype=np.int64)[alive_B]
