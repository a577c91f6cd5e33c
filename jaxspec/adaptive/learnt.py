"""What a policy has learnt, in a file: for the next start of the same engine on the same device.

Owns the format, what is refused, and when files are written. Costs and acceptance are estimates, and those of a file
are older ones: a policy takes them for what it would else begin with, and rounds overrule them. Must not know engines,
nor JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from jaxspec.adaptive.cost import Costed, CostTable
from jaxspec.tier import Tier

FORMAT = "jaxspec-learnt-1"
#: Largest file that is read, in bytes; a policy with 12 buckets and 20 arms writes a twentieth of it.
_LARGEST = 1 << 20
#: Least seconds between two writings.
_EVERY = 60.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Learnt:
    """Estimates of a policy.

    Attributes:
      identity: of the engine that they are of; another's are refused.
      seconds: of rounds, and the standard deviation of the logarithm of each relative to the bucket's best known one's.
      rates: by bucket, acceptance of each draft position given that those before were accepted.
      means: accepted drafts of a row, by tier and bucket, of tiers whose own mean counts (trees, look-ups).
      start: acceptance of a first draft where no bucket is known.
      pauses: by bucket, rounds between probes of acceptance, and between looks at costs.
      shares: of a packed round's key, the part of the accepted drafts that its budget keeps, and its tilt.
      curves: slope and level of each draft position's calibration.

    Raises:
      ValueError: a number out of its range.
    """

    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: Mapping[Costed, tuple[float, float]] = dataclasses.field(default_factory=dict)
    rates: Mapping[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    means: Mapping[tuple[Tier, int], float] = dataclasses.field(default_factory=dict)
    start: float | None = None
    pauses: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    shares: Mapping[Costed, tuple[float, float]] = dataclasses.field(default_factory=dict)
    curves: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        CostTable({key: seconds for key, (seconds, _) in self.seconds.items()})
        far = math.inf
        for name, values, low, high in (
            ("error", [error for _, error in self.seconds.values()], 0.0, 10.0),
            ("rate", [rate for rates in self.rates.values() for rate in rates], 0.0, 1.0),
            ("accepted", [*self.means.values()], 0.0, 4096.0),
            ("start", [] if self.start is None else [self.start], 0.0, 1.0),
            ("pause", [x for pair in self.pauses.values() for x in pair], 0.0, 1e6),
            ("share", [share for share, _ in self.shares.values()], 0.0, 1.0),
            ("tilt", [tilt for _, tilt in self.shares.values()], 0.0, 2.0),
            ("slope", [slope for slope, _ in self.curves], 0.0, 1e3),
            ("level", [level for _, level in self.curves], -1e3, 1e3),
        ):
            for value in values:
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not number or not low <= value <= high or abs(value) == far:
                    raise ValueError(f"{name} must lie between {low:g} and {high:g}, got {value!r}")
        for bucket in [*self.rates, *self.pauses, *(b for _, b in self.means)]:
            if not isinstance(bucket, int) or isinstance(bucket, bool) or bucket < 1:
                raise ValueError(f"a bucket must be an int of at least 1, got {bucket!r}")

    def to_json(self) -> str:
        """One JSON object."""
        costed = lambda key: {"tier": key[0].row, "bucket": key[1], "tokens": key[2]}
        return json.dumps({
            "format": FORMAT,
            "identity": dict(self.identity),
            "seconds": [costed(key) | {"values": pair} for key, pair in self.seconds.items()],
            "rates": [{"bucket": bucket, "values": rates} for bucket, rates in self.rates.items()],
            "means": [{"tier": t.row, "bucket": b, "value": mean} for (t, b), mean in self.means.items()],
            "start": self.start,
            "pauses": [{"bucket": bucket, "values": pair} for bucket, pair in self.pauses.items()],
            "shares": [costed(key) | {"values": pair} for key, pair in self.shares.items()],
            "curves": [list(curve) for curve in self.curves],
        })  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`; ValueError for anything else."""
        try:
            data: Any = json.loads(text)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                found = data.get("format") if isinstance(data, dict) else type(data).__name__
                raise ValueError(f"its format must be {FORMAT!r}, got {found!r}")
            if not all(isinstance(name, str) and isinstance(x, str) for name, x in data["identity"].items()):
                raise ValueError(f"identity must map names to texts, got {data['identity']!r}")
            costed = lambda row: (Tier(*row["tier"]), row["bucket"], row["tokens"])
            return cls(
                data["identity"],
                {costed(row): _pair(row["values"]) for row in data["seconds"]},
                {row["bucket"]: tuple(row["values"]) for row in data["rates"]},
                {(Tier(*row["tier"]), row["bucket"]): row["value"] for row in data["means"]},
                data["start"],
                {row["bucket"]: _pair(row["values"]) for row in data["pauses"]},
                {costed(row): _pair(row["values"]) for row in data["shares"]},
                tuple(_pair(curve) for curve in data["curves"]),
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it lacks or confuses a field: {error!r}") from error


def _pair(values: Sequence[Any]) -> tuple[Any, Any]:
    first, second = values
    return first, second


def digest(directory: Path | None) -> str:
    """What tells one checkpoint from another without reading its weights: names, sizes and times of its files."""
    if directory is None:
        return "none"
    files = [(p.name, p.stat()) for p in sorted(directory.iterdir()) if p.suffix in (".safetensors", ".json")]
    told = json.dumps([(name, info.st_size, info.st_mtime_ns) for name, info in files])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@runtime_checkable
class Learns(Protocol):
    """A policy whose estimates outlive it."""

    def learnt(self) -> Learnt:
        """What it has learnt so far."""
        ...

    def recall(self, learnt: Learnt) -> None:
        """Before its first round: takes what another one had learnt for what it would else begin with."""
        ...


class Keeper:
    """One engine's file.

    Args:
      directory: made where it is missing. The file's name there is that of the identity.
      identity: what the estimates depend on, as texts: device, model, drafter and their versions.
      clock: seconds.
    """

    def __init__(
        self, directory: Path, identity: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._identity, self._clock = dict(identity), clock
        told = json.dumps(sorted(self._identity.items()))
        self.path = directory / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.json"
        self._written, self._told = clock(), ""

    def recall(self, policy: object) -> bool:
        """Gives a policy what an earlier one had learnt, if there is any; whether it did."""
        learnt = self.read() if isinstance(policy, Learns) else None
        if learnt is None or not isinstance(policy, Learns):
            return False
        policy.recall(learnt)
        return True

    def read(self) -> Learnt | None:
        """What was kept; None where nothing was.

        A file that is broken, or another engine's, is said to be so and left alone.
        """
        try:
            with self.path.open(encoding="utf-8") as file:
                text = file.read(_LARGEST + 1)
            if len(text) > _LARGEST:
                raise ValueError(f"it must have at most {_LARGEST} characters")
            learnt = Learnt.from_json(text)
            for name in sorted({*self._identity, *learnt.identity}):
                mine, its = self._identity.get(name), learnt.identity.get(name)
                if mine != its:
                    raise ValueError(f"it is of {name} {its!r}, and this engine has {mine!r}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if self._told != str(error):  # one start asks twice
                _log.warning("what was learnt before (%s) is not used: %s", self.path, error)
            self._told = str(error)
            return None
        return learnt

    def keep(self, policy: object, *, at_once: bool = False) -> None:
        """Writes what a policy has learnt, once a minute at most unless at once. What fails is said, and no more."""
        now = self._clock()
        if not isinstance(policy, Learns) or (now - self._written < _EVERY and not at_once):
            return
        self._written = now
        learnt = policy.learnt()
        if not learnt.seconds:
            return  # nothing that a start could not find out as well
        partial: Path | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = dataclasses.replace(learnt, identity=self._identity).to_json()
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, encoding="utf-8", delete=False) as file:
                partial = Path(file.name)
                file.write(text)
            partial.replace(self.path)
        except OSError as error:
            if partial is not None:
                partial.unlink(missing_ok=True)
            _log.warning("what was learnt is not kept: %s", error)
