"""Kernels on Mosaic GPU that begin before the one before them has ended (programmatic dependent launch).

A kernel that calls `begin` and `wait` is launched while the kernels that it depends on still run, once all programs of
these have begun. Before `wait` it may read what no kernel of the executable writes, its parameters, and write nothing
outside of its own shared memory; after `wait` all that was launched before has ended, and what it wrote can be read.
That is passed on: a kernel ends after its own `wait`, so who waits for it waits for all before it. And a kernel whose
predecessor calls `begin` after `wait`, or is not launched early, may read before its own `wait` what was written before
that predecessor. So what a kernel has read behind its `wait` another may read before its own if between them stands
such a kernel that the one depends on and that depends on the other, and nobody writes it: attention of layers behind
the first their pages (`tree_attention.reference.Shared`).

JAX 0.12 and newer put such launches into CUDA's graphs (`MosaicGpuRecord` in its plugin); before, graphs kept no such
edge and kernels lost by it (docs/notes.md, 2026-11-23), so there both do nothing. Nor do they in the interpreter.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

#: The first version of JAX whose graphs keep the edges.
_SINCE = 0, 12


def overlaps(interpret: Any) -> bool:
    """Whether kernels are launched so."""
    return not interpret and jax.__version_info__ >= _SINCE


def begin(interpret: Any) -> None:
    """Lets the next kernel be launched as soon as every program of this one has come here."""
    if overlaps(interpret):
        plgpu.griddepcontrol_launch_dependents()


def wait(interpret: Any) -> None:
    """Waits until all kernels before this one have ended."""
    if overlaps(interpret):
        plgpu.griddepcontrol_wait()
