"""A file of rows that a run writes in order, and goes on with after it was interrupted.

Beside it lies a file that says what it was made of; a run that would be made of something else is refused. Must not
know what rows are about.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO


class RowFile:
    """A .jsonl that grows row by row; a context manager while rows are added.

    Args:
      out: the file. made_of: JSON values by name.

    Raises:
      ValueError: `out` was made of something else, with both values, or is there without a word about that.
    """

    def __init__(self, out: Path, made_of: Mapping[str, Any]):
        self.path = out
        self._file: BinaryIO | None = None
        beside = out.with_name(out.name + ".made_of.json")
        if not beside.exists():
            if out.exists():
                raise ValueError(f"{out} exists, but {beside.name}, which says what it was made of, does not")
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = beside.with_name(beside.name + ".partial")
            partial.write_text(json.dumps(made_of, indent=1) + "\n")
            partial.replace(beside)
        before = _object(beside)
        for key in made_of:
            if before.get(key) != made_of[key]:
                was = f"{out} was made with {key} {before.get(key)!r}, got {made_of[key]!r}"
                raise ValueError(f"{was}; name another file, or remove this one and {beside.name}")
        if out.exists():
            with out.open("rb+") as f:
                _cut_off(f)

    def __enter__(self) -> RowFile:
        self._file = self.path.open("ab", buffering=0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None

    def count(self, rows: Callable[[Path], Iterable[Any]], answers: Callable[[int, Any], bool]) -> int:
        """How many rows are there.

        Args:
          rows: reads them. answers: whether a row, from 0, is about what it should be about.

        Raises:
          ValueError: one is not.
        """
        if not self.path.exists() or not self.path.stat().st_size:
            return 0
        done = 0
        for row in rows(self.path):
            if not answers(done, row):
                raise ValueError(f"{self.path}:{done + 1}: this row does not answer prompt {done + 1} of the data")
            done += 1
        return done

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row, whole as far as the disk goes.

        Raises:
          OSError: the disk is full or fails, naming the file.
        """
        assert self._file is not None
        write_line(self._file, json.dumps(row).encode() + b"\n", self.path)


def write_line(f: Any, line: bytes, path: Path) -> None:
    """Writes all of a line to an unbuffered file.

    Raises:
      OSError: the disk is full or fails, naming the file.
    """
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[f.write(rest) :]
    except OSError as e:
        raise OSError(e.errno, f"{e.strerror}; run the command again to go on", str(path)) from e


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fingerprint(model: Path) -> str:
    """Tells models apart by their configuration and by the beginnings, ends and sizes of their weights."""
    found = hashlib.sha256((model / "config.json").read_bytes())
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as f:
            found.update(f.read(2**20))
            f.seek(max(0, size - 2**20))
            found.update(f.read())
    return found.hexdigest()


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path} is not readable as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _cut_off(f: BinaryIO) -> None:
    """Removes what follows the last line's end."""
    end = f.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        f.seek(start)
        newline = f.read(end - start).rfind(b"\n")
        if newline >= 0:
            f.truncate(start + newline + 1)
            return
        end = start
    f.truncate(0)
