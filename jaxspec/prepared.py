"""What a call asks for, checked, tokenized and compiled: all that may take its time and needs no step of the engine.

Owns Prepared and how prompts become it. Must not know who waits for the events, or how an engine came about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxspec.engine import Engine
from jaxspec.prompts import Prompt, as_list, params_for, text_and_ids
from jaxspec.request import SamplingParams
from jaxspec.text.grammar import Grammar, GrammarCompiler, GrammarLike, GrammarSpec

#: One for all prompts, or one each; None constrains nothing.
Grammars = GrammarLike | Sequence[GrammarLike | None] | None


@dataclasses.dataclass
class Prepared:
    """A prompt that lacks only the engine.

    Attributes:
      text: None where token ids were given.
      grammar: compiled; None constrains nothing.
    """

    text: str | None
    tokens: list[int]
    params: SamplingParams
    grammar: Grammar | None

    def add(
        self, engine: Engine, arrival_time: float, priority: int = 0, tpot: float | None = None,
        max_depth: int | None = None,
    ) -> list[str]:  # fmt: skip
        """Queues every completion; returns the engine's request ids, by completion index.

        Raises:
          ValueError: as Engine.add; nothing is queued.
        """
        ids: list[str] = []
        try:
            for index in range(self.params.n):
                ids.append(
                    engine.add(
                        self.tokens, self.params, index=index, grammar=self.grammar, arrival_time=arrival_time,
                        priority=priority, max_depth=max_depth, tpot=tpot,
                    )
                )  # fmt: skip
        except BaseException:
            for request_id in ids:
                engine.abort(request_id)
            raise
        return ids


def prepare(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, grammar: Grammars,
    encode: Callable[[str], list[int]], compiler: GrammarCompiler | None,
) -> list[Prepared]:  # fmt: skip
    """One for each prompt.

    Args:
      encode: token ids of a text. compiler: None refuses grammars.

    Raises:
      ValueError: as LLM.generate.
    """
    many = as_list(prompts)
    each = params_for(many, params)
    grammars = _grammars_for(many, grammar, compiler)
    prepared: list[Prepared] = []
    for position, (prompt, p, g) in enumerate(zip(many, each, grammars, strict=True)):
        text, ids = text_and_ids(prompt, position)
        prepared.append(Prepared(text, encode(text or "") if ids is None else ids, p, g))
    return prepared


def _grammars_for(
    prompts: Sequence[Prompt], grammar: Grammars, compiler: GrammarCompiler | None
) -> list[Grammar | None]:
    each = list(grammar) if isinstance(grammar, list | tuple) else [grammar] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"grammar must be one or one for each prompt: got {len(each)} for {len(prompts)}")
    specs = [None if one is None else GrammarSpec.of(one) for one in each]
    if compiler is None and any(specs):
        raise ValueError("a grammar needs LLM(structured_output=True) and a tokenizer that serves grammars")
    return [None if spec is None or compiler is None else compiler.compile(spec) for spec in specs]
