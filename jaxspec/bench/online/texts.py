"""Prompts for arrivals: built-in texts or a file's, at their own length or cut and grown to a trace's.

Owns which text a request sends and how long its prompt and output are. Must not know servers: token ids come from a
function. A prompt at its own length is sent as text. One of a given length is sent as token ids: text after text of
its kind, cut; all of it is drawn by the seed, so that every run of a plan sends the same.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

from jaxspec.bench.offline.workloads import Passage
from jaxspec.bench.online.arrivals import Arrival, Load

#: Kinds of the built-in texts.
KINDS = ("code", "prose")


@dataclasses.dataclass(frozen=True)
class Planned:
    """One request, ready to be sent.

    Attributes:
      route: the label it carries: its prompt's kind.
      prompt: a text, or token ids.
      prompt_tokens, max_tokens: its lengths.
    """

    index: int
    arrival: Arrival
    route: str
    prompt: str | tuple[int, ...]
    prompt_tokens: int
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """All requests of a load, in order of arrival.

    Attributes:
      cut_prompts, cut_outputs: requests whose length the server's context or --max-tokens shortened.
    """

    load: Load
    requests: tuple[Planned, ...]
    cut_prompts: int
    cut_outputs: int


async def tokenized(
    library: Mapping[str, Sequence[Passage]], tokenize: Callable[[str], Awaitable[Sequence[int]]]
) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """(text, its token ids) by kind."""
    return {kind: [(p.text, tuple(await tokenize(p.text))) for p in many] for kind, many in library.items()}


def plan(
    load: Load, library: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]], *, max_seq_len: int, max_tokens: int,
    seed: int = 0,
) -> Plan:  # fmt: skip
    """A prompt and lengths for every arrival.

    Args:
      library: texts with their token ids, by kind; each request draws a kind, then a text.
      max_seq_len: most tokens of prompt and output together.
      max_tokens: of requests whose arrival says nothing, and the most of those that do.

    Raises:
      ValueError: no room for any prompt, or a kind without texts.
    """
    if not 1 <= max_tokens < max_seq_len:
        raise ValueError(f"max-tokens must lie in [1, {max_seq_len - 1}] (the server's context), got {max_tokens}")
    empty = [kind for kind, many in library.items() if not any(ids for _, ids in many)]
    if empty or not library:
        raise ValueError(f"every kind of prompt needs a text with tokens, got none for {empty or 'any'}")
    rng = random.Random(f"prompts {seed}")
    kinds = sorted(library)
    requests: list[Planned] = []
    cut_prompts = cut_outputs = 0
    for index, arrival in enumerate(load.arrivals):
        output = min(arrival.output_tokens or max_tokens, max_tokens)
        cut_outputs += arrival.output_tokens is not None and output < arrival.output_tokens
        room = max_seq_len - output
        kind = rng.choice(kinds)
        usable = [entry for entry in library[kind] if entry[1]]
        text, ids = usable[rng.randrange(len(usable))]
        wanted = len(ids) if arrival.prompt_tokens is None else arrival.prompt_tokens
        length = min(wanted, room)
        cut_prompts += length < wanted
        prompt: str | tuple[int, ...] = text
        if length != len(ids) or arrival.prompt_tokens is not None:
            prompt = _sized(rng, ids, [entry[1] for entry in usable], length)
        requests.append(Planned(index, arrival, kind, prompt, length, output))
    return Plan(load, tuple(requests), cut_prompts, cut_outputs)


def _sized(
    rng: random.Random, first: Sequence[int], many: Sequence[Sequence[int]], length: int
) -> tuple[int, ...]:  # fmt: skip
    """`length` tokens: the first text's, then those of others in random order."""
    out = list(first)
    while len(out) < length:
        out += many[rng.randrange(len(many))]
    return tuple(out[:length])
