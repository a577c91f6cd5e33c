"""What an executable's text says that its devices send one another."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z\d]*)\[([\d,]*)\]")
_CALL = re.compile(
    r"= (\(.*?\)|\S+) (all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|"
    r"ragged-all-to-all|reduce-scatter)(-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction.

    Attributes:
      kind: HLO's name of it.
      shapes: of what a device holds afterwards, one for each array that it carries.
      num_bytes: of these.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int


def collectives(hlo: str) -> list[Collective]:
    """The collectives of a compiled module, in the order of its text; one in a loop's body counts once."""
    found = []
    for line in hlo.splitlines():
        if (call := _CALL.search(line)) is None:
            continue
        results, kind, started = call.groups()
        arrays = _ARRAY.findall(results)
        # A started all-reduce has its results alone, since JAX 0.12 its operands in brackets of their own before them.
        if started and (kind != "all-reduce" or results.startswith("((")):
            arrays = arrays[len(arrays) // 2 :]  # what is sent stands before what is received
        shapes = tuple(tuple(map(int, filter(None, dims.split(",")))) for _, dims in arrays)
        found.append(Collective(kind, shapes, sum(map(_bytes, arrays))))
    return found


def _bytes(array: Sequence[str]) -> int:
    dtype, dims = array
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return -(-math.prod(map(int, filter(None, dims.split(",")))) * bits // 8)
