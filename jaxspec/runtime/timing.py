"""How long rounds take that follow each other, timed beside a warm-up or all at once before the first request.

Owns the repeats and their medians. Must not know policies.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxspec.adaptive.cost import Costed, CostTable
from jaxspec.speculation.layouts import Batch
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import Tier

#: How often rounds are timed when they have come, and again when all have and nothing is compiled beside; how many each
#: time, between two more.
_FIRST_TRIALS, _FINAL_TRIALS, _IN_A_ROW = 1, 3, 2
#: Context tokens of each row at which rounds are timed at the start, as far as texts may be so long: at the one and at
#: the other, and what is between lies on a line.
CONTEXTS = (64, 1024)


class Runs(Protocol):
    """What is timed: a Runner, of which this is all that is needed."""

    geo: Geometry
    reachable: Mapping[Tier, tuple[int, ...]]
    budgets: Mapping[tuple[Tier, int], tuple[int, ...]]

    @property
    def state(self) -> DecodeState: ...
    @state.setter
    def state(self, state: DecodeState) -> None: ...

    def put(self, x: Any) -> jax.Array: ...
    def repeat(self, tier: Tier, bucket: int, batch: jax.Array, count: int, tokens: int | None = None) -> jax.Array: ...
    def reset(self) -> None: ...


class Trials:
    """Which rounds are to be timed next, and what the trials so far say.

    Args:
      wanted: False: no round is timed.
      known: seconds of rounds that need none, because they are known from before.

    Attributes:
      costs: median seconds of each round that can run and whose trials are done.
    """

    def __init__(self, wanted: bool, known: Mapping[Costed, float] | None = None):
        self.costs: dict[Costed, float] = {}
        self._wanted, self._final, self._known = wanted, not wanted, known or {}
        self._queue: deque[Costed] = deque()
        self._samples: dict[Costed, list[float]] = {}

    @property
    def over(self) -> bool:
        return self._final and not self._queue

    @property
    def repeated(self) -> bool:
        """Whether what is to be timed next was timed before."""
        return self._final and bool(self._queue)

    def arrived(self, key: Costed) -> None:
        """A round can run from now on."""
        if self._wanted and key in self._known:
            self.costs[key] = self._known[key]
        elif self._wanted:
            self._queue.extend([key] * _FIRST_TRIALS)

    def finish(self, keys: Collection[Costed]) -> bool:
        """Once nothing is compiled any more, all are timed afresh; False where nothing is left to be timed."""
        if self._final:
            return False
        self._final = True
        self._samples.clear()
        # Round by round, so that what disturbs one repeat disturbs every tier.
        self._queue.extend([key for key in keys if key not in self._known] * _FINAL_TRIALS)
        return bool(self._queue)

    def run_next(self, runner: Runs) -> bool:
        """Times a few rounds of no rows; False where none are to be timed."""
        if not self._queue:
            return False
        key = self._queue.popleft()
        samples = self._samples.setdefault(key, [])
        samples += _timed(runner, key, runner.put(Batch.of(runner.geo, key[1]).array))
        if key not in self._queue:
            self.costs[key] = statistics.median(samples)
        return True


def _timed(runner: Runs, key: Costed, batch: jax.Array) -> list[float]:
    """Seconds from the end of each of some rounds to the next, one always under way while the host waits for another.

    As while requests decode: the seconds of a round that the host waits for at once hold the call as well, which the
    device hides (5.2 ms for rounds of an 8B model on an H200 that came every 3.8).
    """
    tier, bucket, tokens = key
    jax.block_until_ready((runner.state, batch))
    ended, pending = [], runner.repeat(tier, bucket, batch, 1, tokens)
    for _ in range(_IN_A_ROW + 1):
        following = runner.repeat(tier, bucket, batch, 1, tokens)
        pending.block_until_ready()
        ended.append(time.perf_counter())
        pending = following
    pending.block_until_ready()  # which no call followed
    return [after - before for before, after in itertools.pairwise(ended)]


def back_to_back(
    runner: Runs, tier: Tier, bucket: int, rows: int, context: int, count: int, repeats: int
) -> tuple[float, float]:
    """(seconds of a round that follows others without a pause, seconds of the call alone); medians. Resets the state.

    Args:
      rows: of the bucket; the others are padding.
      context: committed tokens of each row, the mean over the rounds of a repeat.
      count: rounds of a repeat.
    """
    geo = runner.geo
    # No draft is accepted, which costs the same: so each round adds one token, whatever the text.
    batch = runner.put(Batch.of(geo, bucket, range(rows)).array)
    steady, alone = [], []
    for repeat in range(repeats + 1):
        _place(runner, max(1, context - count // 2))
        jax.block_until_ready((runner.state, batch))
        began = time.perf_counter()
        runner.repeat(tier, bucket, batch, 1)
        called = time.perf_counter()
        jax.block_until_ready(runner.state)
        again = time.perf_counter()
        runner.repeat(tier, bucket, batch, count).block_until_ready()
        if repeat:
            steady.append((time.perf_counter() - again) / count)
            alone.append(called - began)
    runner.reset()
    return statistics.median(steady), statistics.median(alone)


def _place(runner: Runs, context: int) -> None:
    """Gives every slot a text of so many tokens, each its own one, and pages for the longest."""
    geo, (_, vocab) = runner.geo, runner.state.sampling.counts_SV.shape
    texts = np.random.default_rng(0).integers(0, vocab, runner.state.tokens_SL.shape, np.int32)
    pages = np.arange(geo.slots * geo.pages_per_seq, dtype=np.int32).reshape(geo.slots, -1) % geo.num_pages
    length = runner.put(np.full((geo.slots,), context, np.int32))
    # Whatever requests had the slots before: these texts do not end.
    own = SamplingState.numbers()
    endless = {
        name: runner.put(np.full((geo.slots,), own[name].neutral, own[name].dtype))
        for name in ("ends_at_S", "eos_ends_S", "num_stops_S")
    }
    runner.state = dataclasses.replace(
        runner.state, table_SM=runner.put(pages), tokens_SL=runner.put(texts), length_S=length,
        over_S=runner.put(np.zeros((geo.slots,), bool)),
        sampling=dataclasses.replace(runner.state.sampling, **endless),
    )  # fmt: skip


def longest_context(geo: Geometry) -> int:
    """Context tokens of each row behind which there is room for the rounds that are timed."""
    return max(0, geo.tokens_per_seq - (_IN_A_ROW + 3) * (geo.max_depth + 1))


def measure(runner: Runs, repeats: int = 6, contexts: Sequence[int] = CONTEXTS) -> CostTable:
    """Times every round (greedy where compiled), packed ones too, a few times in all; resets the state.

    Args:
      contexts: committed tokens of each row while timing, one after the other; at most `longest_context`.
    """
    geo = runner.geo
    contexts = sorted({min(context, longest_context(geo)) for context in contexts})
    samples: dict[tuple[int, Costed], list[float]] = {}
    keys: list[Costed] = [(tier, bucket, None) for tier, buckets in runner.reachable.items() for bucket in buckets]
    keys += [(*pair, tokens) for pair, budgets in runner.budgets.items() for tokens in budgets]
    # The first repeat is for caches to fill.
    for repeat, context in zip(range(repeats + 1), itertools.cycle(contexts), strict=False):
        for key in keys:
            _place(runner, context)
            batch = runner.put(Batch.of(geo, key[1], range(key[1]), geo.max_depth).array)
            seconds = _timed(runner, key, batch)
            if repeat:
                samples.setdefault((context, key), []).extend(seconds)
    runner.reset()
    return CostTable.from_samples(samples)
