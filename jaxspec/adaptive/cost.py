"""What a round of each tier was measured to cost on this device, and which tiers can pay at all.

Owns measured seconds per (tier, bucket), of packed rounds also per tokens. Costs of compiled shapes are a
staircase over all of these, so the table is looked up for the padded shape that runs and never interpolated. Over
context they are a line, the same for all rounds: every pass reads each row's keys and values once. Must not know how
the seconds were measured, nor JAX.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.adaptive.ema import is_int, load_config, slot_key
from jaxspec.tier import PLAIN, Tier

#: What a cost is of: tier, bucket, and of a packed round its tokens.
Costed = tuple[Tier, int, int | None]
_Pair = tuple[Tier, int]
#: Of the longest measured, what a round takes at least in the middle of a line over context.
_LEAST = 0.1


class CostTable:
    """Median seconds of one round for each (tier, bucket), and for packed rounds.

    Args:
      seconds: positive and finite, keyed by (tier, bucket), or as `Costed`. Not every key need be there.
      context: committed tokens of each row, of full buckets, at which they were measured.
      growth: by how much a context token of a batch makes its rounds longer, as a share of plain decoding's seconds in
        the smallest bucket.

    Attributes:
      packed: seconds of packed rounds by (tier, bucket, tokens), ascending.

    Raises:
      ValueError: a malformed key, a time that is not a positive finite number, a context or growth below 0.
    """

    def __init__(
        self, seconds: Mapping[Costed, float] | Mapping[_Pair, float] | Mapping[Costed | _Pair, float], *,
        context: float = 0.0, growth: float = 0.0,
    ) -> None:  # fmt: skip
        for name, number in (("context", context), ("growth", growth)):
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
                raise ValueError(f"a cost table's {name} must be a finite number of at least 0, got {number!r}")
        self.context, self.growth = float(context), float(growth)
        self._seconds: dict[tuple[Tier, int], float] = {}
        self.packed: dict[tuple[Tier, int, int], float] = {}
        for key, value in seconds.items():
            tier, bucket, tokens = key if len(key) == 3 else (*key, None)
            if not isinstance(tier, Tier) or not is_int(bucket) or bucket < 1:
                raise ValueError(f"a cost is keyed by (Tier, bucket of at least 1), got ({tier!r}, {bucket!r})")
            if tokens is not None and (not is_int(tokens) or tokens < bucket):
                raise ValueError(f"a packed round has at least {bucket} tokens in bucket {bucket}, got {tokens!r}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                what = f"{tier} in bucket {bucket}" + (f" with {tokens} tokens" if tokens else "")
                raise ValueError(f"the cost of {what} must be a positive finite number of seconds, got {value!r}")
            if tokens is None:
                self._seconds[tier, bucket] = float(value)
            else:
                self.packed[tier, bucket, tokens] = float(value)
        self._seconds, self.packed = dict(sorted(self._seconds.items())), dict(sorted(self.packed.items()))

    @classmethod
    def from_samples(cls, samples: Mapping[tuple[int, Costed], Sequence[float]]) -> CostTable:
        """From repeated measurements by context tokens of each row: a line over context, in its middle.

        Raises:
          ValueError: a round was measured at no context, or has no sample.
        """
        for (context, (tier, bucket, _)), values in samples.items():
            if not values:
                raise ValueError(
                    f"the cost of {tier} in bucket {bucket}, context {context}, needs at least 1 sample, got 0"
                )
        contexts = [context for context, _ in samples]
        slope = slope_of({key: statistics.median(values) for key, values in samples.items()})
        middle = (min(contexts) + max(contexts)) / 2 if contexts else 0.0
        level: dict[Costed, list[float]] = {}
        for (context, key), values in samples.items():
            level.setdefault(key, []).extend(x - slope * key[1] * (context - middle) for x in values)
        # A line that noise has made too steep may pass below nothing.
        seconds = {key: max(statistics.median(values), _LEAST * max(values)) for key, values in level.items()}
        return cls(seconds, context=middle, growth=growth_of(slope, seconds))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers with a cost in some bucket, ascending."""
        return tuple(sorted({tier for tier, _ in self._seconds}))

    @property
    def buckets(self) -> tuple[int, ...]:
        """Buckets with a cost for some tier, ascending."""
        return tuple(sorted({bucket for _, bucket in self._seconds}))

    @property
    def rounds(self) -> dict[Costed, float]:
        """Seconds of all rounds, packed ones last."""
        return {**{(tier, bucket, None): s for (tier, bucket), s in self._seconds.items()}, **self.packed}

    def seconds(self, tier: Tier, bucket: int, tokens: int | None = None) -> float:
        """Seconds of one round, packed where `tokens` are given; ValueError names what is missing and what there is."""
        if tokens is not None:
            if (tier, bucket, tokens) not in self.packed:
                known = [n for t, b, n in self.packed if (t, b) == (tier, bucket)]
                raise ValueError(f"the cost table has no cost of {tokens} tokens of {tier} in bucket {bucket}: {known}")
            return self.packed[tier, bucket, tokens]
        try:
            return self._seconds[tier, bucket]
        except KeyError:
            known = [b for t, b in self._seconds if t == tier]
            what = f"only in buckets {known}" if known else f"only for {[t.name for t in self.tiers]}"
            raise ValueError(f"the cost table has no cost of {tier} in bucket {bucket}, {what}") from None

    def best_speedup(self, tier: Tier, bucket: int) -> float:
        """Speed-up over plain decoding in that bucket if every draft were accepted (depth + 1 tokens a round)."""
        return (tier.depth + 1) * self.seconds(PLAIN, bucket) / self.seconds(tier, bucket)

    def pays(self, tier: Tier, bucket: int) -> bool:
        """Whether full acceptance would beat plain decoding in that bucket. Plain decoding does not beat itself."""
        return tier.depth > 0 and self.best_speedup(tier, bucket) > 1

    def __contains__(self, pair: object) -> bool:
        return pair in self._seconds

    def __iter__(self) -> Iterator[tuple[Tier, int]]:
        return iter(self._seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def __eq__(self, other: object) -> bool:
        same = lambda table: (table._seconds, table.packed, table.context, table.growth)
        return isinstance(other, CostTable) and same(self) == same(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        packed = f" and {len(self.packed)} packed rounds" if self.packed else ""
        pairs = f"{len(self)} pairs{packed}"
        return f"CostTable({pairs}: tiers {[t.name for t in self.tiers]}, buckets {list(self.buckets)})"

    def to_json(self) -> str:
        """JSON with one object a round: `{"tier": [depth, topk, num_nodes], "bucket": ..., "seconds": ...}`.

        Packed ones have "tokens" besides.
        """
        rows = [
            {"tier": t.row, "bucket": bucket, "seconds": value} | ({} if tokens is None else {"tokens": tokens})
            for (t, bucket, tokens), value in self.rounds.items()
        ]
        return json.dumps({"context": self.context, "growth": self.growth, "rounds": rows})

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """The inverse of `to_json`; ValueError for anything else."""
        try:
            data = json.loads(text)
            seconds = {(Tier(*row["tier"]), row["bucket"], row.get("tokens")): row["seconds"] for row in data["rounds"]}
            return cls(seconds, context=data["context"], growth=data["growth"])
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a cost table has context, growth and rounds, got {text[:80]!r}") from error


def slope_of(seconds: Mapping[tuple[int, Costed], float]) -> float:
    """Seconds that a context token of the batch adds to a round: the weighted median over rounds, at least 0.

    Args:
      seconds: of rounds by context tokens of each row. Those measured at one context only tell nothing.
    """
    ends: dict[Costed, list[tuple[int, float]]] = {}
    for (context, key), value in sorted(seconds.items(), key=lambda item: item[0][0]):
        ends.setdefault(key, []).append((context, value))
    slopes = []
    for (_, bucket, _), known in ends.items():
        (low, first), (high, last) = known[0], known[-1]
        if high > low:
            more = bucket * (high - low)
            slopes.append(((last - first) / more, more / (first + last)))  # errors are shares of the seconds
    half, sure = sum(weight for _, weight in slopes) / 2, 0.0
    for slope, weight in sorted(slopes):
        sure += weight
        if sure >= half:
            return max(0.0, slope)
    return 0.0


def growth_of(slope: float, seconds: Mapping[Costed, float]) -> float:
    """`CostTable`'s growth; 0 without a plain round."""
    plain = {bucket: value for (tier, bucket, _), value in seconds.items() if tier == PLAIN}
    return slope / plain[min(plain)] if plain else 0.0


def payable(
    config: dict | str | os.PathLike | None,
    cost: CostTable,
    buckets: Sequence[int],
    tiers: Mapping[int, Tier] | None = None,
) -> dict[str, Any]:
    """The EMA configuration without the candidates that cannot pay on this device.

    A candidate stays in a slot if it pays (see `CostTable.pays`) in at least one of the buckets that are routed to
    the slot; step 0 is always added. A slot that no bucket reaches keeps step 0 alone.

    Args:
      config: as for `AdaptiveSpeculativeParams`; None for SGLang's default.
      cost: seconds of plain decoding and of every candidate in every bucket routed to its slot.
      buckets: the compiled batch sizes.
      tiers: the tier that each step runs; None for chains.

    Raises:
      ValueError: a malformed configuration, or a cost or tier that is missing (named).
    """
    values = load_config(config)
    slots = {int(key): key for key in values if key.isdigit()}
    keys = sorted(slots)
    for size, key in slots.items():
        routed = [b for b in buckets if slot_key(keys, b) == size]
        kept = [0]
        for step in sorted(set(values[key]["candidate_steps"]) - {0}):
            if tiers is not None and step not in tiers:
                raise ValueError(f"tiers has no tier for the candidate step {step}, only for {sorted(tiers)}")
            tier = Tier(step) if tiers is None else tiers[step]
            # Every pair is looked up, so that a gap in the table is an error wherever the others pay.
            pays = [cost.pays(tier, bucket) for bucket in routed]
            if any(pays):
                kept.append(step)
        values[key]["candidate_steps"] = kept
    return values
