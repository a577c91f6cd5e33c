"""Arrivals from trace files: Azure, BurstGPT, Mooncake, and plain columns of timestamps.

Owns the formats, told apart by their headers. Files are read where they lie. Must not know prompts or servers.

Azure LLM inference traces (2023, 2024): CSV of TIMESTAMP (date and time), ContextTokens, GeneratedTokens.
BurstGPT: CSV of Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type; a row without
response tokens is a call that failed.
Mooncake: JSON lines of timestamp (ms), input_length, output_length, hash_ids; or a CSV of timestamp_ms,
input_length, output_length.
One column: seconds, with or without a header.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxspec.bench.online.arrivals import Arrival, Load

#: What a row says: (seconds, prompt tokens, output tokens), or why it is no request.
Row = tuple[float, int | None, int | None] | str


def read(
    path: str | Path, *, speed_up: float = 1.0, duration: float | None = None, count: int | None = None
) -> Load:  # fmt: skip
    """A trace as a load; its first arrival is at 0.

    Args:
      speed_up: arrivals come this many times faster than recorded.
      duration: only arrivals of this many seconds, after the speed-up. count: only so many.

    Raises:
      ValueError: an unreadable file, an unknown format or a bad row, named with its line.
    """
    path = Path(path)
    if not 0 < speed_up < math.inf:
        raise ValueError(f"speed-up must be a finite number above 0, got {speed_up!r}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {str(path)!r} cannot be read: {error}") from error
    name, rows = _rows(path, lines)
    skipped: Counter[str] = Counter()
    found: list[tuple[float, int | None, int | None]] = []
    for row in rows:
        if isinstance(row, str):
            skipped[row] += 1
        else:
            found.append(row)
    if not found:
        raise ValueError(f"trace {str(path)!r} must hold at least 1 request, got 0")
    found.sort(key=lambda row: row[0])
    first = found[0][0]
    arrivals = [Arrival((at - first) / speed_up, "", prompt, output) for at, prompt, output in found]
    if duration is not None:
        arrivals = [a for a in arrivals if a.at < duration]
    source = f"{name} trace {path.name}" + (f", {speed_up:g} times as fast" if speed_up != 1 else "")
    return Load(source, tuple(arrivals[:count]), skipped=tuple(sorted(skipped.items())))


def _rows(path: Path, lines: Sequence[str]) -> tuple[str, Iterator[Row]]:
    """(format, its rows)."""
    head = next((line.strip() for line in lines if line.strip()), "")
    if head.startswith("{"):
        return "Mooncake", _json_lines(path, lines)
    columns = [column.strip() for column in head.split(",")]
    lowered = [column.lower() for column in columns]
    for name, needed, parse in (
        ("Azure", ("timestamp", "contexttokens", "generatedtokens"), _azure),
        ("BurstGPT", ("timestamp", "request tokens", "response tokens"), _burst_gpt),
        ("Mooncake", ("timestamp_ms", "input_length", "output_length"), _mooncake),
    ):
        if set(needed) <= set(lowered):
            places = [lowered.index(column) for column in needed]
            return name, _table(path, lines, places, parse)
    if len(columns) == 1:
        return "one-column", _column(path, lines)
    raise ValueError(
        f"trace {str(path)!r} must be an Azure, BurstGPT or Mooncake trace or one column of seconds, "
        f"got columns {columns}"
    )


def _table(
    path: Path, lines: Sequence[str], places: Sequence[int], parse: Callable[[Sequence[str]], Row]
) -> Iterator[Row]:
    reader = csv.reader(lines)
    header = True
    for values in reader:
        if not "".join(values).strip():
            continue
        if header:
            header = False
            continue
        try:
            yield parse([values[place].strip() for place in places])
        except (ValueError, IndexError) as error:
            raise ValueError(f"trace {str(path)!r}, line {reader.line_num}: {error}, got {values}") from error


def _column(path: Path, lines: Sequence[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield _seconds(line), None, None
        except ValueError as error:
            if number > 1:  # the first line may be a header
                raise ValueError(f"trace {str(path)!r}, line {number}: {error}") from error


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds) or isinstance(value, bool):
        raise ValueError(f"a timestamp must be a finite number, got {value!r}")
    return seconds


def _length(name: str, value: Any) -> int:
    """A number of tokens; "12.0" is one too."""
    number = _seconds(value) if not isinstance(value, str) or value else math.nan
    if not number >= 0 or number != int(number):
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
    return int(number)


def _row(at: float, prompt: int, output: int) -> Row:
    if not output:
        return "no output tokens"
    return (at, prompt, output) if prompt else "no prompt tokens"


def _azure(values: Sequence[str]) -> Row:
    # datetime holds microseconds; the traces have seven digits.
    match = re.fullmatch(r"([^.]*)(\.\d+)?(.*)", values[0])
    assert match is not None
    moment = datetime.fromisoformat(match[1] + match[3])
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    at = moment.timestamp() + float(match[2] or 0)
    return _row(at, _length("ContextTokens", values[1]), _length("GeneratedTokens", values[2]))


def _burst_gpt(values: Sequence[str]) -> Row:
    return _row(_seconds(values[0]), _length("Request tokens", values[1]), _length("Response tokens", values[2]))


def _mooncake(values: Sequence[Any]) -> Row:
    at = _seconds(values[0]) / 1000
    return _row(at, _length("input_length", values[1]), _length("output_length", values[2]))


def _json_lines(path: Path, lines: Sequence[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"trace {str(path)!r}, line {number}"
        try:
            entry = json.loads(line)
            if not isinstance(entry, Mapping):
                raise ValueError(f"must be an object, got {type(entry).__name__}")
            missing = [key for key in ("timestamp", "input_length", "output_length") if key not in entry]
            if missing:
                raise ValueError(f"must have timestamp, input_length and output_length, got {sorted(entry)}")
            yield _mooncake([entry["timestamp"], entry["input_length"], entry["output_length"]])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
