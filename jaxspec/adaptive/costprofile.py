"""Measured costs in a file: seconds of rounds, and the device and the model that they are those of.

Owns the format and what is refused. `python -m jaxspec.bench profile` writes it, an engine reads it instead of timing
its rounds at the start. Must not know how rounds are timed, nor JAX.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxspec.adaptive.cost import Costed, CostTable, growth_of, slope_of
from jaxspec.adaptive.linear import LinearCost, fit
from jaxspec.tier import Tier

FORMAT = "jaxspec-profile-1"
_FIELDS = ("tier", "bucket", "context", "seconds")
#: Of a packed round besides.
_PACKED = "tokens"


@dataclasses.dataclass(frozen=True)
class CostProfile:
    """Seconds of rounds by tier, bucket and context.

    Attributes:
      identity: what they are the costs of, such as device, model, drafter and dtype; an engine's must be the same.
      versions: of the libraries that ran; for readers.
      seconds: of one round, by context tokens of each row and what it is the cost of.
    """

    identity: Mapping[str, str]
    versions: Mapping[str, str]
    seconds: Mapping[tuple[int, Costed], float]

    @property
    def contexts(self) -> tuple[int, ...]:
        """Context lengths that were measured, ascending."""
        return tuple(sorted({context for context, _ in self.seconds}))

    def table(self, context: int) -> CostTable:
        """The costs at the measured context nearest to one (by ratio), and how they grow over all contexts."""
        near = min(self.contexts, key=lambda c: abs(math.log((c + 1) / (context + 1))))
        seconds = {key: s for (c, key), s in self.seconds.items() if c == near}
        return CostTable(seconds, context=near, growth=growth_of(slope_of(self.seconds), seconds))

    def check(
        self, identity: Mapping[str, str], reachable: Mapping[Tier, Sequence[int]], where: str,
        budgets: Mapping[tuple[Tier, int], Sequence[int]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Whether an engine may use it.

        Args:
          identity: of the engine. reachable: the buckets in which it may run each tier.
          budgets: the tokens of packed rounds that it may run, by tier and bucket.
          where: the file, for messages.

        Raises:
          ValueError: it is of something else, which is named with both values, or lacks a cost.
        """
        for name in sorted({*identity, *self.identity}):
            mine, its = identity.get(name), self.identity.get(name)
            if mine != its:
                raise ValueError(f"profile {where} was measured with {name} {its!r}, and this engine has {mine!r}")
        most = max(bucket for _, (_, bucket, _) in self.seconds)
        asked = max((bucket for buckets in reachable.values() for bucket in buckets), default=0)
        if asked > most:
            raise ValueError(
                f"profile {where} was measured for up to {most} requests at once, and this engine runs {asked}: "
                f"measure with --max-batch-size {asked}, or run at most {most}"
            )
        for context in self.contexts:
            known = {key[:2] for c, key in self.seconds if c == context and key[2] is None}
            packed = {key for c, key in self.seconds if c == context}
            for (tier, bucket), wanted in budgets.items():
                lacks = [tokens for tokens in wanted if (tier, bucket, tokens) not in packed]
                if lacks:
                    has = sorted(key[2] for key in packed if key[:2] == (tier, bucket) and key[2] is not None)
                    raise ValueError(
                        f"profile {where} lacks packed rounds of {lacks} tokens of {tier}, bucket {bucket}, context "
                        f"{context}; it has {has}"
                    )
            for tier, buckets in reachable.items():
                missing = [bucket for bucket in buckets if (tier, bucket) not in known]
                if missing:
                    raise ValueError(
                        f"profile {where} lacks {tier} in buckets {missing} at context {context}; it has buckets "
                        f"{sorted({b for _, b in known})} of {[t.name for t in sorted({t for t, _ in known})]}"
                    )

    def linear(self, tier: Tier) -> LinearCost:
        """AdaSpec's model of a tier's rounds: over context tokens of all rows, and nodes that are verified.

        Raises:
          ValueError: no round of it was measured.
        """
        rows = [(c, key, s) for (c, key), s in self.seconds.items() if key[0] == tier]
        return fit([(key[1] * context, key[2] or key[1] * tier.num_nodes, s) for context, key, s in rows])

    def to_json(self) -> str:
        """One JSON object."""
        order = lambda item: (*item[0][1][:2], item[0][1][2] or 0, item[0][0])
        rounds = [
            dict(zip(_FIELDS, (t.row, bucket, context, s), strict=True)) | ({} if tokens is None else {_PACKED: tokens})
            for (context, (t, bucket, tokens)), s in sorted(self.seconds.items(), key=order)
        ]
        head = {"format": FORMAT, "identity": dict(self.identity), "versions": dict(self.versions)}
        return json.dumps({**head, "rounds": rounds}, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike) -> CostProfile:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: a file that cannot be read or is something else; names the file and what is wrong.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"profile {os.fspath(path)!r} cannot be read: {error}") from error
        try:
            return cls._of(data)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"profile {os.fspath(path)!r} is broken: {error}") from error

    @classmethod
    def _of(cls, data: Any) -> CostProfile:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"its format must be {FORMAT!r}, got {found!r}")
        unknown = sorted({*data} - {"format", "identity", "versions", "rounds"})
        if unknown:
            raise ValueError(f"unknown keys {unknown}")
        for name in ("identity", "versions"):
            part = data[name]
            if not isinstance(part, dict) or not all(isinstance(v, str) for v in part.values()):
                raise ValueError(f"{name} must map names to texts, got {part!r}")
        seconds: dict[tuple[int, Costed], float] = {}
        for row in data["rounds"]:
            if sorted({*row} - {_PACKED}) != sorted(_FIELDS):
                raise ValueError(f"a round has {sorted(_FIELDS)} (a packed one {_PACKED!r} too), got {sorted(row)}")
            tier, bucket, context, value = Tier(*row["tier"]), row["bucket"], row["context"], row["seconds"]
            if isinstance(context, bool) or not isinstance(context, int) or context < 0:
                raise ValueError(f"a context must be an int of at least 0, got {context!r}")
            key: Costed = tier, bucket, row.get(_PACKED)
            CostTable({key: value})  # checks the rest
            if (context, key) in seconds:
                raise ValueError(f"{tier} in bucket {bucket} at context {context} stands there twice")
            seconds[context, key] = float(value)
        if not seconds:
            raise ValueError("it has no rounds")
        return cls(data["identity"], data["versions"], seconds)
