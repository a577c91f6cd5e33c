"""How the processes of an engine find each other: an open port of the first one, and a secret that all of them have.

Whoever connects and does not know the secret is told nothing and holds nobody up. Must not know what the connections
are for, but that each process has one for plans and one for signs of life.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import cast

import jax

#: Seconds in which the processes of an engine have to meet.
MEET_SECONDS = 120.0
SECRET_BYTES = 32
#: What a connection is for.
PLANS, PULSE = b"P", b"H"
#: A sign of life.
ALIVE = b"."
_HELLO = struct.Struct(f"<{SECRET_BYTES}sHc")


class HostLostError(RuntimeError):
    """A process without which this engine cannot go on is gone."""


def names() -> list[str]:
    """Under which names and addresses other machines may reach this one."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: says which address would
        found.append(probe.getsockname()[0])
    return [*dict.fromkeys(found), "127.0.0.1"]


def opened() -> socket.socket:
    """A free port of all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accepted(
    listener: socket.socket, secret: bytes, others: int
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """The connections (for plans, for signs of life) of all other processes, by process.

    All that connect are heard at once, so that strangers who say nothing hold nobody up.

    Raises:
      HostLostError: not all came in time.
    """
    found: dict[bytes, dict[int, socket.socket]] = {PLANS: {}, PULSE: {}}
    ends = time.monotonic() + MEET_SECONDS
    listener.setblocking(False)
    with selectors.DefaultSelector() as coming:
        coming.register(listener, selectors.EVENT_READ)
        try:
            while sum(map(len, found.values())) < 2 * others:
                if (left := ends - time.monotonic()) <= 0:
                    missing = sorted({*range(1, others + 1)} - {*found[PULSE]})
                    raise HostLostError(f"processes {missing} did not connect within {MEET_SECONDS:.0f} s")
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
    return found[PLANS], found[PULSE]


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
        if hmac.compare_digest(theirs, secret) and kind in (PLANS, PULSE):
            connection.sendall(ALIVE)
            return process, kind
    connection.close()
    return None


def connected(names: Sequence[str], port: int, secret: bytes, kind: bytes) -> socket.socket:
    """A connection to the first process.

    Args:
      names: under which it may be reached, tried in this order.

    Raises:
      HostLostError: it is under none of them.
    """
    tried: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            connection = socket.create_connection((name, port), timeout=5.0)
            connection.sendall(_HELLO.pack(secret, jax.process_index(), kind))
            exactly(connection, 1)  # another machine's port would not answer
        except (OSError, EOFError) as e:
            tried[name] = str(e)
            continue
        return _quick(connection)
    raise HostLostError(f"the first process cannot be reached at port {port}: {tried}")


def _quick(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def exactly(connection: socket.socket, size: int) -> bytearray:
    """So many bytes.

    Raises:
      EOFError: the connection ended before.
    """
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return data
