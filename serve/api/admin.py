"""jaxspec.v1.AdminService: what operators and load balancers ask.

What is told is an allow-list: no paths, no arguments, no environment. Must not know how requests run.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import time
from collections.abc import Callable
from typing import Any

import jax

import jaxspec
from jaxspec.adaptive import registry as policies
from jaxspec.adaptive.kind import Running
from jaxspec.adaptive.policy import TierPolicy
from jaxspec.config import SpeculationConfig
from jaxspec.drafters import registry
from jaxspec.engine import Engine
from serve.api.calls import answering
from serve.config import ServerConfig
from serve.core.engine_client import EngineClient
from serve.core.errors import invalid
from serve.core.generator import Generator
from serve.core.lifecycle import Lifecycle
from serve.proto import admin_pb2 as pb

_MAX_DRAIN_SECONDS = 1e9
#: Longest path of a directory, and the seconds between two looks whether its weights have been loaded.
_MAX_PATH, _LOOK_SECONDS = 4096, 0.05


def described(engine: Engine) -> pb.GetServerInfoResponse:
    """What is known of the engine for good. To be called on its thread; what is returned is for everybody."""
    runner, sizes = engine.runner, engine.facts.sizes
    devices = runner.state.pages.sharding.device_set  # known of arrays too that a warm-up has just consumed
    return pb.GetServerInfoResponse(
        drafter=engine.facts.drafter,
        device=next(iter(devices)).device_kind if devices else jax.default_backend(),
        devices=len(devices),
        dtype=str(runner.state.pages.dtype),
        tiers=[tier.name for tier in sorted(runner.reachable)],
        buckets=sorted({bucket for buckets in runner.reachable.values() for bucket in buckets}),
        max_seq_len=sizes.max_seq_len,
        max_batch_size=sizes.slots,
        memory=pb.Memory(
            weight_bytes=runner.weight_bytes,
            kv_pool_bytes=engine.pool_bytes,
            pages=sizes.num_pages,
            page_size=sizes.page_size,
        ),
    )


class AdminServicer:
    """GetServerInfo, GetLoads, Drain, FlushCache, SetSpeculation, UpdateDrafter.

    Who may call what is decided before (see serve.api.auth).

    Args:
      engine: its description is what `described` returned.
      drain: begins to drain, within so many seconds (None: the configured ones), and returns at once.
    """

    def __init__(
        self,
        engine: EngineClient,
        generator: Generator,
        lifecycle: Lifecycle,
        config: ServerConfig,
        drain: Callable[[float | None], None],
    ) -> None:
        self._engine, self._generator, self._lifecycle = engine, generator, lifecycle
        self._config, self._drain = config, drain
        self._began = time.monotonic()
        self._policy = config.speculation.policy_kind.name

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        known, stats = self._engine.description, self._engine.snapshot
        info = pb.GetServerInfoResponse()
        info.executables_ready, info.executables = self._engine.compiled
        if known is not None and stats is not None:
            info.CopyFrom(known)
            info.lossless, info.active_tier = stats.lossless, stats.active_tier
            info.tier_switches = stats.switches
            info.rounds_by_tier.update(stats.rounds_by_tier)
            info.executables, info.compilations_after_warmup = stats.executables, stats.compilations_after_warmup
            info.executables_ready = stats.executables_ready
            info.warmup_seconds, info.startup_seconds = stats.warmup_seconds, stats.startup_seconds
            info.drafter_version, info.drafter_trial = stats.drafter_version, stats.drafter_trial
            info.drafter_updates, info.drafter_rollbacks = stats.drafter_updates, stats.drafter_rollbacks
            info.draft_tensor_parallel = stats.draft_tensor_parallel
            info.memory.free_pages, info.memory.cached_pages = stats.free_pages, stats.cached_pages
        info.version, info.model, info.state = jaxspec.__version__, self._config.served_name, self._lifecycle.state
        info.policy = policies.OFF if info.drafter == registry.NONE else self._policy
        info.verification = self._config.speculation.verification
        info.uptime_seconds = time.monotonic() - self._began
        info.mean_acceptance_length = self._engine.meter.mean_accepted_length
        return info

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        facts, stats = self._engine.facts, self._engine.snapshot
        if facts is None or stats is None:
            return pb.GetLoadsResponse()
        return pb.GetLoadsResponse(
            running_requests=stats.running,
            waiting_requests=stats.waiting,
            waiting_prompt_tokens=self._generator.waiting_prompt_tokens,
            kv_cache_usage=1 - (stats.free_pages + stats.cached_pages) / facts.sizes.num_pages,
            tokens_per_second=self._engine.meter.tokens_per_second,
            max_running_requests=facts.sizes.slots,
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        async with answering(context):
            grace = request.grace_seconds if request.HasField("grace_seconds") else None
            if grace is not None and not 0 <= grace <= _MAX_DRAIN_SECONDS:
                raise invalid(f"grace_seconds must be a number in [0, {_MAX_DRAIN_SECONDS:g}], got {grace!r}")
            self._drain(grace)
            return pb.DrainResponse()

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Any) -> pb.FlushCacheResponse:
        async with answering(context):
            freed = await self._engine.call(operator.methodcaller("forget_texts"))
            return pb.FlushCacheResponse(freed_pages=freed)

    async def SetSpeculation(self, request: pb.SetSpeculationRequest, context: Any) -> pb.SetSpeculationResponse:
        depth = request.depth if request.HasField("depth") else None
        use = functools.partial(_use_policy, name=request.policy, depth=depth, started=self._config.speculation)
        async with answering(context):
            try:
                tiers = await self._engine.call(use)
            except ValueError as e:
                raise invalid(str(e)) from e
            self._policy = request.policy
            return pb.SetSpeculationResponse(tiers=tiers)

    async def UpdateDrafter(self, request: pb.UpdateDrafterRequest, context: Any) -> pb.UpdateDrafterResponse:
        trial = request.trial if request.HasField("trial") else True
        async with answering(context):
            if not request.directory or len(request.directory) > _MAX_PATH:
                raise invalid(f"directory must have 1 to {_MAX_PATH} characters, got {len(request.directory)}")
            try:
                ticket = await self._engine.call(functools.partial(_begin_update, directory=request.directory))
                finish = functools.partial(_finish_update, ticket=ticket, trial=trial)
                while (version := await self._engine.call(finish)) is None:
                    await asyncio.sleep(_LOOK_SECONDS)
            except (ValueError, OSError) as e:
                raise invalid(str(e)) from e
            return pb.UpdateDrafterResponse(version=version)


def _begin_update(engine: Engine, directory: str) -> int:
    return engine.drafter_weights.begin(directory)


def _finish_update(engine: Engine, ticket: int, trial: bool) -> int | None:
    return engine.drafter_weights.finish(ticket, trial=trial)


def _use_policy(engine: Engine, name: str, depth: int | None, started: SpeculationConfig) -> list[str]:
    """Has the engine use the policy that a client names; its tiers' names. ValueError as `_policy`."""
    policy = _policy(engine, name, depth, started)
    engine.use_policy(policy)
    return [tier.name for tier in policy.tiers]


def _policy(engine: Engine, name: str, depth: int | None, started: SpeculationConfig) -> TierPolicy:
    """The policy that a client names.

    Raises:
      ValueError: it has none such, or not what it needs.
    """
    if name not in policies.names():
        raise ValueError(f"policy must be one of {policies.names()}, got {name[:80]!r}")
    kind = policies.find(name)
    if depth is None and kind.switched_by_depth:
        there = sorted({tier.depth for tier in engine.runner.reachable})
        raise ValueError(f"policy {name!r} needs a depth, of which this server has {there}")
    if depth is not None and not kind.switched_by_depth:
        takers = " or ".join(repr(other.name) for other in policies.kinds() if other.switched_by_depth)
        raise ValueError(f"depth goes with policy {takers} and no other, got policy {name!r} and depth {depth}")
    compiled = sorted(engine.runner.reachable)
    running = Running(started.policy_kind, started.resolved_policy, compiled, engine.new_policy)
    return kind.switch(running, depth)
