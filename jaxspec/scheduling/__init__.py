"""Which requests run next, and in which pages. Host only: imports the standard library, `request` and `tier`."""

from __future__ import annotations

from jaxspec.scheduling.lag import DraftLag
from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.plan import DecodeRow, Plan, PrefillChunk, SchedulerConfig, SchedulerStats
from jaxspec.scheduling.prefix_cache import PrefixCache
from jaxspec.scheduling.scheduler import Scheduler

__all__ = [
    "DecodeRow",
    "DraftLag",
    "PageAllocator",
    "Plan",
    "PrefillChunk",
    "PrefixCache",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
]
