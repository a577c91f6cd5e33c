"""Executables on disk: found again by an engine that is made alike, by no other, and as good as compiled ones."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.learnt import Learns, Learnt
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.assemble import known_rounds
from jaxspec.choosing import choose_policy
from jaxspec.config import SpeculationConfig
from jaxspec.loading import bind_drafter
from jaxspec.runtime import compile as compilation
from jaxspec.runtime import executables, warmup
from jaxspec.runtime.compile import Compilation, use_persistent_cache
from jaxspec.runtime.executables import ExecutableStore, Fingerprints, IndescribableError
from jaxspec.runtime.programs import AdmitKey, CatchUpKey, LogprobsKey, PrefillKey, RoundKey, products_in
from jaxspec.runtime.warmup import Warmup
from jaxspec.speculation.round import RoundSpec, round_fn
from jaxspec.speculation.state import Geometry
from jaxspec.tier import PLAIN, Tier

GEO = Geometry(slots=2, num_pages=8, page_size=8, pages_per_seq=4, max_depth=3)
TREE = Tier(2, 2, 5)
#: What the first request of an engine for one needs, besides a prefill.
FIRST = (AdmitKey(), LogprobsKey(1, 1, 1), RoundKey(PLAIN, 1, True))
COST = CostTable({(tier, 4): 1e-3 for tier in (PLAIN, TREE)})


@pytest.fixture
def caching() -> Iterator[None]:
    """No cache of JAX's, from which programs would come that are then not stored; afterwards as it was."""
    ours = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache")
    before = {name: value for name, value in jax.config.values.items() if name.startswith(ours)}
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def spec_of(bench: Any, kind: str, **changes: Any) -> RoundSpec:
    drafter, _ = bind_drafter(kind, bench.modules[kind], dataclasses.replace(GEO, **changes))
    graph = drafter.graph if kind in ("medusa", "dflash", "dspark", "dflash2") else drafter.core.graph
    return RoundSpec(graph, bench.target.config, dataclasses.replace(GEO, **changes), drafter, rejection=False)


@pytest.mark.parametrize(
    "kind", ["draft_model", "eagle3", "eagle1", "mtp", "medusa", "peagle", "dflash", "dspark", "dflash2"]
)
def test_rounds_of_every_drafter_can_be_described(bench: Any, kind: str):
    told = lambda spec, *rest: Fingerprints()(round_fn(spec, *rest))
    spec = spec_of(bench, kind)
    assert told(spec, Tier(2), True) == told(spec_of(bench, kind), Tier(2), True)
    others = {
        told(spec, Tier(2), True),
        told(spec, Tier(2), False),
        told(spec, Tier(3), True),
        told(spec_of(bench, kind, num_pages=9), Tier(2), True),
        told(dataclasses.replace(spec, rejection=True), Tier(2), True),
        told(dataclasses.replace(spec, config=dataclasses.replace(spec.config, rope_theta=5e3)), Tier(2), True),
    }
    assert len(others) == 6


def test_a_drafter_that_holds_its_parameters_is_not_described(bench: Any):
    spec = spec_of(bench, "eagle3")
    assert isinstance(spec.drafter, object)
    spec.drafter.core.params = {"w": jnp.zeros(3)}  # type: ignore[union-attr]
    with pytest.raises(IndescribableError, match=r"an array of shape \(3,\)"):
        Fingerprints()(round_fn(spec, Tier(2), True))


def test_fingerprints_tell_values_apart():
    shape = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype)

    values = [
        1, 1.0, True, "1", b"1", None, (1, 2), [1, 2], (2, 1), {"a": 1}, {"a": 2}, {"b": 1}, {1, 2}, (1, (2,)), Tier(1),
        Tier(2), GEO, shape(2, 3), shape(3, 2), shape(2, 3, dtype=jnp.float32), jnp.float32, np.dtype("float32"),
        functools.partial(round_fn, 1), functools.partial(round_fn, 2),
        jax.tree.structure((1, 2)), jax.tree.structure([1, 2]),
    ]  # fmt: skip
    digests = [Fingerprints()(value) for value in values]
    assert len(set(digests)) == len(values)
    shared = Fingerprints()
    assert [shared(value) for value in values] == digests
    assert shared((values, values)) == shared((list(values), list(values)))


