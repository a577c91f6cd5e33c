"""What the device owes the host, and what it gave: dispatches under way, and their results as NumPy has them.

Must not know how either comes about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.adaptive.policy import DraftLabels
from jaxspec.request import Logprob, Request
from jaxspec.runtime.packing import labels
from jaxspec.scheduling.plan import DecodeRows
from jaxspec.speculation.layouts import End, Packed, PackedLogprobs
from jaxspec.tier import Tier


@dataclasses.dataclass
class Pending:
    """A dispatched prefill (tier None) or round whose result has not been read.

    Attributes:
      rows: of a prefill (request, its epoch at dispatch), of a round its rows; in the batch's order.
      packed: `Packed` tokens on the device. logprobs: `PackedLogprobs`, where some row asked for them.
      dispatched_at: seconds on the runner's clock.
      timed: nothing but rounds ran on the device since the round before, so its seconds are its own.
      entered: the same, but for the drafter's catching up right before it.
      tokens: nodes that a packed round verifies over the whole batch; None: all of them.
      rounds: in one dispatch.
      version: of the drafter's weights, where they matter.
      ring: of a round whose states are gathered: into which buffer, and how many rows of it at most.
    """

    rows: Sequence[tuple[Request, int]] | DecodeRows
    tier: Tier | None
    bucket: int
    packed: jax.Array
    logprobs: jax.Array | None
    dispatched_at: float
    context_tokens: int
    timed: bool
    entered: bool = False
    tokens: int | None = None
    rounds: int = 1
    version: int = 0
    ring: tuple[int, int] | None = None

    @property
    def requests(self) -> Sequence[Request]:
        return self.rows.requests if isinstance(self.rows, DecodeRows) else [request for request, _ in self.rows]

    @property
    def is_ready(self) -> bool:
        """Whether the device has finished it."""
        ready: bool = getattr(self.packed, "is_ready")()  # noqa: B009  (absent from jax.Array's published type)
        return ready


@dataclasses.dataclass(frozen=True)
class Result:
    """What a prefill or the rounds of a dispatch gave their rows.

    Attributes:
      counts_RB: how many tokens each row got in each round (a prefill is one); 0 where it was over before.
      tokens: they, in one list a row.
      finite_B: False where the target's logits were not.
      over_B: whether a token or the length ends the row's text, for the host to say which.
      logprobs: `PackedLogprobs` of the rows, where some asked for them.
      drafts: of a packed round, what became of its nodes.
      touched_R: distinct experts that the target read in each round, over all layers; 0 of models without.
    """

    counts_RB: np.ndarray
    tokens: list[list[int]]
    finite_B: np.ndarray
    over_B: np.ndarray
    logprobs: np.ndarray | None
    drafts: DraftLabels | None = None
    touched_R: Sequence[int] = (0,)

    @classmethod
    def of(cls, packed: np.ndarray, rows: int, logprobs: np.ndarray | None = None, tier: Tier | None = None) -> Result:
        """Unpacks `Packed` tokens, [B, X], or of several rounds [R, B, X].

        Args:
          tier: of a packed round; `PackedDrafts` come behind its tokens.
        """
        if packed.ndim == 3:
            return cls._of_several(packed[:, :rows])
        drafts = None if tier is None else labels(packed[:rows], tier)
        columns = Packed(packed[:rows, : None if tier is None else Packed.width(tier.depth + 1)])
        counts, tokens = columns.count_B, columns.tokens_BD
        cut = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
        return cls(
            counts[None], cut, *_ends(columns.end_B[:, None]), logprobs, drafts, columns.touched_B[:1].tolist() or [0]
        )

    @classmethod
    def _of_several(cls, packed_RBX: np.ndarray) -> Result:
        # A row behind the other; a row's rounds become one text.
        packed_BRX = packed_RBX.swapaxes(0, 1)
        rows, rounds, width = packed_BRX.shape
        columns = Packed(packed_BRX.reshape(-1, width))
        counts_BR, end_BR = columns.count_B.reshape(rows, rounds), columns.end_B.reshape(rows, rounds)
        said = columns.tokens_BD[np.arange(width - Packed.width(0)) < columns.count_B[:, None]].tolist()
        ends = counts_BR.sum(axis=1).cumsum().tolist()
        tokens = [said[first:end] for first, end in zip([0, *ends], ends, strict=False)]
        touched_R = columns.touched_B[:rounds].tolist() or [0] * rounds
        return cls(counts_BR.T, tokens, *_ends(end_BR), None, touched_R=touched_R)

    def entries(self, row: int, wanted: int) -> list[dict[int, Logprob]]:
        """Log-probabilities of a row's tokens: for each itself first, then the best of the vocabulary, as vLLM does."""
        assert self.logprobs is not None
        return _entries(self.logprobs[row], self.tokens[row], wanted)


def _ends(end_BR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(whether all logits of a row were finite, whether one of its rounds ends its text), bool [B] each."""
    if not end_BR.any():  # in most rounds
        over_B = np.zeros(len(end_BR), bool)
        return ~over_B, over_B
    return (end_BR != End.NOT_FINITE).all(axis=1), (end_BR == End.OVER).any(axis=1)


def _entries(logprobs: np.ndarray, tokens: Sequence[int], wanted: int) -> list[dict[int, Logprob]]:
    chosen, ranks, values, ids = (part.tolist() for part in PackedLogprobs(logprobs).unpacked())
    entries = []
    for i, token in enumerate(tokens):
        entry = {token: Logprob(token, chosen[i], ranks[i])}
        for rank, (other, value) in enumerate(zip(ids[i][:wanted], values[i], strict=False), start=1):
            entry.setdefault(other, Logprob(other, value, rank))
        entries.append(entry)
    return entries
