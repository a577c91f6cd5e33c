"""Batches whose rows accept unlike each other, played against policies: packed rounds, labels, known costs.

Each row has a rate; a drafted token is accepted with a probability drawn around it (Beta), and the drafter's confidence
is that probability seen through noise and told too boldly. What a round does is what the device does: the likeliest
nodes of the batch under the choice's calibration. Goodput is in expectation, so that regret is nearly exact.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.adaptive.policy import BatchView, DraftLabels, RoundStats, TierPolicy
from jaxspec.bench.simulate.formulas import H200
from jaxspec.tier import PLAIN, Choice, Tier, as_choice

Cost = Callable[[Tier, int, int | None], float]


def h200(tier: Tier, batch: int, tokens: int | None = None) -> float:
    """Seconds of a round of an 8B on an H200."""
    return H200.round(tier.depth, batch, batch * tier.num_nodes if tokens is None else tokens, 0)


@dataclasses.dataclass
class Crowd:
    """The rows of a batch.

    Attributes:
      rates: mean acceptance of each row. spread: how alike a row's tokens are (Beta's concentration).
      blur: noise of the confidences in logits. boldness: what their logits are multiplied by.
    """

    rates: Sequence[float]
    spread: float = 3.0
    blur: float = 1.0
    boldness: float = 1.5

    def draft(self, chance: np.random.Generator, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities of acceptance and confidences, [B, depth]."""
        rate = np.asarray(self.rates)[:, None]
        p = chance.beta(self.spread * rate, self.spread * (1 - rate), (len(rate), depth)).clip(1e-3, 1 - 1e-3)
        z = np.log(p / (1 - p)) + chance.normal(0, self.blur, p.shape)
        return p, 1 / (1 + np.exp(-self.boldness * z))


def mixed(batch: int, good: float = 0.88, poor: float = 0.45, share: float = 0.5) -> Crowd:
    """A batch of good rows and poor ones."""
    count = round(batch * share)
    return Crowd([good] * count + [poor] * (batch - count))


def survivals(choice: Choice, confidence: np.ndarray) -> np.ndarray:
    """What the device believes, [B, D]."""
    inside = confidence.clip(1e-4, 1 - 1e-4)
    fit = np.tile(np.asarray([1.0, 0.0]), (confidence.shape[1], 1))
    for at, pair in enumerate(choice.calibration[: len(fit)]):
        fit[at] = pair
    return np.cumprod(1 / (1 + np.exp(-(fit[:, 0] * np.log(inside / (1 - inside)) + fit[:, 1]))), axis=1)


def admitted(choice: Choice, confidence: np.ndarray, bucket: int) -> np.ndarray:
    """How many drafts of each row are verified."""
    rows, depth = confidence.shape
    if choice.tokens is None:
        return np.full(rows, depth)
    worth = survivals(choice, confidence)
    level, row = np.tile(np.arange(depth), (rows, 1)), np.tile(np.arange(rows)[:, None], (1, depth))
    order = np.lexsort((row.ravel(), level.ravel(), -worth.ravel()))[: choice.tokens - bucket]
    return np.bincount(order // depth, minlength=rows)


@dataclasses.dataclass
class Played:
    """What a policy did.

    Attributes:
      choices: of each round. tokens, seconds: expected tokens and seconds of each.
    """

    choices: list[Choice] = dataclasses.field(default_factory=list)
    tokens: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def goodput(self, first: int = 0) -> float:
        """Tokens a second from a round on."""
        return sum(self.tokens[first:]) / sum(self.seconds[first:])

    def switches(self, first: int = 0) -> float:
        """Per 100 rounds, changes of the budget included."""
        kept = [choice[:2] for choice in self.choices[first:]]
        return 100 * sum(a != b for a, b in itertools.pairwise(kept)) / len(kept)


class Table:
    """A room of batches: plays policies in it.

    Args:
      bucket: padded batch size. cost: true seconds. late: rounds by which feedback is late.
      noise: spread of the log of measured seconds; None: rounds are not timed.
    """

    def __init__(self, bucket: int, cost: Cost = h200, late: int = 1, noise: float | None = None, seed: int = 0):
        self._bucket, self._cost, self._late, self._noise = bucket, cost, late, noise
        self._chance, self._pending = np.random.default_rng(seed), list[RoundStats]()

    def play(self, policy: TierPolicy, crowd: Crowd, rounds: int) -> Played:
        """Runs rounds of one crowd; feedback is a round late, and goes on over calls."""
        played = Played()
        for _ in range(rounds):
            choice = as_choice(policy.select(BatchView(len(crowd.rates), self._bucket)))
            stats, tokens = self._round(choice, crowd)
            played.choices.append(choice)
            played.tokens.append(tokens)
            played.seconds.append(self._cost(choice.tier, self._bucket, choice.tokens))
            self._pending.append(stats)
            while len(self._pending) > self._late:
                policy.observe(self._pending.pop(0))
        return played

    def _round(self, choice: Choice, crowd: Crowd) -> tuple[RoundStats, float]:
        tier, rows = choice.tier, len(crowd.rates)
        seconds = self._cost(tier, self._bucket, choice.tokens)
        timed = 0.0 if self._noise is None else seconds * math.exp(self._chance.normal(0, self._noise))
        if tier == PLAIN:
            return RoundStats(PLAIN, rows, self._bucket, (0,) * rows, timed), float(rows)
        p, confidence = crowd.draft(self._chance, tier.depth)
        length = admitted(choice, confidence, self._bucket)
        alive = np.cumprod(p, axis=1)
        verified = np.arange(tier.depth) < length[:, None]
        right = self._chance.random(p.shape) < p
        reached = np.cumprod(right, axis=1).astype(bool)
        accepted = (reached & verified).sum(axis=1)
        labels = None
        if choice.tokens is not None:
            # The parent of a node is reached: it is the root, or right and verified.
            known = np.concatenate([np.ones((rows, 1), bool), (reached & verified)[:, :-1]], axis=1)
            flags = (x.astype(np.uint8).tobytes() for x in (verified, known, right & known))
            depths = bytes([*range(1, tier.depth + 1)]) * rows
            confidences = array("f", confidence.astype(np.float32).tobytes())
            labels = DraftLabels(tier.depth, confidences, depths, *flags)
        stats = RoundStats(
            tier, rows, self._bucket, tuple(accepted.tolist()), timed, tokens=choice.tokens, drafts=labels
        )
        return stats, rows + float((alive * verified).sum())


class Fixed:
    """A policy of one choice."""

    def __init__(self, choice: Choice):
        self.choice, self.tiers = choice, (choice.tier,)

    def select(self, view: BatchView) -> Choice:
        return self.choice

    def observe(self, stats: RoundStats) -> None: ...

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None: ...

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        return buckets


def best_fixed(bucket: int, crowd: Crowd, tiers: Sequence[Tier], cost: Cost = h200, rounds: int = 200) -> float:
    """Tokens a second of the best tier that verifies everything."""
    return max(Table(bucket, cost).play(Fixed(Choice(tier)), crowd, rounds).goodput() for tier in tiers)
