"""Takes what a ring has gathered off the device: its buffer is exchanged for another, copied and written elsewhere.

No round waits for it, and no program runs: the exchange is of two references. Where the writer is behind, the ring runs
over and rows are lost. Must not know what the rows are for.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.runtime.runner import Runner
from jaxspec.speculation.ring import FeatureRing

#: Seconds after which what has come is taken, whether or not the ring is full.
_PATIENCE = 30.0
_log = logging.getLogger(__name__)


class _Buffer(NamedTuple):
    features: jax.Array
    about: jax.Array


#: What the writer is asked for; None: to end.
_Work = tuple[_Buffer, jax.Array] | threading.Event | None


class Collector:
    """Counts what is dispatched, and empties the ring in time.

    Args:
      runner: whose state has a ring.
      write: takes the rows (features [N, F], about [N, ABOUT]) on a thread of its own; OSError ends the collecting.

    Attributes:
      rows, lost: written so far, and those that came when the ring was full.
    """

    def __init__(self, runner: Runner, write: Callable[[np.ndarray, np.ndarray], None]):
        ring = runner.state.ring
        assert isinstance(ring, FeatureRing)
        self._runner, self._write = runner, write
        self._size = ring.features_RF.shape[0]
        self._most = runner.geo.most_features
        self._coming, self._since = 0, time.monotonic()
        self._spare: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
        self._spare.put(_Buffer(zeros(ring.features_RF), zeros(ring.about_RI)))
        self._full: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self.rows = self.lost = 0
        self._failed = False
        #: Exchanges so far: says which buffer rows are in.
        self.taken = 0
        weakref.finalize(self, self._full.put, None)
        args = self._full, weakref.ref(self)
        threading.Thread(target=_drain, args=args, name="feature ring", daemon=True).start()

    def dispatched(self, rows: int) -> None:
        """At most so many rows come of what was just dispatched; the next one may need room."""
        self._coming += rows
        full = self._coming + self._most > self._size
        if full or (self._coming and time.monotonic() - self._since > _PATIENCE):
            self._exchange()

    def collected(self, taken: int, most: int, rows: int) -> None:
        """Of the `most` rows that a dispatch was said to bring at most, so many came."""
        if taken == self.taken:
            self._coming -= most - rows

    def flush(self, timeout: float = 10.0) -> None:
        """Takes what there is, and returns when it is written."""
        if self._coming:
            self._exchange()
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
        state = self._runner.state
        ring = state.ring
        count = self._runner.put(np.zeros((), np.int32))
        self._runner.state = dataclasses.replace(
            state, ring=dataclasses.replace(ring, features_RF=spare.features, about_RI=spare.about, count=count)
        )
        if jax.default_backend() != "cpu":
            for array in (ring.features_RF, ring.about_RI):
                array.copy_to_host_async()
        self._full.put((_Buffer(ring.features_RF, ring.about_RI), ring.count))
        self._coming, self._since, self.taken = 0, time.monotonic(), self.taken + 1

    def _take(self, buffer: _Buffer, count: jax.Array) -> None:
        came = int(count)
        rows = min(came, self._size)
        self.lost += came - rows
        if rows and not self._failed:
            try:
                self._write(_host(buffer.features)[:rows], _host(buffer.about)[:rows])
                self.rows += rows
            except OSError as e:
                _log.warning("the feature ring is no longer written: %s", e)
                self._failed = True
        self._spare.put(buffer)


def _host(array: jax.Array) -> np.ndarray:
    """Its values. On a CPU a view that ends with its last reader: the array keeps none, so its memory can be reused."""
    on_cpu = all(device.platform == "cpu" for device in array.devices())
    shared: Any = array
    return np.from_dlpack(shared) if on_cpu and array.dtype != jnp.bfloat16 else np.asarray(array)


def _drain(full: queue.SimpleQueue[_Work], collector: weakref.ref[Collector]) -> None:
    while (item := full.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
        elif (alive := collector()) is not None:
            alive._take(*item)
        del item
        alive = None
