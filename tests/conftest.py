"""Strict JAX on the CPU for every test: no implicit promotion, exact float32 products, several devices."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
import quick
from jax._src.core import trace_state_clean  # jax.core has no name for it

if TYPE_CHECKING:
    from jaxspec import LLM

#: Containers that come before the collector looks at the young ones, and looks after which it goes on to the older.
#: Tracing makes millions that stay: with CPython's 700, 10 and 10, some 8% of the processor's time of an engine's test
#: (perf, tests/engine/test_budgets.py) went into looking.
COLLECT = (20_000, 20, 10)
#: Mappings from which on a process drops what the files of tests before have compiled.
MANY = 15_000
#: Bytes of JAX's own cache that are kept from one run to the next.
CACHED = 1 << 30
#: Whether a run before this one has left programs: the same for all workers, as one of them leaves some at once.
GOES_ON = pytest.StashKey[bool]()
#: What was collected, before anything was deselected.
COLLECTED = pytest.StashKey[list[pytest.Item]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optimized", action="store_true", help="compile as users do, instead of quickly")
    told = "write what tests cover (tests/support.py) to docs, or to another directory"
    parser.addoption("--write-support", nargs="?", const="docs", metavar="DIR", help=told)
    parser.addoption("--exhaustive", action="store_true", help="run what is marked exhaustive, at full length")


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads where operations of a program come from
    gc.set_threshold(*COLLECT)
    if not config.getoption("--optimized"):
        jax.config.update("jax_disable_most_optimizations", True)
        with pytest.MonkeyPatch.context() as patch:  # XLA reads it once; processes that tests start compile as users do
            patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {quick.FLAGS}")
            jax.devices()
        draw_from_few_programs()
        put_without_programs()
    keep_programs(config)


def draw_from_few_programs() -> None:
    """Makes normal draws of tests parts of larger ones: JAX compiles a program for every shape, for some 80 ms.

    They stay the same numbers: each depends on the key and on its place in the array alone, whatever follows it
    (jax_threefry_partitionable).
    """
    normal = jax.random.normal

    def drawn(key: Any, shape: Any = (), dtype: Any = None, **options: Any) -> jax.Array:
        size = math.prod(shape) if isinstance(shape, tuple | list) else 0
        kind = jax.dtypes.canonicalize_dtype(float if dtype is None else dtype)
        if options or kind != np.float32 or not 0 < size <= 1 << 16 or not trace_state_clean():
            return normal(key, shape, dtype, **options)
        whole = normal(key, (1 << max(8, 2 * math.ceil((size - 1).bit_length() / 2)),), np.float32)
        return jax.device_put(np.asarray(whole)[:size].reshape(shape))

    jax.random.normal = drawn


def put_without_programs() -> None:
    """Makes arrays of what tests have in NumPy without a program: JAX compiles one for every shape, for some 25 ms.

    Where jaxspec does so it remains, and is counted with what else is compiled.
    """
    from jax._src.lax import lax

    if (stage := getattr(lax, "stage_p", None)) is None:  # before JAX 0.10
        return
    own = stage.impl

    def put(x: Any) -> jax.Array:
        frame: Any = sys._getframe(1)
        while (name := frame.f_globals.get("__name__", "")).startswith("jax.") and frame.f_back:
            frame = frame.f_back
        if name.startswith(("jaxspec", "serve", "pallas_kernels")) or not trace_state_clean():
            return own(x)
        return jax.device_put(x.copy() if isinstance(x, np.ndarray) else x)

    stage.def_impl(put)


def keep_programs(config: pytest.Config) -> None:
    """JAX's own cache in pytest's, of all that tests compile. What is found there counts as compiled."""
    from jaxspec.runtime import warmup  # under the settings above

    cache = getattr(config, "cache", None)
    jax.config.update("jax_enable_compilation_cache", cache is not None)
    if cache is None:
        return
    # JAX's key knows neither this host's instructions nor the flags that are set for a moment. By the last name engines
    # take the directory for theirs, and keep their own executables in `kept_executables`.
    directory = cache.mkdir("jax") / host(config.getoption("--optimized")) / "jaxspec-xla"
    config.stash[GOES_ON] = getattr(config, "workerinput", {}).get("goes_on", directory.exists())
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # else its key holds the directory's path
    # Engines' programs twice, from the second run on: `kept_executables` knows them by the sources, which changes in
    # review alter, JAX by what those make of them. In the first, which may be the only one, once is enough.
    if config.stash[GOES_ON]:
        warmup.kept_once = contextlib.nullcontext
    if directory.exists() and "PYTEST_XDIST_WORKER" not in os.environ:
        forget(directory)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker what the run knows (a hook of pytest-xdist)."""
    if GOES_ON in node.config.stash:
        node.workerinput["goes_on"] = node.config.stash[GOES_ON]


