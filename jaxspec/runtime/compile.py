"""Ahead-of-time compilation: one executable per reachable (function, tier, bucket, variant).

Owns what a compilation is, the persistent cache's location, the limit of memory mappings and the counter that proves
that nothing compiles on the path of a request. `warmup` runs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspec.runtime.executables import ExecutableStore
from jaxspec.tier import Tier

_log = logging.getLogger(__name__)

#: Directory of JAX's own cache, where it was put there by this module.
_XLA = "jaxspec-xla"
#: User's cache directories of which the log has said that they cannot be made.
_told: set[Path] = set()
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
#: Executables between two looks at the process's memory mappings, and the share of them that may be used.
_LOOK_EVERY, _USABLE = 8, 0.9


class CompileCounter:
    """Counts the process's XLA compilations since it was created (jax.monitoring).

    A load from the persistent cache counts as one: after warm-up there is neither.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT and not _thread.uncounted:
            self.count += 1


class _Thread(threading.local):
    uncounted = False


_thread = _Thread()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """What this thread compiles meanwhile belongs to a warm-up: no `CompileCounter` counts it."""
    _thread.uncounted = True
    try:
        yield
    finally:
        _thread.uncounted = False


def cache_directory() -> Path:
    """Where executables are kept by default: the user's cache directory."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "jaxspec" / "executables"


def _user_chose() -> bool:
    """Whether the user has chosen a directory for JAX's own cache, which is used for everything then."""
    chosen = jax.config.values.get("jax_compilation_cache_dir")
    return bool(chosen) and Path(chosen).name != _XLA


def check_named(where: bool | str | Path) -> None:
    """Makes the directory that `compile_cache` names, where that is one that will be used.

    Raises:
      ValueError: it is none, and cannot be made.
    """
    if isinstance(where, bool) or _user_chose():
        return
    try:
        Path(where).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"compile_cache '{where}' is no directory and cannot be made: {e}") from e


def use_persistent_cache(where: bool | str | Path) -> Path | None:
    """The directory in which executables are to be kept (True: in the user's cache directory); None for none.

    JAX's own cache is pointed there too, for what is compiled outside the rounds. Where the user has chosen one
    (jax_compilation_cache_dir), it is used for everything, as it is, and the result is None.

    A user without a cache directory (a container that is read-only) starts without one, which the log says.

    Raises:
      ValueError: a directory that was named is none, and cannot be made.
    """
    if where is False:
        return None
    if _user_chose():
        return None
    check_named(where)
    directory = cache_directory() if where is True else Path(where)
    if not jax.config.values.get("jax_compilation_cache_dir"):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            if directory not in _told:  # one engine asks twice
                _log.warning("executables are not kept: %s; compile_cache names another directory, or says False", e)
                _told.add(directory)
            return None
        jax.config.update("jax_compilation_cache_dir", str(directory / _XLA))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory / "rounds"


@dataclasses.dataclass(frozen=True)
class SpecRuntimeState:
    """What is bound to one tier: its executables by (bucket, sampled). Immutable; switching is a look-up.

    Attributes:
      executables: {(bucket, sampled): compiled round}.
    """

    tier: Tier
    executables: Mapping[tuple[int, bool], Any]


#: Tracing is Python's work: more threads at it would be no faster, and would keep the one that serves from its turn.
_tracing = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One function to compile: `lower` traces and lowers it, in the compiling thread.

    Attributes:
      args: shapes of what it is called with.
      fingerprint: of all that its tracing depends on; None where that cannot be told.
    """

    key: Any
    args: tuple[Any, ...]
    lower: Callable[[], Any]
    fingerprint: str | None = None

    def compiled(self, store: ExecutableStore | None) -> Any:
        """The executable, from the store where there is one and it can be."""

        def compile() -> Any:
            with _tracing:
                lowered = self.lower()
            return lowered.compile()

        if store is None or self.fingerprint is None:
            return compile()
        return store.get(self.fingerprint, self.args, compile)


def memory_mappings() -> tuple[int, int] | None:
    """How many memory mappings this process has, and how many the system allows it; None where that is not known.

    On CPUs an executable takes three for each of its kernels, hundreds in all, and XLA aborts the process where there
    are no more.
    """
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_bytes())
        return Path("/proc/self/maps").read_bytes().count(b"\n"), limit
    except (OSError, ValueError):
        return None


def check_mappings(before: tuple[int, int] | None, done: int, total: int) -> None:
    """Looks now and then whether `total` executables can have the mappings they need, after `done` of them.

    Raises:
      ValueError: they cannot; XLA would abort the process.
    """
    if done % _LOOK_EVERY:
        return
    now = memory_mappings()
    if before is None or now is None or now[0] <= _USABLE * now[1]:
        return
    needed = before[0] + (now[0] - before[0]) * total // done
    raise ValueError(
        f"{total} executables need about {needed} memory mappings, and this system allows a process {now[1]} "
        f"(vm.max_map_count). Compile fewer (max_batch_size or batch_buckets, variants, the speculation's tiers) or "
        f"allow more: sysctl -w vm.max_map_count={max(262144, 2 * needed)}"
    )
