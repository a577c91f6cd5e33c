"""The engine's side in a process of its own, so that nothing the server does takes the interpreter from a step.

Holds both of its ends: `ProcessLink`, by which the event loop reaches it, and `main`, its program. They speak over a
pair of sockets that nobody else can open, so pickles are safe there; what strangers sent crosses it as plain data. The
child ends with its parent, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import logging
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from jaxspec.events import Delta
from jaxspec.text.grammar import Grammar, GrammarCompiler, GrammarSpec
from serve.core.commands import Add, Built, Command, Compiled, Died, Message, OnCompiled, Say, Stop, Turn
from serve.core.engine_core import EngineCore

if TYPE_CHECKING:
    from jaxspec.engine import Engine

#: In front of each message: its length in bytes.
_HEAD = struct.Struct("<Q")
_READ_BYTES = 2**18
#: Seconds between two looks whether a child that has closed its end is gone, and how many there are.
_REAP_SECONDS, _REAP_LOOKS = 0.01, 200
#: How long the child waits for the server to take its last messages.
_LAST_WORDS_SECONDS = 5.0
#: How long another thread of the child, such as one that traces what is to be compiled, may compute before the engine
#: gets its turn. Python's own 5 ms are several rounds.
_SWITCH_SECONDS = 0.0005

_log = logging.getLogger("serve")


class EngineEndedError(RuntimeError):
    """The engine's process ended without a word."""


class Child:
    """A process that waits to be told which engine to build.

    Args:
      preload: a module that it imports meanwhile.
    """

    def __init__(self, preload: str = ""):
        self.socket, theirs = socket.socketpair()
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import {__name__} as m; m.main()", str(theirs.fileno()), preload],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), env=env,
                start_new_session=True,  # Ctrl-C is for the server, which ends its children
            )  # fmt: skip

    def end(self) -> None:
        """Kills it if it is still there."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel still frees what it had
            self.process.wait(timeout=5.0)
        self.socket.close()


class ProcessLink:
    """To a process of its own.

    Args:
      build, describe: see EngineCore; functions of modules, or partials of such with plain data.
      child: one that was started before; None: one is when the link is.
    """

    def __init__(
        self, build: Callable[[OnCompiled], Engine], describe: Callable[[Engine], Any], child: Child | None = None
    ):
        self._setting, self._child = (build, describe), child
        self._process: subprocess.Popen[bytes] | None = None
        self._unread, self._unsent = bytearray(), bytearray()
        self._held: list[Message] | None = None  # while what came before them is not ready yet
        self._ended = False  # said its last, or was told to

    @property
    def pid(self) -> int | None:
        """Of the process; None before the start."""
        return None if self._process is None else self._process.pid

    def start(self, hear: Say) -> None:
        self._loop, self._hear = asyncio.get_running_loop(), hear
        self._child = self._child or Child()
        self._process, self._socket = self._child.process, self._child.socket
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._on_readable)
        self._send(self._setting)

    def post(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._ended = True
        if isinstance(command, Add) and isinstance(command.grammar, Grammar):
            spec, size = command.grammar.spec, command.grammar.size_bytes
            command = dataclasses.replace(command, grammar=spec, grammar_bytes=size)
        self._send(command)

    @property
    def alive(self) -> bool:
        """The process runs, or its last messages have not been read."""
        return self._process is not None and (self._process.poll() is None or self._socket.fileno() >= 0)

    def cut(self) -> None:
        """Kills the process if it is still there."""
        if self._process is None or self._child is None:
            return
        self._ended = True
        self._close()
        self._child.end()

    def _send(self, message: object) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        was_empty = not self._unsent
        self._unsent += _HEAD.pack(len(data)) + data
        if was_empty:
            self._on_writable()

    def _on_writable(self) -> None:
        if self._socket.fileno() < 0:
            self._unsent.clear()
            return
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # its end is closed, which the reader hears
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._socket, self._on_writable)
        else:
            self._loop.remove_writer(self._socket)

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            self._await_end(_REAP_LOOKS)
            return
        self._unread += data
        try:
            for message in _messages(self._unread):
                self._take(message)
        except Exception as error:  # what follows cannot be made sense of either
            self.cut()
            self._tell(Died(error))

    def _take(self, data: Any) -> None:
        if isinstance(data, tuple):
            self._tell(_unpacked(data))
            return
        self._ended = self._ended or isinstance(data, Died)
        if isinstance(data, _Grammars):  # a large vocabulary's compiler takes a second
            self._held = []
            self._loop.run_in_executor(None, data.built).add_done_callback(self._on_compiler)
        else:
            self._tell(data)

    def _on_compiler(self, built: asyncio.Future[Built]) -> None:
        held, self._held = self._held or [], None
        error = built.exception()
        self._tell(built.result() if error is None else Died(error))
        for message in held:
            self._tell(message)

    def _tell(self, message: Message) -> None:
        if self._held is not None:
            self._held.append(message)
        else:
            self._hear(message)

    def _await_end(self, looks: int) -> None:
        """Says that it died, and of what, once that can be known."""
        assert self._process is not None
        code = self._process.poll()
        if code is None and looks and not self._ended:
            self._loop.call_later(_REAP_SECONDS, self._await_end, looks - 1)
        elif not self._ended:
            self._ended = True
            self._tell(Died(EngineEndedError(f"the engine's process {_end_of(code)}")))

    def _close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()


def _end_of(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    return f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def _messages(unread: bytearray) -> list[Any]:
    """The whole messages at the beginning, which are taken away."""
    found, at = [], 0
    with memoryview(unread) as view:
        while len(unread) - at >= _HEAD.size:
            (size,) = _HEAD.unpack_from(view, at)
            if len(unread) - at - _HEAD.size < size:
                break
            at += _HEAD.size
            found.append(pickle.loads(view[at : at + size]))
            at += size
    del unread[:at]
    return found


# A turn crosses as a tuple of plain data: objects of dataclasses take many times as long.


def _packed(turn: Turn) -> tuple[Any, ...]:
    events = [(e.request_id, e.index, e.token_ids, e.text, e.logprobs) if type(e) is Delta else e for e in turn.events]
    return (
        turn.ended_at, turn.obeyed, turn.idle, turn.added, turn.refused, turn.dropped, events, turn.rounds,
        turn.replies, turn.stats,
    )  # fmt: skip


def _unpacked(data: tuple[Any, ...]) -> Turn:
    turn = Turn(*data)
    events: list[Any] = turn.events
    turn.events = [Delta(*e) if type(e) is tuple else e for e in events]
    return turn


@dataclasses.dataclass(frozen=True)
class _Grammars:
    """An engine that takes grammars, whose compiler cannot cross: each side has its own.

    Attributes:
      message: without it.
      vocab_size, eos_token_ids: of the compiler.
    """

    message: Built
    vocab_size: int
    eos_token_ids: list[int]

    def built(self) -> Built:
        """With a compiler."""
        tokenizer = self.message.facts.tokenizer
        assert tokenizer is not None
        compiler = GrammarCompiler(tokenizer, self.vocab_size, self.eos_token_ids)
        return dataclasses.replace(self.message, facts=dataclasses.replace(self.message.facts, grammars=compiler))


# The child.


class _Outlet:
    """Where the child's messages leave it: on a thread of their own, which works while the engine's waits."""

    def __init__(self, end: socket.socket):
        self.grammars: GrammarCompiler | None = None
        self._end = end
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="messages", daemon=True)
        self._thread.start()

    def say(self, message: Message) -> None:
        """Returns at once."""
        if isinstance(message, Built):
            self.grammars = message.facts.grammars
        self._queue.put(message)

    def close(self, seconds: float) -> None:
        """Returns when all was sent, or after so long."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._end.sendall(_framed(message))
            except OSError:
                os._exit(1)  # nobody is left to serve


