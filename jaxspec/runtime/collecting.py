"""Takes what a ring has gathered off the device: its buffer is exchanged for another, copied and written elsewhere.

No round waits for it: the exchange is of references. What it may cost is bounded by construction: a thread copies and
writes a small piece at a time, and after each one rests so long that it is busy for no more than its share of the time.
What comes faster finds the ring half full, and is left out, whole texts of it (`FeatureRing.admit`). Every device has
the whole ring, so of several processes the first one writes its own, and the others exchange theirs when it does. Must
not know what the rows are for.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.runtime.hosts import HostLostError
from jaxspec.runtime.runner import Runner
from jaxspec.speculation.ring import FeatureRing, split_rows

#: Seconds after which what has come is taken, whether or not the ring is full.
_PATIENCE = 30.0
#: Bytes that are copied and written between two rests: less than a millisecond's work.
_PIECE = 1 << 19
#: Pieces that are cut out before they are wanted: each waits for the rounds that were dispatched before it.
_AHEAD = 4
#: Seconds between two looks whether the device has got as far.
_LOOK = 1e-3
_log = logging.getLogger(__name__)

#: What the first process tells the others.
_EXCHANGE = "exchange the ring"

#: (rows, width and type of the features, columns of what they are of) -> what adds rows to a file, as a context.
OpenFile = Callable[[int, int, Any, int], AbstractContextManager[Callable[[np.ndarray, np.ndarray], None]]]


class _Buffer(NamedTuple):
    rows: jax.Array
    came: jax.Array

    @classmethod
    def empty(cls, runner: Runner) -> _Buffer:
        """Like the one that the runner's state has."""
        zeros = lambda x: runner.put(np.zeros(x.shape, x.dtype))
        return cls(zeros(runner.state.ring.rows_RX), zeros(runner.state.ring.count))

    def again(self, runner: Runner) -> _Buffer:
        """To be filled anew."""
        return _Buffer(self.rows, runner.put(np.zeros((), np.int32)))

    def exchanged(self, runner: Runner) -> _Buffer:
        """What comes goes in here from now on; returns where it went before."""
        state = runner.state
        before = _Buffer(state.ring.rows_RX, state.ring.count)
        ring = dataclasses.replace(state.ring, rows_RX=self.rows, count=self.came)
        runner.state = dataclasses.replace(state, ring=ring)
        return before


def follow_exchanges(runner: Runner) -> None:
    """In a process that follows: its ring's buffers are exchanged when the first process's are, and written nowhere."""
    spare = _Buffer.empty(runner)

    def exchange() -> None:
        nonlocal spare
        spare = spare.exchanged(runner).again(runner)

    runner.hear(_EXCHANGE, exchange)


#: What the writer is asked for; None: to end.
_Work = _Buffer | threading.Event | None


