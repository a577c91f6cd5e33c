"""The interface between rounds and policies: what a policy sees, and what it returns.

Must not know JAX, executables or requests. Every policy lives in a file of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Protocol

from jaxspec.tier import PLAIN, Choice, Tier, as_choice

#: Bits of a request's number that are its place; see `RoundStats.rows`.
PLACE = 16


@dataclasses.dataclass(frozen=True)
class BatchView:
    """The batch that is about to run.

    Attributes:
      batch_size: requests in the round (before padding).
      bucket: the padded batch size whose executable will run.
      context_tokens: committed tokens over all rows.
      now: seconds on the engine's clock.
      max_depth: most drafts that any of its requests may accept; None: no limit.
      tpot: seconds a token that the most urgent of its requests asks for; None: none asks.
      timed: whether its seconds will be told: nothing but rounds ran on the device since the round before.
      rounds: that run of what is chosen, where every draft is verified; of a packed round one.
    """

    batch_size: int
    bucket: int
    context_tokens: int = 0
    now: float = 0.0
    max_depth: int | None = None
    tpot: float | None = None
    timed: bool = True
    rounds: int = 1


@dataclasses.dataclass(frozen=True)
class DraftLabels:
    """The drafted nodes of a packed round, request after request: what was said of them and what became of them.

    All sequences have a value for each node; those of bytes hold 0 or 1 but for the depths.

    Attributes:
      nodes: drafted nodes of each request.
      confidence: the drafter's own, as 4-byte floats ("f"); 0 where it is not a number.
      depth: of the node, from 1.
      verified: whether the budget took it.
      known: whether its parent was reached, so that the target's token in its place is known, verified or not: a
        label that no budget censors.
      right: whether that is its token.
      parent: of trees, which of its request's drafted nodes each one continues, from 1; 0: the root. None: chains.
    """

    nodes: int
    confidence: array[float]
    depth: bytes
    verified: bytes
    known: bytes
    right: bytes
    parent: array[int] | None = None

    def num_verified(self, row: int) -> int:
        """Drafted nodes of a request that the target looked at."""
        return sum(self.verified[row * self.nodes : (row + 1) * self.nodes])

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        return {name: value if isinstance(value, int) else list(value) for name, value in given.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DraftLabels:
        """The inverse of `to_dict`."""
        parent = values.get("parent")
        values = {**values, "parent": None if parent is None else array("H", parent)}
        nodes, confidence, *flags, parent = (values[field.name] for field in dataclasses.fields(cls))
        depth, verified, known, right = map(bytes, flags)
        return cls(nodes, array("f", confidence), depth, verified, known, right, parent)


@dataclasses.dataclass(frozen=True)
class RoundStats:
    """What one finished round did. Arrives a round late, so it names the tier that ran.

    Attributes:
      tier: the tier of the round's executable.
      batch_size, bucket: requests in it, and the padded size.
      num_accepted: accepted draft tokens, the bonus token excluded, of each request that could accept the whole tier,
        or in a packed round as much of it as the budget left, unless its text was over before the round.
      seconds: wall time of the round, dispatch to result; 0 where it was not measured.
      context_tokens: committed tokens over all rows when the round was dispatched.
      tokens, drafts: of a packed round: the nodes that it verified over the whole batch, and what became of each.
      dispatched: rounds of its dispatch; their seconds are an equal share of that one's.
      rows: of each request in num_accepted a number that stays its own: its place, and above its PLACE bits how often
        that changed hands. Empty: not told.
      experts: distinct experts that the target read, over all layers; 0 of models without.
      entered: seconds of the round and of the pass before it in which the drafter took in what rounds without drafts
        had left, where nothing else ran; then `seconds` are 0. Else 0.
    """

    tier: Tier
    batch_size: int
    bucket: int
    num_accepted: tuple[int, ...]
    seconds: float = 0.0
    context_tokens: int = 0
    tokens: int | None = None
    drafts: DraftLabels | None = None
    dispatched: int = 1
    rows: tuple[int, ...] = ()
    experts: int = 0
    entered: float = 0.0

    def to_json(self) -> str:
        """One JSONL line."""
        d = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        d["tier"] = self.tier.row
        if self.tokens is None:
            del d["tokens"]
        if self.dispatched == 1:
            del d["dispatched"]
        for name in ("rows", "experts", "entered"):
            if not d[name]:
                del d[name]
        if d.pop("drafts") is not None:
            assert self.drafts is not None
            d["drafts"] = self.drafts.to_dict()
        return json.dumps(d)

    @classmethod
    def from_json(cls, line: str) -> RoundStats:
        d = json.loads(line)
        tier = PLAIN if d["tier"][0] == 0 else Tier(*d["tier"])
        if "drafts" in d:
            d["drafts"] = DraftLabels.from_dict(d["drafts"])
        return cls(**{**d, "tier": tier, "num_accepted": tuple(d["num_accepted"]), "rows": tuple(d.get("rows", ()))})


def together(rounds: Sequence[RoundStats]) -> RoundStats:
    """The rounds of one dispatch as if they were one, with a row for each request in each round.

    Its seconds are still those of a round; the context is the first one's.
    """
    first = rounds[0]
    if len(rounds) == 1:
        return first
    return dataclasses.replace(
        first,
        num_accepted=tuple(itertools.chain.from_iterable(one.num_accepted for one in rounds)),
        rows=tuple(itertools.chain.from_iterable(one.rows for one in rounds)),
        experts=sum(one.experts for one in rounds),
    )


class TierPolicy(Protocol):
    """Chooses a tier before each dispatch and hears afterwards what its rounds did, one after the other."""

    #: Every tier that `select` can return for any batch, plain decoding included where it can.
    tiers: tuple[Tier, ...]

    def select(self, view: BatchView) -> Tier | Choice:
        """The tier of the next round, or of all rounds of a dispatch, and in a Choice how much of it is verified."""
        ...

    def observe(self, stats: RoundStats) -> None:
        """Feedback of a finished round; may belong to a tier that is no longer selected."""
        ...

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Takes what a round of no requests was measured to cost; its executable has come or was timed anew.

        Args:
          tokens: of a packed round.
        """
        ...

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `buckets` in which `select` can return `tier`: only these pairs are compiled."""
        ...


def replay(policy: TierPolicy, lines: Iterable[str] | IO[str]) -> Iterator[Tier]:
    """Feeds recorded rounds to a policy and yields the tier that it would have chosen for each."""
    tier, left = PLAIN, 0
    for line in lines:
        if line.strip():
            stats = RoundStats.from_json(line)
            if left <= 0:
                view = BatchView(
                    stats.batch_size, stats.bucket, stats.context_tokens, timed=stats.seconds > 0,
                    rounds=stats.dispatched,
                )  # fmt: skip
                tier, left = as_choice(policy.select(view)).tier, stats.dispatched
            left -= 1
            yield tier
            policy.observe(stats)
