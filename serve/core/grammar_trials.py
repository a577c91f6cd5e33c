"""Grammars of strangers: each is compiled in a process that may be killed before it is compiled in this one.

A compilation cannot be interrupted, and sources of a few bytes can take minutes, gigabytes, or the process. So a
grammar that is not known yet is first tried by a child process (grammar_child.py); what it survived takes as long here,
and no longer. Owns who is next, who waits for whom, and what all grammars may hold together.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections import deque

import grpc

from jaxspec.text.grammar import Grammar, GrammarCompiler, GrammarSpec
from serve.core.errors import StatusError, invalid, unavailable
from serve.core.grammar_child import BrokenError, Child, RefusedError, YieldError

#: Children, each with a thread that asks it.
CHILDREN = 2
#: Memory that all compiled grammars of the server may take together, in the cache and in use.
MAX_HELD_BYTES = 2**30


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
        self._children: list[Child] = []
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

    def _settle(self, task: _Task, outcome: Grammar | StatusError) -> None:
        self._forget(task)
        if not task.done.done():
            if isinstance(outcome, StatusError):
                task.done.set_exception(outcome)
            else:
                task.done.set_result(outcome)

    # The threads' side.

    def _work(self, compiler: GrammarCompiler) -> None:
        child = Child(compiler)
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

    def _serve_next(self, child: Child) -> bool:
        """Waits for a task and does it; False where no more will come. A thread that waits holds no grammar."""
        task = self._next()
        if task is not None:
            self._serve(child, task)
        return task is not None

    def _restart(self, child: Child) -> None:
        with contextlib.suppress(BrokenError):  # the next grammar's client hears of it
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

    def _serve(self, child: Child, task: _Task) -> None:
        outcome: Grammar | StatusError
        try:
            outcome = self._try(child, task)
        except YieldError:
            with self._changed:
                self._long.append(task)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                task.loop.call_soon_threadsafe(self._drop_unwanted, task)
            return
        except RefusedError as e:
            outcome = invalid(f"the {task.spec.kind} {e}")
        except ValueError as e:
            outcome = invalid(str(e))
        except BrokenError as e:
            outcome = _stopped() if self._closed else unavailable(f"no grammar can be compiled: {e}", "grammar")
        except StatusError as e:
            outcome = e
        except Exception as e:  # of this process's own compilation, such as no memory for a thread
            outcome = unavailable(f"the grammar could not be compiled: {type(e).__name__}: {e}", "grammar")
        finally:
            with self._changed:
                if self._running_long is task:
                    self._running_long = None
                    self._changed.notify()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            task.loop.call_soon_threadsafe(self._settle, task, outcome)

    def _try(self, child: Child, task: _Task) -> Grammar:
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
