"""What the warm-up says that rounds take, on a clock and a device of the test's own."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest

from jaxspec.runtime import timing
from jaxspec.tier import PLAIN, Tier


@dataclasses.dataclass
class Device:
    """Runs rounds one after another while the host goes on. Milliseconds.

    Attributes:
      call: that the host needs for a call. tell: from a round's end until the host knows. rounds: of each tier.
    """

    call: float
    tell: float
    rounds: dict[Tier, float]
    now: float = 0.0
    free: float = 0.0
    geo: Any = None
    state: Any = 0

    def put(self, x: Any) -> Any:
        return x

    def repeat(self, tier: Tier, bucket: int, batch: Any, count: int, tokens: int | None = None) -> Any:
        assert count == 1
        self.now += self.call
        self.free = end = max(self.free, self.now) + self.rounds[tier]

        def wait() -> None:
            self.now = max(self.now, end + self.tell)

        return types.SimpleNamespace(block_until_ready=wait)


@pytest.mark.parametrize(("call", "tell", "expected"), [(1.0, 0.3, [4.0, 5.0]), (6.0, 0.3, [6.0, 6.0])])
def test_rounds_are_timed_as_they_follow_each_other(
    monkeypatch: pytest.MonkeyPatch, call: float, tell: float, expected: list[float]
):
    """What the device hides counts for nothing: an 8B model's rounds were told a third too dear. What it does not hide
    counts: a call that takes longer than its round.
    """
    device = Device(call, tell, {PLAIN: 4.0, Tier(3): 5.0})
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: device.now))
    monkeypatch.setattr(timing, "jax", types.SimpleNamespace(block_until_ready=lambda x: x))
    monkeypatch.setattr(timing, "Batch", types.SimpleNamespace(of=lambda *_: types.SimpleNamespace(array=0)))
    trials, keys = timing.Trials(True, {(Tier(2), 1, None): 7.0}), [(PLAIN, 1, None), (Tier(3), 1, None)]
    known = (Tier(2), 1, None)
    for key in (*keys, known):
        trials.arrived(key)
    while trials.run_next(device) or trials.finish([*keys, known]):  # type: ignore[arg-type]
        pass
    assert trials.over and trials.costs.pop(known) == 7.0, "what is known from before is not timed"
    assert list(trials.costs) == keys
    assert list(trials.costs.values()) == pytest.approx(expected, abs=tell)