def test_what_cannot_be_described_spoils_nothing_else():
    fingerprints = Fingerprints()
    for bad in (np.zeros(2), jnp.zeros(2), object(), lambda: 0, (GEO, [object()]), Path("x")):
        with pytest.raises(IndescribableError):
            fingerprints((GEO, bad))
    assert fingerprints(GEO) == Fingerprints()(GEO)


def test_fingerprints_do_not_depend_on_the_process():
    code = (
        "from jaxspec.runtime.executables import Fingerprints; from jaxspec.tier import Tier;"
        "print(Fingerprints()([{'b': {'x', 'y', 'z'}, 'a': Tier(3)}, Tier, 1e-3]))"
    )
    outputs = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        outputs.add(run.stdout)
    assert len(outputs) == 1, outputs


def build(bench: Any, cache: Path, **config: Any) -> Any:
    """Of trees and plain rounds; with another page size of trees alone."""
    config = dict(
        batch_buckets=(4,), variants=("sampled",), compile_cache=cache, keep_learnt=True, together=False, **config
    )
    trees_alone = SpeculationConfig(depth=TREE.depth, topk=TREE.topk, num_nodes=TREE.num_nodes)
    speculation = trees_alone if "page_size" in config else SpeculationConfig(tiers=(PLAIN, TREE))
    return bench.build("eagle3", speculation, COST, **config)


