"""SGLang's acceptance-driven tier policy: configuration, batch-size slots and the moving average behind each decision.

Owns the rules of SGLang 0.5.23 (its JSON files work unchanged) and their adapter to `TierPolicy`. Looks at accepted
lengths only: must not know what a round costs (see `cost.payable`), nor JAX.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.tier import Tier

#: SGLang's built-in configuration.
DEFAULT_CONFIG: dict[str, Any] = {
    "1": {"candidate_steps": [1, 3, 5, 7], "up_hysteresis": 0.0, "down_hysteresis": -0.25},
    "8": {"candidate_steps": [0, 1, 3], "up_hysteresis": 0.0, "down_hysteresis": 0.0},
    "32": {"candidate_steps": [0, 1], "up_hysteresis": 0.0, "down_hysteresis": 0.0},
    "64": {"candidate_steps": [0], "up_hysteresis": 0.0, "down_hysteresis": 0.0},
}

#: SGLang's preset for strong drafts, or drafts whose quality varies much.
AGGRESSIVE_CONFIG: dict[str, Any] = {
    "up_hysteresis": 0.0,
    "down_hysteresis": -0.25,
    "1": {"candidate_steps": [1, 3, 7], "ceiling_coeff": 0},
    "8": {"candidate_steps": [1, 3, 7], "ceiling_coeff": 3.0},
    "64": {"candidate_steps": [1, 3], "ceiling_coeff": 1.67},
    "128": {"candidate_steps": [1, 3], "ceiling_coeff": 1.2},
}

#: The default of SGLang's earlier documentation.
CONSERVATIVE_CONFIG: dict[str, Any] = {
    "1": {"candidate_steps": [1, 3, 7]},
    "8": {"candidate_steps": [1, 3]},
    "32": {"candidate_steps": [1]},
}

PRESETS: dict[str, dict[str, Any]] = {
    "default": DEFAULT_CONFIG,
    "aggressive": AGGRESSIVE_CONFIG,
    "conservative": CONSERVATIVE_CONFIG,
}

#: Keys that tune a slot, with their defaults; legal at the top level (for all slots) and within a slot (which wins).
TUNING_DEFAULTS: dict[str, float] = {
    "ema_alpha": 0.2,
    "update_interval": 5,
    "warmup_batches": 10,
    "down_hysteresis": -0.25,
    "up_hysteresis": 0.0,
    "ceiling_coeff": 0,
}
_INTEGER_KEYS = {"update_interval": 1, "warmup_batches": 0}


def is_int(value: object) -> bool:
    """An int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def load_config(config: dict | str | os.PathLike | None) -> dict[str, Any]:
    """The validated configuration as a dict of its own.

    Args:
      config: a dict in SGLang's format, the path of such a JSON file, or None for `DEFAULT_CONFIG`.

    Raises:
      ValueError: an unreadable or malformed file (named), no slot, or a key or value that is not allowed; the message
        names the key, what was given and what is allowed.
    """
    source = "adaptive configuration"
    if config is None:
        config = DEFAULT_CONFIG
    elif isinstance(config, (str, os.PathLike)):
        source = f"adaptive configuration {os.fspath(config)!r}"
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{source} must be a JSON object (a dict), got {type(config).__name__}")

    slots: dict[int, str] = {}
    for key, value in config.items():
        if isinstance(key, str) and key.isascii() and key.isdigit():
            if len(key) > 9:
                raise ValueError(f"{source}: a slot's batch size has at most 9 digits, got {len(key)} ({key[:9]}...)")
            if int(key) in slots:
                raise ValueError(f"{source}: slots {slots[int(key)]!r} and {key!r} name the same batch size")
            slots[int(key)] = key
            _check_slot(f"{source}, slot {key!r}", value)
        elif key in TUNING_DEFAULTS:
            _check_tuning(source, key, value)
        else:
            raise ValueError(
                f"{source}: unknown key {key!r}; allowed are integer-string batch sizes and {sorted(TUNING_DEFAULTS)}"
            )
    if not slots:
        raise ValueError(
            f'{source} needs at least one integer-string batch size, as in {{"1": {{"candidate_steps": [1, 3]}}}}, '
            f"got keys {sorted(config)}"
        )
    return copy.deepcopy(config)


