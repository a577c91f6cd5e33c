"""Requests that live through a warm-up: the same tokens, whatever is compiled by then, and nothing on their path."""

from __future__ import annotations

import gc
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import warming
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.config import SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.request import SamplingParams
from jaxspec.runtime import warmup as warm_ups
from jaxspec.runtime.compile import Compilation, CompileCounter
from jaxspec.runtime.executables import kept_once
from jaxspec.runtime.programs import AdmitKey, LogprobsKey, PrefillKey, RoundKey
from jaxspec.runtime.runner import Runner
from jaxspec.runtime.warmup import Progress, Warmup
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.tier import PLAIN, Tier

TIERS = (PLAIN, Tier(3))
#: A machine that cannot even compile a tiny model in this time hangs.
PATIENCE = 120.0


class Gate:
    """Lets jobs be compiled one at a time, as a test asks for them.

    Attributes:
      begun: keys of jobs that a thread has taken up.
    """

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self._free = threading.Semaphore(0)
        self._opened = False

    def pass_one(self, job: Compilation) -> None:
        self.begun.append(job.key)
        if not self._opened:
            assert self._free.acquire(timeout=PATIENCE)

    def let(self, count: int = 1) -> None:
        self._free.release(count)

    def open(self) -> None:
        self._opened = True
        self._free.release(1000)


@pytest.fixture
def gate(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every job waits here, but for those that the first request needs; plain decoding to compare with is there."""
    bench.engine("none")
    gc.collect()  # engines of earlier tests: what their threads still compile would wait here too
    waited(no_warm_up)
    gate, compiled = Gate(), Compilation.compiled

    def waiting(job: Compilation, store: Any) -> Any:
        if urgent(job.key):
            return compiled(job, store)
        gate.pass_one(job)
        return compiled(job, store)

    monkeypatch.setattr(Compilation, "compiled", waiting)
    yield gate
    gate.open()


def urgent(key: Any) -> bool:
    return key in {AdmitKey(), PrefillKey(PrefillShape.of_one(16)), LogprobsKey(1, 1, 1), RoundKey(PLAIN, 1, True)}


def waited(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def no_warm_up() -> bool:
    return not any(thread.name.startswith("warm-up") for thread in threading.enumerate())


def start(bench: Any, **config: Any) -> Engine:
    """Of the shapes of the session's engine, whose executables are kept."""
    config = {"variants": ("sampled",), "warmup": "background", "num_pages": 30, "batch_buckets": (1, 4), **config}
    return bench.build("eagle3", SpeculationConfig(tiers=TIERS), **config)


def test_requests_live_through_a_warm_up(bench: Any, tools: Any, gate: Gate):
    """From one executable of batch size one to all of them, one more every few steps; tokens are a warm engine's."""
    engine, work = start(bench), tools.workload()
    assert not engine.warm and engine.stats.executables_ready == 4 < engine.stats.executables
    sizes: list[int] = []
    engine.on_round = lambda stats: sizes.append(stats.bucket)

    def more(step: int, _: list[str]) -> None:
        if step % 8 == 0:
            ready = engine.stats.executables_ready
            gate.let()
            # Not for what needs several executables: for one more of them.
            waited(
                lambda: bool(engine.runner._warmup._arrived) or engine.stats.executables_ready > ready or engine.warm
            )

    tools.same(tools.drive(engine, work, on_step=more), bench.expected(work))
    assert set(sizes[:8]) == {1}, "a batch of several runs as rounds of one until there is more"
    gate.open()
    engine.wait_until_warm()
    stats = engine.stats
    assert stats.executables_ready == stats.executables and stats.compilations_after_warmup == 0
    assert set(engine.runner.costs) == {(tier, bucket, None) for tier in TIERS for bucket in (1, 4)}
    sizes.clear()
    tools.same(tools.drive(engine, work), bench.expected(work))
    assert max(sizes) == 4 and engine.stats.compilations_after_warmup == 0
    assert {"off", "chain-3"} & set(engine.stats.rounds_by_tier)


def test_a_policy_gets_the_next_best_tier_that_is_ready(bench: Any, tools: Any, gate: Gate):
    """And its own as soon as that has come."""
    engine, work = start(bench), tools.workload()[:2]
    engine.use_policy(StaticPolicy(Tier(3)))
    tools.same(tools.drive(engine, work), bench.expected(work))
    assert engine.controller.rounds_by_tier[Tier(3)] == 0 < engine.controller.rounds_by_tier[PLAIN]
    gate.open()
    engine.wait_until_warm()
    engine.use_policy(StaticPolicy(Tier(3)))
    tools.same(tools.drive(engine, work), bench.expected(work))
    assert engine.controller.rounds_by_tier[PLAIN] == 0 < engine.controller.rounds_by_tier[Tier(3)]


def test_long_chunks_run_in_pieces_until_their_size_is_ready(bench: Any, tools: Any, gate: Gate):
    engine = start(bench, prefill_chunk=32)
    rng = np.random.default_rng(1)
    work = [(rng.integers(0, 12, 61).tolist(), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))]
    assert PrefillKey(PrefillShape.of_one(32)) not in engine.runner._compiled
    tools.same(tools.drive(engine, work), bench.expected(work))


