"""Grammars of strangers: each is compiled in a process that may be killed before it is compiled in this one.

A compilation cannot be interrupted, and sources of a few bytes can take minutes, gigabytes, or the process. So a
grammar that is not known yet is first tried by a child process, which has limits of time and memory and may crash;
what it survived takes as long here, and no longer. This module is also the child's program: python -m
serve.core.grammar_trials. It must not import JAX.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Any

import grpc

from jaxspec.text.grammar import STACK_BYTES, Grammar, GrammarCompiler, GrammarSpec
from serve.core.errors import StatusError, invalid, unavailable

#: Processor seconds that a grammar may take to compile, and bytes that it may take besides the stack.
COMPILE_SECONDS, COMPILE_BYTES = 2.0, 256 * 2**20
#: Wall-clock seconds after which a compilation is given up, however little of the processor it got.
PATIENCE_SECONDS = 20.0
#: A compilation longer than this, by the wall clock, is a long one. All but one of the children run short ones only.
SHORT_SECONDS = 0.25
#: Children, each with a thread that asks it.
CHILDREN = 2
#: Memory that all compiled grammars of the server may take together, in the cache and in use.
MAX_HELD_BYTES = 2**30
#: Seconds in which a child has to come up: it loads the tokenizer.
_START_SECONDS = 120.0
#: Address space that the allocator sets aside for the compiling thread.
_ARENA_BYTES = 128 * 2**20
_LENGTH = struct.Struct("!I")
_SLOW = f"takes more than {COMPILE_SECONDS:g} s to compile"
_LARGE = f"takes more than {COMPILE_BYTES // 2**20} MiB to compile"
#: What the signals mean that a child died of; others are taken for a lack of memory.
_DEATHS = {signal.SIGSEGV: "is nested too deeply", signal.SIGBUS: "is nested too deeply"}
if hasattr(signal, "SIGPROF"):
    _DEATHS[signal.SIGPROF] = _SLOW


class _RefusedError(Exception):
    """The grammar is at fault; says why."""


class _YieldError(Exception):
    """The grammar takes long, and another one that does is being compiled."""


class _BrokenError(Exception):
    """The child does not come up, or is not let on; no grammar is at fault."""


@dataclasses.dataclass(eq=False)
class _Task:
    """A grammar on its way.

    Attributes:
      done: its grammar or a StatusError, for all who wait.
      waiters: how many do.
    """

    compiler: GrammarCompiler
    spec: GrammarSpec
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Grammar]
    waiters: int = 0


class GrammarTrials:
    """Compiles grammars, each after a trial. Event loop only; threads and children start with the first grammar.

    First come, first served, but for long compilations, which wait for each other: each of them delays those behind it
    by SHORT_SECONDS and the start of a process at most. Grammars that are known wait for nothing.

    Args:
      max_waiting: grammars that may be under way; more are refused.
    """

    def __init__(self, max_waiting: int):
        self._max_waiting = max_waiting
        self._tasks: dict[GrammarSpec, _Task] = {}
        self._changed = threading.Condition()
        # Below: under the condition's lock.
        self._short: deque[_Task] = deque()
        self._long: deque[_Task] = deque()
        self._running_long: _Task | None = None
        self._closed = False
        self._children: list[_Child] = []
        self._threads: list[threading.Thread] = []

    @property
    def pending(self) -> int:
        """Grammars that wait or are being compiled; one whose client has left counts until the thread is done."""
        return len(self._tasks)

    async def compile(self, compiler: GrammarCompiler, spec: GrammarSpec) -> Grammar:
        """The grammar of a spec.

        Raises:
          StatusError: INVALID_ARGUMENT (it cannot be compiled, or not within the limits); RESOURCE_EXHAUSTED (too many
            are under way, or those in use take too much memory); UNAVAILABLE (closed, or no child comes up).
        """
        known = compiler.known(spec)
        if known is not None:
            return known
        task = self._tasks.get(spec) or self._enqueue(compiler, spec)
        task.waiters += 1
        try:
            return await asyncio.shield(task.done)
        except StatusError as e:
            raise e.again() from None
        finally:
            task.waiters -= 1
            self._drop_unwanted(task)

    def close(self) -> None:
        """Ends the children and, at their next turn, the threads; whoever waits hears UNAVAILABLE. Idempotent."""
        with self._changed:
            self._closed = True
            self._short.clear()
            self._long.clear()
            children = list(self._children)
            self._changed.notify_all()
        for child in children:
            child.end()
        for task in self._tasks.values():
            if not task.done.done():
                task.done.set_exception(_stopped())
        self._tasks.clear()

    def _enqueue(self, compiler: GrammarCompiler, spec: GrammarSpec) -> _Task:
        if self._closed:
            raise _stopped()
        if self.pending >= self._max_waiting:
            message = f"{self.pending} grammars are being compiled"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, 1.0, reason="preparing")
        loop = asyncio.get_running_loop()
        task = self._tasks[spec] = _Task(compiler, spec, loop, loop.create_future())
        task.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits
        with self._changed:
            self._short.append(task)
            self._changed.notify()
        while len(self._threads) < CHILDREN:
            thread = threading.Thread(target=self._work, args=(compiler,), name="grammar", daemon=True)
            self._threads.append(thread)
            thread.start()
        return task

    def _drop_unwanted(self, task: _Task) -> None:
        """Drops it where nobody waits for it any more, unless it has begun."""
        if task.waiters:
            return
        with self._changed:
            for queue in (self._short, self._long):
                if task in queue:
                    queue.remove(task)
                    break
            else:
                return
        self._forget(task)

    def _forget(self, task: _Task) -> None:
        if self._tasks.get(task.spec) is task:
            del self._tasks[task.spec]

    def _settle(self, task: _Task, grammar: Grammar | None, error: StatusError | None) -> None:
        self._forget(task)
        if task.done.done():
            return
        if grammar is not None:
            task.done.set_result(grammar)
        else:
            assert error is not None
            task.done.set_exception(error)

    # The threads' side.

    def _work(self, compiler: GrammarCompiler) -> None:
        child = _Child(compiler)
        with self._changed:
            self._children.append(child)
            if self._closed:
                return
        try:
            self._restart(child)
            while self._serve_next(child):
                self._restart(child)  # what was killed comes up while nobody waits for it
        finally:
            child.close()

    def _serve_next(self, child: _Child) -> bool:
        """Waits for a task and does it; False where no more will come. A thread that waits holds no grammar."""
        task = self._next()
        if task is not None:
            self._serve(child, task)
        return task is not None

    def _restart(self, child: _Child) -> None:
        with contextlib.suppress(_BrokenError):  # the next grammar's client hears of it
            child.start()

    def _next(self) -> _Task | None:
        with self._changed:
            while not self._closed:
                if self._short:
                    return self._short.popleft()
                if self._long and self._running_long is None:
                    self._running_long = self._long.popleft()
                    return self._running_long
                self._changed.wait()
            return None

    def _serve(self, child: _Child, task: _Task) -> None:
        grammar, error = None, None
        try:
            grammar = self._try(child, task)
        except _YieldError:
            with self._changed:
                self._long.append(task)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                task.loop.call_soon_threadsafe(self._drop_unwanted, task)
            return
        except _RefusedError as e:
            error = invalid(f"the {task.spec.kind} {e}")
        except ValueError as e:
            error = invalid(str(e))
        except _BrokenError as e:
            error = _stopped() if self._closed else unavailable(f"no grammar can be compiled: {e}", "grammar")
        except StatusError as e:
            error = e
        except Exception as e:  # of this process's own compilation, such as no memory for a thread
            error = unavailable(f"the grammar could not be compiled: {type(e).__name__}: {e}", "grammar")
        finally:
            with self._changed:
                if self._running_long is task:
                    self._running_long = None
                    self._changed.notify()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            task.loop.call_soon_threadsafe(self._settle, task, grammar, error)

    def _try(self, child: _Child, task: _Task) -> Grammar:
        size = child.try_out(task.spec, lambda: self._may_take_long(task))
        compiler = task.compiler
        if compiler.held_bytes + size > MAX_HELD_BYTES:
            compiler.shrink(0)
        if compiler.held_bytes + size > MAX_HELD_BYTES:
            message = "the grammars in use take all the memory that the server has for them"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, 1.0, reason="grammar_memory")
        return compiler.compile(task.spec, size)

    def _may_take_long(self, task: _Task) -> bool:
        """Called when a compilation turns out to be a long one: whether no other one is running."""
        with self._changed:
            if self._running_long is None:
                self._running_long = task
            return self._running_long is task


def _stopped() -> StatusError:
    return unavailable("the server is stopped", "stopped")


class _Child:
    """A process that compiles grammars for their own sake. One thread's, but for `end`."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def start(self) -> None:
        """Brings the process up unless it is.

        Raises:
          _BrokenError: it does not come up.
        """
        if self._over:
            raise _BrokenError("the server is stopped")
        if self._process is not None and self._process.poll() is None:
            return
        self._clear()
        paths = [path or os.getcwd() for path in sys.path]
        # Threads of numerical libraries would take address space, of which the child has little.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serve.core.grammar_trials"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env,
                bufsize=0,  # what is waited for must not lie in a buffer
                start_new_session=True,  # Ctrl-C is for the server, which ends its children
            )  # fmt: skip
            if self._over:
                self._process.kill()
            self._send(
                {
                    "tokenizer": self._compiler.tokenizer_json,
                    "vocab_size": self._compiler.vocab_size,
                    "eos_token_ids": self._compiler.eos_token_ids,
                    "seconds": COMPILE_SECONDS,
                    "bytes": COMPILE_BYTES,
                }
            )
            if self._wait(_START_SECONDS):
                _receive(self._output)
                return
            problem = f"its process took more than {_START_SECONDS:g} s to start"
        except (OSError, EOFError) as e:
            problem = f"its process does not start: {type(e).__name__}"
        self._clear()
        raise _BrokenError(problem)

    def try_out(self, spec: GrammarSpec, may_take_long: Callable[[], bool]) -> int:
        """Compiles a grammar there; returns the bytes that it takes.

        Args:
          may_take_long: asked after SHORT_SECONDS.

        Raises:
          ValueError: it cannot be compiled. _RefusedError: not within the limits. _YieldError: it may not take long.
          _BrokenError: the machine has no time for it.
        """
        self._give(spec)
        try:
            if not self._wait(SHORT_SECONDS):
                if not may_take_long():
                    self._clear()
                    raise _YieldError
                if not self._wait(PATIENCE_SECONDS - SHORT_SECONDS):
                    self._clear()
                    raise _BrokenError(f"it was not done after {PATIENCE_SECONDS:g} s on a busy machine")
            answer = _receive(self._output)
        except (OSError, EOFError):
            assert self._process is not None
            code = self._process.wait()
            if code >= 0:
                raise _BrokenError(f"its process ended with code {code}") from None
            raise _RefusedError(_DEATHS.get(signal.Signals(-code), _LARGE)) from None
        if "error" in answer:
            raise ValueError(answer["error"])
        return int(answer["bytes"])

    def _give(self, spec: GrammarSpec) -> None:
        """Hands a grammar over. A process that died or hangs before it has it is replaced: no grammar's fault."""
        for _ in range(2):
            self.start()
            with contextlib.suppress(OSError, EOFError):
                self._send({"kind": spec.kind, "value": spec.value})
                if self._wait(PATIENCE_SECONDS):
                    _receive(self._output)
                    return
            self._clear()
        raise _BrokenError("its process ends at once")

    def end(self) -> None:
        """Ends the process for good. From any thread: who waits for it hears that it has died."""
        self._over = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process for good and waits until it is gone."""
        self.end()
        self._clear()

    def _clear(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    @property
    def _output(self) -> IO[bytes]:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout

    def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        _send(self._process.stdin, message)

    def _wait(self, seconds: float) -> bool:
        """Whether an answer, or the end, came within so many seconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            return bool(selector.select(seconds))


