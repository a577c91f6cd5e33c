"""Which prompts a run sends, in which order.

Owns the workloads and the reading of prompt files. Must not know engines, clocks or results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.offline import prompts

#: Workloads that need no file. "switch" goes back and forth between code and prose within each run.
BUILT_IN = ("code", "prose", "switch")
#: The workload of --prompts FILE.
FILE = "file"
SWITCH_PHASES = ("code", "prose", "code", "prose")
#: A run sends at least this many prompts, so that a cell of batch size 1 is not one text alone.
LEAST_PROMPTS = 2


@dataclasses.dataclass(frozen=True)
class Passage:
    """A text to complete.

    Attributes:
      kind: what sort of text it is ("code", "prose", or a file's category).
      index: its place within its kind; (kind, index) names it in reports, and the seed derives from it.
    """

    kind: str
    index: int
    text: str


Library = Mapping[str, Sequence[Passage]]


def built_in() -> dict[str, list[Passage]]:
    """The prompts of this package by kind."""
    texts = {"code": prompts.CODE, "prose": prompts.PROSE}
    return {kind: [Passage(kind, i, text) for i, text in enumerate(many)] for kind, many in texts.items()}


def load_prompts(path: str | Path) -> list[Passage]:
    """Reads JSON lines: objects with `prompt`, or Spec-Bench's `turns`, whose first one is taken.

    Raises:
      ValueError: an unreadable or empty file, or a line that is neither; names the file and the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts file {str(path)!r} cannot be read: {error}") from error
    found: list[Passage] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(Passage(FILE, len(found), _text(f"{path}, line {number}", line)))
    if not found:
        raise ValueError(f"prompts file {str(path)!r} must hold at least 1 prompt, got 0")
    return found


def _text(where: str, line: str) -> str:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be an object with 'prompt' or 'turns', got {type(entry).__name__}")
    if "prompt" in entry:
        text, name = entry["prompt"], "prompt"
    elif "turns" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{where}: 'turns' must be a list of at least 1 text, got {turns!r}")
        text, name = turns[0], "turns[0]"
    else:
        raise ValueError(f"{where}: must have 'prompt' or 'turns', got fields {sorted(entry)}")
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: {name!r} must be a non-empty text, got {text!r}")
    return text


def queue(workload: str, batch_size: int, repeat: int, library: Library, waves: int = 1) -> list[Passage]:
    """The prompts of one run, in the order in which they are sent; every repeat takes up where the last one ended.

    Args:
      workload: one of BUILT_IN, or FILE.
      batch_size: requests that run together; a phase is that many prompts.
      library: prompts by kind.
      waves: at least so many phases.

    Raises:
      ValueError: a workload without prompts.
    """
    if workload == "switch":
        phases = SWITCH_PHASES * -(-waves // len(SWITCH_PHASES))
    else:
        phases = (workload,) * max(waves, -(-LEAST_PROMPTS // batch_size))
    missing = sorted({kind for kind in phases if not library.get(kind)})
    if missing:
        raise ValueError(f"workload {workload!r} needs prompts of kinds {missing}, got kinds {sorted(library)}")
    taken = {kind: repeat * phases.count(kind) * batch_size for kind in phases}
    out: list[Passage] = []
    for kind in phases:
        many = library[kind]
        out += [many[(taken[kind] + i) % len(many)] for i in range(batch_size)]
        taken[kind] += batch_size
    return out