@pytest.mark.covers("learnt", kind="eagle3")
def test_a_second_engine_traces_nothing_and_says_the_same(
    bench: Any, tools: Any, tmp_path: Path, caching: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    script = lambda: tools.script(TREE, TREE, PLAIN, TREE, PLAIN)
    first = build(bench, tmp_path)
    first.use_policy(script())
    expected = tools.drive(first, tools.workload())
    first.use_policy(first.new_policy())
    assert not first.controller.policy.learnt().rates
    tools.drive(first, tools.workload())
    first.close()
    stored = sorted(path.name for path in tmp_path.rglob("rounds/*/*"))
    assert len(stored) == first.runner.num_executables

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("traced again")

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Traced, "lower", refuse)
        second = build(bench, tmp_path)
    (kept,) = tmp_path.glob("learnt/*.json")  # what the first one's policy has learnt
    assert second.controller.policy.learnt().rates and '"model files": "these"' in kept.read_text()
    before = second.runner.state.pages
    second.use_policy(script())
    outputs = tools.drive(second, tools.workload())
    assert [o.outputs for o in outputs] == [o.outputs for o in expected]
    assert before.is_deleted()  # the pool was given away, not copied
    assert second.stats.compilations_after_warmup == 0

    # A file that is no executable is replaced; one of another shape is never taken.
    (first_file,) = tmp_path.rglob(f"rounds/*/{stored[0]}")
    first_file.write_bytes(b"not an executable")
    with caplog.at_level(logging.WARNING):
        build(bench, tmp_path)
    assert "is compiled anew" in caplog.text
    assert first_file.read_bytes() != b"not an executable"
    other = build(bench, tmp_path, page_size=16)
    assert len(list(tmp_path.rglob("rounds/*/*"))) > len(stored)
    tokens = lambda outputs: [completion.token_ids for o in outputs for completion in o.outputs]
    assert tokens(tools.drive(other, tools.workload())) == tokens(expected)


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Set at the end, so that no thread waits for it for long."""
    event = threading.Event()
    yield event
    event.set()


def test_the_second_start_drafts_from_its_first_round(
    bench: Any, tools: Any, tmp_path: Path, caching: None, monkeypatch: pytest.MonkeyPatch, go: threading.Event
):
    """Of an engine for one request at a time, however short the first run was: nothing came while that wrote."""
    config = dict(max_batch_size=1, batch_buckets=(1,), variants=("sampled",), num_pages=12, warmup="background")
    kept = dict(compile_cache=tmp_path, keep_learnt=True)
    speculation = SpeculationConfig(tiers=(PLAIN, Tier(1), Tier(3)))
    start = lambda: bench.build("eagle3", speculation, **config, **kept)
    work, compiled, begun = tools.workload()[:1], Compilation.compiled, list[Any]()
    expected = bench.expected(work)

    def later(job: Compilation, store: Any) -> Any:
        if job.fingerprint not in store and not (job.key in FIRST or isinstance(job.key, PrefillKey)):
            begun.append(job.key)
            assert go.wait(120)
        return compiled(job, store)

    monkeypatch.setattr(Compilation, "compiled", later)
    first = start()
    tools.same(tools.drive(first, work), expected)
    assert not first.runner.ready(Tier(3), 1)
    assert first.runner.compiling
    go.set()
    first.finish_warmup()
    first.close()
    assert RoundKey(Tier(3), 1, True) in begun and CatchUpKey(1) in begun
    left = first.runner.num_executables - len(list(tmp_path.rglob("rounds/*/*")))
    assert left > 0, "not all was waited for"
    # Costs that were all learnt are taken; of some the others would compare with another time's.
    keeper, choice = first._decider.keeper, choose_policy(speculation, (1,), drafts=True, trees=True)
    assert keeper is not None and (learnt := keeper.read()) is not None and len(learnt.seconds) == 1
    assert not known_rounds(keeper, choice)
    costs = {(Tier(depth), 1, None): 1.0 + depth for depth in (0, 1, 3)}
    taught = Mock(spec=Learns, learnt=lambda: Learnt(seconds={key: (cost, 0.1) for key, cost in costs.items()}))
    keeper.keep(taught, at_once=True)
    assert known_rounds(keeper, choice) == costs
    go.clear()
    second = start()
    assert second.runner.ready(Tier(3), 1) and not second.runner.ready(Tier(1), 1)
    assert second.runner.costs == {key: cost for key, cost in costs.items() if key[0].depth != 1}, "none was timed"
    assert second.controller.policy.buckets_for(Tier(3), (1,)) == (1,), "it may draft at once"
    second.use_policy(StaticPolicy(Tier(3)))
    tools.same(tools.drive(second, work), expected)
    assert second.controller.rounds_by_tier[PLAIN] == 0 < second.controller.rounds_by_tier[Tier(3)]
    second.close()


def test_what_no_program_depends_on_changes_no_key(tmp_path: Path, caching: None):
    devices = jax.devices()[:1]
    store = ExecutableStore(tmp_path, devices)
    before = jax.config.values["jax_logging_level"]
    try:
        jax.config.update("jax_logging_level", "ERROR")
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
        assert ExecutableStore(tmp_path, devices)._directory == store._directory
    finally:
        jax.config.update("jax_logging_level", before)
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    try:
        assert ExecutableStore(tmp_path, devices)._directory != store._directory
    finally:
        jax.config.update("jax_default_matmul_precision", "highest")


@pytest.mark.parametrize(
    ("dtype", "chosen", "whole"),
    [("float32", None, True), ("float32", "bfloat16", False), ("bfloat16", None, False)],
)
def test_float32_is_multiplied_in_all_its_bits(dtype: str, chosen: str | None, whole: bool):
    """Unless the user has chosen otherwise: XLA's default is TF32 on GPUs, bfloat16 on TPUs."""
    x = jax.ShapeDtypeStruct((2, 2), jnp.dtype(dtype))
    jax.config.update("jax_default_matmul_precision", chosen)
    try:
        with products_in(x.dtype):
            text = jax.jit(lambda x: x @ x).trace(x).lower().as_text()
    finally:
        jax.config.update("jax_default_matmul_precision", "highest")
    assert ("HIGHEST" in text) is whole


def test_rounds_are_lowered_with_their_precision(bench: Any):
    runner = bench.engine("none").runner
    (job,) = runner._setting.compilations([RoundKey(PLAIN, 1, False)], False)
    jax.config.update("jax_default_matmul_precision", None)
    try:
        text = job.lower().as_text()
    finally:
        jax.config.update("jax_default_matmul_precision", "highest")
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products and all("HIGHEST" in line for line in products)


