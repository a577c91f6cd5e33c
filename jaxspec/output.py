"""What one completion says: its tokens become text, and it ends where its text, its tokens or its grammar say so.

Must not know rounds or pages, nor who reads the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxspec.facts import EngineFacts
from jaxspec.request import CompletionOutput, ErrorKind, FinishReason, Request, RequestOutput
from jaxspec.text.grammar import Grammar
from jaxspec.text.tokenizer import IncrementalDetokenizer, StopChecker


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What a completion takes of a result.

    Attributes:
      tokens: those that belong to it.
      text: what has settled since the result before.
      reason: why it ends; None while it goes on.
    """

    tokens: Sequence[int]
    text: str
    reason: FinishReason | None


class OutputProcessor:
    """Makes the output of one live request.

    Args:
      facts: of the engine.
      index: which completion of its prompt.
      grammar: what the text has to be; None: anything.

    Attributes:
      request, index: as given.
      matcher: how far the text is in its grammar; None without.
      slot: of the RoundReader, which alone writes it; None: no round brings it forward, yet or again.
    """

    def __init__(self, facts: EngineFacts, request: Request, index: int, grammar: Grammar | None):
        params = request.params
        self.request, self.index = request, index
        self.matcher = None if grammar is None else grammar.matcher()
        self._eos = facts.eos
        self._texts: list[str] = []
        self.slot: int | None = None
        self._stop_reason: int | str | None = None
        self._detokenizer = self._stops = None
        if facts.tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                facts.tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            self._stops = StopChecker(
                params.stop, include_stop_str_in_output=params.include_stop_str_in_output, min_tokens=params.min_tokens
            )

    def take(self, tokens: Sequence[int], finite: bool) -> Kept:
        """Reads a result's tokens, before they are committed; those behind the end do not belong to the request.

        Args:
          finite: whether all logits were; else the tokens come from those before.
        """
        if not finite:
            kept = self._until_stop(tokens)
            self._texts.append(kept.text)
            failed = self._fail(ErrorKind.NON_FINITE, "the target's logits are not finite")
            return dataclasses.replace(failed, tokens=kept.tokens, text=kept.text)
        if self.matcher is not None:
            tokens = tokens[: self.matcher.take(tokens)]
            if self.matcher.error is not None:
                return self._fail(ErrorKind.GRAMMAR, f"the grammar failed: {self.matcher.error}")
        kept = self._until_stop(tokens)
        self._texts.append(kept.text)
        return kept

    def go_on(self, tokens: Sequence[int]) -> str:
        """The text of tokens none of which can end it, without stop strings; as `take`, but sooner."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.feed_all(tokens)
        self._texts.append(text)
        return text

    def until_stop(self, tokens: Sequence[int]) -> Kept:
        """Reads tokens that only a stop string can end."""
        assert self._detokenizer is not None and self._stops is not None
        settled = self._stops.feed([self._detokenizer.feed(token) for token in tokens])
        self._texts.append(settled.text)
        self._stop_reason = settled.stop
        reason = None if settled.stop is None else FinishReason.STOP
        return Kept(tokens[: settled.num_tokens], settled.text, reason)

    def _fail(self, kind: ErrorKind, message: str) -> Kept:
        """The result in hand is worth nothing."""
        self.request.error, self.request.error_kind = message, kind
        return Kept((), "", FinishReason.ERROR)

    def _until_stop(self, tokens: Sequence[int]) -> Kept:
        params, text = self.request.params, ""
        for count, token in enumerate(tokens, start=1):
            total = len(self.request.output_token_ids) + count
            ends = token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)
            if ends and total > params.min_tokens:
                self._stop_reason = token if token in params.stop_token_ids else None
                return Kept(tokens[:count], text + self._flush(), FinishReason.STOP)
            whole = self.matcher is not None and self.matcher.complete and count == len(tokens)
            if whole and token in self._eos:
                # It says that the text is over, and is no part of it.
                return Kept(tokens, text + self._flush(), FinishReason.STOP)
            if self._detokenizer is not None and self._stops is not None:
                settled = self._stops.feed([self._detokenizer.feed(token)])
                text += settled.text
                if settled.stop is not None:
                    self._stop_reason = settled.stop
                    return Kept(tokens[:count], text, FinishReason.STOP)
            if whole:
                return Kept(tokens, text + self._flush(), FinishReason.STOP)
            if total >= self.request.max_tokens:
                return Kept(tokens[:count], text + self._flush(), FinishReason.LENGTH)
        return Kept(tokens, text, None)

    def _flush(self) -> str:
        if self._detokenizer is None or self._stops is None:
            return ""
        return self._stops.flush(self._detokenizer.flush())

    def result(self) -> RequestOutput:
        """The whole output, once the request has ended."""
        request = self.request
        completion = CompletionOutput(
            index=self.index,
            token_ids=list(request.output_token_ids),
            text="".join(self._texts),
            finish_reason=request.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            error=request.error,
            error_kind=request.error_kind,
        )
        return RequestOutput(request.request_id, None, request.prompt_token_ids, [completion], request.metrics)