def _send(stream: IO[bytes], message: Any) -> None:
    data = json.dumps(message).encode()
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[stream.write(left) :]
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """The next message. Raises EOFError where there is none."""
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return json.loads(_exactly(stream, length))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


# The child.


def _child(source: IO[bytes], sink: IO[bytes]) -> None:
    """Answers until nobody asks any more."""
    # Linux: where memory runs out, this process is the one to go.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")
    setting = _receive(source)
    compiler = GrammarCompiler(setting["tokenizer"], setting["vocab_size"], setting["eos_token_ids"])
    _limit_memory(setting["bytes"])
    with contextlib.suppress(ValueError):  # this vocabulary may not write JSON
        compiler.try_out(GrammarSpec("json_object"))  # what is loaded at the first use is
    _send(sink, {})
    while True:
        try:
            message = _receive(source)
        except EOFError:
            return
        _send(sink, {})  # from here on it is the grammar's fault
        value = message["value"]
        spec = GrammarSpec(message["kind"], tuple(value) if isinstance(value, list) else value)
        _limit_time(setting["seconds"])
        try:
            answer: dict[str, Any] = {"bytes": _measured(compiler, spec)}
        except ValueError as e:
            answer = {"error": str(e)}
        except (MemoryError, RuntimeError):
            answer = {"error": f"the {spec.kind} {_LARGE}"}
        except BaseException as e:  # a panic of the library's
            answer = {"error": f"the {spec.kind} cannot be compiled: {type(e).__name__}"}
        _limit_time(0.0)
        _send(sink, answer)
        _trim()


