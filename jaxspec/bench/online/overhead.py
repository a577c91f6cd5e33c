"""What serving adds to the offline engine's time per output token.

The fair way, as far as one machine allows it. A host (`jaxspec.bench.online.host`) runs the whole server: metrics,
streams, gRPC, and the engine in its process. This process is the client. The two sides are measured in turn, in
alternating order, while the other one sleeps:

* serving: a wave of B requests is sent at once, and tokens are timed as their messages reach this process;
* offline: the same wave is given to the same engine in its own process, between two of its steps, and stepped there as
  LLM does, metrics unhooked; tokens are timed as `Engine.step` returns them.

So both sides run the same executables in the same memory and differ in nothing but what serving adds, the client's
own work included, which shares the machine's cores. TPOT is (end - first tokens) / (tokens after those) on both sides,
the end being the last message and the last delta; a request whose tokens all came in one message has none. Before each
side of each repeat the prefix cache is emptied and the policy made anew. Every request generates the same number of
tokens. A ratio compares the means over the requests of a repeat's two sides; the verdict is the median over repeats.
Beside it stand the ratios of the waves' whole time and of the engine process's own processor time, which tell noise
from cost, and the processor's time of the server's process. With a stub (see `stub`) in place of a model the same is
measured without an accelerator. Owns the measurement; must not know the server's inside.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.adaptive.policy import TierPolicy
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.offline.workloads import built_in
from jaxspec.bench.online import texts
from jaxspec.bench.online.arrivals import Arrival, Load
from jaxspec.bench.online.records import span
from jaxspec.bench.online.sender import ADAPTIVE, OFF, Mode, Run, Sending, modes_of
from jaxspec.engine import Engine
from jaxspec.events import Delta, Finished
from jaxspec.request import SamplingParams
from serve.client import AsyncClient

#: Most that serving may add, by batch size; others have no limit.
LIMITS = {1: 0.10, 16: 0.10}
#: What the host writes before each answer; anything else on its standard output is the server's.
MARK = "@host "
SIDES = ("offline", "serving")
_START_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      batch_sizes: requests of a wave. waves: of a side of a repeat, by batch size at least enough for 4 requests.
      stub_round: seconds of the rounds of a stub that is served in place of the model; None: the model is.
      depth: of the fixed choice that drafts; None: a middle one of the server's own.
      stream_interval_ms: see ServerConfig.
      same_process: the engine runs on a thread of the server's process, for comparison.
    """

    model: str = "demo"
    drafter: str | None = None
    batch_sizes: tuple[int, ...] = (1, 16)
    max_tokens: int = 96
    repeats: int = 9
    seed: int = 0
    stub_round: float | None = None
    depth: int | None = None
    stream_interval_ms: float | None = None
    same_process: bool = False

    def waves(self, batch_size: int) -> int:
        return max(1, 4 // batch_size)


@dataclasses.dataclass(frozen=True)
class Side:
    """Offline or serving: an entry a repeat, in order, each of its waves together.

    Attributes:
      tpot: mean over the requests, in seconds.
      wall: seconds from the first send to the last end.
      cpu: seconds that all threads of the engine's process worked. server: those of the server's.
      rounds: of the engine.
    """

    tpot: tuple[float, ...]
    wall: tuple[float, ...]
    cpu: tuple[float, ...]
    server: tuple[float, ...]
    rounds: tuple[int, ...]

    @property
    def cpu_microseconds(self) -> tuple[float, float]:
        """Of the engine's and of the server's process, a round; medians over repeats."""
        each = lambda parts: statistics.median(1e6 * part / n for part, n in zip(parts, self.rounds, strict=True))
        return each(self.cpu), each(self.server)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One mode at one batch size."""

    mode: str
    batch_size: int
    offline: Side
    serving: Side

    @property
    def ratios(self) -> list[float]:
        """Of TPOT, a repeat each."""
        return _ratios(self.offline.tpot, self.serving.tpot)

    @property
    def ratio(self) -> float:
        """Of TPOT, the median over repeats: what the verdict is about."""
        return statistics.median(self.ratios)

    @property
    def wall_ratio(self) -> float:
        """Of the waves' whole time, time to the first tokens included."""
        return statistics.median(_ratios(self.offline.wall, self.serving.wall))

    @property
    def cpu_ratio(self) -> float:
        """Of the processor's time, which busy neighbours disturb least."""
        return statistics.median(_ratios(self.offline.cpu, self.serving.cpu))

    @property
    def limit(self) -> float | None:
        return 1 + LIMITS[self.batch_size] if self.batch_size in LIMITS else None

    @property
    def holds(self) -> bool | None:
        """None where there is no limit."""
        return None if self.limit is None else self.ratio <= self.limit


def _ratios(offline: Sequence[float], serving: Sequence[float]) -> list[float]:
    return [b / a for a, b in zip(offline, serving, strict=True)]


def step_offline(
    engine: Engine, waves: Sequence[Sequence[Sequence[int]]], max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], float]:  # fmt: skip
    """(TPOT of every request that has one, seconds of all waves) of waves of prompts, each stepped to its end.

    The engine must be idle, and is afterwards.

    Raises:
      RuntimeError: a request ended early.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    hook, engine.on_round = engine.on_round, None
    out: list[float] = []
    seconds = 0.0
    try:
        for wave in waves:
            began = now = clock()
            first: dict[str, tuple[float, int]] = {}
            live = {engine.add(prompt, params) for prompt in wave}
            while live:
                events = engine.step()
                now = clock()
                for event in events:
                    if isinstance(event, Delta) and event.token_ids:
                        first.setdefault(event.request_id, (now, len(event.token_ids)))
                    if not isinstance(event, Finished):
                        continue
                    live.discard(event.request_id)
                    if len(event.output.token_ids) != max_tokens:
                        raise RuntimeError(f"{event.request_id} ended with {event.reason}")
                    since, count = first[event.request_id]
                    if count < max_tokens:
                        out.append((now - since) / (max_tokens - count))
            seconds += now - began
            while engine.has_work:  # a round may still be in flight for requests that have ended
                engine.step()
    finally:
        engine.on_round = hook
    return out, seconds


# Also what the host has its engine do: functions that another process can import.


def policy_of(engine: Engine, mode: str) -> TierPolicy:
    """A fresh one: adaptive, or a tier by its name.

    Raises:
      ValueError: a tier that the engine has not compiled.
    """
    if mode == ADAPTIVE:
        return engine.new_policy()
    tiers = {tier.name: tier for tier in engine.runner.states}
    if mode not in tiers:
        raise ValueError(f"mode must be {ADAPTIVE!r} or one of {sorted(tiers)}, got {mode!r}")
    return StaticPolicy(tiers[mode])


def prepare(engine: Engine, mode: str) -> None:
    """A fresh policy and no cached prefixes."""
    engine.use_policy(policy_of(engine, mode))
    engine.flush_prefix_cache()


def spent(engine: Engine) -> tuple[float, int]:
    """(seconds that all threads of the engine's process have worked, rounds)."""
    return time.process_time(), engine.stats.rounds


class Host:
    """The process with the engine and the server, asked line by line."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    @classmethod
    async def start(cls, plan: Plan) -> Host:
        """Starts it; it answers once the engine is warm."""
        settings: dict[str, Any] = {
            "model": plan.model,
            "drafter": plan.drafter,
            "stream_interval_ms": plan.stream_interval_ms,
            "engine": {
                "max_batch_size": max(plan.batch_sizes),
                "batch_buckets": list(plan.batch_sizes),
                "warmup": "eager",
            },
        }
        settings["same_process"] = plan.same_process
        if plan.depth is not None:
            settings["speculation"] = {"candidate_steps": [plan.depth]}
        if plan.stub_round is not None:
            settings["stub"] = {"round_seconds": plan.stub_round, "slots": max(plan.batch_sizes)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jaxspec.bench.online.host", json.dumps(settings),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
        )  # fmt: skip
        return cls(process)

    async def ask(self, **command: Any) -> Any:
        """One command's answer.

        Raises:
          RuntimeError: it failed there, or the host ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.answer()

    async def answer(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                answer = json.loads(text.removeprefix(MARK))
                if "error" in answer:
                    raise RuntimeError(f"the host says: {answer['error']}")
                return answer
        raise RuntimeError(f"the host ended with status {await self._process.wait()}")

    async def close(self) -> None:
        """Lets it end; kills it after 20 s."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class Measurement:
    """All cells of a plan.

    Attributes:
      cells: finished ones.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]):
        self.plan, self._say = plan, say
        self.cells: list[Cell] = []
        self.conditions: dict[str, Any] = dataclasses.asdict(plan)

    async def go(self) -> None:
        """Measures; what was finished before an interruption stays in `cells`."""
        self._say("starting the server and compiling: up to a few minutes the first time, seconds from the cache")
        host = await Host.start(self.plan)
        try:
            port = (await asyncio.wait_for(host.answer(), _START_SECONDS))["port"]
            async with AsyncClient(f"127.0.0.1:{port}") as client:
                await self._measure(host, client)
        finally:
            await host.close()

    async def _measure(self, host: Host, client: AsyncClient) -> None:
        info = await client.server_info()
        self.conditions |= {"device": info.device, "dtype": info.dtype, "drafter": info.drafter}
        self.conditions |= {"tiers": list(info.tiers)}
        if self.plan.stub_round is not None:
            library, modes = {"stub": [("stub", tuple(range(1, 65)))]}, [Mode(OFF)]
        else:
            library = await texts.tokenized(built_in(), client.tokenize)
            static = [mode for mode in modes_of(info.tiers) if mode.depth is not None]
            # A middle tier stands for the fixed ones.
            modes = [Mode(OFF), static[len(static) // 2], Mode(ADAPTIVE)]
        for batch_size in self.plan.batch_sizes:
            for mode in modes:
                await self._cell(host, client, library, info.max_seq_len, batch_size, mode)

    async def _cell(
        self, host: Host, client: AsyncClient, library: Any, max_seq_len: int, batch_size: int, mode: Mode
    ) -> None:
        plan = self.plan
        found: dict[str, list[tuple[float, ...]]] = {side: [] for side in SIDES}
        for repeat in range(-1, plan.repeats):  # the first one warms up
            waves = []
            for wave in range(plan.waves(batch_size)):
                load = Load("wave", (Arrival(0.0),) * batch_size, concurrency=batch_size)
                seed = plan.seed + 1000 * max(0, repeat) + wave
                made = texts.plan(load, library, max_seq_len=max_seq_len, max_tokens=plan.max_tokens, seed=seed)
                waves.append(_as_ids(made, library))
            for side in SIDES if repeat % 2 else reversed(SIDES):
                await host.ask(do="prepare", mode=mode.name)
                before = await host.ask(do="spent")
                tpots, wall = await (self._serve(client, waves) if side == "serving" else self._offline(host, waves))
                after = await host.ask(do="spent")
                spent = tuple(after[name] - before[name] for name in ("engine", "server", "rounds"))
                if repeat >= 0:
                    found[side].append((statistics.mean(tpots), wall, *spent))
        offline, serving = (Side(*zip(*found[side], strict=True)) for side in SIDES)  # pyright: ignore[reportArgumentType]
        cell = Cell(mode.name, batch_size, offline, serving)
        self.cells.append(cell)
        self._say(line(cell))

    async def _serve(self, client: AsyncClient, waves: Sequence[texts.Plan]) -> tuple[list[float], float]:
        out: list[float] = []
        seconds = 0.0
        for wave in waves:
            records = await Run(client, wave, Sending()).go()
            for record in records:
                if not record.ok:
                    raise RuntimeError(f"a request ended with {record.status}: {record.message}")
                if record.tpot is not None:
                    out.append(record.tpot)
            seconds += span(records)
        if not out:
            raise RuntimeError("every request's tokens came in one message: more max-tokens are needed")
        return out, seconds

    async def _offline(self, host: Host, waves: Sequence[texts.Plan]) -> tuple[list[float], float]:
        prompts = [[list(planned.prompt) for planned in wave.requests] for wave in waves]
        answer = await host.ask(do="offline", waves=prompts, max_tokens=self.plan.max_tokens)
        return answer["tpots"], answer["seconds"]


def _as_ids(plan: texts.Plan, library: Any) -> texts.Plan:
    """Both sides get token ids."""
    ids = {text: tokens for many in library.values() for text, tokens in many}
    requests = tuple(
        dataclasses.replace(r, prompt=ids[r.prompt]) if isinstance(r.prompt, str) else r for r in plan.requests
    )
    return dataclasses.replace(plan, requests=requests)


def line(cell: Cell) -> str:
    """A cell in words, on two lines."""
    off, on = (1e3 * statistics.median(side.tpot) for side in (cell.offline, cell.serving))
    text = f"batch {cell.batch_size:<3}{cell.mode:<10} TPOT ms {off:>7.3f} offline {on:>7.3f} serving  "
    text += f"{cell.ratio:.3f} ({min(cell.ratios):.2f}-{max(cell.ratios):.2f})"
    if cell.limit is not None:
        text += f"  holds ({cell.limit:.2f})" if cell.holds else f"  MORE than {cell.limit:.2f}"
    (alone, _), (engine, server) = cell.offline.cpu_microseconds, cell.serving.cpu_microseconds
    text += f"\n{'':20}wall {cell.wall_ratio:.3f}, cpu {cell.cpu_ratio:.3f}: "
    return text + f"the engine's process {alone:.0f} -> {engine:.0f} us a round, the server's {server:.0f}"


def to_dict(measurement: Measurement, *, interrupted: bool) -> dict[str, Any]:
    """Conditions and every repeat of every cell."""
    derived = ("ratio", "wall_ratio", "cpu_ratio", "limit", "holds")
    cells = [dataclasses.asdict(c) | {name: getattr(c, name) for name in derived} for c in measurement.cells]
    return {"conditions": measurement.conditions, "interrupted": interrupted, "cells": cells}
