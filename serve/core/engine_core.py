"""The engine's side: builds the engine, steps it, obeys commands between two steps, and says what came of it.

Runs on one thread, wherever that is, and waits for nobody but for something to do. Must not know event loops, readers
or why a request was admitted.
"""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from jaxspec.events import Finished
from jaxspec.runtime.hosts import HostLostError
from jaxspec.text.grammar import Grammar
from serve.core.commands import (
    Abort,
    Add,
    Built,
    Call,
    Command,
    Compiled,
    Died,
    Look,
    OnCompiled,
    Say,
    Stop,
    Turn,
)

if TYPE_CHECKING:
    from jaxspec.engine import Engine

#: Completions, and tokens of their prompts, that are given to the engine between two steps: a burst waits in front of
#: it (about a millisecond's work), the running streams do not wait for a burst. A step starts one request at most.
INTAKE_COMPLETIONS, INTAKE_TOKENS = 16, 4096
#: Seconds between two snapshots of the engine's counters, while it works.
SNAPSHOT_SECONDS = 0.1
_log = logging.getLogger("serve")

#: {page: (page before it, or -1; its tokens, and the drafter's lookahead)}; a page comes after the one before it.
Pages = Mapping[int, tuple[int, tuple[int, ...]]]


class EngineCore:
    """An engine, what is asked of it and what is said of it.

    Args:
      build: makes the engine, on the thread that runs, and says meanwhile what is compiled; may take minutes.
      describe: asked of the engine once; what it returns is told with the engine's facts.
      say: hears every message, on the thread that runs; must not wait.
      freeze: take everything that exists once the engine is built out of the garbage collector's sight; for a process
        that does nothing else. A full collection over what tracing leaves behind takes about 0.2 seconds.

    Attributes:
      commands: anybody puts, the thread that runs takes.
    """

    def __init__(
        self, build: Callable[[OnCompiled], Engine], describe: Callable[[Engine], Any], say: Say, *,
        freeze: bool = False,
    ):  # fmt: skip
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._build, self._describe, self._say, self._freeze = build, describe, say, freeze
        self._waiting: dict[str, Add] = {}  # by the first name, in order; the engine has not heard of them
        self._live: set[str] = set()  # names that it has
        self._turn, self._obeyed, self._told_at = Turn(), 0, 0.0
        self._stopping = False

    def run(self) -> None:
        """Returns when it was stopped, or has died and said so."""
        engine = None
        try:
            engine = self._build(lambda ready, total: self._say(Compiled(ready, total)))
            description = self._describe(engine)
            if self._freeze:
                gc.collect()
                gc.freeze()
            engine.on_round = lambda stats: self._turn.rounds.append(stats)
            self._say(Built(engine.facts, description, engine.stats))
            while not self._stopping:
                self._take_turn(engine)
            engine.close()
        except BaseException as error:  # whatever it is: the loop must hear of it
            self._die(engine, error)

    def wake(self) -> None:
        """A grammar has come. From any thread."""
        self.commands.put(Look())

    def _take_turn(self, engine: Engine) -> None:
        """One step, and before it whatever was asked for meanwhile. Sleeps while there is nothing to do."""
        if not engine.has_work and not any(map(_is_ready, self._waiting.values())):
            warm = engine.warm  # before the counters are told: what is told last says so
            self._turn.idle = True
            self._flush(engine, tell=True)
            try:  # while it warms up, they change without a step
                command = self.commands.get(timeout=None if warm else SNAPSHOT_SECONDS)
            except queue.Empty:
                return
            self._obey(engine, command)
        while not self.commands.empty():
            self._obey(engine, self.commands.get())
        if self._waiting:
            self._take_in(engine)
        if engine.has_work and not self._stopping:
            events = engine.step()
            self._turn.events += events
            self._live.difference_update([event.request_id for event in events if isinstance(event, Finished)])
        self._flush(engine, tell=time.monotonic() - self._told_at >= SNAPSHOT_SECONDS)

    def _obey(self, engine: Engine, command: Command) -> None:
        self._obeyed += not isinstance(command, Look)
        match command:
            case Add():
                self._waiting[command.names[0]] = command
            case Abort():
                self._abort(engine, command.names)
            case Call():
                try:
                    reply = (command.number, True, command.function(engine))
                except HostLostError:  # no engine is left to answer
                    raise
                except Exception as e:
                    reply = (command.number, False, e)
                self._turn.replies.append(reply)
            case Stop():
                self._stopping = True
            case Look():
                pass

    def _abort(self, engine: Engine, names: tuple[str, ...]) -> None:
        if self._waiting.pop(names[0], None) is not None:
            self._turn.dropped.append(names[0])
            return
        for name in names:
            end = engine.abort(name)
            if end is not None:
                self._live.discard(name)
                self._turn.events.append(end)

    def _take_in(self, engine: Engine) -> None:
        """Gives the engine what waits, in order: a prompt whatever its size, and more within the bounds."""
        completions = tokens = 0
        for add in [add for add in self._waiting.values() if _is_ready(add)]:
            count, size = len(add.names), len(add.names) * len(add.tokens)
            if completions and (completions + count > INTAKE_COMPLETIONS or tokens + size > INTAKE_TOKENS):
                return
            completions, tokens = completions + count, tokens + size
            del self._waiting[add.names[0]]
            try:
                self._add(engine, add)
            except ValueError as e:
                self._turn.refused.append((add.names[0], str(e)))
            else:
                self._turn.added.append(add.names[0])

    def _add(self, engine: Engine, add: Add) -> None:
        """Gives the engine all completions of a prompt, or none; ValueError where it refuses one."""
        grammar = add.grammar.result() if isinstance(add.grammar, Future) else add.grammar
        assert grammar is None or isinstance(grammar, Grammar)
        taken: list[str] = []
        try:
            for index, name in enumerate(add.names):
                taken.append(
                    engine.add(
                        add.tokens, add.params, index=index, request_id=name, arrival_time=add.arrival_time,
                        priority=add.priority, max_depth=add.max_depth, tpot=add.tpot, grammar=grammar,
                    )
                )  # fmt: skip
        except BaseException:
            for name in taken:
                engine.abort(name)
            raise
        self._live.update(taken)

    def _flush(self, engine: Engine, *, tell: bool) -> None:
        """Says what there is to say, the engine's counters with it if they are to be told."""
        turn = self._turn
        if tell:
            backlog = sum(len(add.names) for add in self._waiting.values())
            stats = engine.stats
            stats.waiting += backlog
            turn.stats, self._told_at = stats, time.monotonic()
        if turn.says_something:
            turn.ended_at, turn.obeyed = time.monotonic(), self._obeyed
            self._turn = Turn()
            self._say(turn)

    def _die(self, engine: Engine | None, error: BaseException) -> None:
        costs = {}
        try:
            if engine is None and isinstance(error, ValueError):
                # What cannot be built, which whoever started it is told; there was no prompt yet.
                _log.debug("the engine could not be built", exc_info=error)
                _log.critical("the engine could not be built: %s", error)
            else:
                _log.critical("the engine died", exc_info=error)
            if engine is not None:
                costs = {name: cost for name in self._live if (cost := engine.metrics(name)) is not None}
        except Exception as e:
            _log.error("the dead engine's requests could not be counted", exc_info=e)
        finally:  # whatever else is broken: requests hang until the loop has heard
            self._say(Died(error, costs))


def _is_ready(add: Add) -> bool:
    """Its grammar has come, if it has one."""
    return not isinstance(add.grammar, Future) or add.grammar.done()


def cached_pages(engine: Engine) -> Pages:
    """The pages that the prefix cache can find; asked of the engine's side."""
    return engine.scheduler.prefix_cache.pages()
