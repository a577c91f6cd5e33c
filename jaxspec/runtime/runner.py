"""The runner: holds weights and DecodeState, turns plans into dispatches and results into numpy.

Must not know policies, stop conditions or text. One round may be in flight: `dispatch`
returns at once, and `collect` is the only call that waits.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxspec.adaptive.cost import Costed
from jaxspec.laps import WAIT, Laps
from jaxspec.models.base import TargetModel
from jaxspec.request import Request
from jaxspec.runtime.compile import SpecRuntimeState
from jaxspec.runtime.executables import ExecutableStore
from jaxspec.runtime.following import Calls, Following, Leading
from jaxspec.runtime.hosts import Hosts
from jaxspec.runtime.packing import Spending
from jaxspec.runtime.programs import (
    AdmitKey,
    CatchUpKey,
    DraftKey,
    ForwardKey,
    GuidedKey,
    Held,
    Key,
    LogprobsKey,
    RememberKey,
    RoundKey,
    RunnerConfig,
    Setting,
    SettleKey,
)
from jaxspec.runtime.prompts import ChunkCall, admission, bias_of
from jaxspec.runtime.results import Pending, Result
from jaxspec.runtime.sharding import Placement, abstract, put
from jaxspec.runtime.timing import Trials
from jaxspec.runtime.warmup import Warmup, WarmupConfig
from jaxspec.scheduling.lag import DraftLag
from jaxspec.scheduling.plan import DecodeRows, PrefillChunk
from jaxspec.scheduling.shapes import cover
from jaxspec.speculation.drafter import Drafter, Remembering
from jaxspec.speculation.layouts import Admission, Batch, Text
from jaxspec.speculation.ring import empty_ring
from jaxspec.speculation.round import RoundSpec
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import PLAIN, Choice, Tier


class Guide(Protocol):
    """What the rows of a round may say next, as int32 sets of bits over the vocabulary; -1 allows everything."""

    def ahead(self, bucket: int, depth: int) -> np.ndarray:
        """At each of the next positions, whatever will be drafted, [bucket, depth, W]."""
        ...

    def masks(self, tokens_BN: np.ndarray, parents_BN: np.ndarray) -> np.ndarray:
        """After each node of the rows' trees, [B, N, W]."""
        ...


