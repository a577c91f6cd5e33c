"""What a simulated round costs: measured, published or the least that a chip's data sheet allows, labelled as such.

Owns how measured points are read between, and which costs have names. Must not know policies or requests, nor JAX.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.adaptive.linear import LinearCost
from jaxspec.bench.simulate.formulas import CATCH_UP, H200, H200_1B, Linear, Roofline
from jaxspec.tier import PLAIN, Tier, parse_tier


class Costs(Protocol):
    """Seconds of rounds and prompts on one device.

    Attributes:
      label: what it is and where it is from, in words.
      measured: whether rounds were timed; else they follow from a model.
      largest, deepest: the largest batch and depth that it can tell of; None: any.
      usual: context tokens of a row at which it knows most.
    """

    @property
    def label(self) -> str: ...
    @property
    def measured(self) -> bool: ...
    @property
    def largest(self) -> int | None: ...
    @property
    def deepest(self) -> int | None: ...
    @property
    def usual(self) -> int: ...

    def round(self, depth: int, bucket: int, tokens: int, context: float) -> float:
        """Of a round that drafts `depth` tokens a row and verifies `tokens` over the batch, roots included.

        Args:
          context: committed tokens over all rows.
        """
        ...

    def drafting(self, bucket: int, context: float) -> float:
        """Of one draft pass of a round."""
        ...

    def catching_up(self, bucket: int, context: float) -> float:
        """Of the pass in which the drafter takes in what rounds without drafts have left (`CATCH_UP` tokens a row)."""
        ...

    def prefill(self, tokens: int, context: float) -> float:
        """Of computing so many prompt tokens behind so many others."""
        ...


def table(
    costs: Costs, pairs: Iterable[tuple[Tier, int]], packed: Mapping[tuple[Tier, int], Iterable[int]],
    contexts: Sequence[int], error: float = 1.0,
) -> CostTable:  # fmt: skip
    """What a policy is told at the start.

    Args:
      pairs: tiers and buckets. packed: tokens of the packed rounds of a tier in a bucket.
      contexts: tokens of each row at which it was measured.
      error: factor by which the costs of rounds that draft are wrong.
    """
    keys: list[Any] = [*pairs, *((*pair, tokens) for pair, many in packed.items() for tokens in many)]
    samples: dict[Any, list[float]] = {}
    for tier, bucket, *tokens in keys:
        shape = tokens[0] if tokens else bucket * tier.num_nodes
        for at in contexts:
            found = costs.round(tier.depth, bucket, shape, bucket * at)
            samples[at, (tier, bucket, tokens[0] if tokens else None)] = [found * (error if tier.depth else 1.0)]
    return CostTable.from_samples(samples)


class Measured:
    """Timed rounds, read between by straight lines over context, batch, depth and tokens.

    A packed round whose shape was not timed takes what the whole tier takes less what the tokens that it leaves out
    are worth, by the slope between the tiers of its batch, a draft step's share taken off; never less than plain
    decoding and its draft steps.

    Args:
      label: what was measured where.
      points: seconds by (depth, bucket, tokens over the batch, context tokens of a row); for each bucket and context
        plain decoding and the deepest tier.
      prefill_rate: prompt tokens a second; None: what the slope of verified tokens says.
      catch_up_rate: tokens a second that a drafter takes in at once; None: estimated.

    Raises:
      ValueError: no plain decoding, or nothing that drafts.
    """

    measured = True

    def __init__(
        self, label: str, points: Mapping[tuple[int, int, int, int], float], prefill_rate: float | None = None,
        catch_up_rate: float | None = None,
    ) -> None:  # fmt: skip
        self.label = label
        self._contexts = sorted({c for *_, c in points})
        whole = {(d, b, c): s for (d, b, t, c), s in points.items() if t == b * (d + 1)}
        self._depths = sorted({d for d, _, _ in whole})
        if self._depths[:1] != [0] or len(self._depths) < 2:
            raise ValueError(f"{label}: needs plain decoding and a tier that drafts, got depths {self._depths}")
        buckets = sorted({b for _, b, _ in whole})
        # A bucket counts where every depth was timed at every context.
        self._buckets = [b for b in buckets if all((d, b, c) in whole for d in self._depths for c in self._contexts)]
        if not self._buckets:
            raise ValueError(f"{label}: no batch has all of depths {self._depths} at all of contexts {self._contexts}")
        self._whole = whole
        self._packed: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
        for (d, b, t, c), s in sorted(points.items()):
            self._packed.setdefault((d, b, c), []).append((t, s))
        self._steps = self._draft_steps()
        self._rate, self._catch_up_rate = prefill_rate, catch_up_rate
        self._kept: dict[tuple[int, int, int, int], float] = {}

    @property
    def largest(self) -> int | None:
        """The largest batch that was timed."""
        return self._buckets[-1]

    @property
    def deepest(self) -> int | None:
        """The deepest tier that was timed."""
        return self._depths[-1]

    @property
    def usual(self) -> int:
        """The shortest context at which rounds were timed."""
        return self._contexts[0]

    def _draft_steps(self) -> dict[int, float]:
        """Seconds of a draft pass by batch.

        At the smallest batch, where verifying costs least: what a round takes beyond plain decoding of as many requests
        as it verifies tokens. At others as much of a plain step.
        """
        low, first = self._contexts[0], self._buckets[0]
        plain = [self._whole[0, b, low] for b in self._buckets]
        depth = max((d for d in self._depths[1:] if first * (d + 1) <= self._buckets[-1]), default=self._depths[1])
        verifying = plain[0]
        if len(plain) > 1:
            at = _place(self._buckets, first * (depth + 1))
            i = min(int(at), len(plain) - 2)
            verifying = plain[i] + (at - i) * (plain[i + 1] - plain[i])
        whole = self._whole[depth, first, low]
        step = max(1e-9, whole - verifying, (whole - plain[0]) / 4) / depth
        return {b: step * seconds / plain[0] for b, seconds in zip(self._buckets, plain, strict=True)}

    def drafting(self, bucket: int, context: float) -> float:
        """See Costs; estimated."""
        low, high, share = _between(self._buckets, bucket)
        return self._steps[low] + share * (self._steps[high] - self._steps[low])

    def round(self, depth: int, bucket: int, tokens: int, context: float) -> float:
        """See Costs."""
        row = context / bucket
        low, high, share = _between(self._contexts, row)
        found = self._at(depth, bucket, tokens, low)
        if high == low:
            return found
        return max(1e-9, found + share * (self._at(depth, bucket, tokens, high) - found))

    def _at(self, depth: int, bucket: int, tokens: int, context: int) -> float:
        key = depth, bucket, tokens, context
        if key not in self._kept:
            low, high, share = _between(self._buckets, bucket)
            # Tokens a row stay what they are.
            first = self._deep(depth, low, tokens * low / bucket, context)
            last = first if high == low else self._deep(depth, high, tokens * high / bucket, context)
            self._kept[key] = max(1e-9, first + share * (last - first))
        return self._kept[key]

    def _deep(self, depth: int, bucket: int, tokens: float, context: int) -> float:
        low, high, share = _between(self._depths, depth)
        if low == high:
            return self._packed_at(low, bucket, tokens, context)
        first, last = (self._packed_at(d, bucket, tokens * (d + 1) / (depth + 1), context) for d in (low, high))
        return first + share * (last - first)

    def _packed_at(self, depth: int, bucket: int, tokens: float, context: int) -> float:
        known = self._packed[depth, bucket, context]
        whole = known[-1][1]
        left_out = known[-1][0] - tokens
        if left_out <= 0 or not depth:
            return whole
        if len(known) > 1:
            low, high, share = _between(range(len(known)), _place([t for t, _ in known], tokens))
            if tokens >= known[0][0]:
                return known[low][1] + share * (known[high][1] - known[low][1])
            whole, left_out = known[0][1], known[0][0] - tokens
        plain = self._whole[0, bucket, context]
        shallow = next((d for d in self._depths if 0 < d < depth), 0)
        between = self._whole[depth, bucket, context] - self._whole[shallow, bucket, context]
        step = self._steps[bucket]
        slope = max(0.0, between - (depth - shallow) * step) / (bucket * (depth - shallow))
        return min(whole, max(plain + depth * step, whole - left_out * slope))

    def catching_up(self, bucket: int, context: float) -> float:
        """See Costs. Without a rate an estimate: the share of a prompt's pass that a draft pass has of a plain step."""
        if self._catch_up_rate:
            return bucket * CATCH_UP / self._catch_up_rate
        low = self._contexts[0]
        share = self._steps[self._buckets[0]] / self._whole[0, self._buckets[0], low]
        return share * self.prefill(bucket * CATCH_UP, context)

    def prefill(self, tokens: int, context: float) -> float:
        """See Costs. From the slope of verified tokens, unless a rate was given."""
        last, depth, at = self._buckets[-1], self._depths[-1], self._contexts[0]
        plain = self._whole[0, self._buckets[0], at]
        if self._rate:
            return max(plain, tokens / self._rate)
        # The slope where arithmetic weighs most.
        rise = self._whole[depth, last, at] - self._whole[0, last, at] - depth * self._steps[last]
        return plain + tokens * max(0.0, rise) / (last * depth)


