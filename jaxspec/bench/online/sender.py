"""Sends a plan to a server and records what comes back.

Owns the clock and the order of sends. An open loop sends at its times whatever the answers do; how
late the generator itself was is part of every record. Must not know how numbers are computed or printed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from jaxspec.bench.online.records import INCOMPLETE, INTERRUPTED, OK, Objectives, Record
from jaxspec.bench.online.texts import Plan, Planned
from serve.client import AsyncClient, Delta, Finished, Options, ServerError

#: Names of GetServerInfo's tiers and of modes.
OFF, ADAPTIVE = "off", "adaptive"


@dataclasses.dataclass(frozen=True)
class Mode:
    """How the server speculates.

    Attributes:
      name: "off", "adaptive", or a static tier's name.
      depth: draft tokens of the static tier; None for the others.
    """

    name: str
    depth: int | None = None


def modes_of(tiers: Sequence[str]) -> list[Mode]:
    """Off, every static tier that drafts, adaptive: of GetServerInfo's tiers.

    Raises:
      ValueError: a server without tiers to compare.
    """
    static = [Mode(name, _depth(name)) for name in tiers if name != OFF]
    if not static:
        raise ValueError(f"--compare needs a server with at least 1 tier that drafts, got tiers {list(tiers)}")
    return [Mode(OFF), *sorted(static, key=lambda mode: mode.depth or 0), Mode(ADAPTIVE)]


def _depth(name: str) -> int:
    """Of "chain-3" or "tree-4x3/16"."""
    return int(name.partition("-")[2].partition("x")[0])


async def speculate(client: AsyncClient, mode: Mode) -> None:
    """From the next round on; ServerError where the server cannot."""
    await client.set_speculation(mode.name if mode.depth is None else "static", mode.depth)


@dataclasses.dataclass(frozen=True)
class Sending:
    """What all requests of a run share.

    Attributes:
      timeout: seconds after which a request is given up, as its deadline.
      slo: sent along where it names TTFT or TPOT.
    """

    temperature: float = 0.0
    timeout: float = 600.0
    slo: Objectives = dataclasses.field(default_factory=Objectives)

    def options(self, planned: Planned) -> Options:
        """What the request says besides its prompt; it generates exactly max_tokens."""
        options = Options(
            temperature=self.temperature, max_tokens=planned.max_tokens, ignore_eos=True, seed=planned.index,
            route=planned.route,
        )  # fmt: skip
        if self.slo.tpot_ms is not None:
            options["tpot_ms"] = self.slo.tpot_ms
        if self.slo.ttft_ms is not None:
            options["ttft_ms"] = self.slo.ttft_ms
        return options


class Run:
    """One plan on its way to a server.

    Attributes:
      records: of requests that have ended, in order of their end; those that Ctrl-C cut short too.
    """

    def __init__(
        self, client: AsyncClient, plan: Plan, sending: Sending, *, on_end: Callable[[Record], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        self.client, self.plan, self.sending = client, plan, sending
        self.records: list[Record] = []
        self._on_end, self._clock, self._began = on_end, clock, 0.0

    async def go(self) -> list[Record]:
        """Sends everything and waits for every end."""
        waiting = iter(self.plan.requests)
        self._began = self._clock()
        async with asyncio.TaskGroup() as tasks:
            if self.plan.load.concurrency is not None:
                for _ in range(min(self.plan.load.concurrency, len(self.plan.requests))):
                    tasks.create_task(self._place(waiting))
            else:
                for planned in waiting:
                    wait = planned.arrival.at - self._now()
                    if wait > 0:
                        await asyncio.sleep(wait)
                    tasks.create_task(self._send(planned, planned.arrival.at))
        return self.records

    async def _place(self, waiting: Iterator[Planned]) -> None:
        """One of a closed loop's places."""
        for planned in waiting:
            await self._send(planned, self._now())

    def _now(self) -> float:
        return self._clock() - self._began

    async def _send(self, planned: Planned, due: float) -> None:
        sent = last = self._now()
        first: float | None = None
        ended: float | None = None
        first_tokens, prompt_tokens = 0, planned.prompt_tokens
        gaps: list[tuple[float, int]] = []
        rounds = drafted = accepted = 0
        status, words = INTERRUPTED, ""
        try:
            options = self.sending.options(planned)
            async for event in self.client.stream(planned.prompt, timeout=self.sending.timeout, **options):
                now = self._now()
                if isinstance(event, Delta):
                    count = len(event.token_ids)
                    if count and first is None:
                        first, first_tokens, last = now, count, now
                    elif count:
                        gaps.append((now - last, count))
                        last = now
                elif isinstance(event, Finished):
                    stats, ended = event.speculation, now
                    rounds, drafted = stats.num_spec_steps, stats.num_draft_tokens
                    accepted = stats.num_accepted_draft_tokens
                else:
                    prompt_tokens = event.prompt_tokens
            status = OK if ended is not None else INCOMPLETE
        except ServerError as error:
            status, words = error.code.name, error.message
        finally:
            if status != OK or ended is None:
                ended = self._now()
            record = Record(
                index=planned.index, route=planned.route, phase=planned.arrival.phase, due=due, sent=sent,
                ended=ended, prompt_tokens=prompt_tokens, status=status, message=words, first=first,
                first_tokens=first_tokens, gaps=tuple(gaps), rounds=rounds, drafted=drafted,
                accepted=accepted,
            )  # fmt: skip
            self.records.append(record)
            self._on_end(record)
