"""A scheduler of 16 pages, and what brings requests into it."""

from __future__ import annotations

from typing import Any

from jaxspec.request import Request, RequestStatus, SamplingParams
from jaxspec.scheduling import Plan, Scheduler, SchedulerConfig
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.sizes import Sizes


def make(**changes: Any) -> Scheduler:
    """16 pages of 4 tokens, rounds of up to 3 tokens."""
    config: dict[str, Any] = {
        "slots": 4,
        "num_pages": 16,
        "page_size": 4,
        "pages_per_seq": 11,
        "max_seq_len": 40,
        "max_depth": 2,
        "prefill_chunk": 8,
        "max_num_batched_tokens": 8,
        "max_rounds": 1,
    }
    sizes = Sizes(**{name: changes.pop(name, value) for name, value in config.items()})
    return Scheduler(SchedulerConfig(sizes, **changes), clock=lambda: 5.0)


def make_request(name: str, prompt: int | list[int] = 4, max_tokens: int = 8, priority: int = 0) -> Request:
    tokens = prompt if isinstance(prompt, list) else [ord(name[0])] * prompt
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), seed=0, priority=priority)


def step(scheduler: Scheduler, growth: int = 3, beside: PrefillShape | None = None) -> Plan:
    plan = scheduler.plan(beside=beside)
    scheduler.dispatched(plan, growth)
    return plan


def prefilled(scheduler: Scheduler, *requests: Request) -> None:
    """Adds requests and brings them to their first token, growing nobody."""
    for request in requests:
        scheduler.add(request)
        while request.status is not RequestStatus.RUNNING:
            chunks = scheduler._chunks(admit=True)
            assert [chunk.request for chunk in chunks] == [request]
            scheduler.dispatched(Plan(chunks, scheduler.slots.due().kept([]).decode(()), ()))
        assert scheduler.commit(request, request.epoch, [1])