def _check_slot(where: str, slot: object) -> None:
    if not isinstance(slot, dict):
        raise ValueError(f"{where} must be an object with candidate_steps, got {slot!r}")
    steps = slot.get("candidate_steps")
    if not isinstance(steps, (list, tuple)) or not steps or not all(is_int(k) and k >= 0 for k in steps):
        raise ValueError(f"{where}: candidate_steps must be a non-empty list of ints of at least 0, got {steps!r}")
    for key, value in slot.items():
        if key in TUNING_DEFAULTS:
            _check_tuning(where, key, value)
        elif key != "candidate_steps":
            raise ValueError(
                f"{where}: unknown key {key!r}; allowed are {sorted([*TUNING_DEFAULTS, 'candidate_steps'])}"
            )


def _check_tuning(where: str, key: str, value: object) -> None:
    if key in _INTEGER_KEYS:
        least = _INTEGER_KEYS[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{where}: {key} must be an int of at least {least}, got {value!r}")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{where}: {key} must be a finite number, got {value!r}")
    if key == "ema_alpha" and not 0 < value <= 1:
        raise ValueError(f"{where}: ema_alpha must lie in (0, 1], got {value!r}")


@dataclasses.dataclass
class _Slot:
    """The state of one batch-size slot; the fields after `current` are the tuning keys, but for `ema` and `count`."""

    candidates: tuple[int, ...]
    current: int
    ema_alpha: float
    update_interval: int
    warmup_batches: int
    down_hysteresis: float
    up_hysteresis: float
    ceiling_coeff: float
    ema: float
    count: int = 0

    @classmethod
    def from_config(cls, tuning: Mapping[str, Any], steps: Sequence[int], initial: int | None) -> _Slot:
        candidates = tuple(sorted(set(steps)))
        current = initial if initial in candidates else candidates[len(candidates) // 2]
        assert current is not None
        values = {key: tuning.get(key, default) for key, default in TUNING_DEFAULTS.items()}
        return cls(candidates=candidates, current=current, ema=float(current - 1), **values)

    def update(self, accepted: Sequence[int]) -> bool:
        if not accepted:
            return False
        if self.current > 0:
            self.ema = (1 - self.ema_alpha) * self.ema + self.ema_alpha * (sum(accepted) / len(accepted))
        self.count += 1
        decisions = self.count - self.warmup_batches
        if decisions <= 0 or decisions % self.update_interval:
            return False
        target = self._next_step()
        changed = target != self.current
        self.current = target
        return changed

    def _next_step(self) -> int:
        steps, old = self.candidates, self.candidates.index(self.current)
        index = old
        if self.current == 0:
            target = steps[min(index + 1, len(steps) - 1)]
            if target > 0 and self.ema < 0:
                self.ema = float(target - 1)
            return target
        while index > 0:
            below = steps[index - 1]
            if self.ema > (below - 0.5 if below else 0.5) + self.down_hysteresis:
                break
            index -= 1
        if index == old:
            while index + 1 < len(steps) and self.ema > steps[index] - 0.5 + self.up_hysteresis:
                index += 1
        if self.ceiling_coeff > 0:
            ceiling = max(1, math.ceil(self.ema * self.ceiling_coeff))
            if ceiling < steps[index] <= self.current:
                while index > 0 and steps[index] > ceiling:
                    index -= 1
        return steps[index]


class AdaptiveSpeculativeParams:
    """SGLang's adaptive step counts: one moving average of accepted drafts for each batch-size slot.

    A batch is padded up to the smallest bucket that holds it (one above the largest bucket stays as it is), then
    belongs to the slot with the largest key not above it (below the first key: to the first). Slots keep their own
    average and count, whatever other slots do in between.

    Args:
      config: a dict in SGLang's format, the path of such a JSON file, or None for `DEFAULT_CONFIG`.
      initial_steps: the step that a slot starts with where it is among its candidates; else, and for None, the slot
        starts with `candidates[len // 2]`.
      buckets: compiled batch sizes; None means that batches are not padded.

    Raises:
      ValueError: a malformed configuration or file, an `initial_steps` that no slot has, or malformed buckets.
    """

    def __init__(
        self,
        config: dict | str | os.PathLike | None = None,
        initial_steps: int | None = None,
        buckets: Sequence[int] | None = None,
    ) -> None:
        values = load_config(config)
        slots = {int(key): key for key in values if key.isdigit()}
        union = sorted({step for key in slots.values() for step in values[key]["candidate_steps"]})
        if initial_steps is not None and not (is_int(initial_steps) and initial_steps in union):
            raise ValueError(f"initial_steps must be one of the candidate steps {union}, got {initial_steps!r}")
        if buckets is not None and (not buckets or not all(is_int(b) and b > 0 for b in buckets)):
            raise ValueError(f"buckets must be a non-empty sequence of ints of at least 1, got {list(buckets)!r}")
        self.candidate_steps: tuple[int, ...] = tuple(union)
        self.buckets: tuple[int, ...] = tuple(sorted(set(buckets or ())))
        self._keys = sorted(slots)
        self._slots = {
            size: _Slot.from_config({**values, **values[key]}, values[key]["candidate_steps"], initial_steps)
            for size, key in slots.items()
        }

    def steps_for(self, batch_size: int) -> int:
        """Draft steps of the next round at this batch size; 0 means plain decoding."""
        return self._route(batch_size).current

    def update(self, accepted: Sequence[int], batch_size: int) -> bool:
        """Feeds one round that ran at `steps_for(batch_size)`.

        Args:
          accepted: accepted drafts of each request, the bonus token excluded; an empty one counts for nothing.
          batch_size: the batch size that the round was routed by.

        Returns:
          True if the slot's step changed.
        """
        return self._route(batch_size).update(accepted)

    def ema_for(self, batch_size: int) -> float:
        """Moving average of accepted drafts a request in this batch size's slot; -1 where nothing was drafted yet."""
        return self._route(batch_size).ema

    def candidates_for(self, batch_size: int) -> tuple[int, ...]:
        """Steps that `steps_for` can return at this batch size, ascending."""
        return self._route(batch_size).candidates

    def buckets_for_step(self, step: int) -> tuple[int, ...]:
        """Buckets whose slot has `step` among its candidates: only these need its executable. Empty without buckets."""
        return tuple(b for b in self.buckets if step in self.candidates_for(b))

    def _route(self, batch_size: int) -> _Slot:
        at = bisect.bisect_left(self.buckets, batch_size)
        padded = self.buckets[at] if at < len(self.buckets) else batch_size
        return self._slots[slot_key(self._keys, padded)]


def slot_key(keys: Sequence[int], padded_size: int) -> int:
    """Of the ascending `keys`, the slot that a padded batch belongs to."""
    return keys[max(0, bisect.bisect_right(keys, padded_size) - 1)]


class EmaPolicy:
    """`AdaptiveSpeculativeParams` as a `TierPolicy`.

    Args:
      params: the slots and their averages; the policy owns them from here on.
      tiers: the tier that each candidate step runs, for trees; None runs the chain of that depth.

    Raises:
      ValueError: a candidate step without a tier, or a tier whose depth is not its step.
    """

    def __init__(self, params: AdaptiveSpeculativeParams, tiers: Mapping[int, Tier] | None = None) -> None:
        if tiers is None:
            tiers = {step: Tier(step) for step in params.candidate_steps}
        missing = [step for step in params.candidate_steps if step not in tiers]
        if missing:
            raise ValueError(f"tiers has no tier for the candidate steps {missing}, only for {sorted(tiers)}")
        for step in params.candidate_steps:
            if tiers[step].depth != step:
                raise ValueError(
                    f"tiers[{step}] must have depth {step}, got {tiers[step]} of depth {tiers[step].depth}"
                )
        self.params = params
        self._tier_of = {step: tiers[step] for step in params.candidate_steps}
        # With buckets given, slots that no bucket is routed to are out of reach, and so are their steps.
        reach = [s for s in params.candidate_steps if not params.buckets or params.buckets_for_step(s)]
        self.tiers: tuple[Tier, ...] = tuple(self._tier_of[step] for step in reach)

    def select(self, view: BatchView) -> Tier:
        """The current tier of the slot that the round's bucket belongs to."""
        return self._tier_of[self.params.steps_for(view.bucket)]

    def observe(self, stats: RoundStats) -> None:
        """Credits a round to its slot, unless the slot has left that tier since: it says nothing of the new one."""
        if stats.tier == self._tier_of[self.params.steps_for(stats.bucket)]:
            # Plain rounds accept nothing but must count, or a slot at step 0 would stay there.
            accepted = stats.num_accepted or (0,) * (stats.batch_size if stats.tier.depth == 0 else 0)
            self.params.update(accepted, stats.bucket)

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        """Nothing to learn: SGLang's rule does not look at costs."""

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `buckets` whose slot has the tier's step among its candidates."""
        if self._tier_of.get(tier.depth) != tier:
            return ()
        return tuple(b for b in buckets if tier.depth in self.params.candidates_for(b))
