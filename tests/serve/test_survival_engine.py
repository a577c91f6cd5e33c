"""What a generation server must survive of its model, its drafter, its engine and its process, over a real socket.

After each: the engine lives, pages and tables are back at their baseline, and what ran beside it is unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wires import Code, Wire, ask, served, survives

from jaxspec.adaptive.estimate import CostEstimate
from serve.proto import admin_pb2
from serve.proto import generation_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]


# What the model and the drafter can do to it.


def test_penalties_go_together_with_speculation(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        assert await wire.read(ask("abab", **shape)) == tokens
        off = ask("abab", **shape)
        off.speculation.enabled = False
        assert await wire.read(off) == tokens

    shape = dict(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.25)
    tokens = expected("abab", **shape)
    survives(kit, expected, harm)


#: "g", which no sound output beside them holds.
POISONED = 6


def test_logits_that_are_not_finite_end_one_request_alone(kit: Any, expected: Any, monkeypatch: pytest.MonkeyPatch):
    """NaN in the embedding of a token: in a prompt, and after some tokens of an output."""

    async def harm(wire: Wire) -> None:
        for request in (ask("gabc"), ask("a" * 30 + "g" + "a" * 10), ask("abc", logit_bias={POISONED: 100.0})):
            error = await wire.status(request)
            assert error.code() is Code.INTERNAL and "finite" in str(error.details())
        assert {reason for name, reason, _ in wire.ends} <= {"error", "length"}
        assert sum(reason == "error" for _, reason, _ in wire.ends) == 6

    outputs = expected("abcabc", max_tokens=100), expected("cab")
    assert not any(POISONED in tokens for tokens in outputs)
    sound = kit.engine.runner.target
    poisoned = jax.tree.map(lambda x: x, sound)
    rows = np.array(poisoned["embedding"][...])
    rows[POISONED] = np.nan
    poisoned["embedding"].set_value(jnp.asarray(rows))
    monkeypatch.setattr(kit.engine.runner, "target", poisoned)
    survives(kit, expected, harm)


@pytest.mark.parametrize("fault", ["NaN", "infinite", "random", "constant"])
def test_a_drafter_that_fails_costs_speed_only(writing_kit: Any, monkeypatch: pytest.MonkeyPatch, fault: str):
    """Weights of a draft model that are none: every output is plain decoding's, and drafting is given up."""
    spoil = {
        "NaN": lambda x: jnp.full_like(x, jnp.nan),
        "infinite": lambda x: jnp.full_like(x, jnp.inf),
        "random": lambda x: 100 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype),
        "constant": jnp.zeros_like,
    }[fault]
    shapes: list[dict[str, Any]] = [dict(), dict(temperature=1.0, seed=3), dict(presence_penalty=0.5, max_tokens=90)]
    asked = [ask(prompt, **shape) for prompt in ("ahdkb", "12, 13, 14, ") for shape in shapes]

    # What a busy machine's rounds take shall not decide: of a tiny model, a tree may come out cheaper than a token.
    monkeypatch.setattr(CostEstimate, "observe", lambda *_, **__: False)
    runner = writing_kit.engine.runner
    spoilt = jax.block_until_ready(jax.tree.map(spoil, runner.draft_params))

    async def outputs(wire: Wire, speculation: bool) -> list[list[int]]:
        requests = [pb.GenerateRequest.FromString(request.SerializeToString()) for request in asked]
        for request in requests:
            request.speculation.enabled = speculation
        return await asyncio.gather(*(wire.read(request) for request in requests))

    async def story() -> None:
        async with served(writing_kit) as wire:
            plain = await outputs(wire, False)
            monkeypatch.setattr(runner, "draft_params", spoilt)
            await wire.admin.SetSpeculation(admin_pb2.SetSpeculationRequest(policy="static", depth=3))
            over = asyncio.Event()
            health = asyncio.create_task(_always(wire.serving, over))
            assert await outputs(wire, True) == plain
            answer = await wire.generation.Generate(asked[0])
            stats = answer.completions[0].finished.speculation
            assert stats.num_draft_tokens > 0 and stats.num_accepted_draft_tokens < stats.num_draft_tokens / 4
            # The adaptive policy decides that drafts do not pay.
            await wire.admin.SetSpeculation(admin_pb2.SetSpeculationRequest(policy="adaptive"))
            for _ in range(3):
                assert await outputs(wire, True) == plain
            info = await wire.idle()
            assert info.rounds_by_tier["off"] > info.rounds_by_tier[writing_kit.tree.name]
            while info.active_tier != "off":  # it was trying again, as it does now and then
                await wire.read(asked[0])
                info = await wire.idle()
            over.set()
            await health

    writing_kit.run(story())


