"""What the cost-aware policy keeps of one batch bucket between rounds, and how it weighs evidence and risks.

Data only. Must not know JAX.
"""

from __future__ import annotations

import dataclasses
import math

from jaxspec.adaptive.steady import Steady


@dataclasses.dataclass
class Bucket:
    """The choice in one bucket, and its probes. Arms are named by their index.

    Attributes:
      candidates: arms whose cost is known here, plain decoding first.
      rounds: that were decided. current: the arm in use; None before the first round.
      began: of them, those before it was last decided to draft, or not to; turns: how often that changed of late after
        it had held for long, so that texts or load must have changed, or acceptance did.
      lost: rounds' worth of goodput that staying with it is believed to have lost so far.
      unrest: how often the arm was changed of late: the more, the more must be lost before the next time.
      shown: requests in rounds that drafted, since acceptance was last seen to change.
      credit: seconds that probing may cost now. timed: whether a round's seconds are known.
      interval: rounds to wait between probes of acceptance, as long as they lose.
      pause: rounds to wait between looks at costs that are worth a round; less for those that are worth more.
      since_probe: rounds since the last probe of any kind. since_look: since the last look.
      waited: dispatches since the last probe began.
      since_whole: rounds of drafting since one of which everything was verified.
      probe: the arm of the probe whose results are awaited, and of how many dispatches. looks: further ones of it that
        are still to run. won: whether it emitted what it took.
      charge: seconds of the credit that each of them took. doubted: whether it is a second look.
      steady: whether most rounds need no thought.
    """

    candidates: tuple[int, ...]
    rounds: int = 0
    current: int | None = None
    began: int = 0
    turns: float = 0.0
    lost: float = 0.0
    unrest: float = 0.0
    shown: int = 0
    credit: float = 0.0
    timed: bool = False
    interval: float = 0.0
    pause: float = 10.0
    since_probe: int = 0
    waited: int = 0
    since_look: int = 0
    since_whole: int = 0
    probe: int | None = None
    looks: int = 0
    awaited: int = 0
    won: bool = False
    wins: int = 0
    charge: float = 0.0
    doubted: bool = False
    steady: Steady = dataclasses.field(default_factory=Steady)


@dataclasses.dataclass(frozen=True)
class GoodputParams:
    """How a GoodputPolicy weighs evidence and risks.

    Attributes:
      half_life: observed rows (one request in one drafting round) after which evidence counts half.
      prior_rate: acceptance assumed of each position before anything is known; optimistic, so that drafts are tried.
      margin: relative gain that a probe must promise.
      patience: rounds' worth of goodput that may be lost by staying before a switch: a large gain is taken at once, a
        small one when it lasts.
      horizon: rounds over which what a probe teaches of costs is believed to hold.
      probe_share: share of the time that probes may cost.
      probe_start: rounds' worth of the time that they may cost at once in a bucket that is new.
      probe_backoff: how far the interval between losing probes may grow quickly beyond what `probe_share` demands.
      refine_cost: correct the table by the measured seconds of rounds.

    Raises:
      ValueError: a parameter out of range.
    """

    half_life: float = 100.0
    prior_rate: float = 0.8
    margin: float = 0.03
    patience: float = 0.5
    horizon: float = 500.0
    probe_share: float = 0.02
    probe_start: float = 3.0
    probe_backoff: float = 2.0
    refine_cost: bool = True

    def __post_init__(self) -> None:
        ranges = {"half_life": (1, math.inf), "prior_rate": (0, 1), "margin": (0, 1), "patience": (0, math.inf),
                  "horizon": (0, math.inf), "probe_share": (0, 1), "probe_start": (0, math.inf),
                  "probe_backoff": (1, math.inf)}  # fmt: skip
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must lie between {least} and {most}, got {value!r}")
