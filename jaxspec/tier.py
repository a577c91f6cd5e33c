"""Tiers: how much a round drafts. The only static that differs between a round's executables.

Standard library only; every other part of jaxspec may import this.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple


def max_nodes(depth: int, topk: int) -> int:
    """Root, k first candidates, and k*k candidates a further level (EAGLE-2's candidate set)."""
    return 1 + (topk + (depth - 1) * topk**2 if depth else 0)


@dataclasses.dataclass(frozen=True, order=True)
class Tier:
    """A shape of the draft tree.

    Attributes:
      depth: longest draft in tokens; 0 means no drafting (plain decoding).
      topk: children that each expanded node proposes; 1 makes a chain.
      num_nodes: nodes the target verifies, the root (the last committed token) included.
        0 stands for the default: depth + 1 for a chain; a tree must name it.
      lookup: whether a hybrid drafter leaves its model out and drafts a chain by suffix matches alone.

    Raises:
      ValueError: a shape that no draft can fill; the message names both values.
    """

    depth: int = 0
    topk: int = 1
    num_nodes: int = 0
    lookup: bool = False

    def __post_init__(self) -> None:
        for name in ("depth", "topk", "num_nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"Tier.{name} must be an int, got {value!r}")
        if self.depth < 0:
            raise ValueError(f"Tier.depth must be at least 0, got {self.depth}")
        if self.topk < 1:
            raise ValueError(f"Tier.topk must be at least 1, got {self.topk}")
        if self.depth == 0 and (self.topk != 1 or self.num_nodes not in (0, 1)):
            raise ValueError(
                f"a tier of depth 0 has topk 1 and num_nodes 1, got topk {self.topk}, num_nodes {self.num_nodes}"
            )
        if self.lookup and (self.depth == 0 or self.topk > 1):
            raise ValueError(f"a lookup tier is a chain, got depth {self.depth} and topk {self.topk}")
        most = max_nodes(self.depth, self.topk)
        if self.num_nodes == 0:
            if self.topk > 1:
                raise ValueError(f"a tree (topk {self.topk}) needs num_nodes, at most {most}")
            object.__setattr__(self, "num_nodes", self.depth + 1)
        if not self.depth + 1 <= self.num_nodes <= most:
            raise ValueError(
                f"Tier.num_nodes must lie between depth + 1 = {self.depth + 1} and {most} "
                f"for topk {self.topk}, got {self.num_nodes}"
            )

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def name(self) -> str:
        """Short and stable, for tables and metrics: "off", "chain-3", "tree-5x4/16", "suffix-8"."""
        if self.depth == 0:
            return "off"
        if self.lookup:
            return f"suffix-{self.depth}"
        return f"chain-{self.depth}" if self.is_chain else f"tree-{self.depth}x{self.topk}/{self.num_nodes}"

    @property
    def row(self) -> list[Any]:
        """What JSON can hold; `Tier(*row)` is the tier."""
        row = [self.depth, self.topk, self.num_nodes]
        return [*row, True] if self.lookup else row

    def __str__(self) -> str:
        return self.name


def parse_tier(text: str) -> Tier:
    """A tier by its name ("off", "chain-3", "tree-4x3/16", "suffix-8"), or a chain by its depth ("3").

    Raises:
      ValueError: another text, or a shape that no draft can fill.
    """
    if text == "off":
        return Tier(0)
    match = re.fullmatch(r"(?:chain-|(suffix-))?(\d{1,2})|tree-(\d{1,2})x(\d{1,2})/(\d{1,4})", text)
    if match is None:
        raise ValueError(f"a tier must be a depth, or a name such as 'chain-3' or 'tree-4x3/16', got {text!r}")
    lookup, depth, *tree = match.groups()
    if depth:
        return Tier(int(depth), lookup=lookup is not None)
    levels, topk, nodes = map(int, tree)
    return Tier(levels, topk, nodes)


#: Plain decoding.
PLAIN = Tier(0)


class Choice(NamedTuple):
    """How a round runs: what it drafts, and how much of that is verified.

    Attributes:
      tokens: nodes that the target verifies over the whole batch, roots included: the likeliest ones of all rows (a
        packed round). None: every node.
      calibration: of a packed round: slope and intercept of the logit of the drafter's confidences at each depth from
        1, as far as they differ from (1, 0).
    """

    tier: Tier
    tokens: int | None = None
    calibration: tuple[tuple[float, float], ...] = ()


def as_choice(chosen: Tier | Choice) -> Choice:
    """A policy's choice; a tier alone verifies every node."""
    return chosen if isinstance(chosen, Choice) else Choice(chosen)
