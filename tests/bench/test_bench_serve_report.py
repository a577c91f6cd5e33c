"""What a load's records say: their numbers, verdicts and reports."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench.offline.report import WIDTH
from jaxspec.bench.online import compare, plots, report, sender, texts
from jaxspec.bench.online.arrivals import Arrival, Load, Phase
from jaxspec.bench.online.compare import ModeRun
from jaxspec.bench.online.records import (
    INTERRUPTED,
    OK,
    Objectives,
    Record,
    by_bucket,
    by_phase,
    by_route,
    summarize,
)

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
    library = {"code": [("one", (1, 1, 1)), ("two", (2, 2))], "prose": [("three", (3, 3, 3, 3, 3))]}
    plan = dataclasses.replace(texts.plan(load, library, max_seq_len=40, max_tokens=8), cut_prompts=2, cut_outputs=1)
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
