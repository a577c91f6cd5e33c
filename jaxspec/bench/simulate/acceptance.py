"""Which drafts are right, and what a drafter says of them: simulated texts whose every token is as hard as it is.

Owns the processes (named kinds of text, mixtures, phases, recorded runs) and the drawing. A text's tokens are fixed by
the seed, so every policy meets the same ones. NumPy; must not know policies, costs or clocks.

A token of a text has a hidden chance to be drafted right: the logistic of a normal variable, of which the kind sets the
mean by draft position and `Reliability.spread` the width; one draw decides for all depths. The drafter's confidence is
that chance, seen through noise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxspec.adaptive.policy import RoundStats

#: Rates by draft position, each given that those before were accepted; the last one holds beyond. good and poor are a
#: draft head's on text that it knows and text that it does not.
KINDS: dict[str, tuple[float, ...]] = {
    "good": (0.88,),
    "fair": (0.7,),
    "poor": (0.45,),
    "bad": (0.2,),
}
#: Mean tokens a round by depth from 1, bonus included: DeepSeek-V4-Pro with DSpark, thinking off and on, as published
#: for simulated acceptance (InferenceX's golden curves). They fall at the end, since each is a head of its own.
GOLDEN = {
    "golden": (1.94, 2.81, 3.58, 4.17, 4.74, 5.12, 5.24, 4.95),
    "golden-thinking": (1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47),
}


#: How much of what a token has in common with those beside it the next one has.
_LASTS = 0.96


def rates_of(lengths: Sequence[float]) -> tuple[float, ...]:
    """Acceptance rates by position from mean tokens a round by depth, bonus included."""
    alive = [1.0, *(max(0.0, after - before) for before, after in zip([1.0, *lengths], lengths, strict=False))]
    return tuple(after / before if before else 0.0 for before, after in itertools.pairwise(alive))


for _name, _lengths in GOLDEN.items():
    KINDS[_name] = rates_of(_lengths)


@dataclasses.dataclass(frozen=True)
class Reliability:
    """How much tokens of one text differ, and how well a drafter knows it.

    Attributes:
      spread: standard deviation of a token's hidden chance, in logits.
      noise: of what the drafter sees of it, in logits, besides.
      slope, level: what it says is slope * logit + level: (1, 0) of a drafter that is right on average.
      streaks: share of the spread's variance that tokens side by side have in common, and others the less the further
        they are apart; real texts go on being easy or hard for some 20 tokens.

    Raises:
      ValueError: a negative spread or noise, a slope that is not positive, or a share that is none.
    """

    spread: float = 2.0
    noise: float = 1.0
    slope: float = 1.0
    level: float = 0.0
    streaks: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.spread < math.inf and 0 <= self.noise < math.inf and 0 < self.slope < math.inf):
            raise ValueError(f"spread and noise must be at least 0 and slope above 0, got {self}")
        if not 0 <= self.streaks <= 1:
            raise ValueError(f"streaks must lie in [0, 1], got {self.streaks}")


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of time with one mixture of texts.

    Attributes:
      seconds: how long; inf where nothing follows.
      mix: (kind, share).
    """

    seconds: float
    mix: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Process:
    """Texts over time; after the last phase the first one follows.

    Attributes:
      name: in words. kinds: rates by name. phases: at least one.
    """

    name: str
    kinds: Mapping[str, tuple[float, ...]]
    phases: tuple[Phase, ...]
    reliability: Reliability = Reliability()

    @property
    def changes(self) -> bool:
        return len(self.phases) > 1

    def phase_at(self, now: float) -> tuple[int, float]:
        """(how many phases began before the one at a time, when it ends)."""
        if not self.changes:
            return 0, math.inf
        whole = sum(phase.seconds for phase in self.phases)
        turns = int(now / whole)
        end, index = turns * whole, turns * len(self.phases)
        for phase in self.phases:
            end += phase.seconds
            if now < end:
                return index, end
            index += 1
        return index, end + self.phases[0].seconds

    def kind(self, phase: int, draw: float) -> str:
        """The kind of a text that draws this number of [0, 1)."""
        mix = self.phases[phase % len(self.phases)].mix
        left = draw * sum(share for _, share in mix)
        for name, share in mix:
            left -= share
            if left < 0:
                return name
        return mix[-1][0]


