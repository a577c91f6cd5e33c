"""Batch work on a Ray cluster: every item comes back once, also where a worker is lost."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from jaxspec import batch, clusters
from jaxspec.checkpointing import hf
from jaxspec.clusters import Cluster
from jaxspec.models.tiny import tiny_target
from jaxspec.request import FinishReason
from jaxspec.train.data import regenerate
from jaxspec.train.data.regenerate import Answers
from jaxspec.train.run import evaluate
from jaxspec.writer import Asked, WriterConfig, Written

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install -e '.[ray]')"
)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    clusters.add_arguments(parser)
    return parser.parse_args(words)


def test_what_a_cluster_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clusters.of(parsed()) is None
    for words, message in [
        (["--workers", "2"], "--workers 2 needs --ray"),
        (["--worker-resources", "GPU=1"], r"--worker-resources {'GPU': 1.0} needs --ray"),
        (["--ray", "local", "--workers", "0"], "workers must be at least 1, got 0"),
        (["--ray", ""], "address of a cluster must be 'local' or Ray's, got ''"),
        (["--ray", "local", "--worker-resources", "GPU=0"], "resource 'GPU' must be positive, got 0.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            clusters.of(parsed(*words))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--ray needs Ray Data \(pip install -e '\.\[ray\]'\)"):
        clusters.of(parsed("--ray", "auto"))
    with pytest.raises(SystemExit):
        parsed("--worker-resources", "two GPUs")


# The command, with a writer that needs no engine.


@pytest.fixture
def echoed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs `python -m jaxspec.batch` on rows; what it writes is each prompt backwards, the last row first."""
    asked: list[int] = []
    sampled: list[bool] = []

    def write(how: WriterConfig, texts: Sequence[Asked], cluster: Any) -> Iterator[tuple[int, Written]]:
        asked.append(len(texts))
        sampled.append(how.sampled)
        for number, text in reversed(list(enumerate(texts))):
            yield number, Written(text.tokens[::-1], str(text.params.seed), FinishReason.STOP, None)

    monkeypatch.setattr(batch, "write", write)

    def run(directory: Path, *words: str) -> list[dict[str, Any]]:
        out = directory / "out.jsonl"
        args = [str(directory / "in.jsonl"), "--out", str(out), "--model", str(directory), "--drafter", "ngram", *words]
        written = batch.run(batch.parser().parse_args(args))
        return [json.loads(line) for line in written.read_text().splitlines()]

    run.asked, run.sampled = asked, sampled  # type: ignore[attr-defined]
    return run


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    hf.save_model(tiny_target(0), tmp_path)
    return tmp_path


def rows(directory: Path, *rows: dict[str, Any]) -> None:
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_row_is_answered_once_and_in_order(directory: Path, echoed: Any) -> None:
    """An interrupted run goes on after its last whole line, with the seeds that the rows had."""
    rows(directory, {"prompt_token_ids": [1, 2], "id": "a"}, {"prompt_token_ids": [3, 4, 5], "seed": 7},
         {"prompt_token_ids": [6], "temperature": 0.5, "logit_bias": {"3": 1.0}})  # fmt: skip
    first = echoed(directory, "--max-tokens", "8")
    assert [row["output_token_ids"] for row in first] == [[2, 1], [5, 4, 3], [6]]
    assert [row.get("id") for row in first] == ["a", None, None]
    assert first[1]["text"] == "7" and first[2]["temperature"] == 0.5 and first[0]["finish_reason"] == "stop"
    assert first[0]["text"] != first[2]["text"], "seeds of their own"
    whole = (directory / "out.jsonl").read_bytes()
    (directory / "out.jsonl").write_bytes(whole[: whole.index(b"\n") + 9])
    assert echoed(directory, "--max-tokens", "8") == first and echoed.asked == [3, 2]
    with pytest.raises(ValueError, match="was made with max_tokens 8, got 9"):
        echoed(directory, "--max-tokens", "9")


def test_rows_that_shape_the_argmax_have_an_engine_that_does(directory: Path, echoed: Any) -> None:
    for name, more in [("plain", {}), ("shaped", {"repetition_penalty": 1.2}), ("warm", {"temperature": 0.5})]:
        rows(directory, {"prompt_token_ids": [1]}, {"prompt_token_ids": [2], **more})
        echoed(directory, "--out", str(directory / f"{name}.jsonl"))
    assert echoed.sampled == [False, True, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "in.jsonl:1: this checkpoint has no tokenizer"),
        (
            {"prompt_token_ids": [1], "max_token": 3},
            r"in.jsonl:1: a row may have \[.*\], got \['max_token'\]; for 'max_token' say 'max_tokens'",
        ),
        ({"prompt_token_ids": [1], "messages": []}, "must have one of .*, got 'messages' and"),
        ({"prompt_token_ids": []}, "in.jsonl:1: prompt must hold at least 1 token"),
        ({"prompt_token_ids": [1], "temperature": -1}, "in.jsonl:1: temperature must"),
        ({"prompt_token_ids": [1], "logprobs": 1}, r"in.jsonl:1: a row may have \[.*\], got \['logprobs'\]"),
        ({"prompt_token_ids": [1], "stop": "a"}, r"in.jsonl:1: stop strings \('a',\) need a tokenizer"),
        ({"prompt_token_ids": [1, 13]}, r"in.jsonl:1: prompt token ids must lie in \[0, 13\), got 13"),
        ({"prompt_token_ids": [1, 2.5]}, r"must lie in \[0, 13\), got 2.5"),
        ({"prompt_token_ids": [1], "stop_token_ids": [13]}, "stop_token_ids must be below the vocabulary size 13"),
        ({"prompt_token_ids": [1] * 9}, "a context of 16 tokens: at most 8, got 9"),
    ],
)
def test_rows_that_cannot_be_honoured(row: dict[str, Any], message: str, directory: Path, echoed: Any) -> None:
    rows(directory, row)
    with pytest.raises(ValueError, match=message):
        echoed(directory, "--context", "16", "--max-tokens", "8")
    assert not (directory / "out.jsonl").exists()


