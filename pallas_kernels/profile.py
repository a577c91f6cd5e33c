"""Device time of kernels, from JAX's profiler: what ran, when, and the gaps between.

Wall-clock times of short kernels are times of the host and of its queue; these are not.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel on the device. start and seconds on the profiler's clock, in seconds."""

    name: str
    start: float
    seconds: float


def record(run: Callable[[], Any]) -> list[Event]:
    """Kernels that ran on the first device while `run` did, in order of their start.

    `run` must have compiled before. On backends whose profile has no device lines (CPU) the list is empty.
    """
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(run())
        files = sorted(Path(directory).rglob("*.trace.json.gz"))
        trace = json.loads(gzip.decompress(files[0].read_bytes())) if files else {"traceEvents": []}
    return events(trace["traceEvents"])


def events(trace: Sequence[dict[str, Any]]) -> list[Event]:
    """The kernels of the first device in a list of Chrome trace events."""
    label = {"process_name": {}, "thread_name": {}}
    for e in trace:
        if e.get("name") in label:
            label[e["name"]][e["pid"], e.get("tid") if e["name"] == "thread_name" else None] = e["args"]["name"]
    devices = sorted(
        name for name in label["process_name"].values() if name.startswith("/device:") and "CPU" not in name
    )
    if not devices:
        return []
    found = []
    for e in trace:
        if e.get("ph") != "X" or label["process_name"].get((e["pid"], None)) != devices[0]:
            continue
        line = label["thread_name"].get((e["pid"], e.get("tid")), "")
        # GPUs list kernels by stream, TPUs on a line of operations; other lines repeat them as modules and steps.
        if "Stream" in line or line == "XLA Ops":
            found.append(Event(e["name"], e["ts"] * 1e-6, e["dur"] * 1e-6))
    return sorted(found, key=lambda event: event.start)


def medians(found: Sequence[Event]) -> dict[str, tuple[int, float]]:
    """{kernel: (how often it ran, median seconds)}, the dearest in total first."""
    by_name: dict[str, list[float]] = {}
    for event in found:
        by_name.setdefault(event.name, []).append(event.seconds)
    order = sorted(by_name, key=lambda name: -sum(by_name[name]))
    return {name: (len(by_name[name]), statistics.median(by_name[name])) for name in order}


def busy(found: Sequence[Event]) -> tuple[float, float]:
    """(seconds in which some kernel ran, seconds from the first start to the last end)."""
    if not found:
        return 0.0, 0.0
    total, end = 0.0, found[0].start
    for event in found:
        total += max(0.0, event.start + event.seconds - max(event.start, end))
        end = max(end, event.start + event.seconds)
    return total, end - found[0].start