def parse(text: str, reliability: Reliability = Reliability()) -> Process:
    """A process from its description.

    "good", "0.8" (at every position), "0.9:0.8:0.7" (by position), "good*3+poor" (a mixture of requests),
    "good/poor@30" (phases of 30 seconds), or the path of a recorded JSONL.

    Raises:
      ValueError: what is none of these.
    """
    if text.endswith((".jsonl", ".json")):
        return recorded(text, reliability)
    body, _, every = text.partition("@")
    stretches = body.split("/")
    seconds = math.inf
    if len(stretches) > 1 or every:
        seconds = _number(text, every or "30", 0.0)
    kinds: dict[str, tuple[float, ...]] = {}
    phases = []
    for stretch in stretches:
        mix = []
        for part in stretch.split("+"):
            name, _, share = part.partition("*")
            kinds[name] = KINDS[name] if name in KINDS else _rates(text, name)
            mix.append((name, _number(text, share or "1", 0.0)))
        phases.append(Phase(seconds, tuple(mix)))
    return Process(text, kinds, tuple(phases), reliability)


def _rates(text: str, part: str) -> tuple[float, ...]:
    rates = tuple(_number(text, rate, -1e-9) for rate in part.split(":"))
    if max(rates) > 1:
        raise ValueError(f"acceptance {text!r}: rates lie in [0, 1], got {part!r}; kinds are {sorted(KINDS)}")
    return rates


def _number(text: str, part: str, above: float) -> float:
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if not above < value < math.inf:
        what = f"a kind of {sorted(KINDS)}, rates such as 0.8 or 0.9:0.8, mixtures a*2+b, phases a/b@30, or a .jsonl"
        raise ValueError(f"acceptance must be {what}, got {text!r} ({part!r})")
    return value


def recorded(path: str, reliability: Reliability, window: int = 100) -> Process:
    """The acceptance of a recorded run (a line of `RoundStats` a round), by windows of drafting rounds.

    What a round could not show (positions beyond its depth) is what the last position that some round showed had. Rows
    of a round count alike: what one request had of its own is lost.

    Raises:
      ValueError: an unreadable file, or one in which nothing was drafted.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        rounds = [RoundStats.from_json(line) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"acceptance {path!r} cannot be read as recorded rounds: {error!r}") from error
    drafted = [r for r in rounds if r.tier.depth and r.num_accepted]
    if not drafted:
        raise ValueError(f"acceptance {path!r} must hold a round that drafted, got {len(rounds)} rounds")
    usual = sum(r.seconds for r in rounds) / max(1, sum(r.seconds > 0 for r in rounds)) or 0.01
    kinds, phases = {}, []
    for first in range(0, len(drafted), window):
        part = drafted[first : first + window]
        name = f"rounds {first} to {first + len(part) - 1}"
        kinds[name] = _observed(part)
        seconds = usual * len(part) * len(rounds) / len(drafted)
        phases.append(Phase(seconds, ((name, 1.0),)))
    return Process(f"recorded {Path(path).name}", kinds, tuple(phases), reliability)


def _observed(rounds: Iterable[RoundStats]) -> tuple[float, ...]:
    tried: dict[int, int] = {}
    passed: dict[int, int] = {}
    for r in rounds:
        for row, accepted in enumerate(r.num_accepted):
            most = r.tier.depth if r.drafts is None else min(r.tier.depth, r.drafts.num_verified(row))
            for i in range(1, min(accepted + 1, most) + 1):
                tried[i] = tried.get(i, 0) + 1
                passed[i] = passed.get(i, 0) + (accepted >= i)
    return tuple((passed[i] + 0.5) / (tried[i] + 1) for i in sorted(tried)) or (0.5,)


@functools.lru_cache(maxsize=4096)
def level_for(rate: float, spread: float) -> float:
    """The mean logit at which chances of that spread are `rate` on average."""
    rate = min(1 - 1e-6, max(1e-6, rate))
    x = np.linspace(-5, 5, 201)
    weight = np.exp(-x * x / 2)
    weight /= weight.sum()
    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(weight @ _sigmoid(middle + spread * x)) < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))


def _lasting(rng: np.random.Generator) -> np.ndarray:
    """Normal variables of a text's tokens, each like those before it (an autoregression of the first order)."""
    new_L = rng.standard_normal(Tape.LENGTH) * math.sqrt(1 - _LASTS**2)
    out, value = np.empty(Tape.LENGTH), float(rng.standard_normal())
    for i, new in enumerate(new_L.tolist()):
        value = out[i] = _LASTS * value + new
    return out


