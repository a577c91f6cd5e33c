"""When drafting pays: the report's calculator, in Python. `page/model.js` is the same arithmetic for a browser.

Costs are curves over the tokens of a pass: seconds of a target pass over so many tokens, of a draft pass over so many
requests, and what each context token adds. Owns that model. Must not know pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.bench.simulate.costs import Costs

#: Tokens of a pass at which curves have points.
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
#: Two contexts of a row that show what context costs.
_CONTEXT, _LONGER = 1024, 2048


@dataclasses.dataclass(frozen=True)
class Curves:
    """Costs of one device and model.

    Attributes:
      tokens, verify: a target pass over so many tokens takes so many seconds, with no context.
      requests, draft: the same for a draft pass of so many requests.
      per_context: seconds that a context token adds to the target's pass.
      deepest: most drafts.
    """

    label: str
    measured: bool
    tokens: tuple[int, ...]
    verify: tuple[float, ...]
    requests: tuple[int, ...]
    draft: tuple[float, ...]
    per_context: float
    deepest: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def curves(device: Costs, deepest: int) -> Curves:
    """A cost model as the calculator knows it.

    Up to the largest batch a pass over so many tokens takes what plain decoding of so many requests does without their
    contexts; beyond it, what the tiers take there without their draft passes.
    """
    largest = device.largest or _GRID[-1]
    small = [n for n in _GRID if n <= largest]
    bare = lambda depth, batch, row: device.round(depth, batch, batch * (depth + 1), batch * row)
    context = max(0.0, bare(0, 1, _LONGER) - bare(0, 1, _CONTEXT)) / (_LONGER - _CONTEXT)
    usual = device.usual
    verify = {n: bare(0, n, usual) - n * usual * context for n in small}
    draft = {n: device.drafting(n, n * usual) for n in small}
    if device.largest is not None:
        for depth in range(1, deepest + 1):
            rest = bare(depth, small[-1], usual) - depth * draft[small[-1]] - small[-1] * usual * context
            verify[small[-1] * (depth + 1)] = rest
    rising, most = {}, 1e-9
    for n, seconds in sorted(verify.items()):
        rising[n] = most = max(most, seconds)
    return Curves(
        device.label, device.measured, tuple(rising), tuple(rising.values()), tuple(draft), tuple(draft.values()),
        context, deepest,
    )  # fmt: skip


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """By straight lines; beyond the ends the last one goes on."""
    if len(xs) == 1:
        return ys[0]
    at = 1
    while at < len(xs) - 1 and x > xs[at]:
        at += 1
    share = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] + share * (ys[at] - ys[at - 1])


def length(rate: float, depth: int) -> float:
    """Tokens a round and request, bonus included, when every draft is right with this chance."""
    return sum(rate**i for i in range(depth + 1))


def seconds(c: Curves, batch: int, context: float, depth: int, draft_cost: float | None = None) -> float:
    """Of a round.

    Args:
      context: tokens of each request. draft_cost: of a draft pass, as a share of a plain step; None: the device's.
    """
    verify = interpolate(c.tokens, c.verify, batch * (depth + 1)) + c.per_context * batch * context
    if not depth:
        return verify
    if draft_cost is None:
        return verify + depth * interpolate(c.requests, c.draft, batch)
    return verify + depth * draft_cost * seconds(c, batch, context, 0)


def speedup(c: Curves, batch: int, context: float, depth: int, rate: float, draft_cost: float | None = None) -> float:
    """Tokens a second over plain decoding's."""
    plain = seconds(c, batch, context, 0)
    return length(rate, depth) * plain / seconds(c, batch, context, depth, draft_cost)


def best_depth(c: Curves, batch: int, context: float, rate: float, draft_cost: float | None = None) -> int:
    """The depth with the greatest speed-up; 0 where drafting does not pay."""
    return max(range(c.deepest + 1), key=lambda d: speedup(c, batch, context, d, rate, draft_cost) if d else 1.0)


def break_even(c: Curves, batch: int, context: float, depth: int, draft_cost: float | None = None) -> float | None:
    """The least acceptance at which that depth pays; None where even 1 does not."""
    if depth < 1 or speedup(c, batch, context, depth, 1.0, draft_cost) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if speedup(c, batch, context, depth, middle, draft_cost) < 1:
            low = middle
        else:
            high = middle
    return high
