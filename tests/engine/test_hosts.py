"""Processes of one engine meet whoever else connects, and hear each other."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from typing import Any

import pytest

from jaxspec.runtime import hosts
from jaxspec.runtime.hosts import HostLostError, Hosts


def test_strangers_hold_nobody_up():
    """Silent ones, one that says less than a hello, one that guesses: all are let go once the others have come."""
    secret = secrets.token_bytes(hosts._SECRET_BYTES)
    with contextlib.ExitStack() as held:
        listener = held.enter_context(hosts._listener())
        port = listener.getsockname()[1]
        strangers = [held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(6)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n")
        strangers[1].sendall(hosts._HELLO.pack(bytes(hosts._SECRET_BYTES), 0, hosts._PLANS))
        strangers[2].close()
        found: list[Any] = []
        leader = threading.Thread(target=lambda: found.append(hosts._accepted(listener, secret, 1)), daemon=True)
        began = time.monotonic()
        leader.start()
        plans, pulse = (
            held.enter_context(hosts._connected(["127.0.0.1"], port, secret, kind))
            for kind in (hosts._PLANS, hosts._PULSE)
        )
        leader.join(10)
        assert time.monotonic() - began < 4, "less than what one silent stranger may take"
        ((theirs, pulses),) = found
        held.enter_context(theirs[0])
        held.enter_context(pulses[0])
        theirs[0].sendall(b"plan")
        pulse.sendall(b".")
        assert hosts._exactly(plans, 4) == b"plan" and hosts._exactly(pulses[0], 1) == b"."
        for stranger in (strangers[0], strangers[1], strangers[3]):
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "told a stranger something"


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch):
    """Also where strangers keep the port busy."""
    monkeypatch.setattr(hosts, "_MEET_SECONDS", 0.2)
    with (
        hosts._listener() as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5),
        pytest.raises(HostLostError, match=r"processes \[1, 2\] did not connect"),
    ):
        hosts._accepted(listener, bytes(hosts._SECRET_BYTES), 2)


def test_answers_come_whole_and_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch):
    """Of two processes, in whatever pieces; one that ends is lost."""
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 3)
    with contextlib.ExitStack() as held:
        ours, theirs = zip(*(map(held.enter_context, socket.socketpair()) for _ in range(2)), strict=True)
        leader = Hosts(dict(enumerate(ours, start=1)), {})
        others = [Hosts({0: connection}, {}) for connection in theirs]
        assert leader.answers() == []
        others[0].answer(b"first")
        others[0].answer(b"")
        others[1].answer(long := bytes(range(256)) * 256)
        whole = hosts._LENGTH.pack(6) + b"second"
        theirs[0].sendall(whole[:3])
        assert leader.answers() == [(1, b"first"), (1, b""), (2, long)]
        theirs[0].sendall(whole[3:8])
        assert leader.answers() == []
        theirs[0].sendall(whole[8:])
        assert leader.answers() == [(1, b"second")]
        theirs[1].close()
        with pytest.raises(HostLostError, match="process 2 of 3, .* its connection ended"):
            leader.answers()


def test_a_server_ends_though_a_collective_hangs(monkeypatch: pytest.MonkeyPatch):
    """As NCCL's may when a peer is gone: nothing that ends the process waits for what the devices compute."""
    ended = threading.Event()
    monkeypatch.setattr(hosts, "_GRACE_SECONDS", 0.05)
    monkeypatch.setattr(hosts, "_end", ended.set)
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    for joined in (None, hosts.Place("127.0.0.1:1", 2, 0)):
        monkeypatch.setattr(hosts, "_joined", joined)
        ours, theirs = socket.socketpair()
        with ours:
            host = Hosts({}, {1: ours})
            theirs.close()  # a killed process; this one's thread would hang in a collective
            assert ended.wait(None if joined else 0.3) == bool(joined), "who calls an LLM keeps the process"
            assert "process 1 of 2" in str(host.lost)
