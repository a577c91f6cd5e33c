"""Processes of one engine meet whoever else connects, and hear each other."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from jaxspec import alike
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.runtime import hosts, meeting
from jaxspec.runtime.hosts import HostLostError, Hosts


def test_strangers_hold_nobody_up(monkeypatch: pytest.MonkeyPatch):
    """Silent ones, one that says less than a hello, one that guesses: all are let go once the others have come."""
    monkeypatch.setattr(meeting, "MEET_SECONDS", 1000.0)
    secret = secrets.token_bytes(meeting.SECRET_BYTES)
    with contextlib.ExitStack() as held:
        listener = held.enter_context(meeting.opened())
        port = listener.getsockname()[1]
        strangers = [held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=100)) for _ in range(6)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n")
        strangers[1].sendall(meeting._HELLO.pack(bytes(meeting.SECRET_BYTES), 0, meeting.PLANS))
        strangers[2].close()
        found: list[Any] = []
        leader = threading.Thread(target=lambda: found.append(meeting.accepted(listener, secret, 1)), daemon=True)
        leader.start()
        plans, pulse = (
            held.enter_context(meeting.connected(["127.0.0.1"], port, secret, kind))
            for kind in (meeting.PLANS, meeting.PULSE)
        )
        leader.join(100)
        assert not leader.is_alive(), "a silent stranger held it up"
        ((theirs, pulses),) = found
        held.enter_context(theirs[0])
        held.enter_context(pulses[0])
        theirs[0].sendall(b"plan")
        pulse.sendall(b".")
        assert meeting.exactly(plans, 4) == b"plan" and meeting.exactly(pulses[0], 1) == b"."
        for stranger in (strangers[0], strangers[1], strangers[3]):
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "told a stranger something"


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch):
    """Also where strangers keep the port busy."""
    monkeypatch.setattr(meeting, "MEET_SECONDS", 0.2)
    with (
        meeting.opened() as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=100),
        pytest.raises(HostLostError, match=r"processes \[1, 2\] did not connect"),
    ):
        meeting.accepted(listener, bytes(meeting.SECRET_BYTES), 2)


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


def decide(monkeypatch: pytest.MonkeyPatch, asked: Sequence[Callable[[Hosts], Any]]) -> list[Any]:
    """What each process gets, or the error: each asks on a thread of its own."""
    monkeypatch.setattr(hosts.jax, "process_count", lambda: len(asked))
    found: list[Any] = [None] * len(asked)

    def ask(process: int, own: Hosts) -> None:
        try:
            found[process] = asked[process](own)
        except (ValueError, HostLostError) as e:
            found[process] = e

    with contextlib.ExitStack() as held:
        ours, theirs = zip(*(map(held.enter_context, socket.socketpair()) for _ in asked[1:]), strict=True)
        monkeypatch.setattr(hosts.jax, "process_index", lambda: 0)
        processes = [Hosts(dict(enumerate(ours, start=1)), {})]
        monkeypatch.setattr(hosts.jax, "process_index", lambda: 1)
        processes += [Hosts({0: connection}, {}) for connection in theirs]
        threads = [threading.Thread(target=ask, args=each, daemon=True) for each in enumerate(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
    return found


def test_all_hear_what_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Names and both values, in each process, so that none waits for one that has ended; and the least of a number."""
    assert decide(monkeypatch, [lambda own, n=n: own.least(n) for n in (7, 5, 6)]) == [5, 5, 5]
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        weights = bytearray(1 << 20)
        weights[600_000:] = bytes([name == "c"]) * (len(weights) - 600_000)
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    flags = lambda **fields: alike.versions_and_flags(SpeculationConfig(depth=3), EngineConfig(**fields))
    files = lambda name: alike.files(tmp_path / name, None)
    agreed = [
        {**flags(compile_cache=False), **files("a")},
        {**flags(keep_learnt="there", memory_fraction=0.5), **files("b")},
    ]
    assert decide(monkeypatch, [lambda own, what=what: own.agree(what) for what in agreed]) == [None, None]
    agreed.append({**flags(num_pages=40), **files("c")})
    for error in decide(monkeypatch, [lambda own, what=what: own.agree(what) for what in agreed]):
        assert isinstance(error, ValueError)
        assert "num_pages is None in process 0 and 40 in process 2; the model's model.safetensors is '" in str(error)
    lost = decide(monkeypatch, [lambda own: own.least(1), lambda own: own._plans[0].close(), lambda own: own.least(2)])
    assert isinstance(lost[0], HostLostError) and isinstance(lost[2], HostLostError)


def test_long_values_are_shown_where_they_part():
    said = [{"same": "1", "long": "x" * 300 + "a" * 300}, {"same": "1", "long": "x" * 300 + "b" * 300}]
    told = hosts._differences(said)
    assert told == f"long is ...{'x' * 60}{'a' * 60} in process 0 and ...{'x' * 60}{'b' * 60} in process 1"
    many = [{str(i): "1" for i in range(9)}, {}]
    assert hosts._differences(many).endswith("3 is 1 in process 0 and None in process 1; and 5 more")


def test_processes_bring_as_many_devices():
    hosts._check_shares([0, 1, 1, 0], 2)
    with pytest.raises(ValueError, match=r"as many devices, got \[2, 1\] of processes 0 to 1"):
        hosts._check_shares([0, 0, 1], 2)


def test_silence_is_counted_in_looks(monkeypatch: pytest.MonkeyPatch):
    """A process that stood still heard nobody meanwhile, and loses none for it; one that stays silent is lost."""
    monkeypatch.setattr(hosts, "_PULSE_SECONDS", 2.5)  # four looks within the patience
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    host = Hosts({}, {})

    class Pulse:
        """Says what it is told to; a minute goes by at every look."""

        def __init__(self, *heard: bytes):
            self.heard, self.looks = iter(heard), 0

        settimeout = sendall = lambda self, what: None

        def recv(self, size: int) -> bytes:
            self.looks += 1
            now[0] += 60.0
            if came := next(self.heard, b""):
                return came
            raise TimeoutError

    now = [0.0]
    monkeypatch.setattr(hosts, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    pulse = Pulse(b"", b"", b"", b".", b"", b"", b"", b".")
    host._watch(1, cast(socket.socket, pulse))
    assert pulse.looks == 12 and "nothing was heard of it for 10 s" in str(host.lost)


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
            while host.lost is None:
                time.sleep(0.01)
            assert ended.wait(None if joined else 0.3) == bool(joined), "who calls an LLM keeps the process"
            assert "process 1 of 2" in str(host.lost)