def test_warming_up_leaves_the_state_alone(bench: Any):
    """It runs every executable, prefills and admissions included, for no request, beside the state of live ones."""
    engine = start(bench)
    engine.wait_until_warm()
    fresh = engine.runner.fresh_state()
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(engine.runner.state), jax.tree.leaves(fresh), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def test_what_fails_to_compile_ends_the_warm_up_and_nothing_else(
    bench: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    compiled = Compilation.compiled

    def failing(job: Compilation, store: Any) -> Any:
        if isinstance(job.key, RoundKey) and job.key.tier == Tier(3):
            raise RuntimeError("no such instruction")
        return compiled(job, store)

    monkeypatch.setattr(Compilation, "compiled", failing)
    engine, work = start(bench), tools.workload()
    engine.wait_until_warm()
    assert "no such instruction" in caplog.text
    assert engine.stats.executables_ready < engine.stats.executables
    tools.same(tools.drive(engine, work), bench.expected(work))
    with pytest.raises(RuntimeError, match="no such instruction"):
        start(bench, warmup="eager")


def test_a_trial_that_fails_ends_the_warm_up_and_no_request(
    bench: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Such as one for which the device has no memory, in a step of live requests."""
    work, run_once = tools.workload(), Runner._run_once
    expected = bench.expected(work)

    def failing(runner: Runner, key: Any, executable: Any) -> None:
        if not urgent(key):
            raise RuntimeError("out of memory")
        run_once(runner, key, executable)

    monkeypatch.setattr(Runner, "_run_once", failing)
    engine = start(bench)
    tools.same(tools.drive(engine, work), expected)
    engine.wait_until_warm()
    assert "out of memory" in caplog.text and engine.stats.executables_ready == 4


@pytest.mark.parametrize("aborted", [True, False])
def test_what_nobody_steps_holds_no_warm_up_up(bench: Any, gate: Gate, aborted: bool):
    """A round whose requests were aborted stays in flight, and a stream may rest as long as its reader likes."""
    engine = start(bench)
    request = engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    for _ in range(4):
        engine.step()
    if aborted:
        engine.abort(request)
    assert engine.has_work
    gate.open()
    waited(lambda: engine.warm)
    assert not any(pending.timed for pending in engine._in_flight)


def test_policies_without_plain_decoding_at_batch_one_start_with_what_they_have(bench: Any, tools: Any, tmp_path: Path):
    """As SGLang's default does."""
    steps = tmp_path / "steps.json"
    steps.write_text('{"1": {"candidate_steps": [3]}, "4": {"candidate_steps": [0, 3]}}')
    sizes = dict(variants=("sampled",), warmup="background", num_pages=30, batch_buckets=(1, 4))
    engine, work = bench.build("eagle3", SpeculationConfig(policy=str(steps)), **sizes), tools.workload()[:2]
    assert engine.runner.ready(Tier(3), 1) and not engine.runner.ready(PLAIN, 1)
    tools.same(tools.drive(engine, work), bench.expected(work))


def test_an_engine_that_is_dropped_compiles_no_more(bench: Any, gate: Gate):
    engine = start(bench)
    warmup, total = engine.runner._warmup, engine.stats.executables
    engine.stop_warmup()
    gate.open()
    waited(lambda: warmup.over or bool(warmup._arrived))
    assert len(gate.begun) < total - 4
    waited(lambda: not any(thread in threading.enumerate() for thread in warmup._threads))


def test_a_runner_of_which_no_engine_comes_compiles_no_more(bench: Any, gate: Gate, tmp_path: Path):
    with pytest.raises(ValueError, match="traffic_log"):
        start(bench, traffic_log=tmp_path)
    gc.collect()
    gate.open()
    waited(no_warm_up)
    assert len(gate.begun) <= (os.cpu_count() or 1)


def test_jobs_that_wait_to_be_traced_are_not_begun_after_the_end():
    traced, tracing, go = [], threading.Event(), threading.Event()

    def job(key: int) -> Compilation:
        def lower() -> Any:
            traced.append(key)
            tracing.set()
            assert go.wait(PATIENCE)
            return jax.jit(lambda x: x + key).lower(1.0)

        return Compilation(key, (), lower)

    warmup = Warmup([job(key) for key in range(4)], threads=4)
    assert tracing.wait(PATIENCE)
    waited(lambda: warmup._in_hand == 4)
    warmup.stop()
    go.set()
    waited(lambda: not warmup._in_hand)
    assert len(traced) == 1 and warmup.error is None and not warmup.over and warmup.take() and warmup.over


def test_a_warm_up_that_is_to_finish_compiles_what_is_wanted_and_under_way():
    lowered, began, go = [], threading.Event(), threading.Event()

    def job(key: int) -> Compilation:
        def lower() -> Any:
            lowered.append(key)
            began.set()
            assert go.wait(PATIENCE)
            return jax.jit(lambda x: x + key).lower(1.0)

        return Compilation(key, (), lower)

    warmup = Warmup([job(key) for key in range(5)], threads=2)
    assert began.wait(PATIENCE)
    waited(lambda: warmup._in_hand == 2)  # of which one is being traced
    finishing = threading.Thread(target=warmup.finish, args=({3},))
    finishing.start()
    waited(lambda: warmup._wanted is not None)
    assert finishing.is_alive()
    go.set()
    finishing.join(PATIENCE)
    assert sorted(lowered) == sorted({lowered[0], 3}) and dict(warmup._arrived).keys() == {lowered[0], 3}


def test_what_can_wait_is_not_begun_before_its_time_unless_it_is_hurried():
    warmup = Warmup([Compilation(key, (), lambda: jax.jit(lambda x: x + 1).lower(1.0)) for key in range(2)], 1)
    assert [key for key, _ in warmup.wait([0])] == [0]
    warmup.give_way(after=1000.0)
    time.sleep(3 * warm_ups._LOOK_SECONDS)
    assert not warmup.over and warmup.take() is None and warmup.compiling
    warmup.hurry()
    assert [key for key, _ in warmup.wait([1])] == [1] and not warmup.compiling


def test_rounds_are_timed_again_only_now_and_then_while_requests_run(bench: Any, monkeypatch: pytest.MonkeyPatch):
    """Of a second of theirs a twentieth; where nobody waits, at once."""
    engine = start(bench)
    waited(lambda: engine.warm)
    warmup, now, pieces = engine._warmup, [0.0], list[float]()

    def advance() -> bool:
        now[0] += 0.05
        pieces.append(now[0])
        return True

    monkeypatch.setattr(type(engine.runner), "times_again", True)
    monkeypatch.setattr(warming.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(warmup, "_seconds", None)
    monkeypatch.setattr(warmup, "_advance", advance)
    for work, expected in (True, range(4, 7)), (False, range(150, 151)):
        monkeypatch.setattr(warmup, "_has_work", lambda work=work: work)
        pieces.clear()
        for _ in range(300):
            with warmup.step():
                now[0] += 0.02
        assert len(pieces) in expected, (work, len(pieces))


def test_the_log_tells_how_far_a_warm_up_is(
    bench: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """While nobody steps and nothing comes, and what a start waits for."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(warm_ups, "TOLD_SECONDS", 0.2)
    engine = start(bench)
    waited(lambda: f"4 of {engine.stats.executables} executables are ready" in caplog.text)
    gate.open()
    engine.wait_until_warm()
    caplog.clear()

    def lower() -> Any:
        waited(lambda: "0 of 1 executables needed to start" in caplog.text)
        return jax.jit(lambda x: x + 1).lower(1.0)

    warmup = Warmup([Compilation("slow", (), lower)], threads=1)
    assert [key for key, _ in warmup.wait(["slow"])] == ["slow"]


def test_the_log_is_told_now_and_then_however_often_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = [100.0]
    monkeypatch.setattr(warm_ups.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO):
        progress = Progress()
        for ready in range(100):
            now[0] += 0.3
            progress.tell(ready, 99, "are ready")
    assert [record.getMessage() for record in caplog.records] == [
        "compiling for 10 s: 33 of 99 executables are ready",
        "compiling for 20 s: 67 of 99 executables are ready",
    ]


def test_warm_ups_that_overlap_leave_jax_its_cache():
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    one, other = kept_once(), kept_once()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert jax.config.values[name] == math.inf
    other.__exit__(None, None, None)
    assert jax.config.values[name] == before


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 starts no thread once the main one has ended")
def test_threads_that_outlive_the_main_one_can_start_an_engine():
    """Their jobs are compiled; a thread that keeps no process from ending does not keep them."""
    code = """
import threading, jax
from jaxspec.runtime.compile import Compilation
from jaxspec.runtime import warmup as warm_ups
from jaxspec.runtime.warmup import Progress, Warmup
from jaxspec.scheduling.shapes import PrefillShape

def late():
    threading.main_thread().join()
    jobs = [Compilation(key, (), lambda: jax.jit(lambda x: x + 1).lower(1.0)) for key in range(3)]
    print(len(list(Warmup(jobs).wait(range(3)))), "compiled")

threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "3 compiled\n", done.stderr


def test_what_a_warm_up_compiles_is_not_counted():
    counter = CompileCounter()
    one = Compilation("a", (), lambda: jax.jit(lambda x: x + 3).lower(1.0))
    assert len(list(Warmup([one]).wait(["a"]))) == 1 and counter.count == 0
    jax.jit(lambda x: x + 4).lower(1.0).compile()
    assert counter.count == 1
