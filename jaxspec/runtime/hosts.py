"""The processes of an engine over several hosts: how they meet, what the first one tells, and how a loss is noticed.

The first process tells over a TCP connection to each of the others: that takes microseconds, waits for no device, and
says by its end that a process is gone. JAX's collectives carry the model's data, not plans: a broadcast would stand in
the devices' queue behind the round that runs. Messages are lengths and bytes, nothing that could be unpickled. Must
not know executables, nor what the messages mean.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.runtime.meeting import (
    ALIVE,
    MEET_SECONDS,
    PLANS,
    PULSE,
    SECRET_BYTES,
    HostLostError,
    accepted,
    connected,
    exactly,
    names,
    opened,
)

#: Seconds between two signs of life, those without one after which a process counts as lost, and those in which a
#: process that has lost another ends by itself, before it is ended (`join`).
_PULSE_SECONDS, _PATIENCE_SECONDS, _GRACE_SECONDS = 1.0, 10.0, 4.0
#: Seconds in which a loss is heard of after what it broke.
_HEAR_SECONDS = 5.0
#: Bytes of what the first process tells the others when they meet, and the most of an answer.
_TOLD_BYTES, _LONGEST_ANSWER = 1024, 1 << 18
_BYE = b"!"
_LENGTH = struct.Struct("<I")
_STOP = 2**32 - 1
#: What is said of values that differ: so many of them, each so long.
_DIFFERENCES, _LONGEST_VALUE = 4, 120
#: Between two looks for answers.
_LOOK_SECONDS = 0.005
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Place:
    """Which process of how many this is, as jax.distributed.initialize takes it.

    Attributes:
      coordinator: "host:port" of the first process.
      detected: by JAX, of an environment that it knows (SLURM, TPU pods, Open MPI).
    """

    coordinator: str
    num_processes: int
    process_id: int
    detected: bool = False

    @classmethod
    def detect(cls) -> Place:
        """As jax.distributed.initialize() without arguments would have it; touches no device.

        Raises:
          ValueError: JAX knows no such environment here.
        """
        from jax._src.clusters import ClusterEnv  # jax.distributed has no name for it but initialises at once

        timeout = int(MEET_SECONDS)
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, timeout)
        coordinator, num_processes, process_id = found[:3]
        if coordinator is None or num_processes is None or process_id is None:
            raise ValueError(
                "coordinator 'auto' needs an environment that JAX knows (SLURM, TPU pods, Open MPI), and there is "
                "none here; give coordinator, num_processes and process_id"
            )
        return cls(coordinator, num_processes, process_id, detected=True)


_joined: Place | None = None


def join(place: Place) -> None:
    """jax.distributed.initialize for a process that serves and nothing else.

    When it loses another process it ends, also where a collective hangs: there is nothing left for it to do.
    """
    global _joined
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from who drains
    jax.distributed.initialize(
        place.coordinator, place.num_processes, place.process_id,
        cluster_detection_method=None if place.detected else "deactivate", shutdown_timeout_seconds=10,
    )  # fmt: skip
    _joined = place


class Hosts:
    """The processes of one engine; `meet` makes it, in all of them at once.

    Attributes:
      leads: this is the first process, which decides; the others follow.
      count: processes.
      lost: which process is gone, once one is.
    """

    def __init__(self, plans: dict[int, socket.socket], pulses: dict[int, socket.socket]):
        self.leads, self.count = jax.process_index() == 0, jax.process_count()
        self.lost: HostLostError | None = None
        self._plans, self._pulses = plans, pulses
        self._came = {process: bytearray() for process in plans}
        self._over = self._left = False
        self._lock = threading.Lock()
        if self.leads:
            atexit.register(self.close)  # before JAX's own end, which waits for the others
        for process, pulse in pulses.items():
            args = process, pulse
            threading.Thread(target=self._watch, args=args, name=f"pulse-{process}", daemon=True).start()

    @classmethod
    def meet(cls) -> Hosts:
        """Connects the processes of jax.distributed; each calls it once for an engine, before all that may differ.

        Raises:
          ValueError: they have not all as many devices.
          HostLostError: they cannot reach the first one, or do not come.
        """
        _check_shares([device.process_index for device in jax.devices()], jax.process_count())
        leads = jax.process_index() == 0
        with contextlib.ExitStack() as held:
            listener = held.enter_context(opened()) if leads else None
            port = 0 if listener is None else listener.getsockname()[1]
            secret = secrets.token_bytes(SECRET_BYTES)
            told = json.dumps([port, secret.hex(), names()]).encode().ljust(_TOLD_BYTES)
            told = bytes(multihost_utils.broadcast_one_to_all(np.frombuffer(told[:_TOLD_BYTES], np.uint8)))
            port, text, known = json.loads(told)
            secret = bytes.fromhex(text)
            if listener is not None:
                return cls(*accepted(listener, secret, jax.process_count() - 1))
        known = [*([] if _joined is None else [_joined.coordinator.rpartition(":")[0].strip("[]")]), *known]
        plans, pulse = (connected(known, port, secret, kind) for kind in (PLANS, PULSE))
        return cls({0: plans}, {0: pulse})

    # Before it runs: in all processes at once, over their connections.

    def least(self, number: int) -> int:
        """The least of a number that each process has its own of.

        Raises:
          HostLostError: a process is gone.
        """
        return int(self._decided(number, lambda said: str(min(said))))

    def agree(self, what: Mapping[str, object]) -> None:
        """Whether all processes are about to run the same programs on the same weights.

        Args:
          what: that depends on, by name; compared as text. The same names in all processes.

        Raises:
          ValueError: they are not; in all of them, with the names and both values.
          HostLostError: a process is gone.
        """
        mine = {name: repr(value) for name, value in what.items()}
        if differ := self._decided(mine, _differences):
            self._over = True  # all of them end here, and none is lost
            self._leave()
            raise ValueError(f"all processes of an engine must have the same model, flags and versions: {differ}")

    def _decided(self, mine: object, decide: Callable[[list[Any]], str]) -> str:
        """What the first process makes of what all of them say, by process."""
        if not self.leads:
            self.answer(json.dumps(mine).encode())
            if (message := self.receive()) is None:
                raise HostLostError(f"process 0 of {self.count} ended before this engine was ready")
            return message.decode()
        said = {0: mine}
        while len(said) < self.count:
            said |= {process: json.loads(message) for process, message in self.answers()}
            time.sleep(_LOOK_SECONDS)
        decision = decide([said[process] for process in range(self.count)])
        self.send(decision.encode())
        return decision

    # While it runs.

    def send(self, message: bytes) -> None:
        """To every other process, in order. Of the first one.

        Raises:
          HostLostError: one is gone.
        """
        self.check()
        data = _LENGTH.pack(len(message)) + message
        for process, plans in self._plans.items():
            try:
                plans.sendall(data)
            except OSError as e:
                self._lose(process, str(e))
        self.check()

    def receive(self) -> bytearray | None:
        """The next message of the first process; None: the engine has ended.

        Raises:
          HostLostError: the first one is gone.
        """
        try:
            (size,) = _LENGTH.unpack(exactly(self._plans[0], _LENGTH.size))
            if size != _STOP:
                return exactly(self._plans[0], size)
            self._over = True
            self._leave()
            return None
        except (OSError, EOFError) as e:
            self._lose(0, str(e) or "its connection ended")
        self.check()
        raise AssertionError

    def answer(self, message: bytes) -> None:
        """To the first process, which may be doing anything else; of one thread at a time in each of the others.

        Raises:
          HostLostError: it is gone.
        """
        assert len(message) <= _LONGEST_ANSWER
        try:
            self._plans[0].sendall(_LENGTH.pack(len(message)) + message)
        except OSError as e:
            self._lose(0, str(e))
        self.check()

    def answers(self) -> list[tuple[int, bytes]]:
        """(process, message) of all answers that have come whole since the last time. Of the first one; never waits.

        Raises:
          HostLostError: a process is gone.
        """
        found = []
        for process, came in self._came.items():
            try:
                while data := self._plans[process].recv(_LONGEST_ANSWER, socket.MSG_DONTWAIT):
                    came += data
                self._lose(process, "its connection ended")
            except BlockingIOError:  # that was all
                pass
            except OSError as e:
                self._lose(process, str(e))
            while len(came) >= _LENGTH.size and len(came) >= (end := _LENGTH.size + _LENGTH.unpack_from(came)[0]):
                found.append((process, bytes(came[_LENGTH.size : end])))
                del came[:end]
        self.check()
        return found

    def check(self) -> None:
        """Raises HostLostError when a process is gone."""
        if self.lost is not None:
            raise HostLostError(str(self.lost))

    def blame(self, error: Exception) -> None:
        """Raises HostLostError when `error` came of a lost process, which may be heard of a moment later."""
        ends = time.monotonic() + _HEAR_SECONDS
        while self.lost is None and not self._over and time.monotonic() < ends:
            time.sleep(0.01)
        if self.lost is not None:
            raise HostLostError(str(self.lost)) from error

    def close(self) -> None:
        """Ends the engine in all processes; of the first one. Idempotent, and nothing once a process is lost."""
        atexit.unregister(self.close)
        with self._lock:
            if self._over or self.lost is not None:
                return
            self._over = True
        for plans in self._plans.values():
            with contextlib.suppress(OSError):
                plans.sendall(_LENGTH.pack(_STOP))
        self._leave()

    def _leave(self) -> None:
        """After the last message: what closes now is no loss."""
        with self._lock:
            if self._left:
                return
            self._left = True
        for pulse in self._pulses.values():
            with contextlib.suppress(OSError):
                pulse.sendall(_BYE)
        if _joined is not None:
            jax.distributed.shutdown()  # waits for the others, so that none takes the end of another for a loss

    def _watch(self, process: int, pulse: socket.socket) -> None:
        silent = 0.0  # not by the clock: while this process stands still, it hears nobody
        pulse.settimeout(_PULSE_SECONDS)
        try:
            while not self._over and self.lost is None:
                sent = time.monotonic()
                pulse.sendall(ALIVE)
                try:
                    came = pulse.recv(64)
                except TimeoutError:
                    silent += _PULSE_SECONDS
                    if silent >= _PATIENCE_SECONDS:
                        return self._lose(process, f"nothing was heard of it for {_PATIENCE_SECONDS:.0f} s")
                    continue
                if not came:
                    return self._lose(process, "its connection ended")
                if _BYE in came:
                    return
                silent, heard = 0.0, time.monotonic()
                time.sleep(_PULSE_SECONDS - (heard - sent) if heard - sent < _PULSE_SECONDS else 0.0)
        except OSError as e:
            self._lose(process, str(e))

    def _lose(self, process: int, why: str) -> None:
        with self._lock:
            if self._over or self.lost is not None:
                return
            self.lost = HostLostError(f"process {process} of {self.count}, which share this engine, was lost: {why}")
        _log.critical("%s", self.lost)
        # Who waits for a connection goes on, and the other processes hear of it.
        for connection in (*self._plans.values(), *self._pulses.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if _joined is not None:
            timer = threading.Timer(_GRACE_SECONDS, _end)
            timer.daemon = True
            timer.start()


def _check_shares(owners: Sequence[int], count: int) -> None:
    """Whether each process has as many devices; of all devices' processes, so all come to the same result."""
    shares = [owners.count(process) for process in range(count)]
    if len({*shares}) > 1:
        raise ValueError(
            f"all processes of an engine must have as many devices, got {shares} of processes 0 to {count - 1}"
        )


def _differences(said: Sequence[Mapping[str, str]]) -> str:
    """How what processes say differs from what the first one says, in words; "" where it does not."""
    found = []
    for name, first in said[0].items():
        for process, others in enumerate(said):
            if (other := others.get(name)) != first:
                a, b = _excerpts(first, str(other))
                found.append(f"{name} is {a} in process 0 and {b} in process {process}")
                break
    more = len(found) - _DIFFERENCES
    return "; ".join(found[:_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _excerpts(a: str, b: str) -> tuple[str, str]:
    """Two long texts from shortly before where they part."""
    parts = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begins = max(0, parts - _LONGEST_VALUE // 2) if max(len(a), len(b)) > _LONGEST_VALUE else 0
    cut = lambda text: "..." * (begins > 0) + text[begins : begins + _LONGEST_VALUE]
    return cut(a), cut(b)


def _end() -> None:
    logging.shutdown()
    os._exit(1)
