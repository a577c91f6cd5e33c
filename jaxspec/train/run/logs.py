"""A run's log: one CSV row a window, cut back where a run resumes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path


class Log:
    """Rows of {name: value} by step in a CSV file; new names become new columns, empty in the rows before.

    Rows after step `start` are dropped: a run that was killed logged them, and its successor logs them again.
    """

    def __init__(self, path: Path, start: int):
        self._path = path
        self._rows = [row for row in read(path) if int(row["step"]) <= start]
        self._names = list(self._rows[0]) if self._rows else ["step"]
        self._write()

    def append(self, step: int, row: Mapping[str, float]) -> None:
        new = [name for name in row if name not in self._names]
        cells = {"step": str(step), **{name: f"{value:.9g}" for name, value in row.items()}}
        self._rows.append(cells)
        if new:
            self._names += new
            self._write()
            return
        with self._path.open("a", newline="") as f:
            csv.DictWriter(f, self._names, restval="").writerow(cells)

    def _write(self) -> None:
        staging = self._path.with_name(self._path.name + ".tmp")
        with staging.open("w", newline="") as f:
            writer = csv.DictWriter(f, self._names, restval="")
            writer.writeheader()
            writer.writerows(self._rows)
        staging.replace(self._path)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a log; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    with path.open(newline="") as f:
        rows = list(csv.DictReader(f))
    return [row for row in rows if all(value is not None for value in row.values()) and row["step"].isdigit()]


def line(row: Mapping[str, float]) -> str:
    """A row for the eye."""
    return " ".join(f"{name} {value:.4g}" for name, value in row.items())
