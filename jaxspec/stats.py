"""The engine's counters, as one snapshot. Standard library only."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class EngineStats:
    """Counters since the engine was built.

    Attributes:
      warmup_seconds: loading, compiling and timing until everything was ready, or so far.
      startup_seconds: of those, until the first request could be served.
      executables: how many there are once all is warm. executables_ready: those that can run now.
      compilations_after_warmup: outside the warm-up; must stay 0.
      rounds, dispatches, steps: decode rounds collected, the calls that they came from, engine steps.
      running, waiting: live requests with a slot, and without.
      active_tier: name of the latest round's tier; "" before the first.
      guided_rounds: rounds with a row whose text a grammar constrains; each is read before the next is dispatched.
      mixed_rounds: rounds that took chunks of prompts along in the same pass (EngineConfig.mixed_chunk).
      experts_touched: distinct experts that the target read in each round, summed over rounds and layers.
      starved_rounds: dispatches of rounds that had not returned when all work before them was finished: the device ran
        out of work, or would have in a moment. It says how often, not for how long; a profile does. Not looked at: the
        first round after the engine was idle, guided rounds, and one behind a prompt's chunk that is not its last.
      device_seconds: time the host waited for results. host_seconds: the rest of the steps' time.
      host_parts: the host's seconds by part of a step (jaxspec.laps.PARTS).
      switches: rounds whose tier differs from the one before. rounds_by_tier: {tier name: rounds}.
      draft_tensor_parallel: devices that share the drafter's own weights; 0 where it has none.
      drafter_version: of the drafter's weights: 1 at first, 0 where it has none. drafter_trial: whether another version
        takes turns with it (adaptive.versions). drafter_updates: versions that came. drafter_rollbacks: trials that
        ended with the older one.
      ring_rows: positions written to the feature ring's files. ring_lost: those that came faster than they could be.
      lossless: whether outputs have the target's distribution (False under typical verification).
    """

    warmup_seconds: float
    startup_seconds: float
    executables: int
    executables_ready: int
    compilations_after_warmup: int
    steps: int
    rounds: int
    starved_rounds: int
    device_seconds: float
    host_seconds: float
    switches: int
    rounds_by_tier: dict[str, int]
    preemptions: int
    prefix_hits: int
    prefix_queries: int
    free_pages: int
    cached_pages: int
    lossless: bool
    running: int
    waiting: int
    active_tier: str
    dispatches: int = 0
    guided_rounds: int = 0
    mixed_rounds: int = 0
    experts_touched: int = 0
    ring_rows: int = 0
    ring_lost: int = 0
    draft_tensor_parallel: int = 0
    drafter_version: int = 0
    drafter_trial: bool = False
    drafter_updates: int = 0
    drafter_rollbacks: int = 0
    host_parts: dict[str, float] = dataclasses.field(default_factory=dict)
