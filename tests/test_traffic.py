"""The log of served requests: whole lines, appended, and never a failure that serving notices."""

from __future__ import annotations

import gc
import json
import logging
import os
from pathlib import Path

import pytest

from jaxspec import traffic
from jaxspec.request import Request, SamplingParams
from jaxspec.traffic import TrafficLog


def request(number: int = 0) -> Request:
    made = Request(f"r{number}", [1, 2, number], SamplingParams(temperature=0.7), seed=0)
    made.output_token_ids = [5, 6]
    return made


ROW = {"prompt_token_ids": [1, 2, 0], "output_token_ids": [5, 6], "temperature": 0.7}


def rows(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_appended_at_once(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    first, second = TrafficLog(path), TrafficLog(str(path))
    first.record(request())
    assert rows(path) == [ROW], "nothing waits for the end"
    second.record(request(1))
    first.record(request(2))
    assert [row["prompt_token_ids"][2] for row in rows(path)] == [0, 1, 2]  # type: ignore[index]
    first.close()
    first.close()
    first.record(request(3))
    assert len(rows(path)) == 3
    later = TrafficLog(path)
    later.record(request(4))
    assert len(rows(path)) == 4
    assert path.stat().st_mode & 0o077 == 0, "users' text is for its owner to read"


def test_a_log_that_is_dropped_closes_its_file(tmp_path: Path) -> None:
    log = TrafficLog(tmp_path / "traffic.jsonl")
    fd = log._fd
    assert fd is not None
    del log
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    log = TrafficLog("/dev/full")
    with caplog.at_level(logging.WARNING):
        log.record(request())
        log.record(request())
    assert [r.getMessage() for r in caplog.records] == [
        "logging of traffic to /dev/full stops: [Errno 28] No space left on device"
    ]


def test_half_a_line_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "traffic.jsonl"
    log = TrafficLog(path)
    log.record(request())
    write = os.write
    monkeypatch.setattr(traffic.os, "write", lambda fd, line: write(fd, line[:10]))
    with caplog.at_level(logging.WARNING):
        log.record(request(1))
    monkeypatch.undo()
    log.record(request(2))
    assert rows(path) == [ROW] and path.read_bytes().endswith(b"\n")
    assert "only 10 of " in caplog.text


def test_files_that_cannot_be_a_log(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"traffic_log '.*nowhere/x' cannot be opened for appending: .*No such file"):
        TrafficLog(tmp_path / "nowhere" / "x")
    with pytest.raises(ValueError, match="cannot be opened"):
        TrafficLog(tmp_path)
    (tmp_path / "half").write_text('{"a": 1}\n{"b"')
    with pytest.raises(ValueError, match="ends within a line"):
        TrafficLog(tmp_path / "half")
    assert (tmp_path / "half").read_text() == '{"a": 1}\n{"b"'
