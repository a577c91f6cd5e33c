"""Which requests run next, and in which pages.

Host only: imports the standard library, NumPy, `request` and `sizes`.
"""

from __future__ import annotations

from jaxspec.scheduling.lag import DraftLag
from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.plan import DecodeRows, Grant, Plan, PrefillChunk, SchedulerConfig, SchedulerStats
from jaxspec.scheduling.prefix_cache import PrefixCache
from jaxspec.scheduling.scheduler import Scheduler

__all__ = [
    "DecodeRows",
    "DraftLag",
    "Grant",
    "PageAllocator",
    "Plan",
    "PrefillChunk",
    "PrefixCache",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
]
