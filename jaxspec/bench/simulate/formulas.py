"""Costs of rounds that follow from a model: AdaSpec's lines, a data sheet's limits, a formula of measured rounds.

Each fits `costs.Costs`, which says what its members mean. Must not know policies, requests or files, nor JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.adaptive.linear import LinearCost

#: Tokens of a row that a drafter catches up with at once (speculation.drafters.draft_cache.CATCH_UP).
CATCH_UP = 64


@dataclasses.dataclass(frozen=True)
class Linear:
    """AdaSpec's model: a line for a pass of the target, and one for each pass of the drafter.

    Attributes:
      overhead: seconds a round besides.
      expanded: whether each verified token reads its context for itself (batch expansion, equation 4).
    """

    label: str
    target: LinearCost
    draft: LinearCost
    overhead: float = 0.0
    expanded: bool = False
    measured: bool = False
    largest: int | None = None
    deepest: int | None = None
    usual: int = 0

    def round(self, depth: int, bucket: int, tokens: int, context: float) -> float:
        """See Costs."""
        drafting = self.draft.drafting(context, bucket, depth)
        return (
            self.overhead + drafting + self.target.verifying(context, bucket, tokens - bucket, expanded=self.expanded)
        )

    def drafting(self, bucket: int, context: float) -> float:
        """See Costs."""
        return self.draft.seconds(context, bucket)

    def catching_up(self, bucket: int, context: float) -> float:
        """See Costs."""
        return self.draft.seconds(context, bucket * CATCH_UP)

    def prefill(self, tokens: int, context: float) -> float:
        """See Costs."""
        return self.overhead + self.target.seconds(context, tokens)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least time that a chip's bandwidth and arithmetic allow; nothing was timed.

    Attributes:
      bandwidth: bytes a second. flops: a second. Of all chips together.
      weights, parameters: bytes that a pass reads, and parameters that a token is multiplied with.
      kv: bytes of keys and values a context token. draft_weights, draft_parameters, draft_kv: a draft pass's.
      reach: share of the limits that is reached.
      experts: bytes of all experts, besides `weights`. idle: share of them that one token does not use. A pass reads
        those that any of its tokens uses, if each chooses for itself and all are as likely.
    """

    label: str
    bandwidth: float
    flops: float
    weights: float = 15.01e9
    parameters: float = 7.5e9
    kv: float = 131072.0
    draft_weights: float = 0.8e9
    draft_parameters: float = 0.4e9
    draft_kv: float = 4096.0
    reach: float = 1.0
    experts: float = 0.0
    idle: float = 0.0
    measured: bool = False
    largest: int | None = None
    deepest: int | None = None
    usual: int = 0

    def _read(self, tokens: float) -> float:
        return self.weights + self.experts * (1 - self.idle**tokens)

    def _pass(self, weights: float, parameters: float, kv: float, tokens: float, context: float) -> float:
        memory = (weights + context * kv) / self.bandwidth
        return max(memory, 2 * parameters * tokens / self.flops) / self.reach

    def round(self, depth: int, bucket: int, tokens: int, context: float) -> float:
        """See Costs."""
        verifying = self._pass(self._read(tokens), self.parameters, self.kv, tokens, context)
        return depth * self.drafting(bucket, context) + verifying

    def drafting(self, bucket: int, context: float) -> float:
        """See Costs."""
        return self._pass(self.draft_weights, self.draft_parameters, self.draft_kv, bucket, context)

    def catching_up(self, bucket: int, context: float) -> float:
        """See Costs."""
        return self._pass(self.draft_weights, self.draft_parameters, self.draft_kv, bucket * CATCH_UP, context)

    def prefill(self, tokens: int, context: float) -> float:
        """See Costs."""
        return self._pass(self._read(tokens), self.parameters, self.kv, tokens, context)


@dataclasses.dataclass(frozen=True)
class Stairs:
    """Plain decoding by the batch, so much for each draft pass, and what each verified token adds by their number.

    Attributes:
      plain_ms: (batch, milliseconds of plain decoding), ascending. token_ms: (tokens of a round, milliseconds that each
        one beyond the batch adds). Between them straight lines.
      draft_ms: of a draft pass, at no rows and more for each. entry_ms: once a round that drafts, at 8 rows and more.
    """

    label: str
    plain_ms: tuple[tuple[int, float], ...]
    token_ms: tuple[tuple[int, float], ...]
    draft_ms: tuple[float, float]
    entry_ms: float
    measured: bool = False
    largest: int | None = 256
    deepest: int | None = 8
    usual: int = 0

    def _plain(self, batch: float) -> float:
        return _read(self.plain_ms, batch)

    def round(self, depth: int, bucket: int, tokens: int, context: float) -> float:
        """See Costs; contexts do not matter."""
        found = self._plain(bucket)
        if depth:
            found += depth * 1e3 * self.drafting(bucket, context) + self.entry_ms * min(1, bucket / 8)
            found += (tokens - bucket) * _read(self.token_ms, tokens)
        return found / 1e3

    def drafting(self, bucket: int, context: float) -> float:
        """See Costs."""
        fixed, row = self.draft_ms
        return (fixed + row * bucket) / 1e3

    def catching_up(self, bucket: int, context: float) -> float:
        """See Costs; as the share of a prompt's pass that a draft pass has of a plain step."""
        return 1e3 * self.drafting(1, context) / self._plain(1) * self.prefill(bucket * CATCH_UP, context)

    def prefill(self, tokens: int, context: float) -> float:
        """See Costs. By what a verified token adds where there are most."""
        return (self._plain(1) + tokens * self.token_ms[-1][1]) / 1e3


def _read(points: Sequence[tuple[int, float]], x: float) -> float:
    """By straight lines; beyond the ends what the last point says."""
    return float(np.interp(x, [at for at, _ in points], [value for _, value in points]))


#: Fitted to rounds of chains of 0, 1, 3 and 5 drafts at batch 1, 8, 32, 64 and 128, and of chain-5 packed with 1, 2 and
#: 3 drafts a row at 16 and 64 (docs/h200/rounds.json and packed.json hold those up to 32, and the packed ones).
H200 = Stairs(
    "formula of an H200's measured rounds: Llama-3.1-8B, bf16, EAGLE-3 head, context 1024; beyond batch 128 a guess",
    plain_ms=((1, 4.397), (8, 4.587), (16, 5.043), (32, 5.596), (64, 6.956), (128, 9.725), (256, 15.8)),
    token_ms=(
        (1, 0.006), (32, 0.012), (96, 0.0108), (192, 0.0098), (256, 0.015), (384, 0.0176), (512, 0.0186),
        (768, 0.0206), (2048, 0.0215),
    ),
    draft_ms=(0.21, 0.0015),
    entry_ms=0.25,
)  # fmt: skip
#: Fitted to the six rounds of docs/benchmarks/engine.md ("Overheads"), four of a dispatch.
H200_1B = Stairs(
    "formula of an H200's measured rounds: a model of 1B, bf16, chains of 0 and 3 at batch 1, 16 and 64",
    plain_ms=((1, 0.900), (16, 0.971), (64, 1.244)), token_ms=((4, 0.0057), (64, 0.0048), (256, 0.0025)),
    draft_ms=(0.025, 0.0003), entry_ms=0.0, largest=64, deepest=5,
)  # fmt: skip
