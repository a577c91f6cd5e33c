"""What an engine is, for good: sizes, vocabulary, tokenizer and grammars, and which requests they can serve.

Immutable, so that any thread may ask. Must not know the runner, nor what is live.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.request import SamplingParams
from jaxspec.sizes import Sizes
from jaxspec.text.grammar import Grammar, GrammarCompiler
from jaxspec.text.tokenizer import Tokenizer

#: End tokens of a checkpoint that a row of the device state can ban.
_MAX_BANNED = 8


@dataclasses.dataclass(frozen=True)
class EngineFacts:
    """What never changes once an engine is built.

    Attributes:
      sizes: slots, pages and the context.
      buckets: padded batch sizes, ascending.
      vocab_size: of the model's output.
      samples: whether rows may be sampled; else all are plainly greedy.
      eos: token ids that end a text.
      tokenizer: None for token-in, token-out use (no text, no stop strings).
      grammars: compiles what requests may bring as their grammar; None: none are taken.
      drafter, policy: what it was built with, by the names of their kinds (a policy may be a path).
      dtype: of weights and pages.
      objective: by which rule requests that ask for a time per token get it (adaptive.objectives).
      chats: template arguments of the chats that the drafter learned from, each once (text.modes); empty: nothing says.
      identity: what costs depend on, as texts: device, model, drafter and the like; see CostProfile.
    """

    sizes: Sizes
    buckets: tuple[int, ...]
    vocab_size: int
    samples: bool
    eos: frozenset[int]
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler | None
    drafter: str = "none"
    policy: str = "off"
    dtype: str = "float32"
    objective: str = "cumulative"
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chats: Sequence[Mapping[str, Any]] = ()

    def check(self, params: SamplingParams, grammar: Grammar | None) -> None:
        """Whether such a request can be honoured; `checked` looks at its prompt, Sizes.allowed at its length.

        Raises:
          ValueError: names the field, and both values.
        """
        params.check_vocabulary(self.vocab_size)
        if not params.plain_greedy and not self.samples:
            raise ValueError("this engine has variants ('greedy',) only, and these parameters need 'sampled'")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {params.stop!r} need a tokenizer, and this engine has none")
        if params.masks_stop_tokens and len(self.eos) > _MAX_BANNED:
            raise ValueError(
                f"min_tokens can ban {_MAX_BANNED} end tokens of the checkpoint, but it has {len(self.eos)}"
            )
        if params.allowed_token_ids is not None and params.min_tokens:
            banned = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos)}
            if banned.issuperset(params.allowed_token_ids):
                raise ValueError(
                    f"allowed_token_ids must hold a token that min_tokens = {params.min_tokens} does not forbid, got "
                    f"{list(params.allowed_token_ids)}"
                )
        if grammar is not None:
            self._check_grammar(grammar, params)

    def _check_grammar(self, grammar: Grammar, params: SamplingParams) -> None:
        if self.grammars is None:
            raise ValueError(
                "a grammar needs an engine with EngineConfig.structured_output and a tokenizer that serves grammars"
            )
        if grammar.vocab_size != self.vocab_size:
            raise ValueError(
                f"the grammar was compiled for {grammar.vocab_size} tokens, "
                f"but this engine's vocabulary has {self.vocab_size}"
            )
        if params.allowed_token_ids is not None:
            raise ValueError("allowed_token_ids must be left out with a grammar, which says what a text may be")
        if params.min_tokens:
            raise ValueError(
                f"min_tokens must be 0 with a grammar, which says when a text ends, got {params.min_tokens}"
            )

    def checked(self, ids: Sequence[int], name: str = "prompt token ids") -> list[int]:
        """A copy of token ids, of the vocabulary each.

        Args:
          name: of the ids, for the error.

        Raises:
          ValueError: a token that is no integer or not of the vocabulary.
        """
        tokens = list(ids)
        if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= self.vocab_size):
            for token in tokens:
                integral = isinstance(token, numbers.Integral) and not isinstance(token, bool)
                if not integral or not 0 <= int(token) < self.vocab_size:
                    raise ValueError(f"{name} must lie in [0, {self.vocab_size}), got {token!r}")
            return [int(token) for token in tokens]
        return tokens
