"""Loads: arrivals, trace formats and prompts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench.online import arrivals, texts, traces
from jaxspec.bench.online.arrivals import Arrival, Load

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