class Runner:
    """Weights, state and executables of one engine.

    Args:
      model: the target.
      drafter: None where no tier drafts.
      draft_params: the drafter's parameters.
      config: what it can run.
      warmup: how the executables come.
      mesh: devices that share the weights and pools (runtime.sharding); None for the backend's first device alone.
      options: XLA's, for what they run (runtime.summing).

    Attributes:
      config: the target's.
      reachable, variants, budgets: see RunnerConfig.
      states: what each tier can run now, by tier.
      laps: where the host's time goes, from the parts of a round that are this class's.
    """

    def __init__(
        self, model: TargetModel, drafter: Drafter | None, draft_params: Any, geo: Geometry, config: RunnerConfig,
        warmup: WarmupConfig, mesh: Mesh | None = None, options: tuple[tuple[str, Any], ...] = (),
    ):  # fmt: skip
        graph, target = nnx.split(model)
        self.config = model.config
        self.geo, self.drafter = geo, drafter
        eos = tuple(sorted(config.eos))
        self.spec = RoundSpec(graph, model.config, geo, drafter, config.rejection, config.typical, eos)
        self._dtype: jnp.dtype = model.embedding[...].dtype
        self._place = Placement()
        if mesh is not None:
            self._place = Placement.of(mesh, target, draft_params, jax.eval_shape(self._empty_state), options)
            target = put(target, self._place.target)
            draft_params = put(draft_params, self._place.draft_params)
        self._trees = {
            Held.TARGET: jax.tree.structure(target),
            Held.DRAFT: jax.tree.structure(draft_params),
            Held.STATE: jax.tree.structure(jax.eval_shape(self._empty_state)),
        }
        self.target, self.draft_params = target, draft_params
        self.laps = Laps()
        self._can = config
        self._lag: DraftLag | None = None
        if drafter is not None and drafter.lags:
            self._lag = DraftLag(drafter.window, drafter.catch_up_tokens, geo.slots)
        self._corpus_tokens = drafter.corpus_tokens if isinstance(drafter, Remembering) else 0
        self.reachable, self.variants, self.budgets = config.reachable, config.variants, config.budgets
        words = -(-self.config.vocab_size // 32)
        anything = {rows: np.full((rows, words), -1, np.int32) for rows in config.admit_rows if config.guided}
        self._anything = {rows: self.put(array) for rows, array in anything.items()}
        self._spend = Spending(self.put, geo.max_depth)
        self._disturbed = False  # something else than rounds ran on the device since the last one
        self._zero_bias = self.put(np.zeros((1, self.config.vocab_size), np.float32))
        self.reset()
        self._compiled: dict[Key, Any] = {}
        self._together: Leading | Following | None = None
        self.states = {tier: SpecRuntimeState(tier, {}) for tier in self.reachable}
        self._trials = Trials(warmup.times)
        self._warm_up(warmup)

    def _empty_state(self) -> DecodeState:
        draft = () if self.drafter is None else self.drafter.init_state(self.geo)
        layers = () if self.drafter is None else self.drafter.aux_layers
        ring = empty_ring(self.config, self.geo, layers, self._dtype)
        return DecodeState.empty(self.config, self.geo, self._dtype, draft, ring)

    def fresh_state(self) -> DecodeState:
        """A state of no request."""
        if self._place.mesh is None:
            return self._empty_state()
        # As a compiled function each device makes its own part; no device ever holds a whole pool.
        return jax.jit(self._empty_state, out_shardings=self._place.state)()

    # What is held, as leaves; these are made of them, and may be set.

    @property
    def target(self) -> Any:
        """The target's parameters."""
        return self._trees[Held.TARGET].unflatten(self._target)

    @target.setter
    def target(self, target: Any) -> None:
        self._target = tuple(jax.tree.leaves(target))

    @property
    def draft_params(self) -> Any:
        """The drafter's parameters."""
        return self._trees[Held.DRAFT].unflatten(self._draft_params)

    @draft_params.setter
    def draft_params(self, draft_params: Any) -> None:
        self._draft_params = tuple(jax.tree.leaves(draft_params))

    @property
    def has_draft_params(self) -> bool:
        """Whether the drafter has any."""
        return bool(self._draft_params)

    def staged(self, draft_params: Any) -> tuple[jax.Array, ...]:
        """Other parameters of the drafter, on the device, for `use_drafter`. From any thread.

        Raises:
          ValueError: they differ in structure, shape or type, so that the executables cannot take them.
        """
        if (tree := jax.tree.structure(draft_params)) != self._trees[Held.DRAFT]:
            raise ValueError(f"the drafter's parameters are {self._trees[Held.DRAFT]}, got {tree}")
        for new, old in zip(leaves := jax.tree.leaves(draft_params), self._draft_params, strict=True):
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ValueError(f"a parameter is {old.dtype}{list(old.shape)}, got {new.dtype}{list(new.shape)}")
        return tuple(put(new, old.sharding) for new, old in zip(leaves, self._draft_params, strict=True))

    def use_drafter(self, staged: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """What is dispatched from now on drafts with these; returns those before. Rounds in flight keep theirs."""
        before, self._draft_params = self._draft_params, staged
        return before

    @property
    def state(self) -> DecodeState:
        """What lives on the device between rounds."""
        return self._trees[Held.STATE].unflatten(self._state)

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = tuple(jax.tree.leaves(state))

    def put(self, x: Any) -> jax.Array:
        """A host array on the device, or whole on every one."""
        # not jnp.asarray: that compiles a copy for every new shape.
        return put(x, self._place.replicated)

    # Warming up.

    def _warm_up(self, config: WarmupConfig) -> None:
        """Compiles everything, or what the first request needs."""
        place = self._place
        held = {
            Held.TARGET: abstract(self._target, _leaves(place.target)),
            Held.DRAFT: abstract(self._draft_params, _leaves(place.draft_params)),
            Held.STATE: abstract(self._state, _leaves(place.state)),
        }
        self._setting = Setting(self.spec, place, held, self._trees, self._dtype)
        keys = self._can.keys(catches_up=self._lag is not None, remembers=self._corpus_tokens > 0)
        order = self._can.order(keys) if config.background else dict.fromkeys(keys, 0)
        first = [key for key in keys if not order[key]]
        store = self._store(config.cache)
        compilations = self._setting.compilations(sorted(keys, key=order.__getitem__), store is not None)
        self._warmup = Warmup(compilations, len(first), store=store)
        # Elsewhere what runs would disturb a compiler that times what it compiles.
        at_once = jax.default_backend() == "cpu" and not config.background and not self._place.spans
        arrived = []
        wanted = self._warmup.wait(first)
        tell = config.progress if callable(config.progress) else lambda ready, total: None
        tell(0, self._warmup.total)
        bar = tqdm(wanted, total=len(first), desc="compiling", disable=config.progress is not True, leave=False)
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
            self._warmup.give_way()
        if self._place.spans:
            # What is run below is run by all processes together, and each has compiled in an order of its own.
            arrived.sort(key=lambda pair: keys.index(pair[0]))
        for key, executable in arrived:
            self._take_in(key, executable)

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

    def stop_warmup(self) -> None:
        """Compiles nothing more after what is being compiled."""
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

    def _run_once(self, key: Key, executable: Any) -> None:
        zeros = lambda x: put(np.zeros(x.shape, x.dtype), x.sharding)
        lowering = key.lowering(self._setting)

        def value(arg: Any) -> Any:
            if isinstance(arg, Held):
                return self._held(arg)
            return self.put(arg) if isinstance(arg, np.ndarray) else jax.tree.map(zeros, arg)

        out = executable(*map(value, lowering.args))
        if lowering.donated:
            # The state alone, or before other results.
            self._state = out if isinstance(out[0], jax.Array) else out[0]
        self._disturbed = True

    def reset(self) -> None:
        """Forgets every request."""
        self.state = self.fresh_state()

    def repeat(self, tier: Tier, bucket: int, batch: jax.Array, count: int, tokens: int | None = None) -> jax.Array:
        """Dispatches the first variant's round `count` times, for timing; returns the last packed result."""
        executable = self._compiled[RoundKey(tier, bucket, self.variants[0], tokens)]
        spend = self._spend(Choice(tier, tokens), bucket)
        packed = None
        for _ in range(count):
            self._state, packed, _ = executable(self._target, self._params_for(tier), self._state, batch, *spend)
        assert packed is not None
        return packed

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's weights that a step reads: all, but of an input embedding of its own only rows.

        As if every expert were touched.
        """
        total = sum(x.nbytes for x in self._target)
        embedding = self.config.vocab_size * self.config.hidden_size * self._dtype.itemsize
        return total if self.config.tie_word_embeddings else total - embedding

    def _params_for(self, tier: Tier) -> tuple[jax.Array, ...]:
        return self._draft_params if self.spec.takes_drafter(tier) else ()

    def _held(self, what: Held) -> tuple[jax.Array, ...]:
        return {Held.TARGET: self._target, Held.DRAFT: self._draft_params, Held.STATE: self._state}[what]

    # With other processes.

    def join(self, hosts: Hosts) -> None:
        """From now on what the first process calls is called in all of them; the others `follow`."""
        assert self.warm, "what is compiled later is not known to be there in the other processes"
        calls = Calls(self._setting, list(self._compiled))
        self._together = (Leading if hosts.leads else Following)(hosts, calls)

    def follow(self) -> None:
        """Calls what the first process calls; returns when that has closed its engine.

        Raises:
          HostLostError: it, or another process, is gone.
          ValueError: this process follows none.
        """
        if not isinstance(self._together, Following):
            raise ValueError("follow() is for the other processes of an engine that several share; this one leads")

        def keep(state: tuple[jax.Array, ...]) -> None:
            self._state = state

        self._together.run(self._held, self._compiled.__getitem__, keep)

    def leave(self) -> None:
        """Ends the engine in the processes that follow, if there are any."""
        if isinstance(self._together, Leading):
            self._together.hosts.close()

    def _call(self, key: Key, *args: Any) -> Any:
        """What an executable returns; it takes what it holds first, as its `Lowering` says."""
        executable = self._compiled[key]
        return executable(*args) if self._together is None else self._together.call(key, executable, args)

    # Dispatch.

    def _admit(self, chunks: Sequence[PrefillChunk]) -> None:
        """Uploads requests' rows: tokens, parameters and page tables."""
        vocab, eos = self.config.vocab_size, self._can.eos
        ready = [key for rows in self._can.admit_rows if (key := AdmitKey(rows, rows == 1)) in self._compiled]
        left = [chunk for chunk in chunks if not chunk.request.params.logit_bias]
        biased = [[chunk] for chunk in chunks if chunk.request.params.logit_bias]
        groups = []
        while left:
            key = next((key for key in ready if key.rows >= len(left)), ready[-1])
            groups.append((key, left[: key.rows], self._zero_bias if key.biased else None))
            left = left[key.rows :]
        groups += [(AdmitKey(), one, bias_of(one[0].request.params, vocab)) for one in biased]
        for key, some, bias in groups:
            rows = Admission.packed(self.geo, key.rows, [admission(chunk, eos, vocab) for chunk in some])
            self._state = self._call(key, self._state, rows, bias)

    def remember(self, tokens: Sequence[int]) -> None:
        """Puts a text into the drafter's corpus, in pieces that overlap where it is too long; rounds may be in flight.

        Raises:
          ValueError: the drafter keeps none.
        """
        if not self._corpus_tokens:
            raise ValueError("this drafter keeps no texts")
        # A match of the first tokens of a piece needs those before them.
        piece, overlap = min(self.geo.tokens_per_seq, self._corpus_tokens - 1), 3
        for start in range(0, max(1, len(tokens) - overlap), piece - overlap):
            text = Text.of(self.geo, tokens[start : start + piece]).array
            self._state = self._call(RememberKey(), self._state, text)
        self._disturbed = True

    def forget(self) -> None:
        """Empties the drafter's corpus, where it has one; rounds may be in flight."""
        if self._corpus_tokens:
            assert isinstance(self.drafter, Remembering)
            state = self.state
            self.state = dataclasses.replace(state, draft=self.drafter.forget(state.draft))

    def prefill(self, chunks: Sequence[PrefillChunk], allowed: Sequence[np.ndarray | None]) -> list[Pending]:
        """Dispatches a step's chunks; a Pending for each call that ends prompts, which holds their first tokens.

        Args:
          allowed: for each chunk what the token after it may be, as an int32 set of bits [W]; None: anything.
        """
        self._admit([chunk for chunk in chunks if chunk.is_first])
        needed = lambda shape: {self._can.prefill(shape), LogprobsKey(shape.rows, 1, 1)}
        ready = [shape for shape in self._can.prefill_shapes if self._compiled.keys() >= needed(shape)]
        masks = dict(zip((chunk.slot for chunk in chunks), allowed, strict=True))
        counts = [chunk.end - chunk.start for chunk in chunks]
        pending = []
        for shape, pieces in cover(counts, ready, self._can.prefill_overhead):
            call = ChunkCall.of(shape, pieces, chunks)
            unsampled = self._can.prefill(shape, samples=False)
            args = self._target, self._draft_params, self._state, call.array(self.geo)
            if not call.ending and unsampled in self._compiled:
                self._state = self._call(unsampled, *args, None)
                continue
            self._state, packed, kept = self._call(self._can.prefill(shape), *args, self._masks(call, masks))
            if call.ending:
                rows = [(chunk.request, chunk.request.epoch) for chunk in call.chunks[: call.ending]]
                pending.append(self._pending(rows, None, shape.rows, packed, kept, 1, sum(call.counts)))
        self._disturbed = True
        return pending

    def _masks(self, call: ChunkCall, allowed: Mapping[int, np.ndarray | None]) -> jax.Array | None:
        """What the tokens after a call's chunks may be, [B, W], by the chunks' slots."""
        if not self._can.guided:
            return None
        masks = [allowed[chunk.slot] for chunk in call.chunks[: call.ending]]
        if all(mask is None for mask in masks):
            return self._anything[call.shape.rows]
        array = np.full((call.shape.rows, -(-self.config.vocab_size // 32)), -1, np.int32)
        for row, mask in zip(array, masks, strict=False):
            row[:] = -1 if mask is None else mask
        return self.put(array)

    def dispatch(
        self, rows: DecodeRows, state: SpecRuntimeState, choice: Choice, bucket: int, guide: Guide | None = None,
        weights: Sequence[float] | None = None,
    ) -> Pending:  # fmt: skip
        """Dispatches rounds of the tier that `state` is bound to, `rows.rounds` of them, packed as is chosen.

        Args:
          weights: what a drafted token of each row is worth to a packed round; None: of all the same.
          guide: what the rows may say. Then the call waits for the drafts, and the round is neither timed nor packed.
        """
        tier, tokens = state.tier, choice.tokens if guide is None else None
        # The host's array as it is: the call uploads it sooner than a device_put before it would.
        caps = tier.depth if rows.caps_B is None else np.minimum(rows.caps_B, tier.depth)
        batch = Batch.of(self.geo, bucket, rows.slots_B, caps, rows.grants).array
        can = CatchUpKey(bucket) in self._compiled
        if self._lag is not None and self._lag.before_round(rows, tier.depth, can_catch_up=can, elsewhere=tier.lookup):
            self._state = self._call(CatchUpKey(bucket), self._draft_params, self._state, batch)
            self._disturbed = True
        self.laps.lap("batch array")
        if guide is None:
            sampled = False not in self.variants or bool(np.count_nonzero(rows.shaped_B))
            args = self._target, self._params_for(tier), self._state, batch, *self._spend(choice, bucket, weights)
            key = RoundKey(tier, bucket, sampled, tokens, rows.rounds)
            self._state, packed, kept = self._call(key, *args)
        else:
            packed, kept = self._guided_round(tier, bucket, batch, guide)
            self._disturbed = True
        pending = self._pending(rows, tier, bucket, packed, kept, tier.num_nodes, rows.context_tokens, tokens)
        self.laps.lap("call")
        return pending

    def _guided_round(
        self, tier: Tier, bucket: int, batch: np.ndarray, guide: Guide
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Dispatches a round's parts, the host's masks between them; (packed, what `logprobs_fn` reads)."""
        if tier.depth == 0:
            masks = self.put(guide.ahead(bucket, 1))
            args = self._target, self._params_for(tier), self._state, batch, masks
            self._state, packed, kept = self._call(GuidedKey(bucket), *args)
            return packed, kept
        ahead = self.put(guide.ahead(bucket, tier.depth))
        draft = DraftKey(tier, bucket)
        self._state, drafted, shown = self._call(draft, self._draft_params, self._state, batch, ahead)
        shown.copy_to_host_async()
        tree = drafted.tree
        forward = self._call(
            ForwardKey(tier.num_nodes, bucket), self._target, self._state, batch, tree.tokens_BN, tree.depths_BN,
            tree.ancestors_BNN,
        )  # fmt: skip
        tokens_parents = np.asarray(shown)  # waits for the drafts while the target runs
        masks = self.put(guide.masks(tokens_parents[:, 0], tokens_parents[:, 1]))
        settle, params = SettleKey(tier, bucket), self._params_for(PLAIN)
        self._state, packed, path = self._call(settle, params, self._state, batch, drafted, forward, masks)
        return packed, (forward.logits_BNV, path)

    def _pending(
        self, rows: Sequence[tuple[Request, int]] | DecodeRows, tier: Tier | None, bucket: int, packed: jax.Array,
        kept: Any, nodes: int, context: int, tokens: int | None = None,
    ) -> Pending:  # fmt: skip
        logprobs, rounds = None, rows.rounds if isinstance(rows, DecodeRows) else 1
        if kept is not None and _wants_logprobs(rows):
            logits, path = kept
            logprobs = self._call(LogprobsKey(bucket, nodes, path.shape[1], tokens), logits, path, packed)
            logprobs.copy_to_host_async()
        packed.copy_to_host_async()
        timed = tier is not None and not self._disturbed
        if tier is not None:
            self._disturbed = False
        return Pending(rows, tier, bucket, packed, logprobs, time.perf_counter(), context, timed, tokens, rounds)

    def collect(self, pending: Pending) -> Result:
        """Waits for a dispatch and unpacks its rows."""
        try:
            packed = np.asarray(pending.packed)
            logprobs = None if pending.logprobs is None else np.asarray(pending.logprobs)
        except Exception as error:
            if self._together is not None:
                self._together.hosts.blame(error)
            raise
        self.laps.lap(WAIT)
        tier = None if pending.tokens is None else pending.tier
        result = Result.of(packed, len(pending.rows), logprobs, tier)
        self.laps.lap("unpack")
        return result


def _leaves(shardings: Any) -> tuple[Any, ...] | None:
    return None if shardings is None else tuple(jax.tree.leaves(shardings))


def _wants_logprobs(rows: Sequence[tuple[Request, int]] | DecodeRows) -> bool:
    if isinstance(rows, DecodeRows):
        return bool(np.count_nonzero(rows.logprobs_B))
    return any(request.params.logprobs is not None for request, _ in rows)
