"""Strict JAX on the CPU for every test: no implicit promotion, exact float32 products, several devices."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

#: One module of LLVM for each program instead of one for each of its fusions. Tests compile thousands of small programs
#: and run each a few times: unoptimised and in one piece, they compile several times faster and take a fifth of the
#: memory mappings, of which Linux allows a process 65,530.
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
#: Mappings from which on a process drops what the files of tests before have compiled.
MANY = 15_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optimized", action="store_true", help="compile as users do, instead of quickly")


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_compilation_cache", False)  # JAX's own; of engines, `kept_executables`
    if config.getoption("--optimized"):
        return
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:  # XLA reads it once; processes that tests start compile as users do
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK}")
        jax.devices()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker is left alone with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def kept_executables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines of this run keep executables for those of other processes that are made alike."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "executables"


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """A process runs many files of tests: what they compiled must not pile up."""
    yield
    if Path("/proc/self/maps").exists() and Path("/proc/self/maps").read_bytes().count(b"\n") > MANY:
        jax.clear_caches()
        gc.collect()