def _measured(compiler: GrammarCompiler, spec: GrammarSpec) -> int:
    before = _memory()[1]
    grammar = compiler.try_out(spec)  # held until the memory was looked at
    size = max(0, _memory()[1] - before)
    del grammar
    return size


def _limit_memory(size: int) -> None:
    """Lets grammars take so many bytes, where the platform can say so; once, before the first is compiled."""
    if address_space := _memory()[0]:
        _set_limit("RLIMIT_AS", address_space + STACK_BYTES + _ARENA_BYTES + size)
    _set_limit("RLIMIT_CORE", 0)


def _limit_time(seconds: float) -> None:
    """Ends the process once it has run for so long, by the processor's time; zero: never."""
    if hasattr(signal, "setitimer"):  # not on every platform; elsewhere patience is the limit
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _set_limit(name: str, value: int) -> None:
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):  # not on every platform
        import resource

        what = getattr(resource, name)
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _memory() -> tuple[int, int]:
    """(address space, resident memory) of this process in bytes; zeros where the platform does not tell."""
    try:
        with open("/proc/self/statm") as f:
            pages = f.read().split()
    except OSError:
        return 0, 0
    size = os.sysconf("SC_PAGE_SIZE")
    return int(pages[0]) * size, int(pages[1]) * size


def _trim() -> None:
    """Gives back what the last grammar has freed: it would hide what the next one takes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    # What a library may print must not get between the answers.
    with os.fdopen(os.dup(1), "wb") as answers, open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        _child(sys.stdin.buffer, answers)
