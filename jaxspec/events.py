"""What `Engine.step` says of its requests: one got its slot, one got tokens, one has ended.

Plain data, the same from the engine to the wire; whoever gets an event keeps it as it is. Standard library only. Must
not know who listens.
"""

from __future__ import annotations

import dataclasses

from jaxspec.request import FinishReason, Logprob, RequestOutput


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A request got its first slot; one that is preempted and resumes says nothing.

    Attributes:
      request_id, index: the completion.
      cached_prompt_tokens: found in the prefix cache.
      queue_seconds: from its arrival until now.
    """

    request_id: str
    index: int
    cached_prompt_tokens: int
    queue_seconds: float


@dataclasses.dataclass(slots=True)  # frozen, it would take three times as long to make
class Delta:
    """What was added to a completion; there may be tokens without text, and text (held back before) without tokens.

    Attributes:
      request_id, index: the completion.
      token_ids, text: since the delta before.
      logprobs: an entry for each token; None where not asked for.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """A completion's last event. Its last tokens came before, as a Delta.

    Attributes:
      request_id, index: the completion.
      reason: why it ended.
      output: the whole of it, with what it cost.
    """

    request_id: str
    index: int
    reason: FinishReason
    output: RequestOutput


Event = Started | Delta | Finished