class Collector:
    """Counts what is dispatched, and empties the ring in time.

    Args:
      runner: whose state has a ring.
      open_file: is given the rows on a thread of its own; OSError ends the collecting.
      share: see the attribute.

    Attributes:
      share: of the time in which that thread may be busy, above 0 and at most 1; may be changed.
      rows, lost: written so far, and those of texts under way that came when the ring was full.
    """

    def __init__(self, runner: Runner, open_file: OpenFile, share: float):
        ring = runner.state.ring
        assert isinstance(ring, FeatureRing)
        self._runner, self._open, self.share = runner, open_file, share
        self._size, width = ring.rows_RX.shape
        self._piece = max(1, min(self._size, _PIECE // (width * ring.rows_RX.dtype.itemsize)))
        #: Rows at which the buffer is exchanged; more are room for what is under way.
        self._enough = self._size // 2
        self._coming, self._since = 0, time.monotonic()
        self._spare: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._spare.put(_Buffer.empty(runner))
        cut = lambda rows, at: jax.lax.dynamic_slice_in_dim(rows, at, self._piece)
        self._cut = jax.jit(cut).lower(_own(ring.rows_RX), np.int32(0)).compile()
        self._full: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self.rows = self.lost = 0
        self._failed = False
        #: Set while somebody waits for what is written: no rests then.
        self._hurry = threading.Event()
        #: Exchanges so far: says which buffer rows are in.
        self.taken = 0
        weakref.finalize(self, self._full.put, None)
        args = self._full, weakref.ref(self)
        threading.Thread(target=_drain, args=args, name="feature ring", daemon=True).start()

    def dispatched(self, rows: int) -> None:
        """At most so many rows come of what was just dispatched; the next one may need room."""
        self._coming += rows
        late = time.monotonic() - self._since > _PATIENCE
        if self._coming > self._enough or (self._coming and late):
            self._exchange()

    def collected(self, taken: int, most: int, rows: int) -> None:
        """Of the `most` rows that a dispatch was said to bring at most, so many came."""
        if taken == self.taken:
            self._coming -= most - rows

    def flush(self, timeout: float = 10.0) -> None:
        """Takes what there is, and returns when it is written."""
        self._hurry.set()
        try:
            self._written(timeout)  # which brings the spare buffer back
            if self._coming:
                with contextlib.suppress(HostLostError):  # what this process has is written all the same
                    self._exchange()
                self._written(timeout)
        finally:
            self._hurry.clear()

    def _written(self, timeout: float) -> None:
        done = threading.Event()
        self._full.put(done)
        done.wait(timeout)

    def _exchange(self) -> None:
        if self._failed:
            return
        try:
            spare = self._spare.get_nowait()
        except queue.Empty:  # the writer is behind
            return
        self._full.put(spare.exchanged(self._runner))
        self._runner.tell(_EXCHANGE)
        self._coming, self._since, self.taken = 0, time.monotonic(), self.taken + 1

    def _take(self, buffer: _Buffer) -> None:
        self._wait_for(buffer.came)
        came = int(_own(buffer.came))
        rows = min(came, self._size)
        self.lost += came - rows
        if rows and not self._failed:
            try:
                self._copy(_own(buffer.rows), rows)
                self.rows += rows
            except OSError as e:
                _log.warning("the feature ring is no longer written: %s", e)
                self._failed = True
        self._spare.put(buffer.again(self._runner))

    def _copy(self, rows_RX: jax.Array, count: int) -> None:
        """Writes the first rows, with rests."""
        began, parts = time.perf_counter(), collections.deque[tuple[int, jax.Array]]()
        pieces, last = -(-count // self._piece), self._size - self._piece
        features, about = split_rows(np.zeros((0, rows_RX.shape[1]), np.uint32))
        with self._open(count, features.shape[1], features.dtype, about.shape[1]) as add:
            for number in range(pieces + _AHEAD):
                if number < pieces:
                    start = number * self._piece
                    parts.append((start, self._cut(rows_RX, np.int32(min(start, last)))))
                if number < _AHEAD or not parts:
                    continue
                start, part = parts.popleft()
                began += self._wait_for(part)
                add(*split_rows(np.asarray(part)[start - min(start, last) :][: count - start]))
                del part
                self._rest(time.perf_counter() - began)
                began = time.perf_counter()
        self._rest(time.perf_counter() - began)

    def _wait_for(self, array: Any) -> float:
        """Returns when the device has it, after so many seconds, in which the processor does nothing."""
        began = time.perf_counter()
        while not array.is_ready():
            time.sleep(_LOOK)
        return time.perf_counter() - began

    def _rest(self, busy: float) -> None:
        """After so many seconds of work."""
        self._hurry.wait(busy * (1 / self.share - 1))


def _own(x: jax.Array) -> jax.Array:
    """What the first of this process's devices has of an array that each has whole."""
    return x.addressable_data(0)


def _drain(full: queue.SimpleQueue[_Work], collector: weakref.ref[Collector]) -> None:
    while (item := full.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
        elif (alive := collector()) is not None:
            alive._take(item)
        del item
        alive = None
