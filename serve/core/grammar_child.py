"""A process that compiles grammars for their own sake: it has limits of time and memory, and may crash or be killed.

Holds both of its ends: `Child`, by which the server speaks with it, and its program, `python -m
serve.core.grammar_child`. It must not import JAX.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

from jaxspec.text.grammar import STACK_BYTES, GrammarCompiler, GrammarSpec
from jaxspec.text.matcher import SIMPLER

#: Processor seconds that a grammar may take to compile, and bytes that it may take besides the stack.
COMPILE_SECONDS, COMPILE_BYTES = 2.0, 256 * 2**20
#: Wall-clock seconds after which a compilation is given up, however little of the processor it got.
PATIENCE_SECONDS = 20.0
#: A compilation longer than this, by the wall clock, is a long one. All but one of the children run short ones only.
SHORT_SECONDS = 0.25
#: Seconds in which a child has to come up: it loads the tokenizer.
_START_SECONDS = 120.0
#: Address space that the allocator sets aside for the compiling thread.
_ARENA_BYTES = 128 * 2**20
_SLOW = f"takes more than {COMPILE_SECONDS:g} s to compile; {SIMPLER}"
_LARGE = f"takes more than {COMPILE_BYTES // 2**20} MiB to compile; {SIMPLER}"
#: What the signals mean that a child died of; others are taken for a lack of memory.
_DEATHS = {signal.SIGSEGV: "is nested too deeply", signal.SIGBUS: "is nested too deeply"}
if hasattr(signal, "SIGPROF"):
    _DEATHS[signal.SIGPROF] = _SLOW


class RefusedError(Exception):
    """The grammar is at fault; says why."""


class YieldError(Exception):
    """The grammar takes long, and another one that does is being compiled."""


class BrokenError(Exception):
    """The child does not come up, or is not let on; no grammar is at fault."""


class Child:
    """A process that compiles grammars for their own sake. One thread's, but for `end`."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._over = False

    def start(self) -> None:
        """Brings the process up unless it is.

        Raises:
          BrokenError: it does not come up.
        """
        if self._over:
            raise BrokenError("the server is stopped")
        if self._process is not None and self._process.poll() is None:
            return
        self._clear()
        paths = [path or os.getcwd() for path in sys.path]
        # Threads of numerical libraries would take address space, of which the child has little.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._pipe, end = Pipe()
            with end:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=end.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env,
                    start_new_session=True,  # Ctrl-C is for the server, which ends its children
                )  # fmt: skip
            if self._over:
                self._process.kill()
            setting = {
                "tokenizer": self._compiler.tokenizer_json,
                "vocab_size": self._compiler.vocab_size,
                "eos_token_ids": self._compiler.eos_token_ids,
                "seconds": COMPILE_SECONDS,
                "bytes": COMPILE_BYTES,
            }
            _send(self._pipe, setting)
            if self._pipe.poll(_START_SECONDS):
                _receive(self._pipe)
                return
            problem = f"its process took more than {_START_SECONDS:g} s to start"
        except (OSError, EOFError) as e:
            problem = f"its process does not start: {type(e).__name__}"
        self._clear()
        raise BrokenError(problem)

    def try_out(self, spec: GrammarSpec, may_take_long: Callable[[], bool]) -> int:
        """Compiles a grammar there; returns the bytes that it takes.

        Args:
          may_take_long: asked after SHORT_SECONDS.

        Raises:
          ValueError: it cannot be compiled. RefusedError: not within the limits. YieldError: it may not take long.
          BrokenError: the machine has no time for it.
        """
        pipe = self._give(spec)
        try:
            if not pipe.poll(SHORT_SECONDS):
                if not may_take_long():
                    self._clear()
                    raise YieldError
                if not pipe.poll(PATIENCE_SECONDS - SHORT_SECONDS):
                    self._clear()
                    raise BrokenError(f"it was not done after {PATIENCE_SECONDS:g} s on a busy machine")
            answer = _receive(pipe)
        except (OSError, EOFError):
            assert self._process is not None
            code = self._process.wait()
            if code >= 0:
                raise BrokenError(f"its process ended with code {code}") from None
            raise RefusedError(_DEATHS.get(signal.Signals(-code), _LARGE)) from None
        if "error" in answer:
            raise ValueError(answer["error"])
        return int(answer["bytes"])

    def _give(self, spec: GrammarSpec) -> Connection:
        """Hands a grammar over. A process that died or hangs before it has it is replaced: no grammar's fault."""
        for _ in range(2):
            self.start()
            assert self._pipe is not None
            with contextlib.suppress(OSError, EOFError):
                _send(self._pipe, {"kind": spec.kind, "value": spec.value})
                if self._pipe.poll(PATIENCE_SECONDS):
                    _receive(self._pipe)
                    return self._pipe
            self._clear()
        raise BrokenError("its process ends at once")

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
        if self._pipe is not None:
            self._pipe.close()


def _send(pipe: Connection, message: Mapping[str, object]) -> None:
    pipe.send_bytes(json.dumps(message).encode())  # no pickle: who answers has read what a stranger wrote


def _receive(pipe: Connection) -> dict[str, Any]:
    """The next message. Raises EOFError where there is none."""
    return json.loads(pipe.recv_bytes())


# The child.


def _serve(pipe: Connection) -> None:
    """Answers until nobody asks any more."""
    # Linux: where memory runs out, this process is the one to go.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")
    setting = _receive(pipe)
    compiler = GrammarCompiler(setting["tokenizer"], setting["vocab_size"], setting["eos_token_ids"])
    _limit_memory(setting["bytes"])
    with contextlib.suppress(ValueError):  # this vocabulary may not write JSON
        compiler.try_out(GrammarSpec("json_object"))  # what is loaded at the first use is
    _send(pipe, {})
    while True:
        try:
            message = _receive(pipe)
        except EOFError:
            return
        _send(pipe, {})  # from here on it is the grammar's fault
        value = message["value"]
        spec = GrammarSpec(message["kind"], tuple(value) if isinstance(value, list) else value)
        _limit_time(setting["seconds"])
        try:
            answer: dict[str, object] = {"bytes": _measured(compiler, spec)}
        except ValueError as e:
            answer = {"error": str(e)}
        except (MemoryError, RuntimeError):
            answer = {"error": f"the {spec.kind} {_LARGE}"}
        except BaseException as e:  # a panic of the library's
            answer = {"error": f"the {spec.kind} cannot be compiled: {type(e).__name__}"}
        _limit_time(0.0)
        _send(pipe, answer)
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
    _serve(Connection(os.dup(0)))