def _place(values: Sequence[float], x: float) -> float:
    """Where x lies among ascending values: 1.5 is half way between the second and the third."""
    at = min(max(1, bisect.bisect_left(values, x)), len(values) - 1)
    return at - 1 + (x - values[at - 1]) / (values[at] - values[at - 1])


def _between(values: Sequence[int] | range, x: float) -> tuple[int, int, float]:
    """The neighbours of x and how far it lies between them; beyond the ends the line goes on upward only."""
    if len(values) == 1 or x <= values[0]:
        return values[0], values[0], 0.0
    at = min(bisect.bisect_left(values, x), len(values) - 1)
    low, high = values[at - 1], values[at]
    return (high, high, 0.0) if x == high else (low, high, (x - low) / (high - low))


_LLAMA = "Llama-3.1-8B, bf16, EAGLE-3 head"
#: H100, published by AdaSpec's authors for Llama-3.1-8B (SoCC '25; constants of their released code).
_H100 = (
    LinearCost(3.926e-8, 2.101e-5, 5.886e-3, math.nan, math.nan),
    LinearCost(2.378e-9, 8.41e-7, 2.135e-3, math.nan, math.nan),
)
#: An A100 (40 GB) with Vicuna-7B and a draft model of 68M, by the data sheet: 13.5 GB of weights at 1.555 TB/s, 0.52 MB
#: of keys and values and 13.4 GFLOP a token at 312 TFLOP/s. That a draft pass takes 0.6 ms is a guess.
_A100 = (
    LinearCost(3.4e-7, 4.3e-5, 8.7e-3, math.nan, math.nan),
    LinearCost(4e-9, 1e-6, 6e-4, math.nan, math.nan),
)
_SHEETS = {  # chips: name, bytes and bf16 operations a second of one, how many hold the model
    "h200": ("NVIDIA H200", 4.8e12, 989e12, 1),
    "v5e": ("TPU v5e", 0.81e12, 197e12, 2),
    "v5p": ("TPU v5p", 2.8e12, 459e12, 1),
    "v6e": ("TPU v6e", 1.6e12, 920e12, 1),
    "v7x": ("TPU v7x", 7.38e12, 2307e12, 1),
}
#: Of `load`.
NAMES = (
    "h100-adaspec", "h100-adaspec-expanded", "a100-vicuna-expanded", "h200-formula", "h200-1b",
    *(f"{chip}-roofline" for chip in _SHEETS), *(f"{chip}-roofline-30b-a3b" for chip in _SHEETS),
)  # fmt: skip
#: Qwen3-30B-A3B and an EAGLE-3 head as wide, in bfloat16, counted from their shapes.
_QWEN_MOE: dict[str, Any] = dict(
    weights=2.46e9,
    parameters=3.04e9,
    kv=98304.0,
    draft_weights=0.29e9,
    draft_parameters=0.145e9,
    experts=57.98e9,
    idle=1 - 8 / 128,
)


