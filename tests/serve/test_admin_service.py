"""jaxspec.v1.AdminService: what is told, and what operators may change while requests run."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest

import jaxspec
from jaxspec.adaptive.versions import Versions
from jaxspec.config import SpeculationConfig
from jaxspec.request import RequestMetrics
from serve.api.admin import described
from serve.app import Server
from serve.client import AsyncClient, Finished, Options, ServerError
from serve.config import ServerConfig
from serve.core.commands import OnCompiled
from serve.core.engine_client import ThreadLink
from serve.core.observers import Meter

BASE: dict[str, Any] = dict(host="127.0.0.1", port=0, metrics_port=None, withdrawal_seconds=0.0)
LONG: Options = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}


def on(server: Server) -> AsyncClient:
    return AsyncClient(f"127.0.0.1:{server.port}")


async def refusal(call: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await call
    return caught.value


def test_server_info_is_an_allow_list_of_what_is_true(kit: Any):
    async def story() -> None:
        config = ServerConfig(**BASE, served_model_name="tiny", auth_token_file=None, model="/secret/place/tiny")
        async with Server(config, build=kit.clean) as server, on(server) as client:
            for _ in range(2):
                await client.generate("abcabc", **LONG)

            def all_is_given_back() -> bool:  # the last text may be here before the counters of the step that ended it
                counters = server.engine.snapshot
                return counters.free_pages + counters.cached_pages == server.engine.facts.sizes.num_pages

            await kit.eventually(all_is_given_back)
            info = await client.server_info()
            engine, sizes = kit.engine, kit.engine.facts.sizes
            assert (info.version, info.model, info.drafter, info.policy) == (
                jaxspec.__version__,
                "tiny",
                "suffix",
                "adaptive",
            )
            assert (info.verification, info.lossless, info.dtype, info.devices) == ("coupled", True, "float32", 1)
            assert info.device and info.state == "serving" and info.uptime_seconds > 0
            assert (info.max_seq_len, info.max_batch_size) == (sizes.max_seq_len, sizes.slots)
            assert list(info.tiers) == ["off", "chain-1", "chain-3"] and list(info.buckets) == [2, 4]
            assert info.active_tier in info.tiers and sum(info.rounds_by_tier.values()) > 0
            assert info.executables == engine.stats.executables and info.warmup_seconds > 0
            assert 1 <= info.mean_acceptance_length <= 4
            memory = info.memory
            assert (memory.pages, memory.page_size) == (sizes.num_pages, sizes.page_size)
            assert memory.free_pages + memory.cached_pages == memory.pages
            assert memory.weight_bytes == engine.runner.weight_bytes and memory.kv_pool_bytes == engine.pool_bytes
            assert "secret" not in str(info)

    kit.run(story())


def test_loads(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        async with Server(ServerConfig(**BASE), build=lambda: facade) as server, on(server) as client:
            idle = await client.loads()
            assert (idle.running_requests, idle.waiting_requests, idle.kv_cache_usage) == (0, 0, 0.0)
            assert idle.max_running_requests == 4
            facade.idle = True
            streams = [client.stream("abc", **LONG) for _ in range(6)]
            for stream in streams:
                await anext(stream)
            await facade.end_idling()
            facade.hook = lambda: time.sleep(0.02)  # counters are published every tenth of a second
            facade.advance(12)
            await kit.eventually(lambda: server.engine.snapshot.waiting == 2 and server.engine.snapshot.running == 4)
            busy = await client.loads()
            assert (busy.running_requests, busy.waiting_requests, busy.waiting_prompt_tokens) == (4, 2, 6)
            assert 0 < busy.kv_cache_usage <= 1 and busy.tokens_per_second >= 0
            facade.hook = None
            facade.release()
            for stream in streams:
                async for _ in stream:
                    pass
            assert 0 < (await client.loads()).tokens_per_second <= 6 * 60 / 10

    kit.run(story())


def test_the_rate_forgets_what_is_older_than_ten_seconds():
    now = [100.0]
    meter = Meter(lambda: now[0])
    for at, count in ((100.0, 30), (100.01, 20), (105.0, 50)):
        now[0] = at
        meter.add_tokens(count)
    assert meter.tokens_per_second == 10.0
    now[0] = 110.5
    assert meter.tokens_per_second == 5.0
    now[0] = 200.0
    assert meter.tokens_per_second == 0.0
    assert meter.mean_accepted_length == 0.0
    meter.add_finished(RequestMetrics(rounds=4, accepted=6))
    assert meter.mean_accepted_length == 2.5


def test_flush_cache(kit: Any):
    async def story() -> None:
        async with Server(ServerConfig(**BASE), build=kit.clean) as server, on(server) as client:
            await client.generate("abcdabcdabcdabcd", **LONG)
            while not (cached := (await client.server_info()).memory.cached_pages):
                await asyncio.sleep(0.01)  # what is told is as old as a step
            assert await client.flush_cache() == cached
            assert await client.flush_cache() == 0

    kit.run(story())


def test_speculation_is_set_while_requests_run(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        async with Server(ServerConfig(**BASE), build=lambda: facade) as server, on(server) as client:
            wanted = (await client.generate("abcabc", **LONG)).token_ids
            turns = threading.Semaphore(0)  # steps that are let through; in the others there is time for changes
            facade.hook = lambda: setattr(facade, "idle", not turns.acquire(blocking=False))
            tokens: list[int] = []
            changes = iter([("off", None), ("static", 3), ("static", 1), ("adaptive", None)])
            async for event in client.stream("abcabc", **LONG):
                if isinstance(event, Finished):
                    assert len(event.speculation.tier_rounds) > 1
                    continue
                tokens += getattr(event, "token_ids", ())
                if (change := next(changes, None)) is not None:
                    await client.set_speculation(*change)
                    turns.release(3)
                else:
                    facade.hook, facade.idle = None, False
            assert tuple(tokens) == wanted
            for policy, depth, tiers in (("off", None, ["off"]), ("static", 3, ["chain-3"]), ("static", 0, ["off"])):
                assert await client.set_speculation(policy, depth) == tiers
                result = await client.generate("abcabc", **LONG)
                assert list(result.completions[0].finished.speculation.tier_rounds) == tiers
                assert result.token_ids == wanted
                assert (await client.server_info()).policy == policy
                while (await client.server_info()).active_tier != tiers[0]:  # what is told is as old as a step
                    await asyncio.sleep(0.01)
            assert await client.set_speculation("adaptive") == ["off", "chain-1", "chain-3"]

    kit.run(story())


def test_server_info_while_a_step_hangs(kit: Any, clock: Any):
    """The first look at a server that hangs must say so, and what it serves."""

    async def story() -> None:
        facade = kit.clean()
        config = ServerConfig(**BASE, watchdog_seconds=20.0)
        async with Server(config, build=lambda: facade) as server, on(server) as client:
            facade.hold(3)
            stream = client.stream("abcabc", **LONG)
            await anext(stream)
            await kit.eventually(facade.held.is_set)
            for state in ("serving", "stalled"):  # the watchdog notices a little later
                await kit.eventually(lambda state=state: server.lifecycle.state == state)
                info = await client.server_info()
                assert (info.state, info.max_seq_len, info.memory.page_size) == (state, 120, 8)
                assert list(info.tiers) == ["off", "chain-1", "chain-3"] and info.lossless and info.drafter == "suffix"
                clock.ahead += 30
            facade.release()
            await kit.eventually(lambda: server.lifecycle.state == "serving")

    kit.run(story())


def test_speculation_that_cannot_be_set(kit: Any):
    async def story() -> None:
        async with Server(ServerConfig(**BASE), build=kit.clean) as server, on(server) as client:
            for policy, depth, message in (
                ("fast", None, "policy must be one of .*, got 'fast'"),
                ("", None, "policy must be one of"),
                ("static", None, "policy 'static' needs a depth, of which this server has"),
                ("off", 2, "depth goes with policy 'static' and no other, got policy 'off' and depth 2"),
                ("static", 2, r"depth 2 needs a compiled tier, and this server has \['off', 'chain-1', 'chain-3'\]"),
            ):
                error = await refusal(client.set_speculation(policy, depth))
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT
                with pytest.raises(ServerError, match=message):
                    raise error
            assert (await client.server_info()).policy == "adaptive"
        config = ServerConfig(**BASE, speculation=SpeculationConfig(policy="off"))
        async with Server(config, build=kit.clean) as server, on(server) as client:
            error = await refusal(client.set_speculation("adaptive"))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT and "started with policy 'off'" in error.message

    kit.run(story())


def test_weights_are_exchanged_while_requests_run(kit: Any, monkeypatch: pytest.MonkeyPatch):
    """The wire's side; tests/engine/test_drafter_updates.py has the engine's."""

    class Weights:
        """Takes two looks to load; counts versions."""

        def __init__(self) -> None:
            self.versions, self.version, self.looks, self.asked = Versions(), 1, 0, []

        def begin(self, directory: str) -> int:
            if directory == "wrong":
                raise ValueError("hidden_size is 8, the served drafter's is 16")
            self.asked.append(directory)
            return 7

        def finish(self, ticket: int, *, trial: bool) -> int | None:
            assert ticket == 7
            self.looks += 1
            if self.looks % 2:
                return None
            if self.asked[-1] == "truncated":
                raise ValueError("not a whole safetensors file")
            return self.versions.introduce(trial=trial)

    async def story() -> None:
        facade = kit.clean()
        async with Server(ServerConfig(**BASE), build=lambda: facade) as server, on(server) as client:
            error = await refusal(client.update_drafter("/somewhere"))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "loaded from a directory, and this engine's was not; got '/somewhere'" in error.message
            assert (await client.server_info()).drafter_version == 0, "look-ups have no weights"
            weights = Weights()
            own = kit.engine.drafter_weights
            weights.before_round, weights.observe = own.before_round, own.observe  # type: ignore[attr-defined]
            monkeypatch.setattr(kit.engine, "drafter_weights", weights)
            stream = client.stream("abcabc", **LONG)
            await anext(stream)
            assert await client.update_drafter("new") == 2
            assert await client.update_drafter("newer", trial=False) == 3
            async for _ in stream:
                pass
            for directory, message in (("wrong", "hidden_size is 8"), ("truncated", "not a whole"), ("", "1 to 4096")):
                error = await refusal(client.update_drafter(directory))
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT and message in error.message
            while (info := await client.server_info()).drafter_updates != 2:
                await client.generate("abc", **LONG)  # what is told is as old as a step
            assert (info.drafter_version, info.drafter_trial, info.drafter_rollbacks) == (1, False, 0)
            assert weights.asked == ["new", "newer", "truncated"]

    kit.run(story())


def test_drain_returns_at_once_and_the_server_ends(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        async with Server(ServerConfig(**BASE), build=lambda: facade) as server, on(server) as client:
            for grace in (-1.0, float("nan")):
                error = await refusal(client.drain(grace))
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT and "grace_seconds must be" in error.message
            assert server.lifecycle.state == "serving"
            facade.hold(4)  # the stream outlives what is asked meanwhile
            stream = client.stream("abc", **LONG)
            await anext(stream)
            await client.drain(30.0)
            assert (await client.server_info()).state == "draining"
            facade.release()
            ends = [event async for event in stream if isinstance(event, Finished)]
            assert [end.usage.completion_tokens for end in ends] == [60]
            await server.wait()
            assert server.error is None

    kit.run(story())


def test_before_the_engine_is_ready(kit: Any):
    async def story() -> None:
        gate = threading.Event()
        facade = kit.clean()

        def build(on_compiled: OnCompiled) -> Any:
            on_compiled(3, 40)
            assert gate.wait(100)
            return facade

        config = ServerConfig(**BASE)
        server = Server(config, link=ThreadLink(build, described))
        await server.start()
        async with on(server) as client:
            await kit.eventually(lambda: server.engine.compiled == (3, 40))
            info = await client.server_info()
            assert (info.executables_ready, info.executables) == (3, 40)
            info, loads = await client.server_info(), await client.loads()
            assert (info.state, info.model, info.max_seq_len, loads.max_running_requests) == ("starting", "demo", 0, 0)
            for call in (client.flush_cache(), client.set_speculation("off")):
                assert (await refusal(call)).code is grpc.StatusCode.UNAVAILABLE
        gate.set()
        await server.ready()
        await server.stop()

    kit.run(story())
