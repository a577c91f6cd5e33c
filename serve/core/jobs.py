"""What a client wants, in no protocol's words: servicers write jobs, the generator runs them.

Plain data. Must not know gRPC or the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.request import SamplingParams
from jaxspec.text.grammar import GrammarSpec


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation, to be rendered by the checkpoint's own template.

    Attributes:
      messages: {"role": ..., "content": ..., ...} each.
      add_generation_prompt: the template opens the assistant's turn.
      variables: reach the template by name (tools, ...).

    Raises:
      ValueError: no messages, or a variable that would hide them.
    """

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages must hold at least 1 message, got 0")
        reserved = sorted({"messages", "add_generation_prompt", "self"} & set(self.variables))
        if reserved:
            raise ValueError(f"template variables must not be named {reserved}: the conversation itself goes by them")


Prompt = str | tuple[int, ...] | Chat


@dataclasses.dataclass(frozen=True)
class Job:
    """One prompt and what is to be made of it.

    Attributes:
      request_id: unique among the server's live requests.
      prompt: a text, token ids, or a conversation.
      params: how to sample, `n` completions of it.
      fill_context: the client named no max_tokens: it becomes what the context leaves, at most the server's default.
      priority: lower runs first, within plus and minus ServerConfig.max_priority.
      max_depth: most drafts accepted in a round; 0 decodes token by token, None takes what the tier gives.
      grammar: what the output must parse as.
      route: label under which metrics count the job.
      tpot_ms, ttft_ms: what the client hopes for; nothing fails over it. The former weighs where drafts share a budget.
      deadline: on time.monotonic's clock; None: none.
      add_special_tokens: BOS and the like, for a text; templates write their own.
      stream: False: chunks come once, when a completion has ended, which spares the event loop every step between.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    fill_context: bool = False
    priority: int = 0
    max_depth: int | None = None
    grammar: GrammarSpec | None = None
    route: str = ""
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    deadline: float | None = None
    add_special_tokens: bool = True
    stream: bool = True
