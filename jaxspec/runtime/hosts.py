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
import hashlib
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import cast

import jax
import numpy as np
from jax.experimental import multihost_utils

#: Seconds between two signs of life, those without one after which a process counts as lost, and those in which a
#: process that has lost another ends by itself, before it is ended (`join`).
_PULSE_SECONDS, _PATIENCE_SECONDS, _GRACE_SECONDS = 1.0, 10.0, 4.0
#: Seconds in which the processes of an engine have to meet, and in which a loss is heard of after what it broke.
_MEET_SECONDS, _HEAR_SECONDS = 120.0, 5.0
_SECRET_BYTES, _MEET_BYTES = 32, 1024
#: What a connection is for.
_PLANS, _PULSE = b"P", b"H"
_ALIVE, _BYE = b".", b"!"
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sHc")
_LENGTH = struct.Struct("<I")
_STOP = 2**32 - 1
_LONGEST_ANSWER = 1 << 16
_log = logging.getLogger(__name__)


class HostLostError(RuntimeError):
    """A process without which this engine cannot go on is gone."""


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

        timeout = int(_MEET_SECONDS)
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
        """Connects the processes of jax.distributed; each calls it once for an engine.

        Raises:
          HostLostError: they cannot reach the first one, or do not come.
        """
        leads = jax.process_index() == 0
        with contextlib.ExitStack() as held:
            listener = held.enter_context(_listener()) if leads else None
            port = 0 if listener is None else listener.getsockname()[1]
            secret = secrets.token_bytes(_SECRET_BYTES)
            told = json.dumps([port, secret.hex(), _names()]).encode().ljust(_MEET_BYTES)
            told = bytes(multihost_utils.broadcast_one_to_all(np.frombuffer(told[:_MEET_BYTES], np.uint8)))
            port, text, names = json.loads(told)
            secret = bytes.fromhex(text)
            if listener is not None:
                return cls(*_accepted(listener, secret, jax.process_count() - 1))
        names = [*([] if _joined is None else [_joined.coordinator.rpartition(":")[0].strip("[]")]), *names]
        plans, pulse = (_connected(names, port, secret, kind) for kind in (_PLANS, _PULSE))
        return cls({0: plans}, {0: pulse})

    # Before it runs: in all processes at once.

    def least(self, number: int) -> int:
        """The least of a number that each process has its own of."""
        return int(multihost_utils.process_allgather(np.int64(number).astype(np.int32)).min())

    def agree(self, what: Sequence[object]) -> None:
        """Whether all processes are about to run the same programs.

        Args:
          what: the programs depend on; compared as text.

        Raises:
          ValueError: they are not.
        """
        mine = hashlib.sha256("\n".join(map(repr, what)).encode()).digest()
        all_ = np.asarray(multihost_utils.process_allgather(np.frombuffer(mine, np.uint8)))
        others = [process for process, row in enumerate(all_) if row.tobytes() != all_[0].tobytes()]
        if others:
            raise ValueError(
                f"all processes of an engine must have the same model, flags and versions: those of processes {others} "
                f"differ from the first one's; this is process {jax.process_index()} with {[*what]}"
            )

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
            (size,) = _LENGTH.unpack(_exactly(self._plans[0], _LENGTH.size))
            if size != _STOP:
                return _exactly(self._plans[0], size)
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
        heard = time.monotonic()
        pulse.settimeout(_PULSE_SECONDS)
        try:
            while not self._over and self.lost is None:
                sent = time.monotonic()
                pulse.sendall(_ALIVE)
                try:
                    came = pulse.recv(64)
                except TimeoutError:
                    if time.monotonic() - heard > _PATIENCE_SECONDS:
                        return self._lose(process, f"nothing was heard of it for {_PATIENCE_SECONDS:.0f} s")
                    continue
                if not came:
                    return self._lose(process, "its connection ended")
                if _BYE in came:
                    return
                heard = time.monotonic()
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


def _end() -> None:
    logging.shutdown()
    os._exit(1)


# Meeting.


def _names() -> list[str]:
    """Under which names and addresses other machines may reach this one."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: says which address would
        found.append(probe.getsockname()[0])
    return [*dict.fromkeys(found), "127.0.0.1"]


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accepted(
    listener: socket.socket, secret: bytes, others: int
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """The connections (for plans, for signs of life) of all other processes, by process.

    All that connect are heard at once, so that strangers who say nothing hold nobody up.
    """
    found: dict[bytes, dict[int, socket.socket]] = {_PLANS: {}, _PULSE: {}}
    ends = time.monotonic() + _MEET_SECONDS
    listener.setblocking(False)
    with selectors.DefaultSelector() as coming:
        coming.register(listener, selectors.EVENT_READ)
        try:
            while sum(map(len, found.values())) < 2 * others:
                if (left := ends - time.monotonic()) <= 0:
                    missing = sorted({*range(1, others + 1)} - {*found[_PULSE]})
                    raise HostLostError(f"processes {missing} did not connect within {_MEET_SECONDS:.0f} s")
                for key, _ in coming.select(left):
                    if key.data is None:
                        with contextlib.suppress(OSError):  # gone again
                            coming.register(_unblocked(listener), selectors.EVENT_READ, bytearray())
                    elif (hello := _heard(cast("socket.socket", key.fileobj), key.data)) is not None:
                        coming.unregister(connection := cast("socket.socket", key.fileobj))
                        if (who := _known(connection, hello, secret)) is not None:
                            found[who[1]][who[0]] = _quick(connection)
        finally:
            for key in list(coming.get_map().values()):
                if key.data is not None:
                    cast("socket.socket", key.fileobj).close()
    return found[_PLANS], found[_PULSE]


def _unblocked(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.setblocking(False)
    return connection


def _heard(connection: socket.socket, hello: bytearray) -> bytearray | None:
    """Adds what has come to a hello; None: not whole yet. One that ended before is shorter."""
    try:
        came = connection.recv(_HELLO.size - len(hello))
    except BlockingIOError:
        return None
    except OSError:
        return hello
    hello += came
    return None if came and len(hello) < _HELLO.size else hello


def _known(connection: socket.socket, hello: bytearray, secret: bytes) -> tuple[int, bytes] | None:
    """Which process said hello, and what for; closes the connection of anybody else."""
    with contextlib.suppress(OSError, struct.error):
        theirs, process, kind = _HELLO.unpack(hello)
        if hmac.compare_digest(theirs, secret) and kind in (_PLANS, _PULSE):
            connection.sendall(_ALIVE)
            return process, kind
    connection.close()
    return None


def _connected(names: Sequence[str], port: int, secret: bytes, kind: bytes) -> socket.socket:
    tried: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            connection = socket.create_connection((name, port), timeout=5.0)
            connection.sendall(_HELLO.pack(secret, jax.process_index(), kind))
            _exactly(connection, 1)  # another machine's port would not answer
        except (OSError, EOFError) as e:
            tried[name] = str(e)
            continue
        return _quick(connection)
    raise HostLostError(f"the first process cannot be reached at port {port}: {tried}")


def _quick(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return data
