"""Strict JAX on the CPU for every test: no implicit promotion, exact float32 products, several devices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_num_cpu_devices", 4)

#: Mappings of memory from which on a process drops what it has compiled; Linux allows 65,530 of them, and XLA, which
#: makes some for every executable, aborts the process there.
MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """A process runs many files of tests: what they compiled must not pile up."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()
