"""The completions under way, and what they ask of the rounds that bring them forward: grammars, times per token.

Must not know policies, pages or executables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxspec.adaptive import objectives
from jaxspec.facts import EngineFacts
from jaxspec.output import OutputProcessor
from jaxspec.request import Request
from jaxspec.scheduling.plan import DecodeRows, PrefillChunk
from jaxspec.text.matcher import Guide


class Live:
    """An engine's live completions, by the ids of their requests.

    Args:
      facts: of the engine.
    """

    def __init__(self, facts: EngineFacts):
        self._facts = facts
        self._outputs: dict[str, OutputProcessor] = {}
        self._matching = self._asking = 0  # those with a grammar, and those that ask for a time per token

    def __getitem__(self, request_id: str) -> OutputProcessor:
        return self._outputs[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def get(self, request_id: str) -> OutputProcessor | None:
        return self._outputs.get(request_id)

    def enter(self, output: OutputProcessor) -> None:
        self._outputs[output.request.request_id] = output
        self._matching += output.matcher is not None
        self._asking += output.request.tpot is not None

    def leave(self, output: OutputProcessor) -> None:
        self._matching -= output.matcher is not None
        self._asking -= output.request.tpot is not None
        del self._outputs[output.request.request_id]

    # Grammars.

    @property
    def any_guided(self) -> bool:
        """Whether a grammar says what a text may be."""
        return bool(self._matching)

    def is_guided(self, requests: Sequence[Request]) -> bool:
        """Whether one does of these, which are live."""
        return self.any_guided and any(self[request.request_id].matcher is not None for request in requests)

    def guide(self, requests: Sequence[Request]) -> Guide | None:
        """What the rows of a round may say; None where no grammar says anything."""
        if not self._matching:
            return None
        matchers = [self[request.request_id].matcher for request in requests]
        return Guide(matchers, self._facts.vocab_size) if any(matchers) else None

    def allowed(self, chunk: PrefillChunk) -> np.ndarray | None:
        """What the token after a chunk of a prompt may be, as a set of bits; None: anything."""
        matcher = self[chunk.request.request_id].matcher
        return matcher.root if matcher is not None and chunk.is_last else None

    # Times per token.

    def asked(self, requests: Sequence[Request]) -> list[float]:
        """The seconds per token that these ask for, of those that do."""
        return [request.tpot for request in requests if request.tpot is not None] if self._asking else []


def weights(rows: DecodeRows, depth: int, now: float, round_seconds: float) -> list[float]:
    """What a drafted token of each row is worth, by how far it lags behind the time per token that it asks for.

    Args:
      depth: of the round's tier.
      now: on time.monotonic's clock.
      round_seconds: that a round takes.
    """
    needs: list[float | None] = []
    for request, computed in zip(rows.requests, rows.computed_B.tolist(), strict=True):
        first = request.metrics.first_token_time
        if request.tpot is None or first is None:
            needs.append(None)
            continue
        # Of what is in flight it is known that it brings a token.
        emitted = computed + 1 - len(request.prompt_token_ids)
        needs.append(objectives.need(now - first, emitted, round_seconds, request.tpot))
    return objectives.weights(needs, depth)