def host(optimized: bool) -> str:
    """A name for what programs are compiled for, and how."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8", errors="replace").splitlines() if cpu.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    told = f"{platform.machine()} {features} {'' if optimized else quick.FLAGS}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def forget(directory: Path) -> None:
    """Removes the oldest files beyond CACHED bytes."""
    left = CACHED
    found = [(path, path.stat()) for path in directory.iterdir()]
    for path, stat in sorted(found, key=lambda entry: -entry[1].st_mtime):
        left -= stat.st_size
        if left < 0:
            path.unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = list(items)
    if config.getoption("--write-support") is not None:
        import support

        support.write(Path(config.getoption("--write-support")), items)
    if config.getoption("--exhaustive"):
        return
    for item in items:
        if marker := item.get_closest_marker("exhaustive"):
            if not marker.args:
                raise pytest.UsageError(f"{item.nodeid}: exhaustive must say why")
            item.add_marker(pytest.mark.skip(reason=f"left to `make test-all`: {marker.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that says what it covers is watched: whether it did."""
    if item.get_closest_marker("covers") is None:
        return (yield)
    import support

    watch = support.Watch()
    with watch.entered():
        result = yield
    if missed := watch.missed(support.covered_by(item, here=True)):
        pytest.fail(f"the test says that it covers {', '.join(missed)}, with drafts that are accepted, and did not")
    return result


@pytest.fixture(scope="session")
def collected(pytestconfig: pytest.Config) -> list[pytest.Item]:
    """All tests of this run, and those of its files that were not chosen."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    """Whether this run is to take its time: full lengths, fresh seeds."""
    return pytestconfig.getoption("--exhaustive")


@pytest.fixture(scope="session")
def kept_executables(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines keep executables for those that are made alike: in other processes, and in runs to come."""
    cache = getattr(pytestconfig, "cache", None)
    return tmp_path_factory.getbasetemp() / "executables" if cache is None else cache.mkdir("executables")


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of a token a letter (a to l) and an end (12), with the smaller models beside it, as in the demo."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    from jaxspec.checkpointing import hf
    from jaxspec.models.tiny import tiny_target

    letters = Tokenizer(models.BPE({c: i for i, c in enumerate([*"abcdefghijkl", "</s>"])}, []))
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens([AddedToken("</s>", special=True)])
    base = tmp_path_factory.mktemp("models")
    target = tiny_target(0, bos_token_id=None, eos_token_ids=(12,))
    hf.save_model(target, base / "target", tokenizer=letters, dtype=jax.numpy.float32)
    hf.save_model(tiny_target(1, num_layers=1, bos_token_id=None), base / "draft", dtype=jax.numpy.float32)
    return base / "target"


@pytest.fixture(scope="session")
def tiny_llm(tiny_directory: Path, kept_executables: Path) -> LLM:
    """One static tier, sampled rounds only: few executables. For tests that leave it idle."""
    from jaxspec import LLM

    with quick.prompts_alone():
        made = LLM(
            str(tiny_directory), "ngram", {"depth": 3}, max_batch_size=2, max_seq_len=64, seed=5, progress=False,
            page_size=8, prefill_chunk=16, variants=("sampled",), batch_buckets=(2,), compile_cache=kept_executables,
            warmup="eager",
        )  # fmt: skip
    assert made.stats.compilations_after_warmup == 0
    return made


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """A process runs many files of tests: what they compiled must not pile up.

    What a file leaves is looked through once, and not again with what later ones leave: `LLM.close` and tests collect
    garbage at once, which takes seconds in a process of many engines.
    """
    yield
    if Path("/proc/self/maps").exists() and Path("/proc/self/maps").read_bytes().count(b"\n") > MANY:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()
