"""Processes of one engine meet whoever else connects, and an engine of several refuses what one process alone has."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxspec import assemble
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.models.tiny import tiny_config
from jaxspec.runtime import hosts
from jaxspec.runtime.hosts import HostLostError
from jaxspec.swapping import DrafterWeights


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


@pytest.mark.parametrize("name", ["suffix_corpus_tokens", "feature_ring"])
def test_options_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Refused before the processes meet; an engine within one process may have them beside others."""
    monkeypatch.setattr(assemble, "spans_processes", lambda shards: shards > 1)
    monkeypatch.setattr(assemble.jax, "process_count", lambda: 3)
    corpus = {"suffix_corpus_tokens": 64, "suffix_corpus_responses": True} if name != "feature_ring" else {}
    config = EngineConfig(tensor_parallel=2, feature_ring=None if corpus else tmp_path)
    value, target = 64 if corpus else tmp_path, cast("Any", SimpleNamespace(config=tiny_config(vocab_size=16)))
    with pytest.raises(ValueError, match=f"{name} is for engines of one process, got '{value}' for 3 processes"):
        assemble.assemble(target, None, SpeculationConfig(**corpus), config, drafter=None, progress=False)


def test_shared_engines_keep_their_drafters_weights():
    runner = SimpleNamespace(drafter=object(), has_draft_params=True, staged=lambda params: params)
    weights = DrafterWeights(cast("Any", runner), assemble._fixed)
    with pytest.raises(ValueError, match="several processes share keeps its drafter's weights, got 'new'"):
        weights.load("new")