# With Ray.


class Slowly:
    """Doubles numbers and leaves word of who did."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __call__(self) -> Callable[[Sequence[int]], list[int]]:
        def double(numbers: Sequence[int]) -> list[int]:
            time.sleep(0.2)
            for number in numbers:
                (self.directory / f"{number}.{os.getpid()}").touch()
            return [2 * number for number in numbers]

        return double


def workers_of(directory: Path) -> set[int]:
    return {int(path.name.partition(".")[2]) for path in directory.iterdir()}


@needs_ray
@pytest.mark.exhaustive("a Ray cluster")
@pytest.mark.filterwarnings("default")
def test_a_lost_worker_loses_no_item_and_doubles_none(tmp_path: Path) -> None:
    found: dict[int, int] = {}
    killed: list[int] = []
    for number, result in clusters.spread(Slowly(tmp_path), list(range(80)), Cluster(workers=2), 4):
        assert number not in found
        found[number] = result
        if len(found) >= 8 and not killed and len(workers_of(tmp_path)) == 2:
            killed.append(min(workers_of(tmp_path)))
            os.kill(killed[0], signal.SIGKILL)
    assert found == {number: 2 * number for number in range(80)}
    assert killed and len(workers_of(tmp_path)) == 3, "another took the place of the lost one"


class Failing:
    def __call__(self) -> Any:
        raise ValueError("no such model")


@needs_ray
@pytest.mark.exhaustive("a Ray cluster")
@pytest.mark.filterwarnings("default")
def test_what_workers_refuse_is_heard() -> None:
    with pytest.raises(ValueError, match="no such model"):
        list(clusters.spread(Failing(), [1, 2], Cluster(), 1))
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with pytest.raises(ValueError, match=f"--ray '{address}': no cluster is there"):
            list(clusters.spread(Failing(), [1, 2], Cluster(address), 1))


def map_workers() -> list[int]:
    """Processes of actors, by the titles that Ray gives them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(b"ray::") and b"MapWorker" in title:
                found.append(int(entry.name))
    return sorted(found)


@needs_ray
@pytest.mark.exhaustive("a Ray cluster, and an engine in each of its workers")
@pytest.mark.filterwarnings("default")
def test_answers_of_two_workers_one_of_which_is_killed(tmp_path: Path) -> None:
    """The very file that one process writes."""
    hf.save_model(tiny_target(0, bos_token_id=None), tmp_path / "target", dtype=jnp.float32)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": [i % 13, i % 7, 3], "output_token_ids": [1]}) + "\n"
                            for i in range(48)))  # fmt: skip
    how = Answers(max_tokens=200, context=256, batch=2, seed=3)
    run = lambda name, cluster: regenerate.regenerate(tmp_path / "target", [data], tmp_path / name, how, cluster)
    alone = run("alone.jsonl", None)
    killed: list[int] = []

    def kill() -> None:
        out = tmp_path / "spread.jsonl"
        while not (out.exists() and out.read_bytes().count(b"\n") >= 4):
            time.sleep(0.01)
        killed.append(map_workers()[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    spread = run("spread.jsonl", Cluster(workers=2))
    killer.join(100)
    assert killed and spread.read_bytes() == alone.read_bytes()


@needs_ray
@pytest.mark.exhaustive("a Ray cluster, and a target in each of its workers")
@pytest.mark.filterwarnings("default")
def test_two_workers_evaluate_what_one_process_does(tmp_path: Path) -> None:
    """The same record: no count depends on who made it."""
    letters = Tokenizer(models.BPE({c: i for i, c in enumerate("abcdefghijklm")}, []))
    target = tiny_target(0, bos_token_id=None)
    hf.save_model(target, tmp_path / "target", tokenizer=letters, dtype=jnp.float32)
    hf.save_model(tiny_target(0, bos_token_id=None, num_layers=1), tmp_path / "draft", dtype=jnp.float32)
    draw = np.random.default_rng(0)
    rows = [
        {"prompt_token_ids": [3, 1], "output_token_ids": draw.integers(0, 13, 30).tolist(), "temperature": i % 2}
        for i in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    words = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "draft"), "--rows", "2", "--no-cost"]
    words += ["--data", str(tmp_path / "rows.jsonl"), "--depth", "3"]
    alone = evaluate.main(parser.parse_args(words))
    assert len(alone["groups"]) == 2
    assert evaluate.main(parser.parse_args([*words, "--ray", "local", "--workers", "2"])) == alone
