"""Whether a trained head is written at all: it has to draft better than the served one, on texts that neither learned.

Owns the comparison. Must not know how a head was trained, nor what becomes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.drafters.directories import read_kind
from jaxspec.models.base import TargetModel
from jaxspec.tier import Tier
from jaxspec.train.data.dataset import Example
from jaxspec.train.drafters import starts
from jaxspec.train.run.simulation import Group, States, simulate

#: File of a run's directory.
VERDICT = "gate.json"
#: Fewer rounds than this decide nothing.
LEAST_ROUNDS = 200
#: Texts of a data set and temperature that are compared.
_LIMIT = 1024


def check(served: Path, held: Sequence[Example]) -> None:
    """Refuses, before training, what could not be compared: no held-out texts (ValueError), or no head."""
    if not held:
        raise ValueError(f"--gate {served} needs held-out texts: give --eval-data or a larger --eval-share")
    read_kind(served)


def compare(
    trainee: Any, served: Path, target: TargetModel, held: Sequence[Example], states: States | None, *, depth: int,
    length: int, rows: int, margin: float,
) -> dict[str, Any]:  # fmt: skip
    """Simulates the rounds of both heads on the same held-out texts, chains of `depth` drafts.

    Args:
      served: the other head's directory. states: see `simulate`.
      margin: the share by which the trainee has to bring more tokens a round.

    Returns:
      "served" and "trained": tokens a round over all texts; "rounds" of the served one; "margin"; "passed".

    Raises:
      ValueError: a directory that holds no head for this target.
    """
    other = starts.load_initial(read_kind(served), served, target)
    run = lambda module: simulate(module, target, held, depth, length=length, rows=rows, limit=_LIMIT, states=states)
    before, after = run(other), run(trainee)
    lengths, rounds = [_length(groups, depth) for groups in (before, after)], sum(group.rounds for group in before)
    enough = rounds >= LEAST_ROUNDS
    passed = enough and lengths[1] >= (1 + margin) * lengths[0]
    print(
        f"gate: {lengths[1]:.3f} tokens a round against {lengths[0]:.3f} of {served} in {rounds} held-out rounds; "
        + ("written" if passed else f"not written: {margin:.0%} more are wanted" if enough else
           f"not written: {LEAST_ROUNDS} rounds are wanted"),
        flush=True,
    )  # fmt: skip
    verdict = {"served": round(lengths[0], 4), "trained": round(lengths[1], 4), "rounds": rounds}
    return {**verdict, "margin": margin, "passed": bool(passed)}


def _length(groups: Sequence[Group], depth: int) -> float:
    """Tokens a round over all groups."""
    return sum(group.rounds * group.length(Tier(depth)) for group in groups) / sum(group.rounds for group in groups)
