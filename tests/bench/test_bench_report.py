"""The table, JSON and picture say what the records say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench.offline import plots, report
from jaxspec.bench.offline.metrics import Completion, Round, Run
from jaxspec.bench.offline.report import WIDTH, Report

CONDITIONS: dict[str, Any] = {
    "device": "cpu", "platform": "cpu", "devices": 1, "cpu_cores": 2, "jax": "0.10.2", "model": "demo",
    "parameters": 17_300_000, "dtype": "float32", "drafter": "eagle3 (demo/eagle3)", "grow": None, "geometry": None,
    "simulated_accept_length": None, "temperature": 0.0, "max_tokens": 96, "repeats": 1, "prompts": None,
    "skipped_prompts": 0, "queues": {"1": {"code": 2}, "16": {"code": 96, "switch": 128}},
    "warmup_seconds": 61.24, "executables": 48,
}  # fmt: skip


def make_run(workload: str, batch_size: int, mode: str, depths: list[int], seconds: float, token: int = 7) -> Run:
    """3 tokens; a run lasts as long as its rounds, or a second without any."""
    names = {0: "plain", 3: "chain-3", 32: "tree-32x64/1024"}
    rounds = [
        Round(names[d], d, batch_size, "code" if i % 2 else "prose", seconds, batch_size * (d + 1), (d,) * batch_size)
        for i, d in enumerate(depths)
    ]
    done = Completion(("code", 0), 0.012, tuple((seconds, d + 1) for d in depths), (1, 2, token))
    return Run(workload, batch_size, mode, 0, seconds * len(depths) or 1.0, tuple(rounds), (done,))


RUNS = [
    make_run(workload, size, mode, depths, seconds)
    for workload in ("code", "switch")
    for size in (1, 16)
    for mode, depths, seconds in (
        ("adaptive", [0, 3, 3, 32], 0.01),
        ("plain", [0] * 60, 0.002),
        ("tree-32x64/1024", [32], 2.0),
        ("chain-3", [3] * 50, 0.0012),
    )
]


def test_a_line_a_mode_plain_first_adaptive_last_within_the_width():
    text = report.render(Report(CONDITIONS, RUNS, 0))
    assert all(len(line) <= WIDTH for line in text.splitlines())
    block = text.split("--- code, batch 1 ")[1].split("---", 1)[1].splitlines()[1:6]
    assert [line.split()[0] for line in block] == ["plain", "chain-3*", "tree-32x64/1024", "adaptive", "adaptive"]
    # Plain: 3 tokens in 120 ms, a token in 2 ms. chain-3: 3 tokens in 60 ms, 4 tokens in 1.2 ms.
    assert block[0].split()[:8] == ["plain", "25.0", "25", "25", "1.00x", "500.0", "1.00x", "1.00"]
    assert block[1].split() == [
        "chain-3*", "50.0", "50", "50", "2.00x", "3333.3", "6.67x", "4.00", "1.0", "1.0", "1.0", "0.30", "0.3", "12",
    ]  # fmt: skip
    # Adaptive: 3 tokens in 40 ms; four rounds are no steady state.
    assert block[3].split()[1:7] == ["75.0", "75", "75", "3.00x", "-", "-"]
    assert "ran plain 25%, chain-3 50%, tree-32x64/1024 25%; regret -50.0% against chain-3" in block[4]
    assert "  code, batch 1: adaptive 4, tree-32x64/1024 1" in text
    assert "at batch 1 code 2; at batch 16 code 96, switch 128 requests a run" in text
    assert "61.2 s, 48 executables" in text and "compilations after warm-up: 0" in text and "cpu (2 cores)" in text


def test_equal_tokens_are_said_to_be_equal():
    result = Report(CONDITIONS, RUNS, 0)
    assert result.errors == []
    assert "12 completions equal plain decoding's token for token" in report.footer(result)


def test_other_tokens_are_errors_in_float32_and_remarks_in_bfloat16():
    wrong = [*RUNS, make_run("code", 1, "chain-1", [], 0.01, token=9)]
    result = Report(CONDITIONS, wrong, 0)
    assert len(result.errors) == 1
    assert "code, batch 1, chain-1, repeat 0: prompt code 0 diverges at generated token 2" in result.errors[0]
    assert "token 9, but plain decoding has token 7" in report.footer(result)
    loose = Report({**CONDITIONS, "dtype": "bfloat16"}, wrong, 0)
    assert loose.errors == [] and "1 of 13 completions differ" in report.footer(loose)
    assert "ERROR" in report.footer(result) and "ERROR" not in report.footer(loose)


def test_many_divergences_are_counted_not_listed():
    wrong = [dataclasses.replace(make_run("code", 1, "chain-1", [3], 0.01, token=9), repeat=i) for i in range(9)]
    plain = [dataclasses.replace(make_run("code", 1, "plain", [0], 0.01), repeat=i) for i in range(9)]
    text = report.footer(Report(CONDITIONS, [*plain, *wrong], 0))
    assert text.count("diverges at") == 5 and "... and 4 more" in text


def test_simulation_growth_and_interruption_are_labelled_everywhere():
    geometry = {"num_layers": 32, "hidden_size": 4096}
    conditions = {**CONDITIONS, "simulated_accept_length": 2.5, "grow": "8b", "geometry": geometry}
    text = report.render(Report(conditions, RUNS, 0, interrupted=True))
    assert text.count("[acceptance SIMULATED at 2.5]") == 4 and "SIMULATED   acceptance: 2.5" in text
    assert "grown       to 8b: 32 layers of 4096" in text and "INTERRUPTED" in text
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_distinct_experts_are_told_a_layer_and_round():
    read = {"plain": 8, "chain-3": 29}
    runs = [
        dataclasses.replace(
            run, rounds=tuple(dataclasses.replace(r, experts=48 * read.get(r.tier, 0)) for r in run.rounds)
        )
        for run in RUNS
    ]  # fmt: skip
    has = {"count": 128, "per_token": 8, "inner": 768, "layers": 48}
    text = report.render(Report({**CONDITIONS, "experts": has}, runs, 0))
    assert "experts     128 of 768 in 48 layers, 8 a token" in text
    assert text.count("distinct experts a layer and round: plain 8.0, chain-3 29.0, adaptive 22.0\n") == 4
    assert "distinct" not in report.render(Report(CONDITIONS, RUNS, 0))


def test_json_holds_conditions_summaries_and_raw_rounds(tmp_path: Path):
    path = tmp_path / "bench.json"
    report.write_json(report.to_dict(Report(CONDITIONS, [*RUNS, make_run("prose", 1, "plain", [], 1.0)], 0)), path)
    read = json.loads(path.read_text())
    assert read["conditions"]["model"] == "demo" and read["compilations_after_warmup"] == 0
    assert len(read["summaries"]) == 17 and len(read["regrets"]) == 4
    raw = next(run for run in read["runs"] if run["mode"] == "chain-3" and run["batch_size"] == 16)
    assert raw["rounds"]["tokens"] == [64] * 50 and raw["rounds"]["accepted"] == [[3] * 16] * 50
    assert raw["completions"][0]["gaps"] == [[0.0012, 4]] * 50
    empty = read["summaries"][-1]
    assert empty["workload"] == "prose" and empty["end_to_end"]["tokens_per_second"] == 3.0
    assert empty["mean_accepted_length"] is None and empty["tpot_p50"] is None
    assert empty["steady_state"] == {
        "rounds": 0, "tokens_per_second": None, "speedup": None,
        "reason": "0 of at least 50 timed rounds with its place in use",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("runs", [RUNS, RUNS[1:2], [make_run("code", 1, "adaptive", [], 1.0)]])
def test_the_picture_is_a_png_whatever_was_measured(tmp_path: Path, runs: list[Run]):
    path = tmp_path / "bench.png"
    plots.draw(Report(CONDITIONS, runs, 0), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_nothing_measured_gives_no_picture(tmp_path: Path):
    with pytest.raises(ValueError, match="at least 1 finished run, got 0"):
        plots.draw(Report(CONDITIONS, [], 0), tmp_path / "bench.png")
