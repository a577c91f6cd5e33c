"""Ahead-of-time compilation: one executable per reachable (function, tier, bucket, variant).

Owns the persistent cache's location, the pool of compiling threads and the counter that
proves that nothing compiles after warm-up.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxspec.tier import Tier

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the process's XLA compilations since it was created (jax.monitoring).

    A load from the persistent cache counts as one: after warm-up there is neither.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1


def cache_directory() -> Path:
    """Where executables are kept by default: the user's cache directory."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "jaxspec" / "executables"


def use_persistent_cache(where: bool | str | Path) -> Path | None:
    """Points JAX's compilation cache at `where` (True: the user's cache directory), unless the user has chosen one."""
    if where is False:
        return None
    chosen = jax.config.values.get("jax_compilation_cache_dir")
    if chosen:
        return Path(chosen)
    directory = cache_directory() if where is True else Path(where)
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


@dataclasses.dataclass(frozen=True)
class SpecRuntimeState:
    """What is bound to one tier: its executables by (bucket, sampled). Immutable; switching is a look-up.

    Attributes:
      executables: {(bucket, sampled): compiled round}.
    """

    tier: Tier
    executables: Mapping[tuple[int, bool], Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """One function to compile: `lower` traces and lowers it, in the compiling thread."""

    key: Any
    lower: Callable[[], Any]


def compile_all(jobs: Sequence[Job], *, progress: bool, threads: int | None = None) -> tuple[dict[Any, Any], float]:
    """Compiles the jobs in parallel threads.

    Args:
      progress: show a bar on standard error.
      threads: by default one a core, at most 16.

    Returns:
      ({key: compiled}, wall seconds).
    """
    began = time.perf_counter()
    done: dict[Any, Any] = {}
    with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(lambda job=job: job.lower().compile()): job for job in jobs}
        bar = tqdm(as_completed(futures), total=len(jobs), desc="compiling", disable=not progress, leave=False)
        for future in bar:
            done[futures[future].key] = future.result()
    return done, time.perf_counter() - began