class Tape:
    """Long texts, one of each kind of a process, of which requests are pieces.

    Args:
      process: whose kinds. seed: which texts. depth: most drafts.

    Attributes:
      kinds: names, in the order of the arrays' first axis.
      run_KL: behind each of L tokens, how many drafts in a row are right.
      alive_KLD: the hidden chance that the first 1 to D are.
      said_KLD: the drafter's confidence in each.
    """

    LENGTH = 1 << 15

    def __init__(self, process: Process, seed: int, depth: int) -> None:
        self.process, self.kinds = process, sorted(process.kinds)
        parts = [self._draw(process, seed, name, depth) for name in self.kinds]
        self.run_KL, self.alive_KLD, self.said_KLD = (np.stack(part) for part in zip(*parts, strict=True))

    def _draw(self, process: Process, seed: int, name: str, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{seed} {name}".encode())))
        at_LD = (np.arange(self.LENGTH)[:, None] + np.arange(depth)) % self.LENGTH
        r, rates = process.reliability, process.kinds[name]
        levels = np.asarray([level_for(rates[min(i, len(rates) - 1)], r.spread) for i in range(depth)])
        hidden_L = rng.standard_normal(self.LENGTH)
        if r.streaks:
            common_L = _lasting(np.random.Generator(np.random.PCG64(zlib.crc32(f"streaks {seed} {name}".encode()))))
            hidden_L = math.sqrt(1 - r.streaks) * hidden_L + math.sqrt(r.streaks) * common_L
        logit_LD = levels + r.spread * hidden_L[at_LD]
        chance_LD = _sigmoid(logit_LD)
        right_LD = rng.random(self.LENGTH)[at_LD] < chance_LD
        # Of what is seen through noise the best guess lies nearer to the mean.
        shrink = r.spread**2 / (r.spread**2 + r.noise**2) if r.spread else 0.0
        noise_LD = r.noise * rng.standard_normal(at_LD.shape)
        seen_LD = levels + shrink * (logit_LD - levels + noise_LD)
        said_LD = _sigmoid(r.slope * seen_LD / math.sqrt(1 + math.pi / 8 * r.spread**2 * (1 - shrink)) + r.level)
        alive_LD = np.cumprod(chance_LD, axis=1)
        return np.cumprod(right_LD, axis=1).sum(axis=1), alive_LD, said_LD

    def auc(self) -> float:
        """How well confidence tells right first drafts from wrong ones, over all kinds: 0.5 not at all, 1 always."""
        said, right = self.said_KLD[:, :, 0].ravel(), self.run_KL.ravel() >= 1
        hits, misses = int(right.sum()), int((~right).sum())
        if not hits or not misses:
            return math.nan
        ranks = np.empty(len(said))
        ranks[np.argsort(said, kind="stable")] = np.arange(1, len(said) + 1)
        return (float(ranks[right].sum()) - hits * (hits + 1) / 2) / (hits * misses)