async def _always(condition: Callable[[], Awaitable[bool]], over: asyncio.Event) -> None:
    while not over.is_set():
        assert await condition()
        await asyncio.sleep(0.01)


def test_rounds_that_accept_nothing_go_on(kit: Any, expected: Any):
    """Text without repetition gives the n-gram drafter nothing; a static tier drafts in vain all the same."""

    async def harm(wire: Wire) -> None:
        await wire.admin.SetSpeculation(admin_pb2.SetSpeculationRequest(policy="static", depth=3))
        answer = await wire.generation.Generate(ask("ahdkb", temperature=1.0, seed=3, max_tokens=6))
        assert list(answer.completions[0].token_ids) == tokens
        stats = answer.completions[0].finished.speculation
        assert stats.num_draft_tokens > 0 == stats.num_accepted_draft_tokens

    tokens = expected("ahdkb", temperature=1.0, seed=3, max_tokens=6)
    survives(kit, expected, harm)


# The engine and the process.


def test_an_engine_that_dies_takes_no_client_with_it(kit: Any):
    async def story() -> None:
        async with served(kit) as wire:
            wire.facade.hold()
            streams = [asyncio.create_task(wire.read(ask("abc", max_tokens=90))) for _ in range(6)]
            await wire.held()
            await kit.eventually(lambda: wire.server.generator.live == 6)
            wire.facade.error = RuntimeError("the device is gone")
            wire.facade.release()
            for end in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(end, grpc.aio.AioRpcError) and end.code() is Code.UNAVAILABLE
            # Health says so, and then the server ends by itself: the process is to be started anew.
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert not await wire.serving()
            assert (await wire.status(ask())).code() is Code.UNAVAILABLE
            await wire.server.wait()

    kit.run(story())


def test_an_engine_that_hangs_is_out_of_service_until_it_returns(kit: Any, expected: Any, clock: Any):
    async def story() -> None:
        async with served(kit, watchdog_seconds=1000.0) as wire:
            wire.facade.hold()
            stream = asyncio.create_task(wire.read(ask("abc", max_tokens=90)))
            await wire.held()
            clock.ahead += 1100
            while await wire.serving():
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream
            assert caught.value.code() is Code.UNAVAILABLE
            assert (await wire.status(ask())).code() is Code.UNAVAILABLE
            wire.facade.release()
            while not await wire.serving():
                await asyncio.sleep(0.01)
            assert await wire.read(ask("cab")) == tokens
            await wire.idle()

    tokens = expected("cab")
    kit.run(story())


def test_draining_in_mid_stream_ends_what_does_not_finish(kit: Any):
    async def story() -> None:
        async with served(kit) as wire:
            wire.facade.hold()
            stream = asyncio.create_task(wire.read(ask("abc", max_tokens=90)))
            await wire.held()
            drain = asyncio.create_task(wire.server.drain(100.0))
            while await wire.serving():
                await asyncio.sleep(0.005)
            assert (await wire.status(ask())).code() is Code.UNAVAILABLE
            sooner = asyncio.create_task(wire.server.drain(0.1))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream
            assert caught.value.code() is Code.UNAVAILABLE
            wire.facade.release()
            await asyncio.gather(drain, sooner)

    kit.run(story())


def test_nothing_here_can_unpickle():
    """Checkpoints, sockets: no module of ours reads pickles (CVE-2025-24357, CVE-2026-3059).

    Stored executables are programs by their nature, whatever their form: their directory has to be the user's own.
    """
    # The server and the engine's process speak over a pair of sockets that nobody else can open. A Ray cluster runs
    # what whoever reaches it asks for, as its users know.
    trusted = {"jaxspec/runtime/executables.py", "serve/core/engine_process.py", "jaxspec/clusters.py"}
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for package in ("serve", "jaxspec", "pallas_kernels"):
        for path in set((ROOT / package).rglob("*.py")) - {ROOT / name for name in trusted}:
            # Not by the ast module: CPython 3.11 miscounts its recursion where threads take turns.
            for line in re.findall(r"^\s*(?:import|from)\b.*", path.read_text(), re.MULTILINE):
                assert not banned & set(re.findall(r"\w+", line)), path
