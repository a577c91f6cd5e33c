"""Which texts run at a time, and how many: loads that change while a policy watches.

Owns the workloads, as functions of the time since the start. Must not know engines, prompts or policies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

#: Workloads by name, and what they are.
WORKLOADS = {
    "code": "Python code",
    "prose": "English prose",
    "chat": "answers to questions, by the checkpoint's chat template where it has one",
    "mix": "code in every other place of the batch, prose in the rest",
    "switch": "all code, then all prose, and so on, every --switch-seconds",
    "grow": "code, one request at first, twice as many after each --switch-seconds",
}


@dataclasses.dataclass(frozen=True)
class Load:
    """What should run.

    Attributes:
      name: of the workload. batch: most places.
      phase: of a time, how many changes came before it. places: requests at once in a phase.
      kind: of a place in a phase.
      cuts: whether what runs is given up at a change, so that it is sharp.
    """

    name: str
    batch: int
    phase: Callable[[float], int]
    places: Callable[[int], int]
    kind: Callable[[int, int], str]
    cuts: bool = False

    def key(self, phase: int) -> str:
        """Phases of equal keys are alike."""
        return f"{self.places(phase)} {self.kind(phase, 0)} {self.kind(phase, 1)}"


def load(name: str, batch: int, every: float) -> Load:
    """A workload.

    Args:
      batch: most requests at once. every: seconds between changes, of those that change.
    """
    always: Callable[[float], int] = lambda at: 0
    full: Callable[[int], int] = lambda phase: batch
    if name == "mix":
        return Load(name, batch, always, full, lambda phase, place: ("code", "prose")[place % 2])
    if name == "switch":
        turn = lambda phase, place: ("code", "prose")[phase % 2]
        return Load(name, batch, lambda at: int(at / every), full, turn, cuts=True)
    if name == "grow":
        steps = batch.bit_length() - 1
        return Load(
            name, batch, lambda at: min(steps + (batch != 1 << steps), int(at / every)),
            lambda phase: min(batch, 1 << phase), lambda phase, place: "code",
        )  # fmt: skip
    return Load(name, batch, always, full, lambda phase, place: name)
