"""What is said between the event loop and the engine's side: commands one way, what came of them the other.

Plain data, so that it can be said to another process. Must not know how it travels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from jaxspec.adaptive.policy import RoundStats
from jaxspec.events import Event
from jaxspec.facts import EngineFacts
from jaxspec.request import RequestMetrics, SamplingParams
from jaxspec.stats import EngineStats
from jaxspec.text.grammar import Grammar, GrammarSpec

if TYPE_CHECKING:
    from jaxspec.engine import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class Add:
    """Queue all completions of a prompt, or none; see Engine.add.

    Attributes:
      names: of the completions, by index; never used twice. The first one stands for the prompt.
      grammar: on its way to another process a spec, there a grammar that is still to come.
      grammar_bytes: memory that the grammar is taken to hold.
    """

    names: tuple[str, ...]
    tokens: list[int]
    params: SamplingParams
    arrival_time: float
    priority: int
    max_depth: int | None
    tpot: float | None
    grammar: Grammar | GrammarSpec | Future[Grammar] | None
    grammar_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """End completions of a prompt before the next step; those that have ended are passed over."""

    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Run a function with the engine between two steps, and say what it returned.

    Attributes:
      number: names the call in the answer.
      function: importable by its name, where it goes to another process.
    """

    number: int
    function: Callable[[Engine], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """End what is live, and then the engine's side."""


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """Nothing but a look at what there is to do; of the engine's side to itself."""


Command = Add | Abort | Call | Stop | Look


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """While the engine is built: how many executables have come, and how many there will be."""

    ready: int
    total: int


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """The engine is built and can serve.

    Attributes:
      description: what `describe` said of it.
    """

    facts: EngineFacts
    description: Any
    stats: EngineStats


@dataclasses.dataclass(slots=True)
class Turn:
    """What one step brought, with what was obeyed before it.

    Attributes:
      ended_at: of the step (time.monotonic, which all processes of a machine share).
      obeyed: commands so far.
      idle: nothing more is done before the next command.
      added: prompts (by their first names) that the engine has taken. refused: those that it has not, and why.
      dropped: those that were aborted before.
      events: of completions.
      rounds: finished ones.
      replies: (number of the call, whether it returned, what it returned or raised).
      stats: the engine's counters, now and then.
    """

    ended_at: float = 0.0
    obeyed: int = 0
    idle: bool = False
    added: list[str] = dataclasses.field(default_factory=list)
    refused: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    rounds: list[RoundStats] = dataclasses.field(default_factory=list)
    replies: list[tuple[int, bool, Any]] = dataclasses.field(default_factory=list)
    stats: EngineStats | None = None

    @property
    def says_something(self) -> bool:
        """Somebody has to hear of it."""
        parts = (self.idle, self.added, self.refused, self.dropped, self.events, self.rounds, self.replies)
        return any(parts) or self.stats is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Died:
    """The engine's side ended with an exception, and has said its last.

    Attributes:
      costs: of the completions that it had, by name.
    """

    error: BaseException
    costs: Mapping[str, RequestMetrics] = dataclasses.field(default_factory=dict)


Message = Compiled | Built | Turn | Died
Say = Callable[[Message], None]
#: Hears how many executables have come, of how many in all.
OnCompiled = Callable[[int, int], None]
