"""One command's way from a server's address to a report: load, plan, warm-up, runs.

Owns the order of what is asked of the server. What was measured before an interruption stays readable. Must not know
flags, files or how results look.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.bench.offline.workloads import Passage
from jaxspec.bench.online import texts
from jaxspec.bench.online.arrivals import Load, closed, synthetic
from jaxspec.bench.online.compare import ModeRun
from jaxspec.bench.online.records import Record, span
from jaxspec.bench.online.report import Report
from jaxspec.bench.online.sender import ADAPTIVE, OFF, Mode, Run, Sending, modes_of, speculate
from serve.client import AsyncClient, ServerError

#: Requests, in full batches, that measure what a server can take.
_CAPACITY_BATCHES = 3
_WARM_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to send.

    Attributes:
      load: the arrivals; None: the shipped bursty trace at what the server turns out to take.
      duration: of the shipped trace, in seconds.
      library: prompts by kind.
      warmup: requests sent before each run, unrecorded.
      compare: every mode, `repeats` times; else one run as the server is.
    """

    load: Load | None
    library: Mapping[str, Sequence[Passage]]
    sending: Sending
    duration: float = 40.0
    max_tokens: int = 64
    seed: int = 0
    warmup: int = 4
    compare: bool = False
    repeats: int = 1


class Session:
    """A load on a server.

    Args:
      target: as conditions name it.
      say: hears progress, a line each. on_end: every recorded request.
    """

    def __init__(
        self, client: AsyncClient, wanted: Wanted, target: str, *, say: Callable[[str], None] = lambda _: None,
        on_end: Callable[[Record], None] = lambda _: None,
    ):  # fmt: skip
        self.client, self.wanted, self.target = client, wanted, target
        self.runs: list[ModeRun] = []
        self.skipped: dict[str, str] = {}
        self.conditions: dict[str, Any] = {}
        self.plan: texts.Plan | None = None
        self.compilations: int | None = None
        self._say, self._on_end = say, on_end
        self._max_seq_len = self._batch = 0
        self._library: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        self._current: tuple[Run, str, int] | None = None

    def report(self, *, interrupted: bool) -> Report | None:
        """What was measured so far; None before the first recorded run began."""
        if self.plan is None:
            return None
        runs = list(self.runs)
        if self._current is not None:
            run, mode, repeat = self._current
            runs.append(ModeRun(mode, repeat, tuple(run.records)))
        return Report(
            self.conditions, self.plan, self.wanted.sending.slo, runs, self.compilations, self.skipped, interrupted
        )

    async def go(self) -> None:
        """Everything.

        Raises:
          ServerError: the server cannot be asked.
          ValueError: a plan that does not fit the server.
        """
        wanted = self.wanted
        info = await self.client.server_info(timeout=30)
        self._max_seq_len, self._batch = info.max_seq_len, info.max_batch_size
        modes = modes_of(info.tiers) if wanted.compare else [Mode(info.policy)]
        self._library = await texts.tokenized(wanted.library, self.client.tokenize)
        load = wanted.load
        if load is None:
            load = await self._synthetic()
        plan = self._planned(load, wanted.seed, wanted.max_tokens)
        self.conditions = self._conditions(info, modes)
        self.plan = plan
        try:
            for repeat in range(wanted.repeats if wanted.compare else 1):
                for mode in modes:
                    if mode.name not in self.skipped:
                        await self._run(plan, mode, repeat)
        finally:
            if wanted.compare:
                await self._set_back(info)

    async def _set_back(self, info: Any) -> None:
        """Lets the server speculate as it did before; what was measured does not depend on it."""
        known = {mode.name: mode for mode in modes_of(info.tiers)}
        before = known.get(info.active_tier if info.policy == "static" else info.policy, Mode(ADAPTIVE))
        try:
            await speculate(self.client, before)
        except ServerError as error:
            self._say(f"the server's policy could not be set back to {info.policy}: {error}")

    def _planned(self, load: Load, seed: int, max_tokens: int) -> texts.Plan:
        return texts.plan(load, self._library, max_seq_len=self._max_seq_len, max_tokens=max_tokens, seed=seed)

    async def _synthetic(self) -> Load:
        """The shipped trace, scaled to what the server takes in full batches without speculation."""
        if self.wanted.compare:
            await speculate(self.client, Mode(OFF))
        load = closed(self._batch, _CAPACITY_BATCHES * self._batch)
        probe = synthetic(1.0, 1e4, seed=self.wanted.seed).arrivals[: len(load.arrivals)]
        arrivals = tuple(dataclasses.replace(arrival, at=0.0) for arrival in probe)
        plan = self._planned(dataclasses.replace(load, arrivals=arrivals), self.wanted.seed + 2, self.wanted.max_tokens)
        self._say(f"measuring what the server can take: {len(plan.requests)} requests, {self._batch} at a time")
        records = await Run(self.client, plan, self.wanted.sending).go()
        good = [r for r in records if r.ok]
        if len(good) < len(records):
            bad = next(r for r in records if not r.ok)
            raise ValueError(f"measuring the server's capacity failed: {bad.status}: {bad.message}")
        rate = len(good) / span(good)
        self._say(f"{rate:.2f} requests a second; the trace takes {self.wanted.duration:g} s")
        return synthetic(rate, self.wanted.duration, seed=self.wanted.seed)

    async def _run(self, plan: texts.Plan, mode: Mode, repeat: int) -> None:
        wanted = self.wanted
        if wanted.compare:
            try:
                await speculate(self.client, mode)
            except ServerError as error:
                if error.code.name != "INVALID_ARGUMENT":
                    raise
                self.skipped[mode.name] = error.message
                return
            await self.client.flush_cache()
        if wanted.warmup:
            load = closed(min(wanted.warmup, self._batch), wanted.warmup)
            warm = self._planned(load, wanted.seed + 1, min(_WARM_TOKENS, wanted.max_tokens))
            await Run(self.client, warm, wanted.sending).go()
        if wanted.compare:
            self._say(f"repeat {repeat + 1} of {wanted.repeats}: {mode.name}")
        before = await self.client.server_info()
        run = Run(self.client, plan, wanted.sending, on_end=self._on_end)
        self._current = run, mode.name, repeat
        await run.go()
        after = await self.client.server_info()
        rounds = {name: count - before.rounds_by_tier[name] for name, count in after.rounds_by_tier.items()}
        switches = after.tier_switches - before.tier_switches
        self._current = None
        self.compilations = after.compilations_after_warmup
        self.runs.append(ModeRun(mode.name, repeat, tuple(run.records), rounds, switches))

    def _conditions(self, info: Any, modes: Sequence[Mode]) -> dict[str, Any]:
        wanted = self.wanted
        fields = (
            "version", "model", "drafter", "policy", "verification", "lossless", "device", "devices", "dtype",
            "max_seq_len", "max_batch_size",
        )  # fmt: skip
        return {
            "target": self.target,
            **{name: getattr(info, name) for name in fields},
            "tiers": list(info.tiers),
            "buckets": list(info.buckets),
            "modes": [mode.name for mode in modes],
            "workloads": sorted(wanted.library),
            "max_tokens": wanted.max_tokens,
            "temperature": wanted.sending.temperature,
            "seed": wanted.seed,
            "warmup": wanted.warmup,
            "repeats": wanted.repeats,
        }
