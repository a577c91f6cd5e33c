"""Which steps become candidates, from a made-up table of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxspec.adaptive.ema import AdaptiveSpeculativeParams
from jaxspec.bench.offline import report, tune
from jaxspec.bench.offline.metrics import EndToEnd, SteadyState, Summary

STEPS = {"plain": 0, "chain-1": 1, "chain-3": 3, "chain-7": 7}


def summary(workload: str, batch_size: int, mode: str, speedup: float | None) -> Summary:
    # What is chosen is what a user gets, whatever the steady state says.
    steady = SteadyState(99, 100.0, 1.0, "")
    whole = EndToEnd(100.0, 90.0, 110.0, speedup)
    return Summary(workload, batch_size, mode, 3, whole, steady, 2.0, (), 0.01, 0.02, 0.03, {})


def results(speedups: dict[int, dict[str, tuple[float, ...]]]) -> list[Summary]:
    """{batch size: {workload: speed-ups in STEPS' order}} as summaries."""
    return [
        summary(workload, size, mode, value)
        for size, cells in speedups.items()
        for workload, values in cells.items()
        for mode, value in zip(STEPS, values, strict=True)
    ]


RESULTS = results(
    {
        1: {"code": (1.0, 1.4, 1.9, 1.85), "prose": (1.0, 1.3, 1.1, 0.8)},
        4: {"code": (1.0, 1.2, 1.3, 0.9), "prose": (1.0, 1.01, 0.8, 0.5)},
        16: {"code": (1.0, 0.8, 0.6, 0.4), "prose": (1.0, 0.7, 0.5, 0.3)},
    }
)


def test_candidates_are_the_best_of_each_workload_and_those_close_to_it():
    config = tune.configuration(tune.choose(RESULTS, STEPS))
    # 1: 3 best on code, 7 within 5% of it, 1 best on prose. 4: plain is within 5% of the best on prose.
    assert config == {
        "1": {"candidate_steps": [1, 3, 7]},
        "4": {"candidate_steps": [0, 1, 3]},
        "16": {"candidate_steps": [0]},
    }


def test_reach_widens_the_choice():
    narrow = tune.configuration(tune.choose(RESULTS, STEPS, reach=0.0))
    wide = tune.configuration(tune.choose(RESULTS, STEPS, reach=0.25))
    assert narrow["1"]["candidate_steps"] == [1, 3] and narrow["4"]["candidate_steps"] == [1, 3]
    assert wide["1"]["candidate_steps"] == [0, 1, 3, 7] and wide["16"]["candidate_steps"] == [0, 1]


def test_the_file_is_one_that_the_policy_reads(tmp_path: Path):
    path = tmp_path / "adaptive.json"
    report.write_json(tune.configuration(tune.choose(RESULTS, STEPS)), path)
    params = AdaptiveSpeculativeParams(path, buckets=[1, 4, 16])
    assert params.candidates_for(1) == (1, 3, 7) and params.candidates_for(16) == (0,)
    assert params.buckets_for_step(3) == (1, 4) and list(json.loads(path.read_text())) == ["1", "4", "16"]


def test_the_adaptive_policy_is_no_candidate():
    assert tune.choose([*RESULTS, summary("code", 1, "adaptive", 9.0)], STEPS) == tune.choose(RESULTS, STEPS)


def test_the_table_says_why():
    lines = tune.table(tune.choose(RESULTS, STEPS)).splitlines()
    assert all(len(line) <= report.WIDTH for line in lines)
    assert lines[1].split() == ["1", "off", "0", "1.00x", "1.00x", "no:", "below", "the", "best", "everywhere"]
    assert lines[3].endswith("yes: best on code") and lines[4].endswith("yes: close to the best on code")
    assert lines[9].split()[:2] == ["16", "off"] and lines[9].endswith("yes: best on code, prose")


def test_errors_name_what_is_missing():
    with pytest.raises(ValueError, match="code, batch 1, chain-1 needs plain decoding beside it"):
        tune.choose([summary("code", 1, "chain-1", None)], STEPS)
    with pytest.raises(ValueError, match="at least 1 measured cell, got 0"):
        tune.choose([], STEPS)
    with pytest.raises(ValueError, match=r"reach must lie in \[0, 1\), got 1.0"):
        tune.choose(RESULTS, STEPS, reach=1.0)
