"""Prompts that come at once are computed together, and chunks that end none leave out the output layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxspec.config import SpeculationConfig
from jaxspec.events import Delta, Started
from jaxspec.request import SamplingParams
from jaxspec.runtime.programs import PrefillKey
from jaxspec.runtime.repertoire import RunnerConfig
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.speculation import state
from jaxspec.speculation.layouts import Chunks


def test_prompts_that_come_at_once_start_together(bench: Any):
    engine = bench.engine("none")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    ids = [engine.add([5, 1, 7, token], params) for token in range(4)]
    calls = engine.runner._pending, []

    def pending(rows: Any, tier: Any, *rest: Any) -> Any:
        calls[1].append((len(rows), tier))
        return calls[0](rows, tier, *rest)

    engine.runner._pending = pending
    try:
        first, second = engine.step(), engine.step()
    finally:
        del engine.runner._pending
    assert [event.request_id for event in first if isinstance(event, Started)] == ids
    assert [event.request_id for event in second if isinstance(event, Delta)] == ids
    assert [size for size, tier in calls[1] if tier is None] == [4]


def test_requests_that_a_calls_rows_do_not_hold_get_their_slots_before_it(
    bench: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
):
    """One with logit biases, and two more than there is room for."""
    work = [tools.workload()[i] for i in (0, 1, 2, 4)]
    expected = [output.token_ids for output in bench.expected(work)]
    monkeypatch.setattr(state, "_NEW_TOKENS", 1)
    sizes = dict(variants=("sampled",), batch_buckets=(4,))
    engine = bench.build("none", SpeculationConfig(policy="off"), **sizes)
    runner, calls = engine.runner, []
    own = runner._call

    def call(key: Any, *args: Any) -> Any:
        calls.append(type(key).__name__)
        return own(key, *args)

    monkeypatch.setattr(runner, "_call", call)
    assert [params.biased for _, params in work] == [False, False, False, True]
    outputs = tools.drive(engine, work)
    assert calls[:4] == ["AdmitKey"] * 3 + ["PrefillKey"] and calls.count("AdmitKey") == 3
    assert [output.token_ids for output in outputs] == expected


def test_prompts_without_an_end_run_in_as_large_chunks_as_others_leave_them():
    shapes = [PrefillShape.of_one(size) for size in (64, 1024, 2048)]
    can = RunnerConfig({}, [*shapes, PrefillShape(1024, 32, 128)], prefill_unsampled=(1024, 2048))
    lean = [key.shape for key in can.prefill_keys if isinstance(key, PrefillKey) and not key.samples]
    assert lean == shapes[1:]


def test_a_chunk_that_ends_no_prompt_needs_no_output_layer(bench: Any, tools: Any):
    """The state is the same without it."""
    runner = bench.engine("none").runner
    engine, shape = bench.engine("none"), PrefillShape.of_one(16)
    engine.add(list(range(1, 12)) * 3, SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    states = []
    whole = runner._compiled[PrefillKey(shape)]
    (lean,) = (job.compiled(None) for job in runner._setting.compilations([PrefillKey(shape, samples=False)], False))
    chunk = Chunks.of(runner.geo, 1, [(0, 9, False)]).array
    for executable in (whole, lean):
        copy = tuple(x.copy() for x in runner._state)
        out = executable(runner._target, runner._draft_params, copy, chunk, runner._nobody[1], None)
        states.append(out if executable is lean else out[0])
    (length,) = (i for i, x in enumerate(runner._state) if x is runner.state.length_S)
    assert int(states[1][length][0]) == 16 + 9
    for one, other in zip(*states, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-6)
    while engine.has_work:
        engine.step()


def test_chunks_that_get_shorter_far_into_a_prompt_change_no_token(
    bench: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
):
    """While another text decodes; once in usual chunks, once as a policy of shorter ones plans them."""
    prompt = [token for i in range(15) for token in (1 + i % 5, 7, 2, 1 + i % 3)]
    work = [
        ([5, 1, 7], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)),
        (prompt, SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)),
    ]
    found = []
    for shorter in ((), ((16, 8), (40, 4))):
        engine, spans = bench.engine("none"), []
        scheduler = engine.scheduler
        plain, config = scheduler.plan, dataclasses.replace(scheduler.config, shorter_chunks=shorter)

        def planned(*given: Any, plain: Any = plain, spans: list[Any] = spans, **named: Any) -> Any:
            plan = plain(*given, **named)
            spans += [(chunk.start, chunk.end) for chunk in plan.prefill if chunk.end > 3]
            return plan

        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "config", config)
            patch.setattr(scheduler, "plan", planned)
            outputs = tools.drive(engine, work, join=lambda i: 2 * i)
        found.append(([output.token_ids for output in outputs], spans))
    (expected, usual), (tokens, spans) = found
    assert tokens == expected and len(set(expected[1])) > 2
    assert usual[0] == spans[0] == (0, 16) and usual[1] == (16, 32)
    assert spans[1:] == [(16, 24), (24, 32), (32, 40), *((start, start + 4) for start in range(40, 60, 4))]
