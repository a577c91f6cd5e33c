"""Prompts that come at once are computed together, and chunks that end none leave out the output layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxspec.events import Delta, Started
from jaxspec.request import SamplingParams
from jaxspec.runtime.programs import PrefillKey
from jaxspec.scheduling.shapes import PrefillShape
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
        out = executable(runner._target, runner._draft_params, copy, chunk, None)
        states.append(out if executable is lean else out[0])
    (length,) = (i for i, x in enumerate(runner._state) if x is runner.state.length_S)
    assert int(states[1][length][0]) == 16 + 9
    for one, other in zip(*states, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-6)
    while engine.has_work:
        engine.step()
