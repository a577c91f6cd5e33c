"""The interface between rounds and policies: what a policy sees, and what it returns.

Must not know JAX, executables or requests. Every policy lives in a file of its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import IO, Protocol

from jaxspec.tier import PLAIN, Tier


@dataclasses.dataclass(frozen=True)
class BatchView:
    """The batch that is about to run.

    Attributes:
      batch_size: requests in the round (before padding).
      bucket: the padded batch size whose executable will run.
      context_tokens: committed tokens over all rows.
      now: seconds on the engine's clock.
      max_depth: most drafts that any of its requests may accept; None: no limit.
    """

    batch_size: int
    bucket: int
    context_tokens: int = 0
    now: float = 0.0
    max_depth: int | None = None


@dataclasses.dataclass(frozen=True)
class RoundStats:
    """What one finished round did. Arrives a round late, so it names the tier that ran.

    Attributes:
      tier: the tier of the round's executable.
      batch_size, bucket: requests in it, and the padded size.
      num_accepted: accepted draft tokens, the bonus token excluded, of each request that could accept the whole tier.
      seconds: wall time of the round, dispatch to result; 0 where it was not measured.
      context_tokens: committed tokens over all rows when the round was dispatched.
    """

    tier: Tier
    batch_size: int
    bucket: int
    num_accepted: tuple[int, ...]
    seconds: float = 0.0
    context_tokens: int = 0

    def to_json(self) -> str:
        """One JSONL line."""
        d = dataclasses.asdict(self)
        d["tier"] = [self.tier.depth, self.tier.topk, self.tier.num_nodes]
        return json.dumps(d)

    @classmethod
    def from_json(cls, line: str) -> RoundStats:
        d = json.loads(line)
        tier = PLAIN if d["tier"][0] == 0 else Tier(*d["tier"])
        return cls(**{**d, "tier": tier, "num_accepted": tuple(d["num_accepted"])})


class TierPolicy(Protocol):
    """Chooses a tier before each round and hears afterwards what the round did."""

    #: Every tier that `select` can return for any batch, plain decoding included where it can.
    tiers: tuple[Tier, ...]

    def select(self, view: BatchView) -> Tier:
        """The next round's tier."""
        ...

    def observe(self, stats: RoundStats) -> None:
        """Feedback of a finished round; may belong to a tier that is no longer selected."""
        ...

    def learn(self, tier: Tier, bucket: int, seconds: float) -> None:
        """Takes what a round of no requests was measured to cost; its executable has come or was timed anew."""
        ...

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `buckets` in which `select` can return `tier`: only these pairs are compiled."""
        ...


def replay(policy: TierPolicy, lines: Iterable[str] | IO[str]) -> Iterator[Tier]:
    """Feeds recorded rounds to a policy and yields the tier that it would have chosen before each."""
    for line in lines:
        if line.strip():
            stats = RoundStats.from_json(line)
            yield policy.select(BatchView(stats.batch_size, stats.bucket, stats.context_tokens))
            policy.observe(stats)