def test_nothing_is_run_that_others_could_have_written(tmp_path: Path, caching: None, caplog: pytest.LogCaptureFixture):
    devices = jax.devices()[:1]
    args = (jax.ShapeDtypeStruct((3,), jnp.float32),)
    compiled = lambda: jax.jit(lambda x: 2 * x).trace(*args).lower().compile()
    refuse: Any = lambda: pytest.fail("compiled again")
    store = ExecutableStore(tmp_path, devices)
    store.get("double", args, compiled)
    again = ExecutableStore(tmp_path, devices).get("double", args, refuse)
    np.testing.assert_array_equal(again(jnp.arange(3.0)), [0, 2, 4])
    (directory,) = tmp_path.iterdir()
    directory.chmod(0o770)
    open_to_all = ExecutableStore(tmp_path, devices)
    assert "writable by nobody else" in caplog.text
    made: list[Any] = []
    open_to_all.get("double", args, lambda: made.append(compiled()) or made[0])
    assert made
    file = tmp_path / "file"
    file.write_text("")
    assert ExecutableStore(file / "below", devices).get("double", args, compiled) is not None
    assert "executables are not kept" in caplog.text


def test_a_directory_that_cannot_be_written_is_read(
    tmp_path: Path, caching: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    args = (jax.ShapeDtypeStruct((2,), jnp.float32),)
    program = lambda: jax.jit(lambda x: x + 1).lower(*args).compile()
    ExecutableStore(tmp_path, jax.devices()[:1]).get("one", args, program)

    def read_only(*_: Any) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    store = ExecutableStore(tmp_path, jax.devices()[:1])
    assert store.get("one", args, lambda: pytest.fail("it was stored"))(jnp.zeros(2)).tolist() == [1, 1]
    for key in ("no/room", "none/either"):  # said once, and nothing is left behind
        store.get(key, args, program)
    assert caplog.text.count("cannot be stored") == 1
    assert store._directory is not None and [path.name for path in store._directory.iterdir()] == ["one"]


def test_old_environments_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    devices = jax.devices()[:1]
    for i in range(6):
        monkeypatch.setenv("XLA_FLAGS", f"--environment={i}")  # read by the key only: the backend is up
        store = ExecutableStore(tmp_path, devices)
        os.utime(store._directory, (i, i))
    assert len(list(tmp_path.iterdir())) == executables._KEPT
    assert store._directory is not None and store._directory.exists()


def test_a_cache_that_the_user_chose_is_left_alone(
    tmp_path: Path, caching: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    assert use_persistent_cache(False) is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert use_persistent_cache(True) is None
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "own")
    jax.config.update("jax_compilation_cache_dir", None)
    one = use_persistent_cache(tmp_path / "a")
    assert one is not None and one.parent == tmp_path / "a"
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="compile_cache '.*/file/c' is no directory and cannot be made: .*Not a dir"):
        use_persistent_cache(tmp_path / "file" / "c")
    monkeypatch.setattr(compilation, "cache_directory", lambda: tmp_path / "file" / "c")  # a container without a home
    assert use_persistent_cache(True) is None and "executables are not kept: " in caplog.text
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "a" / "jaxspec-xla"))
    two = use_persistent_cache(tmp_path / "b")  # JAX's stays where it is, the rounds go where they are told
    assert two is not None and two.parent == tmp_path / "b"


def test_more_executables_than_the_system_has_mappings_for_are_refused(monkeypatch: pytest.MonkeyPatch):
    """XLA would abort the process; most of the jobs are not begun any more."""
    begun: list[int] = []
    for module in (compilation, warmup):
        monkeypatch.setattr(module, "memory_mappings", lambda: (100 + 10 * len(begun), 400))
    program = types.SimpleNamespace(compile=lambda: time.sleep(0.005))
    jobs = [Compilation(i, (), lambda i=i: begun.append(i) or program) for i in range(80)]
    with pytest.raises(ValueError, match="80 executables need about [0-9]+ memory mappings, and this system allows a "):
        list(Warmup(jobs, threads=1).wait(range(80)))
    assert len(begun) < 80
    for module in (compilation, warmup):
        monkeypatch.setattr(module, "memory_mappings", lambda: None)
    assert len(dict(Warmup(jobs).wait(range(80)))) == 80