def load(name: str | os.PathLike, catch_up_rate: float | None = None) -> Costs:
    """A shipped model by its name, or measurements from a file.

    Args:
      catch_up_rate: of queues that were measured whole, as in Measured.

    Files are those of `python -m jaxspec.bench profile`, of `python -m jaxspec.bench --json` and of `python -m
    jaxspec.bench.studies.rounds --json`.

    Raises:
      ValueError: neither a name nor a file of these; names what it is.
    """
    name = os.fspath(name)
    if name.startswith("h100-adaspec") and name in NAMES:
        expanded = name.endswith("expanded")
        how = "each token reads its context, as in the paper" if expanded else "context read once"
        label = f"published: AdaSpec's constants of an H100, Llama-3.1-8B, EAGLE head; {how}"
        return Linear(label, *_H100, overhead=1.207e-3, expanded=expanded)
    if name == "a100-vicuna-expanded":
        label = "estimate by the data sheet, not measured: A100, Vicuna-7B and 68M; each token reads its context"
        return Linear(label, *_A100, overhead=1.2e-3, expanded=True)
    if name in ("h200-formula", "h200-1b"):
        return H200 if name == "h200-formula" else H200_1B
    if name in NAMES:
        sheet, moe = name.split("-roofline")
        chip, bandwidth, flops, count = _SHEETS[sheet]
        chips = chip if count == 1 else f"{count} x {chip}"
        model = "Qwen3-30B-A3B in bfloat16, experts chosen evenly" if moe else _LLAMA
        label = f"roofline by the data sheet, not measured: {chips}, {model}"
        return Roofline(label, count * bandwidth, count * flops, **(_QWEN_MOE if moe else {}))
    if not os.path.exists(name):
        raise ValueError(f"profile must be one of {list(NAMES)} or a file, got {name!r}")
    try:
        data: Any = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"profile {name!r} cannot be read: {error}") from error
    if isinstance(data, dict) and "conditions" in data and "rounds" in data:
        return _study(name, data)
    if isinstance(data, dict) and "conditions" in data and "summaries" in data:
        return _queues(name, data, catch_up_rate)
    return _profile(CostProfile.load(name))


