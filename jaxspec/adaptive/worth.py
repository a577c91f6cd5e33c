"""What a round of each arm is worth: the tokens that it is expected to bring, and how fast these come.

Owns how acceptance, budgets and the halves of a batch combine to tokens a second. Must not know which arm runs or is
tried, what was measured, nor JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxspec.adaptive.acceptance import AcceptanceModel, survival
from jaxspec.adaptive.arms import Arm
from jaxspec.adaptive.rows import Rows
from jaxspec.adaptive.yields import Yields, guess

#: Difference of the halves' acceptance below which a batch's requests are alike.
_ALIKE = 0.02
#: How much a budget is hoped to gain from confidences that nobody has seen for long (0: nothing, 1: all there is), and
#: how much of the difference from what was seen last.
_INFORMED, _RENEWED = 0.6, 0.3


class Worth:
    """Expected tokens of arms, which are named by their index.

    Args:
      arms: every arm of a policy.
      acceptance, yields: what is known of drafts, and of what budgets keep of them.
      rows: by bucket, how unlike its requests are.
    """

    def __init__(
        self, arms: Sequence[Arm], acceptance: AcceptanceModel, yields: Yields, rows: Mapping[int, Rows]
    ) -> None:
        self._arms, self._acceptance, self._yields, self._rows = list(arms), acceptance, yields, rows
        #: Of arms whose whole round is a chain that the model drafts, its depth; and whether it is verified whole.
        chains = [arm.tier.is_chain and not arm.tier.lookup for arm in arms]
        self._depths = [arm.tier.depth if chain else None for arm, chain in zip(arms, chains, strict=True)]
        self._whole = [arm.is_whole for arm in arms]

    def scores(self, bucket: int, costs: Sequence[float], current: int | None) -> tuple[list[float], list[float]]:
        """Of each arm: log of the tokens a second of a request, as far as they last (see `rows`), and `tokens`."""
        chains = self._acceptance.chain_tokens(bucket)
        tokens = self._every(bucket, chains, None)
        low, high = self._rows[bucket].halves
        last = tokens
        if current is not None and high - low > _ALIKE:
            last = self._lasting(bucket, tokens, current, low, high)
        log = math.log
        return [log(t) - cost for t, cost in zip(last, costs, strict=True)], tokens

    def hopes(self, bucket: int, rates: Sequence[float]) -> list[float]:
        """`tokens` of each arm if drafts were as good as these rates, and confidences told as much as can be hoped."""
        alive, chains = 1.0, [1.0]
        for rate in rates:
            alive *= rate
            chains.append(chains[-1] + alive)
        return self._every(bucket, chains, rates)

    def _every(self, bucket: int, chains: Sequence[float], rates: Sequence[float] | None) -> list[float]:
        """`tokens` of each arm, given those of whole chains by depth."""
        out: list[float] = []
        for i, (depth, whole) in enumerate(zip(self._depths, self._whole, strict=True)):
            if depth is None:
                out.append(self.tokens(i, bucket, rates))
            else:
                out.append(chains[depth] if whole else 1 + (chains[depth] - 1) * self._share(i, bucket, rates))
        return out

    def poorer(self, bucket: int, tokens: Sequence[float]) -> Sequence[float]:
        """Of each arm: the tokens that a request of the poorer half of the batch is expected to gain from one round.

        Args:
          tokens: of a mean request, see `scores`.
        """
        low, high = self._rows[bucket].halves
        return tokens if high - low <= _ALIKE else [poor for poor, _ in self._halves(bucket, tokens, low, high)]

    def _lasting(self, bucket: int, tokens: Sequence[float], current: int, low: float, high: float) -> list[float]:
        """Tokens a round of each arm in place of the current one, once the batch is what the arm makes of it."""
        halves = self._halves(bucket, tokens, low, high)
        poor, good = halves[current]
        return [2 * tokens[current] / (poor / p + good / g) for p, g in halves]

    def _halves(self, bucket: int, tokens: Sequence[float], low: float, high: float) -> list[tuple[float, float]]:
        """Tokens a round of each arm for a request of the poorer half, and of the better one."""
        alive, pooled, better, tilt = 1.0, 0.0, 0.0, [1.0]
        ratio = 2 * high / (low + high)
        other = 2 * low / (low + high)
        up = down = 1.0
        for rate in self._acceptance.rates(bucket):
            up, down, alive = up * ratio, down * other, alive * rate
            pooled += alive
            better += alive * up / ((up + down) / 2)
            tilt.append(better / pooled if pooled else 1.0)
        halves = []
        for i, (arm, mean) in enumerate(zip(self._arms, tokens, strict=True)):
            lean = None if arm.is_whole else self._yields.tilt(i, bucket)
            extra = (mean - 1) * (tilt[arm.tier.depth] if lean is None else lean)
            halves.append((max(1.0, 2 * mean - 1 - extra), 1 + extra))
        return halves

    def tokens(self, arm: int, bucket: int, rates: Sequence[float] | None = None) -> float:
        """Tokens that a request is expected to gain from one round, the bonus token included.

        Args:
          rates: to ask what if drafts were as good as that, and confidences told as much as can be hoped.
        """
        one = self._arms[arm]
        tokens = self._acceptance.tokens(one.tier, bucket, rates)
        return tokens if one.is_whole else 1 + (tokens - 1) * self._share(arm, bucket, rates)

    def _share(self, arm: int, bucket: int, rates: Sequence[float] | None) -> float:
        """The part of a whole round's accepted drafts that a packed arm keeps; see `tokens`."""
        one, seen = self._arms[arm], self._yields.share(arm, bucket)
        if rates is None and seen is not None:
            return seen
        alive = survival(one.tier, self._acceptance.rates(bucket) if rates is None else rates)
        # In levels of the tree, each as wide as the mean.
        drafts = (one.budget or 0.0) * one.tier.depth / (one.tier.num_nodes - 1)
        if rates is None or seen is None:
            return guess(alive, drafts, 0.0 if rates is None else _INFORMED)
        return seen + _RENEWED * (guess(alive, drafts, 1.0) - seen)
