"""How a runner's executables come: before the first request or beside requests, each run once before it is offered.

Owns what is ready, and the timing of rounds. Must not know requests, nor how threads compile (`warmup`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from jaxspec.adaptive.cost import Costed
from jaxspec.models.base import TargetModel
from jaxspec.runtime.compile import SpecRuntimeState
from jaxspec.runtime.executables import ExecutableStore
from jaxspec.runtime.following import Calls, Following, Leading
from jaxspec.runtime.holding import Holding
from jaxspec.runtime.hosts import Hosts
from jaxspec.runtime.packing import Spending
from jaxspec.runtime.programs import Key, RoundKey
from jaxspec.runtime.repertoire import RunnerConfig
from jaxspec.runtime.timing import Trials
from jaxspec.runtime.warmup import Warmup, WarmupConfig
from jaxspec.speculation.drafter import Drafter, Remembering
from jaxspec.speculation.state import Geometry
from jaxspec.tier import Choice, Tier

#: Seconds after which an engine of one request loads what that can do without: most such requests are over then.
_LATER_SECONDS = 2.0


class Arriving(Holding):
    """What is held, and executables that come by and by.

    Args:
      warmup: how they come. The others: see Holding.

    Attributes:
      reachable, variants, budgets: see RunnerConfig.
      states: what each tier can run now, by tier.
    """

    def __init__(
        self, model: TargetModel, drafter: Drafter | None, draft_params: Any, geo: Geometry, config: RunnerConfig,
        warmup: WarmupConfig, mesh: Mesh | None = None, options: tuple[tuple[str, Any], ...] = (),
    ):  # fmt: skip
        super().__init__(model, drafter, draft_params, geo, config, mesh, options)
        self.reachable, self.variants, self.budgets = config.reachable, config.variants, config.budgets
        self._spend = Spending(self.put, geo.max_depth)
        self.states = {tier: SpecRuntimeState(tier, {}) for tier in self.reachable}
        self._trials = Trials(warmup.times, warmup.known)
        self._warm_up(warmup)

    def _warm_up(self, config: WarmupConfig) -> None:
        """Compiles everything, or what the first request needs."""
        keys = self._can.keys(catches_up=_lags(self.drafter), remembers=corpus_tokens(self.drafter) > 0)
        order = self._can.order(keys) if config.background else dict.fromkeys(keys, 0)
        store = self._store(config.cache)
        self._keeps = store is not None or bool(jax.config.values.get("jax_compilation_cache_dir"))
        compilations = self._setting.compilations(sorted(keys, key=order.__getitem__), store is not None)
        # An engine of one request at a time is built for a request that is there. What that drafts with is loaded
        # before it, and what else is kept later: beside it loading takes three times as long, and takes its time.
        alone = config.background and self._can.buckets == [1]
        stored = {c.key for c in compilations if c.fingerprint in store} if alone and store is not None else set()
        first = [key for key in keys if not order[key] or key in stored.intersection(self._can.first_keys)]
        compilations.sort(key=lambda compilation: compilation.key not in first)
        self._warmup = Warmup(compilations, len(first), store=store)
        # Elsewhere what runs would disturb a compiler that times what it compiles.
        at_once = jax.default_backend() == "cpu" and not config.background and not self._place.spans
        arrived = []
        wanted = self._warmup.wait(first)
        tell = config.progress if callable(config.progress) else lambda ready, total: None
        tell(0, self._warmup.total)
        hidden = None if config.progress is True else True  # None: where it is no terminal
        bar = tqdm(wanted, total=len(first), desc="compiling", disable=hidden, leave=False)
        try:
            for count, (key, executable) in enumerate(bar, start=1):
                tell(count, self._warmup.total)
                if at_once:
                    self._take_in(key, executable)
                else:
                    arrived.append((key, executable))
        except BaseException:
            self._warmup.stop()
            wanted.close()  # a traceback may keep it for long, and with it Python's garbage
            raise
        if config.background:
            weakref.finalize(self, self._warmup.stop)  # with its engine, or where none comes of it
        if self._place.spans:
            # What is run below is run by all processes together, and each has compiled in an order of its own.
            arrived.sort(key=lambda pair: keys.index(pair[0]))
        for key, executable in arrived:
            self._take_in(key, executable)
        while alone and self._trials.run_next(self):  # beside others that compile they would seem dear
            pass
        if config.background:
            self._warmup.give_way(_LATER_SECONDS if len(stored) == len(keys) else 0.0)

    def _store(self, directory: Path | None) -> ExecutableStore | None:
        if directory is None or self._place.spans:
            return None
        mesh = self._place.mesh
        return ExecutableStore(directory, jax.devices()[:1] if mesh is None else list(mesh.devices.flat))

    @property
    def num_executables(self) -> int:
        """Executables that there will be once all is warm."""
        return self._warmup.total

    @property
    def num_ready(self) -> int:
        """Executables that can run now."""
        return len(self._compiled)

    @property
    def costs(self) -> dict[Costed, float]:
        """Median seconds of each round that `advance` has timed."""
        return self._trials.costs

    @property
    def timed(self) -> bool:
        """Whether the seconds of a round that is dispatched next would be its own, if it is nothing but a round."""
        return not self._disturbed

    @property
    def warm(self) -> bool:
        """Whether everything is compiled and timed, or given up."""
        return self._trials.over and self._warmup.over

    @property
    def warmup_error(self) -> BaseException | None:
        """What ended the compiling before its time."""
        return self._warmup.error

    def attend(self, advance: Callable[[], bool | None]) -> None:
        """See Warmup.attend."""
        self._warmup.attend(advance)

    @property
    def times_again(self) -> bool:
        """Whether the next piece of warming up times a round whose cost is known by and large."""
        return self._trials.repeated

    @property
    def compiling(self) -> bool:
        """Whether executables are still to come that no earlier process has compiled."""
        return self._warmup.compiling

    def hurry_warmup(self) -> None:
        """What was to be loaded later is loaded now."""
        self._warmup.hurry()

    def stop_warmup(self) -> None:
        """Compiles nothing more after what is being compiled."""
        self._warmup.stop()

    def finish_warmup(self) -> None:
        """Compiles nothing more after what is being compiled and what the next process drafts with; waits for these.

        Where nothing is kept it waits for nothing.
        """
        if self._keeps:
            self._warmup.finish(self._can.first_keys)
        else:
            self._warmup.stop()

    def ready(self, tier: Tier, bucket: int, tokens: int | None = None) -> bool:
        """Whether a round of the tier can run at this padded batch size, packed where `tokens` are given."""
        keys = [] if tokens is None else self._can.packed_keys(tier, bucket, tokens)
        return (bucket, self.variants[0]) in self.states[tier].executables and self._compiled.keys() >= {*keys}

    def repeats(self, choice: Choice, bucket: int) -> bool:
        """Whether one dispatch can run several rounds of a choice at this padded batch size."""
        if choice.tokens is not None or bucket not in self._can.repeated:
            return False
        return self._compiled.keys() >= {*self._can.repeated_keys(choice.tier, bucket)}

    def largest_ready(self) -> int:
        """The largest padded batch size at which some tier can run."""
        return max(bucket for state in self.states.values() for bucket, _ in state.executables)

    def advance(self) -> bool:
        """One piece of warming up, beside live requests or without: takes in or times one executable.

        Returns:
          Whether there was something to do. Where that ended the timing of a round, `costs` has it.
        """
        if self._trials.run_next(self):
            self._disturbed = True
            return True
        arrival = self._warmup.take()
        if arrival is not None:
            self._take_in(*arrival)
            return True
        if not self._warmup.over:
            return False
        keys: list[Costed] = [(tier, bucket, None) for tier, at in self.states.items() for bucket, _ in at.executables]
        keys += [key for key in self._packed() if self.ready(*key)]
        return self._trials.finish(dict.fromkeys(keys))

    def _take_in(self, key: Key, executable: Any) -> None:
        """Runs an executable once, for no request, and offers it.

        The first run costs several others: CPUs choose how to multiply, GPUs load the program. No request shall pay.
        """
        self._run_once(key, executable)
        packed = [packed for packed in self._packed() if not self.ready(*packed)]
        self._compiled[key] = executable
        for tier, buckets in self.reachable.items():
            for bucket in buckets:
                if not self.ready(tier, bucket) and all(
                    k in self._compiled for k in self._can.round_keys(tier, bucket)
                ):
                    ready = {(bucket, s): self._compiled[RoundKey(tier, bucket, s)] for s in self.variants}
                    self.states[tier] = SpecRuntimeState(tier, {**self.states[tier].executables, **ready})
                    self._trials.arrived((tier, bucket, None))
        for late in packed:
            if self.ready(*late):
                self._trials.arrived(late)

    def _packed(self) -> list[Costed]:
        """Every packed round, as its cost is named."""
        return [(*pair, tokens) for pair, budgets in self.budgets.items() for tokens in budgets]

    def join(self, hosts: Hosts) -> None:
        """From now on what the first process calls is called in all of them; the others `follow`."""
        assert self.warm, "what is compiled later is not known to be there in the other processes"
        calls = Calls(self._setting, list(self._compiled))
        self._together = (Leading if hosts.leads else Following)(hosts, calls)

    def repeat(self, tier: Tier, bucket: int, batch: jax.Array, count: int, tokens: int | None = None) -> jax.Array:
        """Dispatches the first variant's round `count` times, for timing; returns the last packed result."""
        executable = self._compiled[RoundKey(tier, bucket, self.variants[0], tokens)]
        spend = self._spend(Choice(tier, tokens), bucket)
        packed = None
        for _ in range(count):
            self._state, packed, _ = executable(self._target, self._params_for(tier), self._state, batch, *spend)
        assert packed is not None
        return packed


def corpus_tokens(drafter: Drafter | None) -> int:
    """Room for other texts that a drafter keeps; 0: none."""
    return drafter.corpus_tokens if isinstance(drafter, Remembering) else 0


def _lags(drafter: Drafter | None) -> bool:
    return drafter is not None and drafter.lags
