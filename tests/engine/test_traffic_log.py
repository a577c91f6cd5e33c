"""An engine with a traffic log writes what it finished, which trainees read as it is; without one it writes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.request import SamplingParams
from jaxspec.train.data import dataset

FEW = dict(batch_buckets=(4,), variants=("sampled",))


def build(bench: Any, path: Path | str | None) -> Engine:
    return bench.build("none", SpeculationConfig(policy="off"), **FEW, traffic_log=path)


def test_finished_requests_are_logged_and_read(bench: Any, tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    engine = build(bench, path)
    requests = tools.workload()
    outputs = tools.drive(engine, requests)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = {
        (tuple(prompt), tuple(output.token_ids), params.temperature)
        for (prompt, params), output in zip(requests, outputs, strict=True)
    }
    assert {(tuple(r["prompt_token_ids"]), tuple(r["output_token_ids"]), r["temperature"]) for r in rows} == wanted
    plain = lambda p: (
        p
        == SamplingParams(
            temperature=p.temperature,
            seed=p.seed,
            max_tokens=p.max_tokens,
            ignore_eos=p.ignore_eos,
            logprobs=p.logprobs,
        )
    )
    shaped = {tuple(prompt) for prompt, params in requests if not plain(params)}
    assert len(rows) == len(requests) > len(shaped) > 0
    for row in rows:
        filtered = {"filtered": True} if tuple(row["prompt_token_ids"]) in shaped else {}
        assert row.keys() - {"prompt_token_ids", "output_token_ids", "temperature"} == filtered.keys()
    examples = dataset.read_examples([path], None, vocab_size=13)
    assert [e.prompt_length for e in examples] == [len(row["prompt_token_ids"]) for row in rows]
    assert {e.dataset for e in examples} == {"served", "served (filtered)"}

    engine.add([1, 2], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), request_id="left")
    engine.step()
    engine.abort("left")
    while engine.has_work:
        engine.step()
    assert len(path.read_text().splitlines()) == len(requests), "an aborted request is no answer"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_serving_outlives_its_log(bench: Any, tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = build(bench, "/dev/full")
    requests = tools.workload()[:4]
    tools.same(tools.drive(engine, requests), bench.expected(requests))
    assert caplog.text.count("logging of traffic to /dev/full stops") == 1


def test_a_log_must_be_a_path_that_can_be_appended_to(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.traffic_log must be None or a path, got 3"):
        EngineConfig(traffic_log=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"EngineConfig.traffic_log must be None or a path, got ''"):
        EngineConfig(traffic_log="")
    with pytest.raises(ValueError, match="cannot be opened for appending"):
        build(bench, tmp_path)
