"""Loads: arrivals, trace formats, prompts, the numbers of records, reports, verdicts, and a run against a server."""

# ruff: noqa: N802 (gRPC's names)

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import statistics
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxspec.bench import __main__ as bench_command
from jaxspec.bench.offline.report import WIDTH
from jaxspec.bench.offline.workloads import Passage, built_in
from jaxspec.bench.online import arrivals, command, compare, overhead, plots, report, sender, texts, traces
from jaxspec.bench.online.arrivals import Arrival, Load, Phase
from jaxspec.bench.online.compare import ModeRun
from jaxspec.bench.online.records import (
    INCOMPLETE,
    INTERRUPTED,
    OK,
    Objectives,
    Record,
    by_bucket,
    by_phase,
    by_route,
    summarize,
)
from jaxspec.bench.online.session import Session, Wanted
from serve.client import AsyncClient
from serve.proto import admin_pb2, generation_pb2
from serve.proto.services import ADMIN, GENERATION, add_to

# Arrivals.


def gaps(load: Load) -> list[float]:
    times = [a.at for a in load.arrivals]
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


def test_poisson_and_gamma_have_their_mean_and_burstiness():
    for burstiness in (0.25, 1.0, 4.0):
        between = gaps(arrivals.random_process(5.0, 20_000, burstiness=burstiness, seed=3))
        assert min(between) >= 0
        assert statistics.mean(between) == pytest.approx(0.2, rel=0.05)
        # The squared coefficient of variation of a gamma distribution is 1 / shape.
        assert statistics.pvariance(between) / 0.04 == pytest.approx(1 / burstiness, rel=0.15)


def test_arrivals_repeat_with_their_seed():
    make: list[Callable[[int], Load]] = [
        lambda seed: arrivals.random_process(2.0, 50, seed=seed),
        lambda seed: arrivals.on_off(9.0, 1.0, 2.0, 3.0, 20.0, seed=seed),
        lambda seed: arrivals.synthetic(6.0, 30.0, seed=seed),
    ]
    for load in make:
        assert load(1) == load(1) and load(1).arrivals != load(2).arrivals


def test_on_and_off_alternate_and_end_with_the_duration():
    load = arrivals.on_off(100.0, 0.0, 2.0, 3.0, 11.0, seed=0)
    assert [(p.name, p.start, p.end) for p in load.phases] == [
        ("off", 0.0, 3.0), ("on", 3.0, 5.0), ("off", 5.0, 8.0), ("on", 8.0, 10.0), ("off", 10.0, 11.0),
    ]  # fmt: skip
    assert {a.phase for a in load.arrivals} == {"on"}
    assert all(3 <= a.at < 5 or 8 <= a.at < 10 for a in load.arrivals)
    assert len(load.arrivals) == pytest.approx(400, abs=80)


