"""What is simulated, and what a simulation gave. Must not know how it runs, nor JAX."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxspec.bench.simulate.costs import Costs
from jaxspec.sizes import Sizes

#: Tokens of a page.
PAGE = 128


@dataclasses.dataclass(frozen=True)
class Batch:
    """What only the simulation knows of the rows of a round, for policies that may cheat.

    Attributes:
      bucket: the padded batch. context: committed tokens over all rows.
      alive_BD: the hidden chance that the first 1 to D drafts of each row are right.
    """

    bucket: int
    context: int
    alive_BD: np.ndarray


@dataclasses.dataclass(frozen=True)
class Served:
    """A request that ended. Times in seconds since the start."""

    arrival: float
    first: float
    finished: float
    tokens: int

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first."""
        return (self.finished - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def latency(self) -> float:
        return self.finished - self.arrival


@dataclasses.dataclass(frozen=True)
class Ran:
    """A round.

    Attributes:
      at: seconds since the start when it began; phase: how many phases of the texts began before.
      depth, tokens: what it drafted, and what it verified over the batch; None: every node.
      rows, bucket, seconds: its requests, the padded batch, what it took.
      gained: tokens it gave, those beyond a request's end included.
      value: tokens a second that it could expect; best: that the best fixed tier could. By the hidden chances.
      experts: distinct ones that it read of a layer; 0 of models without, and where nobody counted.
    """

    at: float
    phase: int
    depth: int
    tokens: int | None
    rows: int
    bucket: int
    seconds: float
    gained: int
    value: float
    best: float
    experts: float = 0.0


@dataclasses.dataclass
class Outcome:
    """What a simulation gave.

    Attributes:
      seconds: of a closed loop since all its places answered for the first time, else since the start.
      tokens: committed in them. served: requests that ended. unfinished: those under way at the end.
      rounds: in order. switches: rounds whose tier was another than the one before. preemptions: by lack of pages.
      controller: seconds of the processor that selection and observation took, of each round its share.
      predicted, actual: of drafts of packed rounds: the chance of being accepted that the policy's calibration gave
        them, and whether they would have been.
      expected, accepted: where the policy says what it expects, tokens a row that it expected and that came, summed.
      wall: seconds of the processor that the simulation took.
      refused: requests that did not fit.
    """

    seconds: float = 0.0
    tokens: int = 0
    served: list[Served] = dataclasses.field(default_factory=list)
    unfinished: int = 0
    rounds: list[Ran] = dataclasses.field(default_factory=list)
    switches: int = 0
    preemptions: int = 0
    controller: list[float] = dataclasses.field(default_factory=list)
    predicted: list[float] = dataclasses.field(default_factory=list)
    actual: list[bool] = dataclasses.field(default_factory=list)
    expected: float = 0.0
    accepted: float = 0.0
    wall: float = 0.0
    refused: int = 0


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is simulated.

    Attributes:
      costs: of rounds and prompts. depths: of tiers that exist, 0 among them. buckets: padded batch sizes.
      context: most tokens of prompt and outputs. pages: of the pool, 128 tokens each; None: enough.
      chunk: most prompt tokens between two rounds.
      noise: standard deviation of the seconds of rounds, in logarithm.
      rounds: of a dispatch, where every draft is verified. host: seconds that the host takes for a dispatch.

    Raises:
      ValueError: batches or depths that the costs do not tell of.
    """

    costs: Costs
    depths: tuple[int, ...]
    buckets: tuple[int, ...]
    context: int
    pages: int | None = None
    chunk: int = 1024
    noise: float = 0.0
    rounds: int = 1
    host: float = 0.0

    def __post_init__(self) -> None:
        for name, most, asked in (
            ("batches", self.costs.largest, self.buckets[-1]), ("depths", self.costs.deepest, self.depths[-1]),
        ):  # fmt: skip
            if most is not None and asked > most:
                raise ValueError(f"the profile ({self.costs.label}) knows {name} up to {most}, got {asked}")

    @property
    def sizes(self) -> Sizes:
        growth = self.depths[-1] + 1
        context = -(-self.context // PAGE) * PAGE
        a_row = -(-(context + growth) // PAGE)
        pages = a_row * self.buckets[-1] if self.pages is None else self.pages
        return Sizes(
            self.buckets[-1], pages, PAGE, a_row, self.depths[-1], context, min(self.chunk, context),
            max_num_batched_tokens=self.chunk, max_rounds=self.rounds,
        )  # fmt: skip