def _framed(message: Message) -> bytes:
    try:
        body = pickle.dumps(_portable(message), pickle.HIGHEST_PROTOCOL)
    except Exception as e:  # an answer that is no plain data
        if not isinstance(message, Turn) or not message.replies:
            raise
        error = TypeError(f"what was returned or raised cannot be told to another process: {e}")
        message.replies = [(number, False, error) for number, _, _ in message.replies]
        body = pickle.dumps(_packed(message), pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body)) + body


def _portable(message: Message) -> object:
    match message:
        case Turn():
            return _packed(message)
        case Built():
            return _with_recipe(message)
        case Compiled():
            return message
        case Died():
            return Died(_plain(message.error), message.costs)


def _with_recipe(message: Built) -> Built | _Grammars:
    grammars = message.facts.grammars
    if grammars is None:
        return message
    bare = dataclasses.replace(message, facts=dataclasses.replace(message.facts, grammars=None))
    return _Grammars(bare, grammars.vocab_size, grammars.eos_token_ids)


def _plain(error: BaseException) -> BaseException:
    """The same where it can cross and comes out as it was, else its words."""
    with contextlib.suppress(Exception):
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    return RuntimeError(str(error) or type(error).__name__)


class _Inlet:
    """Where commands come in, on a thread: puts them before the engine, and compiles their grammars beside it."""

    def __init__(self, end: socket.socket, outlet: _Outlet, core: EngineCore):
        self._end, self._outlet, self._core = end, outlet, core
        self._compilers = ThreadPoolExecutor(1, "grammar")

    def run(self) -> None:
        """Ends the process when the server is gone."""
        try:
            while True:
                self._core.commands.put(self._ready(_read(self._end)))
        except BaseException as error:
            if not isinstance(error, OSError | EOFError):
                _log.critical("a command cannot be read", exc_info=error)
                logging.shutdown()
            os._exit(1)

    def _ready(self, command: Command) -> Command:
        if not isinstance(command, Add) or not isinstance(command.grammar, GrammarSpec):
            return command
        compiler = self._outlet.grammars
        assert compiler is not None
        coming = self._compilers.submit(_compiled, compiler, command.grammar, command.grammar_bytes)
        coming.add_done_callback(lambda _: self._core.wake())
        return dataclasses.replace(command, grammar=coming)


def _compiled(compiler: GrammarCompiler, spec: GrammarSpec, size: int) -> Grammar:
    try:
        return compiler.compile(spec, size)
    except ValueError:
        raise
    except Exception as e:  # such as no memory for a thread: the engine goes on
        raise ValueError(f"the grammar could not be compiled: {type(e).__name__}: {e}") from e


def _read(end: socket.socket) -> Any:
    (size,) = _HEAD.unpack(_exactly(end, _HEAD.size))
    return pickle.loads(_exactly(end, size))


def _exactly(end: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = end.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return data


def main() -> None:
    """Serves a socket; the command line is its number, and a module to import before."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server's to obey, also where a whole group is told
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_SECONDS)
    end = socket.socket(fileno=int(sys.argv[1]))
    if sys.argv[2]:
        importlib.import_module(sys.argv[2])
    try:
        build, describe = _read(end)
    except EOFError:
        os._exit(1)
    outlet = _Outlet(end)
    core = EngineCore(build, describe, outlet.say, freeze=True)
    threading.Thread(target=_Inlet(end, outlet, core).run, name="commands", daemon=True).start()
    core.run()
    outlet.close(_LAST_WORDS_SECONDS)
    logging.shutdown()
    os._exit(0)  # it may still compile, and would be torn down under its feet