def test_the_shipped_trace_has_its_phases_and_their_rates():
    load = arrivals.synthetic(200.0, 100.0, seed=1)
    assert [p.name for p in load.phases] == ["quiet", "burst", "lull", "overload", "recovery"]
    assert load.phases[0].start == 0 and load.phases[-1].end == pytest.approx(100.0)
    for before, after in zip(load.phases, load.phases[1:], strict=False):
        assert before.end == after.start
    for phase, (name, _, share) in zip(load.phases, arrivals.SYNTHETIC, strict=True):
        mine = [a for a in load.arrivals if a.phase == name]
        assert all(phase.start <= a.at < phase.end for a in mine)
        expected = share * 200 * phase.seconds
        assert len(mine) == pytest.approx(expected, abs=5 * math.sqrt(expected))
    low, high = arrivals.SYNTHETIC_OUTPUT
    lengths = {a.output_tokens for a in load.arrivals}
    assert lengths == set(range(low, high + 1))
    times = [a.at for a in load.arrivals]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: arrivals.closed(0, 4), "concurrency must be at least 1, got 0"),
        (lambda: arrivals.random_process(0.0, 4), "rate must be a finite number above 0, got 0.0"),
        (lambda: arrivals.random_process(1.0, 4, burstiness=-1), "burstiness must be .* got -1"),
        (lambda: arrivals.on_off(1.0, 2.0, 1, 1, 9), "off-rate must lie in .0, rate = 1., got 2.0"),
        (lambda: arrivals.synthetic(math.inf, 9), "rate must be a finite number above 0, got inf"),
        (lambda: arrivals.synthetic(1e-6, 1.0), "at least 1 arrival in 1 s, got 0"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(make: Callable[[], Load], message: str):
    with pytest.raises(ValueError, match=message):
        make()


# Traces.

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799600,4808,10
2023-11-17 00:00:00.2299610,3180,8
2023-11-17 00:00:01.0000000,12,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.009930+00:00,2399,6
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
45,GPT-4,40,7,47,Conversation log
5,ChatGPT,472,18,490,Conversation log
118,ChatGPT,1087,0,1087,API log
"""
MOONCAKE_CSV = "timestamp_ms,input_length,output_length,n_hash_blocks\n0,6758,500,14\n3000,7322,490,15\n"
MOONCAKE_JSONL = """{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}

{"timestamp": 1250, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}
"""


@pytest.mark.parametrize(
    ("text", "source", "expected", "skipped"),
    [
        (AZURE, "Azure", [(0.0, 4808, 10), (0.250001, 3180, 8)], (("no output tokens", 1),)),
        (AZURE_2024, "Azure", [(0.0, 2162, 5), (1.0, 2399, 6)], ()),
        (BURST_GPT, "BurstGPT", [(0.0, 472, 18), (40.0, 40, 7)], (("no output tokens", 1),)),
        (MOONCAKE_CSV, "Mooncake", [(0.0, 6758, 500), (3.0, 7322, 490)], ()),
        (MOONCAKE_JSONL, "Mooncake", [(0.0, 6758, 500), (0.25, 7322, 490)], ()),
        (
            "Timestamp\n72.5\n\n73\n72.75\n",
            "one-column",
            [(0.0, None, None), (0.25, None, None), (0.5, None, None)],
            (),
        ),
        ("1e0\n2.5\n", "one-column", [(0.0, None, None), (1.5, None, None)], ()),
        ("﻿Timestamp\r\n3\r\n4\r\n", "one-column", [(0.0, None, None), (1.0, None, None)], ()),
    ],
)
def test_trace_formats(tmp_path: Path, text: str, source: str, expected: list[Any], skipped: Any):
    path = tmp_path / "trace"
    path.write_text(text)
    load = traces.read(path)
    assert load.source == f"{source} trace trace" and load.skipped == skipped
    found = [(a.at, a.prompt_tokens, a.output_tokens) for a in load.arrivals]
    assert [row[1:] for row in found] == [row[1:] for row in expected]
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], abs=2e-6)


def test_traces_are_scaled_and_cut(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(str(i) for i in range(100)))
    load = traces.read(path, speed_up=4.0, duration=10.0)
    assert len(load.arrivals) == 40 and load.arrivals[1].at == 0.25 and "4 times as fast" in load.source
    assert len(traces.read(path, count=7).arrivals) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "must be an Azure, BurstGPT or Mooncake trace or one column of seconds, got columns ..a., .b.."),
        ("", "must hold at least 1 request, got 0"),
        ("Timestamp\n", "must hold at least 1 request, got 0"),
        ("Timestamp\n1\nsoon\n", "line 3: a timestamp must be a finite number, got 'soon'"),
        ("1\nnan\n", "line 2: a timestamp must be a finite number, got 'nan'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: .*yesterday"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n", "line 2: "),
        (MOONCAKE_CSV + "5,-1,3,4\n", "line 4: input_length must be a whole number of at least 0, got '-1'"),
        (MOONCAKE_CSV + "5,1.5,3,4\n", "line 4: input_length must be a whole number of at least 0, got '1.5'"),
        (MOONCAKE_JSONL + "[1]\n", "line 4: .*must be|line 4: must be an object, got list"),
        (MOONCAKE_JSONL + '{"timestamp": 1}\n', "line 4: must have timestamp, input_length and output_length"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}\n', "line 1: .*got True"),
        (MOONCAKE_JSONL + '{"timestamp": \n', "line 4: "),
    ],
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        traces.read(path)


def test_a_missing_trace_and_a_bad_speed_up(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read"):
        traces.read(tmp_path / "nothing.csv")
    with pytest.raises(ValueError, match="speed-up must be a finite number above 0, got 0"):
        traces.read(tmp_path / "nothing.csv", speed_up=0)


# Prompts.

TOKENS = {"code": [("one", (1, 1, 1)), ("two", (2, 2))], "prose": [("three", (3, 3, 3, 3, 3))]}


def planned(load: Load, **fields: Any) -> texts.Plan:
    return texts.plan(load, TOKENS, **{"max_seq_len": 40, "max_tokens": 8, **fields})


def test_prompts_at_their_own_length_are_texts():
    plan = planned(arrivals.closed(2, 200))
    ids = {text: tokens for many in TOKENS.values() for text, tokens in many}
    assert {r.prompt for r in plan.requests} == set(ids)
    assert all(r.prompt_tokens == len(ids[str(r.prompt)]) and r.max_tokens == 8 for r in plan.requests)
    assert {r.route for r in plan.requests} == {"code", "prose"} and (plan.cut_prompts, plan.cut_outputs) == (0, 0)
    assert plan == planned(arrivals.closed(2, 200)) and plan != planned(arrivals.closed(2, 200), seed=1)


def test_prompts_grow_and_shrink_to_a_traces_lengths_within_the_context():
    wanted = [(1, 4), (17, 4), (33, 20), (32, 8), (1000, None)]
    load = Load("trace", tuple(Arrival(0.0, "", p, o) for p, o in wanted))
    plan = planned(load)
    assert [(r.prompt_tokens, r.max_tokens) for r in plan.requests] == [(1, 4), (17, 4), (32, 8), (32, 8), (32, 8)]
    assert (plan.cut_prompts, plan.cut_outputs) == (2, 1)
    for request in plan.requests:
        assert isinstance(request.prompt, tuple) and len(request.prompt) == request.prompt_tokens
        kinds = {1, 2} if request.route == "code" else {3}
        assert set(request.prompt) <= kinds


def test_texts_longer_than_the_context_are_cut():
    plan = planned(arrivals.closed(1, 30), max_seq_len=10, max_tokens=6)
    cut = [r for r in plan.requests if r.prompt == (3, 3, 3, 3)]
    assert len(cut) == plan.cut_prompts > 0 and all(r.prompt_tokens <= 4 for r in plan.requests)


def test_plans_without_room_or_texts_are_refused():
    with pytest.raises(ValueError, match=r"max-tokens must lie in \[1, 39\] .* got 40"):
        planned(arrivals.closed(1, 1), max_tokens=40)
    with pytest.raises(ValueError, match="every kind of prompt needs a text with tokens, got none for .'code'."):
        texts.plan(arrivals.closed(1, 1), {"code": [("", ())]}, max_seq_len=9, max_tokens=2)


# Records.


def record(**fields: Any) -> Record:
    """Sent at 1 s, first tokens at 1.2 s, end at 2.2 s: 11 tokens, TTFT 200 ms, TPOT 100 ms, E2E 1.2 s."""
    given: dict[str, Any] = {
        "index": 0, "route": "code", "phase": "", "due": 0.99, "sent": 1.0, "ended": 2.2, "prompt_tokens": 30,
        "status": OK, "first": 1.2, "first_tokens": 1, "gaps": ((0.4, 4), (0.6, 6)), "rounds": 5, "drafted": 15,
        "accepted": 5,
    }  # fmt: skip
    return Record(**{**given, **fields})


FAILED = record(status="RESOURCE_EXHAUSTED", message="the queue is full", first=None, first_tokens=0, gaps=(),
                ended=1.1, rounds=0, drafted=0, accepted=0)  # fmt: skip


def test_definitions():
    r = record()
    assert (r.output_tokens, r.ttft, r.e2e) == (11, pytest.approx(0.2), pytest.approx(1.2))
    assert r.tpot == pytest.approx(0.1) and r.lag == pytest.approx(0.01)
    assert record(gaps=()).tpot is None  # a single token
    # Three tokens in the first chunk took none of the second that the ten after them did.
    assert record(first_tokens=3).tpot == pytest.approx(0.1) and record(first_tokens=3, gaps=()).tpot is None
    assert FAILED.ttft is None and FAILED.tpot is None and FAILED.output_tokens == 0
    lengths = {1: "1-64", 64: "1-64", 65: "65-256", 1024: "257-1024", 4096: "1025-4096", 5000: "4097+"}
    assert {n: record(prompt_tokens=n).bucket for n in lengths} == lengths


def test_objectives_and_goodput():
    assert Objectives().met(record()) and not Objectives().met(FAILED) and not Objectives().any
    for name, limit in (("ttft_ms", 200.0), ("tpot_ms", 100.0), ("e2e_ms", 1200.0)):
        assert Objectives(**{name: limit + 1e-6}).met(record())
        assert not Objectives(**{name: limit - 1e-3}).met(record())
    assert Objectives(tpot_ms=1.0).met(record(gaps=()))
    with pytest.raises(ValueError, match="slo-tpot-ms must be above 0, got 0"):
        Objectives(tpot_ms=0)
    late = record(first=2.0)
    summary = summarize("x", [record(), late, FAILED, record(status=INTERRUPTED)], Objectives(ttft_ms=500), 2.0)
    assert summary.goodput == 0.5 and summary.attained == 0.25 and summary.requests_per_second == 1.0
    assert summary.statuses == {OK: 2, "RESOURCE_EXHAUSTED": 1, INTERRUPTED: 1}


def test_summaries():
    fast = record(gaps=((0.02, 10),), ended=1.22)
    summary = summarize("x", [record(), fast, FAILED], Objectives())
    assert summary.seconds == pytest.approx(1.2) and summary.output_tokens == 22
    assert summary.tokens_per_second == pytest.approx(22 / 1.2)
    # Bursts: 4 and 6 gaps of 100 ms, 10 gaps of 2 ms.
    assert summary.itl.p50 == pytest.approx(0.002) and summary.itl.p90 == pytest.approx(0.1)
    assert summary.itl.mean == pytest.approx((10 * 0.1 + 10 * 0.002) / 20)
    assert summary.tpot.p50 == pytest.approx(0.002) and summary.tpot.most == pytest.approx(0.1)
    assert summary.accepted_length == 2.0 and summary.acceptance == pytest.approx(1 / 3)
    assert summary.ttft.p99 == pytest.approx(0.2)
    nothing = summarize("x", [FAILED], Objectives())
    assert math.isnan(nothing.tpot.p50) and math.isnan(nothing.accepted_length) and nothing.goodput == 0


def test_a_phases_rate_is_of_what_came_during_it():
    # Chunks of 1, 4 and 6 tokens at 1.2, 1.6 and 2.2 s.
    assert [record().arrived(*window) for window in ((0, 1.2), (1.2, 1.6), (1.5, 2.2), (0, 9))] == [0, 1, 4, 11]
    assert FAILED.arrived(0, 9) == 0
    phases = [Phase("overload", 0, 2), Phase("recovery", 2, 4)]
    over, after = by_phase([record(phase="overload"), record(phase="overload"), FAILED], phases, Objectives())
    # All 22 tokens were due in the first phase; 12 came in the second.
    assert (over.output_tokens, over.tokens_per_second) == (22, 5.0)
    assert (after.requests, after.output_tokens, after.tokens_per_second) == (0, 0, 6.0)
    assert over.requests_per_second == 1.0


def test_groups():
    records = [
        record(phase="off", route="prose"), record(phase="on", prompt_tokens=100), record(phase="on", route="prose")
    ]  # fmt: skip
    phases = [Phase("off", 0, 2), Phase("on", 2, 3), Phase("off", 3, 5)]
    parts = by_phase(records, phases, Objectives())
    assert [(s.name, s.requests, s.seconds, s.goodput) for s in parts] == [("off", 1, 4, 0.25), ("on", 2, 1, 2.0)]
    assert [(s.name, s.requests) for s in by_route(records, Objectives())] == [("code", 1), ("prose", 2)]
    assert [(s.name, s.requests) for s in by_bucket(records, Objectives())] == [("1-64", 2), ("65-256", 1)]


# Verdicts.

PHASES = (Phase("quiet", 0.0, 10.0), Phase("burst", 10.0, 20.0))


def mode_run(mode: str, repeat: int, quiet: float, burst: float) -> ModeRun:
    """Requests with these TPOTs in seconds; the last of each phase takes twice as long."""
    records = []
    for phase, tpot in (("quiet", quiet), ("burst", burst)):
        for i in range(4):
            seconds = tpot * (2 if i == 3 else 1)
            records.append(record(index=i, phase=phase, gaps=((10 * seconds, 10),), ended=1.2 + 10 * seconds))
    return ModeRun(mode, repeat, tuple(records), {"off": 3, "chain-3": 5}, 2)


RUNS = [
    run
    for repeat, noise in enumerate((1.0, 1.02, 5.0))
    for run in (
        mode_run("off", repeat, 0.020 * noise, 0.030 * noise),
        mode_run("chain-3", repeat, 0.010 * noise, 0.050 * noise),
        mode_run("adaptive", repeat, 0.0105 * noise, 0.036 * noise),
    )
]


def test_adaptive_is_set_against_the_best_of_each_phase_by_medians():
    found = {(v.phase, v.statistic): v for v in compare.verdicts(RUNS, PHASES)}
    assert set(found) == {(p, s) for p in ("quiet", "burst") for s in ("p50", "p99")}
    quiet, burst = found["quiet", "p50"], found["burst", "p50"]
    assert (quiet.best, quiet.holds) == ("chain-3", True) and quiet.ratio == pytest.approx(1.05)
    assert (burst.best, burst.holds) == ("off", False) and burst.ratio == pytest.approx(1.2)
    assert (quiet.low, quiet.high) == (
        pytest.approx(1.05),
        pytest.approx(1.05),
    )  # noise that a repeat's runs share cancels
    assert quiet.values["chain-3"] == pytest.approx(0.0102)  # the median, not the mean with its outlier
    assert found["quiet", "p99"].values["off"] == pytest.approx(0.0408)


def test_loads_without_phases_have_one_verdict_and_empty_phases_none():
    assert {v.phase for v in compare.verdicts(RUNS, ())} == {"all"}
    empty = [v for v in compare.verdicts(RUNS, (*PHASES, Phase("lull", 20, 21))) if v.phase == "lull"]
    assert [math.isnan(v.ratio) and not v.holds for v in empty] == [True, True]
    with pytest.raises(ValueError, match="needs adaptive and a fixed mode, got modes .'off'."):
        compare.verdicts(RUNS[:1], PHASES)


def test_modes_are_off_every_static_tier_and_adaptive():
    modes = sender.modes_of(["chain-5", "off", "tree-4x3/16", "chain-1"])
    assert [(m.name, m.depth) for m in modes] == [
        ("off", None), ("chain-1", 1), ("tree-4x3/16", 4), ("chain-5", 5), ("adaptive", None)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="needs a server with at least 1 tier that drafts, got tiers ..off.."):
        sender.modes_of(["off"])


# Reports.

CONDITIONS: dict[str, Any] = {
    "target": "localhost:1", "model": "demo", "device": "cpu", "dtype": "float32", "drafter": "eagle3",
    "verification": "coupled", "max_batch_size": 4, "tiers": ["off", "chain-3"], "max_seq_len": 2048,
    "max_tokens": 96, "temperature": 0.0, "seed": 0,
}  # fmt: skip


def make_report(runs: list[ModeRun], **fields: Any) -> report.Report:
    load = Load("synthetic bursty trace", (Arrival(0.0),) * 8, PHASES, skipped=(("no output tokens", 3),))
    plan = dataclasses.replace(planned(load), cut_prompts=2, cut_outputs=1)
    return report.Report(CONDITIONS, plan, Objectives(tpot_ms=15.0), runs, 0, **fields)


def test_a_runs_table_has_phases_routes_and_lengths():
    made = make_report([RUNS[1]])
    text = report.header(CONDITIONS, made.plan) + "\n" + report.render(made)
    assert all(len(row) <= WIDTH for row in text.splitlines())
    assert "3 rows with no output tokens left out, 2 prompts cut to the context, 1 outputs cut to 96 tokens" in text
    rows = {row.split()[0]: row.split() for row in text.splitlines() if row[:1].isalnum() and "load" not in row}
    # 4 requests of 10 ms and 20 ms a token, in 10 s.
    assert rows["quiet"][:7] == ["quiet", "4", "4", "200", "200", "10.00", "20.00"]
    assert rows["quiet"][-2:] == ["0.30", "2.00"] and rows["burst"][-2] == "0.00"
    assert {"all", "code", "1-64"} <= set(rows)
    assert "scheduling lag ms: p50 10.00" in text and "within TPOT 15 ms" in text
    assert "statuses" not in text and "verdict" not in text


def test_failures_are_counted_and_shown():
    cut = record(status=INTERRUPTED, first=None, gaps=(), first_tokens=0)
    made = make_report([ModeRun("adaptive", 0, (record(), FAILED, FAILED, cut))], interrupted=True)
    text = report.render(made)
    assert "statuses: RESOURCE_EXHAUSTED 2, OK 1, INTERRUPTED 1" in text
    assert "  RESOURCE_EXHAUSTED: the queue is full" in text and "INTERRUPTED: 4 requests were sent" in text
    assert made.failures == [FAILED, FAILED]
    assert report.render(make_report([])) == "nothing was measured"
    late = make_report([ModeRun("adaptive", 0, (record(due=0.5),))])
    assert "the generator is late" in report.render(late)


def test_a_comparison_has_a_block_a_phase_and_its_verdicts():
    made = make_report(RUNS, skipped={"tree-2x2/4": "not compiled"})
    text = report.render(made)
    assert all(len(row) <= WIDTH for row in text.splitlines())
    block = text.split("--- burst ")[1].splitlines()[1:4]
    assert [row.split()[0] for row in block] == ["off", "chain-3", "adaptive"]
    assert all(row.split()[1:3] == ["12", "12"] for row in block)
    judged = [row.split() for row in text.splitlines() if " TPOT p" in row and " of " in row]
    assert [(row[0], row[2], row[3], row[5]) for row in judged] == [
        ("quiet", "p50", "1.050", "chain-3's"), ("quiet", "p99", "1.050", "chain-3's"),
        ("burst", "p50", "1.200", "off's"), ("burst", "p99", "1.200", "off's"),
    ]  # fmt: skip
    assert judged[0][-1] == "holds" and " ".join(judged[2][-3:]) == "MORE than 1.10"
    assert "adaptive, repeat 2: rounds chain-3 5, off 3; 2 switches" in text
    assert "tree-2x2/4 was refused by the server: not compiled" in text


def test_json_holds_the_raw_numbers_and_no_nan():
    made = make_report([*RUNS, ModeRun("off", 3, (FAILED,))])
    data = json.loads(json.dumps(report.to_dict(made), allow_nan=False))
    assert data["load"]["phases"][1] == {"name": "burst", "start": 10.0, "end": 20.0}
    assert [v["holds"] for v in data["verdicts"]] == [True, True, False, False]
    first, last = data["runs"][0], data["runs"][-1]
    assert first["requests"][0]["gaps"] == [[pytest.approx(0.2), 10]] and first["mode"] == "off"
    assert last["all"]["tpot"]["p50"] is None and last["requests"][0]["message"] == "the queue is full"
    assert data["objectives"] == {"ttft_ms": None, "tpot_ms": 15.0, "e2e_ms": None}


def test_pictures(tmp_path: Path):
    for name, runs in (("one", RUNS[:1]), ("failed", [ModeRun("off", 0, (FAILED,))]), ("compare", RUNS)):
        plots.draw(make_report(runs), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="needs at least 1 request, got 0"):
        plots.draw(make_report([]), tmp_path / "none.png")


# The command line.


def wanted(*argv: str) -> Wanted:
    args = command.parser().parse_args(argv)
    command.check(args)
    return command.wanted_of(args)


def test_defaults():
    plain = wanted()
    assert plain.load == arrivals.closed(4, 64) and not plain.compare and sorted(plain.library) == ["code", "prose"]
    both = wanted("--compare")
    assert both.load is None and both.compare and both.repeats == 3 and both.duration == 40.0
    assert wanted("--compare", "--concurrency", "2").load == arrivals.closed(2, 64)


def test_arrivals_from_flags(tmp_path: Path):
    trace = tmp_path / "t.csv"
    trace.write_text(BURST_GPT)
    assert wanted("--rate", "3", "--requests", "9").load == arrivals.random_process(3.0, 9)
    gamma = wanted("--rate", "3", "--burstiness", "0.5", "--seed", "4").load
    assert gamma == arrivals.random_process(3.0, 64, burstiness=0.5, seed=4)
    timed = wanted("--rate", "50", "--duration", "4").load
    assert timed is not None and 3.5 < timed.arrivals[-1].at < 4 and 150 < len(timed.arrivals) < 250
    on_off = wanted("--rate", "8", "--bursty", "2,3.5", "--off-rate", "1", "--duration", "20").load
    assert on_off == arrivals.on_off(8.0, 1.0, 2.0, 3.5, 20.0)
    assert wanted("--trace", str(trace), "--speed-up", "2").load == traces.read(trace, speed_up=2.0)
    assert wanted("--trace", "synthetic", "--rate", "5").load == arrivals.synthetic(5.0, 40.0)
    assert wanted("--trace", "synthetic").load is None
    assert wanted("--workloads", "prose").library == {"prose": built_in()["prose"]}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--concurrency", "0"], "concurrency must be at least 1, got 0"),
        (["--concurrency", "2", "--rate", "3"], "--rate 3.0 does not go with --concurrency 2"),
        (["--burstiness", "2"], "--burstiness 2.0 needs --rate"),
        (["--rate", "1", "--off-rate", "1"], "--off-rate 1.0 is for --bursty"),
        (["--rate", "1", "--bursty", "x"], "bursty must be two numbers of seconds such as 2,8, got 'x'"),
        (["--trace", "t.csv", "--rate", "1"], "--rate 1.0 does not go with --trace t.csv, which has its own"),
        (["--speed-up", "2"], "--speed-up 2.0 is for trace files"),
        (["--compare", "--requests", "5"], "--requests 5 does not go with the synthetic trace; give --duration"),
        (["--repeats", "5"], "--repeats 5 is for --compare and --overhead"),
        (["--target", "a:1", "--model", "demo"], "--model demo is for an own server, got --target a:1"),
        (["--token-file", "f"], "--token-file f is for a server that runs, got no --target"),
        (["--overhead", "--rate", "1"], "--rate 1.0 does not go with --overhead"),
        (["--overhead", "--max-tokens", "1"], "max-tokens must be at least 2 with --overhead, got 1"),
        (["--batch-sizes", "1"], "--batch-sizes 1 is for --overhead"),
        (["--same-process"], "--same-process True is for --overhead"),
        (["--overhead", "--stub-round-ms", "0"], "stub-round-ms must lie above 0 and be at most 1000, got 0.0"),
        (["--overhead", "--stub-round-ms", "1", "--model", "m"], "--model m does not go with --stub-round-ms 1.0"),
        (["--overhead", "--batch-sizes", "1,x"], "batch-sizes must be integers from 1 to 9999 such as 1,16, got '1,x'"),
        (["--workloads", "poems"], "workloads must be among .'code', 'prose'., got 'poems'"),
        (["--slo-ttft-ms", "-1"], "slo-ttft-ms must be above 0, got -1"),
        (["--timeout", "0"], "timeout must be above 0, got 0.0"),
        (["--json", "/nowhere/x.json"], "--json '/nowhere/x.json': its directory does not exist"),
    ],
)
def test_bad_options_are_named(capsys: pytest.CaptureFixture[str], argv: list[str], message: str):
    assert bench_command.main(["serve", *argv]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and re.search(message, errors), errors


# A server that is none: every token takes its time, some prompts fail.


class Fake:
    """Streams max_tokens in bursts of two, and notes what it was asked.

    Attributes:
      policies, routes, flushed: in order. hang: the requests never end. gone: the server answers nothing.
      policy: what it began with; one that is static has its tier and no other.
    """

    def __init__(self, tiers: tuple[str, ...] = ("off", "chain-1", "chain-3"), policy: str = "adaptive"):
        self.tiers, self.policy, self.gone = tiers, policy, False
        self.policies: list[str] = []
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.live = self.most = self.flushed = 0
        self.hang = False
        self.fail: Callable[[generation_pb2.GenerateRequest], grpc.StatusCode | None] = lambda request: None

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        self.requests.append(request)
        code = self.fail(request)
        if code is not None:
            await context.abort(code, "as it was told")
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            count = len(request.tokens.ids) or len(request.text)
            yield generation_pb2.GenerateStreamResponse(prompt=generation_pb2.PromptInfo(prompt_tokens=count))
            yield generation_pb2.GenerateStreamResponse(delta=generation_pb2.Delta())  # a character in two halves
            left = request.sampling.max_tokens
            while left:
                await asyncio.sleep(0.002)
                if self.hang:
                    await asyncio.sleep(60)
                now = min(2, left)
                left -= now
                yield generation_pb2.GenerateStreamResponse(delta=generation_pb2.Delta(token_ids=[7] * now))
            stats = generation_pb2.SpeculationStats(num_spec_steps=4, num_draft_tokens=12, num_accepted_draft_tokens=4)
            done = generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_LENGTH, speculation=stats)
            if request.route != "unfinished":
                yield generation_pb2.GenerateStreamResponse(finished=done)
        finally:
            self.live -= 1

    async def Tokenize(self, request: Any, context: Any) -> generation_pb2.TokenizeResponse:
        return generation_pb2.TokenizeResponse(ids=list(request.text.encode()))

    async def GetServerInfo(self, request: Any, context: Any) -> admin_pb2.GetServerInfoResponse:
        if self.gone:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return admin_pb2.GetServerInfoResponse(
            model="fake", drafter="none", policy=self.policy, active_tier=self.tiers[-1],
            verification="coupled", device="cpu", dtype="float32",
            max_seq_len=512, max_batch_size=4, tiers=self.tiers, buckets=[4],
            rounds_by_tier={"off": len(self.requests)},
        )  # fmt: skip

    async def FlushCache(self, request: Any, context: Any) -> admin_pb2.FlushCacheResponse:
        self.flushed += 1
        return admin_pb2.FlushCacheResponse()

    async def SetSpeculation(self, request: Any, context: Any) -> admin_pb2.SetSpeculationResponse:
        self.policies.append(request.policy + (f"-{request.depth}" if request.HasField("depth") else ""))
        if self.policy == "static" and request.policy != "static":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "one tier is compiled")
        if request.HasField("depth") and request.depth == 3:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "depth 3 is not compiled")
        return admin_pb2.SetSpeculationResponse()


def served(fake: Fake, use: Callable[[str], Any]) -> Any:
    """What `use` makes of a port where the fake answers."""

    async def go() -> Any:
        server = grpc.aio.server()
        add_to(server, GENERATION, fake)
        add_to(server, ADMIN, fake)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await use(f"127.0.0.1:{port}")
        finally:
            await server.stop(None)

    return asyncio.run(go())


def session_of(fake: Fake, asked: Wanted) -> Session:
    async def use(target: str) -> Session:
        async with AsyncClient(target) as client:
            session = Session(client, asked, target)
            await session.go()
            return session

    return served(fake, use)


SHORT = {
    "code": [Passage("code", 0, "def f():"), Passage("code", 1, "class A:")],
    "prose": [Passage("prose", 0, "In the")],
}


def asking(load: Load | None, **fields: Any) -> Wanted:
    given: dict[str, Any] = {"library": SHORT, "sending": sender.Sending(timeout=60.0), "max_tokens": 6}
    return Wanted(load, **{**given, **fields})


def test_a_closed_loop_keeps_its_places_full_and_records_every_token():
    fake = Fake()
    slo = Objectives(ttft_ms=60_000, tpot_ms=60_000)
    session = session_of(fake, asking(arrivals.closed(3, 12), sending=sender.Sending(slo=slo), warmup=2))
    made = session.report(interrupted=False)
    assert made is not None and not made.failures and len(made.runs) == 1
    records = made.runs[0].records
    assert len(records) == 12 and len(fake.requests) == 12 + 2 and fake.most == 3
    for r in records:
        assert (r.output_tokens, r.first_tokens, [n for _, n in r.gaps]) == (6, 2, [2, 2])
        assert r.first is not None and r.sent < r.first < r.ended and (r.rounds, r.drafted, r.accepted) == (4, 12, 4)
        assert sum(gap for gap, _ in r.gaps) == pytest.approx(r.ended - r.first, abs=0.5)
    assert {r.prompt_tokens for r in records} <= {8, 6}
    sent = fake.requests[-1]
    assert (sent.slo.ttft_ms, sent.slo.tpot_ms) == (60_000, 60_000) and sent.sampling.ignore_eos
    assert sent.route in ("code", "prose") and made.runs[0].tier_rounds == {"off": 12}
    assert summarize("all", records, slo).attained == 1.0
    assert report.render(made) and not fake.policies and not fake.flushed


def test_open_loops_do_not_wait_for_answers():
    fake = Fake()
    load = Load("all at once", tuple(Arrival(0.001 * i, "", 10, 6) for i in range(20)))
    made = session_of(fake, asking(load, warmup=0)).report(interrupted=False)
    assert made is not None and fake.most > 4  # more than a batch
    assert [len(request.tokens.ids) for request in fake.requests] == [10] * 20
    due = {r.index: r.due for r in made.runs[0].records}
    assert due == {i: pytest.approx(0.001 * i) for i in range(20)}
    assert all(r.lag >= 0 for r in made.runs[0].records)


def test_errors_are_recorded_by_status():
    fake = Fake()
    codes = {0: grpc.StatusCode.RESOURCE_EXHAUSTED, 1: grpc.StatusCode.INTERNAL}
    fake.fail = lambda request: codes.get(request.sampling.seed)
    made = session_of(fake, asking(arrivals.closed(1, 5), warmup=0)).report(interrupted=False)
    assert made is not None
    assert sorted(r.status for r in made.runs[0].records) == ["INTERNAL", OK, OK, OK, "RESOURCE_EXHAUSTED"]
    assert {r.message for r in made.failures} == {"as it was told"} and "INTERNAL: as it was told" in report.render(
        made
    )


def test_a_stream_without_an_end_is_an_error():
    library = {"unfinished": [Passage("unfinished", 0, "so")]}
    made = session_of(Fake(), asking(arrivals.closed(1, 1), library=library, warmup=0)).report(interrupted=False)
    assert made is not None and [r.status for r in made.runs[0].records] == [INCOMPLETE] and len(made.failures) == 1


def test_a_comparison_interleaves_its_repeats_and_names_what_the_server_refuses():
    fake = Fake()
    load = arrivals.on_off(400.0, 50.0, 0.05, 0.05, 0.2)
    made = session_of(fake, asking(load, compare=True, repeats=2, warmup=1)).report(interrupted=False)
    assert made is not None
    assert [(run.mode, run.repeat) for run in made.runs] == [
        (mode, repeat) for repeat in (0, 1) for mode in ("off", "chain-1", "adaptive")
    ]
    assert fake.policies == [
        "off", "static-1", "static-3", "adaptive", "off", "static-1", "adaptive", "adaptive",
    ]  # fmt: skip
    assert made.skipped == {"chain-3": "depth 3 is not compiled"} and fake.flushed == 6
    assert {v.phase for v in made.judged} == {"on", "off"} and all(len(v.values) == 3 for v in made.judged)
    sizes = {tuple(sorted(r.index for r in run.records)) for run in made.runs}
    assert len(sizes) == 1  # every mode got the same requests
    assert "adaptive against" in report.render(made)


def test_a_comparison_sets_the_server_s_policy_back():
    fake = Fake(("chain-1",), policy="static")
    made = session_of(fake, asking(arrivals.closed(2, 4), compare=True, warmup=0)).report(interrupted=False)
    assert made is not None and [run.mode for run in made.runs] == ["chain-1"]
    assert made.skipped == dict.fromkeys(("off", "adaptive"), "one tier is compiled")
    assert fake.policies == ["off", "static-1", "adaptive", "static-1"]


def test_what_was_measured_is_reported_where_the_server_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fake, path = Fake(), tmp_path / "load.json"
    fake.fail = lambda request: setattr(fake, "gone", True)
    argv = ["--compare", "--concurrency", "1", "--requests", "2", "--max-tokens", "4", "--warmup", "0"]

    async def use(target: str) -> int:
        return await asyncio.to_thread(bench_command.main, ["serve", "--target", target, *argv, "--json", str(path)])

    assert served(fake, use) == 1
    assert "UNAVAILABLE: gone" in capsys.readouterr().err
    data = json.loads(path.read_text())
    assert data["interrupted"] and [run["all"]["requests"] for run in data["runs"]] == [2]


def test_the_shipped_trace_is_scaled_to_what_the_server_takes():
    fake = Fake()
    made = session_of(fake, asking(None, duration=0.3, warmup=0)).report(interrupted=False)
    assert made is not None and made.plan.load.source.startswith("synthetic bursty trace at ")
    assert len(fake.requests) == 12 + len(made.plan.requests)  # three full batches measured it
    assert {r.phase for r in made.runs[0].records} <= {p.name for p in made.plan.load.phases}


def test_an_interruption_keeps_what_had_ended():
    fake = Fake()
    fake.fail = lambda request: setattr(fake, "hang", len(fake.requests) > 2)

    async def use(target: str) -> Session:
        async with AsyncClient(target) as client:
            session = Session(client, asking(arrivals.closed(1, 6), warmup=0), target)
            task = asyncio.create_task(session.go())
            while not (fake.hang and fake.live):
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return session

    made = served(fake, use).report(interrupted=True)
    assert made is not None and [r.status for r in made.runs[0].records] == [OK, OK, INTERRUPTED]
    assert not made.failures and "INTERRUPTED: 3 requests were sent" in report.render(made)


def test_the_command_writes_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fake = Fake()
    files = [tmp_path / "load.json", tmp_path / "load.png"]
    argv = [
        "--concurrency",
        "2",
        "--requests",
        "4",
        "--max-tokens",
        "4",
        "--json",
        str(files[0]),
        "--plot",
        str(files[1]),
    ]

    async def use(target: str) -> int:
        return await asyncio.to_thread(bench_command.main, ["serve", "--target", target, *argv])

    assert served(fake, use) == 0
    printed = capsys.readouterr().out
    assert "closed loop of 2: 4 requests" in printed and f"wrote {files[0]}" in printed
    data = json.loads(files[0].read_text())
    assert data["runs"][0]["all"]["requests"] == 4 and data["conditions"]["model"] == "fake"
    assert files[1].read_bytes()[:4] == b"\x89PNG"
    fake.fail = lambda request: grpc.StatusCode.INTERNAL
    assert served(fake, use) == 1


def test_a_server_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert bench_command.main(["serve", "--target", "127.0.0.1:1"]) == 1
    assert "error: the server at 127.0.0.1:1 says UNAVAILABLE" in capsys.readouterr().err


# Overhead.


def test_overhead_verdicts():
    side = lambda tpot, wall, cpu: overhead.Side(tpot, wall, cpu, (1.0, 1.0, 3.0), (1000, 1000, 1000))
    offline = side((0.010, 0.020, 0.010), (1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    cell = overhead.Cell("adaptive", 1, offline, side((0.0105, 0.0212, 0.0150), (1.2, 1.1, 1.0), (2.2, 2.2, 2.2)))
    assert cell.ratio == pytest.approx(1.06) and cell.holds
    words = overhead.line(cell)
    assert "1.060 (1.05-1.50)  holds (1.10)\n" in words and "wall 1.100, cpu 1.100: " in words
    assert "2000 -> 2200 us a round, the server's 1000" in words and max(map(len, words.splitlines())) <= WIDTH
    slow = overhead.Cell("adaptive", 16, offline, side((0.012, 0.024, 0.015), (1.0, 1.0, 1.0), (2.0, 2.0, 2.0)))
    assert slow.ratio == pytest.approx(1.2) and slow.holds is False and "MORE than 1.10" in overhead.line(slow)
    assert dataclasses.replace(cell, batch_size=4).holds is None
    measurement = overhead.Measurement(overhead.Plan(), print)
    measurement.cells = [cell]
    data = json.loads(json.dumps(overhead.to_dict(measurement, interrupted=True)))
    assert data["cells"][0]["ratio"] == pytest.approx(1.06) and data["interrupted"]
    assert data["cells"][0]["serving"]["wall"] == [1.2, 1.1, 1.0]