def _profile(profile: CostProfile) -> Measured:
    points, trees = {}, set()
    for row in json.loads(profile.to_json())["rounds"]:
        tier, bucket = Tier(*row["tier"]), row["bucket"]
        if tier.is_chain:
            points[tier.depth, bucket, row.get("tokens", bucket * tier.num_nodes), row["context"]] = row["seconds"]
        else:
            trees.add(tier.name)
    said = ", ".join(profile.identity.values())
    return Measured(f"measured: {said}" + (f" (without {', '.join(sorted(trees))})" if trees else ""), points)


def _study(name: str, data: Mapping[str, Any]) -> Measured:
    try:
        c, points = data["conditions"], {}
        # Of several drafters the first one's; plain decoding is nobody's.
        kind = next((row["drafter"] for row in data["rounds"] if row.get("drafter")), None)
        mine = lambda row: row.get("devices", 1) == 1 and row.get("drafter") in (None, kind)
        for row in filter(mine, data["rounds"]):
            tier, batch = parse_tier(row["tier"]), int(row["batch"])
            tokens = row.get("tokens") or batch * tier.num_nodes
            points[tier.depth, batch, int(tokens), int(c["context"])] = float(row["ms"]) / 1e3
        what = f"{c['shape']} shapes, {c['dtype']}, {kind or 'EAGLE-3 head'}, context {c['context']}"
        label = f"measured: {c['device']}, {what}"
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"profile {name!r} is no output of jaxspec.bench.studies.rounds: {error!r}") from error
    return Measured(label, points)


def _queues(name: str, data: Mapping[str, Any], catch_up_rate: float | None) -> Measured:
    """Mean rounds of queues at a steady state, over all their texts."""
    try:
        c, found = data["conditions"], dict[tuple[int, int, int, int], list[float]]()
        for row in data["summaries"]:
            mode, speed = row["mode"].replace("plain", PLAIN.name), row["steady_state"]["tokens_per_second"]
            if not speed or not mode.startswith((PLAIN.name, "chain-")):
                continue  # too few steady rounds, or a policy's
            tier, batch = parse_tier(mode), int(row["batch_size"])
            seconds = batch * row["mean_accepted_length"] / speed
            found.setdefault((tier.depth, batch, batch * tier.num_nodes, c["max_tokens"]), []).append(seconds)
        label = f"measured: {c['device']}, {c['cpu_cores']} cores, {c['model']}, {c['dtype']}, {c['drafter']}"
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"profile {name!r} is no output of jaxspec.bench: {error!r}") from error
    points = {key: sum(many) / len(many) for key, many in found.items()}
    return Measured(f"{label}, whole queues", points, catch_up_rate=catch_up_rate)
